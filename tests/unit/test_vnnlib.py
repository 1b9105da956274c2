"""VNN-LIB files: what they mean, what is refused, and how quickly."""

from __future__ import annotations

import gzip
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from buffet import BuffetError, Property, read_vnnlib
from buffet.loading.vnnlib import Query, parse_vnnlib


def text(asserts: str, inputs: int = 2, outputs: int = 3, bounds: bool = True) -> str:
    declared = [f"(declare-const X_{i} Real)" for i in range(inputs)]
    declared += [f"(declare-const Y_{i} Real)" for i in range(outputs)]
    if bounds:
        declared += [f"(assert (<= X_{i} 1.0))(assert (>= X_{i} -1.0))" for i in range(inputs)]
    return "; a property\n" + "\n".join(declared) + "\n" + asserts


def only(asserts: str, **sizes: int) -> Query:
    (query,) = parse_vnnlib(text(asserts, **sizes))
    return query


def test_margins_as_the_benchmarks_write_them(tmp_path: Path):
    body = text("(assert (or\n  (and (>= Y_0 Y_1))\n  (and (>= Y_2 Y_1))\n))\n")
    plain, packed = tmp_path / "a.vnnlib", tmp_path / "a.vnnlib.gz"
    plain.write_text(body)
    packed.write_bytes(gzip.compress(body.encode()))
    for path in (plain, packed):
        (query,) = read_vnnlib(path, inputs=2, outputs=3)
        assert query.lower.tolist() == [-1, -1]
        assert query.upper.tolist() == [1, 1]
        assert query.property.label == 1
        expected = Property.margins(1, 3).rows
        assert torch.equal(query.property.rows, expected)


def test_conjunctions_and_disjunctions_nest():
    """(Y0 ≤ 1 and (Y1 ≥ 2 or Y2 ≥ 3)) or Y0 ≥ 9."""
    query = only("(assert (or (and (<= Y_0 1) (or (>= Y_1 2) (>= Y_2 3))) (>= Y_0 9)))")
    outputs = torch.tensor([[1.0, 2, 0], [1, 0, 3], [1, 1, 2], [2, 2, 3], [9, 0, 0]])
    assert query.property.violated(outputs).tolist() == [True, True, False, False, True]
    assert len(query.property.rows) == 4  # Y0 ≤ 1 is one row of two cases


def test_linear_terms():
    query = only("(assert (<= (+ (* 2 Y_0) (- Y_1) (* (- 3 1) (- Y_2 Y_0 1)) 4) (- 10)))")
    assert query.property.rows.tolist() == [[0.0, -1.0, 2.0]]
    assert query.property.offsets.tolist() == [12.0]


def test_several_asserts_are_a_conjunction():
    query = only("(assert (<= Y_0 0))(assert (<= Y_1 0))")
    assert query.property.cases == ((0, 1),)
    assert query.property.violated(torch.tensor([[0.0, 0, 0], [0, 1, 0]])).tolist() == [True, False]


def test_several_boxes():
    body = "(assert (or (and (<= X_0 0) (>= X_0 -1) (>= Y_0 1)) (and (>= X_0 0.5) (<= Y_0 -1))))"
    low, high = parse_vnnlib(text(body))
    assert (low.lower.tolist(), low.upper.tolist()) == ([-1, -1], [0, 1])
    assert (high.lower.tolist(), high.upper.tolist()) == ([0.5, -1], [1, 1])
    assert low.property.violated(torch.tensor([1.0, 0, 0]))
    assert high.property.violated(torch.tensor([-1.0, 0, 0]))


def test_boxes_hold_what_the_decimals_say():
    query = only("(assert (<= X_0 0.1))(assert (>= X_0 -0.3))(assert (<= Y_0 0.7))")
    assert Fraction(query.upper[0].item()) >= Fraction("0.1")
    assert Fraction(query.lower[0].item()) <= Fraction("-0.3")
    # unsafe is y0 − 0.7 ≤ 0: the rounded set is never smaller
    assert -Fraction(query.property.offsets[0].item()) >= Fraction("0.7")


def test_degenerate_inputs_stay_one_number():
    query = only("(assert (= X_0 0.1))(assert (<= 0.3 X_1))(assert (>= 0.3 X_1))(assert (>= Y_0 0))")
    assert query.lower.tolist() == query.upper.tolist() == [0.1, 0.3]


def test_coefficients_without_a_float_are_scaled_exactly():
    query = only("(assert (<= (+ (* 0.1 Y_0) (* 0.3 Y_1)) 0.5))")
    assert query.property.rows.tolist() == [[1.0, 3.0, 0.0]]
    assert query.property.offsets.tolist() == [-5.0]


def test_constants_that_contradict_leave_a_case_out():
    query = only("(assert (or (and (<= 1 0) (>= Y_0 0)) (>= Y_1 0)))")
    assert query.property.rows.tolist() == [[0.0, -1.0, 0.0]]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("(assert (<= Y_0 0)", "line 9: this bracket is never closed"),
        ("(assert (<= Y_0 0)))", "line 9: a closing bracket"),
        ("Y_0", "line 9: 'Y_0' outside"),
        ("(assert (< Y_0 0))", "line 9: '<' is not supported"),
        ("\n(assert (<= Y_9 0))", "line 10: Y_9 is not declared"),
        ("(assert (<= Y_0 0 1))", "line 9: <= compares two"),
        ("(assert (<= (* Y_0 Y_1) 0))", "line 9: a product of variables"),
        ("(assert (<= (+ X_0 X_1) 0))(assert (<= Y_0 0))", "line 9: a constraint on several inputs"),
        ("(assert (<= X_0 Y_0))", "line 9: a constraint on inputs and outputs"),
        ("(assert (<= Y_0 nan))", "line 9: 'nan' is neither"),
        ("(assert (<= Y_0 1e9999))", "line 9: '1e9999' is neither"),
        ("(assert (>= X_0 2))(assert (<= Y_0 0))", "line 7: X_0 ≤ 1, but line 9 says ≥ 2"),
        ("(declare-const X_0 Real)", "line 9: X_0 is declared twice"),
        ("(declare-const Z_0 Real)", "line 9: a declaration is"),
        ("(declare-const)", "line 9: a declaration is"),
        ("(declare-const X_9 Real)(assert (<= Y_0 0))", "X_2 is not declared, but X_9 is"),
        ("(assert)", "line 9: assert takes"),
        ("()", "line 9: unknown command"),
        ("(assert (or))", "line 9: "),
        ("(assert ())", "line 9: expected a constraint"),
        ("(assert (<= (+) 0))", "line 9: expected a sum"),
        ("(prove (<= Y_0 0))", "line 9: unknown command 'prove'"),
        ("", "no constraint on the outputs"),
        ("(assert (<= 1 0))", "contradict"),
        ("(assert (<= (* 3.14159265358979323846 Y_0) 0))", "line 9: the coefficient of Y_0"),
        ("(assert " + 200 * "(and " + "(<= Y_0 0)" + 200 * ")" + ")", "line 9: more than 100 brackets"),
        (100_000 * "(", "line 9: more than 100 brackets"),
        ("(assert (and" + 20 * " (or (<= Y_0 0) (<= Y_1 0))" + "))", "more than 20000 conjunctions"),
        (20 * "(assert (or (<= Y_0 0) (<= Y_1 0)))", "more than 20000 conjunctions"),
        ("(assert (<= " + 60 * "(* 1e999 " + "Y_0" + 60 * ")" + " 0))", "line 9: a number with too many"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(body, complaint):
    with pytest.raises(BuffetError, match=re.escape(complaint)):
        parse_vnnlib(text(body))


def test_inputs_need_bounds_and_networks_fit(tmp_path: Path):
    with pytest.raises(BuffetError, match="X_0 has no lower bound"):
        parse_vnnlib(text("(assert (<= X_0 1))(assert (<= Y_0 0))", bounds=False))
    with pytest.raises(BuffetError, match="no input X_0"):
        parse_vnnlib("(declare-const Y_0 Real)")
    path = tmp_path / "a.vnnlib"
    path.write_text(text("(assert (<= Y_0 0))"))
    with pytest.raises(BuffetError, match="declares 2 inputs X, the network has 5"):
        read_vnnlib(path, inputs=5)
    with pytest.raises(BuffetError, match="cannot be read"):
        read_vnnlib(tmp_path / "nothing.vnnlib")
    broken = tmp_path / "b.vnnlib.gz"
    broken.write_bytes(gzip.compress(text("(assert (<= Y_0 0))").encode())[:-20])
    with pytest.raises(BuffetError, match="cannot be read"):
        read_vnnlib(broken)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BuffetError, match="not a text"):
        read_vnnlib(path)


def test_thousands_of_inputs_are_read():
    lines = [f"(assert (<= X_{i} {0.1 * i + 0.05}))\n(assert (>= X_{i} {0.1 * i}))" for i in range(3072)]
    body = text("\n".join(lines) + "(assert (<= Y_0 0))", inputs=3072, bounds=False)
    (query,) = parse_vnnlib(body)
    assert len(query.lower) == 3072
