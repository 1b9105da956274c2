"""auto_LiRPA (0.7 or later), if it happens to be importable: its documented interface and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from buffet.errors import BuffetError
from buffet.lab.bench.cases import BenchCase
from buffet.lab.peers.plain import PlainNetwork

OLDEST = (0, 7)


@dataclass(frozen=True)
class AutoLirpa:
    """Bounds by `BoundedModule.compute_bounds`; the module is traced once, outside of what is timed."""

    package: ModuleType

    def method_for(self, case: BenchCase) -> str | None:
        chosen = case.chosen
        if case.words > 1 or chosen.window is not None:
            return None
        if chosen.optimiser.learns:
            return None if chosen.optimiser.learns_boxes else "CROWN-Optimized"
        return {"interval": "IBP", "forward": "forward", "backward": "CROWN"}.get(chosen.propagation)

    def prepare(self, case: BenchCase, network: PlainNetwork) -> Callable[[], Tensor]:
        package, method = self.package, self.method_for(case)
        still = torch.zeros(1, network.place.shape[1], device=network.rows.device)
        options = {
            "conv_mode": "matrix",  # attention scores have four axes like images, but are none
            "fixed_reducemax_index": True,  # softmax is shifted by one and the same score
            "optimize_bound_args": {"iteration": case.chosen.steps},
        }
        bounded = package.BoundedModule(network, still, bound_opts=options, device=str(still.device))
        ball = package.PerturbationLpNorm(norm=2.0, eps=case.eps)
        x = package.BoundedTensor(still, ball)

        def run() -> Tensor:
            # With gradients only where they are needed, as their documentation advises.
            with torch.set_grad_enabled(method == "CROWN-Optimized"):
                lower, _ = bounded.compute_bounds(x=(x,), method=method, bound_upper=False)
            return lower.detach()[0]

        return run


def peer() -> AutoLirpa:
    """The installed package, or a clear message."""
    try:
        import auto_LiRPA
    except ImportError as error:
        raise BuffetError(
            f"--peer: auto_LiRPA cannot be imported ({error}); install version 0.7 or later beside buffet"
        ) from None
    found = str(getattr(auto_LiRPA, "__version__", "0"))
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        raise BuffetError(f"--peer: auto_LiRPA is version {found}; install 0.7 or later")
    return AutoLirpa(auto_LiRPA)
