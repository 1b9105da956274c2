"""Networks in which large numbers cancel: single precision is trusted no further than it carries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from buffet.bounds.choices import Relaxer
from buffet.bounds.precision import measure
from buffet.bounds.propagation import bound_nodes
from buffet.bounds.scene import LOST, ROUNDINGS, Scene
from buffet.loading.config import ModelConfig
from buffet.methods import METHODS, Method
from buffet.program import Apply, Bilinear, Softmax
from buffet.random_models import RandomModel, model_of, random_tensors
from buffet.regions import LpBall
from buffet.verify import Engine, clean_answer, verify

LAYER = "bert.encoder.layer.0."
CONFIG = ModelConfig(
    vocab_size=2,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    hidden_act="relu",
    layer_norm="no_var",
    head_act="relu",
)
Change = Callable[[dict[str, Tensor], float, Tensor], None]
WHOLE = Method("backward", softmax="differences")


def _values(tensors: dict[str, Tensor], size: float, direction: Tensor) -> None:
    """What all values have in common passes through attention, and the output's bias takes it off."""
    tensors[LAYER + "attention.self.value.bias"] = size * direction
    output = tensors[LAYER + "attention.output.dense.weight"].double()
    tensors[LAYER + "attention.output.dense.bias"] = -(output @ (size * direction).double()).float()


def _keys(tensors: dict[str, Tensor], size: float, direction: Tensor) -> None:
    """What all keys have in common changes all scores of a query alike, and softmax takes it off."""
    tensors[LAYER + "attention.self.key.bias"] = size * direction


def _units(tensors: dict[str, Tensor], size: float, direction: Tensor) -> None:
    """Two hidden units are always on, and the output layer takes one from the other."""
    weight, bias = (tensors[LAYER + f"intermediate.dense.{part}"] for part in ("weight", "bias"))
    for unit, share in ((0, 1.0), (1, 2.0)):
        weight[unit] += share * size * direction
        bias[unit] = 30 * share * size
    output = tensors[LAYER + "output.dense.weight"]
    output[:, 1] = -output[:, 0] / 2


CANCELLING: dict[str, tuple[Change, tuple[float, ...]]] = {
    "values": (_values, (1e2, 1e4, 1e6)),
    "keys": (_keys, (1e2, 1e3)),
    "units": (_units, (1e2, 1e4, 1e6)),
}
CASES = [(name, size) for name, (_, sizes) in CANCELLING.items() for size in sizes]


def network(name: str | None, size: float, seed: int) -> tuple[RandomModel, LpBall]:
    generator = torch.Generator().manual_seed(seed)
    tensors = random_tensors(CONFIG, generator)
    if name:
        CANCELLING[name][0](tensors, size, torch.randn(8, generator=generator))
    x = torch.randn(5, 8, generator=generator)
    return model_of(CONFIG, tensors), LpBall(x, [[0]], 2, 1e-3)


def attained(scene: Scene, region: LpBall, node: int) -> tuple[Tensor, Tensor]:
    """About how far every entry of a node can move: its values where it is steepest, up and down."""

    def values(moves: Tensor) -> Tensor:
        x = region.center.double().expand(len(moves), -1, -1).clone()
        x[:, 0] += moves
        return scene.program.values(x)[node].flatten(1) - scene.clean[node].flatten()

    steepest = torch.autograd.functional.jacobian(values, torch.zeros(1, 8).double())[0, :, 0]
    assert region.eps is not None
    size = float(region.eps[0]) * (1 - 1e-9)
    unit = torch.nn.functional.normalize(steepest, dim=-1)
    return values(-size * unit).diagonal(), values(size * unit).diagonal()


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.parametrize(
    "method", [METHODS["baseline"], METHODS["lse"], WHOLE], ids=("baseline", "lse", "whole")
)
def test_boxes_hold_where_large_numbers_cancel(name, size, method):
    for seed in range(3):
        model, region = network(name, size, seed)
        scene = method.scene(model.program64, region.center, 0)
        dtype = Engine().fit(scene).dtype
        with torch.no_grad():
            bounds = bound_nodes(scene, region, Relaxer("zero"), method.describe(), dtype=dtype)
        for node in scene.program.nodes:
            for source in node.inputs if isinstance(node.op, Apply | Bilinear | Softmax) else ():
                least, most = attained(scene, region, source)
                box, slack = bounds.boxes[source], 1e-15 * size
                assert (box.lower[0].flatten() <= least + slack).all()
                assert (box.upper[0].flatten() >= most - slack).all()


@pytest.mark.parametrize(("name", "size"), CASES)
def test_what_is_lost_grows_with_what_cancels(name, size):
    model, region = network(name, size, 0)
    scene = WHOLE.scene(model.program64, region.center, 0)
    assert 1e-10 * size < scene.precision.loss < 1e-5 * size
    assert scene.tame == (scene.precision.loss <= LOST)
    assert scene.roundings >= ROUNDINGS


@pytest.mark.parametrize("name", ["baseline", "lse", "buffet"])
def test_little_is_lost_in_ordinary_networks(name):
    model, region = network(None, 0.0, 1)
    scene = METHODS[name].scene(model.program64, region.center, 0)
    assert scene.tame
    assert scene.precision.loss < 3e-6
    assert 0 < scene.precision.doubt < 1e-11


def test_all_is_lost_where_single_precision_overflows():
    model, region = network("units", 1e30, 0)
    scene = WHOLE.scene(model.program64, region.center, 0)
    assert measure(scene.program, scene.clean).loss == 1.0
    assert not scene.tame


def absorbing(seed: int, size: float) -> tuple[RandomModel, LpBall]:
    """A classifier that takes one constant from another; if they are huge, what is added between is lost."""
    generator = torch.Generator().manual_seed(seed)
    config = CONFIG.model_copy(update={"head_act": "none"})
    tensors = random_tensors(config, generator)
    weight, bias = (tensors[LAYER + f"output.LayerNorm.{part}"] for part in ("weight", "bias"))
    weight[[3, 4]], bias[[3, 4]] = 0.0, 1.0
    tensors["classifier.weight"][:, [3, 4]] = torch.tensor([[size, -size], [0.0, 0.0]])
    return model_of(config, tensors), LpBall(torch.randn(5, 8, generator=generator), [[0]], 2, 1e-6)


@pytest.mark.parametrize("name", ["baseline", "lse", "backward"])
@pytest.mark.parametrize("power", [0, 30, 40, 54, 60])
def test_nothing_is_proven_of_what_the_clean_run_has_lost(name, power):
    held = 0
    for seed in range(8):
        plain, region = absorbing(seed, 0.0)
        model, _ = absorbing(seed, 2.0**power)
        answer, _ = clean_answer(plain, region, None)
        found = verify(model, region, method=name, falsify=False)
        held += found.verdict == "certified"
        assert found.verdict == "unknown" or found.label == answer
    assert held == (8 if power <= 30 else 0) or power == 40
