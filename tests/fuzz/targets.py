"""All that is fuzzed, by name, and how one input is tried."""

from __future__ import annotations

import random
from collections.abc import Mapping

from buffet.errors import BuffetError
from fuzz.arguments import arguments
from fuzz.certificates import certificate, certified_model
from fuzz.models import agreement, config, encoder, index, picture, safetensors, torch_file, vision
from fuzz.networks import instances, onnx_bytes, onnx_graph, vnnlib
from fuzz.place import FoundError, Place, Target
from fuzz.results import measurements, report, resume, rows, sweep, table
from fuzz.tokenizers import byte_pairs, tokenizer, vocabulary

LONGEST = 2_000
"""Characters of a complaint; more is no message for people."""
TARGETS: Mapping[str, Target] = {
    target.__name__: target
    for target in (
        *(config, safetensors, torch_file, index, encoder, agreement, vision, picture),
        *(tokenizer, vocabulary, byte_pairs),
        *(onnx_bytes, onnx_graph, vnnlib, instances),
        *(sweep, rows, report, table, measurements, resume),
        certificate,
        certified_model,
        arguments,
    )
}


def attempt(name: str, seed: int, place: Place) -> str:
    """Feed one input to a target: "taken" or "refused"; whatever else happens is raised as a `FoundError`.

    What would run code leaves a mark, which must never appear.
    """
    rng = random.Random(f"{name} {seed}")
    try:
        TARGETS[name](rng, place)
        outcome = "taken"
    except BuffetError as error:
        if "\n" in str(error) or len(str(error)) > LONGEST:
            raise FoundError(
                f"{name} {seed}: a complaint of {len(str(error))} characters: {str(error)[:200]!r}"
            ) from None
        outcome = "refused"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        raise FoundError(f"{name} {seed}: {type(error).__name__}: {str(error)[:300]}") from error
    if place.mark.exists():
        place.mark.unlink()
        raise FoundError(f"{name} {seed}: code from a file was executed")
    return outcome
