"""The quick median is the median."""

from __future__ import annotations

import pytest
import torch

from buffet.bounds.medians import MANY, lower_median
from random_forms import random


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16, 33])
def test_the_quick_median_is_the_median(count: int) -> None:
    many = random(2, count, 2 * MANY // count)
    few = many[..., :3].round()  # ties
    for values in (many, many.round(), few):
        assert torch.equal(lower_median(values, 1), values.median(1, keepdim=True).values)
    sides = [many.clone().requires_grad_() for _ in range(2)]
    lower_median(sides[0], 1).square().sum().backward()
    sides[1].median(1, keepdim=True).values.square().sum().backward()
    assert torch.equal(sides[0].grad, sides[1].grad)
