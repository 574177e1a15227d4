"""Linux's control groups, by which containers limit what their processes take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def groups(controller: str, system: Path) -> Iterator[Path]:
    """Folders of the groups that may limit this process: its own and those above it, of version 2 and 1.

    A container may see its own group as the root of the tree under a path that is the host's, so the root is looked at
    in any case.

    Args:
        controller: of version 1, such as "cpu" or "memory".
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
    """What stands in a file; nothing if it cannot be read."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
