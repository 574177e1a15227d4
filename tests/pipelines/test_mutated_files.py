"""Whatever lies on the disk: no crash, no hang, no garbled pixel, no good sample lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.pipelines.image_parts import put_together, take_apart
from tests.pipelines.loader_fuzz import FAULTS, RUNS, run
from tests.pipelines.mutations import JPEG_OPTIONS, PNG_KINDS, WEBP_OPTIONS, original, picture
from tests.pipelines.second_opinion import opinion_of


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
