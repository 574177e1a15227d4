from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

from pydantic import AfterValidator

from peclr_dali.bounds import Number

N = TypeVar("N", int, float)


def _ordered(value: tuple[N, N]) -> tuple[N, N]:
    if value[0] > value[1]:
        raise ValueError(f"a range goes from low to high, found {list(value)}")
    return value


Ordered = AfterValidator(_ordered)
Range: TypeAlias = Annotated[tuple[Number, Number], Ordered]
