"""Answers a request of `buffet certify`: the options, checked, to a report."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import typer
from torch import Tensor

from buffet.attack import AttackSettings
from buffet.certificates.certificate import Question, write_certificate
from buffet.cli.options import (
    parse_label,
    parse_words,
)
from buffet.engine import Engine
from buffet.loading import Encoding, ImageModel, Model, load_checkpoint
from buffet.loading.images import pixel_box
from buffet.methods import Method, method_named
from buffet.query import clean_answer
from buffet.regions import LpBall, Region
from buffet.report import (
    CertifyReport,
    ModelInfo,
    Picture,
    QueryInfo,
    TaskResult,
    Token,
    Versions,
    together,
)
from buffet.search.radius import radius
from buffet.system.parallel import cores
from buffet.verification.verify import verify
from buffet.words.nearest import nearest_words

Progress = Callable[[float], None]
NEAREST = 3
"""Words of the vocabulary that are named for a word; one of each where several move together."""
LEAST_BUDGET = 1e-3
"""Seconds for tasks that no time is left for: they are answered, by nothing proven."""


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
    label: str | None
    attack: bool
    best: bool  # the largest margin, not just a proof
    seed: int
    memory: int | None
    threads: int | None  # None: one, or where words can be worked on at the same time all there are
    device: str
    pair: str | None  # the second text of a pair
    command: str  # the command line that asks for the same

    @property
    def chosen(self) -> Method:
        return method_named(self.method, **self.parts)

    @property
    def texts(self) -> tuple[str, ...]:
        """What the model reads: the text, or both of a pair."""
        return (self.text,) if self.pair is None else (self.text, self.pair)


def run(request: Request, progress: Progress, share: float = 1.0) -> CertifyReport:
    """Answer the request; the same request gives the same numbers, up to the split over threads.

    It may take a `share` of the budget. An interruption ends it with what is known by then, if anything is.
    Sets how many threads PyTorch uses.
    """
    model = load_checkpoint(request.model).to(torch.device(request.device))
    encoding = model.encode(*request.texts)
    tasks = parse_words(request.words, encoding, special=request.special)
    apart = Engine(memory=request.memory).parallel(request.chosen) and request.device == "cpu"
    cut = request.chosen.cells > 1 or request.budget is not None
    useful = cores() if cut else min(cores(), len(tasks))
    torch.set_num_threads(request.threads or (useful if apart else 1))
    x = model.embed(*request.texts)
    logits = model.program64.evaluate(x.double())
    regions = [LpBall(x, group, request.norm) for group in _by_size(tasks)]
    label, clean = clean_answer(model, regions[0], parse_label(request.label, model.labels))
    answer = _radii if request.eps is None else _verdicts
    results, evaluations, seconds, attack_seconds = [], 0, 0.0, 0.0
    end = end_of(request, share)
    for done, region in enumerate(regions):

        def report(share: float, done: int = done) -> None:
            progress((done + share) / len(regions))

        share = region.tasks / sum(later.tasks for later in regions[done:])
        part = answer(model, encoding, region, _until(request, end, share), label, report)
        results += part.tasks
        evaluations, seconds = evaluations + part.evaluations, seconds + part.seconds
        attack_seconds += part.attack_seconds
        end = time.perf_counter() if part.interrupted else end
    if not isinstance(model, ImageModel):
        results = [_with_neighbours(model, encoding, task, request.norm) for task in results]
    order = {task: place for place, task in enumerate(tasks)}
    results.sort(key=lambda task: order[task.words])
    attacked = [task.attacked for task in results if task.attacked is not None]
    return CertifyReport(
        text=request.text,
        tokens=_tokens(encoding),
        model=ModelInfo.of(model),
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
        command=request.command,
        versions=Versions.current(),
        picture=_picture(model, x),
    )


def _with_neighbours(model: Model, encoding: Encoding, task: TaskResult, norm: float) -> TaskResult:
    """A task with the words of the vocabulary nearest to what moves in it."""
    most = NEAREST if len(task.words) == 1 else 1
    found, held = nearest_words(model, encoding, task.words, norm, task.certified, most)
    return task.model_copy(update={"nearest": found, "held": held})


def _tokens(encoding: Encoding) -> tuple[Token, ...]:
    named = zip(encoding.tokens, encoding.special, encoding.unknown, strict=True)
    return tuple(
        Token(index=i, token=token, special=special, unknown=unknown)
        for i, (token, special, unknown) in enumerate(named)
    )


def _picture(model: Model, x: Tensor) -> Picture | None:
    """The image in these rows of pixels; None for a sentence."""
    if not isinstance(model, ImageModel):
        return None
    config = model.config
    pixels = (255 * x[1:]).round().to("cpu", torch.uint8).numpy().tobytes()  # all but the class token
    return Picture(
        side=config.side,
        patch=config.patch_size,
        channels=config.num_channels,
        pixels=base64.b64encode(pixels).decode(),
    )


def certify_to(path: Path, request: Request, report: CertifyReport, end: float | None) -> None:
    """The proofs of all tasks of a report that is certified, within the time that is left."""
    model = load_checkpoint(request.model)
    x = model.embed(request.text)
    groups = _by_size([task.words for task in report.tasks])
    regions = [LpBall(x, group, request.norm, request.eps) for group in groups]
    questions = [Question(region, report.query.label) for region in regions]
    write_certificate(path, model, questions, request.chosen, request.text, end)


def _by_size(tasks: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """The tasks in groups that move equally many rows: a region takes only such."""
    groups: dict[int, list[tuple[int, ...]]] = {}
    for task in tasks:
        groups.setdefault(len(task), []).append(task)
    return list(groups.values())


def _query(request: Request, label: int) -> QueryInfo:
    method = request.chosen
    return QueryInfo(
        norm="inf" if math.isinf(request.norm) else request.norm,
        eps=request.eps,
        method=request.method,
        propagation=method.propagation,
        product=method.product,
        softmax=method.softmax,
        optimise=method.optimise,
        steps=method.steps if method.optimiser.learns else None,
        rate=method.rate if method.optimiser.learns else None,
        start=method.start if method.optimiser.learns else None,
        window=method.window,
        cells=method.cells,
        search=request.search if request.eps is None else None,
        budget=request.budget,
        label=label,
        attack=request.attack,
        seed=request.seed,
        threads=torch.get_num_threads(),
        memory=request.memory,
        device=request.device,
    )


def end_of(request: Request, share: float = 1.0) -> float | None:
    """When a share of a budget that begins now is spent, on the clock of `time.perf_counter`."""
    return None if request.budget is None else time.perf_counter() + share * request.budget


def _until(request: Request, end: float | None, share: float = 1.0) -> Request:
    """The request with a share of the time that is left."""
    if end is None:
        return request
    return replace(request, budget=share * max(end - time.perf_counter(), LEAST_BUDGET))


@dataclass(frozen=True)
class _Part:
    tasks: list[TaskResult]
    evaluations: int
    seconds: float
    attack_seconds: float = 0.0
    interrupted: bool = False


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
            **{name: task[name] for name in ("words", "verdict", "certified", "attacked", "margin")},
            tokens=tuple(encoding.tokens[i] for i in task["words"]),
            evaluations=task["evaluations"],
        )
        for task in found.records()
    ]
    if found.interrupted:
        typer.echo("note: interrupted", err=True)
    return _Part(tasks, found.evaluations, found.seconds, found.attack_seconds, interrupted=found.interrupted)


def _verdicts(
    model: Model, encoding: Encoding, region: LpBall, request: Request, label: int, progress: Progress
) -> _Part:
    """The verdict of every task at the given ε."""
    assert request.eps is not None
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
        best=request.best,
        seed=request.seed,
        engine=Engine(memory=request.memory),
    )
    progress(1.0)
    if found.progress:
        typer.echo(f"note: {found.progress}", err=True)
    tasks = [
        TaskResult(
            **{name: task[name] for name in ("words", "verdict", "margin", "margins", "counterexample")},
            tokens=tuple(encoding.tokens[i] for i in task["words"]),
            certified=request.eps if task["verdict"] == "certified" else 0.0,
            attacked=request.eps if task["verdict"] == "falsified" else None,
            evaluations=1,
        )
        for task in found.records()
    ]
    return _Part(tasks, 1, found.seconds, interrupted=found.interrupted)
