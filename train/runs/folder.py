"""The folder of a run: configuration, versions, metrics, pictures and checkpoints."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import tomllib
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from peclr_dali.errors import UserError
from peclr_dali.parsing import regular
from peclr_dali.shipped import PACKAGE
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.config.tables import first_difference, to_dict, to_toml
from peclr_dali.train.runs.checkpoint import BEST, CHECKPOINTS, Checkpoints
from peclr_dali.train.runs.json_lines import cut_rows, read_undamaged_rows
from peclr_dali.train.runs.lock import LOCK, locked
from peclr_dali.writing import remove_leftovers, write_text

log = logging.getLogger(__name__)

Resume = Literal["never", "auto"]


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
        self.profile_file = root / "profile.txt"

    def lock(self, config: object, resume: Resume) -> AbstractContextManager[None]:
        """The lock that rank 0 holds from before `check` until the run has ended.

        A folder that cannot be used is a `UserError`; nothing is written into it.
        """
        if not (self.root / LOCK).exists():
            self._require_usable(config, resume)
        return locked(self.root)

    def check(self, config: Config | FinetuneConfig, resume: Resume) -> Path | None:
        """The checkpoint to resume from, or None to start.

        Raises:
            UserError: the folder has a run that must not be resumed, or a run of another configuration.
        """
        self._require_usable(config, resume)
        remove_leftovers(path for path in vars(self).values() if isinstance(path, Path) and path != self.root)
        found = self.checkpoints.latest_undamaged()
        if found is None and self._is_used():
            log.warning("%s holds a run without a checkpoint: starting anew, its logs are dropped", self.root)
        return found

    def _require_usable(self, config: object, resume: Resume) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"run.out = {self.root} is a file; expected a folder, or a path where one can be made")
        if self.root.is_symlink() and not self.root.exists():
            raise UserError(f"run.out = {self.root} is a link that leads nowhere: make the folder, or remove the link")
        if not self._is_used():
            return
        if not self.config_file.exists() or not (self.versions_file.exists() or self._has_saved()):
            raise UserError(
                f"run.out = {self.root} holds files, but not a run: name another folder with --set run.out=..."
            )
        if not self._has_saved():
            return
        if resume == "never":
            raise UserError(
                f"run.out = {self.root} holds a run already: continue it with --resume auto, or name another folder "
                f"with --set run.out=..."
            )
        self._check_config(config)

    def claim(self, config: object, step: int) -> None:
        """Prepare the folder for a new or resumed run, and remove rows of steps after `step`.

        An earlier run may have had more ranks, so the files of all ranks are cut. A folder that cannot be written is a
        `UserError`.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            write_text(self.config_file, to_toml(config))
            write_text(self.versions_file, json.dumps(versions(), indent=2) + "\n")
            self._cut(step)
        except OSError as error:
            raise UserError(f"run.out = {self.root} cannot be written to: {error.strerror}") from error

    def _check_config(self, config: object) -> None:
        try:
            text = regular(self.config_file).read_text()
            if not text.strip():  # empty because of a full disk; the configuration in the checkpoint is compared later
                return
            saved = tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.config_file} cannot be read ({error}): expected the configuration of the run to continue. "
                f"Restore it, or name another folder with --set run.out=..."
            ) from error
        now = to_dict(config)
        if saved.keys() - now.keys() and now.keys() - saved.keys():
            raise UserError(
                f"{self.config_file} is of another command's run: it has [{min(saved.keys() - now.keys())}], this one "
                f"has [{min(now.keys() - saved.keys())}]. Name another folder with --set run.out=..."
            )
        difference = first_difference(saved, config)
        if difference is not None:
            raise UserError(
                f"{self.config_file} is of another run: {difference}. Resume with the configuration that it was "
                f"started with, or name another folder with --set run.out=..."
            )

    def read_metrics(self) -> list[dict[str, Any]]:
        """The undamaged rows of metrics.jsonl."""
        return read_undamaged_rows(self.metrics_file, numbers=("epoch", "loss", "images_per_s", "wait_share"))

    def read_validations(self) -> list[dict[str, Any]]:
        """The undamaged rows of validation.jsonl that fine-tuning wrote."""
        return read_undamaged_rows(self.validation_file, numbers=("epe_cm", "pa_epe_cm", "epe_px"))

    def read_probes(self) -> list[dict[str, Any]]:
        """The undamaged rows of validation.jsonl that the probe of pre-training wrote."""
        return read_undamaged_rows(self.validation_file, numbers=("pa_epe_cm", "epe_px_of_224"))

    def _is_used(self) -> bool:
        return self.root.exists() and any(path.name != LOCK for path in self.root.iterdir())

    def _has_saved(self) -> bool:
        """Whether there is a checkpoint, complete or damaged."""
        folders = [folder for folder in (self.checkpoints.folder, self.best.folder) if folder.is_dir()]
        return any(path.suffix in (".pt", ".torn") for folder in folders for path in folder.iterdir())

    def _cut(self, step: int) -> None:
        """Remove rows and a best checkpoint from after `step`, since these steps are repeated.

        A run that starts anew keeps the best network of the earlier one as *.earlier.
        """
        for file in (self.metrics_file, self.validation_file, *self.root.glob("samples-rank*.jsonl")):
            cut_rows(file, step)
        if step == 0:  # an earlier run saved no checkpoint
            files = (self.quarantine_file, self.views_picture, self.loss_picture, self.predictions_picture)
            for file in (*files, self.profile_file):
                file.unlink(missing_ok=True)
        for path in self.best.paths():
            if step == 0:
                path.rename(path.with_suffix(".earlier"))
            elif Checkpoints.step_of(path) > step:
                path.unlink()


def versions() -> dict[str, str]:
    """Versions of the programs and libraries that a run depends on."""
    system = f"{platform.system()} {platform.machine()}"
    found = {"python": platform.python_version(), "system": system, "commit": _commit()}
    packages = ("nvidia-dali-cuda120", "torch", "torchvision", "numpy", "opencv-python-headless", "numba")
    found |= {name: version(name) for name in packages}
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
