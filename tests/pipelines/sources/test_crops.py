"""Crops of images in shards: the views of the files that they were cut from, and no others."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from peclr_dali.bench.loaders.frames import make_frames
from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.loader import Loader
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import RankSlice, Schedule, build_order
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.folder import load_folder
from peclr_dali.pipelines.sources.shards.crop import Crop
from peclr_dali.pipelines.sources.shards.pack import Packed, pack
from peclr_dali.pipelines.views.augmentation import Augmentation, GeometryConfig
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.plan import plan_views, reachable
from peclr_dali.train.evaluation.two_pass_crop import estimate_in_two_passes
from tests.command_line import run_cli
from tests.conftest import Record
from tests.pipelines.decoder_fuzz import encoded
from tests.pipelines.harness import NO_COLOUR, load, smooth_image
from tests.pipelines.test_exif import with_orientation
from tests.pipelines.test_loader import UNDECODABLE

MARGIN = 1.5
SIZES = [(96, 96), (97, 131), (403, 611), (640, 479)]
"""Even and odd ones, some of which are halved."""

COUNT = len(SIZES) * 8
GEOMETRIES = [
    GeometryConfig(side_px=32),
    GeometryConfig(side_px=32, fill=128, scale=(0.9, 1.1), rotation_deg=(-180, 180)),
    GeometryConfig(side_px=24, fill="edge", translation_frac=0.3),
    GeometryConfig(side_px=32, antialias=False),
    GeometryConfig(side_px=24, scale_is="margin", scale=(0.8, 2.5), rotation_deg=(10, 20)),
    GeometryConfig(side_px=24, fill=7, crop_probability=0.6, crop_side_frac=(0.3, 0.9)),
]


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
    boxes[0], boxes[17], boxes[30] = [48, 48, 0], [5, 5, 500], [320, 240, 0]
    return dataclasses.replace(
        load_folder(DataConfig("folder", str(root))),
        box_px=np.array(boxes, np.float32),
        mirror=np.arange(COUNT) % 3 == 0,
        keypoints_px=rng.uniform(0, 90, (COUNT, 21, 2)).astype(np.float32),
        targets={
            "K": (rng.uniform(1, 2, (COUNT, 3, 3)) * [[500, 0, 200], [0, 500, 200], [0, 0, 1]]).astype(np.float32),
            "xyz_px": rng.uniform(0, 90, (COUNT, 21, 3)).astype(np.float32),
            "scale_m": rng.random(COUNT).astype(np.float32),
        },
    )


def with_margin(index: Index) -> Index:
    return dataclasses.replace(index, box_px=index.box_px * np.array([1, 1, MARGIN], np.float32))


def packed_by(index: Index, out: Path, geometry: GeometryConfig, format: Any = "png", **options: Any) -> Packed:
    return pack(index, out, **{"per_shard": 10, "workers": 2, "crop": Crop(format, MARGIN, geometry), **options})


def loaded(root: Path, **options: Any) -> Index:
    return load_index(DataConfig("shards", str(root), **{"box_margin": MARGIN, **options}))


def batches(index: Index, geometry: GeometryConfig) -> list[Batch]:
    order, augmentation = build_order(index, batch=16, seed=1), Augmentation(geometry, NO_COLOUR)
    return load(index, augmentation, batch=16, order=order, chunk=8, views="cpu", decode="whole")


WHOLE_PX = {0: (96, 96), 30: (640, 479)}
"""Width and height of the images without a box."""


def maps_to_crops(files: Index, crops: Index) -> np.ndarray:
    """(N, 3, 3) maps from pixels of the upright files to pixels of the crops, which the boxes give exactly."""
    before, after = files.box_px.astype(np.float64), crops.box_px.astype(np.float64)
    for row, (width, height) in WHOLE_PX.items():
        before[row] = width / 2, height / 2, max(width, height)
        if not crops.box_px[row, 2]:  # kept as it is
            after[row] = before[row]
    times = 2 ** np.round(np.log2(before[:, 2] / after[:, 2]))
    start_px = np.round(before[:, :2] - after[:, :2] * times[:, None])
    maps = np.zeros((len(before), 3, 3))
    maps[:, 0, 0] = maps[:, 1, 1] = 1 / times
    maps[:, :2, 2], maps[:, 2, 2] = -start_px / times[:, None], 1
    return maps


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=range(len(GEOMETRIES)))
def test_views_of_crops_are_views_of_the_files(geometry: GeometryConfig, source: Index, tmp_path: Path) -> None:
    """Before the colours are changed: PNG within a level, JPEG within the bounds that docs/datasets.md states.

    Beyond the border of an image that its Exif data turn, fill "edge" may repeat other pixels.
    """
    files = with_margin(source)
    theirs = batches(files, geometry)
    turned = np.arange(COUNT) % 8 != 0
    for format in ("png", "jpeg"):
        packed_by(source, tmp_path / format, geometry, format)
        crops = loaded(tmp_path / format)
        maps = maps_to_crops(files, crops)
        assert (maps[:, 0, 0] < 1).any() == geometry.antialias
        assert sum(crops.read(row) != files.read(row) for row in range(COUNT)) >= COUNT // 2
        assert_labels_follow(source, crops, maps)
        differences: dict[bool, list[np.ndarray]] = {False: [], True: []}
        for one, other in zip(batches(crops, geometry), theirs, strict=True):
            rows = one.samples[:, 0].numpy()
            np.testing.assert_array_equal(rows, other.samples[:, 0])
            for view, expected in zip(one.views, other.views, strict=True):
                assert torch.equal(view.matrix, expected.matrix)
                assert_same_corners(view.source_to_view_px, expected.source_to_view_px, maps[rows], geometry.side_px)
                levels = (view.image.int() - expected.image.int()).abs().numpy()
                for row, of_view in zip(rows.tolist(), levels, strict=True):
                    differences[bool(geometry.fill == "edge" and turned[row])].append(of_view)
        if format == "png":
            assert np.max(differences[False]) <= 1
        else:
            assert np.mean(differences[False]) < 1
            assert np.percentile(differences[False], 99.9) <= 10
        assert np.mean(differences[True] or 0) < 2


def assert_same_corners(ours: torch.Tensor, theirs: torch.Tensor, maps: np.ndarray, side_px: int) -> None:
    """Each corner of a view, taken to the file and by the crop back to the view, stays where it is."""
    corners = np.array([[0, side_px, 0, side_px], [0, 0, side_px, side_px], [1, 1, 1, 1]])
    last_row = np.tile([0, 0, 1.0], (len(maps), 1, 1))
    in_files = np.linalg.inv(np.concatenate([theirs.double().numpy(), last_row], axis=1)) @ corners
    found = ours.double().numpy() @ maps @ in_files
    np.testing.assert_allclose(found, np.tile(corners[:2], (len(maps), 1, 1)), rtol=0, atol=1e-4)


def assert_labels_follow(source: Index, crops: Index, maps: np.ndarray) -> None:
    before, after = source.keypoints_px, crops.keypoints_px
    assert before is not None
    assert after is not None
    scale, shift = maps[:, 0, 0][:, None, None], maps[:, None, :2, 2]
    np.testing.assert_allclose(after, before * scale + shift, rtol=0, atol=1e-4)
    np.testing.assert_allclose(crops.targets["K"], maps @ source.targets["K"], rtol=1e-5, atol=1e-3)
    xyz_px = source.targets["xyz_px"] * scale
    np.testing.assert_allclose(crops.targets["xyz_px"][..., :2], xyz_px[..., :2] + shift, rtol=0, atol=1e-4)
    np.testing.assert_allclose(crops.targets["xyz_px"][..., 2], xyz_px[..., 2], rtol=1e-6)
    np.testing.assert_array_equal(crops.targets["scale_m"], source.targets["scale_m"])
    np.testing.assert_array_equal(crops.mirrored, source.mirrored)


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
    geometries, st.tuples(st.integers(1, 900), st.integers(1, 900)), st.integers(0, 2**32),
    st.tuples(st.floats(-0.3, 1.3), st.floats(-0.3, 1.3), st.just(0.0) | st.floats(0.01, 2)), st.sampled_from([0.5, 1]),
)  # fmt: skip
def test_what_is_reachable_is_enough_for_every_draw(
    geometry: GeometryConfig, size: tuple[int, int], seed: int, box: tuple[float, float, float], less: float
) -> None:
    """All pixels that a view's warp samples are in it, in whole blocks of its halvings, and none is halved too often.

    Also for views of half the side.
    """
    height, width = size
    count = 20
    box_px = np.array([[box[0] * width, box[1] * height, box[2] * max(size)]], np.float32).repeat(count, axis=0)
    size_px = np.array([size]).repeat(count, axis=0)
    (start, *_), (stop, *_), (halvings, *_) = reachable(size_px, box_px, geometry)
    here = dataclasses.replace(geometry, side_px=int(geometry.side_px * less))
    draws = [draw_view(Augmentation(here, NO_COLOUR), seed=seed, epoch=0, view=0, places=np.arange(count))]
    mirror = np.arange(count) % 2 == 0
    plan = plan_views(size_px, np.ones(count, np.int64), box_px, draws, [here], mirror=mirror)
    assert (plan.halvings >= halvings).all()
    side = here.side_px
    corners = np.array([[0.5, 0.5, 1], [side - 0.5, 0.5, 1], [0.5, side - 0.5, 1], [side - 0.5, side - 0.5, 1]])
    for row in range(count):
        block = 2 ** int(plan.halvings[0, row])
        assert (start % block == 0).all()
        assert ((stop % block == 0) | (stop == size)).all()
        inverse = np.linalg.inv(np.vstack([plan.decoded_to_view_px[0, row], [0, 0, 1]]))[:2]
        sampled = np.floor(corners @ inverse.T - 0.5 + [[-1e-3], [1e-3], [-1e-3], [1e-3]])[:, ::-1]
        low, high = np.clip([sampled.min(axis=0), sampled.max(axis=0) + 1], 0, -(-np.array(size) // block) - 1)
        assert (low * block >= start).all()
        assert (np.minimum((high + 1) * block, size) <= stop).all()


def test_a_file_of_which_nothing_is_saved_stays_as_it_is(source: Index, tmp_path: Path) -> None:
    """Its Exif orientation too."""
    packed_by(source, tmp_path / "out", GeometryConfig(side_px=96, scale=(0.2, 2)))
    crops = loaded(tmp_path / "out")
    for row in range(16):
        assert crops.read(row) == source.read(row)
    np.testing.assert_array_equal(crops.box_px[:16], with_margin(source).box_px[:16])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("side_px", 33), ("side_px", 15), ("translation_frac", 0.2),
        ("scale", (0.5, 2.0)), ("scale", (0.6, 2.1)), ("crop_probability", 0.1), ("fill", 1), ("antialias", False),
    ],
)  # fmt: skip
def test_a_run_that_needs_more_is_one_line(key: str, value: Any, source: Index, tmp_path: Path) -> None:
    packed = GEOMETRIES[0]
    packed_by(source, tmp_path / "out", packed)
    here = json.dumps(value), json.dumps(getattr(packed, key))
    for index in (loaded(tmp_path / "out"), load_index([DataConfig("shards", str(tmp_path / "out"))] * 2)):
        with pytest.raises(UserError) as refused:
            batches(index, dataclasses.replace(packed, **{key: value}))
        assert f"out: its crops do not serve these views: geometry.{key} = {here[0]} (packed: {here[1]})" in str(
            refused.value
        )
    narrower = dataclasses.replace(packed, side_px=16, rotation_deg=(0, 20), scale=(1.0, 1.0), translation_frac=0.0)
    assert batches(loaded(tmp_path / "out"), narrower)
    with pytest.raises(UserError, match=r"views: data\.box_margin = 1\.4 \(packed: 1\.5\)\. Stay"):
        batches(loaded(tmp_path / "out", box_margin=1.4), packed)


def test_what_reads_whole_files_refuses_crops(source: Index, tmp_path: Path) -> None:
    packed_by(source, tmp_path / "out", GEOMETRIES[0])
    nothing: Any = None
    with pytest.raises(UserError, match=r"out: holds crops, and two passes look at whole images"):
        estimate_in_two_passes(nothing, loaded(tmp_path / "out"), nothing, nothing, nothing)


def test_a_folder_holds_one_kind_of_shards(source: Index, tmp_path: Path) -> None:
    packed_by(source, tmp_path / "out", GEOMETRIES[0])
    assert packed_by(source, tmp_path / "out", GEOMETRIES[0]).already_there
    for other in (None, Crop("png", MARGIN, GEOMETRIES[1]), Crop("jpeg", MARGIN, GEOMETRIES[0])):
        with pytest.raises(UserError, match=r"out: holds shards of another --crop, geometry or data\.box_margin"):
            packed_by(source, tmp_path / "out", GEOMETRIES[0], crop=other)
    with pytest.raises(UserError, match=r"out: holds crops\. Pack the data that they were made from"):
        packed_by(loaded(tmp_path / "out"), tmp_path / "again", GEOMETRIES[0])


def test_files_that_do_not_decode_are_left_out(source: Index, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(UNDECODABLE)
    (tmp_path / "b.jpg").write_bytes(source.read(20))
    box_px = np.array([[30, 30, 5]] * 2, np.float32)
    index = dataclasses.replace(load_folder(DataConfig("folder", str(tmp_path))), box_px=box_px)
    assert packed_by(index, tmp_path / "out", GEOMETRIES[0]).left_out == 1
    (line,) = (tmp_path / "out/left_out.jsonl").read_text().splitlines()
    assert json.loads(line) == {"path": str(tmp_path / "a.jpg"), "reason": "its compressed data does not decode"}


def test_the_command_crops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its index says what the crops serve; a run with other views is refused before it begins."""
    make_frames([write_picture(tmp_path)], tmp_path / "frames", 4)
    out, made = str(tmp_path / "out"), ("--set", "geometry.side_px=64")
    files = ("data.source=folder", f"data.root={tmp_path}/frames", f"data.box={tmp_path}/frames/boxes.csv")
    chosen = [word for one in files for word in ("--set", one)]
    assert run_cli("pack", "--crop", "jpeg", *chosen, *made, out) == 0
    content = json.loads((tmp_path / "out/index.json").read_text())["crop"]
    assert (content["format"], content["box_margin"], content["geometry"]["side_px"]) == ("jpeg", 1.5, 64)
    crops = load_index(DataConfig("shards", out))
    assert max(len(crops.read(row)) for row in range(4)) < 50_000 < 150_000 < bytes_of(tmp_path / "frames", "jpg") / 4
    shards = ("--set", "data.source=shards", "--set", f"data.root={out}", "--samples", "4")
    assert run_cli("views", *shards, *made, str(tmp_path / "views.png")) == 0
    capsys.readouterr()
    assert run_cli("views", *shards, "--set", "geometry.side_px=65", str(tmp_path / "more.png")) == 2
    assert "geometry.side_px = 65 (packed: 64)" in capsys.readouterr().err.splitlines()[-1]


def bytes_of(folder: Path, ending: str) -> int:
    return sum(file.stat().st_size for file in folder.glob(f"*.{ending}"))


def write_picture(folder: Path) -> Path:
    file = folder / "hand.jpg"
    file.write_bytes(encoded(Image.fromarray(smooth_image(np.random.default_rng(0), 224, 224)), "JPEG"))
    return file


@pytest.mark.slow  # measures rates, for a quiet machine
@pytest.mark.parametrize(("enlarged", "least_ratio"), [(1, 1.2), (3, 4.0)])
def test_crops_of_large_frames_load_faster(enlarged: int, least_ratio: float, tmp_path: Path, record: Record) -> None:
    """Frames of 1280 x 720 and 3840 x 2160 pixels with a hand of a fifth of their width, the paper's augmentation."""
    frames, count = tmp_path / "frames", 256 // enlarged
    make_frames([write_picture(tmp_path)], frames, count)
    for file in frames.glob("*.jpg"):
        large = cv2.resize(np.asarray(cv2.imread(str(file))), None, fx=enlarged, fy=enlarged)
        cv2.imwrite(str(file), large, [cv2.IMWRITE_JPEG_QUALITY, 90])
    index = load_index(DataConfig("folder", str(frames), box=str(frames / "boxes.csv"), box_margin=1.0))
    index = dataclasses.replace(index, box_px=index.box_px * enlarged)
    pack(index, tmp_path / "out", per_shard=64, workers=2, crop=Crop("jpeg", MARGIN, GeometryConfig()))
    sources = {"files": with_margin(index), "crops": loaded(tmp_path / "out")}
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for name in [*sources] * 5:  # in turn, so that another load of the machine meets both
        rates[name].append(images_per_s(sources[name], batch=count // 2))
    files, crops = (float(np.median(rates[name])) for name in sources)
    assert crops > least_ratio * files
    record(
        "crops", proof=f"crops of frames of {1280 * enlarged} x {720 * enlarged} pixels", images=count,
        files_images_per_s=round(files), crops_images_per_s=round(crops), ratio=round(crops / files, 2),
        bytes_of_files=bytes_of(frames, "jpg"), bytes_of_shards=bytes_of(tmp_path / "out", "tar"),
    )  # fmt: skip


def images_per_s(index: Index, *, batch: int, batches: int = 8) -> float:
    """The rate of the loader, without its first two batches."""
    order = build_order(index, batch=batch, seed=0)
    schedule = Schedule(order, RankSlice(batch, 0, batch), last_step=batches + 2)
    with Loader(index, schedule, PipelinesConfig(), Augmentation(), device=torch.device("cpu")) as loader:
        made = iter(loader)
        for _ in range(2):
            next(made)
        start = time.perf_counter()
        for _ in range(batches):
            next(made)
        return batches * batch / (time.perf_counter() - start)
