"""Whatever lies on the disk: no crash, no hang, no garbled pixel, no good sample lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Record
from tests.pipelines import loader_fuzz
from tests.pipelines.image_parts import Part, put_together, take_apart
from tests.pipelines.loader_fuzz import FAULTS, RUNS, row_of, run, run_part
from tests.pipelines.mutations import JPEG_OPTIONS, PNG_KINDS, WEBP_OPTIONS, good_file, mutated_file, original, picture
from tests.pipelines.second_opinion import Opinion, Verdict, expected_view, judge, opinion_of, orientation_of, turned

WHOLE_PX = np.zeros(3)
STILL = np.zeros(2)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_hundreds_of_mutated_files(seed: int, tmp_path: Path) -> None:
    row = run(150, seed, part=150, to=tmp_path / "findings")
    assert {fault: row[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0), (tmp_path / "findings").read_text()
    for renderer, decode in RUNS:
        assert row[f"used_{renderer}_{decode}"] > 40
        assert row[f"refused_by_check_{renderer}_{decode}"] > 20
        assert row[f"refused_by_decoder_{renderer}_{decode}"] > 10
    assert row["views_same"] > 1000


@pytest.mark.slow  # an hour or more
def test_twenty_thousand_mutated_files(record: Record, tmp_path: Path) -> None:
    row = run(20_000, 0, part=500, to=tmp_path / "findings")
    assert row["files"] == 20_000
    assert row["mutated_in_metadata"] == 10_000
    assert row["good"] >= 10_000
    record("mutated_files", **row)
    assert {fault: row[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0), (tmp_path / "findings").read_text()


KINDS = [("jpeg", option) for option in JPEG_OPTIONS] + [("webp", option) for option in WEBP_OPTIONS]
KINDS += [("png", option) for option in dict.fromkeys(PNG_KINDS)]


@pytest.mark.parametrize(("kind", "option"), KINDS)
def test_originals_equal_the_results_of_both_independent_decoders(kind: str, option: str) -> None:
    data = original(kind, option, (53, 71), 1)
    assert put_together(kind, *take_apart(data)) == data
    one, other = opinion_of(data).images
    assert np.abs(one.astype(np.int16) - other).max() <= 1
    if option not in ("grey", "CMYK") and not option.startswith(("0", "3", "4")):
        assert np.abs(one.astype(np.int16) - picture(53, 71, 1)).mean() < 5


def test_files_are_functions_of_seed_and_number() -> None:
    for number in range(20):
        assert mutated_file(3, number) == mutated_file(3, number)
        assert good_file(3, number) == good_file(3, number)
    assert len({mutated_file(seed, number).data for seed in (3, 4) for number in range(50)}) == 100


def test_good_files_have_every_orientation_and_the_rule_finds_it() -> None:
    seen = set()
    for number in range(150):
        made = good_file(0, number)
        _, _, orientation = made.what.partition(", orientation ")
        opinion = opinion_of(made.data)
        assert opinion.orientation == orientation_of(made.data) == int(orientation or 1)
        assert turned(opinion.images[0], int(orientation or 1)).shape[1::-1] == made.shown_px
        seen.add((made.kind, orientation))
    assert len(seen) == 27


def view_of(image: np.ndarray, box_px: np.ndarray = WHOLE_PX) -> tuple[np.ndarray, np.ndarray]:
    """A view, and its matrix."""
    height, width = image.shape[:2]
    x, y, side = box_px if box_px[2] else (width / 2, height / 2, max(height, width))
    scale = 48 / side
    matrix_px = np.array([[scale, 0, 24 - scale * x], [0, scale, 24 - scale * y]])
    return expected_view(image, 1, box_px, STILL, 48)[0].round().astype(np.uint8), matrix_px


def spoiled(image: np.ndarray, how: str) -> np.ndarray:
    out = image.copy()
    match how:
        case "a wrong stride":
            flat = out.reshape(-1, 3)
            out = np.resize(flat, (len(out), out.shape[1] - 1, 3)) if len(out) else out
            out = np.pad(out, ((0, 0), (0, 1), (0, 0)), mode="edge")
        case "swapped colours":
            out = out[..., ::-1]
        case "three rows too low":
            out = np.roll(out, 3, axis=0)
        case "a block of other pixels":
            out[8:16, 16:24] = 255 - out[8:16, 16:24]
        case "half of it missing":
            out[len(out) // 2 :] = 128
    return np.ascontiguousarray(out)


@pytest.mark.parametrize("box_px", [WHOLE_PX, np.array([20.0, 15.0, 24.0])], ids=["whole", "part"])
def test_right_views_are_found_right(box_px: np.ndarray) -> None:
    image = picture(56, 40, 0)
    for orientation in range(1, 9):
        view, matrix_px = view_of(turned(image, orientation), box_px)
        opinion = Opinion((image,), ((56, 40),), orientation)
        assert judge(opinion, view, matrix_px, box_px, STILL).verdict == Verdict.SAME
        other = Opinion((image,), ((56, 40),), orientation % 8 + 1)
        judged = judge(other, view, matrix_px, box_px, STILL)
        assert (judged.verdict, judged.turned_by) == (Verdict.GARBLED, orientation)


@pytest.mark.parametrize(
    "how", ["a wrong stride", "swapped colours", "three rows too low", "a block of other pixels", "half of it missing"]
)
def test_garbled_views_are_found(how: str) -> None:
    image = picture(56, 40, 0)
    view, matrix_px = view_of(spoiled(image, how))
    opinion = Opinion((image, image), ((56, 40),), 1)
    assert judge(opinion, view, matrix_px, WHOLE_PX, STILL).verdict == Verdict.GARBLED


def test_views_without_a_second_opinion_are_counted_apart() -> None:
    image = picture(56, 40, 0)
    view, matrix_px = view_of(image)
    for images in ((), (image[::-1], image[:, ::-1])):
        assert judge(Opinion(images, ((56, 40),), 1), view, matrix_px, WHOLE_PX, STILL).verdict == Verdict.UNJUDGED
        wrong = judge(Opinion(images, ((40, 57),), 1), view, matrix_px, WHOLE_PX, STILL)
        assert wrong.verdict == Verdict.WRONG_MATRIX


CHILD = """
import json, os, sys, time
numbers = json.load(sys.stdin)
print("stage: dali whole", file=sys.stderr, flush=True)
if 5 in numbers:
    os.abort()
if 11 in numbers:
    sys.exit("Traceback: ValueError")
with open(sys.argv[-1], "w") as file:
    json.dump(({"files": len(numbers), "good": len(numbers), "tenths_of_max_levels": max(numbers)}, []), file)
"""


def test_files_that_end_the_process_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader_fuzz, "CHILD", (sys.executable, "-c", CHILD))
    counts, findings = run_part(0, range(12))
    assert [(finding["found"], finding["number"], finding["stage"]) for finding in findings] == [
        ("crash", 5, "dali whole"), ("error", 11, "dali whole"),
    ]  # fmt: skip
    assert "ValueError" in findings[1]["last_line"]
    row = json.loads(json.dumps(row_of(counts, findings, 0, 1.0)))
    assert (row["files"], row["crash"], row["error"], row["hang"], row["faulty_files"]) == (12, 1, 1, 0, 2)
    assert row["largest_max_levels"] == 1.0


def test_what_is_refused_for_its_metadata_is_judged_by_its_pixels() -> None:
    chunks, _ = take_apart(original("png", "2 8 rows", (53, 71), 0))
    data = chunks[1].body
    chunks[1:2] = [Part(b"IDAT", data[:99]), Part(b"tEXt", b"a\0b"), Part(b"IDAT", data[99:])]
    for image in opinion_of(put_together("png", chunks)).images:
        np.testing.assert_array_equal(image, picture(53, 71, 0))
    assert len(opinion_of(put_together("png", chunks)).images) == 2


def test_cmyk_without_adobes_segment_can_be_read_in_two_ways() -> None:
    segments, rest = take_apart(original("jpeg", "CMYK", (53, 71), 0))
    assert len(opinion_of(put_together("jpeg", segments, rest)).images) == 2
    plain = [part for part in segments if part.name != b"\xee"]
    assert len(opinion_of(put_together("jpeg", plain, rest)).images) == 3
