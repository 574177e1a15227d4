"""What the views of a run may need of shards that hold only parts of the images."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import Factor
from peclr_dali.errors import UserError
from peclr_dali.pipelines.views.augmentation import GeometryConfig
from peclr_dali.pipelines.views.reach import SMALLEST_SIDE, reach_of


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Crop:
    """Which part of each image is stored: what the views of `geometry` around boxes with this margin can show.

    Attributes:
        format: how it is compressed: "jpeg" (quality 95, colours not subsampled) or "png" (without loss).
    """

    format: Literal["jpeg", "png"]
    box_margin: Factor
    geometry: GeometryConfig

    def require(self, root: str, box_margin: float, geometry: GeometryConfig) -> None:
        """Check that views of `geometry` find in the parts what they would find in the whole images.

        Raises:
            UserError: they reach further, magnify more, or sample otherwise.
        """
        packed, wanted = reach_of(self.geometry), reach_of(geometry)
        if (
            wanted.side <= packed.side
            and SMALLEST_SIDE * packed.least_px <= wanted.least_px
            and wanted.most_px <= packed.most_px
            and (geometry.antialias, geometry.fill) == (self.geometry.antialias, self.geometry.fill)
            and box_margin == self.box_margin
        ):
            return
        here, there = (
            {"data.box_margin": margin} | {f"geometry.{key}": value for key, value in asdict(one).items()}
            for margin, one in ((box_margin, geometry), (self.box_margin, self.geometry))
        )
        changed = [f"{key} = {json.dumps(value)} (packed: {json.dumps(there[key])})" for key, value in here.items()
                   if value != there[key]]  # fmt: skip
        raise UserError(
            f"{root}: its crops do not serve these views: {', '.join(changed)}. Stay within what was packed, or pack "
            "again with these values."
        )
