"""What is measured: fixed random encoders, a method, and a batch of words of one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from pydantic import TypeAdapter

from buffet.errors import BuffetError
from buffet.methods import METHODS, Method, method_named

LAYERS, TOKENS, WIDTHS = (1, 3, 6, 12), (8, 16, 32, 64), (64, 128, 256, 512)
CENTRE = (3, 16, 128)
"""Layers, tokens and width around which one axis at a time is varied."""
WINDOWED = "backward/2"
"""A method's name, and how many layers it substitutes through."""
VARIED = ("baseline", "lse", "backward", WINDOWED)
"""What is measured along every axis by default; the other methods at the centre only."""
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
        """Layers, tokens and width: the axes of growth."""
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
"""Cases that are measured unless sizes are given."""


def shaped(name: str, layers: int, tokens: int, width: int, words: int = 1) -> BenchCase:
    """A case of the grid: 4 heads, a feed-forward part twice as wide as the rest, small weights and ε.

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
    *,
    full: bool = False,
) -> list[BenchCase]:
    """The cases of the grid that are asked for.

    With `full`, or an axis given, all combinations (axes that are not given: all their values, or that of
    the centre). Otherwise one axis at a time is varied around the centre.
    """
    given = {"--layers": layers, "--tokens": tokens, "--width": widths, "--words": (words,)}
    for option, values in given.items():
        if wrong := [v for v in values if not 1 <= v <= LARGEST]:
            raise BuffetError(f"{option}: got {wrong[0]}; give whole numbers from 1 to {LARGEST}")
    if wrong := [w for w in widths if w % 4]:
        raise BuffetError(f"--width: got {wrong[0]}; give multiples of 4, as there are 4 heads")
    if short := [n for n in tokens or (TOKENS if full else CENTRE[1:2]) if n < words]:
        raise BuffetError(
            f"--words: got {words}; a sentence of {short[0]} tokens has no more words than that"
        )
    everything = (*METHODS, WINDOWED)
    axes = zip((layers, tokens, widths), (LAYERS, TOKENS, WIDTHS), CENTRE, strict=True)
    if full or layers or tokens or widths:
        chosen = [values or (all_values if full else (centre,)) for values, all_values, centre in axes]
        shapes = list(product(chosen[0], chosen[1], chosen[2]))
        return [shaped(m, *shape, words) for m in methods or everything for shape in shapes]
    return [
        shaped(m, *shape, words)
        for m in methods or everything
        for shape in (_cross() if m in (methods or VARIED) else (CENTRE,))
    ]


def _cross() -> Iterator[tuple[int, int, int]]:
    """The centre, and one axis at a time varied around it."""
    yield CENTRE
    for axis, values in enumerate((LAYERS, TOKENS, WIDTHS)):
        for value in values:
            if value != CENTRE[axis]:
                varied = list(CENTRE)
                varied[axis] = value
                yield varied[0], varied[1], varied[2]


def case_from(values: dict[str, object]) -> BenchCase:
    """A case that was written as JSON; keys of other versions are refused."""
    unknown = dict(values).keys() - {f.name for f in fields(BenchCase)}
    if unknown:
        raise BuffetError(
            f"a measurement has the unknown key {min(unknown)!r:.60}: written by another version?"
        )
    return CASE.validate_python(values)


CASE = TypeAdapter(BenchCase)
