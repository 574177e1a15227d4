import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.pipelines.sources.label_files.pickles import MANO_TO_KEYPOINTS, read_numpy_pickle, read_regressor
from tests.pipelines.sources.layouts import ho3d_meta, one_line, python2_pickle

CONTENT: dict[str, Any] = {
    "float64": np.arange(12.0).reshape(3, 4),
    "float32": np.array([[1.5, -2]], np.float32),
    "columns first": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "big-endian": np.arange(3, dtype=">i4"),
    "bool": np.array([True, False]),
    "text": np.array(["ab", "c"]),
    "empty": np.zeros((0, 3)),
    "number": np.float64(2.5),
    "string": "021_bleach_cleanser",
    "none": None,
    "list": [1, 2.5, "x"],
}


def read(folder: Path, data: bytes) -> dict[str, Any]:
    (folder / "a.pkl").write_bytes(data)
    return read_numpy_pickle(folder / "a.pkl")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("module", ["numpy.core", "numpy._core"])
def test_arrays_equal_those_that_numpy_reads(tmp_path: Path, protocol: int, module: str) -> None:
    data = pickle.dumps(CONTENT, protocol=protocol)
    if protocol < 4:  # later ones give the length of the name before it
        data = data.replace(b"numpy._core", module.encode())
    found = read(tmp_path, data)
    assert found.keys() == CONTENT.keys()
    for key, value in CONTENT.items():
        assert type(found[key]) is type(value)
        np.testing.assert_array_equal(found[key], value)
        if isinstance(value, np.ndarray):
            assert found[key].dtype == value.dtype
            assert found[key].shape == value.shape


def test_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    """The fixture is a real one: NumPy itself reads it, to the same."""
    meta = ho3d_meta(3)
    data = python2_pickle(meta)
    found, by_numpy = read(tmp_path, data), pickle.loads(data, encoding="latin1")
    assert found.keys() == by_numpy.keys() == meta.keys()
    for key, value in meta.items():
        np.testing.assert_array_equal(found[key], value)
        np.testing.assert_array_equal(found[key], by_numpy[key])


def test_an_array_of_objects_is_left_out(tmp_path: Path) -> None:
    found = read(tmp_path, pickle.dumps({"objects": np.array([{"a": 1}, None], dtype=object), "x": np.ones(2)}))
    assert found["objects"] is None
    assert found["x"].tolist() == [1, 1]


class Runs:
    """Pickled, it says: call this function with these arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def attacks(witness: Path) -> dict[str, bytes]:
    """Pickles that make `witness` when they are trusted."""
    command = f"touch {witness}"
    arrays = np.array([Runs(os.system, command)], dtype=object)
    return {
        "os.system": pickle.dumps({"camMat": Runs(os.system, command)}),
        "eval": pickle.dumps({"camMat": Runs(eval, f"open({str(witness)!r}, 'w').close()")}),
        "inside an array": pickle.dumps({"camMat": arrays}),
        "INST": f"(S'{command}'\nios\nsystem\n.".encode(),
        "after the end of a dictionary": pickle.dumps({}, protocol=2)[:-1] + pickle.dumps(Runs(os.system, command)),
        "a dotted name": b"\x80\x04\x8c\x16numpy._core.multiarray\x8c\x18_reconstruct.__globals__\x93.",
        "a NumPy function": b"cnumpy\nload\n(S'x.npy'\ntR.",
    }


@pytest.mark.parametrize("attack", attacks(Path("x")))
def test_a_pickle_runs_nothing(tmp_path: Path, attack: str) -> None:
    witness = tmp_path / "was_here"
    with one_line(r"it asks for '.*Nothing of it was run", tmp_path / "a.pkl"):
        read(tmp_path, attacks(witness)[attack])
    assert not witness.exists()


DTYPE = b"cnumpy\ndtype\n(S'f8'\nI0\nI1\ntR"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"


@pytest.mark.parametrize(
    "data",
    {
        "cut": python2_pickle(ho3d_meta(0))[:-30],
        "no dictionary": pickle.dumps([1, 2]),
        "bytes that do not fill the shape": b"(dS'a'\n" + ARRAY + b"(I1\n(I5\nt" + DTYPE + b"I00\nS'xxxxxxxx'\ntbs.",
        "a huge shape": b"(dS'a'\n" + ARRAY + b"(I1\n(L99999999999999L\nt" + DTYPE + b"I00\nS'xxxxxxxx'\ntbs.",
        "records": b"(dS'a'\n" + DTYPE + b"(I3\nS'<'\nN(S'x'\nt(dI-1\nI-1\nI0\ntbs.",
        "a deep list": b"(" * 100_000 + b".",
    }.values(),
)
def test_a_damaged_pickle_is_one_line(tmp_path: Path, data: bytes) -> None:
    with one_line(r"a\.pkl: cannot be read .*; expected a pickled dictionary of arrays", tmp_path / "a.pkl"):
        read(tmp_path, data)


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
    rows = np.array(MANO_TO_KEYPOINTS)
    np.testing.assert_array_equal(found[rows < 16], matrix[rows[rows < 16]])


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
