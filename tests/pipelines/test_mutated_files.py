"""Whatever lies on the disk: no crash, no hang, no garbled pixel, no good sample lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.pipelines.image_parts import put_together, take_apart
from tests.pipelines.loader_fuzz import FAULTS, RUNS, run
from tests.pipelines.mutations import JPEG_OPTIONS, PNG_KINDS, WEBP_OPTIONS, original, picture
from tests.pipelines.second_opinion import Opinion, Verdict, expected_view, judge, opinion_of, turned

WHOLE_PX = np.zeros(3)
STILL = np.zeros(2)


def test_hundreds_of_mutated_files(tmp_path: Path) -> None:
    row = run(150, 1, part=150, to=tmp_path / "findings")
    assert {fault: row[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0), (tmp_path / "findings").read_text()
    for renderer, decode in RUNS:
        assert row[f"used_{renderer}_{decode}"] > 40
        assert row[f"refused_by_check_{renderer}_{decode}"] > 20
        assert row[f"refused_by_decoder_{renderer}_{decode}"] > 10
    assert row["views_same"] > 1000


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
