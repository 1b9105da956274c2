"""Vision transformers: their configuration and tensors in the words of the one network.

An image is a sentence of patches. The rows of the program are the pixels of the patches, in [0, 1], so that
regions live in pixel space: the normalisation of the pixels, the patch embedding and the positions are part
of the program. The class token is a row of zeros in front, which no pixel is read from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from buffet.errors import BuffetError, show, validated
from buffet.loading.config import Flag, ModelConfig, Width
from buffet.loading.families import Architecture, Family, Rules, names_in, read_json

PATCHES = "vit.embeddings.patch_embeddings.projection"
CLASS_TOKEN = "vit.embeddings.cls_token"
PATCH_POSITIONS = "vit.embeddings.position_embeddings"
QKV = ".attention.self.qkv."
MOST_CHANNELS = 65_536
Channels = tuple[Annotated[float, Field(allow_inf_nan=False, strict=True)], ...]


class ImageConfig(ModelConfig):
    """The architecture of an image classifier: pre-norm, read from the class token."""

    model_type: Literal["vit"] = "vit"  # type: ignore[assignment]
    vocab_size: int = 1
    image_size: Width
    patch_size: Width
    num_channels: Width = 3
    image_mean: Channels | None = None  # of every channel, in [0, 1]; pixels are (x − mean) / std to the net
    image_std: Channels | None = None
    qkv_bias: Flag = True
    layer_norm: Literal["standard", "no_var", "batch"] = "standard"  # type: ignore[assignment]
    norm_position: Literal["pre"] = "pre"
    pooling: Literal["cls"] = "cls"
    head_act: Literal["none"] = "none"
    embedding_norm: Literal[False] = False

    @model_validator(mode="after")
    def _whole_patches(self) -> ImageConfig:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )
        for name in ("image_mean", "image_std"):
            given = getattr(self, name)
            if given is not None and len(given) != self.num_channels:
                raise ValueError(f"{name} has {len(given)} values, num_channels is {self.num_channels}")
        if self.image_std is not None and min(self.image_std) <= 0:
            raise ValueError(f"image_std is {show(self.image_std)}: every value must be > 0")
        return self

    @property
    def side(self) -> int:
        """Patches per row and per column of the image."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """The class token and the patches."""
        return 1 + self.side**2

    @property
    def row_width(self) -> int:
        """The numbers of a patch."""
        return self.num_channels * self.patch_size**2

    @property
    def norms(self) -> tuple[str, ...]:
        """Where a normalisation is."""
        blocks = (f"bert.encoder.layer.{layer}." for layer in range(self.num_hidden_layers))
        each = ("attention.output.LayerNorm", "output.LayerNorm")
        return (*(block + norm for block in blocks for norm in each), "bert.encoder.LayerNorm")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        encoder = {k: v for k, v in super().shapes().items() if not k.startswith("bert.embeddings")}
        width, patch = self.hidden_size, self.patch_size
        statistics = ("running_mean", "running_var") if self.layer_norm == "batch" else ()
        return {
            f"{PATCHES}.weight": (width, self.num_channels, patch, patch),
            f"{PATCHES}.bias": (width,),
            CLASS_TOKEN: (1, 1, width),
            PATCH_POSITIONS: (1, self.tokens, width),
            **encoder,
            **{f"{norm}.{name}": (width,) for norm in self.norms for name in statistics},
        }


_BLOCK: Rules = ((r"\.mlp\.fc1\.", ".intermediate.dense."), (r"\.mlp\.fc2\.", ".output.dense."))
_COUNTERS = r"\.num_batches_tracked$"
HUGGING_FACE = Family(
    names=(
        (r"^(?:vit\.)?embeddings\.", "vit.embeddings."),
        (r"^(?:vit\.)?(?:encoder\.layer|layers)\.(\d+)\.", r"bert.encoder.layer.\1."),
        (r"\.attention\.attention\.", ".attention.self."),
        (r"\.attention\.q_proj\.", ".attention.self.query."),
        (r"\.attention\.k_proj\.", ".attention.self.key."),
        (r"\.attention\.v_proj\.", ".attention.self.value."),
        (r"\.attention\.o_proj\.", ".attention.output.dense."),
        (r"\.layernorm_before\.", ".attention.output.LayerNorm."),
        (r"\.layernorm_after\.", ".output.LayerNorm."),
        (r"^(?:vit\.)?layernorm\.", "bert.encoder.LayerNorm."),
        *_BLOCK,
    ),
    ignored=rf"^(vit\.)?pooler\.|mask_token$|^decoder\.|{_COUNTERS}",
)
TIMM = Family(
    names=(
        (r"^cls_token$", CLASS_TOKEN),
        (r"^pos_embed$", PATCH_POSITIONS),
        (r"^patch_embed\.proj\.", f"{PATCHES}."),
        (r"^blocks\.(\d+)\.", r"bert.encoder.layer.\1."),
        (r"\.norm1\.", ".attention.output.LayerNorm."),
        (r"\.norm2\.", ".output.LayerNorm."),
        (r"\.attn\.qkv\.", QKV),
        (r"\.attn\.proj\.", ".attention.output.dense."),
        (r"^norm\.", "bert.encoder.LayerNorm."),
        (r"^head\.", "classifier."),
        *_BLOCK,
    ),
    ignored=_COUNTERS,
)


@dataclass(frozen=True)
class ImageArchitecture(Architecture):
    """As `Architecture`; queries, keys and values may be stored as one tensor, and without biases."""

    config: ImageConfig
    family: Family

    @property
    def skipped(self) -> int:
        return 0

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self.config.shapes().items():
            part = re.search(r"\.attention\.self\.(query|key|value)\.(weight|bias)$", name)
            if part and part[2] == "bias" and not self.config.qkv_bias:
                continue
            if part and self.family is TIMM:
                name, shape = re.sub(r"\.(query|key|value)\.", ".qkv.", name), (3 * shape[0], *shape[1:])
            shapes[name] = shape
        return shapes

    def complete(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        complete = dict(tensors)
        for name in [name for name in complete if QKV in name]:
            parts = complete.pop(name).chunk(3)
            for part, tensor in zip(("query", "key", "value"), parts, strict=True):
                complete[name.replace(".qkv.", f".{part}.")] = tensor.clone()
        shapes = self.config.shapes()
        return {name: complete.get(name, torch.zeros(shape)) for name, shape in shapes.items()}


def is_image_classifier(raw: Any) -> bool:
    """Whether a configuration is that of a vision transformer, in Hugging Face's or in timm's words."""
    return isinstance(raw, dict) and (raw.get("model_type") == "vit" or _is_timm(raw))


def _is_timm(raw: Mapping[str, Any]) -> bool:
    return re.match(r"(vit|deit)_", str(raw.get("architecture", ""))) is not None


def read_image_architecture(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> ImageArchitecture:
    """What the configuration files of a directory say of its image classifier."""
    path, processor = directory / "config.json", directory / "preprocessor_config.json"
    pixels = read_json(processor) if processor.is_file() else {}
    if not isinstance(pixels, dict):
        raise BuffetError(f"{processor}: expected an object with the settings of a processor")
    known = ("image_mean", "image_std") if pixels.get("do_normalize", True) else ()
    given = {key: pixels[key] for key in known if pixels.get(key) is not None}
    return image_architecture({**given, **read_json(path)}, shapes, str(path))


def image_architecture(
    raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str
) -> ImageArchitecture:
    """The architecture a configuration describes; timm's leaves most to the `shapes` of the tensors."""
    family = TIMM if _is_timm(raw) else HUGGING_FACE
    try:
        values = _from_timm(raw, shapes) if family is TIMM else _from_hugging_face(raw)
    except (ValueError, KeyError) as error:
        raise BuffetError(f"{where}: {error}") from None
    config = validated(ImageConfig, values, where)
    return ImageArchitecture(config, family, config.model_type)


def _from_hugging_face(raw: Mapping[str, Any]) -> dict[str, Any]:
    classes = raw.get("architectures") or ["ViTForImageClassification"]
    if not any(name.endswith("ForImageClassification") for name in names_in(classes)):
        raise ValueError(f"architectures is {show(classes)}: only image classifiers are supported")
    sizes = {key: _square(key, raw[key]) for key in ("image_size", "patch_size") if key in raw}
    channels = raw.get("num_channels", 3)
    halves = (0.5,) * channels if type(channels) is int and 1 <= channels <= MOST_CHANNELS else None
    pixels = {"image_mean": halves, "image_std": halves}  # ViT's own processor
    return {"image_size": 224, "patch_size": 16, **pixels, **raw, **sizes, "model_type": "vit"}


def _square(key: str, size: Any) -> Any:
    if isinstance(size, list | tuple):
        if not size or any(side != size[0] for side in size):
            raise ValueError(f"{key} is {show(size)}: only square images and patches are supported")
        return size[0]
    return size


def _object(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {show(value)}: expected an object")
    return value


def _last(size: Any) -> Any:
    """The width of the images in timm's channels × height × width."""
    return size[-1] if isinstance(size, list | tuple) and size else 224


def _from_timm(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """timm names an architecture; its sizes are read off the tensors, and heads are 64 wide."""
    if (pool := raw.get("global_pool", "token")) != "token":
        raise ValueError(f"global_pool is {show(pool)}: only classifiers that read the class token")
    missing = {"cls_token", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", "head.weight"} - set(shapes)
    if missing:
        raise ValueError(f"no vision transformer of timm: tensor {min(missing)} is missing")
    cfg, args = (_object(key, raw.get(key) or {}) for key in ("pretrained_cfg", "model_args"))
    width, channels, patch = (shapes["patch_embed.proj.weight"][i] for i in (0, 1, 3))
    classes = shapes["head.weight"][0]
    names = names_in(raw.get("label_names") or cfg.get("label_names"))
    batch = "blocks.0.norm1.running_mean" in shapes
    return {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": patch,
        "image_size": _square("img_size", args.get("img_size") or _last(cfg.get("input_size"))),
        "num_hidden_layers": len({key.split(".")[1] for key in shapes if key.startswith("blocks.")}),
        "num_attention_heads": args.get("num_heads", max(1, width // 64)),
        "intermediate_size": shapes["blocks.0.mlp.fc1.weight"][0],
        "layer_norm_eps": 1e-5 if batch else 1e-6,
        "layer_norm": "batch" if batch else "standard",
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "image_mean": cfg.get("mean"),
        "image_std": cfg.get("std"),
        "num_labels": classes,
        "id2label": dict(enumerate(names)) if names and len(names) == classes else None,
    }
