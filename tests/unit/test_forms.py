"""Rows and forms against their coefficients spelt out."""

from __future__ import annotations

import pytest
import torch

from buffet.bounds.forms import Form
from random_forms import KINDS, TASKS, TOKENS, WIDTH, random, random_form, random_rows, spelt_out

# Rows of one root have the same groups; they become dense in attention, where every task has its own.
PAIRS = [
    (a, b)
    for a, first in KINDS.items()
    for b, second in KINDS.items()
    if first["groups"] == second["groups"]
    and (first["diagonal"] == second["diagonal"] or "dense, shared by tasks" not in (a, b))
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_sum_of_rows(first, second):
    """Diagonal and dense mix in either order; the mixed sum is dense."""
    a, b = (random_rows(TOKENS, WIDTH, **KINDS[kind]) for kind in (first, second))
    before = [spelt_out(r, TOKENS).clone() for r in (a, b)]
    total = a + b
    assert total.diagonal == (a.diagonal and b.diagonal)
    torch.testing.assert_close(spelt_out(total, TOKENS), before[0] + before[1])
    for rows, value in zip((a, b), before, strict=True):
        torch.testing.assert_close(spelt_out(rows, TOKENS), value)


@pytest.mark.parametrize("kind", KINDS)
def test_contract_reads_every_coefficient_once(kind):
    rows, values = random_rows(TOKENS, WIDTH, **KINDS[kind]), random(TASKS, TOKENS, WIDTH, seed=3)
    expected = torch.einsum("tgrnf,tnf->tgr", spelt_out(rows, TOKENS).expand(TASKS, -1, -1, -1, -1), values)
    torch.testing.assert_close(rows.contract(values), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_compose_is_the_lower_bound_of_every_row(kind):
    rows, form = random_rows(TOKENS, WIDTH, **KINDS[kind]), random_form(4)
    full = spelt_out(rows, TOKENS).expand(TASKS, -1, -1, -1, -1)
    bound = torch.einsum("tgrnf,tnfd->tgrd", full.clamp(min=0), form.lower)
    bound = bound + torch.einsum("tgrnf,tnfd->tgrd", full.clamp(max=0), form.upper)
    exact = torch.einsum("tgrnf,tnfd->tgrd", full, form.lower)
    for chosen, expected in ((form, bound), (Form.exactly(form.lower), exact)):
        coefs, constant = chosen.compose(rows)
        torch.testing.assert_close(coefs, expected[..., :-1])
        torch.testing.assert_close(constant, expected[..., -1])
