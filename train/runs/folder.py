"""The folder of a run: its lock, configuration, versions, metrics, pictures and checkpoints."""

import json
import logging
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout

from peclr_dali.errors import MachineError, UserError
from peclr_dali.parsing import PACKAGE, parse_json, regular
from peclr_dali.pipelines.config import refuse_among_images
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import first_difference, load_config, read_toml, to_toml
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.runs.checkpoint import BEST, CHECKPOINTS, Checkpoints
from peclr_dali.writing import write_text

log = logging.getLogger(__name__)

Resume = Literal["never", "auto"]
LOCK = "process.lock"
"""Name of the locked file. It contains the process, host and start time of the holder."""


class RunFolder:
    """A run's folder; the last `keep` checkpoints are kept."""

    def __init__(self, root: Path, *, keep: int) -> None:
        self.root = root
        self.checkpoints = Checkpoints(root / CHECKPOINTS, keep=keep)
        self.config_file = root / "config.toml"
        self.versions_file = root / "versions.json"
        self.metrics_file = root / "metrics.jsonl"
        self.best = Checkpoints(root / BEST, keep=1)
        self.validation_file = root / "validation.jsonl"
        self.quarantine_file = root / "quarantine.jsonl"
        self.views_picture = root / "views.png"
        self.loss_picture = root / "loss.png"
        self.predictions_picture = root / "predictions.png"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process: rank 0, from before `check` until the run has ended.

        The kernel releases the lock when the process ends, even if it is killed; a lock file that is left behind locks
        nothing. Between hosts it works if the shared file system supports locks, as NFS does. A missing folder is made,
        and removed again if it is still empty at the end.

        Raises:
            UserError: another process holds the folder.
            OSError: it cannot be made or written to.
        """
        made = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        file = self.root / LOCK
        lock = FileLock(file, blocking=False)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"run.out = {self.root} is in use by {file.read_text().strip() or 'another process'}: wait until it "
                "has ended or stop it, or name another folder with --set run.out=..."
            ) from None
        try:
            file.write_text(f"process {os.getpid()} on {platform.node()} since {time.strftime('%F %T %Z')}\n")
            yield
        finally:
            file.unlink(missing_ok=True)  # before the release, or it could be the next holder's file
            lock.release()
            with suppress(OSError):  # it is not empty
                for path in made:
                    path.rmdir()

    def check(self, config: Config | FinetuneConfig, resume: Resume) -> Path | None:
        """The checkpoint to resume from, or None to start.

        Raises:
            UserError: the folder has a run that must not be resumed, or a run of another configuration; or it is among
                images that are read.
        """
        refuse_among_images(self.root, config.data)
        if not any(path.name != LOCK for path in self.root.iterdir()):
            return None
        elsewhere = "name another folder with --set run.out=..."
        saved = any(path.suffix in (".pt", ".torn") for path in self.root.glob("*/*"))  # complete or damaged
        if not self.config_file.exists() or not (self.versions_file.exists() or saved):
            raise UserError(f"run.out = {self.root} holds files, but not a run: {elsewhere}")
        if saved and resume == "never":
            raise UserError(
                f"run.out = {self.root} holds a run already: continue it with --resume auto, or {elsewhere}"
            )
        if saved and (difference := first_difference(self.read_config(), config)) is not None:
            raise UserError(
                f"{self.config_file} is of another run: {difference}. Resume with the configuration that it was "
                f"started with, or {elsewhere}"
            )
        for left_by_a_kill in self.root.glob("*.*-*.part"):
            left_by_a_kill.unlink()
        found = self.checkpoints.latest_undamaged()
        if found is None:
            log.warning("%s holds a run without a checkpoint: starting anew, its logs are dropped", self.root)
        return found

    def claim(self, config: object, step: int) -> None:
        """Prepare the folder for a new or resumed run, and remove what was written after `step`.

        These steps are repeated. An earlier run may have had more ranks, so the files of all ranks are cut. A run that
        starts anew keeps the best network of the earlier one as *.earlier.
        """
        write_text(self.config_file, to_toml(config))
        write_text(self.versions_file, json.dumps(versions(), indent=2) + "\n")
        for file in (self.metrics_file, self.validation_file, *self.root.glob("samples-rank*.jsonl")):
            if file.exists():
                write_text(file, "".join(f"{json.dumps(row)}\n" for row in read_rows(file) if row["step"] <= step))
        if step == 0:
            for file in (self.views_picture, self.loss_picture, self.predictions_picture, self.quarantine_file):
                file.unlink(missing_ok=True)
        for path in self.best.paths():
            if step == 0:
                path.rename(path.with_suffix(".earlier"))
            elif Checkpoints.step_of(path) > step:
                path.unlink()

    def require_there(self, step: int) -> None:
        """Raise a `MachineError` if the folder of a running run has disappeared."""
        if not self.config_file.exists():
            raise MachineError(f"run.out = {self.root} was removed or cannot be reached: stopped at step {step}")

    def diverged(self, what: str, step: int, lr: float) -> UserError:
        """The error of a run whose loss or weights are not finite."""
        return UserError(
            f"{what} at step {step}, learning rate {lr:.3g}; the last good checkpoint is "
            f"{self.checkpoints.latest() or 'none'}. Lower optim.lr or raise optim.warmup_epochs"
        )

    def read_config(self) -> Config | FinetuneConfig:
        """The configuration of the run. Errors as in `load_config`."""
        kind: type[Config | FinetuneConfig] = FinetuneConfig if "pose" in read_toml(self.config_file) else Config
        return load_config(kind, [self.config_file], [])

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return read_rows(self.metrics_file)

    def read_validations(self) -> list[dict[str, Any]]:
        """The rows of validation.jsonl: of fine-tuning's validation, or of pre-training's probe."""
        return read_rows(self.validation_file)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, one per logged step; none if there is no file.

    What is no row is left out, such as a last line that a kill left half written.
    """
    rows = []
    for line in regular(file).read_bytes().splitlines(keepends=True) if file.exists() else []:
        with suppress(ValueError):
            if line.endswith(b"\n") and isinstance(row := parse_json(line), dict) and type(row.get("step")) is int:
                rows.append(row)
    return rows


def versions() -> dict[str, str]:
    """Versions of the programs and libraries that a run depends on."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": _commit(),
    }
    for package in ("nvidia-dali-cuda120", "torch", "torchvision", "numpy", "opencv-python-headless", "numba"):
        found[package] = version(package)
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "device": torch.cuda.get_device_name()}
    return found


def _commit() -> str:
    """The checkout's commit, marked if files other than the rows of measurements have changed; or the release."""
    checkout = PACKAGE.parent

    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=checkout, stderr=subprocess.DEVNULL, text=True, timeout=10)

    try:
        if not (checkout / ".git").exists():  # installed, perhaps below somebody else's checkout
            return version("peclr-dali")
        commit = git("rev-parse", "--short=12", "HEAD").strip()
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
        return f"{commit}-dirty" if changed else commit
    except (OSError, subprocess.SubprocessError, PackageNotFoundError):
        return "unknown"
