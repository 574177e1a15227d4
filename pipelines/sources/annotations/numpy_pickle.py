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

from errors import UserError
from errors.terminal import in_one_line
from parsing import regular

_PLAIN_DTYPE: Final = re.compile(r"[?]|[biufcSU][0-9]{1,4}")
_MODULES: Final = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")


def read_numpy_pickle(file: Path) -> dict[str, Any]:
    """Read the dictionary in a pickle of any version of Python. Its arrays have to be of numbers or text.

    Raises:
        UserError: the file is missing, unreadable or not a dictionary, or names anything but NumPy's arrays.
    """
    try:
        data = regular(file).read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"{file}: no such file; expected the sample's annotation there. Unpack the dataset again."
        ) from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}). Make it readable.") from error
    try:
        content = _Unpickler(data).load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, not a dictionary")
        return {str(key): _finished(value) for key, value in content.items()}
    except _Refused as refused:
        raise UserError(
            f"{file}: this pickle asks for {refused}, which could run as code. Nothing of it was run: only NumPy's "
            "arrays are read. Do not use the file; get the dataset from its authors."
        ) from None
    except Exception as error:  # a damaged pickle may raise anything
        reason = in_one_line(error)
        raise UserError(f"{file}: not a readable pickle of arrays ({reason}). Unpack the dataset again.") from error


class _Refused(Exception):  # noqa: N818  its text is what was refused
    """The pickle names a function or class that is not allowed."""


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
            raise _Refused(repr(f"{module}.{name}"[:80])) from None

    def persistent_load(self, _: Any) -> Any:
        raise _Refused("an object outside the file")

    def _dtype(self, code: Any, *_: Any) -> _DType:
        return _DType(code)

    def _reconstruct(self, *_: Any) -> _Array:
        return _Array()

    def _scalar(self, dtype: Any, raw: Any = b"") -> Any:
        return _array_of(dtype, (), raw, fortran=False)[()]

    def _frombuffer(self, raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
        array = _Array()
        array.__setstate__((1, shape, dtype, order == "F", raw))
        return array

    def _no_bytes(self) -> bytes:
        """Empty bytes, as Python 3 writes them for Python 2."""
        return b""

    def _encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise ValueError("bytes in an encoding that NumPy does not use")
        return text.encode("latin1")


class _DType:
    """Container for a dtype while the pickle is read."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        _, order, subarray, names, fields, *_ = state
        if subarray is not None or names is not None or fields is not None or order not in ("<", ">", "=", "|"):
            raise ValueError("an array of records")
        self.order = order

    def dtype(self) -> np.dtype[Any]:
        if not isinstance(self.code, str) or not _PLAIN_DTYPE.fullmatch(self.code):
            raise ValueError(f"an array of {self.code!r}, not of numbers")
        return np.dtype(self.code).newbyteorder(self.order)  # type: ignore[arg-type]


class _Array:
    """Container for an array while the pickle is read."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray[Any, Any] | None:
        """The array; None for an array of Python objects, which is never needed."""
        _, shape, dtype, fortran, raw = self.state
        if isinstance(dtype, _DType) and isinstance(dtype.code, str) and dtype.code.startswith("O"):
            return None
        return _array_of(dtype, shape, raw, fortran=bool(fortran))


def _finished(value: Any) -> Any:
    if isinstance(value, _DType):
        raise ValueError("a dtype without an array")
    return value.array() if isinstance(value, _Array) else value


def _array_of(dtype: Any, shape: Any, raw: Any, *, fortran: bool) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, _DType) or not isinstance(shape, tuple):
        raise ValueError("an array without shape or dtype")
    if isinstance(raw, str):  # Python 2's bytes
        raw = raw.encode("latin1")
    kind = dtype.dtype()
    if not isinstance(raw, bytes | bytearray) or len(raw) != math.prod(shape) * kind.itemsize:
        raise ValueError("an array whose bytes do not fill its shape")
    return np.frombuffer(raw, kind).reshape(shape, order="F" if fortran else "C")
