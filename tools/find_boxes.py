# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#     "click==8.5.1",
#     "mediapipe==0.10.21",
#     "numpy==1.26.4",
#     "opencv-contrib-python==4.11.0.86",
#     "tqdm==4.67.1",
# ]
# ///
"""Finds hands in photographs with MediaPipe, and writes boxes and landmarks to a CSV for `data.box`.

    uv run tools/find_boxes.py IMAGES OUT.csv [--crops FOLDER]

uv makes an environment of its own for this script, since MediaPipe needs NumPy below 2. The script imports nothing of
the project.

OUT.csv has a row for each hand: file,x0,y0,x1,y1,hand,wrist_x,wrist_y and so on.

- file: relative to IMAGES, with "/".
- x0, y0, x1, y1: the square around the hand's 21 landmarks, without margin, in pixels of the image as displayed (Exif
  orientation applied), corner-based. It may extend beyond the image.
- hand: "left" or "right". An image without a hand has one row with "none", a file that cannot be decoded has one with
  "unreadable"; the other columns are empty there.
- wrist_x to little_tip_y: the 21 landmarks, in the pixels of the box.

The same command continues a run that was stopped: it searches the images that OUT.csv does not have yet. Rows that are
there stay, such as those that were corrected by hand.

With --crops, FOLDER then gets each hand of OUT.csv, cut out, and its row in crops.csv, in pixels of the crop.
"""

import csv
import io
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import cv2
import numpy as np
from tqdm import tqdm

# MediaPipe's landmarks, in its order
LANDMARKS = ["wrist", *(
    f"{finger}_{joint}"
    for finger in ("thumb", "index", "middle", "ring", "little")
    for joint in ("mcp", "pip", "dip", "tip")
)]  # fmt: skip
COLUMNS = ["file", "x0", "y0", "x1", "y1", "hand", *(f"{name}_{axis}" for name in LANDMARKS for axis in "xy")]
ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp")

_thread = threading.local()  # holds the detector of each thread


def files_under(root: Path) -> list[str]:
    """Names of the files in a folder and below it, sorted, without hidden ones. Links to folders are followed."""
    names, seen = [], set()
    for folder, folders, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:  # a link to a folder that contains it
            folders.clear()
            continue
        seen.add(real)
        # Without those that systems put among images: thumbnails and what was deleted.
        folders[:] = sorted(
            name for name in folders if name[0] != "." and name.lower() not in ("@eadir", "$recycle.bin")
        )
        paths = [Path(folder, name) for name in files if name[0] != "."]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def hand_row(name: str, hand: str, landmarks_px: np.ndarray) -> list[str]:
    """The row of a hand in an image, given its landmarks (21, 2) in pixels, corner-based."""
    low_px, high_px = landmarks_px.min(axis=0), landmarks_px.max(axis=0)
    centre_px, half_px = (low_px + high_px) / 2, (high_px - low_px).max() / 2
    edges_px = [*(centre_px - half_px), *(centre_px + half_px)]
    return [name, *(f"{edge:.1f}" for edge in edges_px), hand, *(f"{value:.1f}" for value in landmarks_px.flat)]


def row_without_hand(name: str, why: str) -> list[str]:
    """The row of an image without a hand, "none", or of one that is "unreadable"."""
    return [name, "", "", "", "", why, *[""] * (2 * len(LANDMARKS))]


def rows_of(new_detector: Callable[[], Any], root: Path, name: str) -> list[list[str]]:
    """The rows of an image, hands from left to right. Without a hand, it is searched again with a border around it.

    The detector misses hands that fill the image.
    """
    if not hasattr(_thread, "detector"):
        _thread.detector = new_detector()
    try:
        image = cv2.imdecode(np.fromfile(root / name, np.uint8), cv2.IMREAD_COLOR)  # applies the orientation
        hands = [] if image is None else find_hands(image, 0) or find_hands(image, 0.5)
    except (OSError, cv2.error):
        image = None
    except RuntimeError:  # the detector has failed and stays so
        del _thread.detector
        image = None
    if image is None:
        return [row_without_hand(name, "unreadable")]
    rows = [hand_row(name, hand, landmarks_px) for hand, landmarks_px in hands]
    return sorted(rows, key=lambda row: float(row[1])) or [row_without_hand(name, "none")]


def new_detector(confidence: float, hands: int) -> Any:
    """MediaPipe's detector of at most some `hands` in an image, for one thread."""
    from mediapipe.python.solutions.hands import Hands

    return Hands(
        static_image_mode=True, max_num_hands=hands,
        min_detection_confidence=confidence, min_tracking_confidence=confidence,
    )  # fmt: skip


def find_hands(image: np.ndarray, border: float) -> list[tuple[str, np.ndarray]]:
    """The hands in an image (H, W, 3) BGR with a black border: "left" or "right", and landmarks (21, 2) in pixels.

    `border` is a share of the image's sides.
    """
    size_px = np.array(image.shape[1::-1])
    x_px, y_px = border_px = (border * size_px).astype(int)
    wide = cv2.copyMakeBorder(image, y_px, y_px, x_px, x_px, cv2.BORDER_CONSTANT)
    found = _thread.detector.process(cv2.cvtColor(wide, cv2.COLOR_BGR2RGB))
    hands = []
    for landmarks, kind in zip(found.multi_hand_landmarks or [], found.multi_handedness or [], strict=True):
        at = np.array([(mark.x, mark.y) for mark in landmarks.landmark])
        # MediaPipe names the hand as it would be in a selfie, which is mirrored; photographs are not.
        hand = {"Left": "right", "Right": "left"}[kind.classification[0].label]
        hands.append((hand, at * (size_px + 2 * border_px) - border_px))
    return hands


def cut_hand(root: Path, folder: Path, row: list[str]) -> list[str] | None:
    """Write the crop of a hand, and return its row there; None if the image is gone or the row's box is not in it.

    A crop is twice as large as the box, ends where the image ends, and is made smaller to sides of at most 512 pixels.
    """
    (folder / row[0]).parent.mkdir(parents=True, exist_ok=True)
    try:
        image: Any = cv2.imdecode(np.fromfile(root / row[0], np.uint8), cv2.IMREAD_COLOR)
        points_px = np.array([float(cell or "nan") for cell in (*row[1:5], *row[6:])]).reshape(-1, 2)
        half = np.ptp(points_px[:2], axis=0).max() / 2
        (x0, y0), (x1, y1) = np.clip([points_px[0] - half, points_px[1] + half], 0, image.shape[1::-1]).astype(int)
        scale = min(1, 512 / max(x1 - x0, y1 - y0, 1))
        crop = cv2.resize(image[y0:y1, x0:x1], None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    except (AttributeError, OSError, ValueError, cv2.error):
        return None
    name = f"{row[0]}_{row[1]}_{row[2]}.jpg"
    (folder / name).write_bytes(cv2.imencode(".jpg", crop, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes())
    cells = ["" if np.isnan(at_px) else f"{at_px:.1f}" for at_px in ((points_px - (x0, y0)) * scale).flat]
    return [name, *cells[:4], row[5], *cells[4:]]


@click.command()
@click.argument("images", type=Path)
@click.argument("out", metavar="OUT.csv", type=Path)
@click.option("--crops", "cut_into", metavar="FOLDER", type=Path, help="Write each hand too, cut out, and crops.csv.")
@click.option("--confidence", default=0.5, show_default=True, help="Least confidence of a hand, 0 to 1.")
@click.option("--hands", "most", default=4, show_default=True, help="Most hands in an image.")
@click.option("--jobs", default=len(os.sched_getaffinity(0)), show_default=True, help="Threads.")
def main(images: Path, out: Path, cut_into: Path | None, confidence: float, most: int, jobs: int) -> None:
    """Find the hands of all IMAGES, a folder, that OUT.csv does not have yet; with --crops cut out those of OUT.csv."""
    if out.suffix.lower() != ".csv":
        raise click.UsageError(f"{out}: expected a name that ends in .csv, as data.box reads it")
    crops = cut_into / "crops.csv" if cut_into else None
    if crops and crops.resolve().is_relative_to(images.resolve()):
        raise click.UsageError(f"--crops {cut_into}: expected a folder outside {images}. Name another")
    files = files_under(images)
    names = [name for name in files if name.lower().endswith(ENDINGS)]
    if not names:
        raise click.UsageError(f"{images}: no {', '.join(ENDINGS)} files in it or below it. Check the path")
    print(f"{images}: {len(names)} images; {len(files) - len(names)} files with other endings left out")
    with out.open("a+", newline="", encoding="utf-8", errors="surrogateescape") as file:
        file.seek(0)
        text = file.read()
        head, *lines = [*csv.reader(io.StringIO(text, newline=""))] or [COLUMNS]
        if [cell.strip("\ufeff ") for cell in head] != COLUMNS or text[-1:] not in ("", "\n"):
            raise click.UsageError(
                f"{out}: expected whole lines, first {','.join(COLUMNS[:6])} and so on. Name another file"
            )
        writer = csv.writer(file)
        writer.writerows([] if text else [COLUMNS])
        rows = [line for line in lines if len(line) > 5]
        todo = sorted({*names} - {row[0].removeprefix("./") for row in rows})
        find = partial(rows_of, partial(new_detector, confidence, most), images)
        with ThreadPoolExecutor(jobs) as pool:
            for of_image in tqdm(pool.map(find, todo), total=len(todo), unit=" images", disable=None):
                writer.writerows(of_image)
                file.flush()
                rows += of_image
    count = Counter(row[5].strip() for row in rows)
    print(
        f"{out}: {', '.join(f'{count[hand]} {hand}' for hand in ('left', 'right', 'none', 'unreadable'))}\n"
        "look at them: 'cli.py views' draws what training sees; it mirrors left hands"
    )
    if crops is not None:
        if crops.exists():
            raise click.UsageError(f"{out} is complete, but {crops} is there already. Name another folder for --crops")
        hands = [row for row in rows if row[5].strip() in ("left", "right")]
        with ThreadPoolExecutor(jobs) as pool:
            cut = [*tqdm(pool.map(partial(cut_hand, images, crops.parent), hands), total=len(hands), disable=None)]
        with crops.open("x", newline="", encoding="utf-8", errors="surrogateescape") as file:
            csv.writer(file).writerows([COLUMNS, *filter(None, cut)])
        print(f"{crops}: {len(cut) - cut.count(None)} of {len(hands)} hands")


if __name__ == "__main__":
    cv2.setNumThreads(1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # Python's alone
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MediaPipe and libjpeg write there
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
