"""`buffet.evaluate`: from whatever names a model and a data set to the accuracies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from buffet.compositions import title
from buffet.errors import BuffetError
from buffet.evaluation.arguments import question
from buffet.evaluation.examples import PARTS, read_examples
from buffet.evaluation.questions import Effort, Question
from buffet.evaluation.result import Evaluation
from buffet.evaluation.run import Report, Setup, run
from buffet.evaluation.work import HeldModel, StoredModel, digest_of
from buffet.experiments.workers import Fleet, LocalFleet, ThisProcess
from buffet.loading import ImageModel, Model, load_checkpoint
from buffet.loading.directories import DEFAULT
from buffet.methods import Method, method_named
from buffet.query import checked_budget
from buffet.synonyms import Synonyms


def evaluate(
    model: object,
    data: object,
    *,
    tokenizer: object = None,
    part: str = PARTS[0],
    eps: float | int | Sequence[float | int] | None = None,
    norm: float | int | str = 2,
    words: str = "each",
    synonyms: Synonyms | str | Path | None = None,
    most_synonyms: int | None = None,
    typos: int = 0,
    at_most: int | Sequence[int | None] | None = None,
    skip_unknown: bool = False,
    method: str | Method = "buffet",
    budget: float | None = None,
    count: int | None = None,
    seed: int = 0,
    workers: int = 0,
    out: str | Path | None = None,
    progress: Report | None = None,
) -> Evaluation:
    """How much of a data set is classified correctly, how much of that is proven, and how much can be broken.

    Give `eps` for words that move in balls, or `synonyms` or `typos` for words that are exchanged.

    Args:
        model: a loaded model, what `buffet.load` takes (None: the embedded model), or a text-classification
            pipeline of `transformers`.
        data: a TSV file (sentence, tab, label), a directory of such, ``hf:NAME``, a list of
            (sentence, label), or a `datasets` data set with sentence (or text) and label.
        tokenizer: the tokenizer of a module.
        part: which part of a directory or of a data set of the hub: test or dev.
        eps: sizes of balls; several make a curve.
        norm: the norm of the balls.
        words: "each" on its own, or "all" at once.
        synonyms: word → words it may be exchanged for, or a JSON file with that.
        most_synonyms: use only this many synonyms of each word, the first ones.
        typos: the largest number of misspellings of every word.
        at_most: how many words are exchanged at once, None for all; several make a curve.
        skip_unknown: leave out what is not in the vocabulary.
        method: how bounds are computed.
        budget: seconds per sentence.
        count: the size of a random sample, which gives accuracies confidence intervals; by default all.
        seed: the seed of the sample, the attacks and the misspellings.
        workers: the number of processes; 0 works in this one.
        out: a file of rows; after an interruption, the same call with the same file continues.
        progress: called after every sentence.

    Example:
        >>> import buffet
        >>> data = [("a gripping , moving film", 1), ("a dull mess", 0)]
        >>> found = buffet.evaluate(buffet.load(), data, synonyms={"gripping": ["dull"], "mess": ["success"]})
        >>> found.clean, found.certified, found.attacked
        (1.0, 0.0, 0.5)
    """
    asked = question(eps, norm, words, synonyms, most_synonyms, typos, at_most, skip_unknown)
    effort = Effort(method_named(method), None if budget is None else checked_budget(budget), seed)
    loaded, source = classifier(model, tokenizer)
    sample = read_examples(data, part).sample(count, seed)
    fleet: Fleet[object] = LocalFleet(workers, 1) if workers else ThisProcess()  # type: ignore[assignment]
    if workers and source is None:
        raise BuffetError(
            "workers: a model in memory is evaluated here: save it and give its path, or workers=0"
        )
    setup = setup_of(loaded, source if workers else None, asked, effort)
    return run(setup, sample, fleet, out=None if out is None else Path(out), progress=progress)


def setup_of(model: Model, source: str | None, asked: Question, effort: Effort, device: str = "cpu") -> Setup:
    """The setup of a model that workers load from a source; None: they have it."""
    where = HeldModel(model) if source is None else StoredModel(source, digest_of(model), device)
    return Setup(model, where, asked, effort, title(effort.method))


def classifier(model: object, tokenizer: object = None) -> tuple[Model, str | None]:
    """The model, which has to read texts, and where other processes find it (None: nowhere)."""
    source: str | None = None
    if model is None or isinstance(model, str | Path):
        source = DEFAULT if model is None else str(model)
        found = load_checkpoint(source, tokenizer=tokenizer)
        source = source if tokenizer is None else None
    elif isinstance(model, Model):
        found = model
    elif isinstance(model, nn.Module):
        found = load_checkpoint(model, tokenizer=tokenizer)
    elif isinstance(module := getattr(model, "model", None), nn.Module):  # a pipeline
        found = load_checkpoint(module, tokenizer=tokenizer or getattr(model, "tokenizer", None))
    else:
        raise BuffetError(
            f"the model is a {type(model).__name__}; give a loaded model, what buffet.load takes, or a"
            " pipeline for text classification"
        )
    if isinstance(found, ImageModel) or found.tokenizer is None:
        lack = "reads images" if isinstance(found, ImageModel) else "has no tokenizer: give tokenizer=…"
        raise BuffetError(f"{found.name} {lack}; sentences are evaluated by models that read texts")
    return found, source
