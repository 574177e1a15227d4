"""Times the training step on batches in memory and with the loader."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Generator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any, Final

import torch
from rich.table import Table

from peclr_dali.bench.measure import Progress, Rounds, measure_in_rounds, require_images
from peclr_dali.bench.our_loader import make_endless_loader, name_of, where_pixels_are_made
from peclr_dali.bench.rows import Row, as_table, describe_machine
from peclr_dali.errors import UserError
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.config.tables import to_dict
from peclr_dali.train.distributed.world import World, described_world
from peclr_dali.train.pretrain import Pretraining
from peclr_dali.train.steps.stopwatch import Stopwatch
from peclr_dali.train.trainer import before_the_loader, set_threads

_IN_MEMORY: Final = 2
"""Batches in memory that are used in turn."""

_STEPS_PER_SYNC: Final = 4
"""On a GPU, steps between two readings of the clock. Only the readings wait for the GPU."""

_SETTLING_STEPS: Final = 2
"""First steps of a round with the loader of which waiting does not count: their batches were made before the round."""


def bench_train(config: Config, files: Sequence[str], rounds: Rounds, progress: Progress) -> dict[str, Any]:
    """Measure the training step as configured; `files` names what the configuration was composed from, for the row.

    Returns:
        A row of bench/results/. "in_memory" and "with_loader" are rates (`Rate.as_row`) of steps on batches in memory
        and on the loader's. In the second, "waited_share" of the time the device waited for a batch, and the process
        kept "cores_busy" cores busy. "decoder" and "views" say where the loader makes pixels. "peak_memory_mib" belongs
        to steps in memory: on a GPU torch's largest allocation, on a CPU the process's largest resident set.
        "device_memory_mib" is what the GPU's driver reports, contexts and DALI included; None on a CPU.

    Raises:
        UserError: the data or the device cannot be used.
    """
    world = described_world(config.train.device)
    if world.world_size > 1:
        raise UserError("bench-train measures one process: start it without torchrun")
    bench, device = StepBench(config, load_index(config.data), world), world.device
    with before_the_loader(device):  # as in a run
        peak_mib = bench.peak_mib()  # first, since it also decides how many graphs are kept
        in_memory, with_loader = measure_in_rounds([bench.in_memory, bench.with_loader], rounds, progress)
    micro_batches = config.train.batch // config.train.micro_batch
    return {
        "bench": "train",
        "machine": describe_machine(),
        "settings": dataclasses.asdict(rounds),
        "files": list(files),
        "config": to_dict(config),
        "device": str(device),
        "card": name_of(device),
        **bench.where,
        "precision": bench.state.precision,
        "in_memory": in_memory.as_row(),
        "with_loader": with_loader.as_row(),
        "waited_share": round(bench.waited_s / bench.looped_s, 5),
        "cores_busy": round(with_loader.cores_busy, 2),
        "computed_twice": f"{micro_batches - (bench.state.exact.kept_graphs or 0)} of {micro_batches}",
        "peak_memory_mib": round(peak_mib),
        "device_memory_mib": bench.device_memory_mib(),
    }


class StepBench:
    """Network, optimiser and batches, and the two ways to step with them.

    Attributes:
        state: what trains.
        where: where the loader makes pixels (`where_pixels_are_made`).
        batches: batches in memory, on the device.
        waited_s: time with the loader in which the device waited for a batch, of `looped_s` in all.
    """

    def __init__(self, config: Config, index: Index, world: World) -> None:
        batch = config.train.batch
        set_threads(config.train.threads, world)
        require_images(len(index), batch, index.root, "train.batch")
        torch.manual_seed(config.run.seed)
        self._device, self.waited_s, self.looped_s = world.device, 0.0, 0.0
        self._steps = _STEPS_PER_SYNC if world.device.type == "cuda" else 1
        self._images = self._steps * batch
        self._make_loader = partial(make_endless_loader, index, config, batch, world.device)
        self.state = Pretraining(config, world, len(index) // batch, fresh=True)
        with self._make_loader() as loader:
            self.where = where_pixels_are_made(loader.settings)
            self.batches = [made.to(world.device) for made in islice(loader, _IN_MEMORY)]

    def in_memory(self) -> Generator[int]:
        """Steps on batches in memory; yields their numbers of images."""
        batches = cycle(self.batches)
        while True:
            for batch in islice(batches, self._steps):
                self.state.step(batch)
            self._wait_for_device()
            yield self._images

    def with_loader(self) -> Generator[int]:
        """Steps as in the training loop: the loader works ahead, and each batch is one step."""
        waiting, steps = Stopwatch(), 0
        with self._make_loader() as loader:
            batches = iter(loader)
            while True:
                began_s = time.perf_counter()
                for _ in range(self._steps):
                    with waiting.running(self._device):
                        batch = next(batches)
                    self.state.step(batch.to(self._device))
                self._wait_for_device()
                waited_s = waiting.take_s()
                if steps >= _SETTLING_STEPS:
                    self.waited_s += waited_s
                    self.looped_s += time.perf_counter() - began_s
                steps += self._steps
                yield self._images

    def peak_mib(self) -> float:
        """Peak memory of steps in memory, in MiB; on a CPU, that of the process since its start."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        for batch in self.batches:
            self.state.step(batch)
        if on_gpu:
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def device_memory_mib(self) -> int | None:
        """Memory of a GPU that is in use, by this process and others; None on a CPU."""
        if self._device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        return round((total - free) / 2**20)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def as_table_of(row: Row) -> Table:
    """For the terminal: the figures of a row of `bench-train`."""

    def rate(way: str) -> str:
        low, high = row[way]["interval"]
        return f"{row[way]['images_per_s']:.1f} ({low:.1f} to {high:.1f})"

    lines = {
        "images/s, batches in memory": rate("in_memory"),
        "images/s, with the loader": rate("with_loader"),
        "waited for the loader": f"{row['waited_share']:.2%}",
        "cores busy, with the loader": f"{row['cores_busy']:.1f}",
        "decoder, views": f"{row['decoder']}, {row['views']}",
        "peak memory (MiB)": str(row["peak_memory_mib"]),
        "in use on the device (MiB)": str(row["device_memory_mib"] or "-"),
        "micro-batches computed twice": row["computed_twice"],
    }
    train, card = row["config"]["train"], row["device"] if row["card"] == "none" else row["card"]
    title = f"{card}: batches of {train['batch']} in micro-batches of {train['micro_batch']}, 95 % intervals"
    return as_table(title, ("", row["precision"]), lines.items())
