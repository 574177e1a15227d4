"""Reads what users give: files, numbers, paths, and names of configurations and networks that come with the package."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def regular(file: Path) -> Path:
    """Return the path of a regular file. A missing file, or a pipe or device, which might never end, is an OSError.

    So are the kernel's own files, such as /proc/kmsg, which are regular ones by their mode.
    """
    mode = file.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or file.resolve().is_relative_to("/proc"):
        raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(file))  # reading a folder raises, too
    return file


def file_name(name: Any) -> str:
    """Return a name that a file can have. Others are a ValueError."""
    if not isinstance(name, str) or "\0" in name or not name.strip("./"):
        raise ValueError(f"{str(name)[:80]!r} cannot be the name of a file")
    os.fsencode(name)  # a UnicodeEncodeError is a ValueError too
    return name


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: the text is not JSON, not UTF-8, nested too deeply, or has a number with too many digits, or a key
            twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_with_each_key_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key comes twice among {str([key for key, _ in pairs])[:160]}")
    return found


def as_numbers(value: Any) -> npt.NDArray[np.float64] | None:
    """Convert nested lists of numbers to an array; None if they are ragged, too large for a float, or not numbers."""
    import numpy as np  # only here: `--help` does not wait for it

    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


PACKAGE = Path(__file__).parent


def or_shipped(path: Path, suffix: str) -> Path:
    """The path; or, where nothing is there, the file that it names in configs/ or networks/ of the package.

    "peclr_rn50", "cards/a100.toml" and "configs/demo.toml" are names, with the suffix ".toml".
    """
    with suppress(OSError, ValueError):  # no name of a file
        if not (path.exists() or path.is_absolute() or ".." in path.parts):
            name = path if path.suffix == suffix else path.with_name(f"{path.name}{suffix}")
            places = (PACKAGE / name, PACKAGE / "configs" / name, PACKAGE / "networks" / name)
            return next((place for place in places if place.is_file()), path)
    return path


def is_left_to_shell(path: str) -> bool:
    """Whether a path begins with ~ or contains $NAME, $(...) or NUL, as in quotes, after "=" or in a file.

    Otherwise a folder named "~" would be made.
    """
    return re.match(r"~|.*(\$[\w{(]|\0)", path) is not None and not os.path.lexists(path)
