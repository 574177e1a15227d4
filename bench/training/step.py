"""Times a step on batches in memory and with the loader, and measures the cost of the exact batch."""

from __future__ import annotations

import copy
import dataclasses
import resource
import time
from collections.abc import Callable, Generator, Mapping
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from peclr_dali.bench.measure import (
    Progress,
    Rate,
    Rounds,
    Start,
    interval_of_mean,
    measure_in_rounds,
    require_images,
)
from peclr_dali.bench.our_loader import make_endless_loader
from peclr_dali.bench.rows import describe_machine
from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.loader import Loader
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.config.tables import to_dict
from peclr_dali.train.distributed.world import World, described_world
from peclr_dali.train.pretrain import Pretraining
from peclr_dali.train.steps.batch_statistics import one_momentum_step
from peclr_dali.train.steps.stopwatch import Stopwatch
from peclr_dali.train.trainer import before_the_loader, set_threads

_CACHED: Final = 2
"""Batches in memory that are used in turn."""

_STEPS_PER_SYNC: Final = 4
"""On a GPU, steps between two readings of the clock. Only the readings wait for the GPU."""

_SETTLING_STEPS: Final = 2
"""First steps of a round with the loader that are not timed: their batches were made before the round."""


def bench_train(config: Config, rounds: Rounds, progress: Progress) -> dict[str, Any]:
    """Measure the training step as configured.

    Returns:
        A row of bench/results/. "precisions" holds the figures of `StepBench.run`.

    Raises:
        UserError: the data or the device cannot be used.
    """
    world = described_world(config.train.device)
    if world.world_size > 1:
        raise UserError("bench-train measures one process: start it without torchrun")
    figures = StepBench(config, load_index(config.data), world, rounds).run(progress)
    return {
        "bench": "train",
        "machine": describe_machine(),
        "settings": dataclasses.asdict(rounds),
        "config": to_dict(config),
        "precisions": [figures],
    }


def figures_of(rates: Mapping[str, Rate], batch: int, flop_per_image: float) -> dict[str, Any]:
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


class StepBench:
    """Network, optimiser and batches of one precision, and the ways to step with them."""

    def __init__(self, config: Config, index: Index, world: World, rounds: Rounds) -> None:
        self._config, self._index, self.world, self._rounds = config, index, world, rounds
        set_threads(config.train.threads, world)
        require_images(len(index), config.train.batch, index.root, "train.batch")
        torch.manual_seed(config.run.seed)
        steps_per_epoch = len(index) // config.train.batch
        self.state = Pretraining(config, world, steps_per_epoch, fresh=True)
        with self._loader() as loader:
            self.batches = [batch.to(world.device) for batch in islice(loader, _CACHED)]
        self._waited_s, self._looped_s = 0.0, 0.0

    def run(self, progress: Progress) -> dict[str, Any]:
        """Measure all figures of this precision, for a row of `bench-train`.

        "images_per_s" holds the rates that `figures_of` reads and "averaged": cached, with the mean of the losses of
        the micro-batches, as in the authors' code. This is another loss, with fewer negatives.

        "waited_share" is the share of the time with the loader in which the device waited for a batch.
        "peak_memory_mib" belongs to the cached step: on a GPU torch's largest allocation, on a CPU the process's
        largest resident set since its start. "device_memory_mib" is the memory in use that the GPU's driver reports,
        contexts and DALI included; None on a CPU.
        """
        train = self._config.train
        count = train.batch // train.micro_batch
        peak_mib = self._peak_mib()  # first, since it also measures kept_graphs
        ways = {
            "cached": self.steps(self.state.step),
            "loaded": self.loaded,
            "gradient": self.steps(self.state.gradient),
            "averaged": self.steps(self._with_gradient(self._averaged)),
        }
        with before_the_loader(self.world.device):  # as in a run
            found = measure_in_rounds(list(ways.values()), self._rounds, progress)
        rates = dict(zip(ways, found, strict=True))
        return {
            "precision": self.state.precision,
            "device": str(self.world.device),
            "batch": train.batch,
            "micro_batch": train.micro_batch,
            "recompute": f"{count - (self.state.exact.kept_graphs or 0)} of {count}",
            **figures_of(rates, train.batch, self.flop_per_image()),
            "waited_share": round(self._waited_s / self._looped_s, 5),
            "peak_memory_mib": round(peak_mib),
            "device_memory_mib": self._used_mib(),
        }

    def steps(self, step: Callable[[Batch], object]) -> Start:
        """An iterator to be timed that takes these steps, on batches in memory."""

        def stepping() -> Generator[int]:
            number = 0
            while True:
                for _ in range(self._steps_per_look):
                    step(self.batches[number % len(self.batches)])
                    number += 1
                _wait_for(self.world.device)
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
                _wait_for(self.world.device)
                waited_s = waiting.take_s()
                if steps >= _SETTLING_STEPS:
                    self._waited_s += waited_s
                    self._looped_s += time.perf_counter() - began
                steps += self._steps_per_look
                yield self._steps_per_look * self._config.train.batch

    def _loader(self) -> Loader:
        return make_endless_loader(self._index, self._config, self._config.train.batch, self.world.device)

    def _averaged(self, batch: Batch) -> None:
        """Backward passes of the losses of small batches, as in the usual gradient accumulation."""
        train, exact = self._config.train, self.state.exact
        self.state.network.zero_grad()
        count = train.batch // train.micro_batch
        # Batch norm as in the exact step: otherwise the network would be compiled again.
        with self.state.casts_once(), one_momentum_step(self.state.network, self.world, count) as add_statistics:
            for start in range(0, train.batch, train.micro_batch):
                rows = slice(start, start + train.micro_batch)
                inputs = [one[:, rows] for one in exact.loss_inputs(batch)]
                loss = exact.loss(exact.embed(batch, rows), *inputs) / count
                add_statistics()
                exact.backward(self.state.scaler.scale(loss), last=False)

    def _with_gradient(self, gradient: Callable[[Batch], object]) -> Callable[[Batch], object]:
        """The optimiser step with another function for the gradient."""
        state = copy.copy(self.state)
        state.gradient = gradient  # type: ignore[method-assign,assignment]
        return state.step

    def _peak_mib(self) -> float:
        """Peak memory of two cached steps, in MiB; on a CPU, that of the process since its start."""
        device = self.world.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for batch in self.batches:
            self.state.step(batch)
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def _used_mib(self) -> int | None:
        """Memory of a GPU that is in use, by this process and others; None on a CPU."""
        if self.world.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.world.device)
        return round((total - free) / 2**20)

    @property
    def _steps_per_look(self) -> int:
        return _STEPS_PER_SYNC if self.world.device.type == "cuda" else 1


def _wait_for(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
