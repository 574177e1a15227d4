"""Checkpoints that are whole or absent: written beside, synced, then renamed."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from errors import UserError

FORMAT = 1
_NAME = re.compile(r"step_(\d{9})\.pt")


class Checkpoints:
    """The checkpoints of one run folder, the last `keep` of them."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def paths(self) -> list[Path]:
        """What is there, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def latest(self) -> Path | None:
        """The newest one."""
        return next(reversed(self.paths()), None)

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps; a crash at any moment leaves the older ones untouched."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:09d}.pt"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            torch.save({"format": FORMAT, "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(self.folder)
        for old in self.paths()[: -self._keep]:
            old.unlink()
        return path


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(path.stem.removeprefix("step_"))


def load_checkpoint(path: Path, *, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint of ours; only tensors and plain values are unpickled.

    Raises:
        UserError: the file is missing, torn, or not one of ours.
    """
    try:
        state = torch.load(path, map_location=map_location, weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; expected a checkpoint") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} is no checkpoint, or a torn one: expected a file that pre-training wrote, of which a run's folder "
            f"holds the last few"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path} is no pre-training checkpoint of format {FORMAT}; expected one of a run folder")
    return state


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
