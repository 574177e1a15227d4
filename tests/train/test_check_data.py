"""check-data finds what the loader cannot use; the list that it writes leaves exactly that out."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch

from peclr_dali import cli
from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.render.decoder_process import LIMIT_S
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.pipelines.sources.shards.pack import pack
from peclr_dali.train.data import check_data as check_data_file
from peclr_dali.train.data.check_data import Checked, check_data
from tests.pipelines.harness import jpeg, smooth_image
from tests.pipelines.test_loader import UNDECODABLE
from tests.train import tiny_run
from tests.train.mortal_decoder import ABORT, COSTLY, EXIT, HANG, KILL, MortalDecoder


def check(*sources: DataConfig, out: Path) -> list[Checked]:
    data = sources[0] if len(sources) == 1 else sources
    calls: list[tuple[int, int]] = []
    found = check_data(
        data, PipelinesConfig(threads=2), out, device=torch.device("cpu"), progress=lambda *call: calls.append(call)
    )
    assert calls[-1][0] == calls[-1][1] == sum(len(one.index) for one in found)
    return found


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    tiny_run.write_images(root)
    (root / "07.jpg").write_bytes(b"")
    (root / "31.jpg").write_bytes(UNDECODABLE)
    return root


def test_the_list_leaves_out_what_is_bad(images: Path, tmp_path: Path) -> None:
    data = DataConfig(source="folder", root=str(images))
    (found,) = check(data, out=tmp_path / "bad.jsonl")
    assert found.reasons == {"07.jpg": "empty file", "31.jpg": "its compressed data does not decode"}
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert lines[0] == {"checked": 50, "bad": 2}
    assert lines[1:] == [{"path": path, "reason": reason} for path, reason in found.reasons.items()]
    index = load_index(DataConfig(source="folder", root=str(images), bad_list=str(tmp_path / "bad.jsonl")))
    assert list(index.paths) == [f"{number:02}.jpg" for number in range(50) if number not in (7, 31)]
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    for out in ("bad.jsonl", "link.jsonl"):
        with pytest.raises(UserError, match="exists already, and nothing is overwritten"):
            check(data, out=tmp_path / out)


def test_a_list_that_cannot_be_written_is_reported_before_the_work(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peclr_dali.train.data.check_data.load_index", lambda data: pytest.fail("begins the work"))
    with pytest.raises(UserError, match=r"/proc/bad\.jsonl: cannot be written"):
        check(DataConfig(source="folder", root=str(images)), out=Path("/proc/bad.jsonl"))


def test_a_folder_of_bad_files_gets_its_list(tmp_path: Path) -> None:
    """A run ends where so few files are good; the check of the data does not."""
    root = tmp_path / "images"
    root.mkdir()
    good = jpeg(smooth_image(np.random.default_rng(0), 40, 48, 3))
    for number in range(1000):
        data = good if number % 20 == 0 else [b"", b"no image", good[:200], UNDECODABLE][number % 4]
        (root / f"{number:03}.jpg").write_bytes(data)
    (found,) = check(DataConfig(source="folder", root=str(root)), out=tmp_path / "bad.jsonl")
    assert set(found.reasons) == {f"{number:03}.jpg" for number in range(1000) if number % 20}
    assert read_bad_list(tmp_path / "bad.jsonl") == found.reasons


@pytest.mark.parametrize(
    ("hands", "bad", "code", "last"),
    [
        ((1, 1, 1), 0, 0, "0 of 3 images"),
        ((1, 1, 1), 2, 1, "data.bad_list="),
        ((1, 1, 1), 3, 2, "no image"),
        ((2, 1, 1), 2, 1, "data.bad_list="),
        ((2, 2, 1), 3, 2, "no image"),
    ],
)
def test_the_exit_code_says_whether_all_some_or_no_images_can_be_used(
    hands: tuple[int, ...], bad: int, code: int, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Each image shows some hands, and the first `bad` images are empty files."""
    root = tmp_path / "images"
    root.mkdir()
    good = jpeg(smooth_image(np.random.default_rng(0), 40, 48, 3))
    names = [f"{row}.jpg" for row, count in enumerate(hands) for _ in range(count)]
    for row in range(len(hands)):
        (root / f"{row}.jpg").write_bytes(b"" if row < bad else good)
    index = Index("images", root, names, np.zeros((len(names), 3), np.float32))
    monkeypatch.setattr(check_data_file, "load_index", lambda *args, **kwargs: index)
    monkeypatch.setattr(sys, "argv", ["cli.py", "check-data", "--set", f"data.root={root}", str(tmp_path / "b.jsonl")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code or 0) == code
    told = capsys.readouterr()
    assert f"{sum(hands[:bad])} of {sum(hands)} {'images' if max(hands) == 1 else 'hands, in'}" in told.out
    assert last in (told.err if code == 2 else told.out).splitlines()[-1]


def write_killers(root: Path, killers: dict[int, bytes], count: int) -> DataConfig:
    """Good images, those in `killers` with such an end."""
    root.mkdir()
    good = jpeg(smooth_image(np.random.default_rng(0), 40, 48, 3))
    for number in range(count):
        (root / f"{number:02}.jpg").write_bytes(good + killers.get(number, b"fine").rjust(8, b"\0"))
    return DataConfig(source="folder", root=str(root))


def check_mortally(data: DataConfig, out: Path, *, batch: int, limit_s: float = LIMIT_S) -> dict[str, str]:
    pipelines = PipelinesConfig(threads=2, batch=batch)
    (found,) = check_data(
        data, pipelines, out, device=torch.device("cpu"), progress=lambda done, total: None,
        make_decoder=MortalDecoder, limit_s=limit_s,
    )  # fmt: skip
    assert read_bad_list(out) == found.reasons
    return found.reasons


def read_bad_list(file: Path) -> dict[str, str]:
    head, *rows = (json.loads(line) for line in file.read_text().splitlines())
    assert head["bad"] == len(rows)
    return {row["path"]: row["reason"] for row in rows}


def test_files_that_kill_the_decoder_are_named_and_the_check_goes_on(tmp_path: Path) -> None:
    data = write_killers(tmp_path / "images", {3: KILL, 9: ABORT}, 16)
    (tmp_path / "images" / "05.jpg").write_bytes(UNDECODABLE)
    (tmp_path / "images" / "12.jpg").write_bytes(b"")
    assert check_mortally(data, tmp_path / "bad.jsonl", batch=8) == {
        "03.jpg": "killed the decoder's process (SIGSEGV)",
        "05.jpg": "its compressed data does not decode",
        "09.jpg": "killed the decoder's process (SIGABRT)",
        "12.jpg": "empty file",
    }


def test_a_file_that_the_decoder_never_finishes_is_named(tmp_path: Path) -> None:
    data = write_killers(tmp_path / "images", {0: HANG, 1: EXIT}, 4)
    assert check_mortally(data, tmp_path / "bad.jsonl", batch=1, limit_s=10) == {
        "00.jpg": "kept the decoder busy for more than 11 s",
        "01.jpg": "ended the decoder's process with exit code 3",
    }


def test_images_that_are_too_many_at_once_are_not_bad(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_killers(tmp_path / "images", dict.fromkeys((0, 1, 6, 7), COSTLY), 8)
    assert check_mortally(data, tmp_path / "bad.jsonl", batch=8) == {}
    assert "8 images killed the decoder's process (SIGKILL" in caplog.text
    assert "but not when each half is decoded alone" in caplog.text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "not start: .*Resource temporarily unavailable"),
        (EOFError(), "not start: the server that forks it ended"),
    ],
)
def test_a_decoder_that_cannot_be_started_is_one_line(
    error: Exception, message: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.context.ForkServerProcess._Popen", Mock(side_effect=error))
    with pytest.raises(UserError, match=message):
        check(DataConfig(source="folder", root=str(images)), out=tmp_path / "bad.jsonl")


def test_several_sources_get_a_list_each(images: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    tiny_run.write_images(good, 10)
    sources = [DataConfig(source="folder", root=str(root)) for root in (good, images)]
    found = check(*sources, out=tmp_path / "bad.jsonl")
    assert [(one.key, len(one.reasons), one.list_file.name) for one in found] == [
        ("data.0", 0, "bad.0.jsonl"),
        ("data.1", 2, "bad.1.jsonl"),
    ]


def test_a_flipped_bit_in_a_shard_is_found(tmp_path: Path) -> None:
    """Damage that decodes, too: shards have checksums."""
    tiny_run.write_images(tmp_path / "images")
    shards = tmp_path / "shards"
    pack(load_folder(DataConfig("folder", str(tmp_path / "images"))), shards, per_shard=20, workers=1)
    offset, size = (int(np.load(shards / f"index/{name}.npy")[23]) for name in ("offset", "size"))
    content = bytearray((shards / "shard-000001.tar").read_bytes())
    content[offset + size - 30] ^= 1
    (shards / "shard-000001.tar").write_bytes(content)
    (found,) = check(DataConfig(source="shards", root=str(shards)), out=tmp_path / "bad.jsonl")
    assert list(found.reasons) == ["shard-000001.tar/000000023.jpg"]
    assert "wrong checksum" in found.reasons["shard-000001.tar/000000023.jpg"]
    index = load_index(DataConfig(source="shards", root=str(shards), bad_list=str(tmp_path / "bad.jsonl")))
    whole = load_folder(DataConfig("folder", str(tmp_path / "images")))
    assert len(index) == 49
    assert [index.read(row) for row in (22, 23)] == [whole.read(row) for row in (22, 24)]


def test_lists_that_do_not_fit_are_one_clear_line(images: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"

    def message() -> str:
        with pytest.raises(UserError) as caught:
            load_index(DataConfig(source="folder", root=str(images), bad_list=str(file)))
        return str(caught.value)

    assert "No such file" in message()
    assert "check-data" in message()
    check(DataConfig(source="folder", root=str(images)), out=file)
    whole = file.read_text()
    file.write_text("\n".join(whole.splitlines()[:-1]))
    assert "incomplete, with 1 of 2 files" in message()
    file.write_text(whole[:-20])
    assert "damaged" in message()
    file.write_text("")
    assert "damaged" in message()
    for name in ("07.jpg", "31.jpg"):
        (images / name).unlink()
    file.write_text(whole)
    assert f"{images} has no '07.jpg': the list is of another dataset" in message()


def test_all_hands_of_a_bad_frame_are_left_out(tmp_path: Path) -> None:
    from peclr_dali.pipelines.samples.bad_list import rows_not_listed, write_bad_list

    index = Index("frames", tmp_path, ["a.jpg", "b.jpg", "b.jpg", "c.jpg"], np.zeros((4, 3), np.float32))
    write_bad_list(tmp_path / "bad.jsonl", {"b.jpg": "empty file"}, checked=4)
    assert rows_not_listed(index, tmp_path / "bad.jsonl").tolist() == [0, 3]


def test_what_the_decoders_print_of_odd_files_does_not_reach_the_terminal(
    images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """libpng prints a warning for each colour profile that it does not like."""
    png = cv2.imencode(".png", smooth_image(np.random.default_rng(0), 40, 48, 3))[1].tobytes()
    profile = b"iCCP" + b"name\0\0" + zlib.compress(b"no profile" * 20)
    chunk = struct.pack(">I", len(profile) - 4) + profile + struct.pack(">I", zlib.crc32(profile))
    (images / "profile.png").write_bytes(png[:33] + chunk + png[33:])
    (found,) = check(DataConfig(source="folder", root=str(images)), out=tmp_path / "bad.jsonl")
    assert len(found.index) == 51
    assert "profile.png" not in found.reasons
    assert "libpng" not in capfd.readouterr().err


def test_the_command_names_files_that_are_not_utf8(images: Path, tmp_path: Path) -> None:
    (images / "07.jpg").rename(images / b"h\xe4nd.jpg".decode(errors="surrogateescape"))
    settings = ["--set", "data.source=folder", "--set", f"data.root={images}", "--set", "train.device=cpu"]
    done = subprocess.run(
        [sys.executable, "cli.py", "check-data", *settings, str(tmp_path / "bad.jsonl")], cwd=tiny_run.ROOT,
        capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert r"  h\udce4nd.jpg: empty file" in done.stdout
