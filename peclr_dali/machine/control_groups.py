"""Reads Linux's control groups, with which containers limit their processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def groups(controller: str, system: Path) -> Iterator[Path]:
    """Folders of the groups that limit this process: its own and those above it, of versions 2 and 1.

    In a container the process's own group may appear as the root of the tree, although its path is the host's. So the
    root is always included.

    Args:
        controller: name in version 1, such as "cpu" or "memory".
        system: the root of the file system.
    """
    for line in read(system / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            mounts = [system / "sys/fs/cgroup", system / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [system / "sys/fs/cgroup" / name for name in (controllers, controller)]
        else:
            continue
        group = PurePosixPath(path)
        for mount in mounts:
            yield from (mount / str(above).lstrip("/") for above in (group, *group.parents))


def read(file: Path) -> str:
    """Content of a file; empty if it cannot be read."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
