"""What the engine is broken into: one mistake per row of `MUTANTS`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from buffet.bounds import intervals
from buffet.bounds.forms import Form, Local, Rows
from buffet.bounds.intervals import Box as Enclosure
from buffet.branching import stems
from buffet.branching.entries import Entries
from buffet.branching.leaf_bounds import LeafBounds
from buffet.branching.leaves import Leaves
from buffet.branching.stems import Ground, Trunk
from buffet.network import Affine, Center, Mean, Normalise, Softmax
from buffet.network.functions import FUNCTIONS, Function
from buffet.optimisation.adam import Adam
from buffet.propagation import clean_run as clean_run
from buffet.propagation import substitution, walk
from buffet.propagation.key_split import KeyForms
from buffet.propagation.substitution import Bounds
from buffet.regions import Box, CandidateSet, Cell, LpBall, balls, boxes, cells
from buffet.relaxations import elementwise, products, softmax
from buffet.relaxations import table as choices
from buffet.relaxations.enclosures import LinesEnclosure, SoftmaxEnclosure, SumEnclosure, _Signed
from buffet.relaxations.table import Relaxer
from buffet.search.branching import Leaf, Tree
from engine_mutants.hunting import Mutant, Name, Wrong, around, entry, result
from engine_mutants.staged import ABSORBING, CANCELLING, CELLS, DECIDED

VERIFY = import_module("buffet.verification.verify")  # the package has a function of this name

Ends = tuple[Tensor, Tensor]
Change = Callable[[Any], Any]


# --- changes of what the engine has computed ----------------------------------------------------------------


def _swap(*pairs: tuple[str, str]) -> Change:
    """Fields exchanged for each other."""
    return lambda v: replace(v, **{a: getattr(v, b) for pair in pairs for a, b in (pair, pair[::-1])})


def _scale(factor: float, *names: str) -> Change:
    """Fields multiplied by a number."""
    return lambda v: v and replace(v, **{name: factor * getattr(v, name) for name in names})


def _closer(side: str, share: float) -> Change:
    """Lines moved by a share of the gap between them: a lower one up, an upper one down."""

    def change(lines: Any) -> Any:
        step = share * (lines.upper_intercept - lines.lower_intercept).abs()
        return replace(lines, **{side: getattr(lines, side) + step})

    return change


def _narrow(ends: Ends) -> Ends:
    """A range without a tenth of its width at both ends."""
    low, high = ends
    return low + 0.1 * (high - low), high - 0.1 * (high - low)


def _nothing(value: Any) -> Any:
    return 0 * value


def _nowhere(slope: Tensor) -> tuple[Tensor, ...]:
    return ()


# --- functions that do something else -----------------------------------------------------------------------


def _tight(kind: type, only: Callable[[Any], bool] = lambda op: True) -> Wrong:
    """Boxes of one kind of operation a fifth too small."""

    def enclose(right: Any, op: Any, *rest: Any) -> Enclosure:
        box = right(op, *rest)
        return Enclosure(*_narrow((box.lower, box.upper))) if isinstance(op, kind) and only(op) else box

    return around(enclose)


def _with(change: Callable[[Any], dict[str, Any]]) -> Wrong:
    """A method of an object some of whose attributes are others."""

    def wrong(right: Any, self: Any, *args: Any) -> Any:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **change(self))
        return right(other, *args)

    return around(wrong)


def _part_of_the_shift(right: Any, self: SoftmaxEnclosure, rows: Rows) -> Any:
    a = self._split(rows.coefs).clone()
    a[:, :, :, :1] += a.median(3, keepdim=True).values
    return right(self, rows.like(a.flatten(2, 3)))


def _first_words_only(right: Any, self: Local, rows: Rows) -> Any:
    form, constant = right(self, rows)
    form[:, -self.matrix.shape[1] :] = 0
    return form, constant


def _last_row_still(right: Any, self: Bounds, local: Local, tokens: int) -> Enclosure:
    box = right(self, local, tokens)
    still = torch.nn.functional.one_hot(local.moved[:, -1:], tokens).bool().mT
    return Enclosure(box.lower.masked_fill(still, 0.0), box.upper.masked_fill(still, 0.0))


def _largest_word(right: Any, self: LpBall, form: Tensor) -> Tensor:
    words = torch.eye(form.shape[1], dtype=form.dtype)
    alone = [right(self, form * w.reshape(1, -1, *[1] * (form.ndim - 2))) for w in words]
    return torch.stack(alone).amin(0)


def _beyond(right: Any, self: Adam, *args: Any) -> None:
    right(self, *args)
    with torch.no_grad():
        self.values.mul_(2.0).sub_(0.5)


def _without_constants(keys: KeyForms) -> KeyForms:
    forms = keys.forms.clone()
    forms[:, :, -1] = 0
    return replace(keys, forms=forms)


def _planes_inside(right: Any, self: Cell, dtype: torch.dtype) -> Any:
    """Planes moved into the cell by a fiftieth of the ball."""
    step = 0.02 * self._sizes().to(dtype)
    return [(row, u, low + step, high - step) for row, u, low, high in right(self, dtype)]


def _open_sides_bear(right: Any, form: Any, direction: Any, size: Any, low: Any, high: Any, *q: Any) -> Any:
    """A weight for a plane that is not there, which is then worth 0."""
    weight = right(form, direction, size, low.clamp_min(-1e3), high.clamp_max(1e3), *q)
    return weight + 0.1 * form.abs().amax()


def _gap(right: Any, self: Cell, cut: int, place: float) -> tuple[Cell, Cell]:
    apart = 0.4 * float(self._sizes()[0])
    return right(self, cut, place - apart)[0], right(self, cut, place + apart)[1]


def _small_boxes(bounds: Bounds) -> Bounds:
    """Boxes a tenth too small on either side."""
    boxes = {i: Enclosure(*_narrow((box.lower, box.upper))) for i, box in bounds.boxes.items()}
    return replace(bounds, boxes=boxes)


def _best_of_leaves(right: Any, self: Trunk) -> float:
    return max((leaf.margin for grown in self.proven for leaf in grown.leaves), default=math.inf)


def _best_leaf(right: Any, self: Tree) -> Tensor:
    return torch.stack([leaf.proof for leaf in self.leaves if leaf.proof is not None]).amax(0)


OTHER_SIDES = around(lambda right, self, *args: right(Form(self.sides.flip(0)), *args))
UNMIXED = around(lambda right, self, other: self if self.diagonal != other.diagonal else right(self, other))
SMALL_WEIGHTS = around(lambda right, self, coefs, y: right(self, 0.9 * coefs, y))
SHORT = around(lambda right, f, c, ends, slopes: right(f, c, torch.lerp(ends[:1], ends, 0.9), slopes))
ENDS_ONLY = around(lambda right, f, *rest: right(replace(f, minima=_nowhere, maxima=_nowhere), *rest))
LESS_THAN_ALL = _with(lambda self: {"offsets": self.offsets[:, :, :-1]})
LESS_BUDGET = _with(lambda self: {"budget": max(self.budget - 1, 0)})
TOO_FAR = _with(lambda s: {"learned": {i: {k: 1.5 * v for k, v in n.items()} for i, n in s.learned.items()}})
WRONG_PLANES = around(lambda right, enclosure, keys: right(_swap(("y_lower", "y_upper"))(enclosure), keys))
EASILY = around(lambda right, self, eps, margins: right(self, eps, margins + 0.05))
NEAREST = around(lambda right, x, dtype, *, up: x.to(dtype))
MINUS = around(lambda right, a, b, *, up: a - b)
SMALL = result(lambda ends: (0.9 * ends[0], 0.9 * ends[1]))
NO_MINIMA = entry(minima=_nowhere)
LINES_SWAPPED = _swap(("lower_slope", "upper_slope"), ("lower_intercept", "upper_intercept"))
PLANES_SWAPPED = _swap(("x_lower", "x_upper"), ("y_lower", "y_upper"), ("lower", "upper"))


def _alpha(value: float) -> Wrong:
    return around(lambda right, *a, **k: right(*a, **{**k, "alpha_lower": value, "alpha_upper": value}))


def _mixed_twice(right: Any, *args: Any, **kwargs: Any) -> Any:
    return right(*args, **{**kwargs, "mixture": torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64)})


# --- the table ----------------------------------------------------------------------------------------------

BOXES, LINES, FORMS = ("interval",), ("baseline", "backward"), ("forward", "baseline")
BOTH, LSE = ("interval", "baseline"), ("lse", "backward, differences")
LEARNED = ("o-buffet", "lse+o-buffet", "backward, learned margin")
KEYS, SPLIT = ("backward, differences",), (329, 26, 392, 113, 281)
BY_CELLS, PLANTED = ("lse, cells", "baseline, cells"), (203, 32, 311, 116, 185)


def _m(name: str, what: str, place: Any, attribute: str, wrong: Wrong, by: Any, *cases: Name) -> Mutant:
    """A row: its name, what is wrong, where, how; the methods and the cases that show it."""
    return Mutant(name, what, place, attribute, wrong, by, cases)


def _cut(name: str, what: str, place: Any, attribute: str, wrong: Wrong) -> Mutant:
    """A row about branching, with the cases whose trees show it."""
    return _m(name, what, place, attribute, wrong, ("buffet, cuts",), *DECIDED, 116)


MUTANTS: tuple[Mutant, ...] = (
    # Relaxations of functions
    _m("raised line", "5 % too high", choices, "relax", result(_closer("lower_intercept", 0.05)), LINES),
    _m("lowered line", "5 % too low", choices, "relax", result(_closer("upper_intercept", -0.05)), LINES),
    _m("exchanged lines", "lower for upper", choices, "relax", result(LINES_SWAPPED), LINES),
    _m("no intercepts", "dropped", choices, "relax",
       result(_scale(0.0, "lower_intercept", "upper_intercept")), LINES),
    _m("shifted tangent", "touching points ignored", elementwise, "_intercepts", ENDS_ONLY, LINES),
    _m("wrong chord", "drawn to nine tenths", elementwise, "_intercepts", SHORT, LINES, 185),
    _m("tanh side", "minima for maxima", FUNCTIONS, "tanh", _swap(("minima", "maxima")), LINES),
    _m("gelu tangent", "minima unknown", FUNCTIONS, "gelu", NO_MINIMA, LINES, 185),
    _m("exp tangent", "minima unknown", FUNCTIONS, "exp", NO_MINIMA, LINES),
    _m("1/x tangent", "minima unknown", FUNCTIONS, "reciprocal", NO_MINIMA, LINES, 311),
    _m("1/√x tangent", "minima unknown", FUNCTIONS, "rsqrt", NO_MINIMA, LINES),
    _m("x² tangent", "minima unknown", FUNCTIONS, "square", NO_MINIMA, LINES),
    _m("x² valley", "range from the ends only", FUNCTIONS, "square", entry(valley=-math.inf), BOTH),
    # Products
    _m("exchanged planes", "L for U", choices, "planes", result(PLANES_SWAPPED), LINES),
    _m("one slope", "U1 with L1's slope in x", choices, "planes",
       result(lambda enclosure: replace(enclosure, x_upper=enclosure.x_lower)), LINES),
    _m("no constants", "planes through 0", choices, "planes", result(_scale(0.0, "lower", "upper")), LINES),
    _m("wrong sign", "of the constants", choices, "planes", result(_scale(-1.0, "lower", "upper")), LINES),
    _m("small constants", "a tenth less", choices, "planes", result(_scale(0.9, "lower", "upper")), LINES),
    _m("α above 1", "α = 1.5", choices, "planes", _alpha(1.5), LINES),
    _m("α below 0", "α = −0.5", choices, "planes", _alpha(-0.5), LINES),
    _m("two α", "constant for another α", products, "_constant",
       around(lambda right, op, alpha, *corners: right(op, 0.0, *corners)), ("middle", "dual")),
    _m("nothing left", "of products as a whole", choices, "headwise_of", result(_scale(0.0, "reach")), LINES),
    _m("half left", "of products as a whole", choices, "headwise_of", result(_scale(0.5, "reach")), LINES),
    _m("box's half-widths", "a fiftieth small", Box, "_radius", result(lambda r: 0.98 * r), LINES, 28),
    _m("box's support", "half", Box, "support", result(_scale(0.5, "weights")), LINES, 7),
    _m("box's middle", "taken for 0", Box, "support", result(lambda s: replace(s, middle=None)), LINES, 7),
    _m("candidates' support", "half", CandidateSet, "support", result(_scale(0.5, "weights")), LINES, 33),
    # Softmax
    _m("LSE intercept", "0.001 too low", softmax, "_above", result(lambda v: (v[0], v[1] - 1e-3)), LSE),
    _m("LSE chord", "over a range a fifth too small", softmax, "_above",
       around(lambda right, differences, touch: right(_narrow(differences), touch)), LSE),
    _m("ER chord", "a tangent instead", softmax, "_chord_at",
       around(lambda right, low, high, x: right((low + high) / 2, (low + high) / 2, x)), LSE),
    _m("mixture", "weight 2 for L_ER, −1 for L_LSE", choices, "softmax_enclosure",
       around(_mixed_twice), LSE, 32),
    _m("Σp shift", "not added back for one weight", SoftmaxEnclosure, "pull", around(_part_of_the_shift),
       ("backward, lse", "backward, differences")),
    _m("difference range", "a fifth too small", softmax, "difference_range", result(_narrow), LSE),
    _m("weight range", "from differences a fifth too close", intervals, "difference_range",
       result(_narrow), KEYS),
    # Intervals
    _m("softmax range", "a fifth too small", walk, "interval", _tight(Softmax), BOXES, 116),
    _m("exp·1/Σ range", "a fifth too small", walk, "interval", _tight(Normalise), LINES),
    _m("variance range", "a fifth too small", walk, "interval",
       _tight(Affine, lambda op: op.least > -math.inf), BOTH),
    # What linear bounds go through
    _m("sign split", "the wrong side", Rows, "parts", result(lambda parts: parts[::-1]), LINES),
    _m("forms exchanged", "lower for upper, pulled", Form, "compose", OTHER_SIDES, FORMS),
    _m("forms pushed", "lower for upper, pushed", Form, "through", OTHER_SIDES, FORMS),
    _m("pushed constants", "lost", Form, "plus", around(lambda right, self, *constants: self), FORMS),
    _m("lines' constants", "lost when pulled", LinesEnclosure, "pull", result(lambda v: (v[0], None)), LINES),
    _m("planes' constants", "lost when pulled", _Signed, "contract", result(torch.zeros_like), LINES),
    _m("residual", "one branch lost", SumEnclosure, "pull",
       around(lambda right, self, rows: ((rows,), None)), LINES),
    _m("own token", "lost beside attention", Rows, "__add__", UNMIXED, LINES, 231),
    _m("mean", "not taken off", Center, "act_transposed", around(lambda right, self, coefs, y: y), LINES),
    _m("pooling", "weights that sum to 0.9", Mean, "act_transposed", SMALL_WEIGHTS, LINES, 28),
    _m("one word", "the last moved one forgotten", Local, "compose", around(_first_words_only), LINES),
    _m("one row", "the last moved one taken for still", Bounds, "box_of_local",
       around(_last_row_still), LINES),
    _m("rounding", "allowance of the wrong sign", clean_run, "roundings",
       result(lambda unit: -unit), LINES, 32),
    # Regions
    _m("candidates' extent", "a tenth too small", CandidateSet, "extent", SMALL, BOXES, 282),
    _m("box's extent", "a tenth too small", Box, "extent", SMALL, BOXES, 28),
    _m("ball's extent", "a tenth too small", LpBall, "extent", SMALL, BOXES),
    _m("dual norm", "p for q", LpBall, "q", around(lambda right, self: self.p), LINES, 185),
    _m("small ball", "1 % too small", LpBall, "minimise", result(lambda v: 0.99 * v), LINES),
    _m("other tasks", "sizes exchanged", LpBall, "_outer", result(lambda v: v.flip(0)), LINES),
    _m("words", "the largest for the sum", LpBall, "minimise", around(_largest_word), LINES, 231),
    _m("box ends", "the largest for the smallest", Box, "minimise",
       around(lambda right, self, form: -right(self, -form)), LINES, 28),
    _m("last candidate", "forgotten", CandidateSet, "minimise", LESS_THAN_ALL, LINES, 282),
    _m("budget", "one word too few", CandidateSet, "minimise", LESS_BUDGET, LINES, 282),
    # Learning and verdicts
    _m("parameters", "not kept in [0, 1]", Relaxer, "__call__", TOO_FAR, ("lse", "baseline"), 311),
    _m("projection", "steps that leave [0, 1]", Adam, "descend", around(_beyond), LEARNED, 311),
    _m("NaN", "counts as a proof", VERIFY, "proven",
       around(lambda right, margins: ~(margins <= 0).any(-1)), LINES, 43),
    _m("one class", "the others not looked at", VERIFY, "proven",
       around(lambda right, margins: right(margins[:, :1])), LINES, 311),
    # Scores whose keys are split off
    _m("split keys", "the own one counted twice", KeyForms, "_own", result(lambda r: r.like(2 * r.coefs)),
       KEYS, *SPLIT),
    _m("own key", "lost", KeyForms, "_own", result(lambda r: r.like(0 * r.coefs)), KEYS, *SPLIT),
    _m("other keys' constants", "lost", KeyForms, "of", result(_without_constants), KEYS, *SPLIT),
    _m("keys' planes", "lower for upper", substitution, "key_rows", WRONG_PLANES, KEYS, *SPLIT),
    # Cells, and their tree
    _m("small cell", "planes a fiftieth too near", Cell, "_planes", around(_planes_inside), LINES, *CELLS),
    _m("planes' worth", "2 % too much", Cell, "_reduced",
       result(lambda v: (v[0], v[1] + 0.02 * v[1].abs())), LINES, *CELLS),
    _m("planes that cost", "taken for free", Cell, "_reduced",
       result(lambda v: (v[0], v[1].clamp_min(0))), LINES, *CELLS),
    _m("open sides", "bear weight (L2)", cells, "_best_weight", around(_open_sides_bear), LINES, *CELLS),
    _m("open sides, L∞", "bear weight", cells, "_weight_found", around(_open_sides_bear), LINES, *CELLS),
    _m("upper halves", "never looked at", Cell, "halves", result(lambda v: (v[0], v[0])), BY_CELLS, *PLANTED),
    _m("lower halves", "never looked at", Cell, "halves", result(lambda v: (v[1], v[1])), BY_CELLS, 32),
    _m("a gap", "between the halves", Cell, "halves", around(_gap), BY_CELLS, *PLANTED),
    _m("leaves", "proven too easily", Leaf, "hear", EASILY, BY_CELLS, *PLANTED),
    _m("leaves' size", "asked at nine tenths of ε", Tree, "_hear",
       around(lambda right, self, leaves, eps: right(self, leaves, 0.9 * eps)), BY_CELLS, *PLANTED),
    _m("best leaf", "for the worst", Tree, "margins", around(_best_leaf), BY_CELLS, *PLANTED),
    # Cuts of what functions read: leaves and stems
    _cut("leaf lines", "over intervals a tenth too small", Entries, "lines",
       around(lambda right, self, low, high, slopes: right(self, *_narrow((low, high)), slopes))),
    _cut("intercepts of leaves", "forgotten", LeafBounds, "_row_lines",
       result(_scale(0.0, "lower_intercept", "upper_intercept"))),
    _cut("leaf bounds", "of the sibling", LeafBounds, "prove", result(lambda lower: lower.flip(0))),
    _cut("lower children", "never looked at", Leaves, "_halves", result(lambda v: (v[1], v[1]))),
    _cut("upper children", "never looked at", Leaves, "_halves", result(lambda v: (v[0], v[0]))),
    _cut("sign of a threshold", "the other one", Entries, "cut_at", result(torch.neg)),
    _cut("halves of a stem", "one twice", stems, "_halved", result(lambda v: (v[0], v[0]))),
    _cut("boxes of a stem", "found anew, a tenth too small", Ground, "anew", result(_small_boxes)),
    _cut("limits of a stem", "a tenth too near", stems, "within",
       around(lambda right, limits, index, box: right(
           {k: _narrow(ends) for k, ends in limits.items()}, index, box))),
    _cut("worst leaf", "the best for it", Trunk, "margin", around(_best_of_leaves)),
    # Rounding: in what is computed from a clean run, and to the last bit
    _m("residuals of the clean run", "forgotten", clean_run, "residual", result(_nothing), LINES, *ABSORBING),
    _m("rounding of rows", "forgotten", clean_run, "roundings",
       around(lambda right, *_: 0.0), ("forward",), *CANCELLING),
    _m("outward rounding", "to nearest", elementwise, "_stepped", around(lambda right, pair: pair), (),
       "lines in float32", "lines"),
    _m("rounding of f", "forgotten", Function, "rounding", result(_nothing), (), "lines in float32", "lines"),
    _m("rounding of ranges", "forgotten", intervals, "EPS", _nothing, (), "ranges"),
    _m("size of a ball", "to nearest", balls, "rounded", NEAREST, (), "regions"),
    _m("size of a box", "to nearest", boxes, "rounded", NEAREST, (), "regions"),
    _m("ends of a box", "to nearest", boxes, "difference", MINUS, (), "regions"),
)  # fmt: skip
