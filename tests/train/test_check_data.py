"""check-data finds what the loader cannot use; the list that it writes leaves exactly that out."""

import json
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peclr_dali import DataConfig, Index, PipelinesConfig
from peclr_dali.pipelines.sources import load_index, read_source, rows_not_listed, write_bad_list
from peclr_dali.train.check_data import DOES_NOT_DECODE, ENDS_THE_DECODER, check_data
from tests.command_line import as_options, run_cli
from tests.pipelines.harness import jpeg, smooth_image
from tests.pipelines.sources.layouts import assert_refused
from tests.pipelines.test_loader import UNDECODABLE
from tests.train import tiny_run
from tests.train.mortal_decoder import ABORT, COSTLY, EXIT, HANG, KILL, mortal_decode, never_starts


def check(root: Path, out: Path, batch: int | None = None, **decoder: Any) -> dict[str, str]:
    index, calls = load_index(DataConfig("folder", str(root))), list[tuple[int, int]]()
    found = check_data(
        index, PipelinesConfig(threads=2, batch=batch), out, device=torch.device("cpu"),
        progress=lambda *call: calls.append(call), **decoder,
    )  # fmt: skip
    assert calls[-1] == (len(index), len(index))
    return found


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tiny_run.write_images(tmp_path / "images")
    (root / "07.jpg").write_bytes(b"")
    (root / "31.jpg").write_bytes(UNDECODABLE)
    return root


def test_the_list_leaves_out_what_is_bad(images: Path, tmp_path: Path) -> None:
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # that of another test
    reasons = check(images, out := tmp_path / "bad.jsonl")
    assert reasons == {"07.jpg": "empty file", "31.jpg": DOES_NOT_DECODE}
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [{"path": path, "reason": reason} for path, reason in reasons.items()]
    index = load_index(DataConfig(source="folder", root=str(images), bad_list=str(out)))
    assert list(index.paths) == [f"{number:02}.jpg" for number in range(50) if number not in (7, 31)]
    # Ctrl-C goes to the fork server too, which does not heed it.
    for process, blocked in ((forkserver._forkserver._forkserver_pid, 2), ("self", 0)):  # type: ignore[attr-defined]
        assert int(Path(f"/proc/{process}/status").read_text().partition("SigBlk:")[2].split()[0], 16) & 2 == blocked


def test_wrong_labels_are_on_the_list_and_are_left_out_with_it(images: Path, tmp_path: Path) -> None:
    """With the row and what the rule found; every image's size is known, not only those of a few."""
    boxes, out = tmp_path / "boxes.csv", tmp_path / "bad.jsonl"
    edges = {7: (300, 0, 320, 20), 8: (0, 0, 0.5, 0.5), 9: (300, 0, 320, 20)}
    rows = [",".join(map(str, (f"{row:02}.jpg", *edges.get(row, (0, 0, 20, 20))))) for row in range(50)]
    boxes.write_text("\n".join(["file,x0,y0,x1,y1", *rows]))
    config = DataConfig("folder", str(images), box=str(boxes))
    pipelines, cpu = PipelinesConfig(threads=2), torch.device("cpu")
    reasons = check_data(read_source(config), pipelines, out, device=cpu, progress=lambda *_: None)
    assert reasons == {
        "07.jpg": "empty file",
        "08.jpg": "row 8; box_px 0.25, 0.25, 0.5: 1 of 50 boxes show nothing of their images",
        "09.jpg": "row 9; box_px 310, 10, 20; size_px 48, 48: 1 of 49 boxes are mostly outside of their images",
        "31.jpg": DOES_NOT_DECODE,
    }
    assert len(load_index(replace(config, bad_list=str(out)))) == 46


@pytest.mark.parametrize(
    ("bad", "code", "last"), [(0, 0, "0 of 3 images"), (2, 1, "data.bad_list="), (3, 2, "no image")]
)
def test_the_exit_code_says_whether_all_some_or_no_images_can_be_used(
    bad: int, code: int, last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each image shows three hands, up and left, of which a line says so; the first `bad` images are empty files."""
    root, boxes = tmp_path / "images", tmp_path / "boxes.csv"
    root.mkdir()
    good = jpeg(smooth_image(np.random.default_rng(0), 40, 48, 3))
    for row in range(3):
        (root / f"{row}.jpg").write_bytes(b"" if row < bad else good)
    hands = (f"{row}.jpg,0,0,{edge},{edge},right" for row in range(3) for edge in (10, 12, 14))
    boxes.write_text("\n".join(["file,x0,y0,x1,y1,hand", *hands]))
    words = [f"data.root={root}", "data.source=folder", f"data.box={boxes}"]
    assert run_cli("check-data", *as_options(words), str(tmp_path / "b.jsonl")) == code
    told = capsys.readouterr()
    assert f"{bad} of 3 images cannot be used" in told.out
    assert ("9 of 9 boxes are in a set that is in the upper left" in told.err) == (bad == 0)
    assert last in (told.err if code == 2 else told.out).splitlines()[-1]


def test_files_that_end_the_decoder_are_named_and_the_check_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also one that it never finishes. Four costly ones, of which only two fit into memory at once, are good."""
    root = tmp_path / "images"
    root.mkdir()
    ends = {0: COSTLY, 3: KILL, 6: COSTLY, 9: ABORT, 13: HANG, 14: EXIT, 15: COSTLY, 16: COSTLY}
    good = jpeg(smooth_image(np.random.default_rng(0), 40, 48, 3))
    for number in range(24):
        (root / f"{number:02}.jpg").write_bytes(good + ends.get(number, b"fine").rjust(8, b"\0"))
    (root / "05.jpg").write_bytes(UNDECODABLE)
    (root / "12.jpg").write_bytes(b"")
    found = check(root, tmp_path / "bad.jsonl", batch=24, decode=mortal_decode, limit_s=5)
    assert found == {
        "03.jpg": ENDS_THE_DECODER, "05.jpg": DOES_NOT_DECODE, "09.jpg": ENDS_THE_DECODER, "12.jpg": "empty file",
        "13.jpg": ENDS_THE_DECODER, "14.jpg": ENDS_THE_DECODER,
    }  # fmt: skip
    assert capfd.readouterr().err == ""  # what the decoders print of odd files is dropped


def test_no_file_is_bad_for_a_decoder_that_does_not_start(images: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenProcessPool):
        check(images, tmp_path / "bad.jsonl", decode=never_starts)
    assert not (tmp_path / "bad.jsonl").exists()


def test_lists_that_do_not_fit_are_one_clear_line(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "bad.jsonl"
    config = DataConfig(source="folder", root=str(images), bad_list=str(file))

    assert_refused(config, "No such file or directory; expected a list of bad files. 'python cli.py check-data' makes")
    for text in ('{"path": "07.j', "null\n", "7\n", '{"bad": ' + "[" * 100_000):
        file.write_text(text)
        assert_refused(config, "cannot be read")
    write_bad_list(file, {f"{number:02}.jpg": "" for number in range(50)})
    assert_refused(config, "data.bad_list = ")
    write_bad_list(file, {"other.jpg": ""})
    assert len(load_index(config)) == 50
    assert f"none of its 1 files is among the images of {images}" in caplog.text


def test_all_hands_of_a_bad_frame_are_left_out(tmp_path: Path) -> None:
    index = Index("frames", tmp_path, ["a.jpg", "b.jpg", "b.jpg", "c.jpg"], np.zeros((4, 3), np.float32))
    write_bad_list(tmp_path / "bad.jsonl", {"b.jpg": "empty file"})
    (tmp_path / "bad.jsonl").write_text("\ufeff" + (tmp_path / "bad.jsonl").read_text() + "\n")
    assert rows_not_listed(index, tmp_path / "bad.jsonl").tolist() == [0, 3]
