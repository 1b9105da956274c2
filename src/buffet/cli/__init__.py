"""The command line: one file per command, assembled in `app`."""

from buffet.cli.app import main

__all__ = ["main"]
