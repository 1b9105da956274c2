"""What can be said of a task, and of several together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Verdict = Literal["certified", "falsified", "unknown"]


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of all tasks: certified only if there are some, and every one is."""
    if verdicts and all(v == "certified" for v in verdicts):
        return "certified"
    return "falsified" if "falsified" in verdicts else "unknown"
