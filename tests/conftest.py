"""Makes the helpers beside this file importable from every test directory; fixtures that several share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command line as a user does (`command_line.Run`)."""
    from command_line import runner  # not before coverage and type checks are set up

    return runner(capsys, monkeypatch)
