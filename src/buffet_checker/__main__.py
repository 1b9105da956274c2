"""``python -m buffet_checker FILE --model DIR``: needs numpy, and nothing of buffet or torch."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from buffet_checker.check import check
from buffet_checker.errors import BadInputError
from buffet_checker.report import as_json, as_lines
from buffet_checker.wording import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """0 accepted, 1 rejected, 2 bad input."""
    parser = argparse.ArgumentParser(prog="buffet_checker", description="Check a certificate of buffet.")
    parser.add_argument("file", metavar="FILE", help="the certificate")
    parser.add_argument("--model", metavar="DIR", required=True, help="directory of the model it is about")
    parser.add_argument("--json", action="store_true", help="print everything as JSON and nothing else")
    given = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # whatever letters a hostile file has in its names
    try:
        result = check(given.file, given.model)
    except BadInputError as error:
        print("error:", printable(" ".join(str(error).split())), file=sys.stderr)
        return 2
    print(as_json(result) if given.json else "\n".join(as_lines(result)))
    return 0 if result.accepted else 1


if __name__ == "__main__":
    sys.exit(main())
