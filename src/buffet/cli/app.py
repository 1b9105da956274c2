"""The `buffet` command: which commands there are, and how every error reaches the user.

A new command is a function with typer annotations in a file of its own, and its name in `COMMANDS`. All of
these files are imported for any of them, so they import PyTorch, and whatever does, inside the functions that
need it: help takes a third of a second instead of two and a half.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

import buffet
from buffet.errors import BuffetError, one_line
from buffet.system.allocator import keep_freed_memory
from buffet.system.openmp import spin_briefly

LONGEST = 1000
"""Characters of a complaint: what it quotes may be a whole file."""
COMMANDS = (
    *("certify", "evaluate", "check", "vnncomp", "models", "methods", "train"),
    *("sweep", "summary", "report", "reproduce", "soundness", "bench"),
)
"""Every command is the function of this name in the file of this name; examples there (`EXAMPLES`) follow the
options in its help."""


def _epilog(examples: Sequence[str]) -> str | None:
    return "\n\n".join(["**Examples**", *(f"`{example}`" for example in examples)]) if examples else None


# Typer carries its own copy of click since 0.26; this class is the right one in every version.
UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="buffet",
    help="Proves how far the words of a sentence can move before a transformer classifier may change its "
    "answer.",
    epilog=_epilog(('buffet certify "a gripping , moving film"', "buffet certify --help")),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"buffet {buffet.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """The options that go before a command."""


for _name in COMMANDS:
    _module = import_module(f"buffet.cli.{_name}")
    app.command(_name, epilog=_epilog(getattr(_module, "EXAMPLES", ())))(getattr(_module, _name))


@cache
def _built() -> Any:
    """The commands as click has them: built once, which takes longer than most of them."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 certified (or simply done), 1 not certified, 2 a usage or input error, reported in one line on stderr.
    """
    spin_briefly()
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a letter shows its code instead of breaking off.
            stream.reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = _built()(args=given or ["--help"], prog_name="buffet", standalone_mode=False)
        sys.stdout.flush()
    except BuffetError as error:
        return _fail(str(error))
    except UsageError as error:
        where = error.ctx.command_path if error.ctx else "buffet"
        return _fail(f"{error.format_message().rstrip('.')} (see {where} --help)")
    except BrokenPipeError:
        # The reader has left; keep the interpreter from complaining once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        reason = error.strerror or str(error)
        return _fail(f"{error.filename}: {reason}" if error.filename else reason)
    except MemoryError:
        return _fail("not enough memory: nothing is claimed; see --memory, or take a smaller task")
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", code=130)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = 2) -> int:
    print("error:", one_line(message, LONGEST), file=sys.stderr)
    return code
