"""Writes tiny datasets in the exact layouts of the published ones."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.skeleton import hand_rows
from peclr_dali.synthetic.poses import draw_pose, draw_shape


@contextmanager
def one_line(message: str, *parts: object) -> Iterator[None]:
    """Expect a `UserError` of one line that is not too long, matches the message and names all parts."""
    with pytest.raises(UserError, match=message) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    assert all(str(part) in text for part in parts)


def assert_refused(config: DataConfig, message: str, *parts: object) -> None:
    """Loading these data ends in a line as `one_line` expects it."""
    with one_line(message, *parts):
        load_index(config)


def write_image(file: Path, width_px: int, height_px: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(file), np.full((height_px, width_px, 3), 99, np.uint8))


def write_boxes(file: Path, edges_px: Mapping[str, Sequence[float]]) -> None:
    """A CSV of boxes x0, y0, x1, y1 by image."""
    rows = [",".join(map(str, (name, *edges))) for name, edges in edges_px.items()]
    file.write_text("\n".join(["file,x0,y0,x1,y1", *rows]))


def write_coco_boxes(file: Path, names: Sequence[str], width_px: int, height_px: int, corner_px: int = 0) -> None:
    """A box in COCO's JSON format for each image, of its size, and the size of the images."""
    content = {
        "images": [{"id": name, "file_name": name, "width": width_px, "height": height_px} for name in names],
        "annotations": [{"image_id": name, "bbox": [corner_px, corner_px, width_px, height_px]} for name in names],
    }
    file.write_text(json.dumps(content))


def mano_mesh(seed: int) -> np.ndarray:
    """(778, 3) somewhere in a frame of 320 x 180."""
    rng = np.random.default_rng(seed)
    return np.asarray(rng.uniform(20, 60, 3) + rng.normal(0, 8, (778, 3)))


def youtube3d_entries() -> dict[str, list[dict[str, Any]]]:
    """Three frames of two videos; the second frame shows two hands."""
    names = ["Aa-1/video/frames/12.png", "Aa-1/video/frames/40.png", "b_2/video/frames/7.png"]
    images = [
        {"name": f"youtube/{name}", "width": 320, "height": 180, "id": 500 + 7 * row} for row, name in enumerate(names)
    ]
    hands = [(500, 0), (507, 0), (507, 1), (514, 1)]
    annotations = [
        {"vertices": mano_mesh(row).tolist(), "is_left": left, "image_id": image, "id": row}
        for row, (image, left) in enumerate(hands)
    ]
    return {"images": images, "annotations": annotations}


def write_youtube3d(root: Path, part: str, entries: dict[str, Any] | None = None) -> None:
    """Annotations and frames, which are PNG files as the dataset's own script writes them."""
    entries = youtube3d_entries() if entries is None else entries
    root.mkdir(parents=True, exist_ok=True)
    (root / f"youtube_{part}.json").write_text(json.dumps(entries))
    for image in entries["images"]:
        write_image(root / image["name"], image["width"], image["height"])


HO3D_K = np.array([[310.0, 0, 160.5], [0, 312, 119.25], [0, 0, 1]])


def hand_m(seed: int) -> np.ndarray:
    """(21, 3) metres, in our order: a hand in some pose, around the origin."""
    rng = np.random.default_rng(seed)
    joints_m = draw_pose(rng, draw_shape(rng), grasp=False).joints_m
    return np.asarray(joints_m - joints_m.mean(axis=0))


def ho3d_joints(seed: int) -> np.ndarray:
    """(21, 3) metres in OpenGL's axes, MANO's order: in front of the camera, which looks along negative z."""
    return np.asarray(hand_m(seed)[hand_rows("freihand", "mano")] + (0.02, -0.03, -0.6))


def python2_pickle(content: dict[str, Any]) -> bytes:
    """A dictionary of float64 arrays, strings and None as Python 2 pickled it, which is what HO-3D holds."""
    out = b"\x80\x02}("
    for key, value in content.items():
        out += _short_string(key)
        if value is None:
            out += b"N"
        elif isinstance(value, str):
            out += _short_string(value)
        else:
            array = np.asarray(value, "<f8")
            shape = b"".join(b"K" + bytes([size]) for size in array.shape)
            raw = array.tobytes()
            out += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + _short_string("b") + b"\x87R"
            out += b"(K\x01(" + shape + b"tcnumpy\ndtype\n" + _short_string("f8") + b"K\x00K\x01\x87R"
            out += b"(K\x03" + _short_string("<") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
            out += b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    return out + b"u."


def _short_string(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def ho3d_meta(seed: int, *, evaluation: bool = False) -> dict[str, Any]:
    """A frame's annotation; the evaluation part publishes the wrist and a box only."""
    joints = ho3d_joints(seed)
    shared = {"camMat": HO3D_K, "objName": "021_bleach_cleanser", "objTrans": np.array([0.1, 0.2, -0.7])}
    if evaluation:
        return {**shared, "handJoints3D": joints[0], "handBoundingBox": np.array([100.0, 60, 180, 200])}
    return {**shared, "handJoints3D": joints, "handPose": np.zeros(48), "handBeta": np.zeros(10)}


def write_ho3d(root: Path, folder: str, sequences: dict[str, int], *, ending: str = "png") -> list[str]:
    """`folder`.txt, images and annotations; frame f of the s-th sequence has the seed 100 s + f."""
    lines = []
    for number, (sequence, frames) in enumerate(sequences.items()):
        for frame in range(frames):
            name = f"{frame:04d}"
            lines.append(f"{sequence}/{name}")
            write_image(root / folder / sequence / "rgb" / f"{name}.{ending}", 320, 240)
            meta = root / folder / sequence / "meta" / f"{name}.pkl"
            meta.parent.mkdir(exist_ok=True)
            meta.write_bytes(python2_pickle(ho3d_meta(100 * number + frame, evaluation=folder == "evaluation")))
    (root / f"{folder}.txt").write_text("\n".join(lines) + "\n")
    return lines


def dexter_tips_mm(seed: int) -> np.ndarray:
    """(5, 3) fingertips in front of the depth camera, x left and y up, to the file's two decimals."""
    rng = np.random.default_rng(seed)
    return np.asarray(np.round(rng.uniform((-60, -60, 350), (60, 60, 450), (5, 3)), 2))


def write_dexter_object(root: Path, frames: dict[str, int], *, hidden: dict[tuple[str, int], list[int]]) -> None:
    """Frames and annotations; a hidden fingertip has the depth 32001. Three corners of the object end each line."""
    for number, (sequence, count) in enumerate(frames.items()):
        lines = []
        for frame in range(count):
            write_image(root / "data" / sequence / "color" / f"image_{frame:05d}_color.png", 640, 480)
            write_image(root / "data" / sequence / "depth" / f"image_{frame:05d}_depth.png", 320, 240)
            points = np.concatenate([dexter_tips_mm(100 * number + frame), np.full((3, 3), 7.0)])
            points[hidden.get((sequence, frame), [])] = [0, 0, 32001]
            lines.append("; ".join(", ".join(f"{value:.2f}" for value in point) for point in points) + ";")
        annotations = root / "data" / sequence / "annotations"
        annotations.mkdir()
        (annotations / f"{sequence}3D.txt").write_text("\n".join(lines) + "\n")
