"""Views of validation, `evaluate` and `predict` are not augmented, whatever a run's geometry says; others are."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from peclr_dali.pipelines.arrays import FloatArray
from peclr_dali.pipelines.views.augmentation import Augmentation, GeometryConfig, without_augmentation
from peclr_dali.pipelines.views.columns import Draw
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.plan import plan_views
from peclr_dali.train.pose.inference import canonical_view

GEOMETRIC = [column for column in Draw if not Draw.HUE <= column <= Draw.VALUE_SHIFT]
FARTHEST: dict[str, Any] = {
    "rotation_deg": (90, 180), "translation_frac": 1, "scale": (3, 4), "scale_is": "margin", "crop_probability": 1,
    "crop_side_frac": (0.2, 0.3), "flip_probability": 1,
    "side_px": 64, "fill": "edge", "antialias": False,
}  # fmt: skip


def test_no_field_of_the_geometry_moves_a_canonical_view() -> None:
    still = np.zeros((8, len(GEOMETRIC)), np.float32)
    still[:, GEOMETRIC.index(Draw.MAGNIFICATION)] = 1
    for field in fields(GeometryConfig):
        geometry = replace(GeometryConfig(crop_probability=0.5), **{field.name: FARTHEST[field.name]})
        for view in (0, 1):
            table = draw_view(canonical_view(geometry), seed=0, epoch=1, view=view, places=np.arange(8))
            np.testing.assert_array_equal(table[:, GEOMETRIC], still, err_msg=field.name)
    kept = without_augmentation(GeometryConfig(**FARTHEST))
    assert (kept.side_px, kept.fill, kept.antialias) == (64, "edge", False)


def matrices(geometry: GeometryConfig) -> FloatArray:
    """The planned augmentations (8, 2, 3) of whole images."""
    draws = draw_view(Augmentation(geometry), seed=0, epoch=0, view=0, places=np.arange(8))
    sizes_px, upright = np.full((8, 2), 224), np.ones(8, np.int64)
    return plan_views(sizes_px, upright, np.zeros((8, 3), np.float32), [draws], [geometry]).matrix.squeeze(0)


def test_every_field_of_the_geometry_moves_a_view() -> None:
    """All but those that name the frame, which a canonical view has too: with one of them neutral, all views differ."""
    farthest = GeometryConfig(**FARTHEST)
    still = without_augmentation(farthest)
    moving = [field.name for field in fields(GeometryConfig) if getattr(still, field.name) != FARTHEST[field.name]]
    assert {"rotation_deg", "translation_frac", "scale", "crop_side_frac"} < {*moving}
    for name in moving:
        neutral = replace(farthest, **{name: getattr(still, name)})
        assert (matrices(neutral) != matrices(farthest)).any(axis=(1, 2)).all(), f"{name} has no map in the plan"
