"""Shards that others wrote: the same images as tarfile finds, what is left out, what is said of damage."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import webdataset  # type: ignore[import-untyped]
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.bad_list import write_bad_list
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import EpochOrder, build_order
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.shards.foreign import Indexed, find_shards, index_shards, scan
from peclr_dali.pipelines.sources.shards.index_file import INDEX_MARK
from peclr_dali.pipelines.sources.shards.load import load_shards
from peclr_dali.pipelines.sources.shards.pack import pack
from peclr_dali.pipelines.sources.shards.shard_store import member_name
from tests.command_line import as_options, run_cli
from tests.train import tiny_run
from tests.train.narrow import narrow_resnet18

ROOT = Path(__file__).parents[3]
FORMATS: dict[str, Any] = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
MARK = 2 * 512


def header(name: str, size: int = 0, **fields: Any) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    for field, value in fields.items():
        setattr(member, field, value)
    return member.tobuf(tarfile.GNU_FORMAT)


def member(name: str, data: bytes) -> bytes:
    return header(name, len(data)) + data + bytes(-len(data) % 512)


def summed(block: bytes | bytearray) -> bytes:
    """A header with the checksum that belongs to it."""
    total = sum(block[:148]) + 8 * ord(" ") + sum(block[156:512])
    return bytes(block[:148]) + f"{total:06o}\0 ".encode() + bytes(block[156:])


GOOD = member("a.jpg", b"first") + member("b.png", b"second") + bytes(MARK)


def indexed(out: Path, *shards: Path, **options: Any) -> Indexed:
    return index_shards([shard.absolute() for shard in shards], out, **{"workers": 1, **options})


def loaded(out: Path, **keys: Any) -> Index:
    return load_shards(DataConfig("shards", str(out), **keys))


def contents(index: Index) -> list[tuple[str, bytes]]:
    return [(index.paths[row], index.read(row)) for row in range(len(index))]


def scanned(data: bytes) -> tuple[np.ndarray, str | None]:
    """What a scan finds in a file of these bytes, and why it ended early, if it did."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        found = scan(Path(file.name))
        return found.places, found.ended_early


# What tarfile finds.

NAMES = st.text(st.sampled_from("ab./é-"), min_size=1, max_size=12).map(lambda name: name.strip("/") or "x")
MEMBERS = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from([0, 0, 0, 1, 95, 120, 300, 5000]),
        st.sampled_from([".jpg", ".JPEG", ".png", ".Webp", ".json", ".jpg.txt", "jpg", ".left.jpg"]),
        st.sampled_from([*([tarfile.REGTYPE] * 6), b"\0", b"1", b"2", b"5", b"6", b"7", b"V"]),
        st.sampled_from([0, 1, 511, 512, 513, 3000]),
        st.sampled_from([0, 1.5]),
    ),
    max_size=12,
)


def is_sample(member: tarfile.TarInfo) -> bool:
    parts = member.name.split("/")
    hidden = any(part.startswith(".") and part not in (".", "..") for part in parts)
    return member.isreg() and member.size > 0 and not hidden and bool(re.search(r"(?i)\.(jpe?g|png|webp)$", parts[-1]))


@settings(max_examples=100, deadline=None)
@given(MEMBERS, st.sampled_from(sorted(FORMATS)))
def test_the_images_are_those_of_tarfile(members: list[Any], kind: str) -> None:
    buffer, wanted = io.BytesIO(), []
    with tarfile.open(fileobj=buffer, mode="w", format=FORMATS[kind]) as tar:
        for number, (name, longer, ending, kind_of_member, size, mtime) in enumerate(members):
            one = tarfile.TarInfo(f"{'d/' * (longer // 4)}{'n' * (longer % 100)}{name}{number}{ending}")
            # tarfile takes an old file whose name is cut at a slash for a folder
            type_ = tarfile.REGTYPE if kind_of_member == tarfile.AREGTYPE and longer else kind_of_member
            one.type, one.size, one.mtime = type_, size, mtime
            content = bytes([number]) * size
            try:
                tar.addfile(one, io.BytesIO(content) if type_ not in (b"1", b"2", b"5", b"6") else None)
            except ValueError:  # too long for this format
                continue
    data = buffer.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for one in filter(is_sample, tar.getmembers()):
            file = tar.extractfile(one)
            assert file is not None
            wanted.append((one.name, file.read()))
    places, ended_early = scanned(data)
    assert ended_early is None
    assert [(member_name(data[at - lead : at]), data[at : at + size]) for at, size, lead in places.tolist()] == wanted


def test_shards_of_webdataset(tmp_path: Path) -> None:
    """One sample for each image of a key, in the order of the file."""
    rng = np.random.default_rng(0)
    images = [{kind: rng.bytes(700 + row) for kind in ("left.jpg", "right.jpg", "png")} for row in range(20)]
    with webdataset.ShardWriter(str(tmp_path / "%06d.tar"), maxcount=8, verbose=0) as writer:
        for row, sample in enumerate(images):
            writer.write({"__key__": f"part/{row:03}", **sample, "json": {"label": row}})
    found = indexed(tmp_path / "out", *sorted(tmp_path.glob("*.tar")), workers=2)
    assert (found.samples, found.shards, found.skipped, found.left_out) == (60, 3, {"other": 20}, [])
    assert contents(loaded(tmp_path / "out")) == [
        (f"{row // 8:06}.tar/part/{row:03}.{kind}", sample[kind])
        for row, sample in enumerate(images)
        for kind in sorted(sample)
    ]


@pytest.mark.parametrize(
    "how", ["--format=gnu", "--sparse-version=0.0", "--sparse-version=0.1", "--sparse-version=1.0"]
)
def test_sparse_members_and_links_are_left_out(tmp_path: Path, how: str) -> None:
    """As GNU tar writes them; a sparse member of many pieces has more than one header."""
    folder = tmp_path / "images"
    folder.mkdir()
    with (folder / "a.jpg").open("wb") as file:
        for piece in range(40):
            file.seek(piece << 16)
            file.write(b"piece")
        file.truncate(1 << 24)
    (folder / "b.jpg").write_bytes(b"image")
    (folder / "c.jpg").hardlink_to(folder / "b.jpg")
    (folder / "d.jpg").symlink_to("b.jpg")
    (folder / "e.jpg").write_bytes(b"last")
    subprocess.run(
        ["tar", "--sparse", how, *(["--format=posix"] if "version" in how else []), "-C", folder, "-cf",
         tmp_path / "0.tar", *(f"{name}.jpg" for name in "abcde")], check=True,
    )  # fmt: skip
    assert (tmp_path / "0.tar").stat().st_size < 1 << 20
    found = indexed(tmp_path / "out", tmp_path / "0.tar")
    assert (found.skipped, found.left_out) == ({"links": 2, "sparse": 1}, [])
    assert contents(loaded(tmp_path / "out")) == [("0.tar/b.jpg", b"image"), ("0.tar/e.jpg", b"last")]


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_a_member_of_more_than_eight_gigabytes_is_stepped_over(tmp_path: Path, kind: str) -> None:
    """Its size is base-256, or stands in an extended header. The file is sparse."""
    shard, huge = tmp_path / "0.tar", 9 << 30
    big = tarfile.TarInfo("big.jpg")
    big.size = huge
    with shard.open("wb") as file:
        file.write(big.tobuf(FORMATS[kind]))
        file.seek(huge, os.SEEK_CUR)
        file.write(GOOD)
    found = indexed(tmp_path / "out", shard)
    assert (found.skipped, found.left_out) == ({"too large": 1}, [])
    assert contents(loaded(tmp_path / "out")) == [("0.tar/a.jpg", b"first"), ("0.tar/b.png", b"second")]


# Damage.


@pytest.mark.parametrize(
    ("data", "samples", "reason"),
    [
        (GOOD[:-MARK], 2, "no end marker: complete, or cut between two members"),
        (GOOD[: -MARK - 400], 2, "no end marker"),  # only the padding of the last member is missing
        (GOOD[: -MARK - 508], 1, r"cut within b\.png at byte 1024; it is left out"),
        (GOOD[:1300], 1, "no valid header at byte 1024: cut or damaged there"),
        (GOOD + GOOD, 2, "more data after its end marker at byte 2048, as in joined tar files"),
        (GOOD[:1024] + b"?" * 600, 1, "no valid header at byte 1024: cut or damaged there; what follows is left out"),
        (GOOD[:1024] + header("x" * 200 + ".jpg", 5)[:700], 1, "no valid header at byte 1024: cut or damaged there"),
        (GOOD[:1024] + header("x") + header("y" * 200 + ".jpg", 5), 1, r"cut within y{200}\.jpg at byte 1536"),
        (b"", 0, None),
        (bytes(10240), 0, None),
    ],
)  # fmt: skip
def test_what_is_whole_of_a_damaged_shard_is_used(
    tmp_path: Path, data: bytes, samples: int, reason: str | None
) -> None:
    (tmp_path / "0.tar").write_bytes(GOOD)
    (tmp_path / "1.tar").write_bytes(data)
    found = indexed(tmp_path / "out", tmp_path / "0.tar", tmp_path / "1.tar")
    assert found.samples == 2 + samples
    assert found.without_images == (samples == 0)
    wanted = [("a.jpg", b"first"), ("b.png", b"second")]
    assert contents(loaded(tmp_path / "out")) == [(f"0.tar/{name}", data) for name, data in wanted] + [
        (f"1.tar/{name}", data) for name, data in wanted[:samples]
    ]
    if reason is not None:
        ((path, told),) = found.left_out
        assert path == str(tmp_path / "1.tar")
        assert re.search(reason, told), told
        assert json.loads((tmp_path / "out/left_out.jsonl").read_text()) == {"path": path, "reason": told}


def test_what_is_no_tar_is_one_line_and_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(GOOD)
    for data, message in [
        (gzip.compress(GOOD), r"1\.tar: compressed \(gzip\).*'gunzip -k FILE'"),
        (bz2.compress(GOOD), r"compressed \(bzip2\)"),
        (lzma.compress(GOOD), r"compressed \(xz\)"),
        (bytes.fromhex("28b52ffd0458") + b"0" * 600, r"compressed \(zstd\)"),
        *((data, r"1\.tar: not a tar file") for data in (b"PK\3\4" + b"0" * 600, b"junk", GOOD[:300])),
    ]:
        (tmp_path / "1.tar").write_bytes(data)
        with pytest.raises(UserError, match=message):
            indexed(tmp_path / "out", tmp_path / "0.tar", tmp_path / "1.tar")
    assert not (tmp_path / "out/index.json").exists()
    assert indexed(tmp_path / "out", tmp_path / "0.tar").scanned == 0


def test_shards_without_images_are_one_line(tmp_path: Path) -> None:
    for data in (b"", bytes(1024), member("a.txt", b"text") + bytes(MARK)):
        (tmp_path / "0.tar").write_bytes(data)
        with pytest.raises(
            UserError, match=r"0\.tar: no \.jpg.* members in 1 shard; found (nothing|1 other)\."
        ) as told:
            indexed(tmp_path / "out", tmp_path / "0.tar")
        assert ("0.tar: empty (0 bytes)" in str(told.value)) == (not data)


PAX = tarfile.TarInfo("p" * 150 + ".jpg")
PAX.size, PAX.mtime = 5, 1.5
BASIS = PAX.tobuf(tarfile.PAX_FORMAT) + b"image".ljust(512, b"\0") + member("l" * 200 + ".jpg", b"image") + GOOD
SIZES = [
    b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\x80" + bytes(3) + b"\x80" + bytes(7),
    b"\x80" + bytes(3) + b"\x7f" + b"\xff" * 7,
    b"77777777777\0", b"-0000000512\0", b"           \0", bytes(12), b"0x000000100\0",
]  # fmt: skip
PATCHES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, len(BASIS) - 1), st.binary(min_size=1, max_size=20)),
        st.tuples(st.integers(0, len(BASIS) // 512 - 1).map(lambda block: block * 512 + 124), st.sampled_from(SIZES)),
        st.tuples(
            st.integers(0, len(BASIS) // 512 - 1).map(lambda block: block * 512 + 156),
            st.sampled_from([bytes([kind]) for kind in b"SLKxXg0125\0"]),
        ),
        st.tuples(st.integers(512, 612), st.sampled_from([b"999 size=1\n", b"0 path=", b"-5 size"])),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(PATCHES, st.booleans(), st.integers(0, len(BASIS)))
@example([(154, b"\0\0\x01"), (124, b"\x80" + b"\xff" * 11)], True, 0)  # a member of 10^26 bytes that is no file
def test_mutated_tars_end_and_every_place_is_within_the_file(
    patches: list[tuple[int, bytes]], is_summed: bool, cut: int
) -> None:
    data = bytearray(BASIS)
    for at, patch in patches:
        data[at : at + len(patch)] = patch
        block = at // 512 * 512
        if is_summed:  # so that the mutation gets past the checksum
            data[block : block + 512] = summed(data[block : block + 512])
    for content in (bytes(data), bytes(data[:cut])):
        try:
            places, _ = scanned(content)
        except UserError as error:
            assert re.search("not a tar file|: compressed", str(error))  # noqa: PT017
            continue
        ends = places[:, 0] + places[:, 1]
        assert (places[:, 1] > 0).all()
        assert (places[:, 2] >= 512).all()
        assert (ends <= len(content)).all()
        assert (places[1:, 0] - places[1:, 2] >= ends[:-1]).all()  # no two images share a byte


def test_a_shard_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a broken disk fails; what comes before is not taken for the whole."""
    (tmp_path / "0.tar").write_bytes(GOOD)

    def broken(tar: tarfile.TarFile) -> tarfile.TarInfo:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tarfile.TarFile, "next", broken)
    with pytest.raises(UserError, match=r"0\.tar: Input/output error"):
        scan(tmp_path / "0.tar")


# Later calls.


class Killed(BaseException):
    """Stands for a kill."""


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Four shards with the images 0 to 11, out of order."""
    (tmp_path / "in").mkdir()
    paths = [tmp_path / f"in/{number}.tar" for number in range(4)]
    for number, path in enumerate(paths):
        images = [member(f"{3 * number + place}.jpg", b"%d" % (3 * number + place)) for place in (2, 0, 1)]
        path.write_bytes(b"".join(images) + bytes(MARK))
    return paths


def test_a_killed_call_goes_on_where_it_stopped(tmp_path: Path, shards: list[Path]) -> None:
    def killed(done: int, total: int) -> None:
        if 2 * done >= total:
            raise Killed

    with pytest.raises(Killed):
        indexed(tmp_path / "out", *shards, workers=1, progress=killed)
    with pytest.raises(
        UserError, match=r"no index\.json, so it holds no finished shards; run the same 'python cli\.py index' again"
    ):
        loaded(tmp_path / "out")
    read = len([*(tmp_path / "out" / INDEX_MARK).iterdir()])
    assert read >= 2
    assert indexed(tmp_path / "out", *shards).scanned == 4 - read
    assert indexed(tmp_path / "whole", *shards).scanned == 4
    assert contents(loaded(tmp_path / "out")) == contents(loaded(tmp_path / "whole"))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["index", "index.json", INDEX_MARK]


def test_processes_end_with_a_killed_call(tmp_path: Path, shards: list[Path]) -> None:
    """They wait for shards that never come: pipes under the names of files that were looked at."""
    program = f"""
import os
from pathlib import Path
from peclr_dali.pipelines.sources.shards import foreign
def in_processes(shards, *arguments):
    for shard in shards:
        os.unlink(shard)
        os.mkfifo(shard)
    return real(shards, *arguments)
real, foreign._in_processes = foreign._in_processes, in_processes
if __name__ == "__main__":
    shards = [Path({str(shards[0])!r}), Path({str(shards[1])!r})]
    foreign.index_shards(shards, Path({str(tmp_path / "out")!r}), workers=2)
"""
    (tmp_path / "main.py").write_text(program)
    with subprocess.Popen([sys.executable, tmp_path / "main.py"], env={**os.environ, "PYTHONPATH": str(ROOT)}) as call:
        workers: list[psutil.Process] = []
        while sum("spawn_main" in " ".join(one.cmdline()) for one in workers) < 2:
            assert call.poll() is None
            time.sleep(0.05)
            workers = psutil.Process(call.pid).children(recursive=True)
        call.kill()
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive


def test_only_new_and_changed_shards_are_read_again(tmp_path: Path, shards: list[Path]) -> None:
    out = tmp_path / "out"
    assert indexed(out, *shards[:3]).scanned == 3
    assert indexed(out, *shards[:3]).scanned == 0
    assert indexed(out, *shards).scanned == 1
    shards[1].write_bytes(GOOD)  # another size
    with pytest.raises(
        UserError, match=r"1\.tar: 3072 bytes, expected 4096: cut or changed.* or index the shards again"
    ):
        loaded(out)
    content = bytearray(shards[2].read_bytes())
    content[512:513] = b"9"
    shards[2].write_bytes(content)
    os.utime(shards[2], ns=(0, 10**18))  # the same size, another time
    assert indexed(out, *reversed(shards)).scanned == 2
    assert [name for name, _ in contents(loaded(out))] == [
        *("3.tar/11.jpg", "3.tar/9.jpg", "3.tar/10.jpg", "2.tar/8.jpg", "2.tar/6.jpg", "2.tar/7.jpg"),
        *("1.tar/a.jpg", "1.tar/b.png", "0.tar/2.jpg", "0.tar/0.jpg", "0.tar/1.jpg"),
    ]
    assert loaded(out).read(3) == b"9"
    for part in (out / INDEX_MARK).iterdir():
        part.write_bytes(part.read_bytes()[:-60])
    assert indexed(out, *shards).scanned == 4
    shards[0].unlink()
    with pytest.raises(UserError, match=r"0\.tar: No such file.*or index the shards again"):
        loaded(out)


def test_nothing_else_is_overwritten(tmp_path: Path, shards: list[Path]) -> None:
    """A folder belongs to `index` by its mark alone, whatever the names of its files."""
    pack(load_shards_of_folder(tmp_path), tmp_path / "packed", per_shard=2, workers=1)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for number, name in enumerate(("index/offset.npy", "index.parts/mine", "index.json", "left_out.jsonl")):
        (tmp_path / f"mine{number}" / name).parent.mkdir(parents=True)
        (tmp_path / f"mine{number}" / name).write_text('{"folder": "mine"}')
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for out in (
        shards[0].parent,
        *(tmp_path / f"mine{number}" for number in range(4)),
        tmp_path / "packed",
        tmp_path / "file",
        tmp_path / "link",
    ):
        with pytest.raises(UserError, match=r"holds no index of other programs' shards\. Name a new or"):
            indexed(out, *shards)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("index.json", "index.json cannot be written: .*pipe that nobody reads"),
        ("index/offset.npy", "offset.npy cannot be written: .*pipe that nobody reads"),
        ("made-by-peclr-dali-index/*.npz", "npz cannot be written: .*pipe that nobody reads"),
    ],
)
def test_pipes_in_the_folder_are_one_line(tmp_path: Path, shards: list[Path], name: str, line: str) -> None:
    indexed(tmp_path / "out", *shards)
    for file in (tmp_path / "out").glob(name):
        file.unlink()
        os.mkfifo(file)
    shards[0].touch()
    with pytest.raises(UserError, match=line):
        indexed(tmp_path / "out", *shards)


@pytest.mark.parametrize("notes", [b"[1]", b"[" * 99_999, b'[%d, %d, {"other": "x"}, null]', b"[%d, %d, {}, null]"])
def test_wrong_notes_of_an_earlier_call_are_read_again(tmp_path: Path, shards: list[Path], notes: bytes) -> None:
    """The last ones are right, but not their places."""
    first = indexed(tmp_path / "out", shards[0])
    (kept,) = (tmp_path / "out/made-by-peclr-dali-index").iterdir()
    status = shards[0].stat()
    now = notes % (status.st_size, status.st_mtime_ns) if b"%d" in notes else notes
    np.savez(kept, places=np.array(["x"]), notes=np.frombuffer(now, np.uint8))
    again = indexed(tmp_path / "out", shards[0])
    assert (again.samples, again.scanned) == (first.samples, 1)


def load_shards_of_folder(tmp_path: Path) -> Index:
    tiny_run.write_images(tmp_path / "images", count=3)
    return load_index(DataConfig("folder", str(tmp_path / "images")))


# Reading the index.


def change_index(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((out / "index.json").read_text())
    change(content)
    (out / "index.json").write_text(json.dumps(content))


def test_shards_are_named_from_one_folder(tmp_path: Path, shards: list[Path]) -> None:
    """So that one line of index.json has to change when they move; a relative one counts from the index."""
    inner = tmp_path / "in/more"
    inner.mkdir()
    shards[3] = shards[3].rename(inner / "3.tar")
    indexed(tmp_path / "out", *shards)
    before = contents(loaded(tmp_path / "out"))
    assert before[-1][0] == "more/3.tar/10.jpg"
    assert loaded(tmp_path / "out").path(11) == inner / "3.tar/10.jpg"
    (tmp_path / "in").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"in/0\.tar: No such file"):
        loaded(tmp_path / "out")
    change_index(tmp_path / "out", lambda content: content.update(folder="../moved"))
    assert contents(loaded(tmp_path / "out")) == before


def test_a_damaged_table_is_to_be_indexed_again(tmp_path: Path, shards: list[Path]) -> None:
    """Not packed again: nothing was packed."""
    indexed(tmp_path / "out", *shards)
    table = tmp_path / "out/index/size.npy"
    np.save(table, np.load(table)[:1])
    with pytest.raises(UserError, match=r"size\.npy: .* again, or index the shards again\.$"):
        loaded(tmp_path / "out")


def test_choices_of_other_sources_are_refused(tmp_path: Path, shards: list[Path]) -> None:
    indexed(tmp_path / "out", *shards)
    chosen: dict[str, Any] = {"box": "joints", "center_frac": 0.4, "part": "evaluation"}
    for key, value in chosen.items():
        with pytest.raises(UserError, match=rf"data\.{key} = .*: shards of other programs have neither"):
            loaded(tmp_path / "out", **{key: value})


def test_boxes_and_bad_lists_name_members(tmp_path: Path, shards: list[Path]) -> None:
    indexed(tmp_path / "out", *shards)
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("file,x0,y0,x1,y1\n2.tar/6.jpg,10,20,30,60\n0.tar/2.jpg,0,0,8,8\n")
    index = loaded(tmp_path / "out", box=str(boxes))
    assert index.paths[0] == "0.tar/2.jpg"
    np.testing.assert_array_equal(index.box_px[0], [4, 4, 8])
    assert index.paths[7] == "2.tar/6.jpg"
    np.testing.assert_array_equal(index.box_px[7], [20, 40, 40])
    assert not index.box_px[[1, 2, 3, 4, 5, 6, 8, 9, 10, 11]].any()
    boxes.write_text("file,x0,y0,x1,y1,hand\n2.tar/6.jpg,10,20,30,60,left\n0.tar/2.jpg,0,0,8,8,right\n"
                     "2.tar/6.jpg,0,0,6,6,right\n")  # fmt: skip
    hands = loaded(tmp_path / "out", box=str(boxes), shuffle_shards=2)
    assert list(hands.paths) == ["0.tar/2.jpg", "2.tar/6.jpg", "2.tar/6.jpg"]
    assert hands.mirror is not None
    assert hands.mirror.tolist() == [False, True, False]
    assert hands.blocks is not None
    assert hands.blocks.first.tolist() == [0, 1, 1, 3, 3]
    bad = tmp_path / "bad.jsonl"
    write_bad_list(bad, {"2.tar/6.jpg": ""}, checked=12)
    shown = load_index(DataConfig("shards", str(tmp_path / "out"), box=str(boxes), bad_list=str(bad)))
    assert list(shown.paths) == ["0.tar/2.jpg"]
    write_bad_list(bad, {"0.tar/0.jpg": "", "3.tar/11.jpg": ""}, checked=12)
    left = load_index(DataConfig("shards", str(tmp_path / "out"), bad_list=str(bad), shuffle_shards=2))
    assert set(loaded(tmp_path / "out").paths) - set(left.paths) == {"0.tar/0.jpg", "3.tar/11.jpg"}
    rows = EpochOrder(len(left), len(left), seed=0, blocks=left.blocks).samples(0, np.arange(len(left)))
    assert len({left.paths[row].split("/")[0] for row in rows[:5].tolist()}) <= 2
    write_bad_list(bad, {"0.tar/none.jpg": ""}, checked=12)
    with pytest.raises(UserError, match=r"has no '0\.tar/none\.jpg'"):
        load_index(DataConfig("shards", str(tmp_path / "out"), bad_list=str(bad)))


# Patterns.


def test_patterns_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train/00.tar", "train/01.tar", "train/02.tar", "val/00.tar", "val/b.tgz", "{a}.tar", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")

    def names(*patterns: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in find_shards([f"{tmp_path}/{one}" for one in patterns])]

    assert names("train/*.tar") == ["train/00.tar", "train/01.tar", "train/02.tar"]
    assert names("*/0[0-1].tar") == ["train/00.tar", "train/01.tar", "val/00.tar"]
    assert names("train/01.tar", "train/*.tar") == ["train/01.tar", "train/00.tar", "train/02.tar"]
    assert names("val", "train") == ["val/00.tar", "val/b.tgz", "train/00.tar", "train/01.tar", "train/02.tar"]
    assert names("{a}.tar") == ["{a}.tar"]  # a file of this name
    monkeypatch.chdir(tmp_path)
    assert find_shards(["train/00.tar"]) == [tmp_path / "train/00.tar"]


def test_patterns_without_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for pattern, message in [
        (
            f"{tmp_path}/{{00..03}}.tar",
            r"/\{00\.\.03\}\.tar: no such file\. Only the shell expands braces, .* without quotes",
        ),
        (f"{tmp_path}/{{00,01}}.tar", r"/\{00,01\}\.tar: no such file\. .* in quotes write a pattern with \*, \? or"),
        (f"{tmp_path}/no/*.tar", r"no/\*\.tar: no such file\. Check"),
        (f"{tmp_path}/{{00..03.tar", r"/\{00\.\.03\.tar: no such file\. Check"),
        (f"{tmp_path}/empty", r"empty: no \.tar files in this folder"),
        *(
            (one, "an address; only files are indexed")
            for one in ("s3://bucket/00*.tar", "https://host/0.tar", "pipe:cat 0.tar")
        ),
    ]:
        with pytest.raises(UserError, match=message):
            find_shards([pattern])


def test_hidden_files_of_a_folder_are_no_shards(tmp_path: Path, shards: list[Path]) -> None:
    """As macOS writes them beside each file on a disk of another system."""
    folder = shards[0].parent
    (folder / "._0.tar").write_bytes(b"\0\5\26\7 no tar")
    (folder / ".trash").mkdir()
    (folder / ".trash" / "4.tar").write_bytes(GOOD)
    assert find_shards([str(folder)]) == shards
    assert find_shards([f"{folder}/.trash"]) == [folder / ".trash" / "4.tar"]  # named by the user


def test_a_shard_that_a_link_leads_to_counts_once(tmp_path: Path, shards: list[Path]) -> None:
    """The first name stays, also where it is the link. A link to a file that is named once is no second name."""
    folder, lines = shards[0].parent, list[str]()
    (folder / "4.tar").symlink_to(shards[1])
    (folder / "again").symlink_to(tmp_path / "in")
    assert find_shards([str(folder)], say=lines.append) == shards
    assert lines == [f"{folder}/4.tar: the same file as {shards[1]}, so it is left out; such names in all: 1"]
    lines.clear()
    assert find_shards([f"{folder}/4.tar", f"{folder}/again/[01].tar"], say=lines.append) == [
        folder / "4.tar", folder / "again" / "0.tar",
    ]  # fmt: skip
    assert len(lines) == 1


def test_a_shard_of_another_time_is_named(tmp_path: Path, shards: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """Another one of the same size: its places in the index may be wrong."""

    def warnings() -> list[str]:
        caplog.clear()
        loaded(tmp_path / "out")
        return [record.getMessage() for record in caplog.records]

    indexed(tmp_path / "out", *shards)
    assert not warnings()
    for shard in shards[1:3]:
        os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    (line,) = warnings()
    assert f"2 of 4 shards have another time of change than in the index, such as {shards[1]}." in line
    indexed(tmp_path / "out", *shards)
    assert not warnings()


def test_shards_of_pack_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their own index has boxes and labels. Copies elsewhere are files like any other."""
    pack(load_shards_of_folder(tmp_path), tmp_path / "packed", per_shard=2, workers=1)
    assert run_cli("index", str(tmp_path / "packed"), str(tmp_path / "out")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"Use it as it is: data.source=shards, data.root={tmp_path / 'packed'}" in line
    assert not (tmp_path / "out").exists()
    (tmp_path / "copy").mkdir()
    for shard in (tmp_path / "packed").glob("*.tar"):
        shard.rename(tmp_path / "copy" / shard.name)
    assert indexed(tmp_path / "out", *sorted((tmp_path / "copy").iterdir())).samples == 3


# The command.


@pytest.mark.usefixtures("logging_set_back")
def test_the_command_line_trains_on_foreign_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two shards hold the images of a folder in its order, each beside a description."""
    images = tmp_path / "images"
    tiny_run.write_images(images)
    for number in range(2):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for image in sorted(images.iterdir())[25 * number : 25 * (number + 1)]:
                tar.add(image, image.name)
                tar.add(__file__, f"{image.stem}.json")
    assert run_cli("index", f"{tmp_path}/[01].tar", str(tmp_path / "index")) == 0
    said = capsys.readouterr().out
    assert "members that are no samples: 50 other\n" in said
    assert f"{tmp_path}/index: 50 images in 2 shards of {tmp_path}, 2 shards read now" in said
    ours, theirs = (
        load_index(DataConfig(kind, str(tmp_path / root))) for kind, root in (("shards", "index"), ("folder", "images"))
    )
    assert [ours.read(row) for row in range(50)] == [theirs.read(row) for row in range(50)]
    chosen = ("data.source=shards", "data.shuffle_shards=2", "train.epochs=1", "optim.warmup_epochs=0")
    overrides = tiny_run.settings(tmp_path / "index", tmp_path / "run", *chosen)
    with narrow_resnet18():
        assert run_cli("pretrain", *as_options(overrides)) == 0
    assert len(tiny_run.final_weights(tmp_path / "run", steps=4))
    steps = tiny_run.samples_of_steps(tmp_path / "run")
    order = build_order(load_index(DataConfig("shards", str(tmp_path / "index"), shuffle_shards=2)), batch=12, seed=0)
    assert [steps[step] for step in sorted(steps)] == order.samples(0, np.arange(48)).reshape(4, 12).tolist()


def test_the_command_names_what_may_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(7):
        (tmp_path / f"{number}.tar").write_bytes(GOOD[:1300])
    (tmp_path / "9.tar").write_bytes(bytes(1024))
    assert run_cli("index", f"{tmp_path}/*.tar", str(tmp_path / "out")) == 0
    said = capsys.readouterr().err
    assert said.count("no valid header at byte 1024") == 5
    assert f"7 shards may miss images at the end, see {tmp_path}/out/left_out.jsonl" in said
    assert "1 shard without an image: left out" in said
    (tmp_path / "8.tar").write_bytes(gzip.compress(GOOD))
    assert run_cli("index", f"{tmp_path}/*.tar", str(tmp_path / "out")) == 2
    assert "8.tar: compressed (gzip)" in capsys.readouterr().err
