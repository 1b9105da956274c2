"""Properties in the VNN-LIB format (1.0, plain or gzip): what the inputs may be, and what is unsafe.

A file declares inputs ``X_0, X_1, …`` and outputs ``Y_0, Y_1, …`` and asserts what a *counterexample* would
satisfy: bounds of every input, and a condition on the outputs. It is read as a list of queries, each a box
and the `Property` that no point of the box may violate; what has to be proven is all of them.

Numbers are read exactly. Boxes and unsafe sets are rounded outward to float64, so that a proof about them is
a proof about what the file says.
"""

from __future__ import annotations

import gzip
import itertools
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.loading.config import show
from buffet.properties import Property

LONGEST = 256 << 20
"""Bytes of a file, unpacked."""
DEEPEST = 100
"""Brackets inside brackets."""
MOST_CASES = 20_000
"""Conjunctions that a formula is multiplied out into."""
MOST_ATOMS = 2_000_000
"""Constraints in all these conjunctions."""
MOST_BITS = 8192
"""Of the numerator and denominator of a number."""
IGNORED = ("set-logic", "set-info", "check-sat", "get-model", "exit")
_TOKEN = re.compile(r"[()\n]|[^\s();]+|;[^\n]*")
_NUMBER = re.compile(r"[+-]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][+-]?\d{1,3})?")
_VARIABLE = re.compile(r"([XY])_(0|[1-9]\d{0,8})")

Expression = list | str
"""A word, or a list of the line it starts in and its parts."""
Form = dict[tuple[str, int], Fraction]
"""Coefficients by variable; the constant has the key `ONE`."""
ONE = ("", 0)
UNIT, MINUS = Fraction(1), Fraction(-1)


@dataclass(frozen=True, eq=False)
class Query:
    """No input with ``lower ≤ x ≤ upper``, in the order of the network's input, may violate the property."""

    lower: Float[Tensor, " inputs"]
    upper: Float[Tensor, " inputs"]
    property: Property

    def __repr__(self) -> str:
        return f"Query(inputs={len(self.lower)}, {self.property})"


@dataclass(frozen=True, eq=False)
class Atom:
    """``form ≤ 0``, as said in a line."""

    form: Form
    line: int

    @property
    def kind(self) -> str:
        """Which variables it has: "X", "Y", "XY" or none."""
        return "".join(sorted({name for name, _ in self.form if name}))


Case = tuple[Atom, ...]
"""A conjunction."""


def read_vnnlib(path: str | Path, *, inputs: int | None = None, outputs: int | None = None) -> list[Query]:
    """The queries of a file; their numbers of inputs and outputs are checked if they are given."""
    text = _text(Path(path))
    try:
        queries = parse_vnnlib(text)
    except BuffetError as error:
        raise BuffetError(f"{path}: {error}") from None
    for what, expected, found in (
        ("inputs X", inputs, len(queries[0].lower)),
        ("outputs Y", outputs, queries[0].property.outputs),
    ):
        if expected is not None and expected != found:
            raise BuffetError(f"{path}: declares {found} {what}, the network has {expected}")
    return queries


def _text(path: Path) -> str:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            content = file.read(LONGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BuffetError(f"{path}: cannot be read: {show(reason)}") from None
    if len(content) > LONGEST:
        raise BuffetError(f"{path}: longer than {LONGEST >> 20} MB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise BuffetError(f"{path}: not a VNN-LIB file: not a text") from None


def parse_vnnlib(text: str) -> list[Query]:
    """The queries of a VNN-LIB text."""
    declared: dict[str, set[int]] = {"X": set(), "Y": set()}
    common: list[Atom] = []
    choices: list[list[Case]] = []
    for command in _commands(text):
        line, name = command[0], command[1] if len(command) > 1 else ""
        if name in ("declare-const", "declare-fun"):
            _declare(command, declared)
        elif name == "assert":
            if len(command) != 3:
                raise _error(line, "assert takes one formula")
            cases = _cases(command[2], declared, line)
            if len(cases) == 1:
                common += cases[0]
            else:
                choices.append(cases)
        elif name not in IGNORED:
            raise _error(line, f"unknown command {show(name)}; known: declare-const, assert")
    sizes = {name: _size(name, indices) for name, indices in declared.items()}
    return _queries(common, _product(choices, 0), sizes["X"], sizes["Y"])


def _commands(text: str) -> Iterable[list]:
    """The bracketed expressions at the top of a text."""
    line = 1
    stack: list[list] = []
    for token in _TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token == "(":
            if len(stack) == DEEPEST:
                raise _error(line, f"more than {DEEPEST} brackets inside each other")
            inner: list = [line]
            if stack:
                stack[-1].append(inner)
            stack.append(inner)
        elif token == ")":
            if not stack:
                raise _error(line, "a closing bracket without an opening one")
            done = stack.pop()
            if not stack:
                yield done
        elif token[0] != ";":
            if not stack:
                raise _error(line, f"{show(token)} outside of brackets")
            stack[-1].append(token)
    if stack:
        raise _error(stack[-1][0], "this bracket is never closed")


def _declare(command: list, declared: dict[str, set[int]]) -> None:
    line, name, kind = command[0], command[2] if len(command) > 2 else "", command[3:]
    match = _VARIABLE.fullmatch(name) if isinstance(name, str) else None
    if match is None or kind not in (["Real"], [[line], "Real"]):
        raise _error(line, "a declaration is (declare-const X_0 Real), of X_… or Y_…")
    known, index = declared[match[1]], int(match[2])
    if index in known:
        raise _error(line, f"{name} is declared twice")
    known.add(index)


def _size(name: str, indices: set[int]) -> int:
    if not indices:
        raise BuffetError(f"no {'input' if name == 'X' else 'output'} {name}_0 is declared")
    if max(indices) != len(indices) - 1:
        missing = next(i for i in itertools.count() if i not in indices)
        raise BuffetError(f"{name}_{missing} is not declared, but {name}_{max(indices)} is")
    return len(indices)


def _cases(formula: Expression, declared: dict[str, set[int]], line: int) -> list[Case]:
    """A formula as a disjunction of conjunctions of atoms; at most `DEEPEST` deep."""
    if isinstance(formula, str) or len(formula) < 2:
        raise _error(line, f"expected a constraint, found {show(formula)}")
    line, name, *parts = formula
    if name in ("and", "or"):
        if not parts:
            raise _error(line, f"({name}) without a constraint")
        inner = [_cases(part, declared, line) for part in parts]
        return _product(inner, line) if name == "and" else _limited([c for cs in inner for c in cs], line)
    if name not in ("<=", ">=", "="):
        raise _error(line, f"{show(name)} is not supported; constraints are and, or, <=, >=, =")
    if len(parts) != 2:
        raise _error(line, f"{name} compares two terms, here are {len(parts)}")
    left, right = (_linear(part, declared, line) for part in parts)
    orders = {"<=": ((left, right),), ">=": ((right, left),), "=": ((left, right), (right, left))}[name]
    case = tuple(Atom(_difference(smaller, larger, line), line) for smaller, larger in orders)
    if case[0].kind == "XY":
        raise _error(line, "a constraint on inputs and outputs at once is not supported")
    return [case]


def _product(choices: Sequence[list[Case]], line: int) -> list[Case]:
    """All ways to pick a case of each."""
    found: list[Case] = [()]
    for cases in choices:
        if len(found) * len(cases) > MOST_CASES:
            raise _error(line, f"multiplied out, it has more than {MOST_CASES} conjunctions")
        found = _limited([(*one, *other) for one in found for other in cases], line)
    return found


def _limited(cases: list[Case], line: int) -> list[Case]:
    if len(cases) > MOST_CASES or sum(map(len, cases)) > MOST_ATOMS:
        raise _error(line, f"more than {MOST_CASES} conjunctions, or {MOST_ATOMS} constraints in them")
    return cases


def _linear(term: Expression, declared: dict[str, set[int]], line: int) -> Form:
    """The coefficients of a linear term."""
    if isinstance(term, str):
        if match := _VARIABLE.fullmatch(term):
            if int(match[2]) not in declared[match[1]]:
                raise _error(line, f"{term} is not declared")
            return {(match[1], int(match[2])): UNIT}
        if not _NUMBER.fullmatch(term):
            raise _error(line, f"{show(term)} is neither a number nor a variable X_… or Y_…")
        return {ONE: Fraction(term)}
    if len(term) < 3:
        raise _error(term[0], f"expected a sum or a product, found {show(term[1:])}")
    line, name, *parts = term
    forms = [_linear(part, declared, line) for part in parts]
    if name == "+":
        return _fold(forms, 1, line)
    if name == "-":
        return _fold(forms, -1, line) if len(forms) > 1 else _scaled(forms[0], Fraction(-1), line)
    if name == "*":
        numbers = [form.get(ONE, Fraction(0)) for form in forms if not form.keys() - {ONE}]
        others = [form for form in forms if form.keys() - {ONE}]
        if len(others) > 1:
            raise _error(line, "a product of variables: only linear constraints are supported")
        result = others[0] if others else {ONE: Fraction(1)}
        for number in numbers:
            result = _scaled(result, number, line)
        return result
    raise _error(line, f"{show(name)} is not supported; terms are made with +, - and *")


def _fold(forms: Sequence[Form], sign: int, line: int) -> Form:
    total = dict(forms[0])
    for form in forms[1:]:
        for key, value in form.items():
            total[key] = _checked(total.get(key, Fraction(0)) + sign * value, line)
            if not total[key]:
                del total[key]
    return total


def _difference(left: Form, right: Form, line: int) -> Form:
    if left.keys().isdisjoint(right):  # thousands of bounds of inputs are like this
        return left | {key: MINUS if value is UNIT else -value for key, value in right.items()}
    return _fold((left, right), -1, line)


def _scaled(form: Form, number: Fraction, line: int) -> Form:
    return {key: _checked(value * number, line) for key, value in form.items() if number}


def _checked(number: Fraction, line: int) -> Fraction:
    if number.numerator.bit_length() > MOST_BITS or number.denominator.bit_length() > MOST_BITS:
        raise _error(line, "a number with too many digits")
    return number


def _queries(common: list[Atom], cases: list[Case], inputs: int, outputs: int) -> list[Query]:
    """One query per box, with all cases of that box."""
    lower, upper = _bounds([a for a in common if a.kind == "X"], {}, {})
    shared = tuple(a for a in common if a.kind != "X")
    boxes: dict[tuple, list[Case]] = {}
    for case in cases:
        own = _bounds([a for a in case if a.kind == "X"], lower, upper)
        rest = (*shared, *(a for a in case if a.kind != "X"))
        if any(not a.kind and a.form.get(ONE, 0) > 0 for a in rest):
            continue  # such as 1 ≤ 0: no counterexample is like that
        rows = tuple(a for a in rest if a.kind)
        if not rows:
            raise BuffetError("no constraint on the outputs: every input would be a counterexample")
        key = () if not any(a.kind == "X" for a in case) else tuple(tuple(sorted(b.items())) for b in own)
        boxes.setdefault(key, []).append(rows)
    if not boxes:
        raise BuffetError("the constraints contradict each other whatever the network is")
    queries = []
    for key, found in boxes.items():
        low, high = map(dict, key) if key else (lower, upper)
        queries.append(Query(*_box(low, high, inputs), _property(found, outputs)))
    return queries


Ends = dict[int, tuple[Fraction, int]]
"""One end of every input, and the line that says so."""


def _bounds(atoms: Iterable[Atom], lower: Ends, upper: Ends) -> tuple[Ends, Ends]:
    """The tightest bounds of every input."""
    lower, upper = dict(lower), dict(upper)
    for atom in atoms:
        variables = [(index, value) for (name, index), value in atom.form.items() if name == "X"]
        if len(variables) > 1:
            raise _error(atom.line, "a constraint on several inputs: only boxes are supported")
        ((index, slope),) = variables
        constant = atom.form.get(ONE, Fraction(0))
        if slope is MINUS:
            end = constant  # as half of all bounds are
        else:
            end = -constant if slope is UNIT else _checked(-constant / slope, atom.line)
        side, tighter = (upper, min) if slope > 0 else (lower, max)
        known = side.get(index)
        side[index] = (end, atom.line) if known is None else tighter(known, (end, atom.line))
    return lower, upper


def _box(lower: Ends, upper: Ends, inputs: int) -> tuple[Tensor, Tensor]:
    """The ends, rounded outward; an input with one value has the float64 nearest to it."""
    lows, highs = [0.0] * inputs, [0.0] * inputs
    for index in range(inputs):
        for side, what in ((lower, "lower"), (upper, "upper")):
            if index not in side:
                raise BuffetError(f"X_{index} has no {what} bound")
        (low, _), (high, line) = lower[index], upper[index]
        if low > high:
            raise _error(
                line, f"X_{index} ≤ {float(high):g}, but line {lower[index][1]} says ≥ {float(low):g}"
            )
        if low == high:
            lows[index] = highs[index] = _nearest(low)
        else:
            lows[index], highs[index] = _rounded(low, -1), _rounded(high, 1)
    return torch.tensor(lows, dtype=torch.float64), torch.tensor(highs, dtype=torch.float64)


def _nearest(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        raise BuffetError("a number is too large for float64") from None


def _rounded(number: Fraction, direction: int) -> float:
    """The float64 next to a number, not below (`direction` 1) or not above (−1) it."""
    near = _nearest(number)
    top, bottom = near.as_integer_ratio()
    beyond = direction * (top * number.denominator - number.numerator * bottom) >= 0
    return near if beyond else math.nextafter(near, direction * math.inf)


def _property(cases: list[Case], outputs: int) -> Property:
    """The unsafe cases; a row that occurs in several is there once."""
    found: dict[tuple[tuple[float, ...], float], int] = {}
    picked: list[tuple[int, ...]] = []
    for case in cases:
        picked.append(tuple(found.setdefault(_row(atom, outputs), len(found)) for atom in case))
    rows, offsets = zip(*found, strict=True)
    return Property(
        torch.tensor(rows, dtype=torch.float64), torch.tensor(offsets, dtype=torch.float64), tuple(picked)
    )


def _row(atom: Atom, outputs: int) -> tuple[tuple[float, ...], float]:
    """``form ≤ 0`` with coefficients of float64, and the constant rounded down: unsafe is never less.

    Coefficients that float64 does not have, such as 0.1, are multiplied by their common denominator.
    """
    coefficients = {index: value for (name, index), value in atom.form.items() if name == "Y"}
    scale = Fraction(1)
    if any(Fraction(_nearest(value)) != value for value in coefficients.values()):
        scale = Fraction(math.lcm(*(value.denominator for value in coefficients.values())))
    row = [0.0] * outputs
    for index, value in coefficients.items():
        row[index] = _nearest(value * scale)
        if Fraction(row[index]) != value * scale:
            raise _error(atom.line, f"the coefficient of Y_{index} has more digits than float64")
    return tuple(row), _rounded(atom.form.get(ONE, Fraction(0)) * scale, -1)


def _error(line: int, what: str) -> BuffetError:
    return BuffetError(f"line {line}: {what}" if line else what)
