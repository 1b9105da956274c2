"""A small transformer that balances a pendulum, and what can be proven of it.

It reads the last four states of the pendulum (angle from upright, angular velocity) and gives one torque. It
is trained in seconds to imitate a linear controller, exported to ONNX, and read back as any network is.

    python docs/controller.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import buffet

STEPS, STEP, GAIN = 4, 0.05, (3.0, 1.0)  # states in a history, seconds between them, torque per state


class Controller(nn.Module):
    """One block of attention over the history; the torque is read from the last state."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(2, width), nn.Parameter(torch.randn(STEPS, width) / 4)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        x = self.embed(states) + self.positions
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head((x + self.think(x))[:, -1])


def histories(count: int, generator: torch.Generator) -> Tensor:
    """Pendulums that start anywhere near upright and are pushed at random: count × STEPS × 2."""
    angle, speed = ((2 * torch.rand(count, generator=generator) - 1) * size for size in (0.6, 1.0))
    states = []
    for _ in range(STEPS):
        states.append(torch.stack([angle, speed], -1))
        torque = 2 * torch.rand(count, generator=generator) - 1
        speed = speed + STEP * (9.81 * angle.sin() + torque)
        angle = angle + STEP * speed
    return torch.stack(states, 1)


def trained(seed: int = 0, steps: int = 400) -> Controller:
    """A controller that imitates ``torque = −3·angle − speed``."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Controller()
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        states = histories(256, generator)
        wanted = -(states[:, -1] * torch.tensor(GAIN)).sum(-1, keepdim=True)
        loss = (model(states) - wanted).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        decay.step()
    return model.eval()


def export(model: Controller, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.zeros(1, STEPS, 2),), str(path), dynamo=False)
    return path


def main(directory: Path) -> None:
    model = buffet.load(export(trained(), directory / "controller.onnx"))
    assert isinstance(model, buffet.OnnxModel)
    print(model)

    # The pendulum leans to the right by 0.2 to 0.24 rad and hardly moves, in all four states.
    low, high = torch.tensor([0.2, -0.02]).repeat(STEPS), torch.tensor([0.24, 0.02]).repeat(STEPS)
    region = model.box(low, high)

    # The torque pushes it back, but not too hard.
    for bounds in ((-1.1, -0.3), (-0.7, -0.6)):
        property = buffet.Property.within([bounds[0]], [bounds[1]])
        answer = buffet.verify(model, region, property=property)
        print(f"torque within {bounds}: {answer.verdict}, margins {answer.margins[0].tolist()}")
        point = answer.counterexamples[0]
        if point is not None:
            torque = float(model.program64.evaluate(point.double()))
            print(f"  the history {model.flat_of(point).tolist()} gives {torque}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
