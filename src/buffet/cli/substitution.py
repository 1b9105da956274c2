"""`buffet certify` with substitutions: the options, checked, to an answer and how it is printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from buffet.cli.answer import VERDICT_STYLES
from buffet.cli.options import parse_label
from buffet.cli.request import Request
from buffet.cli.terminal import console_of, plain_table
from buffet.engine import Engine
from buffet.errors import BuffetError, one_line
from buffet.loading import ImageModel, load_checkpoint
from buffet.printing import round_down, round_up
from buffet.report.answer import ModelInfo, Versions
from buffet.report.words import FewerWords, Offer, WordResult, WordsReport
from buffet.words import Answer, Substitutions, substitutions


@dataclass(frozen=True)
class Exchange:
    """The options about substitutions."""

    synonyms: Path | None
    most_synonyms: int | None
    swap: tuple[str, ...]
    typos: int
    at_most: tuple[int | None, ...]  # None: as many words as have substitutes
    skip_unknown: bool

    @property
    def asked(self) -> bool:
        return self.synonyms is not None or bool(self.swap) or self.typos != 0


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
    given = [k for k in exchange.at_most if k is not None]
    found = substitutions(
        model,
        request.text,
        synonyms=exchange.synonyms,
        most=exchange.most_synonyms,
        swap=parse_swaps(exchange.swap) or None,
        typos=exchange.typos,
        at_most=None if None in exchange.at_most else max(given),
        pair=request.pair,
        skip_unknown=exchange.skip_unknown,
        seed=request.seed,
    )
    *fewer, done = found.verify_each(
        sorted({*given, found.at_most} if None in exchange.at_most else {*given}),
        request.chosen,
        label=label,
        budget=request.budget,
        attack=request.attack,
        seed=request.seed,
        engine=Engine(memory=request.memory),
    )
    logits = model.program64.evaluate(model.embed(request.text, request.pair).double())
    return WordsReport(
        text=request.text,
        pair=request.pair,
        model=ModelInfo.of(model),
        method=request.method,
        at_most=found.at_most,
        label=done.label,
        answer=int(logits.argmax()),
        clean_margin=done.clean_margin,
        words=tuple(_words(found)),
        ignored=found.left_out,
        **_facts(done),
        fewer=tuple(FewerWords(at_most=one.at_most, **_facts(one)) for one in fewer),
        command=request.command,
        versions=Versions.current(),
    )


def _facts(done: Answer) -> dict[str, Any]:
    """What an answer says of the sentences."""
    return {
        "sentences": done.count,
        "shapes": done.shapes,
        "verdict": done.verdict,
        "margin": done.margin,
        "flip": done.flip,
        "unknown": done.unknown,
        "seconds": done.seconds,
    }


def _words(found: Substitutions) -> Iterator[WordResult]:
    for word in found.words:
        offers = (
            Offer(text=s.text, source=s.source, tokens=len(s.ids), unknown=s.unknown)
            for s in word.substitutes
        )
        yield WordResult(word=word.text, rows=word.rows, substitutes=tuple(offers))


def print_words(report: WordsReport, html: Path | None) -> None:
    """The answer for people: every word with its substitutes, what is proven or which sentence flips."""
    console = console_of(120)
    table = plain_table()
    table.add_column("#", justify="right", style="dim")
    table.add_column("word", overflow="fold")
    table.add_column("may be exchanged for", overflow="fold")
    for word in report.words:
        table.add_row("+".join(map(str, word.rows)), Text(word.word), Text(word.some or "—"))
    console.print()
    console.print(table)
    console.print()
    for line in _summary(report):
        console.print(line, soft_wrap=True)
    if html is not None:
        console.print(Text(f"report: {html}"), soft_wrap=True)


def _summary(report: WordsReport) -> Iterator[Text]:
    labels = report.model.labels
    for note in report.notes():
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
    for one in reversed(report.fewer):
        yield _fewer(one, labels)
    yield Text(
        f"{report.model.name} · {report.verdict} · {labels[report.label]} (margin"
        f" {round_down(report.clean_margin)}) · {report.scope} · {report.seconds:.2f} s"
    )


def _fewer(one: FewerWords, labels: Sequence[str]) -> Text:
    """A line about fewer words exchanged at once."""
    if one.flip is not None:
        said = f"{one.flip.sentence} ({labels[one.flip.answer]}, margin {round_up(one.flip.margin)})"
    elif one.verdict == "certified":
        assert one.margin is not None
        said = f"proven for all {one.sentences:,} sentences, margin at least {round_down(one.margin)}"
    else:
        said = f"unknown for {one.unknown:,} of {one.sentences:,} sentences"
    style = VERDICT_STYLES[one.verdict]
    return Text.assemble(f"at most {one.at_most}: ", (one.verdict, style), f", {said}")
