"""`--device`: names of devices, and proofs that never touch any device but the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import buffet
from buffet.attack import AttackSettings
from buffet.cli import main
from buffet.lab.random_models import RandomModel, random_model
from buffet.loading.config import ModelConfig
from buffet.methods import method_named
from buffet.regions import Box, CandidateSet, LpBall, Region
from buffet.system.devices import device_named
from elsewhere import DEVICE, MixedDevicesError, watch

TOKENS, WIDTH = 4, 4


def _model(**changes: object) -> RandomModel:
    config = {"vocab_size": 2, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"intermediate_size": 8, "hidden_act": "relu", "layer_norm": "no_var", **changes}
    return random_model(ModelConfig(**config), torch.Generator().manual_seed(1))  # type: ignore[arg-type]


def _rows() -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))


def _regions(x: torch.Tensor) -> dict[str, Region]:
    near = x[[1, 2]] + 0.01
    return {
        "l1": LpBall(x, [[1], [2]], 1, 0.01),
        "linf": LpBall(x, [[0, 1], [2, 3]], "inf", 0.001),
        "l3": LpBall(x, [[1], [2]], 3, 0.01),
        "box": Box(x, x - 0.01, x + 0.02, [[1], [2]]),
        "candidates": CandidateSet(x, [1, 2], [near[:1], near], budget=1),
    }


def test_the_watch_notices_what_a_device_would() -> None:
    with watch():
        x = torch.ones(2, 3).to(DEVICE)
        assert x.device == DEVICE
        assert torch.zeros(3, device=x.device).device == DEVICE
        with pytest.raises(MixedDevicesError):
            x + torch.ones(3)
        with pytest.raises(MixedDevicesError):
            torch.ones(3)[torch.tensor([0], device=DEVICE)]
        with pytest.raises(MixedDevicesError):
            torch.rand(3, generator=torch.Generator(), device=DEVICE)
        assert (x + torch.tensor(1.0)).cpu().sum() == 12


PLAIN = [name for name, method in buffet.METHODS.items() if method.optimise == "none"]


@pytest.mark.parametrize("name", PLAIN)
def test_every_method_stays_on_the_device_and_finds_the_same(name: str) -> None:
    model, x = _model(), _rows()
    here = buffet.verify(model, LpBall(x, [[1], [2]], 2), 0.3, name, falsify=False)
    with watch():
        region = LpBall(x.to(DEVICE), [[1], [2]], 2)
        there = buffet.verify(model.to(DEVICE), region, 0.3, name, falsify=False)
        margins = there.margins.cpu()
    torch.testing.assert_close(margins, here.margins, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("optimise", "start"), [("final", "best"), ("all", "random"), ("tuned", "zero")])
def test_every_way_to_learn_stays_on_the_device(optimise: str, start: str) -> None:
    softmax = "differences" if optimise == "tuned" else "lse"
    method = method_named("lse", optimise=optimise, start=start, steps=2, softmax=softmax)
    with watch():
        region = LpBall(_rows().to(DEVICE), [[1], [2]], 2)
        model = _model(num_hidden_layers=1).to(DEVICE)
        assert buffet.verify(model, region, 3.0, method, falsify=False).margins.device == DEVICE


@pytest.mark.parametrize("kind", sorted(_regions(_rows())))
def test_every_region_is_bounded_and_attacked_on_the_device(kind: str) -> None:
    with watch():
        region = _regions(_rows().to(DEVICE))[kind]
        model = _model(layer_norm="standard", hidden_act="gelu", pooling="mean").to(DEVICE)
        settings = AttackSettings(steps=2, restarts=2)
        found = buffet.verify(model, region, method="r-buffet", label=0, falsify=settings)
        assert found.margins.device == DEVICE


@pytest.mark.parametrize("method", ["baseline", "lse+o-buffet"])
def test_radii_are_searched_on_the_device(method: str) -> None:
    with watch():
        region = LpBall(_rows().to(DEVICE), [[1], [2]], 2)
        model = _model(num_hidden_layers=1).to(DEVICE)
        found = buffet.radius(model, region, method_named(method, steps=2), tolerance=0.3, attack=False)
        assert found.certified > 0


def test_a_loaded_model_moves_as_a_whole() -> None:
    model = buffet.load()
    text = "a gripping film"
    with watch():
        there = model.to(DEVICE)
        x = there.embed(text)
        assert x.device == there.embed(text).device == DEVICE
        logits = there.logits(x.double()).cpu()
        mask = torch.ones(len(x), dtype=torch.bool, device=DEVICE)
        assert buffet.verify(there, LpBall(x, [2]), 0.01, "baseline", mask=mask).verdict == "certified"
    torch.testing.assert_close(logits, model.logits(model.embed(text).double()))


def test_devices_by_name() -> None:
    assert device_named("cpu") == torch.device("cpu")
    assert device_named("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:99", "mps", "xpu", "meta"])
def test_a_device_that_is_not_there_is_a_clear_error(name: str) -> None:
    with pytest.raises(buffet.BuffetError, match=r"device '.*'.*choose one of: auto, cpu"):
        device_named(name)


@pytest.mark.parametrize("command", [["certify", "a gripping film"], ["bench"]])
def test_commands_refuse_a_device_that_is_not_there(
    command: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main([*command, "--device", "cuda:77"]) == 2
    assert "device 'cuda:77' cannot be used" in capsys.readouterr().err


def test_sweeps_take_a_device(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "sweep.toml"
    config.write_text(
        'models = ["sst2-small"]\nmethods = ["baseline"]\n[sentences]\ntexts = ["good film"]\n'
        '[run]\ndevice = "cuda:77"\n'
    )
    assert main(["sweep", str(config), "--dry-run"]) == 2
    assert "device 'cuda:77' cannot be used" in capsys.readouterr().err
    assert main(["sweep", str(config), "--dry-run", "--device", "cpu"]) == 0
