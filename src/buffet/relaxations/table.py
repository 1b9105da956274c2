"""The relaxation of every nonlinear operation (`RELAXATIONS`), and how α is chosen if it is not learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from buffet.bounds.forms import Form, Local, Stop
from buffet.bounds.intervals import Box
from buffet.network import Apply, Bilinear, Mix, Node, Op, Softmax
from buffet.relaxations.dual_passes import Curve, DualPass, HeadwiseDual, LinesDual, PlanesDual
from buffet.relaxations.dual_softmax import SoftmaxDual
from buffet.relaxations.elementwise import SIDES, Side, default_slopes, relax
from buffet.relaxations.enclosures import Enclosure, LinesEnclosure
from buffet.relaxations.headwise import HeadwiseProduct
from buffet.relaxations.products import planes, rule
from buffet.relaxations.relaxation import Alphas, Choice, Choices, Known, Parameters, Relaxation, Site
from buffet.relaxations.softmax import better_bound, softmax_enclosure

HEADWISE = 0.8
"""How much of a product is bounded head by head where learning starts."""


# --- α of products ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """The same α everywhere."""

    alpha: float

    def __call__(self, site: Site) -> tuple[Choice, Choice]:
        return self.alpha, self.alpha


class Rule:
    """r-BuFFeT: α by the range of the fusing ReLU's input (`products.rule`)."""

    def __call__(self, site: Site) -> tuple[Choice, Choice]:
        op, known = site.node.op, site.known
        assert isinstance(op, Bilinear)
        factors = tuple(_linear_bounds(known, i) for i in site.node.inputs)
        if known.region.symmetric and all(_exact(factor) for factor in factors):
            return 0.0, 0.0  # ranges of exact forms are symmetric then: all ties
        x, y = site.boxes
        weights, values = factors
        if isinstance(op, Mix) and isinstance(values, Local):
            return _rule_of_moved(op, (x, y), (_form(weights, x), values), known)
        return rule(op, x, y, _form(weights, x), _form(values, y), known.least_sums)


class Random:
    """α drawn at random, the same for the same node."""

    def __call__(self, site: Site) -> tuple[Choice, Choice]:
        generator = torch.Generator().manual_seed(site.index)
        shape = site.known.region.tasks, *_sizes(site).values()
        lower, upper = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        device = site.known.region.center.device
        return lower.to(device), upper.to(device)


RULE = Rule()
PRODUCTS: Mapping[str, Alphas] = {"zero": Fixed(0.0), "dual": Fixed(1.0), "middle": Fixed(0.5), "rule": RULE}
"""How α of a product is chosen where it is not learned."""
ALPHAS: Mapping[str, Alphas] = {**PRODUCTS, "random": Random()}
"""The same, and at random, where learning starts."""


def _rule_of_moved(
    op: Mix, boxes: tuple[Box, Box], forms: tuple[Form, Local], known: Known
) -> tuple[Tensor, Tensor]:
    """The rule where only the moved rows of the values vary: of the others any α gives the same, so 0."""
    moved = known.region.moved  # tasks × words

    def weights(v: Tensor) -> Tensor:
        """Those of the moved tokens, of ``[tasks, tokens, heads · keys, …]``."""
        v = v.unflatten(2, (op.heads, -1))
        return v.take_along_dim(moved.view(len(moved), 1, 1, -1, *[1] * (v.ndim - 4)), 3).flatten(2, 3)

    def values(v: Tensor) -> Tensor:
        return v.take_along_dim(moved.view(*moved.shape, *[1] * (v.ndim - 2)), 1)

    (x, y), (x_form, local) = boxes, forms
    chosen = rule(
        op,
        Box(weights(x.lower), weights(x.upper)),
        Box(values(y.lower), values(y.upper)),
        Form.between(weights(x_form.lower), weights(x_form.upper)),
        local.of_moved(),
        known.least_sums,
    )
    tokens = y.lower.shape[1]

    def everywhere(alpha: Tensor) -> Tensor:
        """From terms ``[tasks, i, h, words, k]`` to those of all tokens."""
        full = alpha.new_zeros(*alpha.shape[:3], tokens, alpha.shape[4])
        return full.scatter_(3, moved[:, None, None, :, None].expand_as(alpha), alpha)

    lower, upper = (everywhere(alpha) for alpha in chosen)
    return lower, upper


def _linear_bounds(known: Known, index: int) -> Stop:
    """Linear bounds of a factor in the input, kept or made for the occasion."""
    if index in known.locals:
        return known.locals[index]
    if index in known.forms:
        return known.forms[index]
    forms, _ = known.forms_of((index,), {**known.forms, **known.locals})
    return forms[index]


def _exact(factor: Stop) -> bool:
    return isinstance(factor, Local) or factor.exact or factor.still


def _form(factor: Stop, box: Box) -> Form:
    return factor.form(box.lower.shape[1]) if isinstance(factor, Local) else factor


# --- relaxations --------------------------------------------------------------------------------------------


class FunctionLines(Relaxation):
    """A function of one variable between two lines. Parameters: ``lower`` and ``upper``, their slopes."""

    def start(self, site: Site, alphas: Alphas, only_alphas: bool) -> Parameters:
        found: Parameters = {}
        for side, slope in zip(SIDES, default_slopes(*self._where(site)), strict=True):
            least, most = site.known.slopes(site.index, side)
            if bool((most > least).any()):
                # Where there is no choice now, as for a ReLU that is always on, there may be one at a larger
                # ε: it should begin with the slope of now.
                share = torch.where(most > least, (slope - least) / (most - least), slope)
                found[side] = share.clamp(0, 1).nan_to_num(0.0)
        return found

    def choices(self, site: Site, parameters: Parameters, alphas: Alphas) -> Choices:
        return {
            side: torch.lerp(*site.known.slopes(site.index, cast(Side, side)), parameter)
            for side, parameter in parameters.items()
        }

    def complete(self, site: Site, choices: Choices) -> Choices:
        if len(choices) == len(SIDES):
            return choices
        return {**dict(zip(SIDES, default_slopes(*self._where(site)), strict=True)), **choices}

    def linearise(self, site: Site, choices: Choices) -> Enclosure:
        slopes = {f"{side}_slope": slope for side, slope in choices.items()}
        lines = relax(*self._where(site), dtype=site.known.dtype, **slopes)  # type: ignore[arg-type]
        return LinesEnclosure(
            lines.lower_slope, lines.lower_intercept, lines.upper_slope, lines.upper_intercept
        )

    def dual_pass(self, site: Site, tokens: int, dtype: torch.dtype) -> DualPass:
        op, ((clean, box),) = site.node.op, site.first(tokens)
        assert isinstance(op, Apply)
        ranges = {side: site.known.slopes(site.index, side) for side in SIDES}
        slopes = {side: (least[:, :tokens], most[:, :tokens]) for side, (least, most) in ranges.items()}
        enclosure = site.known.enclosures[site.index]
        assert isinstance(enclosure, LinesEnclosure)
        return LinesDual.over(enclosure, Curve(site.index, op.function, clean, box, slopes), dtype)

    def _where(self, site: Site) -> tuple[str, Tensor, Tensor, Tensor]:
        op, (box,) = site.node.op, site.boxes
        assert isinstance(op, Apply)
        return op.function, site.clean[0], box.lower, box.upper


class ProductPlanes(Relaxation):
    """A sum of products between two planes per term and side. Parameters: α ``lower`` and ``upper``.

    ``whole``, where values are exact forms of the input: how much of it is bounded head by head.
    """

    has_alpha = True

    def start(self, site: Site, alphas: Alphas, only_alphas: bool) -> Parameters:
        sizes, device = _sizes(site), site.known.region.center.device
        alone = self._alone(site)
        shape = site.known.region.tasks, *(1 if axis in alone else n for axis, n in sizes.items())
        op = site.node.op
        assert isinstance(op, Bilinear)

        def at(alpha: Choice) -> Tensor:
            found = torch.as_tensor(alpha, dtype=torch.float64, device=device)
            for axis, token in alone.items() if found.ndim else ():
                found = found.take_along_dim(
                    token.view(-1, *[1] * (found.ndim - 1)), 1 + op.terms.index(axis)
                )
            return found.expand(shape).clone()

        found: Parameters = {side: at(alpha) for side, alpha in zip(SIDES, alphas(site), strict=True)}
        if not only_alphas and (whole := headwise_of(site.known, site.node)):
            found["whole"] = torch.full_like(whole.reach[..., 0], HEADWISE)
        return found

    def choices(self, site: Site, parameters: Parameters, alphas: Alphas) -> Choices:
        return parameters or dict(zip(SIDES, alphas(site), strict=True))

    def linearise(self, site: Site, choices: Choices) -> Enclosure:
        op = site.node.op
        assert isinstance(op, Bilinear)
        lower, upper = (choices[side] for side in SIDES)
        dtype = site.known.dtype
        enclosure = planes(op, site.clean, *site.boxes, alpha_lower=lower, alpha_upper=upper, dtype=dtype)
        whole = headwise_of(site.known, site.node) if "whole" in choices else None
        return enclosure if whole is None else whole.mixed(enclosure, cast(Tensor, choices["whole"]))

    def dual_pass(self, site: Site, tokens: int, dtype: torch.dtype) -> DualPass:
        op = site.node.op
        assert isinstance(op, Bilinear)
        (x, x_box), (y, y_box) = site.first(tokens)
        dual = PlanesDual.over(op, (x, y), x_box, y_box, dtype)
        whole = headwise_of(site.known, site.node)
        return dual if whole is None else HeadwiseDual.mixing(dual, whole, tokens, dtype)

    def _alone(self, site: Site) -> dict[str, Tensor]:
        """The axes of terms along which α is shared, and the token whose α it is.

        A factor that moves at a single token, exactly, makes a product with anything else linear: α matters
        there only, so one along the tokens of this factor is as good as one for each.
        """
        op, moved = site.node.op, site.known.region.moved
        assert isinstance(op, Bilinear)
        factors = zip(site.node.inputs, (op.x, op.y), strict=True)
        return {axes[0]: moved for i, axes in factors if i in site.known.locals and moved.shape[1] == 1}


class SoftmaxBounds(Relaxation):
    """Attention weights between linear functions of their scores (`softmax.softmax_enclosure`).

    Parameters: ``point`` (where the tangents touch), ``mixture`` (of the lower bounds), ``shift`` (what is
    taken off the coefficients of the weights).
    """

    def start(self, site: Site, alphas: Alphas, only_alphas: bool) -> Parameters:
        op = site.node.op
        assert isinstance(op, Softmax)
        region, keys = site.known.region, site.clean[0].unflatten(-1, (op.heads, -1)).shape
        shape = region.tasks, *keys, keys[-1]
        middle = torch.full(shape, 0.5, dtype=torch.float64, device=region.center.device)
        mixture = better_bound(op, site.clean[0], *site.boxes)
        return {"point": middle, "mixture": mixture, "shift": middle[..., 0, 0].clone()}

    def choices(self, site: Site, parameters: Parameters, alphas: Alphas) -> Choices:
        return parameters

    def complete(self, site: Site, choices: Choices) -> Choices:
        op = site.node.op
        assert isinstance(op, Softmax)
        found = {"point": 0.5, **choices}
        if "mixture" not in found:
            found["mixture"] = better_bound(op, site.clean[0], *site.boxes)
        return found

    def linearise(self, site: Site, choices: Choices) -> Enclosure:
        op = site.node.op
        assert isinstance(op, Softmax)
        return softmax_enclosure(op, site.clean[0], *site.boxes, dtype=site.known.dtype, **choices)  # type: ignore[arg-type]

    def dual_pass(self, site: Site, tokens: int, dtype: torch.dtype) -> DualPass:
        op, ((clean, scores), *direct) = site.node.op, site.first(tokens)
        assert isinstance(op, Softmax)
        return SoftmaxDual.over(op, clean, scores, *(box for _, box in direct))


RELAXATIONS: Mapping[type[Op], Relaxation] = {
    Apply: FunctionLines(),
    Bilinear: ProductPlanes(),
    Softmax: SoftmaxBounds(),
}
"""The relaxation of a kind of operation, and of the kinds derived from it."""


def relaxation_of(op: Op) -> Relaxation:
    """That of an operation's class, or of the nearest class that it derives from."""
    for kind in type(op).__mro__:
        if kind in RELAXATIONS:
            return RELAXATIONS[kind]
    raise NotImplementedError(f"no relaxation of {type(op).__name__}")


def headwise_of(known: Known, node: Node) -> HeadwiseProduct | None:
    """How a product is bounded as a whole, if it can be: where its values are exact forms of the input."""
    values = known.locals.get(node.inputs[-1])
    if not (isinstance(node.op, Mix) and node.op.scale == 1 and values):
        return None
    clean = tuple(known.clean[i] for i in node.inputs)
    return HeadwiseProduct.of(node.op, clean, known.boxes[node.inputs[0]], values, known.region)


def _sizes(site: Site) -> dict[str, int]:
    """The sizes of the axes of a product's terms."""
    op = site.node.op
    assert isinstance(op, Bilinear)
    sizes: dict[str, int] = {}
    for value, axes in zip(site.clean, (op.x, op.y), strict=True):
        sizes |= dict(zip(axes, op.split(value, axes).shape, strict=True))
    return {axis: sizes[axis] for axis in op.terms}


# --- relaxing a network -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relaxer:
    """Relaxes nonlinear nodes: with learned parameters where there are some, else as usual."""

    product: str = "zero"  # PRODUCTS
    learned: Mapping[int, Parameters] = field(default_factory=dict)
    chosen: dict[int, Parameters] | None = None  # takes the α of products that were not learned

    def __call__(self, known: Known, index: int) -> Enclosure:
        site = Site(known, index)
        relaxation = relaxation_of(site.node.op)
        choices = self.choices(site)
        if self.chosen is not None and relaxation.has_alpha:
            shape = known.region.tasks, *[1] * len(_sizes(site))
            self.chosen[index] = {
                side: site.clean[0].new_full(shape, a) if isinstance(a, float) else a
                for side, a in choices.items()
            }
        return relaxation.linearise(site, choices)

    def choices(self, site: Site) -> Choices:
        """What the linear bounds of a node are made of."""
        given = self.learned.get(site.index, {})
        return relaxation_of(site.node.op).choices(site, given, PRODUCTS[self.product])
