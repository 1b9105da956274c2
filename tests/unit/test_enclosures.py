"""Pieces against the operations they stand for: Jacobians for the linear ones, the bounding planes spelt out
entry by entry for the others. Every check is an equality, so a bound that is merely loose fails too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from buffet.bounds.forms import Form, Rows
from buffet.network import (
    Add,
    Affine,
    Apply,
    Bilinear,
    Center,
    Diagonal,
    First,
    Mean,
    Mix,
    Offset,
    Op,
    Rescale,
    Scores,
)
from buffet.relaxations.enclosures import (
    LinesEnclosure,
    PlanesEnclosure,
    SoftmaxEnclosure,
    SumEnclosure,
    exact_enclosure,
)
from random_forms import KINDS, TASKS, TOKENS, WIDTH, random, random_form, random_rows, spelt_out

OUT = 5
LINEAR: dict[str, Op] = {
    "affine": Affine(random(OUT, WIDTH), random(OUT)),
    "diagonal": Diagonal(random(WIDTH), random(WIDTH)),
    "center": Center(),
    "offset": Offset(random(TOKENS, WIDTH)),
    "first": First(),
    "mean": Mean(),
}
# The rows of the only token of a pooled value are diagonal.
CASES = [
    (name, kind)
    for name, op in LINEAR.items()
    for kind, settings in KINDS.items()
    if settings["diagonal"] or name not in ("first", "mean")
]


def jacobian(op: Op) -> Tensor:
    """``[tokens out, features out, tokens, features]`` of a linear operation."""
    return torch.autograd.functional.jacobian(op.evaluate, random(TOKENS, WIDTH, seed=9))


def rows_of(op: Op, kind: str) -> Rows:
    out = op.evaluate(random(TOKENS, WIDTH))
    settings = KINDS[kind]
    if out.shape[0] == 1:  # a pooled value: its one token is the one group
        settings = {**settings, "groups": 1}
    return random_rows(*out.shape, **settings)


def piece_of(op: Op, dtype: torch.dtype = torch.float64):
    return exact_enclosure(op, (random(TOKENS, WIDTH),), dtype)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_pull_of_a_linear_piece_is_the_transpose(name, kind):
    op = LINEAR[name]
    rows = rows_of(op, kind)
    matrix = jacobian(op)
    (pulled,), bias = piece_of(op).pull(rows)
    assert bias is None
    expected = torch.einsum("tgrnf,nfmw->tgrmw", spelt_out(rows, matrix.shape[0]), matrix)
    torch.testing.assert_close(spelt_out(pulled, TOKENS), expected.expand(len(pulled.coefs), -1, -1, -1, -1))
    assert pulled.groups == rows.groups
    assert pulled.diagonal == (rows.diagonal and name != "mean")


@pytest.mark.parametrize("name", LINEAR)
def test_push_of_a_linear_piece_takes_the_side_its_sign_says(name):
    matrix, form = jacobian(LINEAR[name]), random_form()
    exact, wide = piece_of(LINEAR[name]).push(Form.exactly(form.lower)), piece_of(LINEAR[name]).push(form)
    torch.testing.assert_close(exact.lower, torch.einsum("nfmw,tmwd->tnfd", matrix, form.lower))
    low, high = (torch.einsum("nfmw,tmwd->tnfd", matrix.clamp(min=0), v) for v in (form.lower, form.upper))
    low = low + torch.einsum("nfmw,tmwd->tnfd", matrix.clamp(max=0), form.upper)
    high = high + torch.einsum("nfmw,tmwd->tnfd", matrix.clamp(max=0), form.lower)
    torch.testing.assert_close(wide.lower, low)
    torch.testing.assert_close(wide.upper, high)


CENTER = "center"


@pytest.mark.parametrize("name", [CENTER if name == "center" else name for name in LINEAR])
def test_an_exact_form_stays_exact_behind_linear_operations(name):
    assert piece_of(LINEAR[name]).push(Form.exactly(random_form().lower)).exact


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_pushing_the_form_or_pulling_the_rows_is_the_same(name, kind):
    op = LINEAR[name]
    rows, form = rows_of(op, kind), Form.exactly(random(TASKS, TOKENS, WIDTH, 9))
    (pulled,), _ = piece_of(op).pull(rows)
    for one, other in zip(form.compose(pulled), piece_of(op).push(form).compose(rows), strict=True):
        torch.testing.assert_close(one, other)


def test_pieces_have_the_precision_asked_for_and_nonlinear_operations_none():
    for op in LINEAR.values():
        assert piece_of(op, torch.float32).coefs.dtype == torch.float32
    for op in (Apply("relu"), Scores(heads=2), Rescale()):
        assert piece_of(op) is None


def test_add_gives_its_rows_to_both_and_sums_forms():
    rows = random_rows(TOKENS, WIDTH, groups=TOKENS, diagonal=True)
    parts, bias = exact_enclosure(Add(), (), torch.float64).pull(rows)
    assert [p is rows for p in parts] == [True, True]
    assert bias is None
    a, b = random_form(1), random_form(2)
    total = SumEnclosure().push(a, b)
    torch.testing.assert_close(total.lower, a.lower + b.lower)
    torch.testing.assert_close(total.upper, a.upper + b.upper)
    assert SumEnclosure().push(Form.exactly(a.lower), Form.exactly(b.lower)).exact
    for forms in ((a, Form.exactly(b.lower)), (Form.exactly(b.lower), a)):
        assert not SumEnclosure().push(*forms).exact
        torch.testing.assert_close(SumEnclosure().push(*forms).upper, a.upper + b.lower)


# --- relaxed operations: the bound of every row spelt out ---------------------------------------------------


def bounded_row(full: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """``A⁺·lower + A⁻·upper`` of every row."""
    below = torch.einsum("tgrnf,tnf->tgr", full.clamp(min=0), lower)
    return below + torch.einsum("tgrnf,tnf->tgr", full.clamp(max=0), upper)


@pytest.mark.parametrize("kind", KINDS)
def test_lines_pull(kind):
    rows = random_rows(TOKENS, WIDTH, **KINDS[kind])
    ls, li, us, ui = (random(TASKS, TOKENS, WIDTH, seed=s) for s in range(10, 14))
    x = random(TASKS, TOKENS, WIDTH, seed=14)
    (pulled,), bias = LinesEnclosure(ls, li, us, ui).pull(rows)
    full = spelt_out(rows, TOKENS).expand(TASKS, -1, -1, -1, -1)
    torch.testing.assert_close(pulled.contract(x) + bias, bounded_row(full, ls * x + li, us * x + ui))
    assert (pulled.groups, pulled.diagonal) == (rows.groups, rows.diagonal)


def test_lines_push():
    ls, li, us, ui = (random(TASKS, TOKENS, WIDTH, seed=s) for s in range(10, 14))
    for form in (random_form(), Form.exactly(random_form().lower)):
        pushed = LinesEnclosure(ls, li, us, ui).push(form)
        lower = ls.clamp(min=0)[..., None] * form.lower + ls.clamp(max=0)[..., None] * form.upper
        upper = us.clamp(min=0)[..., None] * form.upper + us.clamp(max=0)[..., None] * form.lower
        lower[..., -1] += li
        upper[..., -1] += ui
        torch.testing.assert_close(pushed.lower, lower)
        torch.testing.assert_close(pushed.upper, upper)


HEADS, KEYS, DEPTH = 2, 3, 5
BILINEAR: dict[str, tuple[Bilinear, int]] = {  # operation and query tokens
    "scores": (Scores(heads=HEADS, scale=0.7), TOKENS),
    "scores, one query": (Scores(heads=HEADS), 1),
    "mix": (Mix(heads=HEADS), TOKENS),
    "mix, one query": (Mix(heads=HEADS, scale=2.0), 1),
    "rescale": (Rescale(heads=HEADS), TOKENS),
    "rescale, one group": (Rescale(heads=1), TOKENS),
}


def sizes(op: Bilinear, tokens: int) -> dict[str, int]:
    return {"i": tokens, "j": KEYS, "h": op.heads, "g": op.heads, "k": DEPTH, "m": DEPTH}


def value_of(op: Bilinear, axes: str, tokens: int, seed: int) -> Tensor:
    """A random value ``[tasks, tokens, features]`` with these axes."""
    n = sizes(op, tokens)
    return random(TASKS, *(n[c] for c in axes), seed=seed).flatten(2)


def planes_piece(op: Bilinear, tokens: int, *, shared: bool, thin: bool) -> PlanesEnclosure:
    """Random planes, those of y `shared` by both sides or not.

    With `thin` the coefficients have size 1 on the axes the other factor does not have.
    """
    n = sizes(op, tokens)

    def coefficients(axes: str, seed: int) -> Tensor:
        return random(TASKS, *(n[c] if c in axes or not thin else 1 for c in op.terms), seed=seed)

    y_lower = coefficients(op.x, 22)
    return PlanesEnclosure(
        op=op,
        x_lower=coefficients(op.y, 20),
        x_upper=coefficients(op.y, 21),
        y_lower=y_lower,
        y_upper=y_lower if shared else coefficients(op.x, 23),
        lower=value_of(op, op.out, tokens, 24),
        upper=value_of(op, op.out, tokens, 25),
    )


def plane_values(enclosure: PlanesEnclosure, x: Tensor, y: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The lower and the upper plane of every output entry at deviations (x, y), term by term."""
    op, n = enclosure.op, sizes(enclosure.op, tokens)
    shape = (TASKS, *(n[c] for c in op.terms))
    x, y = x.reshape(TASKS, *(n[c] for c in op.x)), y.reshape(TASKS, *(n[c] for c in op.y))
    sides = []
    for x_plane, y_plane, constant in (
        (enclosure.x_lower, enclosure.y_lower, enclosure.lower),
        (enclosure.x_upper, enclosure.y_upper, enclosure.upper),
    ):
        part_x = torch.einsum(f"t{op.terms},t{op.x}->t{op.out}", x_plane.expand(shape), x)
        part_y = torch.einsum(f"t{op.terms},t{op.y}->t{op.out}", y_plane.expand(shape), y)
        sides.append((part_x + part_y).flatten(2) + constant)
    return sides[0], sides[1]


@pytest.mark.parametrize(("shared", "thin"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BILINEAR)
def test_planes_pull(name, kind, shared, thin):
    op, tokens = BILINEAR[name]
    settings = {**KINDS[kind], "groups": min(tokens, KINDS[kind]["groups"])}
    enclosure = planes_piece(op, tokens, shared=shared, thin=thin)
    rows = random_rows(tokens, enclosure.lower.shape[-1], **settings)
    x, y = value_of(op, op.x, tokens, 30), value_of(op, op.y, tokens, 31)
    (to_x, to_y), bias = enclosure.pull(rows)
    full = spelt_out(rows, tokens).expand(TASKS, -1, -1, -1, -1)
    expected = bounded_row(full, *plane_values(enclosure, x, y, tokens))
    torch.testing.assert_close(to_x.contract(x) + to_y.contract(y) + bias, expected)
    assert to_x.groups == to_y.groups == rows.groups
    assert to_x.diagonal == rows.diagonal
    assert to_y.diagonal == (rows.diagonal and isinstance(op, Rescale))
    alone, same_bias = enclosure.pull_x(rows)
    assert torch.equal(alone.coefs, to_x.coefs)
    assert torch.equal(same_bias, bias)


@pytest.mark.parametrize(("shared", "thin"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BILINEAR)
def test_planes_pull_to_moved_tokens(name, kind, shared, thin):
    """Looking at the moved tokens only finds the coefficients that looking at all of them finds there."""
    op, tokens = BILINEAR[name]
    settings = {**KINDS[kind], "groups": min(tokens, KINDS[kind]["groups"])}
    enclosure = planes_piece(op, tokens, shared=shared, thin=thin)
    rows = random_rows(tokens, enclosure.lower.shape[-1], **settings)
    whole, bias = enclosure.pull(rows)
    task = torch.arange(TASKS)[:, None]
    for moved in (torch.tensor([[0], [0], [0]]), torch.tensor([[0, 1], [3, 0], [2, 1]]) % min(tokens, KEYS)):
        parts, same_bias = enclosure.pull_moved(rows, (moved, moved))
        torch.testing.assert_close(same_bias, bias)
        for part, full in zip(parts, whole, strict=True):
            assert part.moved == (not full.diagonal)
            expected = full.coefs
            if part.moved:
                expected = full.coefs.expand(TASKS, -1, -1, -1)[task, moved % full.coefs.shape[1]]
            torch.testing.assert_close(part.coefs.expand_as(expected), expected)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", BILINEAR)
def test_planes_push(name, shared):
    """Exact forms: the planes themselves. With a spread: the worst of all values the forms allow."""
    op, tokens = BILINEAR[name]
    enclosure = planes_piece(op, tokens, shared=shared, thin=True)
    x, y = (value_of(op, axes, tokens, seed) for axes, seed in ((op.x, 30), (op.y, 31)))

    def constant(value: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(value), value], -1)

    exact = enclosure.push(Form.exactly(constant(x)), Form.exactly(constant(y)))
    lower, upper = plane_values(enclosure, x, y, tokens)
    torch.testing.assert_close(exact.lower[..., -1], lower)
    torch.testing.assert_close(exact.upper[..., -1], upper)

    spread = [value_of(op, axes, tokens, seed).abs() for axes, seed in ((op.x, 32), (op.y, 33))]
    wide = enclosure.push(
        *(Form.between(constant(v - r), constant(v + r)) for v, r in zip((x, y), spread, strict=True))
    )
    size = replace(
        enclosure,
        x_lower=enclosure.x_lower.abs(),
        x_upper=enclosure.x_upper.abs(),
        y_lower=enclosure.y_lower.abs(),
        y_upper=enclosure.y_upper.abs(),
        lower=torch.zeros_like(lower),
        upper=torch.zeros_like(upper),
    )
    below, above = plane_values(size, *spread, tokens)
    torch.testing.assert_close(wide.lower[..., -1], lower - below)
    torch.testing.assert_close(wide.upper[..., -1], upper + above)


def softmax_enclosure() -> SoftmaxEnclosure:
    """Random slopes of two heads over three keys."""
    slopes = [random(TASKS, TOKENS, 2, 3, 3, seed=s) for s in (40, 41)]
    return SoftmaxEnclosure(*slopes, *(random(TASKS, TOKENS, WIDTH, seed=s) for s in (42, 43)))


def softmax_values(enclosure: SoftmaxEnclosure, scores: Tensor) -> tuple[Tensor, Tensor]:
    heads = scores.unflatten(-1, (2, 3))
    lower, upper = (
        torch.einsum("tnhjk,tnhk->tnhj", slope, heads).flatten(2)
        for slope in (enclosure.lower_slope, enclosure.upper_slope)
    )
    return lower + enclosure.lower, upper + enclosure.upper


@pytest.mark.parametrize("kind", KINDS)
def test_softmax_pull(kind):
    """The weights of a query and head sum to 1: their coefficients count from the middle one."""
    enclosure, rows = softmax_enclosure(), random_rows(TOKENS, WIDTH, **KINDS[kind])
    x = random(TASKS, TOKENS, WIDTH, seed=44)
    (pulled,), bias = enclosure.pull(rows)
    full = spelt_out(rows, TOKENS).expand(TASKS, -1, -1, -1, -1).unflatten(-1, (2, 3))
    shifted = full - full.sort(-1).values[..., 1:2]
    if rows.diagonal:  # tokens that a row does not read have no coefficients to shift
        shifted = torch.where((full != 0).any(-1, keepdim=True), shifted, 0.0)
    expected = bounded_row(shifted.flatten(-2), *softmax_values(enclosure, x))
    torch.testing.assert_close(pulled.contract(x) + bias, expected)
    assert (pulled.groups, pulled.diagonal) == (rows.groups, rows.diagonal)


def test_softmax_push():
    enclosure, x = softmax_enclosure(), random(TASKS, TOKENS, WIDTH, seed=44)
    pushed = enclosure.push(Form.exactly(torch.stack([0 * x, x], -1)))
    lower, upper = softmax_values(enclosure, x)
    torch.testing.assert_close(pushed.lower[..., -1], lower)
    torch.testing.assert_close(pushed.upper[..., -1], upper)
