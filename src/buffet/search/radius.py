"""The certified radius: the largest ε a method proves, found with few evaluations.

`driver` runs the searches of all tasks; `strategies` says which ε a search tries next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from buffet.attack import AttackSettings, attacked_radius
from buffet.engine import Classifier, Engine
from buffet.errors import BuffetError
from buffet.methods import Method, method_named
from buffet.regions import Region
from buffet.results import Radius, TaskRadius
from buffet.search.root_finding import STRATEGIES, Shape, Strategy, hopeless
from buffet.search.schedule import TOLERANCE, Begin, Driver, Prover, Query
from buffet.verification.verify import checked_budget, clean_answer, without_padding

LEARNED_TOLERANCE, CHEAP_TOLERANCE = 2e-2, 5e-3
"""Of a search, relative, where the method learns its boxes, which moves its margins by about as much; and on
networks of one layer, where asking once more costs little."""
LARGEST_RADIUS = 1e4
"""Radii are not searched beyond this; a task proven there is reported with this radius."""
ATTACK_SHARE = 0.25
"""The most of a budget that attacks may take before the search begins."""
GUESS_ATTACK = AttackSettings(steps=10, restarts=1)
SMALL_SHARE, LOST = 0.9, 0.8
"""Radii are expected between this share of the attacked one, smaller by a factor of exp(−0.8) for every
layer, and that itself."""
MIDDLE, BEYOND_QUICK = 0.33, 0.45
"""How far on the way (in logarithms) from there, or from what a quick method proves, to the attacked one."""
BEYOND_PLAIN = 1.06
"""How much more the same method may prove when it learns how to bound the margin; on the way to the attacked
radius, not more than half of it."""
ROUGH, PLAIN = 0.05, 0.01
"""The tolerance of searches that only lead to others: by a quick method, and by the same without learning."""


def radius(
    model: Classifier,
    region: Region,
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
    search: str = "secant",
    tolerance: float | None = None,
    largest: float = LARGEST_RADIUS,
    attack: bool = True,
    attacked: Sequence[float] | None = None,
    budget: float | None = None,
    seed: int = 0,
    engine: Engine | None = None,
    progress: Callable[[float], None] | None = None,
) -> Radius:
    """The largest ε that `method` certifies for each task, and the smallest an attack breaks.

    Args:
        region: an `LpBall`; its own size, if any, is ignored.
        mask: False for the padding rows of the sentence.
        propagation, product, softmax, optimise, steps, rate, start, window, cells: replace parts of the
            method.
        search: ``secant`` (safeguarded) or ``bisection`` (doubling from 0.01 and ten halvings, as in the
            BuFFeT paper).
        tolerance: of the secant search, relative; by default 0.001, or 0.02 where the method learns its
            boxes (0.005 on one layer), which moves its margins by about that.
        attack: also look for the upper end of the bracket.
        attacked: that upper end of every task, if it is known already.
        budget: seconds after which the best of what is proven by then is returned; attacks take a quarter
            of them at most.
        progress: called with the finished share of the work, 0 to 1.
    """
    if not region.resizable:
        raise BuffetError(f"a {type(region).__name__} has no size to search over: use verify, or an LpBall")
    words = region.moved.tolist()
    if mask is not None:
        region = without_padding(region, mask)
    if search not in STRATEGIES:
        raise BuffetError(f"unknown search '{search}'; choose one of: {', '.join(STRATEGIES)}")
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
    fine = TOLERANCE if tolerance is None else tolerance
    if tolerance is None:
        learned = LEARNED_TOLERANCE if model.program64.layers > 1 else CHEAP_TOLERANCE
        tolerance = learned if chosen.optimise == "tuned" else TOLERANCE
    if not (0 < tolerance < 1 and 0 < largest < math.inf):
        raise BuffetError(f"tolerance {tolerance} must lie in (0, 1) and largest {largest} be a finite ε > 0")
    label, clean = clean_answer(model, region, label)
    report = progress or (lambda share: None)
    begin = time.perf_counter()
    deadline = begin + checked_budget(budget) if budget is not None else None
    attack_end = None if budget is None else begin + ATTACK_SHARE * budget
    query = Query(model, region, label, engine or Engine(), deadline)
    prover = Prover(query, chosen)
    query.engine.check(prover.scene, chosen, region)
    if attacked is not None:
        given = torch.as_tensor(attacked, dtype=torch.float64, device=region.center.device)
        if given.ndim > 1 or (given.ndim and len(given) != region.tasks):
            raise BuffetError(
                f"attacked has shape {tuple(given.shape)}; give one radius per task ({region.tasks})"
            )
        broken = given.expand(region.tasks)
    elif attack or clean < 0:
        settings = AttackSettings(seed=seed)
        broken = attacked_radius(model.program64, region, label, settings, deadline=attack_end)
    else:
        broken = torch.full((region.tasks,), math.inf, dtype=torch.float64, device=region.center.device)
    attack_seconds = time.perf_counter() - begin
    report(0.1)

    begin = time.perf_counter()
    # Certified radii are some fraction of attacked ones; a short attack will do for a first guess.
    scale = broken
    if not bool(broken.isfinite().all()):
        guessed = attacked_radius(model.program64, region, label, GUESS_ATTACK, deadline=attack_end)
        scale = torch.where(broken.isfinite(), broken, guessed)

    def search_to(tolerance: float) -> Begin:
        def begin(guess: float, shape: Shape | None, most: float) -> Strategy:
            if not clean > 0:
                return hopeless()
            return STRATEGIES[search](clean, guess, tolerance, min(largest, most), shape)

        return begin

    driver = Driver(search_to(tolerance), region.tasks, deadline, report, 0.95 if chosen.cells == 1 else 0.3)
    quick, *rivals = chosen.challengers(model.program64) or (None,)
    # Quick methods have an answer should time run out, and good guesses for what follows.
    quick = chosen.plain() if chosen.optimise in ("all", "final") else quick
    small = SMALL_SHARE * math.exp(-LOST * model.program64.layers)
    wide = ranges = [(small * size, size) for size in scale.tolist()]
    place, shape = MIDDLE, None
    if quick and (helper := Prover(query, quick)).fits:
        asked, accuracy = ranges, tolerance
        if chosen.optimise == "final":
            # Margins over the same boxes: one task tells where all are.
            asked, accuracy = ranges[:1], max(PLAIN, tolerance)
        elif chosen.optimise == "tuned":
            # What is learned afterwards is much more: if time cannot run out, one rough answer will do. The
            # other tasks are then asked of the quick method as of any rival.
            asked, accuracy = (ranges[:1], ROUGH) if deadline is None else (ranges, TOLERANCE)
            rivals = rivals if len(asked) == len(ranges) else [quick, *rivals]
        seen = driver.search(helper, asked, place, search_to(accuracy))
        tried = zip(driver.brackets[: len(asked)], asked, strict=True)
        found = [b.certified / high if high > 0 else 0.0 for b, (_, high) in tried]
        found += found[:1] * (len(ranges) - len(asked))
        ranges = [((f or small) * high, high) for f, (_, high) in zip(found, ranges, strict=True)]
        place = BEYOND_QUICK
        if chosen.optimise == "final":
            way, shape = -math.log(found[0] or small), seen
            place = min(math.log(BEYOND_PLAIN) / way, 0.5) if way > 0 else 0.5
    if chosen.optimise == "all":
        driver.improve(prover)
    else:
        driver.search(prover, ranges, place, shape=shape)
    if clean > 0:
        driver.challenge(query, rivals, clean, search_to(fine), wide, MIDDLE)
    if chosen.cells > 1:
        driver.branch(query, chosen, largest)
    tasks = tuple(
        TaskRadius(tuple(words), bracket.certified, broken, bracket.margin, count)
        for words, bracket, broken, count in zip(
            words, driver.brackets, broken.tolist(), driver.counts, strict=True
        )
    )
    report(1.0)
    return Radius(label, clean, tasks, driver.calls, time.perf_counter() - begin, attack_seconds)
