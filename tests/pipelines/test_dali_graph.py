"""The DALI graph has nodes for as many halvings as its views can need, and fewer nodes change no pixel."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nvidia.dali import fn

from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.render.dali_graph import decode, view_pipeline
from peclr_dali.pipelines.render.settings import choose_settings, samples_in_chunk
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.views.augmentation import Augmentation, GeometryConfig
from peclr_dali.pipelines.views.columns import Draw
from peclr_dali.pipelines.views.plan import MAX_HALVINGS, Chunk, most_halvings, plan_views
from tests.pipelines.harness import NO_COLOUR, draws_of, encode, plan_files, settings_of, smooth_image
from tests.pipelines.test_views import PLAIN_DRAW

SIDE_PX = 16


def boxes(*sides: float) -> np.ndarray:
    return np.array([[40, 30, side] for side in sides], np.float32)


@settings(max_examples=60, deadline=None)
@given(
    sides=st.lists(st.floats(1, 5000, width=32), min_size=1, max_size=3),
    scale=st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)).map(sorted).map(tuple),
    scale_is=st.sampled_from(["magnification", "margin"]),
    crop_probability=st.sampled_from([0.0, 0.5, 1.0]),
)
@example(sides=[16 * 2**0.5], scale=(1.0, 1.0), scale_is="magnification", crop_probability=0.0)
def test_no_view_needs_more_halvings(
    sides: list[float],
    scale: tuple[float, float],
    scale_is: Literal["magnification", "margin"],
    crop_probability: float,
) -> None:
    """Of images that are large enough for any number of them."""
    geometry = GeometryConfig(
        side_px=SIDE_PX, scale=scale, scale_is=scale_is, crop_probability=crop_probability, rotation_deg=(-180, 180)
    )
    box_px = np.repeat(boxes(*sides), 50, axis=0)
    draws = draws_of(Augmentation(geometry, NO_COLOUR), len(box_px))
    plan = plan_views(np.full((len(box_px), 2), 10_000), np.ones(len(box_px), np.int64), box_px, [draws], [geometry])
    assert plan.halvings.max() <= most_halvings(boxes(*sides), geometry)


@pytest.mark.parametrize(
    ("sides", "geometry", "most"),
    [
        ((16.0,), GeometryConfig(SIDE_PX, scale=(1, 1)), 0),
        ((33.0,), GeometryConfig(SIDE_PX, scale=(0.5, 2)), 2),
        ((16 * 2.0**9,), GeometryConfig(SIDE_PX, scale=(1, 1)), MAX_HALVINGS),
        ((33.0,), GeometryConfig(SIDE_PX, scale=(0.5, 2), antialias=False), 0),
        ((16.0, 0.0), GeometryConfig(SIDE_PX, scale=(1, 1)), MAX_HALVINGS),  # a whole image, of any size
    ],
)
def test_the_most_halvings_follow_from_boxes_and_scale(
    sides: tuple[float, ...], geometry: GeometryConfig, most: int
) -> None:
    assert most_halvings(boxes(*sides), geometry) == most


@pytest.mark.parametrize(
    ("device", "configured", "threads", "reserved_mib"),
    [("cuda", None, 16, 16), ("cuda", 40, 40, 40), ("cpu", None, 64, None)],
)
def test_threads_on_many_cores_take_little_of_a_gpu(
    device: str, configured: int | None, threads: int, reserved_mib: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread of a decoder on a GPU has a buffer there, of 16 MiB by default, and two in pinned memory."""
    monkeypatch.setattr("peclr_dali.pipelines.render.settings.available_cores", lambda: 64)
    index = Index("none", Path(), ["0.png"], boxes(33))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    geometries = [GeometryConfig(SIDE_PX, scale=(0.5, 2))]
    config = PipelinesConfig(threads=configured)
    chosen = choose_settings(index, config, torch.device(device), rows=2, geometries=geometries)
    assert (chosen.threads, chosen.halvings) == (threads, 2)
    if reserved_mib is not None:
        monkeypatch.setattr(fn, "decoders", SimpleNamespace(image=lambda encoded, **options: options))
        options = decode(None, chosen)
        assert options["device"] == "mixed"
        for kind in ("device", "host"):
            assert chosen.threads * options[f"{kind}_memory_padding"] == reserved_mib * 2**20


def graph_of(halvings: int, chunk: Chunk, geometry: GeometryConfig) -> Any:
    return view_pipeline(settings_of(4, halvings=halvings), [Augmentation(geometry)] * 2, iter([chunk]))


def nodes_of(pipeline: Any, kind: str) -> int:
    return sum(str(node._spec).startswith(f"OpSpec for {kind}") for node in pipeline._ops)


@pytest.mark.parametrize("fill", [0, 77, "edge"])
@pytest.mark.parametrize("needed", [0, 1, 3])
def test_fewer_nodes_give_the_same_pixels(needed: int, fill: int | Literal["edge"]) -> None:
    rng = np.random.default_rng(needed)
    geometry = GeometryConfig(SIDE_PX, fill=fill)
    images = [smooth_image(rng, *size) for size in ((61, 83), (96, 96), (45, 130), (37, 53))]
    draws = [np.tile(PLAIN_DRAW, (4, 1)) for _ in range(2)]
    for table in draws:
        table[:, Draw.MAGNIFICATION] = rng.uniform(1, 1.4, 4) * 0.5**needed
        table[:, Draw.ANGLE_DEG] = rng.uniform(-45, 45, 4)
    chunk = plan_files([encode(image) for image in images], boxes(*[SIDE_PX] * 4), draws, geometry)
    assert chunk.plan.halvings.max() == needed
    made = []
    for halvings in (needed, MAX_HALVINGS):
        pipeline = graph_of(halvings, chunk, geometry)
        assert pipeline.exec_dynamic  # the GPU's kernel relies on it
        assert nodes_of(pipeline, "Resize") == 2 * halvings
        assert nodes_of(pipeline, "Pad") == (halvings > 0 and fill != "edge")
        made.append([np.asarray(output.as_tensor()) for output in pipeline.run()])
    for few, many in zip(*made, strict=True):
        np.testing.assert_array_equal(few, many)


def test_more_halvings_than_the_graph_has_are_refused() -> None:
    """They would be made from an image that was not halved enough."""
    geometry = GeometryConfig(SIDE_PX)
    draws = PLAIN_DRAW[None].copy()
    draws[:, Draw.MAGNIFICATION] = 0.25
    chunk = plan_files([encode(np.zeros((64, 64, 3), np.uint8))], boxes(SIDE_PX), [draws, draws], geometry)
    with pytest.raises(RuntimeError, match="views need 2 halvings, the graph was built for 1"):
        graph_of(1, chunk, geometry).run()


@pytest.mark.parametrize(
    ("width", "height", "samples"), [(224, 224, 256), (1280, 720, 97), (4032, 3024, 7), (10_000, 10_000, 1)]
)
def test_a_chunk_of_large_images_is_small(width: int, height: int, samples: int) -> None:
    assert samples_in_chunk(width * height) == samples
