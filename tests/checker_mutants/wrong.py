"""A mutant of the checker, and ways to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from buffet_checker.balls import Ball

Wrong = Callable[[Any], Any]
"""From what is right to what is wrong."""
Shows = Literal["box", "slack", "forgery"]
"""Where a mutant shows: a pushed box, the slack of a deployed run, or a forged certificate."""


@dataclass(frozen=True)
class Mutant:
    name: str
    owner: Any
    attribute: str
    wrong: Wrong
    shows: Shows = "box"

    @contextmanager
    def loose(self) -> Iterator[None]:
        table = isinstance(self.owner, dict)
        right = self.owner[self.attribute] if table else vars(self.owner)[self.attribute]
        self._put(self.wrong(right), table)
        try:
            yield
        finally:
            self._put(right, table)

    def _put(self, value: Any, table: bool) -> None:
        if table:
            self.owner[self.attribute] = value
        else:
            setattr(self.owner, self.attribute, value)


# --- ways to be wrong ---------------------------------------------------------------------------------------


def result(change: Callable[[Any], Any]) -> Wrong:
    """The right function (or property), its result changed."""

    def wrong(right: Any) -> Any:
        if isinstance(right, property):
            return property(lambda self: change(right.fget(self)))  # type: ignore[misc]
        return lambda *args, **kwargs: change(right(*args, **kwargs))

    return wrong


def only(when: Callable[..., bool], change: Callable[[Any], Any]) -> Wrong:
    """The same where the arguments are such."""

    def wrong(right: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            found = right(*args, **kwargs)
            return change(found) if when(*args) else found

        return function

    return wrong


def fixed(value: Any) -> Wrong:
    return lambda right: value


def nothing(found: Any) -> Any:
    return 0 * found


def half(found: Any) -> Any:
    return 0.5 * found


def unmoved(right: Any) -> Any:
    return lambda x: x


def half_radius(ball: Ball) -> Ball:
    return Ball(ball.mid, 0.5 * ball.rad)


def narrower(box: tuple[Any, Any]) -> tuple[Any, Any]:
    """A range without a billionth of its width at both ends."""
    low, high = box
    return low + 1e-9 * (high - low), high - 1e-9 * (high - low)


def of_kind(kind: str) -> Callable[..., bool]:
    return lambda node, *rest: node.kind == kind


NONE = fixed(lambda count: 0.0)
