"""What a process has asked PyTorch for changes no bound, and is as before afterwards."""

from __future__ import annotations

import pytest
import torch

import buffet
from buffet.errors import BuffetError
from buffet.propagation.rounding import typical
from buffet.system import precision
from buffet.system.precision import full_precision


@pytest.fixture
def asked():
    """Products of float32 in less than float32, as programs ask for to be quick."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield
    torch.set_float32_matmul_precision(before)


def _settings() -> tuple[object, ...]:
    backends = torch.backends
    return (
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
        *(getattr(p.matmul, "fp32_precision", None) for p in (backends.cuda, backends.mkldnn)),
    )


def test_products_are_whole_inside_and_as_asked_afterwards(asked: None) -> None:
    before = _settings()
    a, b = torch.randn(2, 64, 64).unbind()
    with full_precision():
        assert (a @ b).dtype == torch.float32
        assert ((a @ b).double() - a.double() @ b.double()).abs().max() < 64 * 2**-23 * 64
    assert (a @ b).dtype == torch.bfloat16
    assert _settings() == before


def test_products_stay_whole_until_the_last_thread_is_done(asked: None) -> None:
    before = _settings()
    first, second = full_precision(), full_precision()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.backends.mkldnn.matmul.fp32_precision == precision.WHOLE
    second.__exit__(None, None, None)
    assert _settings() == before


@pytest.mark.parametrize("name", precision.ALLOW_LESS)
def test_what_cannot_be_undone_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "BF16")
    with pytest.raises(BuffetError, match=f"{name}=BF16"):
        buffet.verify(buffet.load(), buffet.LpBall(torch.zeros(3, 128), words=[1], p=2), eps=0.1)
    monkeypatch.setenv(name, "STRICT")
    with full_precision():
        pass


def test_sums_stay_within_what_is_allowed_for_them() -> None:
    x, y = (torch.rand(4, 64, 512, generator=torch.Generator().manual_seed(s)) + 0.5 for s in range(2))
    exact = x.double() @ y.double().mT
    with full_precision():
        found = x @ y.mT
    assert ((found - exact).abs() <= typical(512) * torch.finfo(torch.float32).eps * exact).all()


def _answers() -> list[float]:
    model = buffet.load()
    text = "a gripping , moving film"
    ball = buffet.LpBall(model.embed(text), words=[2], p=2)
    swaps = buffet.substitutions(
        model, text, swap={"gripping": ["dull"], "film": ["movie", "mess"]}, at_most=1
    )
    found = [
        buffet.verify(model, ball, eps=0.3, method=method, best=True).margin for method in ("lse", "backward")
    ]
    return [*found, buffet.radius(model, ball, method="lse").certified, swaps.verify().margin]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return _answers()


def test_the_setting_of_older_versions_is_made_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(precision, "_products", lambda: (precision._OneSetting(),))
    torch.set_float32_matmul_precision("medium")
    with full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision(before)


def test_answers_do_not_depend_on_what_is_asked_for(plain: list[float], asked: None) -> None:
    assert _answers() == plain
