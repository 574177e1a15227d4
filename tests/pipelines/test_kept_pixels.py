"""Pixels that are kept decoded: the views of the files they were packed from, and no others."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali import Pipeline
from PIL import Image

from errors import UserError
from pipelines.arrays import BoolArray
from pipelines.batch import Batch
from pipelines.config import DataConfig, PipelinesConfig
from pipelines.loader import Loader
from pipelines.samples.index import Index
from pipelines.samples.join import join
from pipelines.samples.order import RankSlice, Schedule, build_order
from pipelines.sources import load_index
from pipelines.sources.folder import load_folder
from pipelines.sources.shards.load import load_shards
from pipelines.sources.shards.pack import Packed, pack
from pipelines.sources.shards.pack_pixels import PixelContents
from pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig
from pipelines.views.draws import draw_view
from pipelines.views.plan import keep, plan_views
from pipelines.views.reach import reach_of
from tests.command_line import run_cli
from tests.pipelines.decoder_fuzz import encoded
from tests.pipelines.harness import smooth_image
from tests.pipelines.test_exif import with_orientation
from tests.pipelines.test_loader import UNDECODABLE
from train.data.check_data import check_data

NO_COLOUR = ColourConfig(jitter="none")
MARGIN = 1.5
SIZES = [(96, 96), (97, 131), (403, 611), (640, 479)]
"""Even and odd ones, some of which are halved."""

COUNT = len(SIZES) * 8

Backend = Literal["dali", "cpu"]
Call = tuple[int, int]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Four sizes in eight orientations, JPEGs and PNGs; boxes inside, at the border, partly outside, of the whole."""
    root = tmp_path_factory.mktemp("source") / "images"
    root.mkdir()
    rng = np.random.default_rng(0)
    boxes = []
    for number, (size, turn) in enumerate(itertools.product(SIZES, range(1, 9))):
        kind = "PNG" if turn == 3 else "JPEG"
        file = root / f"{number:03}.{'png' if kind == 'PNG' else 'jpg'}"
        file.write_bytes(with_orientation(encoded(Image.fromarray(smooth_image(rng, *size, sigma_px=1.5)), kind), turn))
        height, width = size if turn <= 4 else size[::-1]
        boxes.append([rng.uniform(-20, width + 20), rng.uniform(-20, height + 20), rng.uniform(30, 120)])
    boxes[0], boxes[17], boxes[30] = [48, 48, 0], [5, 5, 500], [300, 240, 0]
    return dataclasses.replace(
        load_folder(DataConfig("folder", str(root))),
        box_px=np.array(boxes, np.float32),
        mirror=np.arange(COUNT) % 3 == 0,
        group=np.arange(COUNT) // 2,
        keypoints_px=rng.uniform(0, 90, (COUNT, 21, 2)).astype(np.float32),
        targets={"scale_m": rng.random(COUNT).astype(np.float32)},
    )


def with_margin(index: Index) -> Index:
    return dataclasses.replace(index, box_px=index.box_px * np.array([1, 1, MARGIN], np.float32))


@contextlib.contextmanager
def no_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    yield lambda done, total: None


def packed_by(
    index: Index,
    out: Path,
    geometry: GeometryConfig,
    *,
    backend: Backend = "cpu",
    told: list[str] | None = None,
    **options: Any,
) -> Packed:
    lines: list[str] = [] if told is None else told
    contents = PixelContents(index, geometry, MARGIN, backend, say=lines.append, progress=no_progress)
    return pack(index, out, **{"per_shard": 10, "workers": 2, "contents": contents, **options})


def loaded(root: Path, **options: Any) -> Index:
    return load_index(DataConfig("shards", str(root), **{"box_margin": MARGIN, **options}))


def batches(
    index: Index,
    geometry: GeometryConfig,
    backend: Backend,
    colour: ColourConfig = NO_COLOUR,
    *,
    batch: int = 16,
    steps: int = 6,
    decode: Literal["whole", "region"] = "whole",
) -> list[Batch]:
    with Loader(
        index,
        Schedule(build_order(index, batch=batch, seed=1), RankSlice(batch, 0, batch), last_step=steps),
        PipelinesConfig(backend=backend, batch=8, threads=2, decode=decode),
        Augmentation(geometry, colour),
        device=torch.device("cpu"),
    ) as loader:
        return list(loader)


def assert_equal(ours: list[Batch], theirs: list[Batch], within: int = 0, mean: float = 0.0) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.samples, other.samples)
        for view, expected in zip(one.views, other.views, strict=True):
            assert torch.equal(view.matrix, expected.matrix)
            assert torch.equal(view.source_to_view_px, expected.source_to_view_px)
            difference = (view.image.int() - expected.image.int()).abs()
            assert difference.max() <= within
            assert difference.float().mean() <= mean


GEOMETRIES = [
    GeometryConfig(side_px=32),
    GeometryConfig(side_px=32, fill=128, scale=(0.9, 1.1), rotation_deg=(-180, 180)),
    GeometryConfig(side_px=24, fill="edge", translation_frac=0.3),
    GeometryConfig(side_px=32, antialias=False),
    GeometryConfig(side_px=24, scale_is="margin", scale=(0.8, 2.5), rotation_deg=(10, 20)),
    GeometryConfig(side_px=24, fill=7, crop_probability=0.6, crop_side_frac=(0.3, 0.9)),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=range(len(GEOMETRIES)))
def test_views_of_pixels_are_views_of_the_files(geometry: GeometryConfig, source: Index, tmp_path: Path) -> None:
    """With the kernel for CPUs, before the colours are changed. Where the whole image is kept the bits are equal."""
    packed_by(source, tmp_path / "out", geometry)
    index = loaded(tmp_path / "out")
    assert index.pixels is not None
    table = index.pixels.table
    halved, cut = table["halvings"] > 0, (table["start_px"] > 0).any(axis=1)
    assert cut.sum() > 5
    assert halved.any() == geometry.antialias
    files = with_margin(source)
    assert_equal(batches(index, geometry, "cpu"), batches(files, geometry, "cpu"), 1, 0.02)
    # The origin of a region that begins at the image's first pixel is that of the image, so nothing is rounded.
    first = np.flatnonzero(~cut)
    ours, theirs = (batches(one.select(first), geometry, "cpu", ColourConfig(), batch=4) for one in (index, files))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("geometry", [GEOMETRIES[0], GEOMETRIES[2], GEOMETRIES[3]], ids=["0", "edge", "plain"])
def test_the_graph_takes_pixels_too(geometry: GeometryConfig, source: Index, tmp_path: Path) -> None:
    """DALI's nodes get what the decoder would give them. The views are equal, also in their colours.

    Where pixels were halved when they were packed, they are equal within one level: in the last columns of an image
    DALI rounds by its width, which depends on the views.
    """
    packed_by(source, tmp_path / "out", geometry, backend="dali")
    index, files = loaded(tmp_path / "out"), with_margin(source)
    assert index.pixels is not None
    halved = index.pixels.table["halvings"] > 0
    jpeg = np.array([path.endswith("jpg") for path in source.paths])
    decoded: list[tuple[Literal["whole", "region"], BoolArray]] = [("whole", np.ones(COUNT, bool)), ("region", jpeg)]
    for decode, rows in decoded:
        for some, colour, within in [(rows & ~halved, ColourConfig(), 0), (rows & halved, NO_COLOUR, 1)]:
            if some.any():
                parts = (one.select(np.flatnonzero(some)) for one in (index, files))
                size = min(7, int(some.sum()))
                ours, theirs = (batches(one, geometry, "dali", colour, batch=size, decode=decode) for one in parts)
                assert_equal(ours, theirs, within, 0.02 * within)


@pytest.mark.parametrize("fill", [0, "edge"])
def test_the_graph_halves_a_part_as_the_whole(fill: Literal[0, "edge"], tmp_path: Path) -> None:
    """Every mean of four pixels lies between two levels, and so does that of four such means.

    Whatever rounds them in another way is two levels off after the second halving.
    """
    rng = np.random.default_rng(0)
    tile = np.array([[10, 10, 10, 10], [11, 11, 11, 11], [10, 10, 12, 12], [11, 11, 13, 13]], np.uint8)
    images = tmp_path / "images"
    images.mkdir()
    for number in range(6):
        steps = rng.integers(0, 50, (75, 99 + number, 3), np.uint8).repeat(4, axis=0).repeat(4, axis=1)
        pixels = np.tile(tile, (75, 99 + number))[:, :, None] + 4 * steps
        (images / f"{number}.png").write_bytes(encoded(Image.fromarray(pixels), "PNG"))
    source = dataclasses.replace(
        load_folder(DataConfig("folder", str(images))),
        box_px=np.array([[150 + 40 * number, 150, 44] for number in range(6)], np.float32),
    )
    geometry = GeometryConfig(side_px=24, fill=fill, scale=(0.6, 2.0))
    packed_by(source, tmp_path / "out", geometry, backend="dali")
    index = loaded(tmp_path / "out")
    assert index.pixels is not None
    assert not index.pixels.table["halvings"].any()
    assert (index.pixels.table["shape_px"] < (300, 396)).all()
    ours, theirs = (batches(one, geometry, "dali", batch=6) for one in (index, with_margin(source)))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("packed", ["dali", "cpu"])
def test_another_backend_than_the_one_that_packed_is_warned_of(
    packed: Backend, source: Index, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And its views differ by two levels at most."""
    packed_by(source, tmp_path / "out", GEOMETRIES[0], backend=packed)
    index, files = loaded(tmp_path / "out"), with_margin(source)
    batches(index, GEOMETRIES[0], packed)
    assert "packed with" not in caplog.text
    other: Backend = "cpu" if packed == "dali" else "dali"
    assert_equal(batches(index, GEOMETRIES[0], other), batches(files, GEOMETRIES[0], other), 2, 0.5)
    batches(index, GEOMETRIES[0], other)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"packed with pipelines.backend = {packed!r}, and this run uses {other!r}" in line


def test_labels_boxes_and_subsets_are_kept(source: Index, tmp_path: Path) -> None:
    packed_by(source, tmp_path / "out", GEOMETRIES[0])
    index = loaded(tmp_path / "out")
    np.testing.assert_array_equal(index.box_px, with_margin(source).box_px)
    for name in ("mirror", "group", "keypoints_px"):
        np.testing.assert_array_equal(getattr(index, name), getattr(source, name))
    np.testing.assert_array_equal(index.targets["scale_m"], source.targets["scale_m"])
    rows = np.array([1, 9, 30])
    some, both = index.select(rows), join([index, index.select(rows)], [1, 1])
    assert some.pixels is not None
    assert both.pixels is not None
    assert index.pixels is not None
    np.testing.assert_array_equal(some.pixels.table, index.pixels.table[rows])
    np.testing.assert_array_equal(both.pixels.address[-3:], index.pixels.address[rows])
    assert both.paths[9] == f"{Path()}/shard-000000.rgb/000000009"
    assert len(loaded(tmp_path / "out", label_fraction=0.5)) < COUNT
    assert len(loaded(tmp_path / "out", split="train")) + len(loaded(tmp_path / "out", split="val")) == COUNT
    with pytest.raises(UserError, match=r"shard-000000\.rgb/000000000 holds pixels, not image files"):
        index.read(0)
    with pytest.raises(UserError, match=r"out holds pixels and .*images files: pack all sources alike"):
        join([index, source], [1, 1])
    with pytest.raises(UserError, match=r"out holds pixels already"):
        packed_by(index, tmp_path / "again", GEOMETRIES[0])


def test_several_sources_of_pixels_are_one(source: Index, tmp_path: Path) -> None:
    packed_by(source, tmp_path / "a", GEOMETRIES[0])
    packed_by(source, tmp_path / "b", GEOMETRIES[0])
    data = [DataConfig("shards", str(tmp_path / name), box_margin=MARGIN) for name in "ab"]
    files = with_margin(source)
    ours = batches(load_index(data), GEOMETRIES[0], "cpu")
    assert_equal(ours, batches(join([files, files], [1, 1]), GEOMETRIES[0], "cpu"), 1, 0.02)


ranges = st.tuples(st.floats(0.3, 3), st.floats(0.3, 3)).map(sorted).map(tuple)
geometries = st.builds(
    GeometryConfig,
    side_px=st.sampled_from([16, 64, 200]),
    rotation_deg=st.tuples(st.floats(-200, 200), st.floats(-200, 200)).map(sorted).map(tuple),
    translation_frac=st.floats(0, 0.5),
    scale=ranges,
    scale_is=st.sampled_from(["magnification", "margin"]),
    crop_probability=st.sampled_from([0.0, 0.5, 1.0]),
    crop_side_frac=st.tuples(st.floats(0.1, 1), st.floats(0.1, 1)).map(sorted).map(tuple),
    antialias=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(
    geometries, st.tuples(st.integers(1, 900), st.integers(1, 900)), st.integers(1, 8), st.integers(0, 2**32),
    st.tuples(st.floats(-0.3, 1.3), st.floats(-0.3, 1.3), st.just(0.0) | st.floats(0.01, 2)), st.sampled_from([0.5, 1]),
)  # fmt: skip
def test_what_is_kept_is_enough_for_every_draw(
    geometry: GeometryConfig, size: tuple[int, int], turn: int, seed: int, box: tuple[float, float, float], less: float
) -> None:
    """All pixels that a view's warp samples are kept, in whole blocks of its halvings, and none is halved too often.

    Also for views of half the side.
    """
    height, width = size if turn <= 4 else size[::-1]
    count = 20
    box_px = np.array([[box[0] * width, box[1] * height, box[2] * max(size)]], np.float32).repeat(count, axis=0)
    size_px, orientation = np.array([size]).repeat(count, axis=0), np.full(count, turn)
    kept = keep(size_px, orientation, box_px, geometry)
    here = dataclasses.replace(geometry, side_px=int(geometry.side_px * less))
    draws = [draw_view(Augmentation(here, NO_COLOUR), seed=seed, epoch=0, view=0, places=np.arange(count))]
    mirror = np.arange(count) % 2 == 0
    ours = plan_views(size_px, orientation, box_px, draws, here, mirror=mirror, kept=kept).views[0]
    whole = plan_views(size_px, orientation, box_px, draws, here, mirror=mirror).views[0]
    np.testing.assert_array_equal(ours.halvings + kept.halvings, whole.halvings)
    assert (ours.halvings >= 0).all()
    side = here.side_px
    corners = np.array([[0.5, 0.5, 1], [side - 0.5, 0.5, 1], [0.5, side - 0.5, 1], [side - 0.5, side - 0.5, 1]])
    for row in range(count):
        block = 2 ** int(whole.halvings[row])
        start = kept.start_px[row]
        stop = np.minimum(start + (kept.shape_px[row] << kept.halvings[row]), size)
        assert (start % block == 0).all()
        assert ((stop % block == 0) | (stop == size)).all()
        inverse = np.linalg.inv(np.vstack([whole.decoded_to_view_px[row], [0, 0, 1]]))[:2]
        sampled = np.floor(corners @ inverse.T - 0.5 + [[-1e-3], [1e-3], [-1e-3], [1e-3]])[:, ::-1]
        halved = -(-np.array(size) // block)
        low, high = np.clip([sampled.min(axis=0), sampled.max(axis=0) + 1], 0, halved - 1)
        assert (low * block >= start).all()
        assert (np.minimum((high + 1) * block, size) <= stop).all()


def test_a_view_of_pixels_that_were_halved_too_often_is_refused() -> None:
    size_px, upright, box_px = np.array([[800, 800]]), np.array([1]), np.array([[400, 400, 800]], np.float32)
    small, large = (GeometryConfig(side_px=64, scale=(scale, scale)) for scale in (0.5, 2.0))
    draws = [draw_view(Augmentation(large, NO_COLOUR), seed=0, epoch=0, view=0, places=np.arange(1))]
    with pytest.raises(ValueError, match="fewer halvings"):
        plan_views(size_px, upright, box_px, draws, large, kept=keep(size_px, upright, box_px, small))


@settings(max_examples=100, deadline=None)
@given(geometries, st.integers(0, 2**32))
def test_the_reach_is_that_of_the_draws(geometry: GeometryConfig, seed: int) -> None:
    """No draw passes it, and draws come near it: what is kept is not much more than is needed."""
    count, box = 4000, 1000.0
    draws = [draw_view(Augmentation(geometry, NO_COLOUR), seed=seed, epoch=0, view=0, places=np.arange(count))]
    size_px, box_px = np.full((count, 2), 5000), np.array([[2500, 2500, box]], np.float32).repeat(count, axis=0)
    (view,) = plan_views(size_px, np.ones(count, np.int64), box_px, draws, geometry).views
    linear = view.source_to_view_px[:, :, :2].astype(np.float64)
    magnification = np.sqrt(np.linalg.det(linear)) * box
    reach = reach_of(geometry)
    assert reach.least_px <= magnification.min() * (1 + 1e-5)
    assert magnification.max() <= reach.most_px * (1 + 1e-5)
    corners = np.array([[0, 0], [1, 0], [0, 1], [1, 1]]) * float(geometry.side_px)
    points = np.linalg.solve(linear[:, None], (corners[None] - view.source_to_view_px[:, None, :, 2])[..., None])[
        ..., 0
    ]
    found = 2 * np.abs(points - 2500).max() / box
    assert found <= reach.side * (1 + 1e-4)
    if geometry.crop_probability == 0:
        assert reach.least_px > 0.9 * magnification.min()
        assert found > 0.6 * reach.side


FREE = GeometryConfig(side_px=64, scale=(0.8, 1.5), rotation_deg=(-30, 30), translation_frac=0.1)


@pytest.mark.parametrize(
    ("key", "value", "need"),
    [
        ("scale", (0.7, 1.5), "show more of the images"),
        ("translation_frac", 0.11, "show more of the images"),
        ("rotation_deg", (-31.0, 30.0), "show more of the images"),
        ("scale", (0.8, 1.6), "magnify the images more"),
        ("side_px", 65, "magnify the images more"),
        ("side_px", 31, "make the images smaller"),
        ("crop_probability", 0.1, "magnify the images more"),
        ("antialias", False, "are sampled otherwise"),
        ("fill", "edge", "have another border"),
    ],
)
def test_a_view_that_needs_more_is_one_line(key: str, value: Any, need: str, source: Index, tmp_path: Path) -> None:
    packed_by(source, tmp_path, FREE)
    geometry = dataclasses.replace(FREE, **{key: value})
    packed = getattr(FREE, key)
    with pytest.raises(UserError) as caught:
        batches(loaded(tmp_path), geometry, "cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert need in message
    plain = [list(one) if isinstance(one, tuple) else one for one in (value, packed)]
    assert f"geometry.{key} = {plain[0]} (packed: {plain[1]})" in message


def test_a_margin_that_needs_more_is_one_line_and_less_is_free(source: Index, tmp_path: Path) -> None:
    packed_by(source, tmp_path, FREE)
    with pytest.raises(UserError, match=r"show more .*: data\.box_margin = 1\.6 \(packed: 1\.5\)\. Stay within"):
        batches(loaded(tmp_path, box_margin=1.6), FREE, "cpu")
    with pytest.raises(UserError, match=r"magnify .*: data\.box_margin = 1\.4 \(packed: 1\.5\)\. Stay within"):
        batches(loaded(tmp_path, box_margin=1.4), FREE, "cpu")
    narrower = dataclasses.replace(FREE, scale=(0.9, 1.3), rotation_deg=(0, 0), translation_frac=0.0, side_px=32)
    ours = batches(loaded(tmp_path), narrower, "cpu")
    assert_equal(ours, batches(with_margin(source), narrower, "cpu"), 1, 0.02)
    less = dataclasses.replace(FREE, scale=(0.8, 1.3))
    smaller = dataclasses.replace(source, box_px=source.box_px * np.array([1, 1, 1.4], np.float32))
    assert_equal(batches(loaded(tmp_path, box_margin=1.4), less, "cpu"), batches(smaller, less, "cpu"), 1, 0.02)


def test_the_size_is_foretold_and_a_full_disk_refused(
    source: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    packed = packed_by(source, tmp_path / "out", GEOMETRIES[2], told=told)
    size = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.rgb"))
    assert packed == Packed(COUNT, 4, size, 0, already_there=False)
    assert size == 3 * int(np.load(tmp_path / "out/index/pixels.npy")["shape_px"].astype(int).prod(axis=1).sum())
    assert told[0].startswith(f"{tmp_path / 'out'}: the pixels of {COUNT} images take {size / 1024**2:.1f} MiB; ")
    assert packed_by(source, tmp_path / "out", GEOMETRIES[2], told=told).already_there
    assert len(told) == 1
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(size - 1))
    with pytest.raises(UserError, match=r"the pixels take .* MiB, and .* are free\. Make room"):
        packed_by(source, tmp_path / "full", GEOMETRIES[2])
    assert not list((tmp_path / "full").glob("*.rgb"))
    monkeypatch.undo()
    assert packed_by(source, tmp_path / "full", GEOMETRIES[2]).bytes == size
    with pytest.raises(
        UserError,
        match=r"holds shards of geometry\.side_px 24, not 32; geometry\.translation_frac 0\.3, not 0\.\d+; "
        r"geometry\.fill 'edge', not 0\. Name another folder",
    ):
        packed_by(source, tmp_path / "out", GEOMETRIES[0])


def test_the_command_packs_and_a_run_that_needs_more_is_refused(
    source: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--set", "geometry.side_px=32", "--set", "train.device=cpu")
    out, picture = str(tmp_path / "out"), str(tmp_path / "views.png")
    pack_them = ("pack", "--pixels", "--set", "data.source=folder", "--set", f"data.root={source.root}", *size, out)
    assert run_cli(*pack_them) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{out}: the pixels of {COUNT} images take ")
    assert told[1].startswith(f"{out}: {COUNT} images in 1 shard of ")
    assert run_cli(*pack_them) == 0
    assert "is packed already" in capsys.readouterr().out
    shown = ("views", "--set", "data.source=shards", "--set", f"data.root={out}", *size)
    assert run_cli(*shown, picture) == 0
    assert Path(picture).stat().st_size > 1000
    capsys.readouterr()
    assert run_cli(*shown, "--set", "geometry.scale=[0.5, 3.0]", str(tmp_path / "more.png")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "geometry.scale = [0.5, 3.0] (packed: [0.6, 2.0])" in line


@pytest.mark.parametrize("pixels_first", [True, False])
def test_files_and_pixels_do_not_share_a_folder(source: Index, tmp_path: Path, pixels_first: bool) -> None:
    def pack_pixels() -> None:
        packed_by(source, tmp_path, GEOMETRIES[0])

    def pack_files() -> None:
        pack(source, tmp_path, per_shard=10, workers=2)

    first, second = (pack_pixels, pack_files) if pixels_first else (pack_files, pack_pixels)
    first()
    held, packed = ("pixels", "files") if pixels_first else ("files", "pixels")
    with pytest.raises(UserError, match=f"holds shards of {held}, and this call packs {packed}"):
        second()


class Killed(BaseException):
    """Stands for a kill."""


def test_what_was_interrupted_goes_on_and_ends_the_same(source: Index, tmp_path: Path) -> None:
    packed_by(source, tmp_path / "whole", GEOMETRIES[2])

    def kill(done: int, total: int) -> None:
        if done > 12:
            raise Killed

    class Slow(type(source)):  # type: ignore[misc]
        def read(self, sample: int) -> bytes:
            import time

            time.sleep(0.02)
            return source.read(sample)

    out = tmp_path / "out"
    slow = Slow(**{field.name: getattr(source, field.name) for field in dataclasses.fields(source)})
    with pytest.raises(Killed):
        packed_by(slow, out, GEOMETRIES[2], progress=kill, workers=1)
    finished = {file: file.stat().st_mtime_ns for file in out.glob("*.rgb")}
    assert 0 < len(finished) < 4
    assert packed_by(source, out, GEOMETRIES[2]).samples == COUNT
    assert all(file.stat().st_mtime_ns == written for file, written in finished.items())
    for file in (tmp_path / "whole").rglob("*"):
        if file.is_file():
            assert (out / file.relative_to(tmp_path / "whole")).read_bytes() == file.read_bytes()


def test_bad_files_are_left_out_and_named(source: Index, tmp_path: Path) -> None:
    images = Path(shutil.copytree(source.root, tmp_path / "images"))
    (images / source.paths[4]).write_bytes(b"")
    (images / source.paths[9]).write_bytes(UNDECODABLE)
    index = dataclasses.replace(source, root=images)
    assert packed_by(index, tmp_path / "out", GEOMETRIES[0]).left_out == 2
    rows = [json.loads(line) for line in (tmp_path / "out/left_out.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rows] == ["empty file", "its compressed data does not decode"]
    good = np.setdiff1d(np.arange(COUNT), [4, 9])
    ours = batches(loaded(tmp_path / "out"), GEOMETRIES[0], "cpu", steps=1)
    assert_equal(ours, batches(with_margin(source).select(good), GEOMETRIES[0], "cpu", steps=1), 1, 0.02)


def test_lack_of_memory_leaves_no_image_out(source: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(pipeline: Pipeline) -> object:
        raise RuntimeError("std::bad_alloc")

    monkeypatch.setattr(Pipeline, "run", run)
    with pytest.raises(UserError, match="out of memory"):
        packed_by(source, tmp_path / "out", GEOMETRIES[0])


def test_changed_bytes_are_found(source: Index, tmp_path: Path) -> None:
    """Any byte of a shard by `check-data`; of the index, and a cut shard, at the start."""
    packed_by(source, tmp_path / "out", GEOMETRIES[0])

    def bad(out: str) -> dict[str, str]:
        calls: list[Call] = []
        (found,) = check_data(
            DataConfig("shards", str(tmp_path / "out")), PipelinesConfig(), tmp_path / out,
            device=torch.device("cpu"), progress=lambda *call: calls.append(call),
        )  # fmt: skip
        assert calls[-1] == (COUNT, COUNT)
        return found.reasons

    assert bad("none.jsonl") == {}
    table = np.load(tmp_path / "out/index/pixels.npy")
    shard = tmp_path / "out/shard-000001.rgb"
    whole = shard.read_bytes()
    rng = np.random.default_rng(0)
    rows = {int(row): int(table["offset"][row]) + int(rng.integers(12)) for row in (10, 14, 19)}
    changed = bytearray(whole)
    for place in [*rows.values(), len(whole) - 1]:
        changed[place] ^= 1 << int(rng.integers(8))
    shard.write_bytes(changed)
    found = bad("some.jsonl")
    assert list(found) == [f"shard-000001.rgb/{row:09d}" for row in rows]
    assert set(found.values()) == {"not the pixels that were packed (wrong checksum)"}
    assert len(loaded(tmp_path / "out", bad_list=str(tmp_path / "some.jsonl"))) == COUNT - 3
    shard.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"shard-000001\.rgb: \d+ bytes, expected \d+: cut or changed"):
        loaded(tmp_path / "out")
    shard.write_bytes(whole)
    file = tmp_path / "out/index/pixels.npy"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"pixels\.npy: not the bytes that were packed"):
        loaded(tmp_path / "out")


@pytest.mark.parametrize(
    ("column", "value"), [("offset", 2**62), ("offset", 2**63), ("shape_px", 2**30), ("shape_px", -4), ("shape_px", 0)]
)
def test_an_index_that_leads_outside_of_its_shards_is_refused(
    column: str, value: int, source: Index, tmp_path: Path
) -> None:
    """Before the kernel reads there: also where the checksum of the table fits."""
    packed_by(source, tmp_path, GEOMETRIES[0])
    table = np.load(tmp_path / "index/pixels.npy")
    table[column][7] = value
    np.save(tmp_path / "index/pixels.npy", table)
    content = json.loads((tmp_path / "index.json").read_text())
    del content["crc32"]
    (tmp_path / "index.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"the index has pixels outside of shard-000000\.rgb"):
        load_shards(DataConfig("shards", str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "voxels"}, "kind is 'voxels', expected 'files' or 'pixels'"),
        ({"kind": "files"}, "something is missing"),
        ({"pixels": None}, "does not say for which views its pixels are"),
        ({"pixels": {"geometry": {"side_px": "wide"}, "box_margin": 1}}, "does not say for which views its pixels are"),
    ],
)
def test_an_index_file_that_fits_not_is_one_line(
    change: dict[str, Any], message: str, source: Index, tmp_path: Path
) -> None:
    packed_by(source, tmp_path, GEOMETRIES[0])
    file = tmp_path / "index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=message):
        load_shards(DataConfig("shards", str(tmp_path)))
