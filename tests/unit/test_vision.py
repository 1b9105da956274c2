"""Vision transformers: the same logits as their source, rows that are pixels, proofs in pixel space."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import buffet
from buffet.cli import main
from buffet.loading import ImageModel, load
from buffet.loading.images import pixel_box, read_digits, rows_of
from buffet.training import TrainSettings, train
from buffet.training.images import split

SIZES: dict[str, Any] = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "image_size": 6,
    "patch_size": 3,
    "num_channels": 2,
    "num_labels": 4,
}


def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter and statistic random: nothing agrees by being 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.3 * noise.abs() if "running_var" in name else 0.4 * noise)
    return module.eval()


def vit(**changes: Any) -> nn.Module:
    return shaken(transformers.ViTForImageClassification(transformers.ViTConfig(**{**SIZES, **changes})))


class TimmBlock(nn.Module):
    """A block with the names that timm gives its parts."""

    def __init__(self, width: int, inner: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, x: Tensor, heads: int, normed: Any) -> Tensor:
        qkv = self.attn["qkv"](normed(self.norm1, x)).unflatten(-1, (3, heads, -1))
        q, k, v = (part.transpose(-2, -3) for part in qkv.unbind(-3))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        x = x + self.attn["proj"](mixed)
        return x + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](normed(self.norm2, x))))


class TimmViT(nn.Module):
    """A vision transformer as timm names and computes it, with LayerNorm or BatchNorm."""

    def __init__(self, norm: type[nn.Module], width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.batch = heads, norm is nn.BatchNorm1d
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 2, stride=2)})
        self.blocks = nn.ModuleList(TimmBlock(width, 16, norm) for _ in range(2))
        self.norm, self.head = norm(width), nn.Linear(width, 3)

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x.mT).mT if self.batch else norm(x)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed["proj"](images).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x, self.heads, self.normed)
        return self.head(self.normed(self.norm, x)[:, 0])


def save_timm(module: nn.Module, directory: Path, **config: Any) -> Path:
    directory.mkdir()
    save_file({k: v.contiguous() for k, v in module.state_dict().items()}, directory / "model.safetensors")
    pixels = {"input_size": [3, 4, 4], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
    raw = {"architecture": "vit_tiny_patch2_4", "pretrained_cfg": pixels, "model_args": {"num_heads": 2}}
    (directory / "config.json").write_text(json.dumps({**raw, **config}))
    return directory


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False}, {"hidden_act": "relu", "num_channels": 1}])
def test_logits_agree_with_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    module = vit(**changes)
    module.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_mean": [0.3] * module.config.num_channels,
                "image_std": [0.2] * module.config.num_channels,
            }
        )
    )
    stored, difference = buffet.loading.checked(tmp_path)
    assert difference <= 1e-5
    assert isinstance(stored, ImageModel)
    assert stored.config.image_mean == (0.3,) * module.config.num_channels
    held = load(module)  # compared with the module as it is loaded
    assert held.config.image_mean == (0.5,) * module.config.num_channels


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_logits_agree_with_a_network_of_timm_s_names(tmp_path: Path, norm: type[nn.Module]) -> None:
    module = shaken(TimmViT(norm))
    if norm is nn.LayerNorm:
        for part in module.modules():
            if isinstance(part, nn.LayerNorm):
                part.eps = 1e-6
    model = load(save_timm(module, tmp_path / "m"))
    assert isinstance(model, ImageModel)
    images = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    expected = module((images - mean) / std)
    assert (model.logits(rows_of(images, model.config)) - expected).abs().max() <= 1e-5
    assert (model.logits(model.embed(images[0])) - expected[0]).abs().max() <= 1e-5


def test_what_timm_has_besides_is_refused(tmp_path: Path) -> None:
    module = TimmViT(nn.LayerNorm)
    with pytest.raises(buffet.BuffetError, match="global_pool is 'avg'"):
        load(save_timm(module, tmp_path / "a", global_pool="avg"))
    module.register_parameter("reg_token", nn.Parameter(torch.zeros(1, 1, 8)))
    with pytest.raises(buffet.BuffetError, match="no place for: reg_token"):
        load(save_timm(module, tmp_path / "b"))


def test_rows_are_the_pixels_of_the_patches(tmp_path: Path) -> None:
    model = load(vit(num_channels=1))
    assert isinstance(model, ImageModel)
    pixels = torch.arange(36).reshape(6, 6)
    rows = model.embed((pixels / 35).numpy())
    assert rows.shape == (5, 9)
    assert not rows[0].any()
    assert torch.allclose(rows[2] * 35, pixels[:3, 3:].flatten().float())
    assert model.tokens(np.zeros((6, 6))) == ["[CLASS]", "(0,0)", "(0,1)", "(1,0)", "(1,1)"]
    Image.fromarray(pixels.numpy().astype("uint8")).save(tmp_path / "image.png")
    assert torch.allclose(model.embed(tmp_path / "image.png") * 255, rows * 35)
    assert torch.equal(model.embed(str(tmp_path / "image.png")), model.embed(pixels.to(torch.uint8)))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(5, 6), "5 × 6 pixels"),
        (torch.zeros(3, 6, 6), "expected 1 channels"),
        (torch.full((6, 6), 1.5), r"outside \[0, 1\]"),
        ("missing.png", "no such picture"),
        ("digits:99999", "digits:0 to digits:1796"),
    ],
)
def test_images_that_do_not_fit_are_refused(image: Any, message: str) -> None:
    with pytest.raises(buffet.BuffetError, match=message):
        load(vit(num_channels=1)).embed(image)


@pytest.mark.parametrize("p", [1, 2, "inf"])
def test_patches_and_whole_images_are_certified(p: int | str) -> None:
    model = load(vit(layer_norm_eps=1e-3))
    assert isinstance(model, ImageModel)
    x = model.embed(torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(2)))
    one = buffet.radius(model, buffet.LpBall(x, [2], p), "lse", tolerance=0.05)
    whole = buffet.radius(model, buffet.LpBall(x, [1, 2, 3, 4], p), "lse", tolerance=0.05)
    for found in (one, whole):
        assert 0 < found.certified < found.attacked
    assert whole.certified <= one.certified
    # Sampled points of the certified region keep the answer.
    region = buffet.LpBall(x, [1, 2, 3, 4], p, whole.certified)
    points = region.points(region.sample(200, torch.Generator().manual_seed(3)))[:, 0]
    assert (model.logits(points).argmax(-1) == whole.label).all()


def test_a_box_of_pixels_stays_in_the_range_of_pixels() -> None:
    x = torch.tensor([[0.0, 0.0], [0.05, 0.99]])
    region = pixel_box(x, torch.tensor([[1]]), 0.1)
    low, high = region.extent()
    assert torch.allclose(low, torch.tensor([[[-0.05, -0.1]]]).double())
    assert torch.allclose(high, torch.tensor([[[0.1, 0.01]]]).double())
    assert bool(region.contains(torch.tensor([[[-0.05, 0.01]]]), slack=1e-7))


def test_an_image_is_certified_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit(num_channels=1, layer_norm_eps=1e-3).save_pretrained(tmp_path / "m")
    Image.fromarray(np.arange(36).reshape(6, 6).astype("uint8")).save(tmp_path / "image.png")

    def certify(*options: str) -> dict[str, Any]:
        arguments = ["certify", str(tmp_path / "image.png"), "--model", str(tmp_path / "m"), "--norm", "inf"]
        code = main([*arguments, "--method", "lse", "--json", *options])
        report = json.loads(capsys.readouterr().out)
        assert code == (0 if report["verdict"] == "certified" else 1)
        return report

    capsys.readouterr()
    whole = certify("--words", "together")
    assert [task["words"] for task in whole["tasks"]] == [[1, 2, 3, 4]]
    assert whole["certified"] > 0
    each = certify("--eps", str(whole["certified"]))
    assert [task["verdict"] for task in each["tasks"]] == ["certified"] * 4
    assert [token["token"] for token in each["tokens"]][:2] == ["[CLASS]", "(0,0)"]
    assert {key: each["picture"][key] for key in ("side", "patch", "channels")} == {
        "side": 2,
        "patch": 3,
        "channels": 1,
    }
    assert list(base64.b64decode(each["picture"]["pixels"]))[9:12] == [3, 4, 5]  # top of the second patch


def test_the_answer_about_an_image_is_a_grid_of_patches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit(num_channels=1, layer_norm_eps=1e-3).save_pretrained(tmp_path / "m")
    Image.fromarray(np.arange(36).reshape(6, 6).astype("uint8")).save(tmp_path / "image.png")
    arguments = ["certify", str(tmp_path / "image.png"), "--model", str(tmp_path / "m"), "--words", "2,3"]
    capsys.readouterr()
    main([*arguments, "--method", "lse", "--no-attack", "--html", str(tmp_path / "page.html")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == [["1", "2"], ["3", "4"]]
    assert lines[4][:2] == ["#", "patch"]
    assert "patchMap" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_model_is_checked_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vit().save_pretrained(tmp_path / "m")
    capsys.readouterr()
    assert main(["models", "--check", str(tmp_path / "m"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] <= 1e-5
    assert main(["models", "--check", str(tmp_path / "m")]) == 0
    assert "logits differ by" in capsys.readouterr().out


def test_digits_are_learned_and_the_checkpoint_loads(tmp_path: Path) -> None:
    settings = TrainSettings.of(preset="digits-vit", out=tmp_path / "d", epochs=3, layers=1, patch=4)
    summary = train(settings)
    assert summary.dev_accuracy > 0.3
    model = load(tmp_path / "d")
    assert isinstance(model, ImageModel)
    images, labels = read_digits()
    index = split(len(images))["test"]
    rows = rows_of(images[index, None], model.config)
    assert float((model.logits(rows).argmax(-1) == labels[index]).double().mean()) == summary.test_accuracy
    assert torch.equal(model.embed("digits:3"), rows_of(images[3, None], model.config))
    assert settings.command() == "buffet train digits-vit --out d --layers 1 --patch 4 --epochs 3"
    with pytest.raises(buffet.BuffetError, match="images and image presets go together"):
        TrainSettings.of(preset="sst-small-1", data="digits", out=tmp_path / "e")
