"""From a query to a verdict. Only this module turns bounds into claims.

A query is *certified* when every margin's lower bound is finite and strictly positive, *falsified* when a
concrete point of the region was re-evaluated on the model and has another answer, and *unknown* otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.attack import AttackSettings, attack
from buffet.engine import Classifier, Engine, Trace, bound_margins, proven
from buffet.errors import BuffetError
from buffet.methods import Method, method_named
from buffet.optimisation.context import Control
from buffet.optimisation.warm_starts import Memory
from buffet.regions import Region
from buffet.results import Verdict, Verification
from buffet.search.branching import Tree

QUICK_RIVALS = 2
"""How many of a method's rivals are asked before it."""
GRACE, GRACE_SHARE = 0.5, 0.25
"""Seconds, and the share of a budget, that an attack may take after it: what is plainly wrong is found."""
PATIENCE, FURTHER = 3, 1.1
"""By so much longer a method learns for a ball whose cells all profit. If cells of a ball do not prove it,
those of one so much larger are tried."""
QUICK_ATTACK = AttackSettings(steps=3, restarts=1)
"""What `verify` tries by itself when a proof fails: it must not cost more than the proof."""


def verify(
    model: Classifier,
    region: Region,
    eps: float | Sequence[float] | Tensor | None = None,
    method: str | Method = "baseline",
    *,
    label: int | None = None,
    mask: Bool[Tensor, "tokens"] | None = None,
    propagation: str | None = None,
    product: str | None = None,
    softmax: str | None = None,
    optimise: str | None = None,
    steps: int | None = None,
    rate: float | None = None,
    start: str | None = None,
    window: int | None = None,
    cells: int | None = None,
    falsify: bool | AttackSettings = True,
    budget: float | None = None,
    trace: Trace | None = None,
    seed: int = 0,
    engine: Engine | None = None,
) -> Verification:
    """Prove that no point of `region` changes the model's answer, or find one that does.

    Args:
        model: a loaded model (`buffet.load`).
        region: what may move; an `LpBall` without a size takes it from `eps`.
        eps: the size of the ball, one for all tasks or one per task.
        method: a name in `buffet.METHODS`, or a `Method`.
        label: the class to defend; by default the one the model gives the unmoved rows.
        mask: False for the padding rows of the sentence.
        propagation, product, softmax, optimise, steps, rate, start, window, cells: replace parts of the
            method.
        budget: seconds after which the best bound found by then is returned. An attack has what is left of
            them, and at least a quarter (at most half a second) more.
        trace: is told the tasks, the step and the margins at every step of an optimiser, which then takes
            all its steps whether or not the tasks are proven.
        falsify: when a task is not certified, look for a counterexample, very briefly or as the settings say.

    Example:
        >>> import buffet
        >>> model = buffet.load()
        >>> x = model.embed("a gripping , moving film")
        >>> buffet.verify(model, buffet.LpBall(x, words=[2], p=2), eps=0.01).verdict
        'certified'
    """
    region = sized(region, eps)
    if mask is not None:
        region = without_padding(region, mask)
    chosen = method_named(
        method,
        propagation=propagation,
        product=product,
        softmax=softmax,
        optimise=optimise,
        steps=steps,
        rate=rate,
        start=start,
        window=window,
        cells=cells,
    )
    label, clean_margin = clean_answer(model, region, label)
    if not clean_margin > 0:
        chosen = replace(chosen, cells=1)  # no cutting makes a wrong answer right
    begin = time.perf_counter()
    control = Control(deadline=begin + checked_budget(budget) if budget is not None else None)
    margins = best_margins(model, region, chosen, label, engine or Engine(), control, trace)
    seconds = time.perf_counter() - begin
    certified = proven(margins) & (clean_margin > 0)
    verdicts: list[Verdict] = ["certified" if c else "unknown" for c in certified.tolist()]
    points: list[Tensor | None] = [None] * region.tasks
    open_tasks = (~certified).nonzero()[:, 0].tolist()
    if clean_margin < 0 or (falsify and open_tasks):
        settings = falsify if isinstance(falsify, AttackSettings) else replace(QUICK_ATTACK, seed=seed)
        end = control.deadline
        if end is not None and budget is not None:
            end = max(end, time.perf_counter() + min(GRACE, GRACE_SHARE * budget))
        found = attack(model.program64, region.select(open_tasks), label, settings, deadline=end)
        for place, task in enumerate(open_tasks):
            if found.success[place]:
                verdicts[task], points[task] = "falsified", found.points[place]
    return Verification(label, tuple(verdicts), margins, clean_margin, tuple(points), seconds)


def checked_budget(budget: float) -> float:
    """A number of seconds."""
    if not 0 < budget < math.inf:
        raise BuffetError(f"budget {budget} must be a number of seconds > 0")
    return budget


def best_margins(
    model: Classifier,
    region: Region,
    method: Method,
    label: int,
    engine: Engine,
    control: Control,
    trace: Trace | None = None,
) -> Float[Tensor, "tasks others"]:
    """The margins of a method, for every task those of its best rival if they are larger.

    Quick rivals come first, so that there is an answer when time runs out; rivals that learn are asked only
    about tasks that are not proven yet.
    """
    own = method.scene(model.program64, region.center, label)
    engine.check(own, method, region)
    # No rival makes a wrong answer right.
    rivals = method.challengers(model.program64) if bool((own.clean[-1] > 0).all()) else ()
    quick, slow = rivals[:QUICK_RIVALS], rivals[QUICK_RIVALS:]
    best: Tensor | None = None
    for candidate in (*quick, method, *slow):
        if best is not None and control.expired:
            break
        tasks = torch.arange(region.tasks)
        if best is not None and candidate is not method and candidate.optimise != "none":
            tasks = (~proven(best)).nonzero()[:, 0]
        if not len(tasks):
            continue
        scene = own if candidate is method else candidate.scene(model.program64, region.center, label)
        if candidate is not method and not engine.holds(scene, candidate, region):
            continue
        tell = trace if candidate is method else None
        found = bound_margins(model, region.select(tasks), candidate, label, engine, scene, control, tell)
        if best is None:
            best = found
        else:
            ours, theirs = (m.amin(-1).nan_to_num(nan=-math.inf) for m in (best[tasks], found))
            best[tasks] = torch.where((theirs > ours)[:, None], found, best[tasks])
        if candidate is method and method.cells > 1:
            for task in (~proven(best)).nonzero()[:, 0].tolist():
                one = region.select([task])
                if tree := tree_of_proofs(model, one, method, label, engine, control):
                    best[task] = tree.margins
    assert best is not None
    return best


def tree_of_proofs(
    model: Classifier, region: Region, method: Method, label: int, engine: Engine, control: Control
) -> Tree | None:
    """Parts of the region of one task, all of them proven, if they are found.

    What is cut at a larger ε is cut more finely where it matters: it may prove what the first parts do not.
    """
    eps = 0.0 if region.eps is None else float(region.eps[0])
    for size in (eps, FURTHER * eps) if region.resizable else (eps,):
        if control.expired:
            return None
        whole = region.with_eps(size) if region.resizable else region
        tree = tree_of_cells(model, whole, method, label, engine, control)
        tree.grow(size, lambda: not control.expired)
        if tree.limit(eps) > 0:
            return tree
    return None


def tree_of_cells(
    model: Classifier, region: Region, method: Method, label: int, engine: Engine, control: Control
) -> Tree:
    """Parts of the region of one task that a method is asked about.

    What it learns for the whole serves them all: to learn for each would gain nothing more. So it learns a
    little longer, if there is memory.
    """
    scene = method.scene(model.program64, region.center, label)
    memory = control.memory or Memory()
    if method.optimise != "none":
        patient = replace(method, steps=PATIENCE * method.steps)
        learner = patient if engine.holds(scene, patient, region) else method
        bound_margins(model, region, learner, label, engine, scene, replace(control, memory=memory))

    def ask(part: Region) -> Tensor:
        own = replace(control, memory=memory.copy())  # no part depends on which came first
        return bound_margins(model, part, method, label, engine, scene, own)[0]

    return Tree(model.program64, region, ask, method.cells, engine.parallel(method))


def clean_answer(model: Classifier, region: Region, label: int | None) -> tuple[int, float]:
    """The class to defend and its margin at the unmoved rows, checked against the model."""
    x = region.center.double()
    width = model.program64.input_width
    if width != x.shape[1]:
        raise BuffetError(f"the rows of the region are {x.shape[1]} wide, the model expects {width}")
    logits = model.program64.evaluate(x)
    classes = logits.shape[-1]
    if classes < 2:
        raise BuffetError(
            "the model has one class: no move changes its answer, and there is nothing to prove"
        )
    if label is not None and (isinstance(label, bool) or label not in range(classes)):  # whatever it is
        raise BuffetError(f"label {label!r} is not a class of the model (0 to {classes - 1})")
    label = int(logits.argmax() if label is None else label)
    others = torch.cat([logits[:label], logits[label + 1 :]])
    return label, float(logits[label] - others.max())


def without_padding(region: Region, mask: Bool[Tensor, "tokens"]) -> Region:
    """The region of the sentence without padding; the first row, which classifiers read, must stay."""
    if not bool(mask[0]):
        raise BuffetError("the mask hides row 0, which the classifier reads")
    return region.without_padding(mask)


def sized(region: Region, eps: float | Sequence[float] | Tensor | None) -> Region:
    """The region with the size `eps`, if one is given."""
    return region if eps is None else region.with_eps(eps)
