"""`buffet certify` with substitutions: the options, checked, to an answer and how it is printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from buffet.cli.answer import VERDICT_STYLES
from buffet.cli.options import parse_label
from buffet.cli.request import Request
from buffet.engine import Engine
from buffet.errors import BuffetError, one_line
from buffet.loading import DEFAULT, ImageModel, load_checkpoint
from buffet.printing import plural, round_down, round_up
from buffet.report.answer import ModelInfo, Versions
from buffet.report.words import FlippedSentence, Ignored, Offer, WordResult, WordsReport
from buffet.words import Substitutions, substitutions

SHOWN = 8
"""Substitutes of a word that are printed; all of them are in the JSON."""


@dataclass(frozen=True)
class Exchange:
    """The options about substitutions."""

    synonyms: Path | None
    most_synonyms: int | None
    swap: tuple[str, ...]
    typos: int
    at_most: int | None
    skip_unknown: bool

    @property
    def asked(self) -> bool:
        return self.synonyms is not None or bool(self.swap) or self.typos != 0

    def options(self) -> list[str]:
        """As they are typed."""
        found = [] if self.synonyms is None else ["--synonyms", str(self.synonyms)]
        found += ["--most-synonyms", str(self.most_synonyms)] if self.most_synonyms is not None else []
        for one in self.swap:
            found += ["--swap", one]
        found += ["--typos", str(self.typos)] if self.typos else []
        found += ["--at-most", str(self.at_most)] if self.at_most is not None else []
        return found + ["--skip-unknown"] * self.skip_unknown


def parse_swaps(given: Sequence[str]) -> dict[str, list[str]]:
    """``gripping=dull,boring``, as often as it is given."""
    found: dict[str, list[str]] = {}
    for one in given:
        word, _, others = one.partition("=")
        listed = [other.strip() for other in others.split(",")]
        if not word.strip() or not all(listed):
            raise BuffetError(
                f"--swap: got {one_line(one, 60)!r}; give a word and what for: gripping=dull,boring"
            )
        found.setdefault(word.strip(), []).extend(listed)
    return found


def answer(request: Request, exchange: Exchange) -> WordsReport:
    """Answer a request about substitutions."""
    model = load_checkpoint(request.model).to(torch.device(request.device))
    if isinstance(model, ImageModel):
        raise BuffetError("--synonyms, --swap and --typos: an image has no words")
    torch.set_num_threads(request.threads or 1)
    label = parse_label(request.label, model.labels)
    found = substitutions(
        model,
        request.text,
        synonyms=exchange.synonyms,
        most=exchange.most_synonyms,
        swap=parse_swaps(exchange.swap) or None,
        typos=exchange.typos,
        at_most=exchange.at_most,
        pair=request.pair,
        skip_unknown=exchange.skip_unknown,
        seed=request.seed,
    )
    done = found.verify(
        request.chosen,
        label=label,
        budget=request.budget,
        attack=request.attack,
        seed=request.seed,
        engine=Engine(memory=request.memory),
    )
    logits = model.program64.evaluate(model.embed(request.text, request.pair).double())
    flip = None if done.flip is None else FlippedSentence(**vars(done.flip))
    return WordsReport(
        text=request.text,
        pair=request.pair,
        model=ModelInfo(
            name=model.name,
            labels=model.labels,
            layers=model.config.num_hidden_layers,
            width=model.config.hidden_size,
        ),
        method=request.method,
        at_most=found.at_most,
        label=done.label,
        answer=int(logits.argmax()),
        clean_margin=done.clean_margin,
        words=tuple(_words(found)),
        ignored=tuple(Ignored(**vars(one)) for one in found.left_out),
        sentences=done.count,
        shapes=done.shapes,
        verdict=done.verdict,
        margin=done.margin,
        flip=flip,
        unknown=done.unknown,
        seconds=done.seconds,
        command=_command(request, exchange),
        versions=Versions.current(),
    )


def _words(found: Substitutions) -> Iterator[WordResult]:
    for word in found.words:
        offers = (
            Offer(text=s.text, source=s.source, tokens=len(s.ids), unknown=s.unknown)
            for s in word.substitutes
        )
        yield WordResult(word=word.text, rows=word.rows, substitutes=tuple(offers))


def _command(request: Request, exchange: Exchange) -> str:
    given = {
        "--pair": request.pair,
        "--model": None if request.model == DEFAULT else request.model,
        "--method": request.method,
        "--budget": request.budget,
        "--label": request.label,
        "--seed": request.seed or None,
    }
    options = [str(part) for pair in given.items() if pair[1] is not None for part in pair]
    flags = ["--no-attack"] * (not request.attack)
    text = ["--", request.text] if request.text.startswith("-") else [request.text]
    return shlex.join(["buffet", "certify", *options, *exchange.options(), *flags, *text])


def print_words(report: WordsReport) -> None:
    """The answer for people: every word with its substitutes, what is proven or which sentence flips."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("#", justify="right", style="dim")
    table.add_column("word", overflow="fold")
    table.add_column("may be exchanged for", overflow="fold")
    for word in report.words:
        table.add_row("+".join(map(str, word.rows)), Text(word.word), _offers(word.substitutes))
    console.print()
    console.print(table)
    console.print()
    for line in _summary(report):
        console.print(line, soft_wrap=True)


def _offers(offers: Sequence[Offer]) -> Text:
    if not offers:
        return Text("—", "dim")
    line = Text(", ").join(
        Text(offer.text + (" [UNK]" if offer.unknown else ""), "dim" if offer.unknown else "")
        for offer in offers[:SHOWN]
    )
    return line.append(f" … {len(offers) - SHOWN} more", "dim") if len(offers) > SHOWN else line


def _summary(report: WordsReport) -> Iterator[Text]:
    labels = report.model.labels
    for note in notes(report):
        yield Text(note, "dim")
    if report.answer != report.label:
        wrong = f"{report.model.name} answers {labels[report.answer]}, not {labels[report.label]}"
        yield Text(f"{wrong}: there is nothing to certify", "red")
    style = VERDICT_STYLES[report.verdict]
    if report.flip is not None and report.flip.changes:
        changes = ", ".join(f"{old} → {new}" for old, new in report.flip.changes)
        yield Text.assemble(("falsified: ", style), report.flip.sentence)
        yield Text(f"{changes}: {labels[report.flip.answer]}, margin {round_up(report.flip.margin)}")
    else:
        yield Text.assemble((report.headline, style))
    words = sum(bool(word.substitutes) for word in report.words)
    many = f"at most {report.at_most} of {words} {plural(words, 'word')} exchanged"
    yield Text(
        f"{report.model.name} · {report.verdict} · {labels[report.label]} (margin"
        f" {round_down(report.clean_margin)}) · {report.sentences:,} {plural(report.sentences, 'sentence')},"
        f" {many} · {report.seconds:.2f} s"
    )


def notes(report: WordsReport) -> Iterator[str]:
    """What has to be said about the substitutes: which are unknown, of several tokens, or ignored."""
    offers = [(word, offer) for word in report.words for offer in word.substitutes]
    unknown = [offer.text for _, offer in offers if offer.unknown]
    if unknown:
        yield f"{len(unknown)} not in the vocabulary, which the model reads as unknown: {_named(unknown)}"
    several = [o.text for w, o in offers if not o.tokens == len(w.rows) == 1]
    if several:
        yield f"{len(several)} of several tokens, gone through in {report.shapes:,} shapes: {_named(several)}"
    for reason in dict.fromkeys(_kind(one.reason) for one in report.ignored):
        some = [one.text for one in report.ignored if _kind(one.reason) == reason]
        yield f"{len(some)} left out ({reason}): {_named(some)}"


def _kind(reason: str) -> str:
    return "the same tokens as another, counted once" if reason.startswith("the same") else reason


def _named(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:SHOWN])
    return f"{shown}, …" if len(texts) > SHOWN else shown
