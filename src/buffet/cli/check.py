"""`buffet check`: a certificate, checked by code that shares nothing with the code that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buffet.cli.parameters import Json
from buffet.errors import BuffetError
from buffet.loading.directories import DEFAULT, available, locate

EXAMPLES = (
    'buffet certify "a gripping , moving film" --eps 0.1 --certificate proof.safetensors',
    "buffet check proof.safetensors",
    "buffet check proof.safetensors --model path/to/checkpoint --json",
    "buffet check proof.safetensors --model model.onnx",
    "python -m buffet_checker proof.safetensors --model path/to/checkpoint   # the same, without buffet",
)


def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What **certify** or **vnncomp --certificate** wrote.")
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|DIR|FILE",
            help="The model it is about: an embedded one, a directory, a file in ONNX.",
        ),
    ] = DEFAULT,
    json: Json = False,
) -> None:
    """Check a certificate: every line, every interval and every sum again, with rigorous rounding.

    What is proven is printed in a sentence that can be quoted: the words, how they move, the answer, the
    model and the margin. Everything in it was checked, down to the spelling of the tokens.

    **accepted**: no point of the region changes the answer, in exact arithmetic with the stored weights; and
    **slack** is how much of the margin rounding may take in float32. **rejected**: the proof has a gap, and
    the first one is named. The checker reads the model's files itself and needs neither torch nor buffet.

    Of a network in ONNX, the proof is about the network that the certificate stores. The file's hash has to
    be the one it names and, if onnxruntime is installed, the outputs of both are compared at some points.

    Exit code 0: accepted. 1: rejected. 2: bad input.
    """
    from buffet_checker import BadInputError
    from buffet_checker import check as judge
    from buffet_checker.report import as_json, as_lines
    from buffet_checker.wording import printable

    try:
        onnx = Path(model)
        if model not in available() and onnx.is_file():
            from buffet.loading.onnx.runtime import run_if_possible

            result = judge(file, onnx, run_if_possible)
        else:
            result = judge(file, locate(model)[1])
    except BadInputError as error:
        raise BuffetError(printable(str(error))) from None
    typer.echo(as_json(result) if json else "\n".join(as_lines(result)))
    raise typer.Exit(0 if result.accepted else 1)
