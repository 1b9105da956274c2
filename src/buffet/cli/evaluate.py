"""`buffet evaluate`: how much of a data set is classified correctly, proven, broken and open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buffet.cli.options import parse_at_most, parse_eps, parse_norm, typed, within
from buffet.cli.parameters import (
    GPUS,
    Address,
    Backend,
    Device,
    Html,
    Json,
    Method,
    Model,
    MostSynonyms,
    Norm,
    RetryFailed,
    SkipUnknown,
    Workers,
)
from buffet.cli.running import (
    check_backend,
    chosen_fleet,
    shown_progress,
)
from buffet.cli.terminal import plain_table, print_json, print_table
from buffet.errors import BuffetError
from buffet.loading.directories import DEFAULT
from buffet.printing import duration
from buffet.system.files import check_writable, write_atomically

if TYPE_CHECKING:
    from buffet.evaluation import Evaluation

EXAMPLES = (
    "buffet evaluate --data dev.tsv --eps 0.1,0.2,0.5",
    "buffet evaluate --data dev.tsv --synonyms synonyms.json --at-most 1,2,all --html page.html",
    "buffet evaluate --data path/to/sst2 --typos 5 --at-most 1 --count 100 --seed 7",
    "buffet evaluate --data dev.tsv --synonyms synonyms.json --budget 20 -o rows.ndjson   # can be resumed",
    "buffet evaluate --data dev.tsv --synonyms synonyms.json --at-most 1 --min 0.6   # for CI",
)
HEADER = ("clean", "certified", "under attack", "open")


def evaluate(
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE|DIR|hf:NAME",
            help="A TSV file (sentence, tab, label, with that header), a directory with test.tsv and dev.tsv,"
            " or a data set of the Hugging Face Hub (needs buffet[data]).",
        ),
    ],
    part: Annotated[
        str, typer.Option(metavar="NAME", help="Of a directory or of the Hub: **test** or **dev**.")
    ] = "test",
    model: Model = DEFAULT,
    eps: Annotated[
        str | None,
        typer.Option(metavar="SIZE[,SIZE…]", help="Words move within balls of this size; several: a curve."),
    ] = None,
    norm: Norm = "2",
    words: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="With --eps: **each** word on its own (proven if every one is), or **all** words at once.",
        ),
    ] = "each",
    synonyms: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Words are exchanged for these: JSON, word → list of words."),
    ] = None,
    most_synonyms: MostSynonyms = None,
    typos: Annotated[
        int, typer.Option(metavar="N", help="Words are exchanged for up to N misspellings each.")
    ] = 0,
    at_most: Annotated[
        str,
        typer.Option(
            metavar="K[,K…]", help="Words that are exchanged at once, **all** for all; several: a curve."
        ),
    ] = "all",
    skip_unknown: SkipUnknown = False,
    method: Method = "buffet",
    budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time per sentence; what is still open then stays open."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only N sentences, drawn at random, with 95 % confidence intervals."),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the sample, the attacks and the misspellings.")
    ] = 0,
    min: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Exit with 1 if certified accuracy is below this."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="The file of rows, one per sentence: the same command resumes.",
        ),
    ] = None,
    html: Html = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a line per sentence and level.")
    ] = None,
    json: Json = False,
    workers: Workers = None,
    backend: Backend = "local",
    address: Address = None,
    gpus: Annotated[float, GPUS] = 0.0,
    device: Device = "cpu",
    retry_failed: RetryFailed = False,
) -> None:
    """Prove as many answers of a data set as can be proven, and try to break the others.

    Three accuracies are reported. **clean**: the share of sentences that the model classifies correctly.
    **certified**: correctly, and proven for everything that may be done to their words. **under attack**:
    correctly, and no counterexample was found. The true robust accuracy lies between the last two; **open**
    is what lies between. Certified is rounded down, all others up.

    Give **--eps** for words whose embeddings move in balls, or **--synonyms** or **--typos** (or both) for
    words that are exchanged. What is proven at one level is proven at all smaller ones, and what breaks at
    one breaks at all larger ones, so a curve costs little more than its hardest point.

    A sentence that the model cannot take (empty, too long, no known word) counts as misclassified; one
    whose substitutes cannot all be gone through counts as not certified. Either is named.

    With **-o** the work can be interrupted at any moment: the same command continues.

    Exit code 0: done, and certified accuracy (at the largest level) reaches **--min**, if that is given.
    1: it does not. 2: bad input.
    """
    given = dict(locals())
    from buffet.evaluation.arguments import question
    from buffet.evaluation.evaluate import classifier, setup_of
    from buffet.evaluation.examples import read_examples
    from buffet.evaluation.questions import Effort
    from buffet.evaluation.run import run
    from buffet.experiments.config import Running
    from buffet.methods import method_named
    from buffet.query import checked_budget

    if min is not None and not 0 <= min <= 1:
        raise BuffetError(f"--min: got {min}; give a share from 0 to 1")
    asked = question(
        None if eps is None else [size for part in eps.split(",") if (size := parse_eps(part)) is not None],
        parse_norm(norm),
        words.strip().lower(),
        synonyms,
        most_synonyms,
        typos,
        None if at_most == "all" else parse_at_most(at_most),
        skip_unknown,
    )
    effort = Effort(method_named(method), None if budget is None else checked_budget(budget), seed)
    if workers is not None:
        within("--workers", workers, 1, 4096)
    running = Running(workers=workers, gpus=gpus, device=device)
    check_backend(backend, address, running)
    for target in (html, csv):
        if target is not None:
            check_writable(target)
    sample = read_examples(data, part).sample(count, seed)
    setup = setup_of(*classifier(model), asked, effort, device)
    with chosen_fleet(backend, address, running) as fleet, shown_progress() as report:
        found = run(setup, sample, fleet, out=out, retry_failed=retry_failed, progress=report)
    if csv is not None:
        write_atomically(csv, found.to_csv())
    if html is not None:
        from buffet.report.evaluation import evaluation_page

        write_atomically(html, evaluation_page(found, typed(evaluate, given)))
    print_json(found.to_dict()) if json else _print(found)
    if min is not None and not json:
        typer.echo(_compared(found, min))
    raise typer.Exit(1 if min is not None and found.certified < min else 0)


def _print(found: Evaluation) -> None:
    typer.echo(f"{found.asked}\n")
    table = plain_table()
    for name in (found.question.kind.replace("_", " "), *HEADER):
        table.add_column(name, justify="right", no_wrap=True)
    for cells in found.table():
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    print_table(table)
    typer.echo("")
    for note in found.notes:
        typer.echo(f"note: {note}")
    work = sum(row.seconds or 0.0 for row in found.sentences)
    typer.echo(f"{duration(found.seconds)}, {duration(work)} of work")


def _compared(found: Evaluation, minimum: float) -> str:
    """How certified accuracy compares with what it has to be."""
    share = found.worst.certified
    verb = "reaches" if share.value >= minimum else "is below"
    line = f"certified accuracy {share.text(up=False)} {verb} {minimum}"
    if share.interval is None:
        return line
    return (
        f"{line}: that is the share of the sample; that of all {found.total:,} sentences may be as low as"
        f" {share.interval[0]:.2f}"
    )
