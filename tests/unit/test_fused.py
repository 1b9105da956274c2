"""Every operation does what PyTorch's plain ones would, and so does its gradient."""

import pytest
import torch

from buffet.bounds.fused import add_swapped, add_to_last, assembled, by_sign


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def compare(ours, plain, *inputs: torch.Tensor) -> None:
    """The same values and gradients, with what is changed in place made for the occasion."""
    found, expected = ours(*(x.clone() for x in inputs)), plain(*(x.clone() for x in inputs))
    assert len(found) == len(expected)
    weights = [random(*x.shape, seed=k).detach() for k, x in enumerate(expected)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(out, weights, strict=True)), inputs)
        for out in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_by_sign():
    compare(by_sign, lambda x: (x.clamp(min=0), x.clamp(max=0)), random(3, 4, 5, seed=1))


def test_by_sign_of_nothing_and_of_what_is_no_number():
    positive, negative = by_sign(torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan]))
    torch.testing.assert_close(positive, torch.tensor([0.0, 0.0, torch.inf, 0.0, torch.nan]), equal_nan=True)
    torch.testing.assert_close(negative, torch.tensor([0.0, 0.0, 0.0, -torch.inf, torch.nan]), equal_nan=True)


def plainly_added(x, constants):
    return torch.cat([x[..., :-1], (x[..., -1] + constants).unsqueeze(-1)], -1)


def test_add_to_last():
    inputs = random(2, 3, 4, seed=1), random(2, 3, seed=2)
    compare(lambda x, c: (add_to_last(x, c),), lambda x, c: (plainly_added(x, c),), *inputs)


def test_add_to_the_last_column_of_a_view():
    """Forms behind attention are views of a product."""
    inputs = random(2, 3, 2, 4, seed=1), random(2, 6, seed=2)
    compare(
        lambda x, c: (add_to_last(x.flatten(1, 2), c),),
        lambda x, c: (plainly_added(x.flatten(1, 2), c),),
        *inputs,
    )


def test_add_swapped():
    compare(
        lambda x, y: (add_swapped(x, y),),
        lambda x, y: (x + y.flip(0),),
        random(2, 3, 4, seed=1),
        random(2, 3, 4, seed=2),
    )


@pytest.mark.parametrize("rows", [(3, 1, 2), (6,), (1, 1, 1, 1, 1, 1), (2, 4)])
@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 2, 2)])
def test_assembled_from_chunks_that_end_anywhere(rows, sizes):
    parts = [
        part
        for k, n in enumerate(rows)
        for part in (random(2, 4, 3, 2 * n, seed=k), random(2, 3, 2 * n, seed=10 + k))
    ]

    def ours(*parts):
        return assembled(list(zip(parts[::2], parts[1::2], strict=True)), sizes)

    def plain(*parts):
        whole = [torch.cat([a, c.unsqueeze(1)], 1) for a, c in zip(parts[::2], parts[1::2], strict=True)]
        lower, upper = (torch.cat(side, -1) for side in zip(*(w.chunk(2, -1) for w in whole), strict=True))
        both = torch.stack([lower, -upper]).permute(0, 1, 3, 4, 2)  # sides, tasks, tokens, features, inputs
        return both.split(sizes, 3)

    compare(ours, plain, *parts)
