"""`buffet certify`: from a sentence to proofs, one per word."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buffet.cli.options import parse_at_most, parse_eps, parse_memory, parse_norm, typed, within
from buffet.cli.parameters import Device, Html, Json, Method, Model, MostSynonyms, Norm, SkipUnknown
from buffet.cli.terminal import print_json, progress_bar
from buffet.compositions import PARTS
from buffet.errors import BuffetError
from buffet.loading.directories import DEFAULT
from buffet.system.files import check_writable, write_atomically
from buffet.system.interruption import terminated_as_interrupted

if TYPE_CHECKING:
    from buffet.cli.request import Request
    from buffet.cli.substitution import Exchange

EXAMPLES = (
    'buffet certify "a gripping , moving film"',
    'buffet certify "a gripping , moving film" --method backward --html report.html',
    'buffet certify "a gripping , moving film" --words 2,4 --norm inf --eps 0.01',
    'buffet certify "a gripping , moving film" --words 2+4 --label positive --json',
    'buffet certify "a gripping , moving film" --method baseline   # quick',
    'buffet certify "a gripping , moving film" --swap gripping=dull,boring --swap film=movie',
    "buffet certify TEXT --synonyms synonyms.json --at-most 2",
    "buffet certify TEXT --typos 10 --at-most 1",
    "buffet certify TEXT --eps 0.5 --certificate proof.safetensors   # then: buffet check proof.safetensors",
    "buffet certify TEXT --model path/to/checkpoint --threads 2 --memory 4GB",
    "buffet certify digits:17 --model digits-vit --norm inf --words together",
)

REPLACEABLE = (*PARTS, "steps", "rate", "window", "cells")
"""What may be replaced in a method."""
OF_THIS_MACHINE = ("html", "json", "certificate", "threads", "memory")
"""Options that do not change the answer: the command that repeats it does without them."""
CHOICES = {part: ", ".join(names) for part, names in PARTS.items()}


def certify(
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="The sentence. Quote it; '--' before it if it starts with '-'. For an image classifier, the"
            " picture: a file, or **digits:17** for one of scikit-learn's digits.",
        ),
    ],
    pair: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The second sentence of a pair, for models with token types (NLI, …).",
        ),
    ] = None,
    synonyms: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Exchange words for these: JSON, word → list of words. Not a ball then: every sentence that"
            " can be made.",
        ),
    ] = None,
    most_synonyms: MostSynonyms = None,
    swap: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD=A,B", help="Exchange this word for these; may be given several times."),
    ] = None,
    typos: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Exchange every word for up to N misspellings: letters swapped, left out, added or hit"
            " beside the key.",
        ),
    ] = 0,
    at_most: Annotated[
        str | None,
        typer.Option(
            metavar="K",
            help="Words exchanged at once. Default: all that have substitutes. **1,2,all**: an answer"
            " for each.",
        ),
    ] = None,
    skip_unknown: SkipUnknown = False,
    model: Model = DEFAULT,
    words: Annotated[
        str,
        typer.Option(
            metavar="ROWS",
            help="Which rows move, counted from 0 with the special tokens: **2,5** each on its own,"
            " **2+5** both at once, **all** every word on its own, **together** all words at once. The words"
            " of an image are its patches.",
        ),
    ] = "all",
    special: Annotated[bool, typer.Option("--special", help="Special tokens may be moved too.")] = False,
    norm: Norm = "2",
    eps: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Verify moves of this size. Without it, the largest certified size is searched.",
        ),
    ] = None,
    method: Method = "buffet",
    propagation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Replace the method's propagation: {CHOICES['propagation']}."),
    ] = None,
    product: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Replace its choice of planes: {CHOICES['product']}."),
    ] = None,
    softmax: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Replace its softmax bounds: {CHOICES['softmax']}."),
    ] = None,
    optimise: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Replace what is learned: {CHOICES['optimise']}."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps of the optimiser; with **buffet** more of them prove more."),
    ] = None,
    rate: Annotated[float | None, typer.Option(metavar="R", help="Its learning rate (Adam).")] = None,
    start: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"The α it starts from: {CHOICES['start']}.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            metavar="LAYERS", help="With propagation backward: substitute through this many layers."
        ),
    ] = None,
    cells: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Cut every ball into up to N cells and prove each. Proves more: about 20 % with 6 cells, in"
            " three to four times the time.",
        ),
    ] = None,
    search: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="secant (few evaluations) or bisection (the paper's: doubling, ten halvings).",
        ),
    ] = "secant",
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Return the best that is proven after this time, or when interrupted (Ctrl-C), for all words"
            " together. Half of it is for the certificate, if one is to be written.",
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS", help="The class to defend, by name or index. Default: the model's answer."
        ),
    ] = None,
    json: Json = False,
    html: Html = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --eps: also write the proofs, for **buffet check**. Nothing is written unless every"
            " task is certified and the checker accepts.",
        ),
    ] = None,
    no_attack: Annotated[
        bool, typer.Option("--no-attack", help="Do not look for moves that change the answer.")
    ] = False,
    best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="With --eps: find the largest margin of the method and the others it asks. By default the"
            " quickest are asked first, and the first proof is the answer.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the attack.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Cores to use. With **backward** and **buffet** every core bounds a word of its own; by"
            " default they use all. Other methods use one: more help large models, and slow small ones.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory the bounds may take (**512MB**, **4GB**); what takes more is refused. Default: what"
            " one word takes, and several at once within 2GB.",
        ),
    ] = None,
    device: Device = "cpu",
) -> None:
    """Prove how far the words of a sentence can move before the model may change its answer.

    Every word is a task of its own: its embedding may move anywhere in a ball around where it is, the others
    stay. **certified** is a radius that is proven (rounded down), **attacked** one at which
    a change of the answer was found (rounded up), **margin** the proven lead of the answer there.

    With **--synonyms**, **--swap** or **--typos**, words are exchanged instead: the answer is proven for all
    sentences that can be made, or the one that flips it is named.

    Pixels of an image go from 0 to 1. With **--norm inf --eps** they do not leave that range.

    Exit code 0: every task certified (without --eps: every radius above 0). 1: not certified. 2: bad input.
    """
    given = dict(locals())
    from buffet.cli.request import Request
    from buffet.cli.substitution import Exchange
    from buffet.query import checked_budget
    from buffet.system.devices import device_named

    request = Request(
        text=text,
        model=model,
        words=words.strip().lower(),
        special=special,
        norm=parse_norm(norm),
        eps=parse_eps(eps),
        method=method,
        parts={part: given[part] for part in REPLACEABLE},
        search=search,
        budget=budget if budget is None else checked_budget(budget),
        label=label,
        attack=not no_attack,
        best=best,
        seed=within("--seed", seed, 0, 2**63 - 1),
        memory=None if memory is None else parse_memory(memory),
        threads=None if threads is None else within("--threads", threads, 1, 4096),
        device=str(device_named(device)),
        pair=pair,
        command=typed(certify, given, "text", without=OF_THIS_MACHINE),
    )
    exchange = Exchange(
        synonyms, most_synonyms, tuple(swap or ()), typos, parse_at_most(at_most or "all"), skip_unknown
    )
    if most_synonyms is not None and synonyms is None:
        raise BuffetError("--most-synonyms: is about --synonyms; give a file of them")
    if exchange.asked:
        _check_exchange(request, certificate)
        verdict = _exchanged(request, exchange, html, json)
    elif at_most is not None or skip_unknown:
        raise BuffetError(
            "--at-most, --skip-unknown: are about --synonyms, --swap or --typos; give one of them"
        )
    else:
        _check(request, html, certificate)
        verdict = _moved(request, html, certificate, json)
    raise typer.Exit(0 if verdict == "certified" else 1)


def _exchanged(request: Request, exchange: Exchange, html: Path | None, json: bool) -> str:
    """Answer about exchanged words, and return the verdict."""
    from buffet.cli.substitution import answer, print_words
    from buffet.report import render_substitutions

    if html is not None:
        check_writable(html)
    with progress_bar("certifying"):
        about = answer(request, exchange)
    if html is not None:
        write_atomically(html, render_substitutions(about))
    print_json(about.model_dump(mode="json")) if json else print_words(about, html)
    return about.verdict


def _moved(request: Request, html: Path | None, certificate: Path | None, json: bool) -> str:
    """Answer about moved words, and return the verdict."""
    from buffet.cli.answer import print_report
    from buffet.cli.request import certify_to, end_of, run
    from buffet.report import render_html

    for option in _idle(request):
        typer.echo(f"{option}: has no effect here", err=True)
    with progress_bar("certifying") as progress, terminated_as_interrupted():
        end = end_of(request)
        report = run(request, progress, 1.0 if certificate is None else 0.5)
        if certificate is not None and report.verdict == "certified":
            certify_to(certificate, request, report, end)
    if certificate is not None:
        proven = report.verdict == "certified"
        outcome = "checked and written" if proven else "not written, as not every task is certified"
        typer.echo(f"{certificate}: {outcome}", err=True)
    if html is not None:
        write_atomically(html, render_html(report))
    print_json(report.model_dump(mode="json")) if json else print_report(report, html)
    return report.verdict


def _check_exchange(request: Request, certificate: Path | None) -> None:
    """Refuse what is about balls only."""
    given = {
        "--eps": request.eps,
        "--norm": None if request.norm == 2 else request.norm,
        "--words": None if request.words == "all" else request.words,
        "--certificate": certificate,
        "--best": request.best or None,
    }
    if idle := [name for name, value in given.items() if value is not None]:
        raise BuffetError(f"{idle[0]}: does not go with --synonyms, --swap or --typos; leave one of them out")


def _check(request: Request, html: Path | None, certificate: Path | None) -> None:
    """Refuse what cannot be answered or written, before any work."""
    from buffet.search.root_finding import ROOT_FINDERS

    request.chosen  # noqa: B018 (an unknown part of a method is an error here)
    if request.search not in ROOT_FINDERS:
        known = ", ".join(ROOT_FINDERS)
        raise BuffetError(f"--search: unknown search {request.search!r}; choose one of: {known}")
    if certificate is not None and request.pair is not None:
        raise BuffetError("--certificate: is about one text; leave --pair or --certificate out")
    if certificate is not None and request.eps is None:
        raise BuffetError("--certificate: a certificate is about one size; give it with --eps")
    paths = [path for path in (html, certificate) if path is not None]
    for path in paths:
        check_writable(path)
    if len({path.resolve() for path in paths}) < len(paths):
        raise BuffetError("--html and --certificate: each needs a file of its own")


def _idle(request: Request) -> list[str]:
    """Options that were given and change nothing."""
    idle = () if request.chosen.optimiser.learns else ("steps", "rate", "start")
    options = [f"--{name}" for name in idle if request.parts[name] is not None]
    if request.eps is not None and request.search != "secant":
        options.append("--search")
    if request.best and (request.eps is None or not request.chosen.rivals):
        options.append("--best")
    return options
