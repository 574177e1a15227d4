"""Shards: what other tools read in them, the same batches as from the source, what is said of damage."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset  # type: ignore[import-untyped]

from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.bad_list import write_bad_list
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import EpochOrder, build_order
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.pipelines.sources.shards.load import load_shards
from peclr_dali.pipelines.sources.shards.pack import Packed, pack
from peclr_dali.pipelines.sources.shards.shard_store import ShardStore
from peclr_dali.train.config.finetuning import FinetuneDataConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from tests.command_line import as_options, run_cli
from tests.pipelines.decoder_fuzz import encoded, smooth_picture
from tests.pipelines.harness import RENDERERS, assert_equal, load
from tests.pipelines.sources.test_freihand import write_part

COUNT = 50
ROOT = Path(__file__).parents[3]


def write_images(root: Path, count: int = COUNT) -> None:
    root.mkdir()
    for number in range(count):
        kind = ("JPEG", "PNG")[number % 2]
        ending = {"JPEG": "jpg", "PNG": "png"}[kind]
        picture = smooth_picture(40 + number % 7, 48, seed=number)
        (root / f"{number:03}.{ending}").write_bytes(encoded(picture, kind))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """50 files with everything that an index can know."""
    root = tmp_path_factory.mktemp("source") / "images"
    write_images(root)
    rng = np.random.default_rng(0)
    keypoints_px = rng.uniform(0, 48, (COUNT, 21, 2)).astype(np.float32)
    keypoints_px[3, 5] = np.nan
    return dataclasses.replace(
        load_folder(DataConfig("folder", str(root))),
        box_px=rng.uniform(10, 30, (COUNT, 3)).astype(np.float32),
        keypoints_px=keypoints_px,
        mirror=rng.random(COUNT) < 0.5,
        group=np.arange(COUNT) // 3,
        targets={"K": rng.random((COUNT, 3, 3)).astype(np.float32), "scale_m": rng.random(COUNT).astype(np.float32)},
    )


@pytest.fixture(scope="module")
def packed(source: Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "shards"
    assert packed_by(source, out) == Packed(COUNT, 8, sum(file.stat().st_size for file in out.glob("*.tar")), 0, False)
    return out


def packed_by(index: Index, out: Path, **options: Any) -> Packed:
    return pack(index, out, **{"per_shard": 7, "workers": 2, **options})


def test_an_index_comes_back_as_it_was(source: Index, packed: Path) -> None:
    index = load_shards(DataConfig("shards", str(packed)))
    assert [index.read(row) for row in range(COUNT)] == [source.read(row) for row in range(COUNT)]
    np.testing.assert_array_equal(index.box_px, source.box_px)
    for ours, theirs in (
        (index.keypoints_px, source.keypoints_px),
        (index.mirror, source.mirror),
        (index.group, source.group),
    ):
        assert ours is not None
        assert theirs is not None
        np.testing.assert_array_equal(ours, theirs)
    assert index.targets.keys() == source.targets.keys()
    for name, table in source.targets.items():
        np.testing.assert_array_equal(index.targets[name], table)
    assert str(index.path(8)) == f"{packed}/shard-000001.tar/000000008.jpg"
    assert index.paths[-1] == "shard-000007.tar/000000049.png"


@pytest.mark.parametrize("renderer", RENDERERS)
def test_batches_are_bit_identical(source: Index, packed: Path, renderer: Any) -> None:
    def batches(index: Index) -> list[Batch]:
        return load(index, batch=16, order=build_order(index, batch=16, seed=3), last=7, chunk=8, views=renderer)

    for ours, theirs in zip(batches(load_shards(DataConfig("shards", str(packed)))), batches(source), strict=True):
        assert_equal(ours, theirs)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the package's own: it leaves files open
def test_webdataset_reads_the_shards(source: Index, packed: Path) -> None:
    urls = sorted(str(file) for file in packed.glob("*.tar"))
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{row:09d}" for row in range(COUNT)]
    for row, sample in enumerate(samples):
        known = json.loads(sample["json"])
        assert sample["jpg" if row % 2 == 0 else "png"] == source.read(row)
        assert known["path"] == source.paths[row]
        np.testing.assert_array_equal(np.array(known["box_px"], np.float32), source.box_px[row])
        assert source.keypoints_px is not None
        np.testing.assert_array_equal(np.array(known["keypoints_px"], np.float32), source.keypoints_px[row])
        np.testing.assert_array_equal(np.array(known["K"], np.float32), source.targets["K"][row])
    assert json.loads(samples[3]["json"])["keypoints_px"][5] == [None, None]


def test_sums_are_those_of_the_shards(packed: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=packed, check=True, capture_output=True)


def test_nothing_is_overwritten(source: Index, packed: Path, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in packed.rglob("*")}
    assert packed_by(source, packed).already_there
    with pytest.raises(UserError, match="shards of per_shard 7, not 8"):
        packed_by(source, packed, per_shard=8)
    with pytest.raises(UserError, match="shards of other files, boxes or labels"):
        packed_by(dataclasses.replace(source, box_px=source.box_px + 1), packed)
    assert {file: file.stat().st_mtime_ns for file in packed.rglob("*")} == before
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(UserError, match="holds no shards of this source"):
        packed_by(source, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_shard_that_the_disk_keeps_otherwise_is_refused(
    source: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit turned over between writing and reading back: no shard, no index, and the same call mends it."""
    real = os.fsync

    def bad_disk(descriptor: int) -> None:
        real(descriptor)
        if "shard-" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            os.pwrite(descriptor, b"\xfe", 5000)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", bad_disk)
        with pytest.raises(UserError, match=r"shard-0000\d\d\.part: reads back differently from what was written"):
            packed_by(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tar"))
    assert not (tmp_path / "out/index.json").exists()
    assert packed_by(source, tmp_path / "out").samples == COUNT
    assert [load_shards(DataConfig("shards", str(tmp_path / "out"))).read(row) for row in range(COUNT)] == [
        source.read(row) for row in range(COUNT)
    ]


def test_packing_again_misses_a_shard_that_is_gone_or_cut(source: Index, packed: Path, tmp_path: Path) -> None:
    """Also that what it advises helps."""
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    shard = out / "shard-000003.tar"
    os.truncate(shard, 700)
    with pytest.raises(UserError, match=r"shard-000003\.tar: 700 bytes, expected \d+: cut or changed"):
        packed_by(source, out)
    shard.unlink()
    with pytest.raises(UserError, match=r"To pack again, remove .*index\.json: all shards are written anew"):
        packed_by(source, out)
    shard.write_bytes((packed / shard.name).read_bytes())
    (out / "index/offset.npy").unlink()
    with pytest.raises(UserError, match=r"offset\.npy: not a readable table .*To pack again, remove"):
        packed_by(source, out)
    (out / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"not a readable index of shards .*To pack again, remove"):
        packed_by(source, out)
    shard.unlink()
    (out / "index.json").unlink()
    assert not packed_by(source, out).already_there
    assert shard.read_bytes() == (packed / shard.name).read_bytes()


class Killed(BaseException):
    """Stands for a kill."""


def test_what_was_interrupted_goes_on_and_ends_the_same(source: Index, packed: Path, tmp_path: Path) -> None:
    """A finished shard stays as it is, and one that changed meanwhile is written anew."""
    out = tmp_path / "shards"

    def kill(done: int, total: int) -> None:
        if done >= 20:
            raise Killed

    class Slow(type(source)):  # type: ignore[misc]
        def read(self, sample: int) -> bytes:
            time.sleep(0.02)
            return source.read(sample)

    slow = Slow(**{field.name: getattr(source, field.name) for field in dataclasses.fields(source)})
    with pytest.raises(Killed):
        packed_by(slow, out, progress=kill, workers=1)
    assert not (out / "index.json").exists()
    with pytest.raises(UserError, match=r"run the same 'python cli\.py pack' again"):
        load_shards(DataConfig("shards", str(out)))
    changed, *finished = sorted(out.glob("*.tar"))
    assert 0 < len(finished) < 7
    data = bytearray(changed.read_bytes())
    data[600] ^= 1  # as long as before
    changed.write_bytes(data)
    times = [file.stat().st_mtime_ns for file in finished]
    packed_by(source, out)
    assert [file.stat().st_mtime_ns for file in finished] == times
    for file in packed.rglob("*"):
        if file.is_file():
            assert (out / file.relative_to(packed)).read_bytes() == file.read_bytes()
    assert len(list(out.rglob("*"))) == len(list(packed.rglob("*")))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("pack.json", r"pack\.json: damaged \(.*is a pipe or a device"),
        ("shard-000000.part", None),
        ("shard-000000.tar", None),
        ("parts/000000.npz", r"parts/000000\.npz: cannot be written to"),
        ("SHA256SUMS", r"SHA256SUMS: cannot be written to"),
        ("index/size.npy", r"size\.npy: cannot be written to"),
    ],
)
def test_pipes_in_the_folder_do_not_hang(
    source: Index, packed: Path, tmp_path: Path, name: str, line: str | None
) -> None:
    """`None`: a shard is written in its place."""
    out = tmp_path / "out"
    shutil.copytree(packed, out)
    (out / "index.json").unlink()
    (out / name).unlink(missing_ok=True)
    (out / name).parent.mkdir(exist_ok=True)
    os.mkfifo(out / name)
    if line is None:
        assert packed_by(source, out).samples == COUNT
        return
    with pytest.raises(UserError, match=line):
        packed_by(source, out)


def test_a_table_that_is_a_pipe_is_one_line(copy: Path) -> None:
    (copy / "index/size.npy").unlink()
    os.mkfifo(copy / "index/size.npy")
    with pytest.raises(UserError, match=r"size\.npy: not a readable table of the index .*pipe"):
        load_shards(DataConfig("shards", str(copy)))


@pytest.mark.parametrize("notes", [b"[1]", b"[" * 99_999])
def test_wrong_notes_of_a_shard_write_it_anew(source: Index, packed: Path, tmp_path: Path, notes: bytes) -> None:
    shutil.copytree(packed, tmp_path / "out")
    (tmp_path / "out/index.json").unlink()
    (tmp_path / "out/parts").mkdir()
    np.savez(tmp_path / "out/parts/000000.npz", notes=np.frombuffer(notes, np.uint8))
    assert packed_by(source, tmp_path / "out").samples == COUNT


def test_a_damaged_job_is_one_line(source: Index, tmp_path: Path) -> None:
    for torn in ("3", "{"):
        (tmp_path / "pack.json").write_text(torn)
        with pytest.raises(UserError, match=r"pack\.json: .*Remove the folder and pack again"):
            packed_by(source, tmp_path)


@pytest.mark.slow  # the command starts eleven times
def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    """SIGKILL at ten moments; what is there at the end is what an undisturbed call writes."""
    write_images(tmp_path / "images", 400)
    source = load_folder(DataConfig("folder", str(tmp_path / "images")))
    command = [
        sys.executable, "cli.py", "pack", "--per-shard", "20", "--set", "data.source=folder",
        "--set", f"data.root={tmp_path / 'images'}", str(tmp_path / "out"),
    ]  # fmt: skip
    for attempt in range(10):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        limit = time.monotonic() + 60
        while time.monotonic() < limit and len(list((tmp_path / "out").glob("parts/*.npz"))) < 2 * attempt:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    pack(source, tmp_path / "again", per_shard=20, workers=1)
    ours, theirs = ({f.name: f.read_bytes() for f in (tmp_path / n).glob("*.tar")} for n in ("out", "again"))
    assert ours == theirs
    assert len(load_shards(DataConfig("shards", str(tmp_path / "out")))) == 400


def test_bad_files_are_left_out_and_named(source: Index, tmp_path: Path) -> None:
    images = tmp_path / "images"
    shutil.copytree(source.root, images)
    (images / "004.jpg").write_bytes(b"")
    index = dataclasses.replace(source, root=images, paths=[*source.paths[:-1], "gone.png"])
    assert packed_by(index, tmp_path / "out").left_out == 2
    rows = [json.loads(line) for line in (tmp_path / "out/left_out.jsonl").read_text().splitlines()]
    assert [Path(row["path"]).name for row in rows] == ["004.jpg", "gone.png"]
    assert rows[0]["reason"] == "empty file"
    kept = load_shards(DataConfig("shards", str(tmp_path / "out")))
    assert [kept.read(row) for row in range(48)] == [source.read(row) for row in range(49) if row != 4]
    np.testing.assert_array_equal(kept.box_px[4], source.box_px[5])
    gone = dataclasses.replace(source, root=tmp_path)
    with pytest.raises(
        UserError, match=r"none of its 50 images can be used; the first is \S+000.jpg: \[Errno 2\] No such"
    ):
        packed_by(gone, tmp_path / "none")


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def test_damage_is_one_clear_line(copy: Path) -> None:
    def message() -> str:
        with pytest.raises(UserError) as caught:
            load_shards(DataConfig("shards", str(copy)))
        return str(caught.value)

    shard = copy / "shard-000003.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert message() == (
        f"{shard}: {len(whole) - 1} bytes, expected {len(whole)}: cut or changed. Copy it again, or pack again."
    )
    shard.unlink()
    assert message().startswith(f"{shard}: No such file or directory; the index names 8 shards")
    shard.write_bytes(whole)
    table = copy / "index/size.npy"
    np.save(table, np.load(table)[:-1])
    assert message().startswith(f"{table}: uint32 (49,), expected uint32 with 50 rows")
    table.write_bytes(table.read_bytes()[:100])
    assert message().startswith(f"{table}: not a readable table")
    (copy / "index.json").write_text("{")
    assert message().startswith(f"{copy / 'index.json'}: not a readable index of shards")
    shutil.rmtree(copy)
    copy.mkdir()
    assert "give a folder that 'python cli.py pack' made, or 'python cli.py index' for shards of other" in message()


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / "index.json").read_text())
    change(content)
    (folder / "index.json").write_text(json.dumps(content))


def test_an_index_with_wrong_values_is_one_line(copy: Path) -> None:
    """Shards are files of its folder, their sizes whole numbers, its tables known ones."""
    good = (copy / "index.json").read_bytes()
    wrong: dict[str, list[Any]] = {
        "file": ["/etc/passwd", "../shard.tar", "..", "", "a//b", "a\0.tar", 7, None, ["a"], {"a": 1}],
        "samples": [7.0, -7, "7", True], "bytes": [1e9, None], "sha256": [5],
        "tables": [["../box_px"], ["/tmp/x"], ["target."], ["target.a/b"], [3], [None], [["a"]], []],
        "crc32": [{"offset": "0"}, [1]], "skeleton": ["cat"], "format": [2, None], "shards": [[], 3, [3]],
        "name": [3],
    }  # fmt: skip
    texts = ["[" * 100_000, "1" * 5000, '{"format": 1}', "[]", "\xff", "null", '{"format": NaN}', "{"]
    for key, values in wrong.items():
        for value in values:
            content = json.loads(good)
            of_shard = key in content["shards"][0]
            (content["shards"][0] if of_shard else content)[key] = value
            texts.append(json.dumps(content))
    for text in texts:
        (copy / "index.json").write_bytes(text.encode("latin1"))
        with pytest.raises(
            UserError, match=r"^\S*index\.json: not a readable index of shards \(.*\)\. Restore it"
        ) as told:
            load_shards(DataConfig("shards", str(copy)))
        assert len(str(told.value)) < 500


def test_an_archive_in_place_of_a_table_is_one_line(copy: Path) -> None:
    table = copy / "index/box_px.npy"
    with table.open("wb") as file:
        np.savez(file, box_px=np.zeros((50, 3), np.float32))
    change_index(copy, lambda content: content.pop("crc32"))
    with pytest.raises(UserError, match=r"box_px\.npy: not a readable table of the index \(the magic string"):
        load_shards(DataConfig("shards", str(copy)))


@pytest.mark.parametrize("name", ["box_px", "offset", "target.K"])
def test_a_flipped_bit_in_the_index_is_found(copy: Path, name: str) -> None:
    table = copy / f"index/{name}.npy"
    content = bytearray(table.read_bytes())
    content[-6] ^= 1
    table.write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}\.npy: not the bytes that were packed \(wrong checksum\)"):
        load_shards(DataConfig("shards", str(copy)))
    change_index(copy, lambda content: content.pop("crc32"))
    load_shards(DataConfig("shards", str(copy)))  # packed by an earlier version, which wrote no checksums


@pytest.mark.parametrize(("name", "value"), [("offset", 2**63), ("offset", 2**64 - 1), ("size", 2**32 - 1)])
def test_a_place_beyond_any_file_costs_its_sample_only(copy: Path, source: Index, name: str, value: int) -> None:
    table = np.load(copy / f"index/{name}.npy")
    table[3] = value
    np.save(copy / f"index/{name}.npy", table)
    change_index(copy, lambda content: content.pop("crc32", None))
    index = load_shards(DataConfig("shards", str(copy)))
    with pytest.raises(OSError, match=r"the index has it at byte \d+ of shard-000000\.tar"):
        index.read(3)
    assert index.paths[3].startswith("shard-000000.tar/")
    assert index.read(4) == source.read(4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0, 1e9])
def test_a_packed_box_that_is_no_box_is_refused(copy: Path, value: float) -> None:
    table = np.load(copy / "index/box_px.npy")
    table[30, 2] = value
    np.save(copy / "index/box_px.npy", table)
    change_index(copy, lambda content: content.pop("crc32", None))
    with pytest.raises(
        UserError, match=r"copy: 1 of 50 boxes are not valid, first that of shard-000004\.tar/000000030\.jpg"
    ):
        load_index(DataConfig(source="shards", root=str(copy)))


def test_a_shard_cut_while_it_is_read_loses_its_samples_only(copy: Path) -> None:
    index = load_shards(DataConfig("shards", str(copy)))
    os.truncate(copy / "shard-000001.tar", 700)
    with pytest.raises(OSError, match=r"shard-000001\.tar ends before byte"):
        index.read(8)
    assert index.paths[9] == "shard-000001.tar/row 9"
    assert len(index.read(20)) > 100


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_shards_are_read_with_few_descriptors(source: Index, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    packed_by(source, out, per_shard=1)
    index = load_shards(DataConfig("shards", str(out), shuffle_shards=2))
    before = descriptors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peclr_dali.pipelines.sources.shards.shard_store.OPEN_SHARDS", 4)
        assert [index.read(row) for row in range(COUNT)] == [source.read(row) for row in range(COUNT)]
    assert descriptors() <= before + 4


def test_keys_that_do_not_go_together(packed: Path, source: Index) -> None:
    chosen: dict[str, Any] = {"part": "evaluation", "versions": ("gs",), "center_frac": 0.4}
    shards = DataConfig(source="shards", root=str(packed))
    for key, value in [*chosen.items(), ("box", "boxes.csv"), ("box", "joints")]:
        with pytest.raises(UserError, match=rf"data\.{key} = .*: it was chosen when the shards were packed"):
            load_index(dataclasses.replace(shards, **{key: value}))
    to_finetune = FinetuneDataConfig(source="shards", root=str(packed), split="all")
    assert to_finetune.box == "joints"
    assert len(load_index(to_finetune)) == COUNT
    with pytest.raises(UserError, match=r"data\.box = 'center': it was chosen when"):
        load_index(dataclasses.replace(to_finetune, box="center"))
    with pytest.raises(UserError, match=r"data\.shuffle_shards = 2: data.source is 'folder'"):
        load_index(DataConfig(source="folder", root=str(source.root), shuffle_shards=2))


def test_the_configuration_of_pack_reads_its_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`pack -c F`, then `-c F --set data.source=shards`: what chose images and boxes is not chosen again."""
    write_part(tmp_path / "freihand", "training", poses=3, images=12)
    (tmp_path / "boxes.csv").write_text("file,x0,y0,x1,y1\n00000000.jpg,1,2,11,12\n")
    file, out = tmp_path / "F.toml", str(tmp_path / "shards")
    for number, (kind, box) in enumerate((("freihand", "joints"), ("folder", f"{tmp_path}/boxes.csv"))):
        keys = {"center_frac": 0.5, "versions": ["gs", "hom"], "box": box} if kind == "freihand" else {"box": box}
        root = tmp_path / ("freihand" if kind == "freihand" else "freihand/training/rgb")
        lines = (f"{key} = {json.dumps(value)}" for key, value in {**keys, "source": kind, "root": str(root)}.items())
        file.write_text("\n".join(["[data]", *lines]))
        assert run_cli("pack", "-c", str(file), f"{out}{number}") == 0
        shards = as_options(("data.source=shards", f"data.root={out}{number}"))
        of_file, of_shards = (load_index(load_config(Config, [file], changes).data) for changes in ((), shards[1::2]))
        np.testing.assert_array_equal(of_shards.box_px, of_file.box_px)
        assert run_cli("check-data", "-c", str(file), *shards, "--set", "data.center_frac=0.4", f"{out}.jsonl") == 2
        known = r"data\.center_frac = 0\.4: it was chosen when the shards were packed, with 0\.[56]\. Leave it out, or"
        assert re.search(known, capsys.readouterr().err)


@pytest.mark.parametrize("split", ["train", "val"])
def test_packed_data_is_split_as_its_source(split: Any, tmp_path: Path) -> None:
    """So that fine-tuning on shards holds the same poses out, and validates on none that it trains on."""
    write_part(tmp_path / "freihand", "training", poses=30, images=120)
    freihand = DataConfig(root=str(tmp_path / "freihand"))
    pack(load_index(dataclasses.replace(freihand, box_margin=1.0)), tmp_path / "shards", per_shard=50, workers=1)
    shards = DataConfig(source="shards", root=str(tmp_path / "shards"))
    theirs, ours = (load_index(dataclasses.replace(one, split=split)) for one in (freihand, shards))
    assert len(ours) == {"train": 4 * 27, "val": 4 * 3}[split]
    assert ours.group is not None
    assert theirs.group is not None
    np.testing.assert_array_equal(ours.group, theirs.group)
    assert [ours.read(row) for row in range(len(ours))] == [theirs.read(row) for row in range(len(theirs))]


def test_packed_data_without_groups_is_not_split(source: Index, tmp_path: Path) -> None:
    packed_by(dataclasses.replace(source, group=None), tmp_path / "out")
    with pytest.raises(UserError, match=r"data\.split = 'val': the shards of .* cannot be split"):
        load_index(DataConfig(source="shards", root=str(tmp_path / "out"), split="val"))


def test_a_window_keeps_near_what_lies_near(packed: Path) -> None:
    """Every sample once an epoch; at any moment, samples of two shards only; another epoch mixes other shards."""
    index = load_index(DataConfig(source="shards", root=str(packed), shuffle_shards=2))
    order = EpochOrder(COUNT, COUNT, seed=1, blocks=index.blocks)
    everything = np.arange(COUNT)
    pairs = []
    for epoch in range(3):
        rows = order.samples(epoch, everything)
        np.testing.assert_array_equal(np.sort(rows), everything)
        shards = rows // 7
        blocks = order_of_first_sight(shards)
        for number in range(0, 8, 2):
            places = np.flatnonzero(np.isin(shards, blocks[number : number + 2]))
            assert places[-1] - places[0] + 1 == len(places)
        pairs.append({frozenset(blocks[number : number + 2]) for number in range(0, 8, 2)})
    assert pairs[0] != pairs[1]
    again = EpochOrder(COUNT, COUNT, seed=1, blocks=index.blocks)
    np.testing.assert_array_equal(again.samples(2, everything[::-1]), order.samples(2, everything)[::-1])


@pytest.mark.parametrize(("window", "shards_read_ahead"), [(None, 0), (2, 8)])
def test_a_window_reads_its_shards_ahead_as_a_whole(
    window: int | None, shards_read_ahead: int, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *advice: advised.append(advice))
    index = load_shards(DataConfig("shards", str(packed), shuffle_shards=window))
    for row in range(COUNT):
        index.read(row)
    assert advised == [(0, 0, os.POSIX_FADV_WILLNEED)] * shards_read_ahead


def order_of_first_sight(values: np.ndarray) -> list[int]:
    return list(dict.fromkeys(values.tolist()))


def test_a_window_holds_in_a_mixture_and_for_a_part_of_the_labels(packed: Path, source: Index) -> None:
    shards = DataConfig(source="shards", root=str(packed), shuffle_shards=1)
    folder = DataConfig(source="folder", root=str(source.root))
    order = build_order(load_index((folder, shards)), batch=10, seed=0)
    rows = order.samples(0, np.arange(order.length))
    ours = rows[rows >= COUNT] - COUNT
    np.testing.assert_array_equal(np.sort(ours[:COUNT]), np.arange(COUNT))
    assert len(order_of_first_sight(ours[:14] // 7)) <= 3  # one after the other
    half = load_index(dataclasses.replace(shards, label_fraction=0.5))
    assert half.blocks is not None
    assert half.blocks.first[-1] == len(half)
    assert [half.read(row) for row in range(3)] == [
        source.read(source.paths.index(json_path(half, row))) for row in range(3)
    ]


def test_a_part_of_the_shards_opens_without_reading_names(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten million samples, less a bad file, the names alone would take many minutes."""
    whole = load_shards(DataConfig("shards", str(packed)))
    bad = tmp_path / "bad.jsonl"
    write_bad_list(bad, {whole.paths[20]: "for a test"}, checked=COUNT)
    asked: list[int] = []
    real = ShardStore.name

    def counted(store: ShardStore, sample: int) -> str:
        asked.append(sample)
        return real(store, sample)

    monkeypatch.setattr(ShardStore, "name", counted)
    index = load_index(DataConfig(source="shards", root=str(packed), bad_list=str(bad), label_fraction=0.8))
    assert 0 < len(index) < COUNT - 1
    assert len(asked) < 10  # the search for the bad one
    kept = [row for row in range(COUNT) if row != 20]
    assert set(index.paths) <= {whole.paths[row] for row in kept}
    assert index.paths[:3] == [index.paths[0], index.paths[1], index.paths[2]]
    assert index.paths[-1] == list(index.paths)[-1]
    for split in ("train", "val"):  # one of them does not have the bad one
        without = load_index(DataConfig("shards", str(packed), split=split))
        asked.clear()
        index = load_index(DataConfig("shards", str(packed), split=split, bad_list=str(bad)))
        assert len(asked) < 30
        assert list(index.paths) == [path for path in without.paths if path != whole.paths[20]]


def json_path(index: Index, row: int) -> str:
    return f"{int(Path(index.paths[row]).stem):03}{Path(index.paths[row]).suffix}"


@pytest.mark.slow  # minutes: an index of ten million samples is written first, and a million images are indexed
@pytest.mark.parametrize(("kind", "samples"), [("packed", 10_000_000), ("foreign", 1_000_000)])
def test_large_shards_open_within_seconds_and_little_memory(kind: str, samples: int) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.pipelines.sources.large_shards", kind, str(samples)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["samples"] >= samples
    assert found["open_s"] < 10
    assert found.get("index_s", 0) < 60
    assert found["index_bytes_per_sample_on_disk"] < 64
    assert found["memory_bytes_per_sample_after_first_batch"] < 100
