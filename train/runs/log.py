"""The log of a run: progress line, metrics.jsonl, validation.jsonl and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from peclr_dali.errors.terminal import OneLine
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.runs.folder import RunFolder

console = Console(stderr=True, soft_wrap=True)


def configure_logging() -> None:
    """Set up logging: on a terminal above the progress line, elsewhere one line per message.

    Ranks other than 0 do not print what is no warning, since rank 0 prints the same.
    """
    handler: logging.Handler = logging.StreamHandler()
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_time=False, markup=False)
    handler.setFormatter(OneLine("%(message)s"))
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for library in ("botocore", "aiobotocore"):  # they log where credentials were found
        logging.getLogger(library).setLevel(logging.WARNING)
    # fp16 may skip the first step because its gradient is not finite; torch then warns about the order of calls.
    warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before", UserWarning)


@contextmanager
def warned_once(world: World) -> Iterator[None]:
    """In this block, ranks other than 0 print no warnings: rank 0 has the same, such as images that are left out."""
    before = logging.root.manager.disable
    logging.disable(before if world.is_main else logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress line with an ETA. Yields a function to call with (done, total).

    The line appears with the first call, so that an early error is printed without it.
    """
    progress = Progress(
        TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=console
    )
    task = progress.add_task(title, total=None)

    def advance(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()


class RunLog:
    """Log of rank 0, of a run that has taken `first_step` of `total_steps` steps."""

    def __init__(
        self, config: Config | FinetuneConfig, folder: RunFolder, title: str, *, first_step: int, total_steps: int
    ) -> None:
        self._file = folder.metrics_file.open("a", buffering=1)
        self._validation_file = folder.validation_file
        self._board = None
        if config.run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # importing it takes a second

            self._board = SummaryWriter(str(folder.root / "tensorboard"), purge_step=first_step + 1)
        self._total = total_steps
        self._progress = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("steps", total=total_steps, completed=first_step, status="")
        self._progress.start()

    def close(self) -> None:
        """End the progress line, TensorBoard's file and the log."""
        self._progress.stop()
        if self._board is not None:
            self._board.close()
        self._file.close()

    def write_validation(self, row: Mapping[str, float]) -> None:
        """Write a row of validation.jsonl.

        A row of fine-tuning must have step, epe_cm, pa_epe_cm and epe_px. A row of a probe must have step, pa_epe_cm
        and epe_px_of_224. "constant_" and the name of an error: that of a constant prediction, if it was measured.
        """
        with self._validation_file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._show(row, "validation/")

        def error(key: str, decimals: int, unit: str) -> str:
            constant = row.get(f"constant_{key}")
            beside = "" if constant is None else f" (a constant: {constant:.{decimals}f})"
            return f"{row[key]:.{decimals}f} {unit}{beside}"

        in_3d, name = f"PA-EPE {error('pa_epe_cm', 3, 'cm')}", "validation"
        if "epe_px_of_224" in row:
            errors, name = f"2D EPE {error('epe_px_of_224', 1, 'px of 224')}, {in_3d}", "probe"
        elif math.isnan(row["pa_epe_cm"]) and not math.isnan(row["epe_px"]):
            errors = f"2D EPE {error('epe_px', 2, 'px')}"
        else:
            errors = f"EPE {row['epe_cm']:.2f} cm, {in_3d}"
        console.print(f"step {row['step']}/{self._total}  {name}: {errors}", highlight=False)

    def advance(self, step: int) -> None:
        """Move the progress line."""
        self._progress.update(self._task, completed=step)

    def write(self, row: Mapping[str, float]) -> None:
        """Write a row of metrics.jsonl; it must have step, epoch, loss, lr, images_per_s, wait_share and eta_s."""
        self._file.write(json.dumps(row) + "\n")
        self._show(row)
        step = int(row["step"])
        status = (
            f"epoch {row['epoch']:.1f}  loss {row['loss']:.3f}  lr {row['lr']:.2e}  "
            f"{row['images_per_s']:.0f} images/s  waited {row['wait_share']:.1%}"
        )
        self._progress.update(self._task, status=status)
        if not console.is_terminal:
            minutes, seconds = divmod(round(row["eta_s"]), 60)
            console.print(f"step {step}/{self._total}  {status}  ETA {minutes}:{seconds:02}", highlight=False)

    def _show(self, row: Mapping[str, float], prefix: str = "") -> None:
        """Add a point to TensorBoard's curve of each name."""
        if self._board is not None:
            for name in row.keys() - {"step"}:
                self._board.add_scalar(prefix + name, row[name], int(row["step"]))
