"""What users type, turned into what the library takes; every complaint is one `BuffetError`."""

from __future__ import annotations

import inspect
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from buffet.errors import BuffetError, one_line

if TYPE_CHECKING:
    from buffet.loading import Encoding

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_words(words: str, encoding: Encoding, *, special: bool) -> list[tuple[int, ...]]:
    """The tasks of ``--words``: ``all``, ``together``, or rows: ``2,5`` (two tasks) or ``2+5`` (one task)."""
    allowed = [i for i, is_special in enumerate(encoding.special) if special or not is_special]
    if words.strip().lower() == "all":
        return [(i,) for i in allowed]
    if words.strip().lower() == "together":
        return [tuple(allowed)]
    tasks = [tuple(_row(part, words) for part in task.split("+")) for task in words.split(",")]
    for row in (row for task in tasks for row in task):
        if row >= len(encoding.tokens):
            listed = " ".join(f"{i}:{encoding.tokens[i]}" for i in allowed)
            raise BuffetError(f"--words: there is no row {row}; the text has {one_line(listed, 100)}")
        if row not in allowed:
            raise BuffetError(
                f"--words: row {row} is the special token {encoding.tokens[row]}; choose a word,"
                " or add --special to move it"
            )
    for task in tasks:
        if len(set(task)) < len(task):
            raise BuffetError(f"--words: {'+'.join(map(str, task))} names a row twice; name every row once")
    once: dict[frozenset[int], tuple[int, ...]] = {}
    for task in tasks:
        once.setdefault(frozenset(task), task)
    return list(once.values())


def _row(part: str, words: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", part):
        raise BuffetError(
            f"--words: got {one_line(words, 100)!r}; give 'all', 'together', or rows counted from 0 such as"
            " 2,5 (each on its own) or 2+5 (both at once)"
        )
    return int(part)


def parse_label(label: str | None, labels: Sequence[str]) -> int | None:
    """The class called `label` (in any case), or with that index."""
    if label is None:
        return None
    named = [i for i, name in enumerate(labels) if name.lower() == label.strip().lower()]
    if named:
        return named[0]
    if re.fullmatch(r"[0-9]{1,9}", label.strip()) and int(label) < len(labels):
        return int(label)
    listed = one_line(", ".join(f"{i} {name}" for i, name in enumerate(labels)), 100)
    raise BuffetError(f"--label: {label!r} is not a class of the model; choose one of: {listed}")


def parse_memory(memory: str) -> int:
    """A number of bytes, with an optional unit: ``2GB``, ``512 MiB``, ``1.5g``; units are powers of 1024."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([KMGT]?)(?:i?B)?\s*", memory, re.IGNORECASE)
    size = float(match[1]) * UNITS[match[2].upper()] if match else 0.0
    if not 1 <= size <= 1 << 60:
        raise BuffetError(f"--memory: got {memory!r}; give a size such as 512MB or 2GB")
    return int(size)


def parse_eps(eps: str | None) -> float | None:
    """A finite size ≥ 0."""
    if eps is None:
        return None
    size = _number(eps)
    if not 0 <= size < math.inf:
        raise BuffetError(f"--eps: got {one_line(eps, 100)!r}; give a finite number ≥ 0")
    return abs(size)  # -0 is 0


def parse_norm(norm: str) -> float:
    """The exponent of the norm, ≥ 1 or infinity."""
    p = _number(norm)
    if not p >= 1:
        raise BuffetError(f"--norm: got {one_line(norm, 100)!r}; give 1, 2, inf or any other number ≥ 1")
    return p


def parse_at_most(given: str) -> tuple[int | None, ...]:
    """Numbers of words, ``2`` or ``1,2,all``; None stands for all."""
    parts = [part.strip().lower() for part in given.split(",")]
    if not all(re.fullmatch(r"-?[0-9]{1,9}|all", part) for part in parts):
        raise BuffetError(
            f"--at-most: got {one_line(given, 60)!r}; give numbers of words from 1, or all: 1,2,all"
        )
    return tuple(None if part == "all" else int(part) for part in parts)


def within(option: str, value: int, low: int, high: int) -> int:
    """`value`, which must lie in a range."""
    if not low <= value <= high:
        raise BuffetError(f"{option}: got {value}; give a whole number from {low} to {high}")
    return value


def typed(
    command: Callable[..., None], given: Mapping[str, object], *arguments: str, without: Sequence[str] = ()
) -> str:
    """The command line of what was given to a command, without options that are default anyway.

    Args:
        arguments: the parameters that are no options.
        without: options to leave out.
    """
    words = ["buffet", command.__name__]
    for name, parameter in inspect.signature(command).parameters.items():
        option, value = f"--{name.replace('_', '-')}", given[name]
        if value in (None, parameter.default) or name in (*arguments, *without):
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [option] if one is True else [option, str(one)]
    texts = [str(given[name]) for name in arguments]
    # An argument that starts like an option must come after "--".
    return shlex.join([*words, *["--"] * any(text.startswith("-") for text in texts), *texts])


def _number(text: str) -> float:
    """The number that was typed; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
