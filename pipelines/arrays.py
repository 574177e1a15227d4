"""Types of the arrays that the data path passes on."""

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
PixelArray = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[Any]
