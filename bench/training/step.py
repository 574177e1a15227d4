"""`bench-train`: how long a step takes with batches at hand and with the loader, and what the exact batch costs."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.loaders.ours import make_loader
from bench.measure import Progress, Rate, Rounds, Start, interval_of_mean, measure_in_rounds, no_progress
from errors import UserError
from models.losses import nt_xent
from pipelines.batch import Batch
from pipelines.loader import Loader
from pipelines.samples.index import Index
from pipelines.samples.order import steps_per_epoch
from pipelines.sources import load_index
from train.config.pretraining import Config
from train.distributed.world import World, described_world
from train.pretrain import Pretraining
from train.steps.contrastive import ContrastiveStep
from train.steps.memory import free_bytes, with_graph_bytes
from train.steps.stopwatch import Stopwatch

Row = dict[str, Any]

_CACHED: Final = 2
"""Batches at hand, which take turns."""

_SHARE_OF_FREE_MEMORY: Final = 0.7
"""What the whole batch's graph may take before the plain step is left out: a CPU out of memory kills the process."""

_SETTLING_STEPS: Final = 2
"""First steps of a round with the loader, whose batches were made before it began."""


@dataclass(frozen=True, kw_only=True)
class StepSettings(Rounds):
    """How long to measure.

    Attributes:
        warmup_s: see `Rounds`.
        steps_per_sync: on a GPU, steps between two looks at the clock, which wait for it; nothing in between does.
        comparisons: whether to time what the exact batch is compared with, too.
    """

    warmup_s: float = 1.0
    steps_per_sync: int = 8
    comparisons: bool = True


def bench_train(
    config: Config, precisions: Sequence[str], settings: StepSettings, progress: Progress = no_progress
) -> list[Row]:
    """Measure the training step as configured, in each precision; what was found in each, see `StepBench.run`.

    Raises:
        UserError: the data or the device cannot be used.
    """
    world = described_world(config.train.device)
    if world.world_size > 1:
        raise UserError("bench-train measures one process: start it without torchrun")
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    index = load_index(config.data)
    steps_per_epoch(index, config.train.batch, "train.batch")  # refuses too few images
    figures = []
    for number, precision in enumerate(precisions):
        bench = StepBench(with_train(config, precision=precision), index, world, settings)

        def of_all(done: int, total: int, before: int = number) -> None:
            progress(before * total + done, len(precisions) * total)

        figures.append(bench.run(of_all))
    return figures


def cached_rate(config: Config, settings: StepSettings) -> Rate:
    """Images per second of the training step alone, on batches that are there already.

    On a CPU, steps of at most 32 images, whose rate is about that of large ones.
    """
    world = described_world(config.train.device)
    if world.device.type == "cpu":
        few = min(config.train.micro_batch, 32)
        config = with_train(config, batch=few, micro_batch=few)
    bench = StepBench(config, load_index(config.data), world, settings)
    rate = bench.time([bench.steps(bench.state.step)])[0]
    del bench
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # for whatever is measured next, in this process or beside it
    return rate


def figures_of(rates: Mapping[str, Rate], batch: int, flop_per_image: float) -> Row:
    """What follows from ways to step.

    "step_s" is the cached step's mean and interval; "optimizer_share" what the optimiser takes of it; "loader_share",
    of the time with the loader, what a cached step does not need: waiting, and on a CPU sharing the cores.

    Args:
        rates: images/s of steps on batches that are there already ("cached"), on batches of the loader ("loaded"),
            cached without the optimiser ("gradient"), and of others.
        batch: images in a step.
        flop_per_image: floating-point operations of the network, forward and backward, for both views of an image;
            what is computed a second time does not count.
    """
    cached = rates["cached"]
    step_s = interval_of_mean([batch / rate for rate in cached.images_per_s])
    return {
        "step_s": [round(edge, 5) for edge in astuple(step_s)],
        "images_per_s": {
            name: {
                "mean": round(rate.mean, 2),
                "interval": [round(edge, 2) for edge in rate.interval],
                "repeats": [round(value, 2) for value in rate.images_per_s],
            }
            for name, rate in rates.items()
        },
        "loader_share": round(1 - rates["loaded"].over(cached).mean, 4),
        "optimizer_share": round(1 - cached.over(rates["gradient"]).mean, 4),
        "flop_per_image": round(flop_per_image),
        "model_flop_per_s": round(flop_per_image * cached.mean),
    }


def with_train(config: Config, **changed: object) -> Config:
    """The same with other keys of its table `train`."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changed))  # type: ignore[arg-type]


class StepBench:
    """One precision's network, optimiser and batches, and the ways to step with them."""

    def __init__(self, config: Config, index: Index, world: World, settings: StepSettings) -> None:
        self._config, self._index, self.world, self._settings = config, index, world, settings
        torch.manual_seed(config.run.seed)
        self.state = Pretraining(config, world, max(1, len(index) // config.train.batch), fresh=True)
        with self._loader() as loader:
            self.batches = [batch.to(world.device) for batch in islice(loader, _CACHED)]
        self._waited_s, self._looped_s = 0.0, 0.0

    def run(self, progress: Progress) -> Row:
        """All figures of this precision, as a row of `bench-train` has them.

        "images_per_s" holds those of `figures_of`, and, where they were asked for, "plain" only if it fits:

        - "recomputed": cached, with recompute = "always".
        - "averaged": cached; micro-batches each with a loss of its own, averaged, as in the authors' code: another
          function, with fewer negatives.
        - "plain": cached, on the whole batch at once, without micro-batches.

        Of the time with the loader, "waited_share" is what the device waited for its next batch. "peak_memory_mib" is
        of the cached step: on a GPU what torch allocated at most, on a CPU the process's largest resident set.
        "device_memory_mib" is on a GPU what its driver says is in use, by contexts and DALI too; None on a CPU.
        """
        train = self._config.train
        peak_mib = self._peak_mib()  # first: it decides recompute = "auto" too
        ways = {
            "cached": self.steps(self.state.step),
            "loaded": self.loaded,
            "gradient": self.steps(self.state.gradient),
        }
        if self._settings.comparisons:
            ways["recomputed"] = self.steps(self._then_optimizer(self._exact(train.micro_batch, "always")))
            ways["averaged"] = self.steps(self._then_optimizer(self._averaged))
            if self._whole_batch_fits():
                ways["plain"] = self.steps(self._then_optimizer(self._exact(train.batch, "never")))
        rates = dict(zip(ways, self.time(list(ways.values()), progress), strict=True))
        on_gpu = self.world.device.type == "cuda"
        return {
            "precision": self.state.precision,
            "device": str(self.world.device),
            "batch": train.batch,
            "micro_batch": train.micro_batch,
            "recompute": self.state.contrastive.recompute,
            **figures_of(rates, train.batch, self.flop_per_image()),
            "waited_share": round(self._waited_s / self._looped_s, 5),
            "peak_memory_mib": round(peak_mib),
            "device_memory_mib": round(torch.cuda.device_memory_used(self.world.device) / 2**20) if on_gpu else None,
        }

    def time(self, ways: Sequence[Start], progress: Progress = no_progress) -> list[Rate]:
        """Time ways to step, taking turns."""
        return measure_in_rounds(ways, self._settings, progress)

    def steps(self, step: Callable[[Batch], object]) -> Start:
        """A way to step on batches that are there already."""

        def stepping() -> Generator[int]:
            number = 0
            while True:
                for _ in range(self._steps_per_look):
                    step(self.batches[number % len(self.batches)])
                    number += 1
                wait_for(self.world.device)
                yield self._steps_per_look * self._config.train.batch

        return stepping

    def flop_per_image(self) -> float:
        """Of the network, forward and backward, for both views of one image."""
        batch = self.batches[0]
        images = torch.cat([view.image[:2] for view in batch.views[:2]])
        dtype = self.state.autocast_dtype
        autocast = torch.autocast(self.world.device.type, dtype=dtype, enabled=dtype is not None)
        with FlopCounterMode(display=False) as counter, autocast:
            projection: torch.Tensor = self.state.network(images)
            torch.autograd.backward([projection.float().sum()])
        return float(counter.get_total_flops()) / 2

    def loaded(self) -> Generator[int]:
        """The training loop's own shape: the loader works ahead, a step follows each batch."""
        device, waiting, steps = self.world.device, Stopwatch(), 0
        with self._loader() as loader:
            batches = iter(loader)
            while True:
                began = time.perf_counter()
                for _ in range(self._steps_per_look):
                    with waiting.running(device):
                        batch = next(batches)
                    self.state.step(batch.to(device))
                wait_for(self.world.device)
                waited_s = waiting.take_s()
                if steps >= _SETTLING_STEPS:
                    self._waited_s += waited_s
                    self._looped_s += time.perf_counter() - began
                steps += self._steps_per_look
                yield self._steps_per_look * self._config.train.batch

    def _loader(self) -> Loader:
        return make_loader(self._index, self._config, self._config.train.batch, self.world.device)

    def _exact(self, micro_batch: int, recompute: Literal["always", "never"]) -> ContrastiveStep:
        exact = copy.copy(self.state.contrastive)
        exact.micro_batch, exact.recompute = micro_batch, recompute
        return exact

    def _averaged(self, batch: Batch) -> None:
        """Losses of small batches, averaged: gradient accumulation as it is usually written."""
        train = self._config.train
        self.state.network.zero_grad()
        count = train.batch // train.micro_batch
        for start in range(0, train.batch, train.micro_batch):
            first, second = self.state.contrastive.embed(batch, slice(start, start + train.micro_batch))
            loss = nt_xent(first, second, self._config.loss.temperature) / count
            self.state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _then_optimizer(self, gradient: Callable[[Batch], object]) -> Callable[[Batch], None]:
        state = self.state

        def step(batch: Batch) -> None:
            gradient(batch)
            state.scaler.unscale_(state.optimizer)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.scheduler.step()

        return step

    def _whole_batch_fits(self) -> bool:
        train = self._config.train
        own, rows = self.state.contrastive, slice(0, train.micro_batch)
        _, graph_bytes = with_graph_bytes(own.network, lambda: own.embed(self.batches[0], rows), self.world.device)
        return graph_bytes * (train.batch // train.micro_batch) < _SHARE_OF_FREE_MEMORY * free_bytes(self.world)

    def _peak_mib(self) -> float:
        """Of two cached steps."""
        device = self.world.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the largest resident set, VmHWM
        for batch in self.batches:
            self.state.step(batch)
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) / 2**20
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    @property
    def _steps_per_look(self) -> int:
        return self._settings.steps_per_sync if self.world.device.type == "cuda" else 1


def wait_for(device: torch.device) -> None:
    """Until the device has done what is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
