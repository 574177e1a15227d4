"""Measures the training loop; writes metrics.jsonl, validation.jsonl, TensorBoard, the log and the progress line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.loader.loader import Loader
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.runs.checkpoint import BackgroundWriter
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.log import console, print_line
from peclr_dali.train.steps.stopwatch import Stopwatch
from peclr_dali.train.steps.training_state import Result, TrainingState

AnyConfig: TypeAlias = Config | FinetuneConfig
State: TypeAlias = TrainingState[Any, Any]


class Meter:
    """Measures the training loop. Rank 0 writes the metrics; with `run.log_samples`, each rank writes its samples."""

    def __init__(
        self, config: AnyConfig, folder: RunFolder, state: State, world: World, writer: BackgroundWriter, title: str
    ) -> None:
        self._config, self._state, self._world, self._writer = config, state, world, writer
        file = folder.root / f"samples-rank{world.rank}.jsonl"
        self._samples = file.open("a", buffering=1) if config.run.log_samples else None
        self._log = RunLog(config, folder, state, title) if world.is_main else None
        self._waiting, self._steps, self._since, self._saved_s = Stopwatch(), 0, time.perf_counter(), writer.waited_s
        self.lr = state.lr
        """Learning rate of the newest step."""

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._log, self._samples):
            if file is not None:
                file.close()

    def timed(self, loader: Loader) -> Iterator[Batch]:
        """Yield the loader's batches and measure the time of waiting for each."""
        batches = iter(loader)
        while True:
            with self._waiting.running(self._world.device):
                batch = next(batches, None)
            if batch is None:
                return
            self.lr = self._state.lr
            yield batch

    def after_step(self, batch: Batch, result: Result, loss: float | None) -> None:
        """Count a step. Given its loss, write a row of metrics, which waits for the device."""
        self._steps += 1
        step = self._state.steps_done
        if self._samples is not None:
            seen = {"step": step, "first": int(batch.positions[0]), "samples": batch.samples.tolist()}
            self._samples.write(json.dumps(seen) + "\n")
        if self._log is not None:
            self._log.advance(step)
        if loss is None:
            return
        waited_s, passes_s = self._waiting.take_s(), self._state.own_work.take_s()
        elapsed_s = time.perf_counter() - self._since
        slowest = self._slowest(waited_s, passes_s, len(batch))
        if self._log is not None:
            row = {
                "step": step,
                "epoch": step / (self._state.total_steps / self._config.train.epochs),
                "loss": loss,
                "lr": self.lr,
                "images_per_s": self._steps * self._config.train.batch / elapsed_s,
                "wait_share": waited_s / elapsed_s,
                "checkpoint_share": (self._writer.waited_s - self._saved_s) / elapsed_s,
                **slowest,
                **self._state.figures(result),
                "eta_s": (self._state.total_steps - step) * elapsed_s / self._steps,
            }
            self._log.write(row)
        self._saved_s = self._writer.waited_s
        self._steps, self._since = 0, time.perf_counter()

    def _slowest(self, waited_s: float, passes_s: float, images: int) -> dict[str, float]:
        """The rank with the longest own time per image of its share; empty for a single rank.

        Its own time is that of its passes and of waiting for its data, without waiting for other ranks. It is compared
        with the lower median.
        """
        if self._world.world_size == 1:
            return {}
        ranks = self._world.gather_objects(((passes_s + waited_s) / images, waited_s / self._steps))
        times = [image_s for image_s, _ in ranks]
        return {
            "slowest_rank": times.index(max(times)),
            "slowest_over_median": max(times) / max(sorted(times)[(len(times) - 1) // 2], 1e-12),
            "wait_s_max": max(wait_s for _, wait_s in ranks),
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the `with` block from the time of the steps."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start

    def validated(self, row: Mapping[str, float] | None) -> None:
        """Write the metrics of a validation, if there was one."""
        if self._log is not None and row is not None:
            self._log.write_validation(row)


class RunLog:
    """Log of rank 0."""

    def __init__(self, config: AnyConfig, folder: RunFolder, state: State, title: str) -> None:
        self._metrics = folder.metrics_file.open("a", buffering=1)
        self._validation_file = folder.validation_file
        self._board = None
        if config.run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # importing it takes a second

            self._board = SummaryWriter(str(folder.root / "tensorboard"), purge_step=state.steps_done + 1)
        self._total = state.total_steps
        columns = (
            TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(elapsed_when_finished=False),
        )  # fmt: skip
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("steps", total=self._total, completed=state.steps_done, status="")
        self._progress.start()

    def close(self) -> None:
        """End the progress line, TensorBoard's file and the log."""
        self._progress.stop()
        if self._board is not None:
            self._board.close()
        self._metrics.close()

    def advance(self, step: int) -> None:
        """Move the progress line."""
        self._progress.update(self._task, completed=step)

    def write(self, row: Mapping[str, float]) -> None:
        """Write a row of metrics.jsonl; it must have step, epoch, loss, lr, images_per_s, wait_share and eta_s."""
        self._metrics.write(json.dumps(row) + "\n")
        self._plot(row)
        status = (
            f"epoch {row['epoch']:.1f}  loss {row['loss']:.3f}  lr {row['lr']:.2e}  "
            f"{row['images_per_s']:.0f} images/s  waited {row['wait_share']:.1%}"
        )
        self._progress.update(self._task, status=status)
        if not console.is_terminal:
            minutes, seconds = divmod(round(row["eta_s"]), 60)
            print_line(f"step {row['step']}/{self._total}  {status}  ETA {minutes}:{seconds:02}")

    def write_validation(self, row: Mapping[str, float]) -> None:
        """Write a row of validation.jsonl, and print its errors beside those of a constant prediction, if known."""
        with self._validation_file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._plot(row, "validation/")
        print_line(f"step {row['step']}/{self._total}  held out: {errors_in_words(row)}")

    def _plot(self, row: Mapping[str, float], prefix: str = "") -> None:
        """Add a point to TensorBoard's curve of each name."""
        if self._board is not None:
            for name in row.keys() - {"step"}:
                self._board.add_scalar(prefix + name, row[name], int(row["step"]))


def errors_in_words(row: Mapping[str, float]) -> str:
    """The errors of a validation that are known, beside those of a constant prediction."""
    shown = []
    for key, name, unit in (("epe_cm", "EPE", "cm"), ("pa_epe_cm", "PA-EPE", "cm"), ("epe_px", "2D EPE", "px"),
                            ("epe_px_of_224", "2D EPE", "px of 224")):  # fmt: skip
        if not math.isnan(row.get(key, math.nan)):
            constant = row.get(f"constant_{key}")
            shown.append(f"{name} {row[key]:.2f} {unit}" + (f" (a constant: {constant:.2f})" if constant else ""))
    return ", ".join(shown)
