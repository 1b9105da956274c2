"""Rows of scores that are split by token have the bounds of rows that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from buffet.lab.random_models import random_model
from buffet.loading import ModelConfig
from buffet.network import Scores, Softmax
from buffet.network.structure import local_nodes
from buffet.optimisation.starts import initial_parameters
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.key_split import splits
from buffet.propagation.plan import PROPAGATIONS
from buffet.propagation.substitution import Bounds
from buffet.propagation.walk import bound_nodes
from buffet.regions import LpBall
from buffet.relaxations.softmax import with_differences
from buffet.relaxations.table import Relaxer

TOKENS, WIDTH = 5, 8
# The layer whose scores are split: with variance, already the first queries, keys and values are relaxed.
NETWORKS = {("post", "cls", "no_var"): 1, ("post", "mean", "no_var"): 1, ("pre", "mean", "standard"): 0}


def clean_run(position: str, pooling: str, norm: str, layers: int) -> tuple[CleanRun, torch.Tensor]:
    config = ModelConfig(
        vocab_size=2,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=6,
        layer_norm=norm,
        layer_norm_eps=1e-3,
        norm_position=position,
        pooling=pooling,
    )
    generator = torch.Generator().manual_seed(layers)
    model = random_model(config, generator)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return CleanRun(*with_differences(model.program64.margins(0), x)), x


def bounds_of(where: CleanRun, region: LpBall, relaxer: Relaxer, chunk: int) -> Bounds:
    backward = PROPAGATIONS["backward"]
    return bound_nodes(where, region, relaxer, backward, dtype=torch.float64, chunk_bytes=chunk)


@pytest.mark.parametrize("words", [[[0]], [[1, 3], [4, 0]]])
@pytest.mark.parametrize("network", NETWORKS, ids="-".join)
def test_nothing_is_lost(network, words):
    where, x = clean_run(*network, layers=3)
    region = LpBall(x, words, 2, 0.05)
    start = bounds_of(where, region, Relaxer(), 1 << 20)
    relaxer = Relaxer(learned=initial_parameters(start, "random", only_alphas=True))
    split, whole = (bounds_of(where, region, relaxer, chunk) for chunk in (1 << 20, 1))
    scores = [i for i, node in enumerate(where.program.nodes) if isinstance(node.op, Scores)]
    assert list(split.key_forms) == [scores[NETWORKS[network]]]
    assert not whole.key_forms  # a row at a time is not worth it
    for index, box in whole.boxes.items():
        torch.testing.assert_close(split.boxes[index].lower, box.lower, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(split.boxes[index].upper, box.upper, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("network", NETWORKS, ids="-".join)
def test_only_rows_of_one_head_above_exact_forms_are_split(network):
    where, _ = clean_run(*network, layers=3)
    nodes, local = where.program.nodes, local_nodes(where.program)
    scores = [i for i, node in enumerate(nodes) if isinstance(node.op, Scores)]
    for layer, index in enumerate(scores):
        softmax = next(i for i, n in enumerate(nodes) if isinstance(n.op, Softmax) and index in n.inputs)
        for root in (index, softmax):
            assert splits(nodes, root, index, local, local) == (layer == NETWORKS[network])
        assert not splits(nodes, len(nodes) - 1, index, local, local)
    # A form that is kept on the way is not exact.
    index = scores[NETWORKS[network]]
    below = nodes[nodes[index].inputs[1]].inputs[0]
    assert not splits(nodes, index, index, local | {below}, local)


def test_precisions_do_not_share_forms():
    where, x = clean_run(*next(iter(NETWORKS)), layers=2)
    bounds = bounds_of(where, LpBall(x, [[2]], 2, 0.1), Relaxer(), 1 << 20)
    assert bounds.key_forms
    assert not bounds.precise().key_forms
    assert not replace(bounds, key_forms={}).relaxed(Relaxer(), torch.float32).key_forms
