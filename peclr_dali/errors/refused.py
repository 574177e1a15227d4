"""Describes errors of the machine in one line: lack of memory, a file that cannot be used, a missing package."""

from __future__ import annotations

import errno
import os
import re
import traceback
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from peclr_dali.errors import Outage, ReportedByAnotherRank, UserError

_ROOT = Path(__file__).parents[1]
_LACKS_MEMORY = re.compile(
    r"(can't|cannot|unable to|failed to) allocate|out of memory|insufficient memory|bad_?alloc|alloc(ation)?_failed"
    r"|allocator_failure|cudaErrorMemoryAllocation|failed to map segment|can't start new thread"
    r"|resource temporarily unavailable",
    re.IGNORECASE,
)
_ASKED_FOR = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (\w+)", re.IGNORECASE)
_GPU_REFUSES = re.compile(
    r"(no kernel image is available|driver version is insufficient|devices?(\(s\))? (is/)?are busy or unavailable"
    r"|uncorrectable ECC error|invalid device ordinal|No CUDA GPUs are available)[^\n]*",
    re.IGNORECASE,
)
"""What CUDA reports of a GPU or a driver that cannot be used. Other errors of CUDA are defects of the program."""

_EXACT = 'Lower train.micro_batch, on which batch norm depends, or set train.recompute = "always"'
_TASKS = (
    ("train/steps/exact.py", "a training step", _EXACT),
    ("train/pose/pose_step.py", "a training step", "Lower train.micro_batch"),
    ("train/pose/inference.py", "estimating poses", "Lower validation.batch"),
    ("pipelines/", "the loader", "Lower pipelines.batch, pipelines.ahead or pipelines.threads"),
)
"""Start of a source file's path, the task of that file, and the setting that lowers its memory."""


_OF_THE_INPUT = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.EINVAL, errno.EEXIST, errno.ENXIO, errno.ENODEV, errno.EROFS,
)  # fmt: skip
"""Errors of files that a wrong path or wrong permissions cause. The others are of the storage."""


def is_transient(error: BaseException) -> bool:
    """Whether a restart may help: storage, network or another process failed, and not the input.

    An `OSError` counts as such, and a `UserError` that was raised from one, unless the path or its permissions are
    wrong. Lack of memory does not count: the same settings need it again.
    """
    if isinstance(error, ReportedByAnotherRank):
        return error.transient
    cause = error.__cause__ if isinstance(error, UserError) else error
    of_storage = isinstance(cause, OSError) and cause.errno not in (None, errno.ENOMEM, *_OF_THE_INPUT)
    return isinstance(error, Outage) or of_storage


def machine_error_line(error: BaseException) -> str | None:
    """One line about an error of the machine (memory, files, packages); None for any other error.

    Errors of NumPy, torch, OpenCV, DALI and of the dynamic linker are recognised by their text, so that nothing has to
    be imported.
    """
    if isinstance(error, ModuleNotFoundError):
        return _missing_package(error)
    has_number = isinstance(error, OSError) and error.errno not in (None, errno.ENOMEM)
    may_lack = isinstance(error, (OSError, RuntimeError, ImportError)) or type(error).__module__ == "cv2"
    if isinstance(error, MemoryError) or (may_lack and not has_number and _LACKS_MEMORY.search(str(error))):
        return _out_of_memory(error)
    if isinstance(error, RuntimeError) and (refused := _GPU_REFUSES.search(str(error))) is not None:
        return (
            f"the GPU cannot be used: {refused[0].strip()}. See nvidia-smi: another program may hold it, its driver "
            "may be too old for this torch, or this torch too new for the GPU. --set train.device=cpu does without"
        )
    if isinstance(error, OSError):
        if has_number and error.filename is not None and error.strerror is not None:
            return f"{os.fsdecode(error.filename)}: {error.strerror}. Check the path and its permissions"
        return f"the system reports: {error}. Check disk, memory and permissions, then run the command again"
    return None


def _out_of_memory(error: BaseException) -> str:
    """The task that ran out of memory and what to change. The traceback's last file of this project gives the task."""
    amount = "more memory"
    if (asked := _ASKED_FOR.search(str(error))) is not None:
        number, unit = asked.groups()
        amount = as_size(int(number)) if unit == "bytes" else f"{number} {unit}"
    files = [frame.filename.removeprefix(f"{_ROOT}/") for frame in traceback.extract_tb(error.__traceback__)]
    found = (one for file in reversed(files) for one in _TASKS if file.startswith(one[0]))
    _, task, remedy = next(found, ("", "this command", "Take smaller batches or fewer processes"))
    return f"out of memory: {task} asked for {amount}, which the machine could not give. {remedy}"


def as_size(count: float) -> str:
    """Bytes with a binary unit, such as "1.5 GiB"."""
    power = min(max(int(count), 1).bit_length() - 1, 49) // 10
    return f"{count / 1024**power:.{1 if power else 0}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _missing_package(error: ModuleNotFoundError) -> str | None:
    """One line that says how to install a package that an extra of ours brings; None for any other module."""
    package = {"sklearn": "scikit-learn"}.get(error.name or "", (error.name or "").replace("_", "-"))
    try:
        requirements = requires("peclr-dali") or []
    except PackageNotFoundError:
        return f"the package {package} is missing: run 'make setup' in the checkout, and use its .venv/bin/python"
    ours = re.compile(rf"{re.escape(package)}\b(?!-).*extra == '(\w+)'")
    extras = {found[1] for line in requirements if (found := ours.match(line))} - {"all"}
    if not extras:
        return None
    extra = "train" if "train" in extras else min(extras)
    return f"this needs the package {package}: pip install 'peclr-dali[{extra}]'"
