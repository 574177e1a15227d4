from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.pipelines.sources.label_files.pickles import MANO_TO_KEYPOINTS, read_regressor
from tests.pipelines.sources.layouts import one_line


def test_the_order_is_that_of_the_models() -> None:
    """The data path may not import the models; the order stands in both."""
    assert MANO_TO_KEYPOINTS == [0, 13, 14, 15, 16, 1, 2, 3, 17, 4, 5, 6, 18, 10, 11, 12, 19, 7, 8, 9, 20]


@pytest.mark.parametrize("form", ["npy", "named", "alone"])
def test_a_regressor_comes_from_any_numpy_file(tmp_path: Path, form: str) -> None:
    matrix = np.random.default_rng(0).random((16, 778)).astype(np.float32)
    file = tmp_path / ("regressor.npy" if form == "npy" else "regressor.npz")
    if form == "npy":
        np.save(file, matrix)
    elif form == "named":
        np.savez(file, J_regressor=matrix, faces=np.zeros(3))
    else:
        np.savez(file, matrix)
    found = read_regressor(file)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, matrix)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: None, r"No such file or directory; expected a 16 x 778 matrix .*data\.regressor"),
        (lambda file: file.write_bytes(b"PK\x03\x04 damaged"), "expected a 16 x 778"),
        (lambda file: np.save(file, np.zeros((778, 16))), "found 778 x 16 float64.; expected a 16 x 778"),
        (lambda file: np.save(file, np.full((16, 778), np.nan)), "found 16 x 778 float64"),
        (lambda file: np.save(file, np.array([{}], dtype=object), allow_pickle=True), "that NumPy wrote"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, write: Any, message: str) -> None:
    file = tmp_path / "regressor.npy"
    write(file)
    with one_line(message, file):
        read_regressor(file)
