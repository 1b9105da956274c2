"""What is measured: fixed random encoders, a method, and a batch of words of one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from pydantic import TypeAdapter

from buffet.errors import BuffetError
from buffet.methods import METHODS, Method, method_named

USUAL = (3, 16, 128)
"""Layers, tokens and width, where they are not given."""
WINDOWED = "backward/2"
"""A method's name, and how many layers it substitutes through."""
FEW_STEPS = 10
"""Steps that learning methods take where nothing else is asked for: cost is linear in them."""
LARGEST = 1 << 20


@dataclass(frozen=True)
class BenchCase:
    """One verification to measure. Two cases are comparable if and only if they are equal."""

    method: str
    layers: int
    tokens: int = 8
    width: int = 64
    inner: int = 128  # of the feed-forward part
    heads: int = 4
    pooling: str = "cls"
    words: int = 1  # tasks: words that move, each on its own
    eps: float = 0.005
    scale: float = 1.0  # of the random weights
    window: int | None = None
    optimise: str | None = None  # in place of the method's own
    steps: int | None = None  # of an optimiser; it takes all of them

    @property
    def chosen(self) -> Method:
        """The method, composed."""
        return method_named(self.method, optimise=self.optimise, steps=self.steps, window=self.window)

    @property
    def name(self) -> str:
        """The method in the words of the command line."""
        window = f"/{self.window}" if self.window else ""
        learned = f" {self.optimise}" if self.optimise else ""
        return f"{self.method}{window}{learned}{f' {self.steps} steps' if self.steps else ''}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, tokens and width."""
        return self.layers, self.tokens, self.width


_LARGE = BenchCase("backward", 1, tokens=16, width=256, inner=512)
FIXED: tuple[BenchCase, ...] = (
    BenchCase("interval", 3),
    BenchCase("forward", 3),
    BenchCase("baseline", 1),
    BenchCase("baseline", 3),
    BenchCase("baseline", 3, words=8),
    BenchCase("backward", 1),
    BenchCase("backward", 2),
    BenchCase("backward", 3),
    BenchCase("backward", 6),
    BenchCase("backward", 6, pooling="mean"),
    _LARGE,
    replace(_LARGE, pooling="mean"),
    BenchCase("o-buffet", 1, optimise="final", steps=100),
    BenchCase("o-buffet", 2, optimise="final", steps=100),
)
"""Cases that are measured unless sizes are given, besides every method at the usual size."""


def shaped(name: str, layers: int, tokens: int, width: int, words: int = 1) -> BenchCase:
    """A case of a size: 4 heads, a feed-forward part twice as wide as the rest, small weights and ε.

    They hardly matter for the cost, but values and bounds of deep random networks must not overflow, or else
    the engine tries once more in float64.
    """
    method, _, window = name.partition("/")
    if window and not window.isdigit():
        raise BuffetError(f"--methods: got {name!r}; a window is a number of layers, such as {WINDOWED}")
    case = BenchCase(
        method,
        layers,
        tokens,
        width,
        2 * width,
        words=words,
        eps=1e-8,
        scale=0.5,
        window=int(window) if window else None,
    )
    return replace(case, steps=FEW_STEPS) if case.chosen.optimiser.learns else case


def selection(
    layers: Sequence[int] = (),
    tokens: Sequence[int] = (),
    widths: Sequence[int] = (),
    methods: Sequence[str] = (),
    words: int = 1,
) -> list[BenchCase]:
    """All combinations of some sizes, for some methods or all; without sizes, the fixed cases come first."""
    given = {"--layers": layers, "--tokens": tokens, "--width": widths, "--words": (words,)}
    for option, values in given.items():
        if wrong := [v for v in values if not 1 <= v <= LARGEST]:
            raise BuffetError(f"{option}: got {wrong[0]}; give whole numbers from 1 to {LARGEST}")
    if wrong := [w for w in widths if w % 4]:
        raise BuffetError(f"--width: got {wrong[0]}; give multiples of 4, as there are 4 heads")
    axes = [values or (usual,) for values, usual in zip((layers, tokens, widths), USUAL, strict=True)]
    if short := [n for n in axes[1] if n < words]:
        raise BuffetError(
            f"--words: got {words}; a sentence of {short[0]} tokens has no more words than that"
        )
    sized = layers or tokens or widths or words > 1
    fixed = [] if sized else [case for case in FIXED if not methods or case.method in methods]
    return [
        *fixed,
        *(
            shaped(method, *shape, words)
            for method in methods or (*METHODS, WINDOWED)
            for shape in product(axes[0], axes[1], axes[2])
        ),
    ]


def case_from(values: dict[str, object]) -> BenchCase:
    """A case that was written as JSON; keys of other versions are refused."""
    unknown = dict(values).keys() - {f.name for f in fields(BenchCase)}
    if unknown:
        raise BuffetError(
            f"a measurement has the unknown key {min(unknown)!r:.60}: written by another version?"
        )
    return CASE.validate_python(values)


CASE = TypeAdapter(BenchCase)
