"""Networks in which large numbers cancel, or small ones vanish: no rounding makes a proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from buffet.engine import Engine, bound_margins
from buffet.lab.random_models import RandomModel, model_of, random_tensors
from buffet.loading.config import ModelConfig
from buffet.methods import METHODS, Method
from buffet.network import Apply, Bilinear, Softmax
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.rounding import typical
from buffet.propagation.walk import bound_nodes
from buffet.query import clean_answer
from buffet.regions import Box, LpBall
from buffet.relaxations.table import Relaxer
from buffet.verification.verify import verify

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
KINDS: dict[str, Method] = {
    **{name: METHODS[name] for name in ("interval", "forward", "baseline", "r-buffet", "lse", "backward")},
    "buffet": replace(METHODS["buffet"], steps=5, rivals=()),
}
"""Methods of every kind; what others learn starts from these."""


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


def attained(clean_run: CleanRun, region: LpBall, node: int) -> tuple[Tensor, Tensor]:
    """About how far every entry of a node can move: its values where it is steepest, up and down."""

    def values(moves: Tensor) -> Tensor:
        x = region.center.double().expand(len(moves), -1, -1).clone()
        x[:, 0] += moves
        return clean_run.program.values(x)[node].flatten(1) - clean_run.clean[node].flatten()

    steepest = torch.autograd.functional.jacobian(values, torch.zeros(1, 8).double())[0, :, 0]
    assert region.eps is not None
    size = float(region.eps[0]) * (1 - 1e-9)
    unit = torch.nn.functional.normalize(steepest, dim=-1)
    return values(-size * unit).diagonal(), values(size * unit).diagonal()


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "method", [METHODS["baseline"], METHODS["lse"], WHOLE], ids=("baseline", "lse", "whole")
)
def test_boxes_hold_where_large_numbers_cancel(name, size, dtype, method):
    for seed in range(3):
        model, region = network(name, size, seed)
        clean_run = method.clean_run(model.program64, region.center, 0)
        with torch.no_grad():
            bounds = bound_nodes(clean_run, region, Relaxer("zero"), method.describe(), dtype=dtype)
        for node in clean_run.program.nodes:
            for source in node.inputs if isinstance(node.op, Apply | Bilinear | Softmax) else ():
                if source not in bounds.boxes:  # the walk has ended before
                    continue
                least, most = attained(clean_run, region, source)
                box, slack = bounds.boxes[source], 1e-15 * size
                assert (box.lower[0].flatten() <= least + slack).all()
                assert (box.upper[0].flatten() >= most - slack).all()


@pytest.mark.parametrize(("name", "size"), CASES)
def test_single_precision_claims_no_more_than_double_precision(name, size):
    """Where it loses a share of boxes nothing is claimed in it, and the engine asks again."""
    model, region = network(name, size, 0)
    clean_run = METHODS["lse"].clean_run(model.program64, region.center, 0)
    single, double = (
        METHODS["lse"].bound(clean_run, region, dtype=d) for d in (torch.float32, torch.float64)
    )
    assert double.isfinite().all()
    assert single.isnan().all() or (single <= double + 1e-9).all()
    answered = bound_margins(model, region, METHODS["lse"], 0, Engine())
    assert answered.isfinite().all()
    assert size > 1e4 or (double - answered).max() < 0.02


@pytest.mark.parametrize("terms", [1, 8, 64, 512, 4096, 32768])
def test_sums_in_single_precision_err_by_less_than_what_is_allowed(terms):
    """Sums of products of all signs, and of one sign, where roundings add up most."""
    generator = torch.Generator().manual_seed(0)
    for shift in (0.0, 1.0, 10.0):
        a, b = (torch.randn(n, terms, generator=generator) + shift for n in (100, 50))
        error = ((a @ b.mT).double() - a.double() @ b.double().mT).abs()
        size = a.abs().double() @ b.abs().double().mT
        assert float((error / size).max()) < typical(terms) * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("p", [1, 2, torch.inf])
def test_no_node_deviates_further_than_its_reach(seed, p):
    """Of any node: reaches of means count what cancels in them."""
    generator = torch.Generator().manual_seed(seed)
    config = CONFIG.model_copy(update={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3})
    model = model_of(config, random_tensors(config, generator))
    x = torch.randn(4, 16, generator=generator)
    ball = LpBall(x, [[1], [2]], p, 0.01)
    run = METHODS["lse"].clean_run(model.program64, x, 0)
    with torch.no_grad():
        bounds = bound_nodes(run, ball, Relaxer("zero"), METHODS["lse"].describe(), dtype=torch.float64)
    delta = ball.sample(200, generator)
    for task in range(2):
        moved = x.double().repeat(200, 1, 1)
        moved[:, int(ball.moved[task, 0])] += delta[:, task, 0]
        for index, value in enumerate(run.program.values(moved)):
            reach = bounds.errors.reaches[index]
            assert ((value - run.clean[index]).abs() <= reach[min(task, len(reach) - 1)] + 1e-12).all(), index


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


def passing(**changes: object) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A network that passes its first row on to the classifier; all weights are 0."""
    plain = {"embedding_norm": False, "norm_position": "pre", "final_norm": False, "head_act": "none"}
    config = CONFIG.model_copy(update={"num_attention_heads": 1, **plain, **changes})
    tensors = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    return config, {n: v + 1 if n.endswith("LayerNorm.weight") else v for n, v in tensors.items()}


@pytest.mark.parametrize("name", KINDS)
def test_large_entries_that_cancel_in_a_box_are_no_proof(name):
    """The second logit is the sum of (2⁶⁰, 100, −2⁶⁰): the margin is −99, and 1 if the 100 is lost."""
    config, tensors = passing()
    tensors["classifier.weight"][1, :3], tensors["classifier.bias"][0] = 1.0, 1.0
    point = torch.zeros(1, 8, dtype=torch.float64)
    point[0, :3] = torch.tensor([2.0**60, 100.0, -(2.0**60)])
    region = Box(torch.zeros(1, 8), point, point)
    found = verify(model_of(config, tensors), region, label=0, method=KINDS[name], falsify=False)
    assert found.verdict != "certified"
    assert not (found.margins > -99).any()


@pytest.mark.parametrize("name", KINDS)
def test_a_huge_bias_before_tanh_is_no_proof(name):
    """tanh(x + 2⁶⁰ − 2⁶⁰), where x is lost on the way: rows of 2⁶⁰ cancel the bias."""
    config, tensors = passing(head_act="tanh")
    tensors["bert.pooler.dense.weight"][0, :2] = 1.0
    tensors["bert.pooler.dense.bias"][0] = 2.0**60
    tensors["classifier.weight"][1, 0] = -2.0
    tensors["classifier.bias"][0] = -1.0
    x = torch.zeros(1, 8)
    x[0, 0], x[0, 1] = -(2.0**60), 3.0
    model = model_of(config, tensors)
    for label in (0, 1):
        found = verify(model, LpBall(x, [[0]], "inf", 4.0), label=label, method=KINDS[name], falsify=False)
        assert found.verdict != "certified"  # tanh(3 − 4) and tanh(3 + 4): either answer is possible


@pytest.mark.parametrize("p", [1, "inf"])
@pytest.mark.parametrize("name", KINDS)
def test_coefficients_that_underflow_are_no_proof(name, p):
    """Logits of 10⁻⁴³: rows of values shrink by 10⁻¹⁴ in each of three maps, and coefficients to nothing."""
    config, tensors = passing()
    tensors[LAYER + "attention.self.value.weight"][0, 0] = 1e-14
    tensors[LAYER + "attention.output.dense.weight"][1, 0] = 1e-14
    tensors["classifier.weight"][0, 1] = 1e-15
    x = torch.zeros(1, 8)
    x[0, 0], x[0, 2] = 0.2, -0.2  # the mean of the features is 0
    model = model_of(config, tensors)
    found = verify(model, LpBall(x, [[0]], p, 0.3), label=0, method=KINDS[name], falsify=False)
    assert found.verdict != "certified"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("power", [20, 61])
def test_huge_scores_are_no_proof(name, power):
    """Two scores of 2⁶¹ differ by less than float64 can tell; which of the values is read decides."""
    config, tensors = passing()
    key, value = (tensors[LAYER + f"attention.self.{part}.weight"] for part in ("key", "value"))
    root = 2.0 ** (power / 2)
    tensors[LAYER + "attention.self.query.bias"][:2] = torch.tensor([root, 1.0])
    tensors[LAYER + "attention.self.key.bias"][0] = root
    key[1, 0] = 8.0 * 8.0**0.5
    value[0, 0] = 1.0
    tensors[LAYER + "attention.output.dense.weight"][1, 0] = 1.0
    tensors["classifier.weight"][0, 1] = 1.0
    x = torch.zeros(2, 8)
    x[:, 0], x[:, 2] = torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0])
    model = model_of(config, tensors)
    # exactly: weights of e^8 and e^−8, so the answer is class 0; all alike if the difference is lost
    for label in (0, 1):
        found = verify(model, LpBall(x, [[0]], 2, 1e-3), label=label, method=KINDS[name], falsify=False)
        assert found.verdict != "certified" or (label == 0 and power == 20)
