"""Trains classifiers, from scratch or from a pretrained encoder, and writes them as checkpoints.

What is trained is the same `Program` that the verifier reads: its weights are leaf tensors that require
gradients. Every regulariser acts on the input rows, outside the program, so nothing has to be switched off
or folded in afterwards.

`presets` the table of recipes, `settings` all that decides a result, `corpus` sentences → batches,
`network`, `pretrained` and `images` what learns and its first weights, `trainer` the loop, `state` what an
interrupted run leaves, `run` all of it in order.
"""

from typing import TYPE_CHECKING

from buffet.lazy import lazy

if TYPE_CHECKING:
    from buffet.training.presets import DEFAULT, preset_names, preset_values
    from buffet.training.results import TrainProgress, TrainSummary
    from buffet.training.run import train
    from buffet.training.settings import TrainSettings

__getattr__, __dir__ = lazy(
    __name__,
    {
        "DEFAULT": "buffet.training.presets",
        "TrainProgress": "buffet.training.results",
        "TrainSettings": "buffet.training.settings",
        "TrainSummary": "buffet.training.results",
        "preset_names": "buffet.training.presets",
        "preset_values": "buffet.training.presets",
        "train": "buffet.training.run",
    },
)

__all__ = [
    "DEFAULT",
    "TrainProgress",
    "TrainSettings",
    "TrainSummary",
    "preset_names",
    "preset_values",
    "train",
]
