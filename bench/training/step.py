"""`bench-train`: times a step on batches in memory and with the loader, and measures the cost of the exact batch."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.loaders.ours import make_endless_loader
from bench.measure import (
    Progress,
    Rate,
    Rounds,
    Start,
    interval_of_mean,
    measure_in_rounds,
    no_progress,
    require_images,
)
from errors import UserError
from pipelines.batch import Batch
from pipelines.loader import Loader
from pipelines.samples.index import Index
from pipelines.sources import load_index
from train.config.pretraining import Config
from train.distributed.world import World, described_world
from train.pretrain import Pretraining
from train.steps.exact import ExactStep
from train.steps.memory import free_bytes, with_graph_bytes
from train.steps.stopwatch import Stopwatch
from train.trainer import set_threads

Row = dict[str, Any]

_CACHED: Final = 2
"""Batches in memory that are used in turn."""

_SHARE_OF_FREE_MEMORY: Final = 0.7
"""Share of the free memory that the graph of a whole batch may take, so that the plain step is tried.

On a CPU, running out of memory kills the process.
"""

_SETTLING_STEPS: Final = 2
"""First steps of a round with the loader that are not timed: their batches were made before the round."""


@dataclass(frozen=True, kw_only=True)
class StepSettings(Rounds):
    """How long to measure.

    Attributes:
        warmup_s: see `Rounds`.
        steps_per_sync: on a GPU, steps between two readings of the clock. Only the readings wait for the GPU.
        comparisons: whether to time the alternatives to the exact batch too.
    """

    warmup_s: float = 1.0
    steps_per_sync: int = 8
    comparisons: bool = True


def bench_train(
    config: Config, precisions: Sequence[str], settings: StepSettings, progress: Progress = no_progress
) -> list[Row]:
    """Measure the training step as configured, in each precision: a row of `StepBench.run` for each.

    Raises:
        UserError: the data or the device cannot be used.
    """
    world = described_world(config.train.device)
    if world.world_size > 1:
        raise UserError("bench-train measures one process: start it without torchrun")
    index = load_index(config.data)
    require_images(len(index), config.train.batch, index.root, "train.batch")
    figures = []
    for number, precision in enumerate(precisions):
        bench = StepBench(with_train(config, precision=precision), index, world, settings)

        def of_all(done: int, total: int, before: int = number) -> None:
            progress(before * total + done, len(precisions) * total)

        figures.append(bench.run(of_all))
    return figures


def cached_rate(config: Config, settings: StepSettings) -> Rate:
    """Images per second of the training step alone, on batches in memory.

    On a CPU, steps of at most 32 images are timed; their rate is about that of large steps.
    """
    world = described_world(config.train.device)
    if world.device.type == "cpu":
        few = min(max(config.train.micro_batch, 2), 32)
        config = with_train(config, batch=few, micro_batch=few)
    bench = StepBench(config, load_index(config.data), world, settings)
    rate = bench.time([bench.steps(bench.state.step)])[0]
    del bench
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # frees the memory for the next measurement
    return rate


def figures_of(rates: Mapping[str, Rate], batch: int, flop_per_image: float) -> Row:
    """Figures derived from the rates of several ways to step.

    "step_s" is the cached step's mean and interval. "optimizer_share" is the optimiser's share of it. "loader_share" is
    the share of a loaded step's time that a cached step does not need: it waits for data, and on a CPU it shares the
    cores with the loader.

    Args:
        rates: images/s of steps on batches in memory ("cached"), on batches of the loader ("loaded"), cached without
            the optimiser ("gradient"), and other ways.
        batch: images in a step.
        flop_per_image: floating-point operations of the network, forward and backward, for both views of an image,
            without those that are computed a second time.
    """
    cached = rates["cached"]
    step_s = interval_of_mean([batch / rate for rate in cached.images_per_s])
    return {
        "step_s": [round(edge, 5) for edge in step_s],
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
    """The configuration with some keys of its table `train` changed."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changed))  # type: ignore[arg-type]


class StepBench:
    """Network, optimiser and batches of one precision, and the ways to step with them."""

    def __init__(self, config: Config, index: Index, world: World, settings: StepSettings) -> None:
        self._config, self._index, self.world, self._settings = config, index, world, settings
        set_threads(config.train.threads, world)
        require_images(len(index), config.train.batch, index.root, "train.batch")
        torch.manual_seed(config.run.seed)
        steps_per_epoch = len(index) // config.train.batch
        self.state = Pretraining(config, world, steps_per_epoch, fresh=True)
        with self._loader() as loader:
            self.batches = [batch.to(world.device) for batch in islice(loader, _CACHED)]
        self._waited_s, self._looped_s = 0.0, 0.0

    def run(self, progress: Progress) -> Row:
        """Measure all figures of this precision, for a row of `bench-train`.

        "images_per_s" holds the rates that `figures_of` reads and, with `comparisons`, three more:

        - "recomputed": cached, with recompute = "always".
        - "averaged": cached, with the mean of the losses of the micro-batches, as in the authors' code. This is another
          loss, with fewer negatives.
        - "plain": cached, on the whole batch at once, without micro-batches; only if it fits into memory.

        "waited_share" is the share of the time with the loader in which the device waited for a batch.
        "peak_memory_mib" belongs to the cached step: on a GPU torch's largest allocation, on a CPU the process's
        largest resident set. "device_memory_mib" is the memory in use that the GPU's driver reports, contexts and DALI
        included; None on a CPU.
        """
        train = self._config.train
        peak_mib = self._peak_mib()  # first, since it also decides recompute = "auto"
        ways = {
            "cached": self.steps(self.state.step),
            "loaded": self.loaded,
            "gradient": self.steps(self.state.gradient),
        }
        if self._settings.comparisons:
            ways["recomputed"] = self.steps(self._with_gradient(self._exact(train.micro_batch, "always")))
            ways["averaged"] = self.steps(self._with_gradient(self._averaged))
            if self._whole_batch_fits():
                ways["plain"] = self.steps(self._with_gradient(self._exact(train.batch, "never")))
        rates = dict(zip(ways, self.time(list(ways.values()), progress), strict=True))
        return {
            "precision": self.state.precision,
            "device": str(self.world.device),
            "batch": train.batch,
            "micro_batch": train.micro_batch,
            "recompute": self.state.exact.recompute,
            **figures_of(rates, train.batch, self.flop_per_image()),
            "waited_share": round(self._waited_s / self._looped_s, 5),
            "peak_memory_mib": round(peak_mib),
            "device_memory_mib": _used_mib(self.world.device),
        }

    def time(self, ways: Sequence[Start], progress: Progress = no_progress) -> list[Rate]:
        """Time several ways to step, in turn."""
        return measure_in_rounds(ways, self._settings, progress)

    def steps(self, step: Callable[[Batch], object]) -> Start:
        """An iterator for `time` that takes these steps, on batches in memory."""

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
        """Floating-point operations of the network, forward and backward, for both views of one image."""
        batch = self.batches[0]
        images = torch.cat([view.image[:2] for view in batch.views[:2]])
        dtype = self.state.autocast_dtype
        autocast = torch.autocast(self.world.device.type, dtype=dtype, enabled=dtype is not None)
        with FlopCounterMode(display=False) as counter, autocast:
            projection: torch.Tensor = self.state.network(images)
            torch.autograd.backward([projection.float().sum()])
        return float(counter.get_total_flops()) / 2

    def loaded(self) -> Generator[int]:
        """Steps as in the training loop: the loader works ahead, and each batch is one step."""
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
        return make_endless_loader(self._index, self._config, self._config.train.batch, self.world.device)

    def _exact(self, micro_batch: int, recompute: Literal["always", "never"]) -> ExactStep[Batch]:
        exact = copy.copy(self.state.exact)
        exact.micro_batch, exact.recompute = micro_batch, recompute
        return exact

    def _averaged(self, batch: Batch) -> None:
        """Backward passes of the losses of small batches, as in the usual gradient accumulation."""
        train, exact = self._config.train, self.state.exact
        self.state.network.zero_grad()
        count = train.batch // train.micro_batch
        for start in range(0, train.batch, train.micro_batch):
            loss = exact.loss(exact.embed(batch, slice(start, start + train.micro_batch))) / count
            self.state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _with_gradient(self, gradient: Callable[[Batch], object]) -> Callable[[Batch], object]:
        """The optimiser step with another function for the gradient."""
        state = copy.copy(self.state)
        state.gradient = gradient  # type: ignore[method-assign,assignment]
        return state.step

    def _whole_batch_fits(self) -> bool:
        train = self._config.train
        own, rows = self.state.exact, slice(0, train.micro_batch)
        _, graph_bytes = with_graph_bytes(own.network, lambda: own.embed(self.batches[0], rows), self.world.device)
        return graph_bytes * (train.batch // train.micro_batch) < _SHARE_OF_FREE_MEMORY * free_bytes(self.world)

    def _peak_mib(self) -> float:
        """Peak memory of two cached steps, in MiB."""
        # On a CPU from /proc: psutil lacks the largest resident set on Linux, and cannot reset it.
        device = self.world.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
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
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _used_mib(device: torch.device) -> int | None:
    """Memory of a GPU that is in use, by this process and others; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return round((total - free) / 2**20)
