"""Properties of outputs: what is unsafe, what is proven, and programs that end in their rows."""

from __future__ import annotations

import math

import pytest
import torch

import buffet
from buffet import BuffetError, Property
from buffet.engine import Engine, bound_margins
from buffet.network import Affine, Apply, Builder, First, Program
from buffet.properties import program_of_rows


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def program(outputs: int = 3, seed: int = 0) -> Program:
    generator = torch.Generator().manual_seed(seed)
    net = Builder()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden = net.add(First(), net.add(Apply("relu"), net.affine(net.input, normal(5, 4), normal(5))))
    net.affine(hidden, normal(outputs, 5), normal(outputs))
    return net.build().to(torch.float64)


def test_margins_are_the_default_question():
    robust = Property.margins(1, 3)
    assert robust.label == 1
    assert robust.outputs == 3
    assert not robust.violated(rows(0.0, 1.0, 0.5))
    assert robust.violated(rows(0.0, 1.0, 1.0))  # a tie is no answer
    assert robust.margin(robust.values(rows(0.0, 1.0, 0.5))) == 0.5
    assert repr(robust) == "Property(outputs=3, rows=2, cases=2)"


def test_one_output_never_above_another():
    order = Property.never_preferred(0, 2, 3)
    assert order.label is None
    assert not order.violated(rows(1.0, 9.0, 2.0))
    assert order.violated(rows(2.0, 0.0, 1.0))
    assert Property.never_preferred(1, 0, 2).label == 0


def test_bounds_of_outputs():
    bounded = Property.within([-1.0, -math.inf], [1.0, 2.0])
    assert len(bounded.cases) == 3
    outputs = torch.tensor([[0.0, -100.0], [1.5, 0.0], [-1.5, 0.0], [0.0, 2.0]])
    assert bounded.violated(outputs).tolist() == [False, True, True, True]


def test_a_case_needs_all_of_its_rows():
    """Unsafe: y0 ≤ 0 and y1 ≤ 0 together."""
    both = Property(torch.eye(2, dtype=torch.float64), rows(0.0, 0.0), ((0, 1),))
    assert both.violated(torch.tensor([[-1.0, -1.0], [-1.0, 1.0]])).tolist() == [True, False]
    assert both.proven(rows(-5.0, 0.1))
    assert not both.proven(rows(-5.0, 0.0))
    assert both.margin(rows(-5.0, 0.1)) == 0.1


@pytest.mark.parametrize("bound", [math.nan, math.inf, 0.0, -1.0])
def test_only_finite_bounds_above_zero_prove(bound):
    assert not Property.margins(0, 2).proven(rows(bound))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Property.margins(3, 3), "label 3"),
        (lambda: Property.margins(0, 1), "two"),
        (lambda: Property.never_preferred(1, 1, 3), "not two"),
        (lambda: Property.within([0.0], [0.0]), "lower < upper"),
        (lambda: Property.within([-math.inf], [math.inf]), "nothing to prove"),
        (lambda: Property(torch.zeros(1, 2).double(), rows(math.nan), ((0,),)), "not finite"),
        (lambda: Property(torch.zeros(1, 2).double(), rows(0.0), ()), "at least one"),
        (lambda: Property(torch.zeros(1, 2).double(), rows(0.0), ((1,),)), "not there"),
        (lambda: Property.margins(0, 3).violated(torch.zeros(2)), "about 3"),
    ],
)
def test_what_is_no_property_is_refused(make, words):
    with pytest.raises(BuffetError, match=words):
        make()


def test_rows_of_margins_are_the_margins_to_the_last_bit():
    net, robust = program(), Property.margins(2, 3)
    ours, expected = program_of_rows(net, robust.rows, robust.offsets).nodes, net.margins(2).nodes
    assert len(ours) == len(expected)
    op, reference = ours[-1].op, expected[-1].op
    assert isinstance(op, Affine)
    assert isinstance(reference, Affine)
    assert torch.equal(op.weight, reference.weight)
    assert torch.equal(op.bias, reference.bias)


@pytest.mark.parametrize(
    "given",
    [
        Property.within([-1.0, -2.0, 0.1], [1.0, math.inf, math.inf]),
        Property(torch.tensor([[0.3, -0.7, 2.0]]).double(), rows(0.1), ((0,),)),
        Property(torch.tensor([[1.0, -1.0, 0.0]]).double(), rows(1e-30), ((0,),)),
    ],
)
def test_any_rows_end_a_program(given):
    net = program()
    x = torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ended = program_of_rows(net, given.rows, given.offsets)
    torch.testing.assert_close(ended.evaluate(x), given.values(net.evaluate(x)), rtol=1e-13, atol=1e-13)


def test_sums_that_would_be_rounded_are_left_to_the_bounds():
    """1e-30 − 1 is no float64: the rows become a layer of their own, whose rounding bounds account for."""
    net = Builder()
    net.affine(net.input, torch.tensor([[1.0], [1e-30]]), torch.zeros(2))
    tiny = net.build().to(torch.float64)
    ended = program_of_rows(tiny, Property.margins(0, 2).rows, rows(0.0))
    assert len(ended.nodes) == len(tiny.nodes) + 1


def test_rows_of_other_networks_are_refused():
    with pytest.raises(BuffetError, match="4 outputs, the network has 3"):
        program_of_rows(program(), torch.zeros(1, 4).double(), rows(0.0))


def test_the_embedded_model_is_certified_by_its_property():
    """The rows of a property give the very margins that `verify` proves."""
    model = buffet.load()
    x = model.embed("a gripping , moving film")
    region = buffet.LpBall(x, [2], 2, 0.01)
    answer = buffet.verify(model, region, falsify=False)
    (lower,) = bound_margins(model, region, buffet.METHODS["baseline"], answer.label, Engine())
    assert Property.margins(answer.label, 2).proven(lower)
