"""A loaded image classifier, and images turned into rows of pixels."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from buffet.errors import BuffetError, one_line, optional
from buffet.loading.agreement import as_float32, largest_difference
from buffet.loading.model import Model
from buffet.loading.tokenizer import Encoding
from buffet.loading.vision import ImageConfig
from buffet.regions import Box

DIGIT = "digits:"
"""What the name of one of scikit-learn's digits starts with; its number follows."""
Image = str | Path | Tensor | np.ndarray
Pixels = Float[Tensor, "channels height width"]


@dataclass(frozen=True, eq=False, repr=False)
class ImageModel(Model):
    """An image classifier ready to be verified. Its rows are the pixels of the patches, in [0, 1].

    Row 0 is the class token: zeros, of which no pixel is read. The patches follow, line by line; the numbers
    of a row are a patch's pixels line by line, channel after channel.
    """

    config: ImageConfig

    def embed(self, image: Image, pair: str | None = None) -> Float[Tensor, "tokens width"]:
        """The rows of an image: a picture file, ``digits:INDEX``, or an array of height × width (× channels).

        Tensors are channels × height × width. Whole numbers are taken as 0 to 255, others as 0 to 1.
        """
        if pair is not None:
            raise BuffetError(f"{self.name} reads images: an image has no second text; leave the pair out")
        config = self.config
        pixels = read_pixels(image, config.num_channels)
        if pixels.shape[1:] != (config.image_size, config.image_size):
            height, width = pixels.shape[1:]
            raise BuffetError(
                f"the image has {height} × {width} pixels, {self.name} reads {config.image_size} × "
                f"{config.image_size}: crop or resize it first"
            )
        return rows_of(pixels, config)

    def tokens(self, image: Image) -> list[str]:
        """What the rows are called: the class token, and the line and column of every patch."""
        return list(self.encode(image).tokens)

    def encode(self, image: Image, pair: str | None = None) -> Encoding:
        """The class token and the patches, each called by its line and column."""
        self.embed(image, pair)
        names = self._names()
        count = len(names)
        special = (True, *[False] * (count - 1))
        return Encoding(names, tuple(range(count)), (0,) * count, special, (False,) * count)

    def read(self, x: Float[Tensor, "tokens width"], rows: Sequence[int]) -> list[str | None]:
        """What these rows are called: the names of patches, whatever is in them."""
        names = self._names()
        return [names[row] if len(x) == len(names) else None for row in rows]

    def _names(self) -> tuple[str, ...]:
        side = self.config.side
        return "[CLASS]", *(f"({line},{column})" for line in range(side) for column in range(side))


def rows_of(
    pixels: Float[Tensor, "*batch channels height width"], config: ImageConfig
) -> Float[Tensor, "*batch tokens pixels"]:
    """The rows of images of the right size: zeros for the class token, then the patches."""
    patch = config.patch_size
    split = pixels.unflatten(-2, (-1, patch)).unflatten(-1, (-1, patch))  # channels, lines, y, columns, x
    patches = split.movedim((-4, -2), (-5, -4)).flatten(-3).flatten(-3, -2)
    return torch.nn.functional.pad(patches, (0, 0, 1, 0))


def pixel_box(x: Float[Tensor, "tokens width"], words: Int[Tensor, "tasks moved"], eps: float) -> Box:
    """Pixels of the patches `words` that move by at most `eps` (L∞) and stay in [0, 1].

    The ends are rounded outward, so that the box holds every such image.
    """
    x = x.double()
    lower, upper = (
        torch.nextafter(x + sign * eps, torch.full_like(x, sign * math.inf)) for sign in (-1.0, 1.0)
    )
    return Box(x, lower.clamp(min=0)[words], upper.clamp(max=1)[words], words)


def read_pixels(image: Image, channels: int) -> Pixels:
    """The pixels of an image in [0, 1], float32."""
    if isinstance(image, str) and image.startswith(DIGIT):
        pixels = _digit(image)
    elif isinstance(image, str | Path):
        pixels = _picture(Path(image), channels)
    else:
        pixels = torch.as_tensor(image)
        if pixels.ndim == 3 and isinstance(image, np.ndarray):
            pixels = pixels.movedim(-1, 0)
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[0] != channels:
        raise BuffetError(f"the image has the shape {list(pixels.shape)}, expected {channels} channels")
    scale = 1 if pixels.is_floating_point() else 255
    pixels = pixels.to(torch.float32) / scale
    if not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise BuffetError("the image has values outside [0, 1]: scale its pixels first")
    return pixels


def _picture(path: Path, channels: int) -> Tensor:
    pictures = optional("PIL.Image", "images", f"{path}: pictures are read by Pillow")
    if channels not in (1, 3):
        raise BuffetError(f"{path}: a picture has 1 or 3 channels, the model reads {channels}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pictures.DecompressionBombWarning)
            with pictures.open(path) as picture:
                pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    except FileNotFoundError:
        raise BuffetError(f"{path}: no such picture") from None
    except Exception as error:  # Pillow raises nearly anything for a broken picture
        raise BuffetError(f"{path}: not a picture that can be read: {one_line(error)}") from None
    array = torch.from_numpy(pixels.copy())
    return array if channels == 1 else array.movedim(-1, 0)


def _digit(name: str) -> Tensor:
    images, _ = read_digits()
    index = name.removeprefix(DIGIT)
    if not re.fullmatch(r"[0-9]{1,6}", index) or int(index) >= len(images):
        raise BuffetError(f"{name}: give the number of a digit, {DIGIT}0 to {DIGIT}{len(images) - 1}")
    return images[int(index)]


def read_digits() -> tuple[Float[Tensor, "images 8 8"], Tensor]:
    """scikit-learn's handwritten digits, pixels in [0, 1], and which digit each of them is."""
    data = optional("sklearn.datasets", "images", "the digits are part of scikit-learn").load_digits()
    return torch.from_numpy(data.images).float() / 16, torch.from_numpy(data.target).long()


def check_images(model: ImageModel, module: nn.Module, where: str) -> float:
    """The largest difference between the logits of a model and of its source, on random images."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, config.num_channels, config.image_size, config.image_size, generator=generator)
    mean, std = (
        torch.tensor(given or (default,) * config.num_channels)[:, None, None]
        for given, default in ((config.image_mean, 0.0), (config.image_std, 1.0))
    )
    with as_float32(module) as ready:
        answer = ready((images - mean) / std)
        expected = getattr(answer, "logits", answer)
    return largest_difference(model.logits(rows_of(images, config)), expected, where)
