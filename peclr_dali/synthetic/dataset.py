"""A dataset of rendered hands in FreiHAND's layout.

    OUT/training/rgb/%08d.jpg     4 N images of 224 x 224; version v of pose i is number i + N v
    OUT/training_{K,xyz,scale}.json
    OUT/evaluation/rgb/%08d.jpg   max(1, N // 10) images of other poses
    OUT/evaluation_{K,xyz,scale}.json
    OUT/dataset.json              the arguments, written first
    OUT/evaluation_boxes.csv      written last: boxes around the hands of the evaluation part, for `predict --box`

Lists have one entry per pose: K (3 x 3, pixels), xyz (21 x 3, metres, camera frame: x right, y down, z forward; the
wrist, then thumb, index, middle, ring, little finger from the palm outward), scale (metres, the middle finger's first
phalanx, between keypoints 9 and 10). Pixels are corner-based: K projects into a frame in which the centre of the first
pixel is (0.5, 0.5).

Every image is a pure function of (seed, part, pose, version): neither the number of threads nor an interruption changes
its bytes.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.machine import available_cores
from peclr_dali.skeleton import HAND
from peclr_dali.synthetic.hand import SIDE_PX, STUDIO, VARIED, draw_hand, project
from peclr_dali.synthetic.photo import take_photo
from peclr_dali.synthetic.render import render
from peclr_dali.synthetic.scenes import Scene, draw_scene
from peclr_dali.writing import write_bytes, write_text

VERSIONS = 4
"""Backgrounds per pose in the training part."""
FORMAT = 1
"""Version of the renderer; raised when the same arguments give other bytes."""
_ARGUMENTS = "dataset.json"
_LAST = "evaluation_boxes.csv"
_LABELS = ("K", "xyz", "scale")
# First word after the seed of every random stream, so that each kind of draw has its own stream.
_SCENE_STREAM, _POSE_STREAM, _PLACE_STREAM, _PHOTO_STREAM = range(4)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Recipe:
    """The arguments that determine every byte of a dataset."""

    poses: int
    seed: int
    scenes: int
    format: int = FORMAT
    varied: bool = False

    @property
    def json(self) -> str:
        """The arguments as they are written down; `varied` only where it is used."""
        arguments = {name: value for name, value in asdict(self).items() if name != "varied" or value}
        return json.dumps(arguments, indent=2) + "\n"


class DatasetPart(NamedTuple):
    """A part of the dataset, with `versions` images of each pose; its `number` is in the seeds of its draws."""

    name: str
    number: int
    poses: int
    versions: int

    def image(self, pose: int, version: int) -> str:
        """Path of an image relative to the dataset."""
        return f"{self.name}/rgb/{pose + self.poses * version:08d}.jpg"


def parts_of(recipe: Recipe) -> tuple[DatasetPart, DatasetPart]:
    """The two parts of a dataset."""
    evaluation = DatasetPart("evaluation", 1, max(1, recipe.poses // 10), versions=1)
    return DatasetPart("training", 0, recipe.poses, VERSIONS), evaluation


def make_dataset(
    out: Path,
    *,
    poses: int,
    seed: int,
    scenes: int = 40,
    varied: bool = False,
    workers: int | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Render a dataset into `out`; finish it if an earlier call with the same arguments was interrupted.

    Args:
        out: missing, empty, or with this same dataset, finished or not.
        poses: number of poses of the training part; each has four images.
        scenes: backgrounds with their light, shared by all poses.
        varied: cameras from all directions and from near, hands of all sizes, more sleeves and held objects.
        workers: threads; by default one per core that this process may use.
        progress: called with (images done, images in all) as they are written.

    Raises:
        UserError: `out` holds something else.
    """
    recipe = Recipe(poses, seed, scenes, varied=varied)
    _claim(out, recipe)
    parts = parts_of(recipe)
    files = [out / _LAST, *(out / f"{part.name}_{key}.json" for part in parts for key in _LABELS)]
    missing = [part.poses * part.versions - sum(map(_is_whole, (out / part.name).glob("rgb/*.jpg"))) for part in parts]
    if max(missing) > 0 or not all(map(_is_whole, files)):  # an image may have been removed since
        _render_poses(out, recipe, workers or available_cores(), progress)


def _is_whole(file: Path) -> bool:
    """Whether a file is there; an empty one is of a full disk, or of somebody else."""
    return file.is_file() and file.stat().st_size > 0


def _claim(out: Path, recipe: Recipe) -> None:
    """Write the arguments down, or compare them with those of an earlier call, and remove half-written files."""
    arguments = out / _ARGUMENTS
    out.mkdir(parents=True, exist_ok=True)
    if not any(out.iterdir()):
        write_text(arguments, recipe.json)
    found = arguments.read_text(errors="replace") if arguments.is_file() else f"something else (no {_ARGUMENTS})"
    if found != recipe.json:
        raise UserError(
            f"{out} holds {' '.join(found.split())[:120]}, expected nothing, or a dataset made with "
            f"{' '.join(recipe.json.split())}: give the same arguments, choose another folder, or remove this one"
        )
    for part in parts_of(recipe):
        (out / part.name / "rgb").mkdir(parents=True, exist_ok=True)
    for leftover in out.glob("*/rgb/*.part"):
        leftover.unlink()


def _render_poses(out: Path, recipe: Recipe, workers: int, progress: Progress) -> None:
    """Write the images of all poses in threads, and then their annotations. What is compiled runs without the GIL."""
    parts = parts_of(recipe)
    done, total = 0, sum(part.poses * part.versions for part in parts)
    annotations: dict[str, list[dict[str, Any]]] = {part.name: [] for part in parts}
    pool = ThreadPoolExecutor(workers)
    try:
        for part in parts:
            for annotation in pool.map(_make_pose, repeat(out), repeat(recipe), repeat(part), range(part.poses)):
                annotations[part.name].append(annotation)
                done += part.versions
                progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    for name, entries in annotations.items():
        for key in _LABELS:
            write_text(out / f"{name}_{key}.json", json.dumps([entry[key] for entry in entries]))
    rows = ["file,x0,y0,x1,y1"]
    for pose, entry in enumerate(annotations["evaluation"]):
        points_px = project(np.array(entry["xyz"]), np.array(entry["K"]))
        edges_px = [*points_px.min(axis=0), *points_px.max(axis=0)]
        rows.append(",".join([f"{pose:08d}.jpg", *(f"{edge:.2f}" for edge in edges_px)]))
    write_text(out / _LAST, "\n".join(rows) + "\n")


def _make_pose(out: Path, recipe: Recipe, part: DatasetPart, pose: int) -> dict[str, Any]:
    """Write the missing images of a pose; returns its annotations."""
    rng = np.random.default_rng([recipe.seed, _POSE_STREAM, part.number, pose])
    hand = draw_hand(rng, VARIED if recipe.varied else STUDIO)
    missing = [version for version in range(part.versions) if not _is_whole(out / part.image(pose, version))]
    if missing:
        rendering = render(hand.solids, hand.paint, hand.shape.bulk, hand.intrinsics, SIDE_PX)
        scenes = scenes_of(recipe, part, pose)
        for version in missing:
            rng = np.random.default_rng([recipe.seed, _PHOTO_STREAM, part.number, pose, version])
            photo = take_photo(rng, rendering, hand.intrinsics, _scene(recipe.seed, scenes[version]))
            # Not durable: waiting for the disk thousands of times would take too long.
            write_bytes(out / part.image(pose, version), photo, durable=False)
    start, end = HAND.reference_bone
    scale_m = float(np.linalg.norm(hand.xyz_m[end] - hand.xyz_m[start]))
    return {"K": hand.intrinsics.tolist(), "xyz": hand.xyz_m.tolist(), "scale": scale_m}


def scenes_of(recipe: Recipe, part: DatasetPart, pose: int) -> list[int]:
    """The scene of each version of a pose; all different if there are enough scenes."""
    rng = np.random.default_rng([recipe.seed, _PLACE_STREAM, part.number, pose])
    places: list[int] = []
    while len(places) < part.versions:
        places += rng.choice(recipe.scenes, min(recipe.scenes, part.versions - len(places)), replace=False).tolist()
    return places


@lru_cache(maxsize=128)
def _scene(seed: int, scene: int) -> Scene:
    return draw_scene(np.random.default_rng([seed, _SCENE_STREAM, scene]))
