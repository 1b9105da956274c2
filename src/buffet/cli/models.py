"""`buffet models`: what is shipped inside the package."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from buffet.cli.parameters import Json
from buffet.cli.terminal import plain_table, print_json, print_table
from buffet.loading.directories import DEFAULT, MODELS, available
from buffet.printing import plural, round_up


def models(
    check: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|OWNER/MODEL",
            help="Load this model, run it in transformers too (needs buffet[hf]), and print how far the"
            " logits are apart. More than 1e-4 is refused.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the embedded models, whose names --model takes, or check a model of your own.

    Any other model is given by its directory: config.json, weights and tokenizer as Hugging Face's
    sequence classifiers of the BERT family have them, or its image classifiers (ViT, also in timm's words);
    or by its id on the Hugging Face Hub, owner/model.
    """
    if check is not None:
        _check(check, json)
        return
    described = [describe(name) for name in available()]
    if json:
        print_json(described)
        return
    heads = ("model", "layers", "width", "heads", "classes", "accuracy (dev)", "parameters", "size")
    table = plain_table(*heads)
    for model in described:
        accuracy = model["dev_accuracy"]
        table.add_row(
            f"{model['name']}{' (default)' if model['default'] else ''}",
            *(str(model[key]) for key in ("layers", "width", "heads")),
            ", ".join(model["labels"]),
            "not measured" if accuracy is None else f"{accuracy:.2%}",
            f"{model['parameters']:,}",
            f"{model['bytes'] / 1e6:.1f} MB",
        )
    print_table(table)


def _check(source: str, json: bool) -> None:
    """Say what a model is, and how far its program is from its source."""
    from buffet.loading import checked

    model, difference = checked(source)
    config = model.config
    if json:
        print_json({"name": model.name, "labels": list(model.labels), "difference": difference})
        return
    layers = plural(config.num_hidden_layers, "layer")
    typer.echo(
        f"{model.name}: {config.num_hidden_layers} {layers}, width {config.hidden_size}, classes"
        f" {', '.join(model.labels)}; logits differ by {round_up(difference)} at most"
    )


def describe(name: str) -> dict[str, Any]:
    """What config.json and the model card say about an embedded model; the weights are not read."""
    from buffet.loading.families import read_architecture

    directory = MODELS / name
    config = read_architecture(directory / "config.json").config
    return {
        "name": name,
        "default": name == DEFAULT,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "labels": list(config.labels),
        "activation": config.hidden_act,
        "layer_norm": config.layer_norm,
        "pooling": config.pooling,
        "max_tokens": config.max_position_embeddings,
        "vocabulary": config.vocab_size,
        "dev_accuracy": card_accuracy(directory / "README.md", "dev"),
        "test_accuracy": card_accuracy(directory / "README.md", "test"),
        "parameters": sum(math.prod(shape) for shape in config.shapes().values()),
        "bytes": sum(file.stat().st_size for file in directory.iterdir() if file.is_file()),
    }


def card_accuracy(card: Path, part: str) -> float | None:
    """The accuracy on `part` that a model card states, as a fraction; None if it states none."""
    if not card.is_file():
        return None
    found = re.search(rf"^\| {part} accuracy \| ([0-9.]+)%", card.read_text(encoding="utf-8"), re.MULTILINE)
    return round(float(found[1]) / 100, 6) if found else None
