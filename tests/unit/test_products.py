"""The kernels that products of matrices are left to."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from buffet.system import products

LOOK = """
import torch
from buffet.propagation.rounding import typical
from buffet.system.products import quick_products
torch.set_num_threads(1)
done = quick_products()
x, y = (torch.rand(4, 64, 512, generator=torch.Generator().manual_seed(s)) + 0.5 for s in range(2))
exact = x.double() @ y.double().mT
assert ((x @ y.mT - exact).abs() <= typical(512) * torch.finfo(torch.float32).eps * exact).all()
print(done, torch.backends.mkldnn.matmul.fp32_precision)
"""


def test_products_stay_in_single_precision():
    """In a process of its own, as the choice is one of a whole process."""
    found = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True).stdout
    assert found.split() in (["True", products.LESS], ["False", "none"])


@pytest.fixture
def matmul(monkeypatch):
    """PyTorch's choice, of no effect on products."""

    class Choice:
        fp32_precision = "none"

    monkeypatch.setattr(torch.backends.mkldnn, "matmul", Choice, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    products.quick_products.cache_clear()
    yield Choice
    products.quick_products.cache_clear()


def test_where_digits_are_lost_nothing_is_changed(matmul, monkeypatch):
    monkeypatch.setattr(products, "_all_digits", lambda: False)
    assert not products.quick_products()
    assert matmul.fp32_precision == "none"


@pytest.mark.parametrize("given", ["ieee", "tf32"])
def test_a_choice_that_was_made_is_kept(matmul, given):
    matmul.fp32_precision = given
    assert not products.quick_products()
    assert matmul.fp32_precision == given


def test_digits_that_are_lost_are_noticed(monkeypatch):
    assert products._all_digits()
    monkeypatch.setattr(torch, "eye", lambda size: torch.full((size, size), 1e-3).fill_diagonal_(1.0))
    assert not products._all_digits()
