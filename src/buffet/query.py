"""What is asked: a model, what may move and what is to be proven, checked before any work."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from buffet.engine import Classifier, Engine
from buffet.errors import BuffetError
from buffet.optimisation.context import Context
from buffet.printing import counted
from buffet.properties import Property, margin_of
from buffet.regions import Region


@dataclass(frozen=True, eq=False)
class Query:
    """Does what is `asked` hold everywhere in the region? With how much memory and time to find out."""

    model: Classifier
    region: Region
    asked: Property
    engine: Engine
    deadline: float | None  # on the clock of `time.perf_counter`

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    @property
    def context(self) -> Context:
        return Context(deadline=self.deadline)

    @property
    def deep(self) -> bool:
        """Whether the network has more than one attention layer."""
        return self.model.program64.layers > 1

    def rough(self) -> Query:
        """The same, in single precision only: where that is too narrow, bounds are wide anyway."""
        return replace(self, engine=replace(self.engine, widen=False))


def question(
    model: Classifier, region: Region, label: int | None = None, property: Property | None = None
) -> tuple[Property, float]:
    """What is to be proven and its margin at the unmoved rows, checked against the model.

    By default it is that the answer to the unmoved rows stays the answer.
    """
    if label is not None and property is not None:
        raise BuffetError(
            "a label and a property: give one of them; a property says all that is to be proven"
        )
    logits = _outputs(model, region)
    if property is not None:
        if property.outputs != len(logits):
            raise BuffetError(
                f"the property is about {counted(property.outputs, 'output')}, the model has {len(logits)}"
            )
        if property.label is None:
            return property, float(property.margin(property.values(logits)))
        label = property.label
    classes = len(logits)
    if classes < 2:
        raise BuffetError(
            "the model has one output, so there is no other class to answer; give a property of its output,"
            " such as buffet.Property.within([-1], [1])"
        )
    if label is not None and (isinstance(label, bool) or label not in range(classes)):  # whatever it is
        raise BuffetError(f"label {label!r} is not a class of the model (0 to {classes - 1})")
    label = int(logits.argmax() if label is None else label)
    return Property.margins(label, classes), float(margin_of(logits, label))


def clean_answer(model: Classifier, region: Region, label: int | None) -> tuple[int, float]:
    """The class to defend and its margin at the unmoved rows, checked against the model."""
    asked, clean = question(model, region, label)
    assert asked.label is not None
    return asked.label, clean


def _outputs(model: Classifier, region: Region) -> Float[Tensor, " outputs"]:
    """The outputs for the unmoved rows."""
    x = region.center.double()
    width = model.program64.input_width
    if width != x.shape[1]:
        raise BuffetError(f"the rows of the region are {x.shape[1]} wide, the model expects {width}")
    return model.program64.evaluate(x)


def without_padding(region: Region, mask: Bool[Tensor, "tokens"] | None) -> Region:
    """The region of the sentence without padding; the first row, which classifiers read, must stay."""
    if mask is None:
        return region
    if not bool(mask[0]):
        raise BuffetError("the mask hides row 0, which the classifier reads")
    return region.without_padding(mask)


def sized(region: Region, eps: float | Sequence[float] | Tensor | None) -> Region:
    """The region with the given size, if one is given."""
    return region if eps is None else region.with_eps(eps)


def checked_budget(budget: float) -> float:
    """A number of seconds."""
    if not 0 < budget < math.inf:
        raise BuffetError(f"budget {budget} must be a number of seconds > 0")
    return budget


def deadline_of(budget: float | None) -> float | None:
    """When a budget that begins now is spent, on the clock of `time.perf_counter`."""
    return None if budget is None else time.perf_counter() + checked_budget(budget)
