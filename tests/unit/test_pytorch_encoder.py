"""PyTorch's own encoder: every variant it has, against itself."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import nn

import buffet
import buffet.loading.pytorch as documented
from buffet.errors import BuffetError
from buffet.loading import EncoderClassifier, load
from buffet.loading.tokenizer import word_level
from buffet.network import Affine

WIDTH, VOCABULARY, POSITIONS = 12, 30, 10


def build(layer: dict[str, Any] | None = None, *, final: bool = False, **around: Any) -> EncoderClassifier:
    """A random classifier around two layers."""
    torch.manual_seed(5)
    settings = {"batch_first": True, "dropout": 0.3, **(layer or {})}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 3, 16, **settings),
        2,
        norm=nn.LayerNorm(WIDTH) if final else None,
        enable_nested_tensor=False,
    )
    words, positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
    module = EncoderClassifier(encoder, words, positions, nn.Linear(WIDTH, 3), **around)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def test_the_documented_example_runs() -> None:
    assert doctest.testmod(documented).failed == 0


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    ("layer", "around"),
    [
        ({"activation": "relu"}, {}),
        ({"activation": "gelu", "batch_first": False}, {"dense": "tanh", "norm": True}),
        ({"activation": nn.GELU("tanh"), "layer_norm_eps": 1e-3}, {"dense": "gelu"}),
        ({"activation": torch.tanh, "bias": False}, {"dense": "relu", "norm": None}),
    ],
)
def test_logits_agree(
    layer: dict[str, Any], around: dict[str, Any], norm_first: bool, final: bool, pooling: str
) -> None:
    eps = layer.get("layer_norm_eps", 1e-5)
    extra = {
        "dense": nn.Linear(WIDTH, WIDTH) if "dense" in around else None,
        "activation": around.get("dense", "tanh"),
        "norm": nn.LayerNorm(WIDTH, eps) if around.get("norm") else None,
    }
    module = build({**layer, "norm_first": norm_first}, final=final and eps == 1e-5, pooling=pooling, **extra)
    model = load(module)
    ids = torch.randint(0, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(7) < torch.tensor([7, 5, 1, 6])[:, None]
    module.eval()
    rows = model.embeddings.rows(ids)
    with torch.no_grad():
        assert (model.logits(rows) - module(ids)).abs().max() <= 1e-4
        assert (model.logits(rows, mask) - module(ids, mask)).abs().max() <= 1e-4
        module.double()
        assert (model.logits(rows.double(), mask) - module(ids, mask)).abs().max() <= 1e-6


def test_a_fixed_table_of_positions_labels_and_a_tokenizer() -> None:
    torch.manual_seed(0)
    encoder = build().encoder
    tokenizer = word_level(["a gripping film"], size=VOCABULARY, min_count=1)
    words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
    module = EncoderClassifier(
        encoder, words, torch.randn(POSITIONS, WIDTH), nn.Linear(WIDTH, 2), labels=["bad", "good"]
    )
    model = load(module, tokenizer=tokenizer)
    assert model.labels == ("bad", "good")
    assert model.tokens("A gripping film") == ["[CLS]", "a", "gripping", "film", "[SEP]"]
    ids = list(model.encode("a film").ids)
    rows = words.weight[ids] + module.positions.weight[: len(ids)]
    assert torch.equal(model.embed("a film"), rows.detach())


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_bare_encoder_is_certified(norm_first: bool, pooling: str) -> None:
    """Rows that reach the first block without a LayerNorm: no sampled point goes below the bound."""
    module = build({"norm_first": norm_first}, pooling=pooling)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.6)
    model = load(module)
    x = model.embeddings.rows(torch.tensor([3, 4, 5, 6]))
    label = int(model.logits(x).argmax())
    result = buffet.verify(
        model, buffet.LpBall(x, words=[1], p=2), eps=1e-3, method="backward", falsify=False
    )
    assert result.verdict == "certified"
    step = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(3))
    moved = x.repeat(200, 1, 1)
    moved[:, 1] += 1e-3 * step / step.norm(dim=1, keepdim=True)
    logits = model.logits(moved)
    others = torch.cat([logits[:, :label], logits[:, label + 1 :]], 1)
    assert float((logits[:, label] - others.max(1).values).min()) >= float(result.margin) - 1e-5


def test_what_cannot_be_expressed_is_refused() -> None:
    mixed = build()
    mixed.encoder.layers[1].norm1.eps = 0.1
    biased = build()
    biased.encoder.layers[0].self_attn = nn.MultiheadAttention(WIDTH, 3, add_bias_kv=True, batch_first=True)
    batch = build()
    batch.encoder.layers[0].norm1 = nn.BatchNorm1d(WIDTH)
    heads = build()
    heads.encoder.layers[0].self_attn.num_heads = 2
    refused = {
        "different LayerNorm eps": mixed,
        "add_bias_kv": biased,
        "its norm is a BatchNorm1d": batch,
        "different heads": heads,
        "hidden_act 'silu' is not supported": build({"activation": nn.SiLU()}),
        "supported modules are": build().encoder,
    }
    for complaint, module in refused.items():
        with pytest.raises(BuffetError) as caught:
            load(module)
        assert complaint in str(caught.value)
        assert "\n" not in str(caught.value)


def test_double_precision_is_taken_only_where_nothing_is_rounded() -> None:
    module = build().double()
    load(module)
    with torch.no_grad():
        module.encoder.layers[1].linear1.bias[0] = 0.1
    name = r"bert\.encoder\.layer\.1\.intermediate\.dense\.bias"
    with pytest.raises(BuffetError, match=rf"EncoderClassifier: tensor {name} is float64, .* round 1 of its"):
        load(module)
    load(module.float())


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.1])
def test_the_eps_of_a_norm_is_used_as_it_is(eps: float) -> None:
    model = load(build({"layer_norm_eps": eps}))
    assert model.config.layer_norm_eps == eps
    constants = [
        node.op.bias for node in model.program64.nodes if isinstance(node.op, Affine) and node.op.least == eps
    ]
    assert len(constants) == 4
    assert all(constant.tolist() == [eps] for constant in constants)  # in float64, to the last bit
