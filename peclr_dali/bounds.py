"""Bounds of the configuration's values: beyond any sensible number, and within what the code can compute with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, TypeAlias

from annotated_types import Interval

if TYPE_CHECKING:
    from pydantic import ConfigDict, GetPydanticSchema

LARGEST_COUNT = 2**31 - 1
"""Largest count. The product of two counts fits into 64 bits."""

LARGEST_SEED = 2**63 - 1
"""Largest seed. TOML's integers have 64 bits with a sign."""

LARGEST_NUMBER = 1e18
"""Largest number of any other kind. Its square is finite in float32."""

STRICT: ConfigDict = {"extra": "forbid", "allow_inf_nan": False, "str_min_length": 1}
"""Pydantic's settings for a table of keys. An empty text is mostly a variable that is not set."""

Count: TypeAlias = Annotated[int, Interval(ge=1, le=LARGEST_COUNT)]
Width: TypeAlias = Annotated[int, Interval(ge=1, le=2**15)]
"""Width of a layer. A matrix with two such sides has 4 GiB in float32."""
Seed: TypeAlias = Annotated[int, Interval(ge=0, le=LARGEST_SEED)]
Threads: TypeAlias = Annotated[int, Interval(ge=1, le=1024)]
"""CPU threads of one process."""
Queue: TypeAlias = Annotated[int, Interval(ge=1, le=1024)]
"""Batches held in memory at once."""
Timeout: TypeAlias = Annotated[float, Interval(ge=0.1, le=1e7)]
"""Seconds; at most 115 days."""
Epochs: TypeAlias = Annotated[float, Interval(ge=0, le=1e6)]
Positive: TypeAlias = Annotated[float, Interval(ge=1e-12, le=LARGEST_NUMBER)]
NotNegative: TypeAlias = Annotated[float, Interval(ge=0, le=LARGEST_NUMBER)]
Fraction: TypeAlias = Annotated[float, Interval(ge=0, le=1)]
PositiveFraction: TypeAlias = Annotated[float, Interval(ge=1e-12, le=1)]
Factor: TypeAlias = Annotated[float, Interval(ge=0.001, le=1000)]
"""Factor of a length in an image."""
Number: TypeAlias = Annotated[float, Interval(ge=-1e6, le=1e6)]


def one_of(names: Iterable[str]) -> GetPydanticSchema:
    """Annotation for a text that has to be one of `names`; pydantic checks it like a Literal."""
    from pydantic import GetPydanticSchema  # only here: `--help` reads this file and does not wait for pydantic

    return GetPydanticSchema(lambda source, handler: {"type": "literal", "expected": [*names]})
