"""Reads pickles of NumPy arrays, MANO's among them, without running code in them.

`pickle.load` calls every function that a pickle names. This reader knows only NumPy's array, dtype and number, and
keeps plain data in their place. An array is made of these data at the end, by `numpy.frombuffer`, which checks them.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from peclr_dali.pipelines.arrays import DoubleArray
from peclr_dali.pipelines.sources.label_files.dataset_file import dataset_file
from peclr_dali.skeleton import hand_rows


def read_numpy_pickle(file: Path) -> dict[str, Any]:
    """Read the dictionary in a pickle of any version of Python. Its arrays have to be of numbers or text.

    An array of Python objects is read as None.

    Raises:
        UserError: the file is missing, unreadable or not a dictionary, or names anything but NumPy's arrays.
    """
    remedy = "Unpack the dataset again, or get it from its authors."
    with dataset_file(file, "a pickled dictionary of arrays", remedy) as path:
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()  # as Python 2 wrote them
        if not isinstance(content, dict):
            raise ValueError(f"found a {type(content).__name__}")
        return {str(key): value.array() if isinstance(value, _Part) else value for key, value in content.items()}


class _Part:
    """A dtype or an array while the pickle is read: a dtype's code, and the state as the pickle sets it."""

    __slots__ = ("code", "state")

    def __init__(self, code: Any = None, state: Any = None) -> None:
        self.code, self.state = code, state

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray[Any, Any] | None:
        """The array of this state. A ValueError or a TypeError if the state is of anything else."""
        _, shape, dtype, fortran, raw = self.state
        if str(dtype.code).startswith("O"):
            return None
        if not re.fullmatch(r"[?]|[biufcSU][0-9]{1,4}", dtype.code):
            raise ValueError("an array that is not of numbers or text")
        order = dtype.state[1] if dtype.state else "="
        data = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2's bytes
        flat: np.ndarray[Any, Any] = np.frombuffer(data, np.dtype(dtype.code).newbyteorder(order))
        return flat.reshape(shape, order="F" if fortran else "C")


class _Unpickler(pickle.Unpickler):
    """Gives a bound method, which a pickle cannot change, for each function that is allowed."""

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`."""
        allowed: dict[str, Any] = {
            "numpy.ndarray": "ndarray",
            "numpy.dtype": self._dtype,
            "_codecs.encode": self._encode,
            "__builtin__.bytes": self._no_bytes,
            "numpy.core.multiarray._reconstruct": self._reconstruct,
            "numpy.core.multiarray.scalar": self._scalar,
            "numpy.core.numeric._frombuffer": self._frombuffer,
        }
        found = f"{module.replace('numpy._core', 'numpy.core', 1)}.{name}"
        if found not in allowed:
            asked = repr(f"{module}.{name}"[:80])
            raise ValueError(
                f"it asks for {asked}, which could run as code. Nothing of it was run: do not use the file"
            )
        return allowed[found]

    def _dtype(self, code: Any, *_: Any) -> _Part:
        return _Part(code)

    def _reconstruct(self, *_: Any) -> _Part:
        return _Part()

    def _scalar(self, dtype: Any, raw: Any = b"") -> Any:
        array = _Part(state=(1, (), dtype, False, raw)).array()
        return None if array is None else array[()]

    def _frombuffer(self, raw: Any, dtype: Any, shape: Any, order: Any) -> _Part:
        return _Part(state=(1, shape, dtype, order == "F", raw))

    def _no_bytes(self) -> bytes:
        """Empty bytes, as Python 3 writes them for Python 2."""
        return b""

    def _encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        return bytes(text.encode("latin1"))


VERTICES = 778
JOINTS = 16

TIP_VERTICES = (744, 320, 443, 555, 672)
"""Vertices at the fingertips: thumb, index, middle, ring, little."""

MANO_TO_KEYPOINTS = hand_rows("mano", "freihand")
"""Keypoint i of `Index` is row MANO_TO_KEYPOINTS[i] of MANO's 16 joints followed by the five tips."""


def read_regressor(file: Path) -> DoubleArray:
    """Make the (21, 778) matrix that maps MANO's vertices to the keypoints of `Index`, fingertips included.

    Args:
        file: .npy with the (16, 778) matrix of the joints, or .npz with it as "J_regressor" or as the only array.

    Raises:
        UserError: the file has no such matrix.
    """
    expected = f"a {JOINTS} x {VERTICES} matrix of numbers, MANO's joint regressor, as .npy or .npz"
    remedy = "Give the path of the right matrix, saved with numpy.save, as data.regressor."
    with dataset_file(file, expected, remedy) as path, path.open("rb") as content:
        try:
            stored = np.load(content, allow_pickle=False)
            if not isinstance(stored, np.ndarray):
                stored = stored["J_regressor" if len(stored.files) != 1 else stored.files[0]]
            matrix = np.asarray(stored)
        except Exception:  # NumPy's advice is to run the file as a pickle
            raise ValueError("not an array of numbers that NumPy wrote") from None
        if matrix.shape != (JOINTS, VERTICES) or matrix.dtype.kind not in "fiu" or not np.isfinite(matrix).all():
            raise ValueError(f"found {' x '.join(map(str, matrix.shape)) or 'a single'} {matrix.dtype}")
    tips = np.zeros((len(TIP_VERTICES), VERTICES))
    tips[np.arange(len(TIP_VERTICES)), TIP_VERTICES] = 1
    return np.concatenate([matrix.astype(np.float64), tips])[MANO_TO_KEYPOINTS]
