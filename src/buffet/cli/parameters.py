"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Option(
        metavar="NAME|DIR|OWNER/MODEL",
        help="An embedded model (see **buffet models**), a checkpoint directory, or a model of the"
        " Hugging Face Hub (needs buffet[hf]).",
    ),
]
Method = Annotated[
    str, typer.Option(metavar="NAME", help="How bounds are computed (see **buffet methods**).")
]
Norm = Annotated[str, typer.Option(metavar="P", help="The norm of a move: 1, 2, inf, or any p ≥ 1.")]
MostSynonyms = Annotated[
    int | None, typer.Option(metavar="N", help="Only the first N synonyms of every word. Default: all.")
]
SkipUnknown = Annotated[
    bool,
    typer.Option(
        "--skip-unknown",
        help="Leave out substitutes that are not in the vocabulary. By default the model reads [UNK].",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON and nothing else.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page to look at.")]
DEVICE = typer.Option(
    metavar="NAME",
    help="Where to compute: **cpu**, **cuda**, **cuda:1**, …, or **auto**: a GPU if there is one.",
)
Device = Annotated[str, DEVICE]
Workers = Annotated[
    int | None, typer.Option(metavar="N", help="Processes. Default: as many as there are cores.")
]
Backend = Annotated[
    str,
    typer.Option(metavar="NAME", help="Who works: **local** processes, or **ray** for many machines."),
]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="A Ray cluster to join. Default: one of its own, here."),
]
GPUS = typer.Option(metavar="N", help="GPUs that Ray gives each worker; use them with --device cuda.")
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Try again what has a row that says failed or timeout.")
]
