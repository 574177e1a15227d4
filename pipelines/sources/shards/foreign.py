"""Indexes tar files of images that other programs wrote. Their headers are read once; nothing is packed again."""

from __future__ import annotations

import glob
import hashlib
import json
import multiprocessing
import os
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from peclr_dali.errors import UserError
from peclr_dali.machine.process import start_worker
from peclr_dali.parsing import paths_in_one_line, regular
from peclr_dali.pipelines.files.image_file import MAX_FILE_BYTES
from peclr_dali.pipelines.sources.folder import IMAGE_ENDINGS
from peclr_dali.pipelines.sources.shards.index_file import (
    INDEX_MARK,
    LEFT_OUT_FILE,
    PACK_FILE,
    PLACES,
    IndexFile,
    Shard,
    shards_in_words,
    write_index_file,
    write_tables,
)
from peclr_dali.pipelines.sources.shards.shard_store import BLOCK_BYTES
from peclr_dali.writing import whole_file, write_text

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

_NOTES: Final = TypeAdapter(tuple[int, int, dict[str, int], str | None])
"""The fields of `Scanned` after its places."""

Progress = Callable[[int, int], None]

_COLUMNS: Final = ("offset", "size", "lead")
"""Columns of the places of images, which are tables of the index."""


def find_shards(patterns: Sequence[str], say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """The files that patterns name, each once, as absolute paths.

    Args:
        patterns: each a file; a folder, which stands for the tar files in it and below it; or a glob of files. What is
            found in a folder or by a glob is sorted. Hidden files of a folder are left out.
        say: gets a line if files are left out because links lead to them a second time.

    Raises:
        UserError: a pattern names no file.
    """
    found: dict[str, Path] = {}  # the file behind all links -> the first name of it
    again: list[str] = []
    for pattern in patterns:
        for file in _files(pattern):
            path = Path(os.path.abspath(file))  # noqa: PTH100  links stay as they are
            first = found.setdefault(os.path.realpath(file), path)
            if first != path:
                again.append(f"{path}: the same file as {first}, so it is left out")
    if again:
        say(f"{again[0]}; such names in all: {len(again)}")
    return [*found.values()]


def _files(pattern: str) -> Iterator[str | Path]:
    matches = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    if not matches:
        hint = "Check the path."
        if "://" in pattern or pattern.startswith("pipe:"):
            hint = "It is an address; only files are indexed. Copy the shards, or mount them."
        elif re.search(r"\{.*\}", pattern):
            hint = (
                "Only the shell expands braces, in a pattern without quotes; in quotes write a pattern with *, ? or "
                "[0-9]."
            )
        raise UserError(f"{pattern}: no such file. {hint}")
    for match in map(Path, matches):
        if not os.path.isdir(match):  # noqa: PTH112  never raises
            yield match
            continue
        inside = sorted(
            file
            for file in match.rglob("*")
            if file.name.lower().endswith(_ENDINGS)
            and not any(part.startswith(".") for part in file.relative_to(match).parts)
        )
        if not inside:
            raise UserError(f"{match}: no .tar files in this folder or below it. Check the path.")
        yield from inside


@dataclass(frozen=True)
class Indexed:
    """Result of `index_shards`.

    Attributes:
        folder: of the shards.
        without_images: number of shards that hold no image; the index does not name them.
        scanned: number of shards that this call read; the others were known from an earlier one.
        skipped: number of members that are no samples, by kind.
        left_out: shards whose end may be missing, with the reason; also in `left_out.jsonl`.
    """

    folder: Path
    samples: int
    shards: int
    without_images: int
    scanned: int
    skipped: dict[str, int]
    left_out: list[tuple[str, str]]


@dataclass(frozen=True)
class Scanned:
    """What was found in one shard.

    Attributes:
        places: (N, 3) offset and size of each image's content in bytes, and the bytes of the headers before it.
        size, changed_ns: the shard's size in bytes and time of change in nanoseconds.
        skipped: number of members that are no samples, by kind.
        ended_early: why images may be missing at the end of the file; None if it has its end marker and nothing after
            it.
    """

    places: npt.NDArray[np.int64]
    size: int
    changed_ns: int
    skipped: dict[str, int]
    ended_early: str | None

    def write(self, file: Path) -> None:
        """Write it, for later calls."""
        notes = [self.size, self.changed_ns, self.skipped, self.ended_early]
        with whole_file(file, durable=False) as out:
            np.savez_compressed(out, places=self.places, notes=np.frombuffer(json.dumps(notes).encode(), np.uint8))

    @staticmethod
    def read(file: Path) -> Scanned | None:
        """Read what an earlier call wrote; None if there is nothing or if it is damaged."""
        try:
            with regular(file).open("rb") as opened, np.load(opened) as found:
                places = np.asarray(found["places"], np.int64).reshape(-1, len(_COLUMNS))
                return Scanned(places, *_NOTES.validate_json(found["notes"].tobytes()))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
            return None


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
        ended_early = cut or _why_ended(file, min(at, status.st_size))  # a damaged size may lie far beyond the file
    table = np.array(places, np.int64).reshape(-1, len(_COLUMNS))
    return Scanned(table, status.st_size, status.st_mtime_ns, dict(skipped), ended_early)


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
    if block.strip(b"\0"):
        return f"no valid header at byte {at}: cut or damaged there; what follows is left out"
    if len(block) < BLOCK_BYTES:
        return "no end marker: complete, or cut between two members" if at or block else "empty (0 bytes)"
    if file.read(1 << 16).strip(b"\0"):
        return f"more data after its end marker at byte {at}, as in joined tar files; they are left out"
    return None


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
    for folder in dict.fromkeys(shard.parent for shard in shards):
        if (folder / PACK_FILE).exists():
            raise UserError(
                f"{folder}: holds shards that 'python cli.py pack' wrote; its index has their boxes and labels, which "
                f"a new index would not have. Use it as it is: data.source=shards, data.root={folder}"
            )
    found, missing = dict[Path, Scanned](), dict[Path, int]()
    with paths_in_one_line(out):
        _claim(out)
        for shard in shards:
            status, earlier = regular(shard).stat(), Scanned.read(_part_file(out, shard))
            if earlier is not None and (earlier.size, earlier.changed_ns) == (status.st_size, status.st_mtime_ns):
                found[shard] = earlier
            else:
                missing[shard] = status.st_size
    workers, done = min(workers, len(missing)), 0
    here = ((shard, _scan_and_keep(out, shard)) for shard in missing)
    for shard, one in here if workers <= 1 else _in_processes(missing, out, workers):
        found[shard] = one
        done += missing[shard]
        progress(done, sum(missing.values()))
    return _write_index(shards, [found[shard] for shard in shards], out, len(missing))


def _in_processes(shards: Iterable[Path], out: Path, workers: int) -> Iterator[tuple[Path, Scanned]]:
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker) as pool:
        try:
            running = {pool.submit(_scan_and_keep, out, shard): shard for shard in shards}
            for done in as_completed(running):
                yield running[done], done.result()
        except BrokenProcessPool as error:
            raise UserError(
                f"{out}: a process that read shards was killed from outside, perhaps for lack of memory. Run the "
                "command again to continue; --workers 1 needs the least memory."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _scan_and_keep(out: Path, shard: Path) -> Scanned:
    found = scan(shard)
    found.write(_part_file(out, shard))
    return found


def _part_file(out: Path, shard: Path) -> Path:
    """What was found in a shard. It stays, so that a later call reads only new and changed shards."""
    return out / INDEX_MARK / f"{hashlib.sha256(os.fsencode(shard)).hexdigest()[:32]}.npz"


def _claim(out: Path) -> None:
    """Mark a new or empty folder as one of `index`; refuse any other folder without the mark."""
    if (out / INDEX_MARK).is_dir():
        return
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and holds no index of other programs' shards. Name a new or an empty folder.")
    (out / INDEX_MARK).mkdir(parents=True)


def _write_index(paths: Sequence[Path], found: Sequence[Scanned], out: Path, scanned: int) -> Indexed:
    """Join what was found in the shards. The index file is written last; it makes the index usable."""
    places = np.concatenate([shard.places for shard in found])
    skipped: Counter[str] = sum((Counter(shard.skipped) for shard in found), Counter())
    left_out = [(str(path), shard.ended_early) for path, shard in zip(paths, found, strict=True) if shard.ended_early]
    if not len(places):
        others = ", ".join(f"{count} {kind}" for kind, count in skipped.items()) or "nothing"
        why = f" {left_out[0][0]}: {left_out[0][1]}." if left_out else ""
        raise UserError(
            f"{paths[0]}: no .jpg, .jpeg, .png or .webp members in {shards_in_words(len(paths))}; found {others}.{why} "
            "Check the shards."
        )
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    shards = [
        Shard(str(path.relative_to(folder)), len(shard.places), shard.size, changed_ns=shard.changed_ns)
        for path, shard in zip(paths, found, strict=True)
        if len(shard.places)
    ]
    tables = {name: column.astype(PLACES[name]) for name, column in zip(_COLUMNS, places.T, strict=True)}
    checksums = write_tables(out, tables)
    (out / LEFT_OUT_FILE).unlink(missing_ok=True)
    if left_out:
        lines = (json.dumps({"path": path, "reason": why}) + "\n" for path, why in left_out)
        write_text(out / LEFT_OUT_FILE, "".join(lines))
    write_index_file(out, IndexFile(folder.name or str(folder), sorted(tables), shards, checksums, str(folder)))
    return Indexed(folder, len(places), len(shards), len(paths) - len(shards), scanned, dict(skipped), left_out)
