# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#     "mediapipe==0.10.21",
#     "numpy==1.26.4",
#     "opencv-contrib-python==4.11.0.86",
#     "tqdm==4.67.1",
# ]
# ///
"""Finds hands in images or videos with MediaPipe, and writes boxes and landmarks to a CSV for `data.box`.

    uv run tools/find_boxes.py IMAGES OUT.csv
    uv run tools/find_boxes.py VIDEOS OUT.csv --frames FRAMES

The second command first writes every n-th frame of the videos in a folder and below it as JPEG, to
FRAMES/VIDEO/frame_000030.jpg and so on (the number counts the video's frames from 0), and then searches FRAMES.

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

The rows are collected in OUT.csv.part, which replaces OUT.csv when all images were searched. The same command continues
a run that was stopped, and searches images that OUT.csv does not have yet. Rows that are there stay, such as those that
were corrected by hand. A video whose folder of frames is there is not read again.
"""

from __future__ import annotations

import argparse
import csv
import io
import multiprocessing
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import cv2
import numpy as np
from tqdm import tqdm

FINGERS = ("thumb", "index", "middle", "ring", "little")
LANDMARKS = ["wrist", *(f"{finger}_{joint}" for finger in FINGERS for joint in ("mcp", "pip", "dip", "tip"))]
"""MediaPipe's landmarks, in its order."""

COLUMNS = ["file", "x0", "y0", "x1", "y1", "hand", "confidence"]
COLUMNS += [f"{name}_{axis}" for name in LANDMARKS for axis in "xy"]
HEADER = ",".join(COLUMNS) + "\r\n"
ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp")
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".avi", ".webm", ".mpg", ".mpeg", ".ts")
OF_THE_SYSTEM = ("@eadir", "$recycle.bin", "thumbs.db")
"""Files and folders, in small letters, that systems put among images: thumbnails and what was deleted."""

GRAPH = "mediapipe/modules/hand_landmark/hand_landmark_tracking_cpu.binarypb"

OTHER_HAND = {"Left": "right", "Right": "left"}
"""MediaPipe names the hand as it would be in a selfie, which is mirrored; photographs are not."""

PALM_LANDMARKS = [0, 5, 9, 13, 17, 1, 2]
"""The landmarks that the palm detector finds too, in its order."""

BORDER = 0.5
"""Border for the second look, as a share of the image's sides. The detector misses hands that fill the image."""

LONGEST_PX = 16_000
"""Longest side of an image that is searched as it is. With a border, MediaPipe's OpenCV ends beyond 32,766 pixels."""

BATCH = 64
"""Images of each process in a batch. A batch whose process ends is halved."""

_detector: Any = None
"""The detector of this process."""


class FoundHand(NamedTuple):
    """A hand in an image: its landmarks (21, 2) in pixels, corner-based; "left" or "right"; the palm's score."""

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
    try:
        hands = sorted(find_hands(image), key=lambda hand: hand.box_px)
    except RuntimeError:  # MediaPipe's graph has failed and stays so
        os._exit(1)
    return [hand.row(name) for hand in hands] or [row_without_hand(name, "none")]


def find_hands(image: np.ndarray) -> list[FoundHand]:
    """The hands in an image (H, W, 3) BGR. If there is none, it is searched again with a border around it."""
    size_px = np.array(image.shape[1::-1])
    if (shrink := LONGEST_PX / size_px.max()) < 1:
        smaller_px = np.maximum(np.rint(shrink * size_px), 1).astype(int)
        found = find_hands(cv2.resize(image, smaller_px.tolist(), interpolation=cv2.INTER_AREA))
        return [hand._replace(landmarks_px=hand.landmarks_px * (size_px / smaller_px)) for hand in found]
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


def take_frames(videos: Path, frames: Path, every: int) -> None:
    """Write every n-th frame of the videos in a folder, as displayed, each video's into a new folder of its name."""
    for name in tqdm(files_under(videos, VIDEOS), unit=" videos"):
        folder, part = frames / name, frames / f"{name}.part"
        if folder.exists():
            continue
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        capture, read = cv2.VideoCapture(str(videos / name)), 0
        while capture.grab():
            if read % every == 0:
                whole, image = capture.retrieve()
                if not whole:
                    break
                cv2.imwrite(f"{part}/frame_{read:06d}.jpg", image)
            read += 1
        if read < 0.98 * capture.get(cv2.CAP_PROP_FRAME_COUNT) or not read:  # some containers only estimate the number
            tqdm.write(f"unreadable or cut after {read} frames: {videos / name}", file=sys.stderr)
        part.replace(folder)


def files_under(root: Path, endings: tuple[str, ...]) -> list[str]:
    """Names of the files in a folder and below it, sorted; the same that `data.source = "folder"` finds.

    Hidden ones are left out. Links to folders are followed, after the folders.
    """
    names, seen, folders, links = [], set(), [""], list[str]()
    while folders or links:
        inside = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(root / inside)
        entries = [] if real in seen else sorted(os.scandir(root / inside), key=lambda entry: entry.name)
        seen.add(real)
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in OF_THE_SYSTEM:
                continue
            if entry.is_dir():
                (links if entry.is_symlink() else folders).append(f"{inside}{entry.name}/")
            elif entry.name.lower().endswith(endings) and entry.is_file():
                names.append(inside + entry.name)
    if not names:
        refuse(f"{root}: no {', '.join(endings)} files in it or below it. Check the path.")
    return sorted(names)


def refuse(line: str) -> NoReturn:
    """End the command because of a wrong argument or file."""
    print(line, file=sys.stderr)
    sys.exit(2)


def rows_in(file: Path) -> list[list[str]]:
    """The rows of OUT.csv or of OUT.csv.part, if it exists."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    lines = list(csv.reader(io.StringIO(text, newline="")))
    if not lines or [cell.strip() for cell in lines[0]] != COLUMNS:
        refuse(f"{file}: line 1 is {text[:80]!r}; expected {HEADER.strip()!r}. Name another OUT.csv.")
    return [line for line in lines[1:] if len(line) > 5]


def as_csv(rows: Sequence[Sequence[str]]) -> bytes:
    """Rows as lines of a CSV."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")


def find_all(root: Path, names: Sequence[str], args: argparse.Namespace) -> Iterator[list[list[str]]]:
    """The rows of each image, in order, found by several processes.

    When a process ends, its batch is halved until the image that ends it stands alone: that is "unreadable".
    """
    size = BATCH * args.jobs
    batches = [names[first : first + size] for first in range(0, len(names), size)][::-1]
    pool = processes(args)
    while batches:
        batch = batches.pop()
        try:
            found = list(pool.map(rows_of, [(str(root), name) for name in batch], chunksize=4))
        except BrokenProcessPool:
            pool = processes(args)
            if len(batch) == 1:
                yield [row_without_hand(batch[0], "unreadable")]
            else:
                batches += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
        else:
            yield from found
    pool.shutdown()


def processes(args: argparse.Namespace) -> ProcessPoolExecutor:
    """Processes with a detector each. A BrokenProcessPool if it does not start."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(args.jobs, context, start_process, (args.confidence, args.hands))
    pool.submit(os.getpid).result()
    return pool


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Find hands in images or videos; write boxes and landmarks.")
    parser.add_argument("images", type=Path, metavar="IMAGES", help="folder of images; with --frames of videos")
    parser.add_argument("out", type=Path, metavar="OUT.csv", help="file of boxes, for data.box")
    parser.add_argument("--frames", type=Path, help="folder for the frames of videos, the data.root of OUT.csv")
    parser.add_argument("--every", type=int, default=30, help="with --frames: take every n-th frame [30]")
    parser.add_argument("--confidence", type=float, default=0.5, help="least confidence of a hand, 0 to 1 [0.5]")
    parser.add_argument("--hands", type=int, default=4, help="most hands in an image [4]")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes [the cores]")
    args = parser.parse_args()
    if not 0 <= args.confidence <= 1 or min(args.hands, args.jobs, args.every) < 1:
        parser.error("expected a confidence of 0 to 1, and --hands, --jobs and --every of 1 or more")
    if args.out.suffix.lower() != ".csv":
        parser.error(f"{args.out}: expected a name that ends in .csv, as data.box reads it")
    if not args.images.is_dir():
        parser.error(f"{args.images}: expected a folder. Check the path")
    return args


def main() -> None:
    """Find the hands of all images that OUT.csv does not have yet."""
    args = arguments()
    root, out, part = args.frames or args.images, args.out, args.out.with_name(args.out.name + ".part")
    if args.frames:
        take_frames(args.images, args.frames, args.every)
    names = files_under(root, ENDINGS)
    rows, new = rows_in(out), rows_in(part)
    known = {row[0].removeprefix("./") for row in rows}
    new = [row for row in new if row[0] not in (*known, new[-1][0])]  # the last image's rows may not be whole
    todo = [name for name in names if name not in known.union(row[0] for row in new)]
    with part.open("wb") as file, tqdm(total=len(names), initial=len(names) - len(todo), unit=" images") as progress:
        file.write(HEADER.encode() + as_csv(new))
        for found in find_all(root, todo, args):
            file.write(as_csv(found))
            file.flush()
            new += found
            progress.update()
    part.write_bytes(HEADER.encode() + as_csv([*rows, *new]))
    part.replace(out)
    count = Counter(row[5].strip() for row in (*rows, *new))
    print(f"{out}: {', '.join(f'{count[hand]} {hand}' for hand in ('left', 'right', 'none', 'unreadable'))}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    except BrokenProcessPool:
        sys.exit("a process does not start, perhaps for lack of memory; the same command goes on, with fewer --jobs")
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}. Check it; the same command then goes on.")
