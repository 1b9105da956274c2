"""Fields of a JSON document, read with suspicion: a value of the wrong kind is rejected, with its place."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from buffet_checker.errors import RejectedError

LARGEST = 1e100
"""No number of a certificate may be larger: far beyond any proof, and far from overflow."""


def mapping(raw: Any, where: str, needed: Set[str], optional: Set[str] = frozenset()) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise RejectedError(f"{where} is no object")
    if missing := needed - raw.keys():
        raise RejectedError(f"{where} has no {min(missing)}")
    if extra := raw.keys() - needed - optional:
        raise RejectedError(f"{where} has an unknown key {min(extra)!r:.40}")
    return raw


def sequence(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise RejectedError(f"{where} is no list")
    return raw


def text(raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise RejectedError(f"{where} is no text")
    return raw


def count(raw: Any, where: str) -> int:
    if type(raw) is not int or not 0 <= raw < 1 << 31:
        raise RejectedError(f"{where} is {raw!r:.40}; expected a whole number ≥ 0")
    return raw


def counts(raw: Any, where: str) -> tuple[int, ...]:
    return tuple(count(number, where) for number in sequence(raw, where))


def number(raw: Any, where: str) -> float:
    if type(raw) not in (int, float) or not -LARGEST <= raw <= LARGEST:
        raise RejectedError(f"{where} is {raw!r:.40}; expected a number")
    return float(raw)
