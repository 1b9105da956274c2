"""Properties of outputs: what is unsafe, what is proven, and programs that end in their rows."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import buffet
from buffet import BuffetError, Property
from buffet.network import Affine, Apply, Builder, First, Node, Program
from buffet.properties import program_of_rows
from random_encoders import ball, encoder


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


def test_a_case_is_as_safe_as_its_best_row():
    given = Property(torch.eye(3, dtype=torch.float64), rows(0.0, 0.0, 0.0), ((0, 1), (2,)))
    lower = torch.tensor([[-1.0, 2.0, 3.0], [math.nan, 2.0, 1.0], [math.nan, math.nan, 1.0]]).double()
    assert given.by_case(lower)[:2].tolist() == [[2.0, 3.0], [2.0, 1.0]]
    assert given.by_case(lower)[2].isnan().tolist() == [True, False]
    margin, row = given.deciding(lower[:2])
    assert (margin.tolist(), row.tolist()) == ([2.0, 1.0], [1, 2])


def test_a_property_says_what_has_to_be_true():
    assert str(Property.within([-1.0], [0.25])) == "y0 > −1 and −y0 > −0.25"
    odd = Property(torch.tensor([[2.0, -1.0], [0.0, 0.0]]).double(), rows(-3.0, 1.0), ((0, 1),))
    assert str(odd) == "2·y0 − y1 > 3 or 0 > −1"


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_margins_in_any_order_are_those_of_a_class(order):
    plain = Property.margins(1, 4)
    mixed = Property(plain.rows[order], plain.offsets, plain.cases)
    assert mixed.label == 1
    assert torch.equal(mixed.usual().rows, plain.rows)
    assert Property(plain.rows[:2], plain.offsets[:2], ((0,), (1,))).label is None
    assert Property(2 * plain.rows, plain.offsets, plain.cases).label is None


# --- verified -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A random encoder with other outputs."""

    program64: Program

    @property
    def program(self) -> Program:
        return self.program64.to(torch.float32)


def regressor(outputs: int, seed: int = 0) -> Ended:
    """Two attention layers, and `outputs` numbers."""
    net = encoder(seed).program64
    generator = torch.Generator().manual_seed(seed)
    *body, last = net.nodes
    assert isinstance(last.op, Affine)
    weight = torch.randn(outputs, last.op.weight.shape[1], generator=generator, dtype=torch.float64)
    bias = torch.randn(outputs, generator=generator, dtype=torch.float64)
    return Ended(Program((*body, Node(Affine(weight, bias), last.inputs))))


def outputs_at(model: Ended, region: buffet.LpBall, count: int = 200) -> torch.Tensor:
    delta = region.sample(count, torch.Generator().manual_seed(1)).double()
    return model.program64.evaluate(region.points(region.project(delta)))


@pytest.mark.parametrize("method", ["baseline", "lse", "o-buffet", "buffet"])
def test_the_property_of_a_class_gives_the_margins_of_its_label_to_the_last_bit(method):
    model, region = encoder(3, num_labels=4), ball(3, 0.05)
    for label in range(2):
        by_label = buffet.verify(model, region, method=method, label=label)
        by_property = buffet.verify(model, region, method=method, property=Property.margins(label, 4))
        assert torch.equal(by_label.margins, by_property.margins)
        assert by_label.verdicts == by_property.verdicts
        assert (by_label.label, by_label.clean_margin) == (by_property.label, by_property.clean_margin)
        assert repr(by_label) == repr(by_property)


@pytest.mark.parametrize("method", ["baseline", "buffet"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_bounds_of_outputs_are_proven_and_broken(outputs, method):
    model, region = regressor(outputs), ball(0, 0.02)
    seen = outputs_at(model, region).flatten(0, -2)
    low, high = seen.amin(0) - 0.5, seen.amax(0) + 0.5
    proven = buffet.verify(
        model, region, method=method, property=Property.within(low.tolist(), high.tolist())
    )
    assert proven.verdict == "certified"
    assert proven.label is None
    assert proven.margins.shape == (2, 2 * outputs)
    ends = Property.within(low.tolist(), high.tolist())
    assert bool((ends.values(outputs_at(model, region)) >= proven.margins).all())
    tight = Property.within(seen.mean(0).tolist(), [math.inf] * outputs)
    broken = buffet.verify(model, region, method=method, property=tight)
    assert "falsified" in broken.verdicts
    for point in broken.counterexamples:
        assert point is None or bool(tight.violated(model.program64.evaluate(point)))


def test_one_output_never_preferred_to_another():
    model, region = regressor(3), ball(0, 0.05)
    clean = model.program64.evaluate(region.center.double())
    best, worst = int(clean.argmax()), int(clean.argmin())
    kept = buffet.verify(model, region, property=Property.never_preferred(worst, best, 3))
    assert kept.verdict == "certified"
    assert kept.margins.shape == (2, 1)
    lost = buffet.verify(model, region, property=Property.never_preferred(best, worst, 3))
    assert lost.verdict == "falsified"
    assert "y" in repr(lost)
    assert lost.to_dict()["label"] is None
    assert list(lost.to_dict()["tasks"][0]["margins"]) == lost.to_dict()["property"]


@pytest.mark.parametrize("method", ["baseline", "buffet"])
def test_a_row_that_decides_a_case_is_enough(method):
    """Unsafe: y0 above all that was seen, and y1 below 1000. The latter is true everywhere."""
    model, region = regressor(2), ball(0, 0.05)
    top = float(outputs_at(model, region)[..., 0].max())
    table = torch.tensor([[-1.0, 0.0], [0.0, 1.0]]).double()
    safe = Property(table, rows(top + 1, -1000.0), ((0, 1),))
    found = buffet.verify(model, region, method=method, property=safe)
    assert found.verdict == "certified"
    assert found.margins.shape == (2, 1)
    assert bool((found.margins > 0).all())
    unsafe = Property(table, rows(top - 1, -1000.0), ((0, 1),))
    assert buffet.verify(model, region, method=method, property=unsafe).verdict == "falsified"


def test_cells_prove_a_case_by_another_row_each():
    """No row is positive all over the region, but everywhere one of the two is."""
    net = Builder()
    net.affine(net.add(First(), net.input), torch.tensor([[1.0], [-1.0]]), torch.tensor([0.1, 0.1]))
    model = Ended(net.build().to(torch.float64))
    region = buffet.LpBall(torch.zeros(1, 1), [0], 2, 1.0)
    one_of_two = Property(torch.eye(2).double(), rows(0.0, 0.0), ((0, 1),))
    assert buffet.verify(model, region, property=one_of_two).verdict == "unknown"
    found = buffet.verify(model, region, method=buffet.method("baseline", cells=4), property=one_of_two)
    assert found.verdict == "certified"


def test_what_cannot_be_asked_is_refused():
    model, region = regressor(1), ball(0, 0.05)
    with pytest.raises(BuffetError, match="give a property"):
        buffet.verify(model, region)
    with pytest.raises(BuffetError, match="about 2 outputs, the model has 1"):
        buffet.verify(model, region, property=Property.margins(0, 2))
    with pytest.raises(BuffetError, match="give one of them"):
        buffet.verify(model, region, label=0, property=Property.within([0.0], [1.0]))


def test_the_controller_of_the_documentation(tmp_path, capsys):
    """What the page says of it: trained here, exported, read back, proven and broken."""
    path = Path(__file__).parents[2] / "docs" / "controller.py"
    spec = importlib.util.spec_from_file_location("controller", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path)
    out = capsys.readouterr().out
    assert "OnnxModel('controller', input 1 × 4 × 2, 1 output, 1 attention layer)" in out
    assert "torque within (-1.1, -0.3): certified" in out
    assert "torque within (-0.7, -0.6): falsified" in out
