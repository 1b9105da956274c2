"""The loop: epochs of steps, the best epoch kept, a snapshot now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from buffet.errors import BuffetError
from buffet.training.corpus import Batch, Sample, make_batches
from buffet.training.network import Trainable
from buffet.training.results import TrainProgress
from buffet.training.settings import TrainSettings
from buffet.training.state import BROKEN, Position, Snapshot, Store

REPORT_EVERY = 50  # steps


class Trainer:
    """One run: the network, its optimiser and the source of all its random numbers.

    These three, the best weights so far and `at` are all the state there is; `snapshot` holds it whole.
    """

    def __init__(
        self,
        network: Trainable,
        rows: int,
        settings: TrainSettings,
        store: Store,
        progress: Callable[[TrainProgress], None] | None = None,
    ) -> None:
        self.network, self.settings, self.store = network, settings, store
        self.progress = progress or (lambda _: None)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.epoch_start = self.generator.get_state()  # from which the order of the batches follows
        self.steps = settings.epochs * math.ceil(rows / settings.batch)
        self.optimiser = _optimiser(network, settings)
        self.at = Position()
        self.best: dict[str, Tensor] = {}
        self.clock = self.saved = time.monotonic()

    def fit(self, train_part: Sequence[Sample], dev_part: Sequence[Sample]) -> Position:
        """Optimise from `at` to the end, and leave the weights of the best epoch in the network."""
        size, pad = self.settings.batch, self.network.pad
        dev = make_batches(dev_part, size, pad)
        while not self.finished:
            now = self.generator.get_state()
            self.generator.set_state(self.epoch_start)
            batches = make_batches(train_part, size, pad, self.generator)
            if self.at.batch:
                self.generator.set_state(now)
            for batch in batches[self.at.batch :]:
                self.take_step(batch)
            self.end_epoch(self.network.score(dev), len(batches))
        for name, tensor in self.network.tensors.items():
            tensor.data.copy_(self.best[name])
        return self.at

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or the last ones brought no improvement."""
        done = len(self.at.losses)
        return done >= self.settings.epochs or (done - self.at.best_epoch >= self.settings.patience)

    def take_step(self, batch: Batch) -> None:
        """One batch: gradient, clipping, update; then whatever is due."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate
        self.optimiser.zero_grad()
        loss = self.network.loss(batch, self.settings, self.generator, self.at.step / self.steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.tensors.values(), self.settings.clip)
        self.optimiser.step()
        total = self.at.total + loss.item()
        if not math.isfinite(total):
            self.store.discard()
            raise BuffetError(
                f"training diverged in epoch {self.at.epoch}: lower the rate ({self.settings.rate})"
            )
        self.at = replace(self.at, batch=self.at.batch + 1, step=self.at.step + 1, total=total)
        if self.at.batch % REPORT_EVERY == 0:
            self.report(total / self.at.batch)
        if time.monotonic() - self.saved >= 60 * self.settings.save_minutes:
            self.save()

    def end_epoch(self, accuracy: float, batches: int) -> None:
        """Record how the epoch went and turn to the next."""
        loss = self.at.total / batches
        self.report(loss, accuracy)
        if accuracy > max(self.at.accuracies, default=-1.0):
            self.best = {name: tensor.detach().clone() for name, tensor in self.network.tensors.items()}
        self.at = replace(
            self.at,
            epoch=self.at.epoch + 1,
            batch=0,
            total=0.0,
            losses=(*self.at.losses, loss),
            accuracies=(*self.at.accuracies, accuracy),
        )
        self.epoch_start = self.generator.get_state()
        self.save()

    @property
    def rate(self) -> float:
        """The learning rate of the next step: up in a straight line, then down to 0 in a straight line."""
        rising = max(1, round(self.settings.warmup * self.steps))
        if self.at.step < rising:
            return self.settings.rate * (self.at.step + 1) / rising
        return self.settings.rate * max(0.0, (self.steps - self.at.step) / max(1, self.steps - rising))

    def report(self, loss: float, dev_accuracy: float | None = None) -> None:
        self.tick()
        at, epochs = self.at, self.settings.epochs
        self.progress(
            TrainProgress(
                at.epoch,
                epochs,
                at.step,
                self.steps,
                loss,
                self.rate,
                at.seconds,
                dev_accuracy,
                self.network.measure,
            )
        )

    def tick(self) -> None:
        """Add the time since the last call to the time of the run."""
        now = time.monotonic()
        self.at, self.clock = replace(self.at, seconds=self.at.seconds + now - self.clock), now

    def save(self) -> None:
        self.tick()
        self.store.save(self.snapshot())
        self.saved = time.monotonic()

    def snapshot(self) -> Snapshot:
        """Everything the rest of the run depends on."""
        tensors = {
            "generator.now": self.generator.get_state(),
            "generator.epoch_start": self.epoch_start,
            **{f"best.{name}": tensor for name, tensor in self.best.items()},
        }
        for name, tensor in self.network.tensors.items():
            tensors[f"now.{name}"] = tensor.detach()
            for moment, value in self.optimiser.state[tensor].items():
                tensors[f"{moment}.{name}"] = value
        return Snapshot(self.at, tensors)

    def restore(self, snapshot: Snapshot) -> None:
        """Resume from a snapshot of the same run; one with other tensors is refused."""
        try:
            self._take(snapshot)
        except BROKEN as error:
            raise self.store.broken(error) from None

    def _take(self, snapshot: Snapshot) -> None:
        at, sizes = snapshot.at, {name: tensor.shape for name, tensor in self.network.tensors.items()}
        state = self.generator.get_state()
        wanted = {f"generator.{name}": (state.shape, state.dtype) for name in ("now", "epoch_start")}
        kinds = ["now", *["best"] * bool(at.losses), *["exp_avg", "exp_avg_sq"] * bool(at.step)]
        wanted |= {f"{kind}.{name}": (size, torch.float32) for kind in kinds for name, size in sizes.items()}
        if at.step:
            wanted |= {f"step.{name}": (torch.Size(), torch.float32) for name in sizes}
        found = {name: (tensor.shape, tensor.dtype) for name, tensor in snapshot.tensors.items()}
        if different := sorted(
            name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
        ):
            raise ValueError(f"{different[0]} is not what it was")
        groups: dict[str, dict[str, Tensor]] = {}
        for key, value in snapshot.tensors.items():
            group, _, name = key.partition(".")
            groups.setdefault(group, {})[name] = value
        for name in ("epoch_start", "now"):
            self.generator.set_state(groups["generator"][name])  # which refuses what is no state
        self.epoch_start = groups["generator"]["epoch_start"]
        self.best = groups.get("best", {})
        for name, tensor in self.network.tensors.items():
            tensor.data.copy_(groups["now"][name])
            self.optimiser.state[tensor] = {
                moment: values[name]
                for moment, values in groups.items()
                if moment not in ("generator", "best", "now")
            }
        self.at = snapshot.at


def _optimiser(network: Trainable, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW; only matrices decay: embeddings set the unit of radii, a LayerNorm at 0 blocks the rest."""
    decays = {
        name: tensor.ndim == 2 and not name.startswith("bert.embeddings")
        for name, tensor in network.tensors.items()
    }
    groups = [
        {
            "params": [tensor for name, tensor in network.tensors.items() if decays[name] == decay],
            "weight_decay": settings.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=settings.rate, fused=True)
