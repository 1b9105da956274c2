"""`buffet train`: the options are the fields of `TrainSettings`, so the two cannot drift apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from buffet.cli.terminal import print_json, progress_bar
from buffet.training import TrainProgress, TrainSettings, TrainSummary, presets

EXAMPLES = (
    "buffet train sst-small-3 --data path/to/sst2",
    "buffet train yelp-3-standard-gelu --data path/to/yelp --out my-model --seed 1",
    "buffet train --data path/to/sst2 --out tiny --layers 1 --width 64 --epochs 3",
    "buffet train --from path/to/encoder --data path/to/sst2 --out fine-tuned",
    "buffet train digits-vit   # an image classifier",
    "buffet train sst-narrow-1-substitutions --data path/to/sst2 --synonyms synonyms.json",
    'buffet certify "a gripping , moving film" --model my-model',
)

HELP = {
    "preset": "What to train; any option below overrides a part of it.",
    "data": "Directory with train.tsv, dev.tsv and test.tsv (header: sentence, tab, label), or hf:NAME for a "
    "dataset of the Hugging Face hub (needs buffet[data]).",
    "out": "Checkpoint directory to write; by default named after the preset.",
    "overwrite": "Replace a checkpoint that is already there.",
    "restart": "Begin again instead of continuing an interrupted run.",
    "save_minutes": "Most minutes of work an interruption may cost.",
    "pretrained": "Start from a pretrained BERT encoder: a directory with config.json, model.safetensors and "
    "tokenizer.json.",
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
    "patch": "Side, in pixels, of the patches that an image is cut into.",
    "max_tokens": "Longest sentence, special tokens included.",
    "tokenizer": "Whole words, or pieces of words.",
    "vocabulary": "Most words or pieces to keep, special tokens included.",
    "min_count": "Rarer words become [UNK].",
    "epochs": "Most passes over the data.",
    "patience": "Epochs without a better dev accuracy before stopping.",
    "batch": "Sentences per step.",
    "rate": "Peak learning rate.",
    "warmup": "Share of the steps over which the rate rises.",
    "weight_decay": "Weight decay; 2 makes bounds much tighter than the usual 0.1.",
    "gain": "Size of the first matrices, as a multiple of Glorot's.",
    "clip": "Largest norm of a gradient.",
    "embedding_scale": "Standard deviation of the first embeddings.",
    "embedding_dropout": "Share of embedding coordinates dropped in training.",
    "head": "A dense layer with tanh between what is pooled and the classifier, or none.",
    "synonyms": "Train for word substitutions: a JSON file, word → list of words. Goes with the variant"
    " substitutions.",
    "most_synonyms": "Only the first so many synonyms of every word. Default: all.",
    "worst_case": "Share of the loss that bounds the worst that substitutes can do; 0: words are only"
    " exchanged at random (data augmentation).",
    "ramp": "Share of the steps in which the worst case gains its weight, and substitutes their distance.",
    "exchanged": "Share of words exchanged at random in training.",
    "closeness": "Weight in the loss of the squared distances between a word and its substitutes.",
    "word_dropout": "Share of words replaced by [UNK] in training.",
    "rare_dropout": "Words seen n times are replaced by [UNK] with probability R / (R + n), besides.",
    "adversarial": "How far (L2) the most sensitive word of every training sentence is moved against its "
    "label: larger certified radii for half as much time again.",
}
OPTION_NAMES = {"pretrained": "--from"}  # not what the field is called

INTRODUCTION = """\
Train a sentence (or image) classifier and write it as a checkpoint directory, all or nothing.

The weights of the epoch with the best dev accuracy are kept (in training for substitutions, the best \
certified one); the test part is read once, at the end. An \
interrupted run continues when the same command is given again, and ends with the same weights.

**Presets**: DATA-ARCHITECTURE, then any variants, as in `sst-small-3-gelu`; ReLU, LayerNorm without \
variance and words as tokens unless said otherwise.
"""


def run(json: bool, **values: object) -> None:
    from buffet.training.state import resume_file

    settings = TrainSettings.of(**values)
    resume = resume_file(settings.out)
    if resume.exists() and not settings.restart:
        typer.echo(f"continuing {resume}", err=True)
    try:
        summary = _train(settings)
    except KeyboardInterrupt:
        if resume.exists():
            typer.echo(f"the same command goes on from {resume}", err=True)
        raise
    if json:
        print_json({**vars(summary), "out": str(summary.out)})
        return
    test = "" if summary.test_accuracy is None else f" test accuracy {summary.test_accuracy:.2%},"
    certified = "" if summary.dev_certified is None else f" certified on dev {summary.dev_certified:.2%},"
    if summary.test_certified is not None:
        certified += f" on test {summary.test_certified:.2%},"
    typer.echo(
        f"{summary.out}: dev accuracy {summary.dev_accuracy:.2%} (epoch {summary.best_epoch}),{test}"
        f"{certified} {summary.parameters:,} parameters, {summary.seconds:.0f} s"
    )


def _train(settings: TrainSettings) -> TrainSummary:
    from buffet.training import train

    with progress_bar("training") as bar:

        def report(now: TrainProgress) -> None:
            bar(now.step / now.steps)
            if now.dev_accuracy is not None:
                typer.echo(
                    f"epoch {now.epoch}/{now.epochs}: loss {now.loss:.4f},"
                    f" {now.measure} {now.dev_accuracy:.2%}, {now.seconds:.0f} s",
                    err=True,
                )

        return train(settings, report)


def _help() -> str:
    """The introduction and the tables of presets, as Markdown."""
    tables: Mapping[str, Mapping[str, presets.Part]] = {
        "DATA": presets.DATA,
        "ARCHITECTURE": presets.ARCHITECTURES,
        "variants": presets.VARIANTS,
        "or a name of its own": presets.NAMED,
    }
    sections = [
        "\n".join([f"*{title}*", "", *(f"- `{name}`: {part.summary}" for name, part in table.items())])
        for title, table in tables.items()
    ]
    return "\n\n".join([INTRODUCTION, *sections])


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with one parameter per field of `TrainSettings`, and ``--json``."""
    flag = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]
    parameters = [_parameter("json", flag, False)]
    for name, field in TrainSettings.model_fields.items():
        kind, metavar = _kind(field.annotation)
        if name == "preset":
            info: Any = typer.Argument(metavar="PRESET", help=HELP[name], show_default=presets.DEFAULT)
        elif kind is bool:
            info = typer.Option(f"--{name.replace('_', '-')}", help=HELP.get(name))
        else:
            names = (OPTION_NAMES[name],) if name in OPTION_NAMES else ()
            info = typer.Option(*names, metavar=metavar, help=HELP.get(name))
        # None means not given: the preset decides.
        wanted = kind if kind is bool else kind | None
        parameters.append(_parameter(name, Annotated[wanted, info], False if kind is bool else None))
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    function.__doc__ = _help()
    return function


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _kind(annotation: Any) -> tuple[Any, str | None]:
    """The type typer parses and how it is shown; the choices of a Literal are checked by the settings."""
    if get_origin(annotation) is Literal:
        return str, "|".join(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation if annotation in (int, float, bool, Path) else str, None


train = _with_options(run)
