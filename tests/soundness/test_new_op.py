"""What a contributor adds is bounded by every method: a linear operation is a class, a function an entry."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from buffet.engine import Engine, bound_margins
from buffet.methods import METHODS
from buffet.network import Add, Apply, Builder, First, Linear, Op, Program, ops
from buffet.network.functions import FUNCTIONS, Function
from buffet.network.ops import matrix_product
from buffet.regions import Box, CandidateSet, LpBall

WIDTH, TOKENS = 4, 3


@dataclass(frozen=True, eq=False)
class Steps(Linear):
    """Every feature less the one before it."""

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return inputs[0] - inputs[0].roll(1, -1)

    def coefficients(self, x: Tensor) -> Tensor:
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        return eye - eye.roll(-1, 1)

    def act(self, coefs: Tensor, x: Tensor) -> Tensor:
        return matrix_product(coefs, x)

    def act_transposed(self, coefs: Tensor, x: Tensor) -> Tensor:
        return matrix_product(coefs.mT, x)

    def largest(self, *values: Tensor) -> Tensor:
        return values[0].abs() + values[0].abs().roll(1, -1)


SOFTPLUS = Function(
    value=lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    derivative=torch.sigmoid,
    minima=lambda k: (torch.logit(k),),
    curvature="convex",
    least=0.0,
    relative=4.0,
)


@dataclass(frozen=True)
class Network:
    program: Program
    program64: Program


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Network:
    """Two layers of attention, with the new operation before each, and the new function."""
    monkeypatch.setitem(FUNCTIONS, "softplus", SOFTPLUS)
    generator = torch.Generator().manual_seed(7)

    def dense(out: int) -> tuple[Tensor, Tensor]:
        return torch.randn(out, WIDTH, generator=generator) / 2, torch.randn(out, generator=generator) / 2

    net = Builder()
    x = net.input
    for _ in range(2):
        attended = net.attention(x, net.add(Steps(), x), 2, [dense(WIDTH) for _ in range(3)])
        x = net.add(Steps(), net.add(Apply("softplus"), net.add(Add(), x, attended)))
    net.affine(net.add(First(), x), *dense(3))
    return Network(net.build(), net.build().to(torch.float64))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_bounds_what_is_new(model, name):
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    method = replace(METHODS[name], steps=min(3, METHODS[name].steps), rivals=())
    label = int(model.program64.evaluate(x.double()).argmax())
    others = [c for c in range(3) if c != label]
    for region in (
        LpBall(x, [1], 2, 0.05),
        Box(x, x - 0.02, x + 0.03, [1, 2]),
        CandidateSet(x, [0], [x[:1] + 0.02]),
    ):
        (bound,) = bound_margins(model, region, method, label, Engine())
        assert bool(bound.isfinite().all())
        logits = model.program64.evaluate(
            region.points(region.sample(200, torch.Generator().manual_seed(2)))[:, 0]
        )
        attained = (logits[:, label, None] - logits[:, others]).amin(0)
        assert bool((bound <= attained).all())
        clean = model.program64.evaluate(x.double())
        if name != "interval":  # and the bound is worth something
            assert bool((bound > clean[label] - clean[others] - 2).all())


def linear_ops() -> list[type[Linear]]:
    return [
        op
        for op in vars(ops).values()
        if isinstance(op, type) and issubclass(op, Linear) and op is not Linear
    ]


@pytest.mark.parametrize("kind", linear_ops())
def test_a_linear_operation_is_what_its_coefficients_say(kind):
    """Evaluation, coefficients, transpose and sizes of every class agree."""
    generator = torch.Generator().manual_seed(3)
    given = {
        "weight": torch.randn(5, WIDTH, generator=generator, dtype=torch.float64),
        "bias": torch.randn(5, generator=generator, dtype=torch.float64),
        "value": torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64),
    }
    if kind is ops.Diagonal:
        given |= {"weight": given["weight"][0], "bias": given["bias"][:WIDTH]}
    op: Op = kind(**{name: value for name, value in given.items() if name in kind.__dataclass_fields__})
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    matrix = torch.autograd.functional.jacobian(op.evaluate, x)
    out = matrix.shape[:2]
    coefs, columns = (
        op.coefficients(x),
        torch.randn(TOKENS, WIDTH, 2, generator=generator, dtype=torch.float64),
    )
    expected = torch.einsum("nfmw,mwc->nfc", matrix, columns)
    for act in (op.act, op.forth):
        torch.testing.assert_close(act(coefs, columns), expected)
    rows = torch.randn(*out, 2, generator=generator, dtype=torch.float64)
    pulled, every = op.act_transposed(coefs, rows), torch.einsum("nfmw,nfc->mwc", matrix, rows)
    torch.testing.assert_close(pulled, every[: len(pulled)])
    assert not bool(every[len(pulled) :].any())
    sizes = torch.einsum("nfmw,mw->nf", matrix.abs(), x.abs())
    assert bool((op.largest_deviation((), x.abs()) >= sizes * (1 - 1e-12)).all())
    assert bool((op.largest(x) >= sizes * (1 - 1e-12)).all())
    assert op.increasing <= bool((matrix >= 0).all())
