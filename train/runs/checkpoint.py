"""Writes and reads checkpoints, verified by the checksums of torch's archive. A checkpoint is complete or absent."""

import errno
import logging
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from peclr_dali.errors import UserError
from peclr_dali.models.config import encoder_class
from peclr_dali.models.weights import is_safetensors, require_finite
from peclr_dali.parsing import or_shipped, parse_json
from peclr_dali.writing import whole_file

log = logging.getLogger(__name__)

FORMAT = 2
METADATA_KEY = "peclr_checkpoint"
"""In a network's .safetensors file: all of the checkpoint but the tensors, as JSON."""
CHECKPOINTS = "checkpoints"
"""Folder of a run for the newest checkpoints."""
BEST = "best"
"""Folder of a run for the best network on validation."""
_NAME = re.compile(r"step_(\d{9})\.pt")


class DamagedCheckpoint(UserError):  # noqa: N818  what was found, not a defect
    """A file is damaged, or not one that torch can read."""


class Checkpoints:
    """The checkpoints of a run's folder; the last `keep` are kept."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def paths(self) -> list[Path]:
        """Paths of the checkpoints, the oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def path_of(self, step: int) -> Path:
        """Path of the checkpoint after `step` steps, whether there is one or not."""
        return self.folder / f"step_{step:09d}.pt"

    @staticmethod
    def step_of(path: Path) -> int:
        """The step of a checkpoint, from its name."""
        return int(path.stem.removeprefix("step_"))

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        return next(reversed(self.paths()), None)

    def latest_undamaged(self) -> Path | None:
        """The newest undamaged checkpoint, or None. Newer ones that are damaged are renamed to *.torn, with a warning.

        Raises:
            UserError: there are checkpoints, but all are damaged. Starting anew would lose work without asking.
        """
        damaged: list[Path] = []
        for path in reversed(self.paths()):
            try:
                load_checkpoint(path)
            except DamagedCheckpoint:
                damaged.append(path)
                continue
            for torn in damaged:
                log.warning("%s is incomplete or damaged: using %s instead", torn, path.name)
                torn.rename(torn.with_suffix(".torn"))
            return path
        if damaged:
            raise UserError(
                f"{self.folder} holds no usable checkpoint: {damaged[0]} and all others are damaged, or not "
                f"checkpoints. Restore one of them, or start a new run with --set run.out=..."
            )
        return None

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps. A crash or an OSError does not change the older checkpoints."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path_of(step)
        for left_by_a_crash in self.folder.glob("step_*.part"):
            left_by_a_crash.unlink()
        write_checkpoint(path, step, state)
        for old in self.paths()[: -self._keep]:
            old.unlink()
        return path


def find_checkpoint(source: Path, expected: str) -> Path:
    """The checkpoint of a source: the file itself, or a run's best on validation, or its newest if never validated.

    A source may be the name of a shipped network. No such path, or a folder without a checkpoint, is a `UserError`
    with the text `expected`.
    """
    source = or_shipped(source, ".safetensors")
    if not source.exists():
        raise UserError(f"{source} does not exist; expected {expected}")
    if source.is_file():
        return source
    folders = (source / BEST, source / CHECKPOINTS, source)  # a run's, or one of these two
    path = next((path for folder in folders if (path := Checkpoints(folder, keep=1).latest()) is not None), None)
    if path is None:
        raise UserError(f"{source} holds no checkpoint; expected {expected}")
    return path


def write_checkpoint(path: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write a checkpoint, completely or not at all. Errors as in `writing.whole_file`."""
    with whole_file(path) as file:
        torch.save({"format": FORMAT, "step": step, **state}, file)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint: at least the step, the run's configuration, and the network's tensors by name.

    A file of safetensors is a network that `export_network` wrote; its tensors may be in half precision. Only tensors
    and plain values are unpickled.

    Raises:
        DamagedCheckpoint: the file is damaged, or of another kind.
        UserError: the file cannot be read, or is another program's or another version's.
    """
    try:
        state = _load_safetensors(path) if is_safetensors(path) else _load_archive(path)
    except MemoryError:
        raise
    except Exception as error:  # of many kinds; torch's messages advise running the file's code
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # of a place that a damaged archive names
            raise UserError(f"{path}: {error.strerror or error}; expected a checkpoint") from error
        raise DamagedCheckpoint(
            f"{path} is damaged, or not a checkpoint of this project: expected a whole file that training wrote. Name "
            f"another one, such as one in the folder checkpoints/ of the same run"
        ) from error
    try:
        about = [state["config"]["encoder"]["name"], state["config"]["geometry"]["side_px"], state["step"]]
        is_ours = state["format"] == FORMAT and list(map(type, about)) == [str, int, int] and encoder_class(about[0])
        require_finite(dict(state["network"]), str(path))
        state["config"].get("pose", {}).pop("features", None)  # a former key, which the network in networks/ names
    except (LookupError, TypeError, ValueError, AttributeError):
        is_ours = False
    if not is_ours:
        raise UserError(f"{path} is not a checkpoint of this project: expected format {FORMAT}, as training writes it")
    return dict(state)


def _load_archive(path: Path) -> Any:
    """The content of a file of `torch.save`, which does not compare the checksums of its zip archive itself.

    Nor does the archive have a checksum of its table: torch would read a part of another size beyond its end, and no
    bytes of a part that is marked as a folder.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
        for part in archive.infolist():
            if part.file_size != part.compress_size or part.external_attr != 0:
                damaged = part.filename
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged} does not have its checksum, or not its size and kind")
    return torch.load(path, map_location="cpu", weights_only=True)


def _load_safetensors(path: Path) -> Any:
    """The content of a network's file; its metadata hold everything but the tensors."""
    with safetensors.safe_open(path, framework="pt") as file:
        about = dict(parse_json((file.metadata() or {}).get(METADATA_KEY, "{}")))
        return {**about, "network": {key: file.get_tensor(key) for key in file.keys()}}  # noqa: SIM118
