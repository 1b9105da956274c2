"""Where the files of a model are: inside the package, in a directory, or in the Hub's cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from buffet.errors import BuffetError

MODELS = Path(__file__).parent.parent / "models"
DEFAULT = "sst2-small"


def available() -> tuple[str, ...]:
    """The names of the models shipped inside the package."""
    return tuple(sorted(entry.parent.name for entry in MODELS.glob("*/config.json")))


def is_hub_id(name: str) -> bool:
    """Whether `name` reads like ``owner/model``."""
    return re.fullmatch(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", name, re.ASCII) is not None


def locate(source: str | Path | None) -> tuple[str, Path]:
    """The name of a model, and the directory it is read from."""
    name = DEFAULT if source is None else source
    if name in available():
        return str(name), MODELS / name
    directory = Path(name)
    # os.path answers False where Path raises: names too long, forbidden folders
    if os.path.isdir(directory):
        return directory.resolve().name, directory
    if isinstance(name, str) and is_hub_id(name) and not os.path.isfile(directory):
        from buffet.loading.hub import fetch  # reads configurations, which takes PyTorch

        return name, fetch(name)
    listed = ", ".join(available()) or "none"
    what = "a file, not a checkpoint directory" if os.path.isfile(directory) else "no such directory"
    raise BuffetError(f"{str(name)!r}: {what}; give a checkpoint directory or an embedded model ({listed})")
