"""The checker on its own: its arithmetic against mpmath, its independence, and what it says of bad files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import buffet
import buffet_checker
from buffet.certificates.certificate import Question, certify, certify_to
from buffet_checker.balls import Ball
from buffet_checker.functions import FUNCTIONS
from buffet_checker.network import Checkpoint
from buffet_checker.regions import Ball as LpRegion
from certificate_campaign import outcome, write_variant
from corruptions import CORRUPTIONS, Opened, corrupted, damaged

SOURCES = Path(buffet_checker.__file__).parent
TEXT = "a gripping film"
ALLOWED = {"numpy", "buffet_checker", *sys.stdlib_module_names}
mpmath.mp.dps = 50
EXACT = {
    "relu": lambda x: max(x, mpmath.mpf(0)),
    "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
    "gelu_tanh": lambda x: (
        x * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf(0.044715) * x**3))) / 2
    ),
    "tanh": mpmath.tanh,
    "exp": mpmath.exp,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "square": lambda x: x * x,
}


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> tuple[buffet.Model, bytes, Checkpoint]:
    """A certificate of a small checkpoint, and what it is about."""
    model = buffet.load(write_variant(tmp_path_factory.mktemp("m") / "model", {"layer_norm": "no_var"}, 1))
    ball = buffet.LpBall(model.embed(TEXT), [2], 2, 0.01)
    _, content, checkpoint = certify(model, [Question.of(model, ball)], buffet.METHODS["lse"], text=TEXT)
    return model, content, checkpoint


# --- independence -------------------------------------------------------------------------------------------


def test_the_checker_imports_nothing_of_the_engine() -> None:
    for source in SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            else:
                continue
            assert {name.split(".")[0] for name in names} <= ALLOWED, source.name


def test_the_checker_runs_without_torch_and_buffet(
    proof: tuple[buffet.Model, bytes, Checkpoint], tmp_path: Path
) -> None:
    model, content, _ = proof
    (tmp_path / "proof.safetensors").write_bytes(content)
    script = (
        "import sys\n"
        "for name in ('torch', 'buffet', 'safetensors', 'scipy'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(SOURCES.parent)!r})\n"
        "from buffet_checker.__main__ import main\n"
        f"sys.exit(main([{str(tmp_path / 'proof.safetensors')!r}, '--model', {str(model.directory)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('accepted · label 0 "no" · 1 claim · ')
    assert "row 2 · L2 ball of 0.01 · margin" in done.stdout
    assert 'Proven: in "a gripping film", moving the embedding of "gripping" (row 2) by any' in done.stdout


# --- arithmetic ---------------------------------------------------------------------------------------------

numbers = st.floats(-40, 40).filter(lambda x: x == 0 or abs(x) > 1e-100)


@settings(max_examples=60, deadline=None)
@given(numbers, numbers)
def test_balls_contain_the_exact_results(a: float, b: float) -> None:
    x, y = Ball.exact(a), Ball.exact(b)
    ma, mb = mpmath.mpf(a), mpmath.mpf(b)
    cases = [
        (x + y, ma + mb),
        (x - y, ma - mb),
        (x * y, ma * mb),
        ((x * y).exp(), mpmath.exp(ma * mb)) if abs(a * b) < 600 else (x, ma),
        (x.tanh(), mpmath.tanh(ma)),
        (x.erfc(), mpmath.erfc(ma)),
    ]
    if abs(b) > 1e-6:
        cases.append((x / y, ma / mb))
    if a > 1e-6:
        cases += [(x.log(), mpmath.log(ma)), (x.sqrt(), mpmath.sqrt(ma))]
    for ball, exact in cases:
        assert abs(exact - mpmath.mpf(float(ball.mid))) <= mpmath.mpf(float(ball.rad))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lines_are_valid_whatever_their_slope(name: str) -> None:
    rng = np.random.default_rng(0)
    f = FUNCTIONS[name]
    for _ in range(25):
        low = rng.uniform(0.01, 3) if f.positive else rng.uniform(-6, 5)
        high = low + 10 ** rng.uniform(-9, 0.8)
        x = rng.uniform(low, high)
        y = float(EXACT[name](mpmath.mpf(x)))
        at = rng.uniform(low, high)
        slope = rng.choice([float(mpmath.diff(EXACT[name], at)), rng.normal(), 0.0])
        ends = [np.array([v]) for v in (x, y, low, high, slope)]
        with np.errstate(all="ignore"):
            below, above = (float(f.intercept(*ends, side)[0]) for side in (1, -1))
            least, greatest = (float(v[0]) for v in f.image(np.array([low]), np.array([high])))
        gaps = []
        for point in [low, high, *rng.uniform(low, high, 8).tolist()]:
            value = EXACT[name](mpmath.mpf(point))
            assert least <= value <= greatest
            gaps.append(value - mpmath.mpf(y) - mpmath.mpf(slope) * (mpmath.mpf(point) - mpmath.mpf(x)))
        assert mpmath.mpf(below) <= min(gaps)
        assert max(gaps) <= mpmath.mpf(above)
        if high - low < 1e-3:  # and sharp, as far as the sampled points can tell
            assert (
                above - below < float(max(gaps) - min(gaps)) + 10 * (1 + abs(y)) * (high - low) ** 2 + 1e-12
            )


def norm(x: np.ndarray, q: mpmath.mpf) -> mpmath.mpf:
    """mpmath's own takes whole q only."""
    sizes = [abs(mpmath.mpf(v)) for v in x.tolist()]
    return max(sizes) if q == mpmath.inf else mpmath.fsum(v**q for v in sizes) ** (1 / q)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, np.inf])
def test_the_minimum_over_a_ball_is_a_lower_bound(p: float) -> None:
    rng = np.random.default_rng(1)
    form = rng.normal(size=(2, 7, 5)) * 10.0 ** rng.integers(-120, 10, size=(2, 1, 5))
    found = LpRegion(np.array([0, 1]), -np.ones((2, 7)), np.ones((2, 7)), p, 0.3).minimum(form)
    q = mpmath.inf if p == 1 else mpmath.mpf(1) if np.isinf(p) else mpmath.mpf(p) / (mpmath.mpf(p) - 1)
    for row in range(5):
        exact = -mpmath.mpf(0.3) * sum(norm(form[d, :, row], q) for d in range(2))
        assert mpmath.mpf(float(found[row])) <= exact
        assert float(found[row]) >= float(exact) * (1 + 1e-12) - 1e-140


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_no_corrupted_certificate_is_accepted(
    proof: tuple[buffet.Model, bytes, Checkpoint], name: str
) -> None:
    _, content, checkpoint = proof
    rng = np.random.default_rng(2)
    assert outcome(Opened.of(content).close(), checkpoint) == "accepted"
    for _ in range(4):
        assert outcome(corrupted(content, name, rng), checkpoint) != "accepted"


def test_no_damaged_file_is_accepted(proof: tuple[buffet.Model, bytes, Checkpoint]) -> None:
    _, content, checkpoint = proof
    rng = np.random.default_rng(3)
    for _ in range(40):
        assert outcome(damaged(content, rng), checkpoint) != "accepted"


def test_flipped_bytes_never_crash_the_checker(proof: tuple[buffet.Model, bytes, Checkpoint]) -> None:
    """They may even leave a proof: a box that is wider, another slope. Whatever they do, it is judged."""
    _, content, checkpoint = proof
    rng = np.random.default_rng(4)
    header = 8 + int.from_bytes(content[:8], "little")
    for place in [*rng.integers(header, size=40).tolist(), *rng.integers(header, len(content), 10).tolist()]:
        changed = bytearray(content)
        changed[place] = rng.integers(256)
        assert outcome(bytes(changed), checkpoint)


def test_a_stop_may_be_named_twice_but_has_to_keep_a_form(
    proof: tuple[buffet.Model, bytes, Checkpoint],
) -> None:
    _, content, checkpoint = proof
    opened = Opened.of(content)
    derivation = next(d for d in opened.claim["derivations"] if d.get("stops"))
    derivation["stops"].append(derivation["stops"][0])
    assert outcome(opened.close(), checkpoint) == "accepted"
    derivation["stops"][-1] = derivation["nodes"][0]
    assert f"node {derivation['nodes'][0]} keeps no form" in outcome(opened.close(), checkpoint)


def test_a_rejection_names_the_first_node_that_fails(
    proof: tuple[buffet.Model, bytes, Checkpoint],
) -> None:
    _, content, checkpoint = proof
    opened = Opened.of(content)
    name = min((k for k in opened.tensors if ".box." in k), key=lambda k: int(k.split(".")[2]))
    opened.tensors[name][:] = 0
    assert f"node {name.split('.')[2]} (layer 0 queries)" in outcome(opened.close(), checkpoint)


def test_what_cannot_be_judged_is_bad_input(tmp_path: Path) -> None:
    directory = write_variant(tmp_path / "model", {"layer_norm": "no_var"}, 1)
    with pytest.raises(buffet_checker.BadInputError, match="cannot be read"):
        buffet_checker.check(tmp_path / "absent", directory)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(buffet_checker.BadInputError, match="not a complete safetensors file"):
        buffet_checker.check(tmp_path / "empty", directory)
    with pytest.raises(buffet_checker.BadInputError, match="no certificate"):
        buffet_checker.check(directory / "model.safetensors", directory)
    for path in (directory, "a\0b"):
        with pytest.raises(buffet_checker.BadInputError, match="cannot be read"):
            buffet_checker.check(path, directory)
    (directory / "config.json").write_text('{"hidden_act": ["relu"]}')
    with pytest.raises(buffet_checker.BadInputError, match="hidden_act"):
        buffet_checker.check(tmp_path / "empty", directory)


def test_what_cannot_be_certified_is_not_written(tmp_path: Path) -> None:
    model = buffet.load(write_variant(tmp_path / "model", {"layer_norm": "no_var"}, 1))
    region = buffet.LpBall(model.embed("a gripping film"), [2], 2)
    with pytest.raises(buffet.BuffetError, match="is not proven"):
        certify_to(tmp_path / "proof", model, region, 100.0, "baseline")
    assert not list(tmp_path.glob("*proof*"))
