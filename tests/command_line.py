"""Command lines run as a user runs them, in this process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

from buffet.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


def runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line as the `buffet` script does; certifies by a quick method, if none is named."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("buffet.cli.terminal.LOG_EVERY", float("inf"))  # on a busy machine too

    def invoke(*given: object) -> Outcome:
        arguments = [str(argument) for argument in given]
        if arguments[:1] == ["certify"] and "--method" not in arguments:
            arguments[1:1] = ["--method", "baseline"]
        code = main(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return invoke


def one_line(outcome: Outcome, *needles: str) -> None:
    """Exit code 2, one line on stderr that says these things, nothing else."""
    assert outcome.code == 2
    assert outcome.out == ""
    assert re.fullmatch(r"error: .*\n", outcome.err), outcome.err
    for needle in needles:
        assert needle in outcome.err
