"""Checkpoints that are whole or absent: written beside, synced, renamed, and checked when they are read."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from errors import UserError
from writing import whole_file

log = logging.getLogger(__name__)

FORMAT = 2
_PARTS: dict[str, type] = {
    "step": int, "config": dict, "network": dict, "optimizer": dict, "scheduler": dict, "scaler": dict,
    "bad_files": dict, "images": list, "best": dict, "norm_ranks": int, "backend": str,
}  # fmt: skip
_NEEDED = ("step", "config", "network")
_NAME = re.compile(r"step_(\d{9})\.pt")
_SEAL = b"\nsha256 of all before: "  # torch.load, as any reader of zip files, does not mind what follows the archive
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size * 2


class Checkpoints:
    """The checkpoints of one run folder, the last `keep` of them."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self._keep = folder, keep
        self._torn: list[Path] = []

    def paths(self) -> list[Path]:
        """What is there, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def latest(self) -> Path | None:
        """The newest one."""
        return next(reversed(self.paths()), None)

    def latest_whole(self) -> Path | None:
        """The newest one that is whole; newer ones that are not are named in a warning.

        Nothing deletes these: the next `save` puts them aside as *.torn, so that they are not among those it keeps.

        Raises:
            UserError: there are some, and none is whole: starting anew would throw work away unasked.
        """
        torn: list[Path] = []
        for path in reversed(self.paths()):
            with suppress(OSError):
                if is_whole(path):
                    for other in torn:
                        log.warning("%s is torn or damaged: passed over for %s", other, path.name)
                    self._torn = torn
                    return path
            torn.append(path)
        if torn:
            raise UserError(
                f"{torn[0]} is no checkpoint, or a torn one, and so is every other in {self.folder}: restore one of "
                f"them, or start a new run with --set run.out=..."
            )
        return None

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps; a crash or an OSError at any moment leaves the older ones untouched."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:09d}.pt"
        for left_by_a_crash in self.folder.glob("step_*.part"):
            left_by_a_crash.unlink()
        while self._torn:
            torn = self._torn.pop()
            with suppress(FileNotFoundError):
                torn.rename(torn.with_suffix(".torn"))
        write_checkpoint(path, step, state)
        for old in self.paths()[: -self._keep]:
            old.unlink()
        return path


def not_written(what: str, error: OSError, left: str = "") -> UserError:
    """What the disk refused to a run: what cannot be written, why, what is left, and how to go on."""
    remedy = "Make room or set the folder's rights, then go on with --resume auto"
    return UserError(f"{what}: {error.strerror or error}{left}. {remedy}")


def find_checkpoint(source: Path, expected: str) -> Path:
    """The file itself; of a run's folder its best checkpoint on validation, or the newest if none was validated.

    A folder without any is a `UserError`, which says what was expected.
    """
    if not source.is_dir():
        return source
    path = Checkpoints(source / "best", keep=1).latest() or Checkpoints(source / "checkpoints", keep=1).latest()
    if path is None:
        raise UserError(f"{source} holds no checkpoint; expected {expected}")
    return path


def write_checkpoint(path: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write one checkpoint, whole and with its checksum, or not at all; errors as `writing.whole_file`."""
    with whole_file(path) as file:
        sealed = _Hashing(file)
        torch.save({"format": FORMAT, "step": step, **state}, cast(IO[bytes], sealed))
        file.write(_SEAL + sealed.digest())


class BackgroundWriter:
    """Saves checkpoints in a thread, so that training waits for a copy of the state only.

    At most one is being written: the next one waits for it, and so does the end of the `with` block.

    Args:
        finally_do: called in the thread after each checkpoint.

    Attributes:
        waited_s: seconds that the caller has spent in here.
    """

    def __init__(self, checkpoints: Checkpoints, finally_do: Callable[[], None] = lambda: None) -> None:
        self.checkpoints, self._finally_do = checkpoints, finally_do
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: Exception | None = None
        self.waited_s = 0.0

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy the state after `step` steps and write it from a thread; not if the one before could not be written."""
        start = time.perf_counter()
        self._wait()
        if self._error is None:
            copied, when_copied = snapshot(state)
            self._step = step
            self._thread = threading.Thread(target=self._write, args=(step, copied, when_copied), name="checkpoint")
            self._thread.start()
        self.waited_s += time.perf_counter() - start

    def finish(self) -> None:
        """Wait for what is being written, and `check`."""
        self._wait()
        self.check()

    def check(self) -> None:
        """Hear, once, of a checkpoint that could not be written, as a `UserError`; waits for nothing."""
        error, self._error = self._error, None
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        what = f"the checkpoint of step {self._step} cannot be written to {self.checkpoints.folder}"
        raise not_written(what, error, f"; the newest one there is {self.checkpoints.latest() or 'none'}") from error

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, step: int, state: Mapping[str, Any], when_copied: Callable[[], None]) -> None:
        try:
            when_copied()
            self.checkpoints.save(step, state)
            self._finally_do()
        except Exception as error:  # whatever it is, the loop has to hear of it
            self._error = error


def snapshot(state: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    """A copy on the CPU of a tree of dicts, lists and tensors, and a function that waits until it is complete.

    Copies from a GPU are only queued, behind the step that made the state and ahead of the next one.
    """
    streams: set[torch.device] = set()

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type == "cpu":
                return value.detach().clone()
            streams.add(value.device)
            host = torch.empty_like(value, device="cpu", pin_memory=True)
            return host.copy_(value.detach(), non_blocking=True)
        if isinstance(value, Mapping):
            return {key: copy(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(copy(item) for item in value)
        return value

    copied: dict[str, Any] = copy(state)
    events = [torch.cuda.current_stream(device).record_event() for device in streams]  # type: ignore[no-untyped-call]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copied, wait


def is_whole(path: Path) -> bool:
    """Whether the file ends in the checksum of what comes before; OSError if it cannot be read."""
    with path.open("rb") as file:
        left = file.seek(0, os.SEEK_END) - _SEAL_BYTES
        file.seek(0)
        digest = hashlib.sha256()
        while left > 0 and (block := file.read(min(left, 2**22))):
            digest.update(block)
            left -= len(block)
        return file.read() == _SEAL + digest.hexdigest().encode()


def load_checkpoint(path: Path, *, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """What was saved: at least the step, the configuration of the run, and the network's tensors by name.

    Only tensors and plain values are unpickled. A file that is missing, torn, or not one of ours is a `UserError`.
    """
    try:
        if not is_whole(path):
            raise UserError(
                f"{path} is no checkpoint, or a torn one: expected a whole file that training wrote. Name another one, "
                f"such as one in the folder checkpoints/ of the same run"
            )
        state: Any = torch.load(path, map_location=map_location, weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; expected a checkpoint") from error
    except (UserError, MemoryError):
        raise
    except Exception as error:  # torch has many for a file that is not its own; its advice is to run what is in it
        raise _foreign(path, "it is no archive of tensors and plain values") from error
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise _foreign(path, "it has no format")
    if state["format"] != FORMAT:
        raise UserError(f"{path} is a checkpoint of format {state['format']}; expected {FORMAT}, this version's")
    for key, kind in _PARTS.items():
        if key in state and not isinstance(state[key], kind):
            raise _foreign(path, f"its {key} is a {type(state[key]).__name__}, not a {kind.__name__}")
        if key in _NEEDED and key not in state:
            raise _foreign(path, f"it has no {key}")
    encoder = state["config"].get("encoder")
    if not isinstance(encoder, dict) or not isinstance(encoder.get("name"), str):
        raise _foreign(path, "its configuration names no encoder")
    if not all(isinstance(value, Tensor) for value in state["network"].values()):
        raise _foreign(path, "its network holds other things than tensors")
    return state


def _foreign(path: Path, found: str) -> UserError:
    return UserError(
        f"{path} holds something else than a checkpoint of ours: {found}. Expected a file that training wrote"
    )


class _Hashing(io.RawIOBase):
    """A file to write to that keeps the checksum of what went in."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def digest(self) -> bytes:
        return self._hash.hexdigest().encode()
