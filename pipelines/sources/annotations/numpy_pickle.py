"""Reads pickles of NumPy arrays without running code in them.

`pickle.load` calls every function that a pickle names. This reader allows only NumPy's array, dtype and number, and
replaces them by plain containers. NumPy's own constructors run only after every part has been checked.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.sources.annotations.dataset_file import dataset_file

_PLAIN_DTYPE: Final = re.compile(r"[?]|[biufcSU][0-9]{1,4}")
_MODULES: Final = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")


def read_numpy_pickle(file: Path) -> dict[str, Any]:
    """Read the dictionary in a pickle of any version of Python. Its arrays have to be of numbers or text.

    An array of Python objects is read as None.

    Raises:
        UserError: the file is missing, unreadable or not a dictionary, or names anything but NumPy's arrays.
    """
    with dataset_file(file, "a pickled dictionary of arrays") as path:
        try:
            content = _Unpickler(path.read_bytes()).load()
        except _RefusedError as refused:
            raise UserError(
                f"{file}: this pickle asks for {refused}, which could run as code. Nothing of it was run: only NumPy's "
                "arrays are read. Do not use the file; get the dataset from its authors."
            ) from None
        if not isinstance(content, dict):
            raise ValueError(f"found a {type(content).__name__}")
        return {str(key): _array(value) if isinstance(value, _Part) else value for key, value in content.items()}


class _RefusedError(Exception):
    """The pickle names a function or class that is not allowed; the text is its name."""


class _Part:
    """A dtype or an array while the pickle is read: the code of a dtype, and the state as the pickle sets it."""

    __slots__ = ("code", "state")

    def __init__(self, code: Any = None, state: Any = None) -> None:
        self.code, self.state = code, state

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")  # as Python 2 wrote them
        # Bound methods: a pickle cannot change these, as it could change a function or a class.
        self._allowed: dict[tuple[str, str], Callable[..., Any] | str] = {
            ("numpy", "ndarray"): "ndarray",
            ("numpy", "dtype"): self._dtype,
            ("_codecs", "encode"): self._encode,
            ("__builtin__", "bytes"): self._no_bytes,
        }
        for module in _MODULES:
            self._allowed[module, "_reconstruct"] = self._reconstruct
            self._allowed[module, "scalar"] = self._scalar
            self._allowed[module, "_frombuffer"] = self._frombuffer

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise _RefusedError(repr(f"{module}.{name}"[:80])) from None

    def persistent_load(self, _: Any) -> Any:
        raise _RefusedError("an object outside the file")

    def _dtype(self, code: Any, *_: Any) -> _Part:
        return _Part(code)

    def _reconstruct(self, *_: Any) -> _Part:
        return _Part()

    def _scalar(self, dtype: Any, raw: Any = b"") -> Any:
        return _filled(dtype, (), raw, fortran=False)[()]

    def _frombuffer(self, raw: Any, dtype: Any, shape: Any, order: Any) -> _Part:
        return _Part(state=(1, shape, dtype, order == "F", raw))

    def _no_bytes(self) -> bytes:
        """Empty bytes, as Python 3 writes them for Python 2."""
        return b""

    def _encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise ValueError("bytes in an encoding that NumPy does not use")
        return text.encode("latin1")


def _array(part: _Part) -> np.ndarray[Any, Any] | None:
    if part.code is not None:
        raise ValueError("a dtype without an array")
    _, shape, dtype, fortran, raw = part.state
    if isinstance(dtype, _Part) and isinstance(dtype.code, str) and dtype.code.startswith("O"):
        return None
    return _filled(dtype, shape, raw, fortran=bool(fortran))


def _filled(dtype: Any, shape: Any, raw: Any, *, fortran: bool) -> np.ndarray[Any, Any]:
    """The array of these parts, which are checked first."""
    if not (isinstance(dtype, _Part) and isinstance(dtype.code, str) and _PLAIN_DTYPE.fullmatch(dtype.code)):
        raise ValueError("an array that is not of numbers or text")
    _, order, *fields = dtype.state or (3, "=")
    if order not in ("<", ">", "=", "|") or any(part is not None for part in fields[:3]):
        raise ValueError("an array of records")
    kind = np.dtype(dtype.code).newbyteorder(order)  # type: ignore[arg-type]
    if isinstance(raw, str):  # Python 2's bytes
        raw = raw.encode("latin1")
    if not isinstance(shape, tuple) or not isinstance(raw, bytes | bytearray):
        raise ValueError("an array without shape or bytes")
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise ValueError("an array whose bytes do not fill its shape")
    return np.frombuffer(raw, kind).reshape(shape, order="F" if fortran else "C")
