"""Times the training step on batches in memory and with the loader."""

import dataclasses
import time
from collections.abc import Generator, Sequence
from itertools import cycle, islice
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch

from peclr_dali.bench.loaders import OurLoader
from peclr_dali.bench.measure import Progress, Rounds, measure_in_rounds
from peclr_dali.bench.rows import Row, describe_machine
from peclr_dali.errors import UserError
from peclr_dali.models.network import build_network
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import steps_per_epoch
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.load import to_dict
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World, described_world
from peclr_dali.train.pretrain import build_step, is_recorded, pretraining_optimizer
from peclr_dali.train.runs.run import set_threads
from peclr_dali.train.steps.step_graph import StepGraph
from peclr_dali.train.steps.stopwatch import Stopwatch
from peclr_dali.train.steps.train_state import build_state, on_device, resolve_precision
from peclr_dali.train.trainer import before_the_loader


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
    index, device = load_index(config.data), world.device
    bench, on_gpu = StepBench(config, index, world), device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with before_the_loader(device):  # as in a run
        for batch in bench.batches:  # first, since it also decides how many graphs are kept
            bench.step(batch)
        peak_kib = torch.cuda.max_memory_allocated(device) / 1024 if on_gpu else getrusage(RUSAGE_SELF).ru_maxrss
        in_memory, with_loader = measure_in_rounds([bench.in_memory, bench.with_loader], rounds, progress)
    free, total = torch.cuda.mem_get_info(device) if on_gpu else (0, 0)
    micro_batches, machine = config.train.batch // config.train.micro_batch, describe_machine()
    return {
        "bench": "train",
        "machine": machine,
        "settings": dataclasses.asdict(rounds),
        "files": list(files),
        "config": to_dict(config),
        "device": str(device),
        "card": machine["gpu"] if on_gpu else "none",
        "decoder": bench.loader_settings.decoder,
        "views": bench.loader_settings.views,
        "precision": resolve_precision(config, device),
        "in_memory": in_memory.as_row(),
        "with_loader": with_loader.as_row(),
        "waited_share": round(bench.waited_s / bench.looped_s, 5),
        "cores_busy": round(with_loader.cores_busy, 2),
        "computed_twice": f"{micro_batches - (bench.exact.kept_graphs or 0)} of {micro_batches}",
        "peak_memory_mib": round(peak_kib / 1024),
        "device_memory_mib": round((total - free) / 2**20) if on_gpu else None,
    }


class StepBench:
    """What trains, and two ways to step with it: on batches in memory, and with the loader.

    Attributes:
        waited_s: time with the loader in which the device waited for a batch, of `looped_s` in all.
    """

    def __init__(self, config: Config, index: Index, world: World) -> None:
        batch, device = config.train.batch, world.device
        epoch_steps = steps_per_epoch(index, batch, micro_batch=config.train.micro_batch)
        set_threads(config.train.threads, world)
        torch.manual_seed(config.run.seed)
        self._device, self.waited_s, self.looped_s = device, 0.0, 0.0
        self._steps = 4 if device.type == "cuda" else 1  # between two readings of the clock, which wait for the GPU
        self._images = self._steps * batch
        self._make_loader = OurLoader(index, config, batch, device).open
        network = build_network(config.encoder, config.projector, config.geometry.side_px)
        network = on_device(network, config, world)
        self._state = build_state(config, network, pretraining_optimizer(config, network), epoch_steps)
        self.exact = build_step(config, network, self._state, world)
        self._gradient = StepGraph(self.exact) if is_recorded(config, world) else self.exact
        with self._make_loader() as loader:
            self.loader_settings = loader.settings
            self.batches = [made.to(device) for made in islice(loader, 2)]  # used in turn

    def step(self, batch: Batch) -> None:
        """A step of training, on a batch on the device."""
        self._gradient(batch)
        self._state.update()

    def in_memory(self) -> Generator[int]:
        """Steps on batches in memory; yields their numbers of images."""
        batches = cycle(self.batches)
        while True:
            for batch in islice(batches, self._steps):
                self.step(batch)
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
                    self.step(batch.to(self._device))
                self._wait_for_device()
                waited_s = waiting.take_s()
                if steps >= 2:  # the first batches were made before the round
                    self.waited_s += waited_s
                    self.looped_s += time.perf_counter() - began_s
                steps += self._steps
                yield self._images

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def figures_of(row: Row) -> dict[str, str]:
    """Names and values of a row of `bench-train`; intervals of 95 %."""
    with_loader, in_memory = (
        "{:.1f} ({:.1f} to {:.1f})".format(row[way]["images_per_s"], *row[way]["interval"])
        for way in ("with_loader", "in_memory")
    )
    return {
        "card": row["card"].removeprefix("NVIDIA ") if row["card"] != "none" else row["device"],
        "files": " ".join(row["files"]),
        "decoder": row["decoder"],
        "views": row["views"],
        "images/s with the loader": with_loader,
        "images/s, batches in memory": in_memory,
        "waited for the loader": f"{row['waited_share']:.1%}",
        "cores busy": f"{row['cores_busy']:.1f}",
        "computed twice": row["computed_twice"],
        "peak MiB": str(row["peak_memory_mib"]),
        "MiB in use on the device": str(row["device_memory_mib"] or "-"),
    }
