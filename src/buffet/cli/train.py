"""`buffet train`: the options are the fields of `TrainSettings`, so the two cannot drift apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

import buffet.train as training
from buffet.cli.terminal import print_json, progress_bar
from buffet.train import Progress, TrainSettings

EXAMPLES = (
    "buffet train --data path/to/sst2 --out my-model",
    "buffet train --data path/to/sst2 --out small --layers 1 --width 64 --epochs 3",
    'buffet certify "a gripping , moving film" --model my-model',
)

HELP = {
    "data": "Directory with train.tsv, dev.tsv and test.tsv (header: sentence, tab, label).",
    "out": "Checkpoint directory to write.",
    "overwrite": "Replace a checkpoint that is already there.",
    "seed": "Seed of everything random.",
    "threads": "Threads; the weights repeat exactly for the same number.",
    "layers": "Encoder layers.",
    "heads": "Attention heads per layer.",
    "width": "Width of the embeddings and layers.",
    "inner": "Width of the feed-forward layers.",
    "activation": "Activation of the feed-forward layers.",
    "layer_norm": "With variance (standard) or without (no_var, easier to certify).",
    "norm_position": "LayerNorm after (post) or before (pre) each block.",
    "pooling": "What the classifier reads: the first token, or the mean.",
    "max_tokens": "Longest sentence, special tokens included.",
    "vocabulary": "Most words to keep, special tokens included.",
    "min_count": "Rarer words become [UNK].",
    "epochs": "Most passes over the data.",
    "patience": "Epochs without a better dev accuracy before stopping.",
    "batch": "Sentences per step.",
    "rate": "Peak learning rate.",
    "warmup": "Share of the steps over which the rate rises.",
    "weight_decay": "Weight decay.",
    "clip": "Largest norm of a gradient.",
    "embedding_scale": "Standard deviation of the first embeddings.",
    "embedding_dropout": "Share of embedding coordinates dropped in training.",
    "word_dropout": "Share of words replaced by [UNK] in training.",
    "noise": "Standard deviation of noise on the embeddings in training.",
}


def run(json: bool, **values: object) -> None:
    """Train a sentence classifier and write it as a checkpoint directory, all or nothing.

    The weights of the epoch with the best dev accuracy are kept; the test part is read once, at the end.
    """
    settings = TrainSettings.of(**values)
    with progress_bar("training") as bar:

        def report(now: Progress) -> None:
            bar(now.step / now.steps)
            if now.dev_accuracy is not None:
                where = f"epoch {now.epoch}/{now.epochs}"
                typer.echo(f"{where}: loss {now.loss:.4f}, dev accuracy {now.dev_accuracy:.2%}", err=True)

        summary = training.train(settings, report)
    if json:
        print_json({**vars(summary), "out": str(summary.out)})
        return
    typer.echo(
        f"{summary.out}: dev accuracy {summary.dev_accuracy:.2%} (epoch {summary.best_epoch}),"
        f" test accuracy {summary.test_accuracy:.2%}, {summary.parameters:,} parameters,"
        f" {summary.seconds:.0f} s"
    )


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with one typer option per field of `TrainSettings`, and ``--json``."""
    flag = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]
    options = [_option("json", flag, False)]
    for name, field in TrainSettings.model_fields.items():
        kind, metavar = _kind(field.annotation)
        names = (f"--{name}",) if kind is bool else ()
        annotation = Annotated[kind, typer.Option(*names, metavar=metavar, help=HELP.get(name))]  # type: ignore[valid-type]
        options.append(
            _option(name, annotation, inspect.Parameter.empty if field.is_required() else field.default)
        )
    function.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    function.__annotations__ = {option.name: option.annotation for option in options}
    return function


def _option(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _kind(annotation: Any) -> tuple[type, str | None]:
    """The type typer parses and how it is shown; the choices of a Literal are checked by the settings."""
    if get_origin(annotation) is Literal:
        return str, "|".join(get_args(annotation))
    return annotation if annotation in (int, float, bool, Path) else str, None


train = _with_options(run)
