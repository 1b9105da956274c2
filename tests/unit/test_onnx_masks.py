"""Constant attention masks in ONNX files: hidden tokens get no weight, or the file is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import buffet
from buffet import BuffetError
from buffet.loading.onnx.masks import HIDDEN
from buffet.loading.onnx.model import OnnxModel, read_onnx
from buffet.network import Offset
from onnx_networks import BatchNorm, bert, export, shaken

TOKENS = 5
PADDED = torch.tensor([True, True, True, False, False])
CAUSAL = torch.ones(TOKENS, TOKENS).tril().bool()


class Masked(nn.Module):
    """One attention layer with a mask: a number added to the scores, or scores replaced by it."""

    def __init__(
        self, visible: Tensor, number: float, *, add: bool, norm: type[nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.number, self.add = number, add
        self.register_buffer("visible", visible)
        self.norm, self.head = norm(8), nn.Linear(8, 3)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / 2
        if self.add:
            scores = scores + torch.where(self.visible, 0.0, self.number)
        else:
            scores = scores.masked_fill(~self.visible, self.number)
        mixed = ((self.scale * scores).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.head((x + mixed).mean(1))


def read(module: nn.Module, tmp_path: Path) -> tuple[OnnxModel, Tensor]:
    x = torch.randn(1, TOKENS, 8, generator=torch.Generator().manual_seed(1))
    return read_onnx(export(module, x, tmp_path / "masked.onnx"), check=True), x


@pytest.mark.parametrize("number", [-1e9, -3.4028234663852886e38, -math.inf])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("visible", [PADDED, CAUSAL], ids=["padding", "causal"])
def test_hidden_tokens_get_no_weight(visible, add, number, tmp_path):
    module = shaken(Masked(visible, number, add=add))
    model, x = read(module, tmp_path)
    torch.testing.assert_close(model.outputs_of(x.flatten()).float(), module(x)[0], rtol=1e-5, atol=1e-5)
    hidden = [n.op.value.min() for n in model.program64.nodes if isinstance(n.op, Offset)]
    assert hidden == [HIDDEN]
    region = buffet.LpBall(model.rows_of(x.flatten()), [[0], [3]], 2, 0.02)
    samples = region.points(region.project(region.sample(100, torch.Generator().manual_seed(0)).double()))
    outputs = model.program64.evaluate(samples)
    for method in ("interval", "baseline", "lse", "buffet"):
        found = buffet.verify(model, region, method=method, falsify=False, best=True)
        others = [c for c in range(3) if c != found.label]
        attained = (outputs[..., found.label, None] - outputs[..., others]).amin(0)
        assert bool((found.margins <= attained).all()), method
        assert bool(found.margins.isfinite().all()), method
        if method in ("lse", "buffet"):
            assert bool((attained - found.margins < 0.5).all())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padded_text_is_the_text_without_padding(attention, tmp_path):
    """The same margins as the native loader has for the rows that are no padding."""
    source = bert(attn_implementation=attention)

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = source
            self.register_buffer("mask", PADDED[None].long())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(inputs_embeds=x, attention_mask=self.mask).logits

    model, x = read(Padded().eval(), tmp_path)
    embeddings = source.base_model.embeddings
    rows = x[0] + embeddings.position_embeddings.weight[:TOKENS] + embeddings.token_type_embeddings.weight[0]
    native, region = buffet.load(source), buffet.LpBall(rows[PADDED].detach(), [2], 2, 0.02)
    expected = buffet.verify(native, region, method="lse", falsify=False)
    ours = buffet.verify(
        model, buffet.LpBall(model.rows_of(x.flatten()), [2], 2, 0.02), method="lse", falsify=False
    )
    torch.testing.assert_close(ours.margins, expected.margins, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("visible", "changes", "complaint"),
    [
        (PADDED, {"norm": BatchNorm}, "nothing bounds the scores"),
        (PADDED, {"scale": 1e-9}, "used for something else"),
        (torch.tensor([[False]]), {}, "hides all tokens"),
    ],
)
def test_other_masks_are_refused(visible, changes, complaint, tmp_path):
    scale = changes.pop("scale", 1.0)
    module = shaken(Masked(visible, -1e30, add=True, **changes))
    module.scale = scale
    with pytest.raises(BuffetError, match=complaint):
        read(module, tmp_path)


def test_scores_that_may_reach_the_mask_are_refused(tmp_path):
    module = shaken(Masked(PADDED, -1e30, add=True))
    with torch.no_grad():
        module.q.weight *= 1e8
    with pytest.raises(BuffetError, match="nothing bounds the scores"):
        read(module, tmp_path)
