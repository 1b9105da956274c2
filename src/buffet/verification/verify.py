"""From a query to a verdict. Only this module turns bounds into claims.

A query is *certified* when every margin's lower bound is finite and strictly positive, *falsified* when a
concrete point of the region was re-evaluated on the model and has another answer or violates the property,
and *unknown* otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.attack import AttackSettings, attack
from buffet.branching.prove import Cutting, Unfinished, Walked, can_cut
from buffet.branching.stems import Effort
from buffet.engine import Classifier, Engine, Trace, bound_margins, plausible, proven
from buffet.methods import Method, method_named
from buffet.optimisation.context import Context
from buffet.propagation.clean_run import CleanRun
from buffet.properties import Property
from buffet.query import Query, deadline_of, question, sized, without_padding
from buffet.regions import Region
from buffet.results import Subject, Verification
from buffet.search.cells import tree_of_proofs
from buffet.search.policy import POLICY
from buffet.search.portfolio import Ladder
from buffet.system.parallel import side_by_side
from buffet.system.precision import full_precision
from buffet.verdicts import Verdict
from buffet.verification.enumeration import Outcome
from buffet.verification.word_search import WordSearch


@full_precision()
def verify(
    model: Classifier,
    region: Region,
    eps: float | Sequence[float] | Tensor | None = None,
    method: str | Method = "buffet",
    *,
    label: int | None = None,
    property: Property | None = None,
    mask: Bool[Tensor, "tokens"] | None = None,
    budget: float | None = None,
    falsify: bool | AttackSettings = True,
    best: bool = False,
    trace: Trace | None = None,
    seed: int = 0,
    engine: Engine | None = None,
) -> Verification:
    """Prove that no point of `region` changes the model's answer (or violates a property), or find one.

    A method with a portfolio, as ``buffet``, asks the cheapest of its rivals first and is done with a task as
    soon as it is proven or a quick attack breaks it.

    Args:
        model: a loaded model (`buffet.load`).
        region: what may move; an `LpBall` without a size takes it from `eps`.
        eps: the size of the ball, one for all tasks or one per task.
        method: a name in `buffet.METHODS`, or what `buffet.method` makes of one.
        label: the class to defend; by default the one the model gives the unmoved rows.
        property: what is to be proven of the outputs instead, such as `Property.within` for a regression.
        mask: False for the padding rows of the sentence.
        budget: seconds after which the best bound found by then is returned. An attack has what is left of
            them, and at least a quarter (at most half a second) more. An interruption (Ctrl-C) ends it too,
            with what is known by then, if anything is.
        falsify: when a task is not certified, look for a counterexample, very briefly or as the settings say.
        best: find the largest margin that the method and its portfolio have for every task, not just a proof.
        trace: called with the tasks, the step and the margins at every step of an optimiser, which then takes
            all its steps whether or not the tasks are proven.

    Example:
        >>> import buffet
        >>> model = buffet.load()
        >>> x = model.embed("a gripping , moving film")
        >>> buffet.verify(model, buffet.LpBall(x, words=[2], p=2), eps=0.01).verdict
        'certified'
    """
    whole = sized(region, eps)
    region = without_padding(whole, mask)
    chosen = method_named(method)
    asked, clean = question(model, region, label, property)
    begin = time.perf_counter()
    query = Query(model, region, asked, engine or Engine(), deadline_of(budget))
    query.engine.check(chosen.clean_run(model.program64, region.center, asked), chosen, region)
    thorough = falsify if isinstance(falsify, AttackSettings) else None
    quick = replace(POLICY.quick_attack, seed=thorough.seed if thorough else seed) if falsify else None
    evidence = Evidence(query, clean)
    try:
        evidence.prove(Ladder.of(chosen, model.program64), None if best else quick, best=best, trace=trace)
    except KeyboardInterrupt:
        if not evidence.interrupt():
            raise
    seconds = time.perf_counter() - begin - evidence.attack_seconds
    if (falsify or clean < 0) and not evidence.interrupted:
        grace = 0.0 if budget is None else min(POLICY.grace, POLICY.grace_share * budget)
        evidence.attack(thorough or replace(POLICY.quick_attack, seed=seed), grace)
    points = [p if p is None or mask is None else _with_padding(whole, mask, p) for p in evidence.points]
    about = Subject.of(model, whole, chosen, None if asked.label is not None else asked.texts)
    return Verification(
        asked.label,
        evidence.verdicts(),
        evidence.margins,
        clean,
        tuple(points),
        seconds,
        about,
        tuple(None if one is None else str(one) for one in evidence.unfinished),
        evidence.interrupted,
    )


def _with_padding(
    region: Region, mask: Bool[Tensor, "tokens"], point: Float[Tensor, "_ width"]
) -> Float[Tensor, "tokens width"]:
    """All rows of a sentence, from those that are not padding."""
    return region.center.to(point).index_put((mask,), point)


class Evidence:
    """What is known of every task of a query: the best margins so far, and counterexamples."""

    def __init__(self, query: Query, clean: float) -> None:
        self.query, self.clean = query, clean
        self.points: list[Tensor | None] = [None] * query.region.tasks
        self.attack_seconds = 0.0
        self._margins: Tensor | None = None
        self._attacked: AttackSettings | None = None  # how the unsettled tasks were attacked
        self._told: Context | None = None  # what the method of a single task has told
        self.unfinished: list[Unfinished | None] = [None] * query.region.tasks
        self.interrupted = False

    @property
    def margins(self) -> Tensor:
        """The largest lower bounds found for every task."""
        assert self._margins is not None
        return self._margins

    def interrupt(self) -> bool:
        """Go no further. Whether there is something to tell: there is a budget, and bounds are known."""
        self.interrupted = self.query.deadline is not None and self._margins is not None
        return self.interrupted

    def certified(self) -> Tensor:
        return proven(self.margins) & (self.clean > 0)

    def unsettled(self) -> Tensor:
        """The tasks that are neither certified nor falsified."""
        if self._margins is None:
            return torch.arange(self.query.region.tasks)
        broken = torch.tensor([point is not None for point in self.points])
        return (~self.certified().cpu() & ~broken).nonzero()[:, 0]

    def verdicts(self) -> tuple[Verdict, ...]:
        """A counterexample counts for more than any bound."""
        return tuple(
            "falsified" if point is not None else "certified" if certified else "unknown"
            for certified, point in zip(self.certified().tolist(), self.points, strict=True)
        )

    def prove(self, ladder: Ladder, quick: AttackSettings | None, *, best: bool, trace: Trace | None) -> None:
        """Ask one method after the other, with a `quick` attack before the expensive ones.

        Each is asked about the tasks that are not settled yet; where the `best` margin is wanted about all of
        them, except for rivals that learn.
        """
        everything = torch.arange(self.query.region.tasks)
        cheap = not (best or trace)
        finite = self.query.region.finite and self.query.asked.label is not None
        listed = cheap and bool(ladder.quick) and finite and self.clean > 0
        if listed:
            self._look_at_words(lambda words: words.first_look(attack=quick is not None))
        for candidate in ladder.quick:
            self._ask(candidate, self.unsettled() if not best else everything)
            if cheap and self._margins is not None and not self.clean > 0:
                return  # nobody makes a wrong answer right
        if listed:
            self._look_at_words(lambda words: words.second_look(ladder.quick[0], attack=quick is not None))
        elif ladder.quick and quick:
            self.attack(quick)
        for candidate in ladder.plain:
            if cheap or candidate != ladder.method.plain():  # learning starts from that, and loses nothing
                self._ask(candidate, self.unsettled() if not best else everything)
        if len(everything) == 1 and cheap:
            self._told = replace(self.query.context, learned={}, walked=[])
        self._ask(ladder.method, self.unsettled() if cheap else everything, trace, self._told)
        if not self.clean > 0:
            return
        for task in self.unsettled().tolist() if ladder.method.cells > 1 else ():
            self._cut(task, ladder.method)
        for rival in ladder.slow:
            tasks = self.unsettled()
            self._ask(rival, tasks[self._close(tasks, POLICY.close)])
        if listed:
            self._look_at_words(lambda words: words.tree(ladder.quick[0]))
        elif cheap and can_cut(ladder.method) and ladder.method.cells == 1:
            self._branch(ladder.method)

    def _look_at_words(self, look: Callable[[WordSearch], Outcome | None]) -> None:
        """Take what a look at the sentences of unsettled tasks tells: proofs, and sentences that flip."""
        query, tasks = self.query, self.unsettled().tolist()
        if not tasks or (self._margins is not None and query.expired):
            return

        def answer(task: int) -> tuple[Outcome | None, Tensor | None]:
            words = WordSearch.of(replace(query, region=query.region.select([task])))
            found = look(words)
            return found, None if found is None or found.flip is None else words.sentences.point(found.flip)

        for task, (found, point) in zip(tasks, side_by_side(answer, tasks), strict=True):
            if found is None:
                continue
            if self._margins is None:
                self._margins = torch.full((query.region.tasks, len(found.margins)), -math.inf).double()
            self.points[task] = point
            if found.proven:
                self._margins[task] = found.margins.to(self._margins)

    def _close(self, tasks: Tensor, share: float) -> Tensor:
        """Which tasks are so close to a proof, by a share of the clean margin, that more effort may do."""
        return (self.margins[tasks].amin(-1) > -share * self.clean).cpu()

    def _ask(
        self, method: Method, tasks: Tensor, trace: Trace | None = None, context: Context | None = None
    ) -> None:
        """Take a method's margins of some tasks where they are larger than what is known."""
        query = self.query
        if not len(tasks) or (self._margins is not None and query.expired):
            return
        clean_run = method.clean_run(query.model.program64, query.region.center, query.asked)
        if not query.engine.holds(clean_run, method, query.region):
            return  # the method itself fits: that was checked; its rivals need not
        part = query.region.select(tasks)
        found = bound_margins(
            query.model, part, method, query.asked, query.engine, clean_run, context or query.context, trace
        )
        if self._margins is None:
            self._margins = found
            return
        self._margins[tasks] = torch.fmax(self._margins[tasks], found)

    def _cut(self, task: int, method: Method) -> None:
        """Prove a task cell by cell of its region."""
        query = self.query
        one = query.region.select([task])
        tree = tree_of_proofs(query.model, one, method, query.asked, query.engine, query.context)
        if tree:
            self.margins[task] = tree.margins

    def _branch(self, method: Method) -> None:
        """Cut the unsettled tasks: with a budget until it is spent, else briefly, where they are close.

        First what nonlinearities read is cut, which costs little. Where that does not do and few rows move,
        the region itself is, as what is loose varies with few directions of it.
        """
        query, tasks = self.query, self.unsettled()
        if query.deadline is None:
            tasks = tasks[self._close(tasks, POLICY.near)]
        clean_run = method.clean_run(query.model.program64, query.region.center, query.asked)
        if not query.engine.holds(clean_run, method, query.region):
            return
        narrow = query.region.moved.shape[1] <= POLICY.cut_rows
        for task in tasks.tolist():
            if query.expired:
                return
            brief = narrow or query.deadline is None
            effort = Effort(query.deadline, 1, POLICY.leaves) if brief else Effort(query.deadline)
            if (walked := self._walked(task, method, clean_run)) is None:
                continue
            if self._cut_functions(task, walked, effort):
                continue
            if narrow and query.deadline is not None:
                self._cut(task, replace(method, cells=POLICY.cells_in_time))

    def _cut_functions(self, task: int, walked: Walked, effort: Effort) -> bool:
        """Take what cuts of what functions read prove of a task, also if that is not all of it."""
        cutting, run = Cutting(walked), walked.problem.clean_run
        try:
            return cutting.grow(effort)
        finally:
            self.unfinished[task] = cutting.unfinished
            if cutting.found is not None:
                clean = run.asked.by_case(run.clean[-1]) if run.asked else run.clean[-1]
                found = plausible(cutting.found[None], walked.problem.region, clean)[0].to(self.margins)
                self.margins[task] = torch.fmax(self.margins[task], found)

    def _walked(self, task: int, method: Method, clean_run: CleanRun) -> Walked | None:
        """What the method knows of a task; it is asked again where there were several."""
        query, engine = self.query, self.query.engine
        one = query.region.select([task])
        problem = method.problem(clean_run, one, dtype=engine.dtype, chunk_bytes=engine.rows)
        if self._told is not None:
            return Walked.told(problem, self._told)
        return Walked.by(method, problem, query.context)

    def attack(self, settings: AttackSettings, grace: float = 0.0) -> None:
        """Look for counterexamples of the unsettled tasks, unless that was done already.

        It may take `grace` seconds though the time is up.
        """
        begin, tasks = time.perf_counter(), self.unsettled()
        if not len(tasks) or settings == self._attacked:
            return
        end, part = self.query.deadline, self.query.region.select(tasks)
        end = end if end is None else max(end, begin + grace)
        found = attack(self.query.model.program64, part, self.query.asked, settings, deadline=end)
        for place, task in enumerate(tasks.tolist()):
            if found.success[place]:
                self.points[task] = found.points[place]
        if not self.query.expired:
            self._attacked = settings
        self.attack_seconds += time.perf_counter() - begin
