"""The one error class for what a user can do wrong, and what its messages are put together from."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    M = TypeVar("M", bound=BaseModel)

LONGEST = 1000
"""Longer messages quote something endless: their middle is left out."""


class BuffetError(Exception):
    """A request that cannot be carried out.

    The message says, in one line, what is wrong, where, what was found and how to fix it. The command
    line prints it and exits with code 2; library users may catch it.
    """

    def __init__(self, message: str) -> None:
        half = LONGEST // 2 - 2
        super().__init__(message if len(message) <= LONGEST else f"{message[:half]} … {message[-half:]}")


def one_line(value: object, limit: int = 300) -> str:
    """The text without line breaks, cut where it is too long to be read."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def show(value: object) -> str:
    """A value as a message quotes it."""
    return one_line(one_line(repr(value)), 60)


def optional(module: str, extra: str, purpose: str) -> Any:
    """A package that buffet can do without, imported; if it is missing, the error says how to install it."""
    try:
        return import_module(module)
    except ImportError:
        raise BuffetError(f"{purpose}: pip install 'buffet[{extra}]'") from None


def explain(error: ValidationError) -> str:
    """The first complaint of a pydantic validation, in one line: which value, what it was, what is wrong."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("constrained"))
    if first["type"] == "missing":
        return f"{key} is missing"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{key} is {show(first['input'])}: {message}"


def validated(kind: type[M], values: Mapping[str, Any], where: str) -> M:
    """A `kind` of these values, or a `BuffetError` that begins with where they come from."""
    from pydantic import ValidationError  # a fifth of a second that most commands do without

    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise BuffetError(f"{where}: {explain(error)}") from None
