"""`buffet certify`: from a sentence to proofs, one per word."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from buffet.attack import AttackSettings
from buffet.bounds.choices import PRODUCTS
from buffet.bounds.optimise import MODES, STARTS
from buffet.bounds.propagation import PROPAGATIONS
from buffet.bounds.softmax import SOFTMAXES
from buffet.certificate import write_certificate
from buffet.cli.options import (
    DEVICE_HELP,
    parse_eps,
    parse_label,
    parse_memory,
    parse_norm,
    parse_words,
    within,
)
from buffet.cli.terminal import print_json, print_report, progress_bar
from buffet.devices import device_named
from buffet.errors import BuffetError
from buffet.loading import DEFAULT, Encoding, ImageModel, Model, load
from buffet.loading.images import pixel_box
from buffet.methods import METHODS, Method, method_named
from buffet.regions import LpBall, Region
from buffet.report import (
    CertifyReport,
    ModelInfo,
    Query,
    TaskResult,
    Token,
    Versions,
    check_writable,
    render_html,
    together,
    write_atomically,
)
from buffet.search import radius
from buffet.strategies import STRATEGIES
from buffet.tracing import MarginTrace
from buffet.verify import Engine, bound_margins, checked_budget, clean_answer, verify

EXAMPLES = (
    'buffet certify "a gripping , moving film"',
    'buffet certify "a gripping , moving film" --method backward --html report.html',
    'buffet certify "a gripping , moving film" --words 2,4 --norm inf --eps 0.01',
    'buffet certify "a gripping , moving film" --words 2+4 --label positive --json',
    'buffet certify "a gripping , moving film" --method baseline   # quick',
    "buffet certify TEXT --eps 0.5 --certificate proof.safetensors   # then: buffet check proof.safetensors",
    "buffet certify TEXT --eps 0.5 --method o-buffet --steps 1000 --trace margins.svg",
    "buffet certify TEXT --model path/to/checkpoint --threads 2 --memory 4GB",
    "buffet certify digits:17 --model digits-vit --norm inf --words together",
)

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Request:
    """The options, checked; nothing here depends on the model yet."""

    text: str
    model: str
    words: str
    special: bool
    norm: float
    eps: float | None
    method: str
    parts: Mapping[str, str | int | float | None]  # replaced parts of the method
    search: str
    budget: float | None
    trace: Path | None
    label: str | None
    attack: bool
    seed: int
    memory: int
    device: str

    @property
    def chosen(self) -> Method:
        return method_named(self.method, **self.parts)

    def command(self) -> str:
        """The command line that asks for the same, without what is default anyway."""
        given: dict[str, object] = {
            "--model": None if self.model == DEFAULT else self.model,
            "--words": None if self.words == "all" else self.words,
            "--norm": None if self.norm == 2 else f"{self.norm!r}",
            "--eps": None if self.eps is None else repr(self.eps),
            "--method": self.method,
            **{f"--{name}": value for name, value in self.parts.items()},
            "--search": None if self.search == "secant" or self.eps is not None else self.search,
            "--budget": self.budget,
            "--label": self.label,
            "--seed": self.seed or None,
            "--device": None if self.device == "cpu" else self.device,
        }
        flags = ["--special"] * self.special + ["--no-attack"] * (not self.attack)
        options = [str(part) for pair in given.items() if pair[1] is not None for part in pair]
        # A text that starts like an option must come after "--".
        text = ["--", self.text] if self.text.startswith("-") else [self.text]
        return shlex.join(["buffet", "certify", *options, *flags, *text])


def certify(
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="The sentence. Quote it; '--' before it if it starts with '-'. For an image classifier, the"
            " picture: a file, or **digits:17** for one of scikit-learn's digits.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|DIR|OWNER/MODEL",
            help="An embedded model (see **buffet models**), a checkpoint directory, or a model of the"
            " Hugging Face Hub (needs buffet[hf]).",
        ),
    ] = DEFAULT,
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
    norm: Annotated[
        str, typer.Option(metavar="P", help="The norm of a move: 1, 2, inf, or any p ≥ 1.")
    ] = "2",
    eps: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Verify moves of this size. Without it, the largest certified size is searched.",
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help="How bounds are computed (see **buffet methods**).")
    ] = "buffet",
    propagation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Replace the method's propagation: {', '.join(PROPAGATIONS)}."),
    ] = None,
    product: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Replace its choice of planes: {', '.join(PRODUCTS)}.")
    ] = None,
    softmax: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Replace its softmax bounds: {', '.join(SOFTMAXES)}.")
    ] = None,
    optimise: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Replace what is learned: {', '.join(MODES)}.")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Steps of the optimiser.")] = None,
    rate: Annotated[float | None, typer.Option(metavar="R", help="Its learning rate (Adam).")] = None,
    start: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"The α it starts from: {', '.join(STARTS)}.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            metavar="LAYERS", help="With propagation backward: substitute through this many layers."
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
        typer.Option(metavar="SECONDS", help="Return the best that is proven after this time (about)."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --eps and a method that learns: write the margin at every step, as a picture"
            " (.svg, .png, .pdf) against 0 and the baseline, or else as CSV. It takes all steps then.",
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS", help="The class to defend, by name or index. Default: the model's answer."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON and nothing else.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a report page.")] = None,
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
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the attack.")] = 0,
    threads: Annotated[
        int,
        typer.Option(metavar="N", help="Threads. More than one helps large models, and slows small ones."),
    ] = 1,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory the bounds may take together.")] = "2GB",
    device: Annotated[str, typer.Option(metavar="NAME", help=DEVICE_HELP)] = "cpu",
) -> None:
    """Prove how far the words of a sentence can move before the model may change its answer.

    Every word is a task of its own: its embedding may move anywhere in a ball around where it is, the others
    stay. **certified** is a radius that is proven (rounded down), **attacked** one at which
    a change of the answer was found (rounded up), **margin** the proven lead of the answer there.

    Pixels of an image go from 0 to 1. With **--norm inf --eps** they do not leave that range.

    Exit code 0: every task certified (without --eps: every radius above 0). 1: not certified. 2: bad input.
    """
    request = Request(
        text=text,
        model=model,
        words=words.strip().lower(),
        special=special,
        norm=parse_norm(norm),
        eps=parse_eps(eps),
        method=method,
        parts={
            "propagation": propagation,
            "product": product,
            "softmax": softmax,
            "optimise": optimise,
            "steps": steps,
            "rate": rate,
            "start": start,
            "window": window,
        },
        search=search,
        budget=budget if budget is None else checked_budget(budget),
        trace=trace,
        label=label,
        attack=not no_attack,
        seed=within("--seed", seed, 0, 2**63 - 1),
        memory=parse_memory(memory),
        device=str(device_named(device)),
    )
    request.chosen  # noqa: B018 (an unknown part is an error before any work)
    if search not in STRATEGIES:
        raise BuffetError(f"--search: unknown search {search!r}; choose one of: {', '.join(STRATEGIES)}")
    if trace is not None and (eps is None or request.chosen.optimise == "none"):
        raise BuffetError("--trace: there are steps to record only with --eps and a method that learns")
    if certificate is not None and eps is None:
        raise BuffetError("--certificate: a certificate is about one size; give it with --eps")
    for path in (html, trace, certificate):
        if path is not None:
            check_writable(path)
    torch.set_num_threads(within("--threads", threads, 1, 4096))
    with progress_bar("certifying") as progress:
        report = run(request, progress)
        if certificate is not None and report.verdict == "certified":
            _write_certificate(certificate, request, report)
    if certificate is not None and report.verdict != "certified":
        typer.echo(f"{certificate}: not written, as not every task is certified", err=True)
    if html is not None:
        write_atomically(html, render_html(report))
    if json:
        print_json(report.model_dump(mode="json"))
    else:
        print_report(report, html)
    raise typer.Exit(0 if report.verdict == "certified" else 1)


def run(request: Request, progress: Progress) -> CertifyReport:
    """Answer the request; the same request gives the same numbers, up to the split over threads."""
    model = load(request.model).to(torch.device(request.device))
    encoding = model.encode(request.text)
    tasks = parse_words(request.words, encoding, special=request.special)
    x = model.embed(request.text)
    logits = model.program64.evaluate(x.double())
    regions = [LpBall(x, group, request.norm) for group in _by_size(tasks)]
    label, clean = clean_answer(model, regions[0], parse_label(request.label, model.labels))
    answer = _radii if request.eps is None else _verdicts
    results, evaluations, seconds, attack_seconds = [], 0, 0.0, 0.0
    for done, region in enumerate(regions):

        def report(share: float, done: int = done) -> None:
            progress((done + share) / len(regions))

        part = answer(model, encoding, region, request, label, report)
        results += part.tasks
        evaluations, seconds = evaluations + part.evaluations, seconds + part.seconds
        attack_seconds += part.attack_seconds
    order = {task: place for place, task in enumerate(tasks)}
    results.sort(key=lambda task: order[task.words])
    attacked = [task.attacked for task in results if task.attacked is not None]
    return CertifyReport(
        text=request.text,
        tokens=tuple(
            Token(index=i, token=token, special=special, unknown=unknown)
            for i, (token, special, unknown) in enumerate(
                zip(encoding.tokens, encoding.special, encoding.unknown, strict=True)
            )
        ),
        model=ModelInfo(
            name=model.name,
            labels=model.labels,
            layers=model.config.num_hidden_layers,
            width=model.config.hidden_size,
        ),
        query=_query(request, label),
        answer=int(logits.argmax()),
        logits=tuple(logits.tolist()),
        clean_margin=clean,
        verdict=together([task.verdict for task in results]),
        certified=min(task.certified for task in results),
        attacked=min(attacked, default=None),
        tasks=tuple(results),
        evaluations=evaluations,
        seconds=seconds,
        attack_seconds=attack_seconds if request.eps is None else None,
        command=request.command(),
        versions=Versions.current(),
    )


def _write_certificate(path: Path, request: Request, report: CertifyReport) -> None:
    """The proofs of all tasks of a report that is certified."""
    model = load(request.model)
    x = model.embed(request.text)
    groups = _by_size([task.words for task in report.tasks])
    regions = [LpBall(x, group, request.norm, request.eps) for group in groups]
    write_certificate(path, model, regions, request.chosen, report.query.label)


def _by_size(tasks: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """The tasks in groups that move equally many rows: a region takes only such."""
    groups: dict[int, list[tuple[int, ...]]] = {}
    for task in tasks:
        groups.setdefault(len(task), []).append(task)
    return list(groups.values())


def _query(request: Request, label: int) -> Query:
    method = request.chosen
    return Query(
        norm="inf" if math.isinf(request.norm) else request.norm,
        eps=request.eps,
        method=request.method,
        propagation=method.propagation,
        product=method.product,
        softmax=method.softmax,
        optimise=method.optimise,
        steps=None if method.optimise == "none" else method.steps,
        rate=None if method.optimise == "none" else method.rate,
        start=None if method.optimise == "none" else method.start,
        window=method.window,
        search=request.search if request.eps is None else None,
        budget=request.budget,
        label=label,
        attack=request.attack,
        seed=request.seed,
        threads=torch.get_num_threads(),
        memory=request.memory,
        device=request.device,
    )


@dataclass(frozen=True)
class _Part:
    tasks: list[TaskResult]
    evaluations: int
    seconds: float
    attack_seconds: float = 0.0


def _radii(
    model: Model, encoding: Encoding, region: LpBall, request: Request, label: int, progress: Progress
) -> _Part:
    """Certified and attacked radius of every task."""
    found = radius(
        model,
        region,
        request.chosen,
        label=label,
        search=request.search,
        attack=request.attack,
        budget=request.budget,
        seed=request.seed,
        engine=Engine(memory=request.memory),
        progress=progress,
    )
    tasks = [
        TaskResult(
            words=task.words,
            tokens=tuple(encoding.tokens[i] for i in task.words),
            verdict="certified"
            if task.certified > 0
            else "falsified"
            if found.clean_margin < 0
            else "unknown",
            certified=task.certified,
            attacked=_finite(task.attacked),
            margin=_finite(task.margin),
            margins=None,
            counterexample=None,
            evaluations=task.evaluations,
        )
        for task in found.tasks
    ]
    return _Part(tasks, found.evaluations, found.seconds, found.attack_seconds)


def _verdicts(
    model: Model, encoding: Encoding, region: LpBall, request: Request, label: int, progress: Progress
) -> _Part:
    """The verdict of every task at the given ε."""
    assert request.eps is not None
    engine = Engine(memory=request.memory)
    told = None
    if request.trace:
        plain = bound_margins(model, region.with_eps(request.eps), METHODS["baseline"], label, engine)
        names = ["+".join(f"{i} {encoding.tokens[i]}" for i in words) for words in region.moved.tolist()]
        told = MarginTrace(names, plain.amin(-1).tolist())
    moves: Region = region.with_eps(request.eps)
    if isinstance(model, ImageModel) and math.isinf(region.p):
        moves = pixel_box(region.center, region.moved, request.eps)
    found = verify(
        model,
        moves,
        None,
        request.chosen,
        label=label,
        falsify=AttackSettings(seed=request.seed) if request.attack else False,
        budget=request.budget,
        trace=told,
        seed=request.seed,
        engine=engine,
    )
    if request.trace and told:
        write_atomically(request.trace, told.render(request.trace))
    progress(1.0)
    others = [name for i, name in enumerate(model.labels) if i != label]
    tasks = []
    for t, words in enumerate(map(tuple, region.moved.tolist())):
        verdict, margins, point = found.verdicts[t], found.margins[t].tolist(), found.counterexamples[t]
        tasks.append(
            TaskResult(
                words=words,
                tokens=tuple(encoding.tokens[i] for i in words),
                verdict=verdict,
                certified=request.eps if verdict == "certified" else 0.0,
                attacked=request.eps if verdict == "falsified" else None,
                margin=_finite(float(found.margins[t].min())),
                margins={name: _finite(m) for name, m in zip(others, margins, strict=True)},
                counterexample=None if point is None else point[list(words)].tolist(),
                evaluations=1,
            )
        )
    return _Part(tasks, 1, found.seconds)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
