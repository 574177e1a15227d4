"""Indexes tar files of images that other programs wrote. Their headers are read once; nothing is packed again."""

from __future__ import annotations

import glob
import hashlib
import json
import multiprocessing
import os
import re
import signal
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from errors import UserError
from parsing import paths_in_one_line, regular
from pipelines.files.image_file import MAX_FILE_BYTES
from pipelines.sources.folder import IMAGE_ENDINGS
from pipelines.sources.shards.index_file import (
    FOLDER,
    FORMAT,
    INDEX_FILE,
    INDEX_MARK,
    PACK_FILE,
    how_again,
    read_index_file,
    read_table,
    shards_in_words,
    table_name,
    write_tables,
)
from pipelines.sources.shards.shard_store import BLOCK_BYTES
from writing import whole_file, write_text

_LEFT_OUT: Final = "left_out.jsonl"
_COLUMNS: Final = {"offset": np.uint64, "size": np.uint32, "lead": np.uint32}

_ENDINGS: Final = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""Endings of the shards of a folder. Compressed ones are among them, so that a message refuses them."""

_COMPRESSED: Final = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zXZ\0": ("xz", "unxz -k"),
}
"""First bytes of compressed files, and the program that unpacks them."""

_SAMPLE: Final = "sample"

Progress = Callable[[int, int], None]

Places = npt.NDArray[np.int64]
"""(N, 3): offset and size of each image's content in bytes, and the bytes of the headers before it."""


def find_shards(patterns: Sequence[str], say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """The files that patterns name, each once, as absolute paths.

    Args:
        patterns: each a file; a folder, which stands for the tar files in it and below it; or a glob of files. What is
            found in a folder or by a glob is sorted. Hidden files of a folder are left out.
        say: gets a line if files are left out because links lead to them a second time.

    Raises:
        UserError: a pattern names no file.
    """
    found: dict[str, str] = {}  # the file behind all links -> the first name of it
    again: dict[str, str] = {}
    for file in (file for pattern in patterns for file in _files(pattern)):
        name = os.path.abspath(file)  # noqa: PTH100  links stay as they are
        first = found.setdefault(os.path.realpath(file), name)
        if first != name:
            again[name] = first
    if again:
        name, first = next(iter(again.items()))
        say(f"{name}: the same file as {first}, so it is left out; such names in all: {len(again)}")
    return [Path(file) for file in found.values()]


def _files(pattern: str) -> Iterator[str]:
    matches = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    if not matches and ("://" in pattern or pattern.startswith("pipe:")):
        raise UserError(f"{pattern}: an address; only files are indexed. Copy the shards, or mount them.")
    if not matches and re.search(r"\{.*\}", pattern):
        raise UserError(
            f"{pattern}: no such file. Only the shell expands braces, in a pattern without quotes; in quotes write a "
            "pattern with *, ? or [0-9]."
        )
    if not matches:
        raise UserError(f"{pattern}: no such file. Check the path.")
    for match in matches:
        yield from _in_folder(match) if os.path.isdir(match) else (match,)  # noqa: PTH112  never raises


def _in_folder(folder: str) -> list[str]:
    found = sorted(
        str(file)
        for file in Path(folder).rglob("*")
        if file.name.lower().endswith(_ENDINGS)
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not found:
        raise UserError(f"{folder}: no .tar files in this folder or below it. Check the path.")
    return found


@dataclass(frozen=True)
class Indexed:
    """Result of `index_shards`."""

    folder: Path
    """Folder of the shards."""

    samples: int
    shards: int
    without_images: int
    """Number of shards that hold no image; the index does not name them."""

    scanned: int
    """Number of shards that this call read; the others were known from an earlier one."""

    skipped: dict[str, int]
    """Number of members that are no samples, by kind."""

    left_out: list[tuple[str, str]]
    """Shards whose end may be missing, with the reason; also in `left_out.jsonl`."""


@dataclass(frozen=True)
class Scanned:
    """What was found in one shard.

    Attributes:
        identity: the shard's size in bytes and time of change in nanoseconds.
        skipped: number of members that are no samples, by kind.
        ended_early: why images may be missing at the end of the file; None if it has its end marker and nothing after
            it.
    """

    identity: tuple[int, int]
    places: Places
    skipped: dict[str, int]
    ended_early: str | None

    @property
    def notes(self) -> dict[str, Any]:
        """All fields but the places, for JSON."""
        size, changed_ns = self.identity
        return {"bytes": size, "changed_ns": changed_ns, "skipped": self.skipped, "ended_early": self.ended_early}

    @staticmethod
    def of_notes(notes: dict[str, Any], places: Places) -> Scanned:
        """The inverse of `notes`. Wrong notes raise a `KeyError`, `TypeError` or `ValueError`."""
        skipped = {str(kind): int(count) for kind, count in dict(notes["skipped"]).items()}
        return Scanned((int(notes["bytes"]), int(notes["changed_ns"])), places, skipped, notes["ended_early"])


def scan(shard: Path) -> Scanned:
    """Find the images of a tar file by its headers. Contents are not read.

    Members with the ending of an image are samples, except hidden ones.

    Raises:
        UserError: it cannot be read, is compressed, or is no tar file.
    """
    with paths_in_one_line(shard), shard.open("rb") as file:
        status = os.fstat(file.fileno())
        start = file.read(BLOCK_BYTES)
        for magic, (kind, unpack) in _COMPRESSED.items():
            if start.startswith(magic):
                raise UserError(
                    f"{shard}: compressed ({kind}), so that no image can be read without all before it. Unpack it "
                    f"once ('{unpack} FILE'), then index the .tar file."
                )
        places: list[tuple[int, int, int]] = []
        skipped: Counter[str] = Counter()
        at, cut = 0, None
        for member, end in _members(file, status.st_size):
            kind_of_member = _kind(member)
            # A sparse member is larger than what the file holds of it; its end may lack some padding.
            ends = end - BLOCK_BYTES + 1 if member.issparse() else member.offset_data + member.size
            if member.isreg() and ends > status.st_size:
                cut = f"cut within {member.name} at byte {at}; it is left out"
                break
            if kind_of_member == _SAMPLE:
                places.append((member.offset_data, member.size, member.offset_data - member.offset))
            elif kind_of_member is not None:
                skipped[kind_of_member] += 1
            at = end
        if at == 0 and cut is None and start.strip(b"\0"):
            raise UserError(f"{shard}: not a tar file: it begins with no header. Leave it out of the shards.")
        ended_early = cut or _why_ended(file, at)
    table = np.array(places, np.int64).reshape(-1, 3)
    return Scanned((status.st_size, status.st_mtime_ns), table, dict(skipped), ended_early)


def _members(file: BinaryIO, file_bytes: int) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """The members of a tar file, up to its end or damage, and the byte after each."""
    file.seek(0)
    at, tar = 0, None
    while at < file_bytes:
        try:
            tar = tar or tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  it closes nothing
            member = tar.next()
        except OSError:
            raise
        except Exception:  # damaged headers: tarfile raises errors of many kinds
            return
        if member is None or member.size < 0 or tar.offset <= at:
            return
        tar.members.clear()  # type: ignore[attr-defined]  # it would hold all of them
        at = tar.offset
        yield member, at


def _kind(member: tarfile.TarInfo) -> str | None:
    """Whether a member is a sample, or what else it is; None for folders and devices."""
    if member.isdir() or member.isdev():
        return None
    if member.issparse():
        return "sparse"
    if member.islnk() or member.issym():
        return "links"
    if not (member.isreg() and member.name.lower().endswith(IMAGE_ENDINGS)):
        return "other"
    if any(part.startswith(".") and part not in (".", "..") for part in member.name.split("/")):
        return "hidden"
    if not member.size:
        return "empty"
    return "too large" if member.size > MAX_FILE_BYTES else _SAMPLE


def _why_ended(file: BinaryIO, at: int) -> str | None:
    """Why a file has no member at a byte; None if it has its end marker there and nothing after it."""
    file.seek(at)
    block = file.read(BLOCK_BYTES)
    if not at and not block:
        return "empty (0 bytes)"
    is_zero = not block.strip(b"\0")
    if is_zero and len(block) < BLOCK_BYTES:
        return "no end marker: complete, or cut between two members"
    if is_zero:
        if file.read(1 << 16).strip(b"\0"):
            return f"more data after its end marker at byte {at}, as in joined tar files; they are left out"
        return None
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        if len(block) == BLOCK_BYTES:
            return f"no valid header at byte {at}; what follows is left out"
    return f"cut within a header at byte {at}, or damaged there; what follows is left out"


def index_shards(
    shards: Sequence[Path], out: Path, *, workers: int, progress: Progress = lambda done, total: None
) -> Indexed:
    """Write an index of the images in tar files, in their order, for `load_shards`.

    The shards stay where they are; the index names their folder. What a call has read of a shard is kept, so the same
    call continues after an interruption, and a later one reads only new and changed shards. Workers are spawned, not
    forked: a script that calls this needs the usual `if __name__ == "__main__"`.

    Args:
        shards: absolute paths.
        out: a folder that is empty, missing, or from an earlier call.
        workers: processes, each of which reads a shard.
        progress: called with (bytes of the shards that are read, bytes of all shards).

    Raises:
        UserError: `out` holds something else or cannot be written to, a shard cannot be read, is compressed, no tar
            file or written by `pack`, or there is no image.
    """
    _refuse_packed(shards)
    with paths_in_one_line(out):
        _claim(out)
        known, found, missing = _read_known(out), dict[Path, Scanned](), dict[Path, int]()
        for shard in shards:
            status = regular(shard).stat()
            earlier = known.get(shard) or _read_part(_part(out, shard))
            if earlier is not None and earlier.identity == (status.st_size, status.st_mtime_ns):
                found[shard] = earlier
            else:
                missing[shard] = status.st_size
    if missing:
        found |= _scan_all(missing, out, workers, progress)
    return _write_index(shards, [found[shard] for shard in shards], out, len(missing))


def _scan_all(shards: dict[Path, int], out: Path, workers: int, progress: Progress) -> dict[Path, Scanned]:
    """Scan shards, given their sizes in bytes, in this process or in several others."""
    found: dict[Path, Scanned] = {}
    here = ((shard, _scan_and_keep(shard, out)) for shard in shards)
    for shard, one in here if min(workers, len(shards)) == 1 else _in_processes(shards, out, workers):
        found[shard] = one
        progress(sum(shards[shard] for shard in found), sum(shards.values()))
    return found


def _in_processes(shards: dict[Path, int], out: Path, workers: int) -> Iterator[tuple[Path, Scanned]]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(shards)), spawn, _start_worker) as pool:
        try:
            running = {pool.submit(_scan_and_keep, shard, out): shard for shard in shards}
            for done in as_completed(running):
                yield running[done], done.result()
        except BrokenProcessPool as error:
            raise UserError(
                f"{out}: a process that read shards was killed from outside, perhaps for lack of memory. Run the "
                "command again to continue; --workers 1 needs the least memory."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Let a process end silently on Ctrl-C, and with its parent, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def _scan_and_keep(shard: Path, out: Path) -> Scanned:
    found = scan(shard)
    with whole_file(_part(out, shard), durable=False) as part:
        notes = np.frombuffer(json.dumps({**found.notes, "path": str(shard)}).encode(), np.uint8)
        np.savez(part, places=found.places, notes=notes)
    return found


def _refuse_packed(shards: Sequence[Path]) -> None:
    """Refuse shards that have an index already. Another one would be without their boxes and labels."""
    for folder in dict.fromkeys(shard.parent for shard in shards):
        if (folder / PACK_FILE).exists():
            raise UserError(
                f"{folder}: holds shards that 'python cli.py pack' wrote; its index has their boxes and labels, which "
                f"a new index would not have. Use it as it is: data.source=shards, data.root={folder}"
            )


def _part(out: Path, shard: Path) -> Path:
    return out / INDEX_MARK / f"{hashlib.sha256(os.fsencode(shard)).hexdigest()[:32]}.npz"


def _read_part(file: Path) -> Scanned | None:
    """What an interrupted call found in a shard; None if it left nothing for this shard."""
    try:
        with np.load(file) as part:
            return Scanned.of_notes(json.loads(part["notes"].tobytes()), part["places"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def _claim(out: Path) -> None:
    """Mark a new or empty folder as one of `index`; refuse any other folder without the mark."""
    if (out / INDEX_MARK).is_dir():
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and holds no index of other programs' shards. Name a new or an empty folder.")
    (out / INDEX_MARK).mkdir(parents=True)


def _read_known(out: Path) -> dict[Path, Scanned]:
    """The shards of a finished index; none if there is none or if it is damaged."""
    try:
        content = read_index_file(out)
        shards, folder = content["shards"], Path(os.path.abspath(out / content[FOLDER]))  # noqa: PTH100
        first = [0, *accumulate(shard["samples"] for shard in shards)]
        columns = [
            read_table(out / table_name(name), name, first[-1], content["crc32"][name], how_again(content))
            for name in _COLUMNS
        ]
        places = np.stack([np.asarray(column).astype(np.int64) for column in columns], axis=1)
        return {
            folder / shard["file"]: Scanned.of_notes(shard, places[start:stop])
            for shard, (start, stop) in zip(shards, pairwise(first), strict=True)
        }
    except (UserError, KeyError, TypeError, ValueError):
        return {}


def _write_index(paths: Sequence[Path], found: Sequence[Scanned], out: Path, scanned: int) -> Indexed:
    """Join what was found in the shards. The index file is written last; it makes the index usable."""
    places = np.concatenate([shard.places for shard in found])
    skipped: Counter[str] = sum((Counter(shard.skipped) for shard in found), Counter())
    left_out = [(str(path), shard.ended_early) for path, shard in zip(paths, found, strict=True) if shard.ended_early]
    if not len(places):
        told = ", ".join(f"{count} {kind}" for kind, count in skipped.items()) or "nothing"
        why = f" {left_out[0][0]}: {left_out[0][1]}." if left_out else ""
        raise UserError(
            f"{paths[0]}: no .jpg, .jpeg, .png or .webp members in {shards_in_words(len(paths))}; found {told}.{why} "
            "Check the shards."
        )
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    kept = [(path, shard) for path, shard in zip(paths, found, strict=True) if len(shard.places)]
    tables = {name: places[:, number].astype(kind) for number, (name, kind) in enumerate(_COLUMNS.items())}
    checksums = write_tables(out, tables)
    (out / _LEFT_OUT).unlink(missing_ok=True)
    if left_out:
        write_text(out / _LEFT_OUT, "".join(json.dumps({"path": path, "reason": why}) + "\n" for path, why in left_out))
    content = {
        "format": FORMAT,
        "name": folder.name or str(folder),
        FOLDER: str(folder),
        "tables": sorted(tables),
        "crc32": checksums,
        "shards": [
            {"file": str(path.relative_to(folder)), "samples": len(shard.places), **shard.notes} for path, shard in kept
        ],
    }
    write_text(out / INDEX_FILE, json.dumps(content, indent=1) + "\n")
    for part in (out / INDEX_MARK).iterdir():
        part.unlink()
    return Indexed(folder, len(places), len(kept), len(paths) - len(kept), scanned, dict(skipped), left_out)
