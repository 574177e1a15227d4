"""Tar files: the same samples as from the files that were packed, tar files of other programs, and what is damaged."""

import dataclasses
import io
import os
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import chdir, closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset  # type: ignore[import-untyped]

from peclr_dali.errors import MachineError, UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.loader.prepare import Quarantine
from peclr_dali.pipelines.samples.index import Index, join
from peclr_dali.pipelines.samples.order import build_order
from peclr_dali.pipelines.sources import load_index, write_bad_list
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.pipelines.sources.shards import load_shards, tar_stores
from peclr_dali.pipelines.sources.shards.pack import Packed, index_tars, pack
from peclr_dali.pipelines.sources.shards.tar_index import INDEX_FILE
from tests.command_line import refusal, run_cli
from tests.pipelines.harness import RENDERERS, assert_equal, load
from tests.pipelines.image_files import encoded, smooth_picture
from tests.pipelines.sources.bucket import ADDRESS, Bucket
from tests.pipelines.sources.layouts import assert_refused, one_line
from tests.pipelines.sources.test_freihand import write_part

COUNT = 50


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """50 files with everything that an index can know."""
    root = tmp_path_factory.mktemp("source") / "images"
    root.mkdir()
    for number in range(COUNT):
        ending, kind = (("jpg", "JPEG"), ("png", "PNG"))[number % 2]
        (root / f"{number:03}.{ending}").write_bytes(encoded(smooth_picture(40 + number % 7, 48, seed=number), kind))
    rng = np.random.default_rng(0)
    keypoints_px = rng.uniform(0, 48, (COUNT, 21, 2)).astype(np.float32)
    keypoints_px[3, 5] = np.nan
    return dataclasses.replace(
        load_folder(DataConfig("folder", str(root))),
        box_px=rng.uniform(25, 40, (COUNT, 3)).astype(np.float32),
        keypoints_px=keypoints_px,
        mirror=rng.random(COUNT) < 0.5,
        group=np.arange(COUNT) // 3,
        targets={
            "K": (np.diag([90, 80, 1]) + [[1], [1], [0]] * rng.random((COUNT, 3, 3))).astype(np.float32),
            "scale_m": rng.random(COUNT).astype(np.float32),
        },
    )


@pytest.fixture(scope="module")
def packed(source: Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "shards"
    done = pack(source, out, per_tar=7, workers=2)
    assert done == Packed(COUNT, 8, sum(file.stat().st_size for file in out.glob("*.tar")), {})
    return out


def assert_comes_back(index: Index, source: Index) -> None:
    for name in ("box_px", "keypoints_px", "mirror", "group"):
        np.testing.assert_array_equal(getattr(index, name), getattr(source, name))
    assert index.targets.keys() == source.targets.keys()
    for name, table in source.targets.items():
        np.testing.assert_array_equal(index.targets[name], table)
    assert index.paths[-1] == "shard-000007.tar/000000049.png"
    assert list(index.read_many(range(COUNT))) == list(source.read_many(range(COUNT)))


def batches(index: Index, first: int = 0, **options: Any) -> list[Batch]:
    return load(index, batch=16, order=build_order(index, batch=16, seed=3), first=first, last=7, chunk=8, **options)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_batches_are_bit_identical_also_after_a_restart(source: Index, packed: Path, renderer: Any) -> None:
    index, expected = load_shards(DataConfig("shards", str(packed))), batches(source, views=renderer)
    assert_comes_back(index, source)
    assert_equal(batches(index, views=renderer), expected)
    assert_equal(batches(index, first=4, views=renderer), expected[4:])


def test_splits_versions_and_bad_lists_are_those_of_the_packed_data(tmp_path: Path) -> None:
    write_part(tmp_path / "hands", "training", 20, 80)
    assert run_cli("pack", "--set", f"data.root={tmp_path / 'hands'}", str(tmp_path / "packed"), "--per-tar", "30") == 0
    keys: dict[str, Any]
    for keys in ({"split": "val"}, {"split": "train"}, {"positive": "version"}, {"label_fraction": 0.3}):
        ours = load_index(DataConfig("shards", str(tmp_path / "packed"), **keys))
        theirs = load_index(DataConfig("freihand", str(tmp_path / "hands"), **keys))
        assert list(ours.read_many(range(len(ours)))) == list(theirs.read_many(range(len(theirs))))
        np.testing.assert_array_equal(ours.box_px, theirs.box_px)
        if "positive" in keys:
            np.testing.assert_equal(vars(ours.partners), vars(theirs.partners))
    write_bad_list(tmp_path / "bad.jsonl", {"shard-000000.tar/000000007.jpg": "for a test"})
    assert len(load_index(DataConfig("shards", str(tmp_path / "packed"), bad_list=str(tmp_path / "bad.jsonl")))) == 79
    assert_refused(
        DataConfig("shards", str(tmp_path / "packed"), part="evaluation"),
        r"data\.part = 'evaluation': it was chosen when the tar files were made",
    )


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the package's own: it leaves files open
def test_webdataset_reads_the_tar_files(source: Index, packed: Path) -> None:
    samples = list(webdataset.WebDataset(sorted(str(file) for file in packed.glob("*.tar")), shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{row:09d}" for row in range(COUNT)]
    images = [sample[("jpg", "png")[row % 2]] for row, sample in enumerate(samples)]
    assert images == list(source.read_many(range(COUNT)))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_tar_files_of_webdataset_are_indexed_where_they_are(
    source: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long names and other members among them; boxes are those of a file. A linked folder is one."""
    (tmp_path / ".part").mkdir()
    (tmp_path / "part").symlink_to(".part")
    names = [f"{'long/' * 30}{row:03}" for row in range(COUNT)]
    for number, rows in enumerate(np.array_split(np.arange(COUNT), 3)):
        with webdataset.TarWriter(str(tmp_path / "part" / f"{number}.tar")) as writer:
            writer.write({"__key__": ("._a", "@eaDir/a", "a/.b/c")[number], "jpg": b"hidden", "bmp": b"", "zip": b""})
            for row in rows.tolist():
                writer.write({"__key__": names[row], ("jpg", "png")[row % 2]: source.read(row), "json": {"label": row}})
    with tarfile.open(tmp_path / "part" / "0.tar", "a") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE):
            member = tarfile.TarInfo(f"{kind.decode()}.jpg")
            member.type, member.linkname = kind, "elsewhere"
            tar.addfile(member)
    for name in ("3.tar.gz", "3.tar.idx", "._0.tar"):
        (tmp_path / name).write_bytes(b"")
    assert run_cli("pack", "--index", str(tmp_path)) == 0
    printed = capsys.readouterr()
    for text in (
        "50 images in 3 tar files",
        "not read: 1 .gz; unpack archives",
        "not read: 1 symbolic links, 1 hidden images, 1 images of other formats, 1 archives within it",
    ):
        assert text in printed.out + printed.err
    shutil.copy(tmp_path / "part" / "1.tar", tmp_path / "new.tar")
    index = load_index(DataConfig("shards", str(tmp_path)))
    assert f"{tmp_path / INDEX_FILE} does not have new.tar, so it is not read; make" in capsys.readouterr().err
    assert list(index.read_many(range(COUNT))) == list(source.read_many(range(COUNT)))
    assert index.paths[0] == f"part/0.tar/{names[0]}.jpg"
    assert not index.box_px.any()
    (tmp_path / "boxes.csv").write_text(f"file,x0,y0,x1,y1\npart/0.tar/{names[0]}.jpg,1,2,11,12\n")
    boxes = load_index(DataConfig("shards", str(tmp_path), box=str(tmp_path / "boxes.csv"), box_margin=1.0)).box_px
    np.testing.assert_array_equal(boxes[:2], [[6, 7, 10], [0, 0, 0]])
    assert_refused(DataConfig("shards", str(tmp_path), split="val"), "do not say which of their images belong together")


def test_files_that_cannot_be_used_are_left_out(source: Index, tmp_path: Path) -> None:
    for row in range(3):
        (tmp_path / f"{row}.jpg").write_bytes(source.read(2 * row) if row != 1 else b"no image")
    index = load_folder(DataConfig("folder", str(tmp_path)))
    done = pack(index, tmp_path / "out", per_tar=2, workers=1)
    assert (done.samples, list(done.left_out)) == (2, [str(tmp_path / "1.jpg")])
    packed = load_shards(DataConfig("shards", str(tmp_path / "out")))
    assert list(packed.read_many([0, 1])) == list(index.read_many([0, 2]))
    with pytest.raises(UserError, match=r"none of its 1 images can be used; the first is .*1\.jpg"):
        pack(index.select(np.array([1])), tmp_path / "none", per_tar=2, workers=1)
    assert not (tmp_path / "none").exists()


def test_an_interrupted_pack_leaves_nothing_and_the_next_one_is_whole(
    source: Index, packed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if done > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, out, per_tar=7, workers=2, progress=stop)
    assert not out.exists()
    pack(source, out, per_tar=7, workers=2)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert {file.name: file.read_bytes() for file in out.glob("*.tar")} == {
        file.name: file.read_bytes() for file in packed.glob("*.tar")
    }
    with pytest.raises(UserError, match="is not empty"):
        pack(source, out, per_tar=7, workers=2)
    (tmp_path / "here").mkdir()
    with chdir(tmp_path / "here"), pytest.raises(UserError, match="here is not empty, the working folder or a mount"):
        pack(source, Path(), per_tar=7, workers=2)

    mine = tmp_path / "two.unfinished" / "shard-000000.tar.bak"
    mine.parent.mkdir()
    mine.touch()
    with pytest.raises(UserError, match="bak: 'pack' would replace this folder"):
        pack(source, tmp_path / "two", per_tar=7, workers=2)
    mine.unlink()

    def again(done: int, total: int) -> None:
        pack(source, tmp_path / "two", per_tar=7, workers=2)

    with pytest.raises(UserError, match="another 'pack' writes there"):
        pack(source, tmp_path / "two", per_tar=7, workers=2, progress=again)


@pytest.mark.parametrize(
    ("name", "damaged", "message"),
    [
        ("shard-000002.tar", lambda data: data[:100], "has 100 bytes, and index.npz was made when it had"),
        ("shard-000002.tar", None, "No such file"),
        (INDEX_FILE, lambda data: data[:-300], "is not an index of tar files"),
        (INDEX_FILE, lambda data: b"<html>", "is not an index of tar files .File is not a zip file"),
        (INDEX_FILE, None, "No such file or directory; expected tar files and their index"),
    ],
)
def test_damage_is_one_line(name: str, damaged: Any, message: str, packed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    data = (copy / name).read_bytes()
    (copy / name).unlink()
    if damaged is not None:
        (copy / name).write_bytes(damaged(data))
    assert_refused(DataConfig("shards", str(copy)), message, name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tars", lambda array: array.astype("S"), r"tars is \(8,\) of .S16"),
        ("tar_bytes", lambda array: array[1:], "do not fit each other"),
        ("tar", lambda array: array / 2, "tar is .* of float64"),
        ("offset", lambda array: array - 600, "do not fit"),
        ("size", lambda array: array + 2**20, "do not fit"),
        ("members", lambda array: array[:, None], r"members is \(50, 1\)"),
        ("box_px", lambda array: array[:, :2], r"box_px is \(50, 2\)"),
        ("target.K", lambda array: array.astype("S"), "K is .* of .S"),
        ("target.scale_m", lambda array: array[:, None], r"target.scale_m is \(50, 1\)"),
        ("about", lambda array: array[:5], "is not an index of tar files"),
    ],
)
def test_an_index_with_other_arrays_is_one_line(
    name: str, change: Any, message: str, packed: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    with np.load(copy / INDEX_FILE) as file:
        arrays = dict(file)
    np.savez_compressed(copy / INDEX_FILE, **arrays | {name: change(arrays[name])})
    assert_refused(DataConfig("shards", str(copy)), message, INDEX_FILE)


def write_tar(file: Path, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> None:
    """A tar file; `kind` is that of its last member."""
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if name == list(members)[-1]:
                member.type, member.linkname = kind, "0.jpg"
            tar.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize(
    ("damage", "byte", "images"),
    [
        (lambda data: data[:1100], 1024, 1),  # in the second header
        (lambda data: data[:2600], 2600, 3),  # in the third image
        (lambda data: data[:6144], 6144, 6),  # before the end
        (lambda data: data[:6656], 6144, 6),  # in the end
        (lambda data: data[:2070] + b"\1" + data[2071:], 2048, 2),  # in the third header
        (lambda data: data[:2048] + bytes(1024) + data[3072:4096] + bytes(6144), 4096, 3),
        (lambda data: data[:2048] + bytes(30_000), 2048, 2),
        (lambda data: data + b"x", 10_240, 6),
        (lambda data: data + data[:2070] + b"\1" + data[2071:], 12_288, 6),
        (lambda data: b"", 0, 0),
    ],
)
def test_a_tar_file_that_does_not_end_as_one_is_one_line(damage: Any, byte: int, images: int, tmp_path: Path) -> None:
    """So that no image is lost without a word. Members take 1,024 bytes, with their headers."""
    tar = tmp_path / "a.tar"
    write_tar(tar, {f"{row}.jpg": b"image" for row in range(6)})
    tar.write_bytes(damage(tar.read_bytes()))
    with one_line("a.tar cannot be read as a tar file", f"at byte {byte}, after {images} images"):
        index_tars(tmp_path)
    assert not (tmp_path / INDEX_FILE).exists()


def test_joined_tar_files_hard_links_and_names_that_come_twice(tmp_path: Path) -> None:
    """The later image of a name counts, as where tar unpacks both. A member of a type that no tar knows is a file."""
    write_tar(tmp_path / "a.TAR", {"0.jpg": b"old", "1.jpg": b""}, tarfile.LNKTYPE)
    first = (tmp_path / "a.TAR").read_bytes()
    write_tar(tmp_path / "a.TAR", {"2.jpg": b"two", "./a/..//0.jpg": b"new"}, b"Z")
    (tmp_path / "a.TAR").write_bytes(first + (tmp_path / "a.TAR").read_bytes())
    assert index_tars(tmp_path).samples == 3
    index = load_index(DataConfig("shards", str(tmp_path)))
    assert dict(zip(index.paths, index.read_many(range(3)), strict=True)) == {
        "a.TAR/0.jpg": b"new", "a.TAR/1.jpg": b"old", "a.TAR/2.jpg": b"two"
    }  # fmt: skip


def test_records_may_be_larger_and_a_pipe_is_no_tar_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As `tar -b 128` fills its last record, or a copy that was cut. A pipe is left out: it might never end."""
    tar = tmp_path / "a.tar"
    write_tar(tar, {f"{row}.jpg": b"image" for row in range(6)})
    tar.write_bytes(tar.read_bytes().ljust(128 * 512, b"\0"))
    assert index_tars(tmp_path).samples == 6
    assert (
        f"{tar}: not read: {128 * 512 - 6 * 1024} bytes of zeros at the end, as in a copy that was cut"
        in caplog.messages
    )
    os.mkfifo(tmp_path / "b.tar")
    index_tars(tmp_path)
    assert f"{tmp_path}: not read: 1 no regular file, such as a pipe; unpack archives" in caplog.messages


def test_labels_of_a_packed_set_and_a_link_stay(source: Index, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").symlink_to("folder")
    pack(source, tmp_path / "out", per_tar=7, workers=2)
    assert (tmp_path / "out").is_symlink()
    index = (tmp_path / "folder" / INDEX_FILE).read_bytes()
    with one_line("index.npz was written by 'pack' and has the labels"):
        index_tars(tmp_path / "out")
    assert (tmp_path / "folder" / INDEX_FILE).read_bytes() == index == (packed / INDEX_FILE).read_bytes()


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.GNUTYPE_SPARSE, b"M"])
def test_images_that_have_no_bytes_of_their_own_are_refused(kind: bytes, tmp_path: Path) -> None:
    """Or not all, as in a volume of several."""
    write_tar(tmp_path / "a.tar", {"1.jpg": b""} if kind == tarfile.LNKTYPE else {"0.jpg": b"", "1.jpg": b""}, kind)
    with one_line("1.jpg is a sparse file, a hard link to none before it, a part of a file, or of .*, at byte"):
        index_tars(tmp_path)
    member = tarfile.TarInfo("2.jpg")
    member.size = -512  # of a damaged header: the next one would be itself
    (tmp_path / "a.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with one_line("2.jpg is a sparse file, .* or of negative size, at byte 0, after 0 images"):
        index_tars(tmp_path)


@pytest.fixture
def bucket(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    from s3fs import S3FileSystem  # type: ignore[import-untyped]

    with closing(Bucket(packed)) as started:
        S3FileSystem.clear_instance_cache()
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tar_stores, "_WAITS_S", (0.0, 0.0, 0.0))
        yield started


def test_an_address_gives_the_same_batches_also_where_requests_fail(bucket: Bucket, source: Index) -> None:
    """Each third request for a tar file is an error of the server, each fifth is cut."""

    def fault(name: str, number: int) -> Any:
        return None if not name.endswith(".tar") else "500" if number % 3 == 0 else "cut" if number % 5 == 0 else None

    expected = batches(source)
    index = load_index(DataConfig("shards", ADDRESS, box_margin=1.0))
    assert_comes_back(index, source)
    bucket.fault = fault
    quarantine = Quarantine()
    assert_equal(batches(index, quarantine=quarantine), expected)
    assert not quarantine.reasons
    assert bucket.faults["500"] > 5
    assert bucket.faults["cut"] > 5


def test_an_address_that_goes_on_failing_is_a_bad_file(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a server that does not say how large files are."""
    monkeypatch.setattr("s3fs.S3FileSystem.sizes", lambda _, paths: [None] * len(paths))
    index = load_index(DataConfig("shards", ADDRESS))
    bucket.fault = lambda name, number: "500" if name == "shard-000003.tar" else None
    quarantine = Quarantine()
    made = batches(index, quarantine=quarantine)
    assert set(quarantine.reasons) <= set(range(21, 28))
    assert quarantine.reasons
    assert all(not (21 <= sample < 28) for batch in made for sample in batch.samples.flatten().tolist())


def test_a_server_that_fails_from_the_start_ends_the_run(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """After the attempts for one image, of which a line says how many there are and how long they take."""
    index = load_shards(DataConfig("shards", ADDRESS))
    bucket.fault = lambda name, number: "500"
    with one_line("s3://images/packed: no image could be read", "Check the server"):
        index.read(0)
    assert [record.message.partition(" cannot be read (")[0] for record in caplog.records] == [f"{ADDRESS}: an image"]
    assert caplog.messages[0].endswith("it is asked for 2 times more, as are later ones")
    assert bucket.faults["500"] < 10
    bucket.fault = lambda name, number: None
    assert index.read(0)
    bucket.fault = lambda name, number: "500"
    with pytest.raises(MachineError, match="s3://images/packed: no image could be read"):  # also in its midst
        [list(index.read_many(range(COUNT))) for _ in range(3)]


def test_a_slow_server_without_ranges_is_one_line_at_the_start_and_one_meanwhile(
    packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            while "index.npz" not in caplog.text:  # a message before it may be that of a slow import
                time.sleep(0.01)
            super().do_GET()

    monkeypatch.setattr(tar_stores, "PATIENCE_S", 0.1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Slow, directory=str(packed)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with closing(server.socket), one_line(f"{address}: the server gives whole files, not ranges of them"):
        load_index(DataConfig("shards", address))
    server.shutdown()
    assert f"{address}/index.npz: no answer yet, still waiting" in caplog.messages


def test_joined_tar_files_and_folders_are_read_and_named_where_they_are(
    bucket: Bucket, packed: Path, source: Index
) -> None:
    parts = [*(load_index(DataConfig("shards", root)) for root in (ADDRESS, str(packed))), source]
    joined, local = join(parts, [1.0] * 3), join(parts[1:], [1.0] * 2)
    assert parts[0].location(0) == joined.location(0) == f"{ADDRESS}/shard-000000.tar/000000000.jpg"
    assert joined.location(COUNT) == local.location(0) == f"{packed}/shard-000000.tar/000000000.jpg"
    assert joined.location(2 * COUNT) == local.location(COUNT) == str(source.path(0))
    assert list(joined.read_many(range(3 * COUNT))) == list(source.read_many(range(COUNT))) * 3


def test_an_address_that_cannot_be_read_is_one_line(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    for root in ("s3://images/nowhere", "nosuch://images/packed", "s3://me:secret@images/packed"):
        error = refusal(capsys, "views", "--set", "data.source=shards", "--set", f"data.root={root}", "v.png")
        assert error.startswith("error: ")
        assert root.replace("me:secret", "***") in error
        assert "secret" not in error


def test_members_of_tar_files_may_have_names_in_any_encoding(source: Index, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {os.fsdecode(b"h\xe4nde.jpg"): source.read(0)})
    index_tars(tmp_path)
    index = load_index(DataConfig("shards", str(tmp_path)))
    assert [os.fsencode(path) for path in index.paths] == [b"a.tar/h\xe4nde.jpg"]
    assert index.read(0) == source.read(0)
