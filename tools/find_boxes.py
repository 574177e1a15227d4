# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#     "mediapipe==0.10.21",
#     "numpy==1.26.4",
#     "opencv-contrib-python==4.11.0.86",
#     "tqdm==4.67.1",
# ]
# ///
"""Finds hands in the images of a folder with MediaPipe, and writes boxes and landmarks to a CSV for `data.box`.

    uv run tools/find_boxes.py IMAGES OUT.csv

uv makes an environment of its own for this script, since MediaPipe needs NumPy below 2. The script imports nothing of
the project.

OUT.csv has a row for each hand: file,x0,y0,x1,y1,hand,confidence,wrist_x,wrist_y and so on.

- file: relative to IMAGES, with "/".
- x0, y0, x1, y1: the square around the hand's 21 landmarks, without margin, in pixels of the image as displayed (Exif
  orientation applied), corner-based. It may extend beyond the image.
- hand: "left" or "right". An image without a hand has one row with "none", a file that cannot be decoded has one with
  "unreadable"; the other columns are empty there.
- confidence: score of MediaPipe's palm detector, 0 to 1.
- wrist_x to little_tip_y: the 21 landmarks, in the pixels of the box.

The same command continues a run that was stopped. OUT.csv.job says what that command was; another folder or other
options are refused.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import io
import json
import multiprocessing
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import cv2
import numpy as np
from tqdm import tqdm

FINGERS = ("thumb", "index", "middle", "ring", "little")
LANDMARKS = ["wrist", *(f"{finger}_{joint}" for finger in FINGERS for joint in ("mcp", "pip", "dip", "tip"))]
"""MediaPipe's landmarks, in its order."""

COLUMNS = ["file", "x0", "y0", "x1", "y1", "hand", "confidence"]
COLUMNS += [f"{name}_{axis}" for name in LANDMARKS for axis in "xy"]
HEADER = ",".join(COLUMNS) + "\r\n"
ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
GRAPH = "mediapipe/modules/hand_landmark/hand_landmark_tracking_cpu.binarypb"

OTHER_HAND = {"Left": "right", "Right": "left"}
"""MediaPipe names the hand as it would be in a selfie, which is mirrored; photographs are not."""

PALM_LANDMARKS = [0, 5, 9, 13, 17, 1, 2]
"""The landmarks that the palm detector finds too, in its order."""

BORDER = 0.5
"""Border for the second look, as a share of the image's sides. The detector misses hands that fill the image."""

CHUNK = 4
"""Images that a process takes at once."""

_detector: Any = None
"""The detector of this process."""


class FoundHand(NamedTuple):
    """A hand in an image: its 21 landmarks (21, 2) in pixels, corner-based; "left" or "right"; the palm's score."""

    landmarks_px: np.ndarray
    hand: str
    confidence: float

    @property
    def box_px(self) -> list[float]:
        """Edges x0, y0, x1, y1 of the square around the landmarks."""
        low_px, high_px = self.landmarks_px.min(axis=0), self.landmarks_px.max(axis=0)
        centre_px, half_px = (low_px + high_px) / 2, (high_px - low_px).max() / 2
        return [*(centre_px - half_px), *(centre_px + half_px)]

    def row(self, name: str) -> list[str]:
        """The hand's row, given the name of its image."""
        box_px, landmarks_px = ([f"{edge:.1f}" for edge in edges] for edges in (self.box_px, self.landmarks_px.flat))
        return [name, *box_px, self.hand, f"{self.confidence:.3f}", *landmarks_px]


def row_without_hand(name: str, why: str) -> list[str]:
    """The row of an image without a hand, or of an unreadable file."""
    return [why if column == "hand" else name if column == "file" else "" for column in COLUMNS]


def start_process(confidence: float, hands: int) -> None:
    """Prepare a worker process."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MediaPipe and libjpeg write there
    cv2.setNumThreads(1)
    load_detector(confidence, hands)


def end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def load_detector(confidence: float, hands: int) -> None:
    """Load the graph of `mediapipe.solutions.hands.Hands`, with one more output: the palms, which have the
    confidence.
    """
    from mediapipe.python.solution_base import SolutionBase

    global _detector
    _detector = SolutionBase(
        binary_graph_path=GRAPH,
        side_inputs={"model_complexity": 1, "num_hands": hands, "use_prev_landmarks": False},
        calculator_params={
            "palmdetectioncpu__TensorsToDetectionsCalculator.min_score_thresh": confidence,
            "handlandmarkcpu__ThresholdingCalculator.threshold": confidence,
        },
        outputs=["multi_hand_landmarks", "multi_handedness", "palm_detections"],
    )


def rows_of(file: tuple[str, str]) -> list[list[str]]:
    """The rows of an image, given its folder and its name there; hands from left to right."""
    root, name = file
    try:
        image = cv2.imdecode(np.fromfile(f"{root}/{name}", np.uint8), cv2.IMREAD_COLOR)  # applies the orientation
    except (OSError, cv2.error):
        image = None
    if image is None:
        return [row_without_hand(name, "unreadable")]
    hands = sorted(find_hands(image), key=lambda hand: hand.box_px)
    return [hand.row(name) for hand in hands] or [row_without_hand(name, "none")]


def find_hands(image: np.ndarray) -> list[FoundHand]:
    """The hands in an image (H, W, 3) BGR. If there is none, it is searched again with a border around it."""
    return find_with_border(image, 0) or find_with_border(image, BORDER)


def find_with_border(image: np.ndarray, border: float) -> list[FoundHand]:
    """The hands that the detector finds in an image with a black border."""
    size_px = np.array(image.shape[1::-1])
    x_px, y_px = border_px = (border * size_px).astype(int)
    wide = cv2.copyMakeBorder(image, y_px, y_px, x_px, x_px, cv2.BORDER_CONSTANT)
    found = _detector.process({"image": cv2.cvtColor(wide, cv2.COLOR_BGR2RGB)})
    palms = [(points(p.location_data.relative_keypoints), p.score[0]) for p in found.palm_detections or []]
    hands = []
    for landmarks, kind in zip(found.multi_hand_landmarks or [], found.multi_handedness or [], strict=True):
        at = points(landmarks.landmark)
        confidence = min((np.abs(palm - at[PALM_LANDMARKS]).sum(), score) for palm, score in palms)[1]
        at_px = at * (size_px + 2 * border_px) - border_px
        hands.append(FoundHand(at_px, OTHER_HAND[kind.classification[0].label], confidence))
    return hands


def points(marks: Any) -> np.ndarray:
    """Marks of MediaPipe as shares of the image's width and height, (N, 2)."""
    return np.array([(mark.x, mark.y) for mark in marks])


def images_under(root: Path) -> list[str]:
    """Names of the images in a folder and below it, sorted; the same that `data.source = "folder"` finds.

    Hidden ones are left out. Links to folders are followed, after the folders.
    """
    names, seen = [], set()
    folders, links = [""], list[str]()
    while folders or links:
        inside = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(root / inside)
        entries = [] if real in seen else sorted(os.scandir(root / inside), key=lambda entry: entry.name)
        seen.add(real)
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                (links if entry.is_symlink() else folders).append(f"{inside}{entry.name}/")
            elif entry.is_file() and entry.name.lower().endswith(ENDINGS):
                names.append(inside + entry.name)
    return sorted(names)


def fits_in_a_line(name: str) -> bool:
    """Whether a name can stand in a line of the CSV: it has no line break and is UTF-8."""
    return name.splitlines() == [name] and not any("\ud800" <= character <= "\udfff" for character in name)


def refuse(line: str) -> NoReturn:
    """End the command because of a wrong argument or file."""
    print(line, file=sys.stderr)
    sys.exit(2)


def refuse_another_job(job_file: Path, job: dict[str, Any]) -> None:
    """Refuse to continue the file of another folder or of other options."""
    try:
        begun = json.loads(job_file.read_bytes())
    except (FileNotFoundError, ValueError):  # OUT.csv was moved without it, or it was being written
        return
    for key, value in job.items():
        if begun.get(key) != value:
            refuse(
                f"{job_file}: the boxes were begun with {key} {begun.get(key)}, not {value}. Give the same, or "
                "name another file. If only the folder has moved, remove this one."
            )


def rows_so_far(out: BinaryIO) -> list[list[str]]:
    """The rows that an earlier run finished. A cut line, and the rows of the last image, are removed from the file."""
    content = out.read()
    if content and not content.startswith(HEADER.encode()):
        refuse(f"{out.name}: line 1 is {content[:80]!r}; expected {HEADER.strip()!r}. Name another file.")
    lines = content[len(HEADER) : content.rfind(b"\n") + 1].splitlines(keepends=True)
    rows = list(csv.reader(line.decode() for line in lines))
    finished = [row for row in rows if row[0] != rows[-1][0]]  # an image's rows stand together
    out.seek(0)
    out.write(HEADER.encode())
    out.seek(len(HEADER) + sum(map(len, lines[: len(finished)])))
    out.truncate()
    return finished


def as_csv(rows: Sequence[Sequence[str]]) -> bytes:
    """Rows as lines of a CSV."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def find_all(root: Path, names: Sequence[str], args: argparse.Namespace) -> Iterator[list[list[str]]]:
    """The rows of each image, in order, found by several processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, context, start_process, (args.confidence, args.hands)) as pool:
        window = 64 * CHUNK * args.jobs
        for first in range(0, len(names), window):
            files = [(str(root), name) for name in names[first : first + window]]
            yield from pool.map(rows_of, files, chunksize=CHUNK)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Find hands in the images of a folder; write boxes and landmarks.")
    parser.add_argument("images", type=Path, metavar="IMAGES", help="folder of .jpg, .png and .webp files")
    parser.add_argument("out", type=Path, metavar="OUT.csv", help="file of boxes, for data.box")
    parser.add_argument("--confidence", type=float, default=0.5, help="least confidence of a hand, 0 to 1 [0.5]")
    parser.add_argument("--hands", type=int, default=4, help="most hands in an image [4]")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes [the cores]")
    args = parser.parse_args()
    if not 0 <= args.confidence <= 1:
        parser.error(f"--confidence {args.confidence}: expected 0 to 1")
    if min(args.hands, args.jobs) < 1:
        parser.error("--hands and --jobs: expected 1 or more")
    return args


def main() -> None:
    """Find the hands of all images that OUT.csv does not have yet."""
    args = arguments()
    if not args.images.is_dir():
        refuse(f"{args.images}: expected a folder of images. Check the path.")
    names = images_under(args.images)
    for name in (strange := {name for name in names if not fits_in_a_line(name)}):
        print(f"left out: {name!a}: expected a name in UTF-8 without line breaks", file=sys.stderr)
    if not names:
        refuse(f"{args.images}: no {', '.join(ENDINGS)} files in it or below it. Check the path.")
    try:
        args.out.touch()
        out = args.out.open("r+b")
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(f"{args.out}: another process writes this file. Wait for it, or name another file.")
    except OSError as error:
        refuse(f"{args.out}: {error.strerror}. Name a file that can be written.")
    with out:
        job = {"IMAGES": str(args.images.resolve()), "--confidence": args.confidence, "--hands": args.hands}
        job_file = args.out.with_name(f"{args.out.name}.job")
        if args.out.stat().st_size > len(HEADER):
            refuse_another_job(job_file, job)
        rows = rows_so_far(out)
        job_file.write_text(json.dumps(job) + "\n")
        done = {row[0] for row in rows}
        todo = [name for name in names if name not in done | strange]
        total = len(done) + len(todo)
        with tqdm(total=total, initial=len(done), unit=" images", smoothing=0.02, mininterval=1) as progress:
            for found in find_all(args.images, todo, args):
                out.write(as_csv(found))
                out.flush()
                rows += found
                if found[0][5] == "unreadable":
                    progress.write(f"unreadable: {args.images / found[0][0]}", file=sys.stderr)
                progress.update()
    count = Counter(row[5] for row in rows)
    images = len({row[0] for row in rows if row[5] in ("left", "right")})
    print(
        f"{args.out}: {count['left'] + count['right']} hands ({count['left']} left, {count['right']} right) in "
        f"{images} images; {count['none']} images without a hand; {count['unreadable']} unreadable"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    except BrokenProcessPool:
        sys.exit("a process ended, perhaps for lack of memory; the same command goes on, --jobs 1 needs least")
    except OSError as error:
        sys.exit(f"{error.filename or 'OUT.csv'}: {error.strerror}; the same command goes on")
