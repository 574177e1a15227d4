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

The second command first writes every n-th frame of the videos (a file, or those in a folder and below it) as JPEG, to
FRAMES/VIDEO/frame_000030.jpg and so on, and then searches FRAMES. The number counts the video's frames from 0. So a
folder is a sequence and a name has its frame, as `data.positive = "time"` and the command `mine` take them.

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
a run that was stopped. It searches images that OUT.csv does not have yet, and keeps the lines that are there, such as
those that were corrected by hand. OUT.csv.job says what the command was; another folder or other options are refused.
A video whose frames are there is not read again; the folder of a video appears when its last frame was read.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import io
import json
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
HANDS = ("left", "right", "none", "unreadable")
ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
NOT_READ = (".heic", ".heif", ".avif", ".tif", ".tiff", ".bmp", ".gif", ".jp2", ".jxl")
"""Endings of images that the trainer cannot decode."""
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".avi", ".webm", ".mpg", ".mpeg", ".ts")
MARK = ".frames.json"
"""In the folder of a video's frames: which video they are of, and which of its frames."""

GRAPH = "mediapipe/modules/hand_landmark/hand_landmark_tracking_cpu.binarypb"

OTHER_HAND = {"Left": "right", "Right": "left"}
"""MediaPipe names the hand as it would be in a selfie, which is mirrored; photographs are not."""

PALM_LANDMARKS = [0, 5, 9, 13, 17, 1, 2]
"""The landmarks that the palm detector finds too, in its order."""

BORDER = 0.5
"""Border for the second look, as a share of the image's sides. The detector misses hands that fill the image."""

LONGEST_PX = 16_000
"""Longest side of an image that is searched as it is. With a border, MediaPipe's OpenCV ends beyond 32,766 pixels."""

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
    start_reader()
    cv2.setNumThreads(1)
    load_detector(confidence, hands)


def start_reader() -> None:
    """Prepare a process that reads videos."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MediaPipe, libjpeg and FFmpeg write there


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
    except RuntimeError:  # MediaPipe's graph has failed and stays so; `find_all` names the image
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


def write_frames(video: str, folder: str, mark: dict[str, Any]) -> tuple[int, int]:
    """Write every n-th frame of a video, as displayed, into a new folder, with its mark.

    Returns:
        The number of frames that were read, and the number that the video says to have. Without any, no folder.
    """
    part = part_of(Path(folder))
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / MARK).write_text(json.dumps(mark))  # first, since it makes the folder ours
    capture, read = cv2.VideoCapture(video), 0
    while capture.grab():
        if read % mark["--every"] == 0:
            whole, image = capture.retrieve()
            if not whole:
                break
            encoded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 95])[1]
            (part / f"frame_{read:06d}.jpg").write_bytes(encoded.tobytes())
        read += 1
    if read:
        part.replace(folder)
    else:
        shutil.rmtree(part)
    return read, int(capture.get(cv2.CAP_PROP_FRAME_COUNT))


def part_of(folder: Path) -> Path:
    """Where the frames of a video are until all were written."""
    return folder.with_name(f".{folder.name}.part")


def take_frames(root: Path, names: Sequence[str], frames: Path, every: int) -> None:
    """Write frames of the videos `names` in `root`, one video after the other, in a process that may end at one.

    A folder of frames that are not of this command is refused before any video is read.
    """
    todo = []
    for name in names:
        video, folder = root / name, frames / name
        mark = {"video": name, "bytes": video.stat().st_size, "--every": every}
        if folder.exists() or folder.is_symlink():
            try:
                found = json.loads((folder / MARK).read_text())
            except (OSError, ValueError):
                found = None
            if found != mark:
                of = f"frames of {found}" if found else "not what this script writes there"
                refuse(f"{folder}: {of}; expected frames of {mark}. Move or remove it, or name other --frames.")
        else:
            part = part_of(folder)
            if part.exists() and not (part / MARK).exists() and any(part.iterdir()):
                refuse(f"{part}: not what this script writes there. Move or remove it, or name other --frames.")
            todo.append((str(video), str(folder), mark))
    pool, context = None, multiprocessing.get_context("spawn")
    for video_file, folder_made, mark in tqdm(todo, unit=" videos", disable=not todo):
        pool = pool or ProcessPoolExecutor(1, context, start_reader)
        try:
            read, expected = pool.submit(write_frames, video_file, folder_made, mark).result()
        except (BrokenProcessPool, cv2.error):
            pool, read, expected = None, 0, 0
        shown = video_file if video_file.isprintable() else ascii(video_file)
        if not read:
            tqdm.write(f"unreadable: {shown}", file=sys.stderr)
        elif read < 0.98 * expected:  # some containers only estimate the number
            tqdm.write(f"cut: {shown}: {read} of {expected} frames could be read", file=sys.stderr)
    if pool is not None:
        pool.shutdown()


def files_under(root: Path, endings: Sequence[str] = ENDINGS) -> tuple[list[str], Counter[str]]:
    """Names of the images in a folder and below it, sorted; the same that `data.source = "folder"` finds.

    Hidden ones are left out. Links to folders are followed, after the folders. The counter has what else is left out:
    images of other formats and videos by their ending, broken links, and files that are no regular ones.
    """
    names, left_out, seen = [], Counter[str](), set()
    folders, links = [""], list[str]()
    while folders or links:
        inside = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(root / inside)
        entries = [] if real in seen else sorted(os.scandir(root / inside), key=lambda entry: entry.name)
        seen.add(real)
        for entry in entries:
            ending = Path(entry.name).suffix.lower()
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                (links if entry.is_symlink() else folders).append(f"{inside}{entry.name}/")
            elif ending in endings and entry.is_file():
                names.append(inside + entry.name)
            elif ending in endings:
                left_out["broken links" if entry.is_symlink() else "pipes or devices"] += 1
            elif ending in (*NOT_READ, *VIDEOS):
                left_out[ending] += 1
    return sorted(names), left_out


def listed(root: Path, endings: Sequence[str] = ENDINGS) -> list[str]:
    """The names of `files_under` that can stand in the CSV, at least one; what is left out is printed."""
    names, left_out = files_under(root, endings)
    for name in names:
        if not fits_in_a_line(name):
            print(f"left out: {name!a}: expected a name in UTF-8 without line breaks", file=sys.stderr)
    others = ", ".join(f"{count} {kind}" for kind, count in left_out.most_common())
    remedy = " --frames FRAMES takes frames of videos." if endings == ENDINGS and left_out.keys() & VIDEOS else ""
    if not names:
        found = f"no {', '.join(endings)} files in it or below it; found {others or 'none'}"
        refuse(f"{root}: {found}. Check the path.{remedy}")
    if others and endings == ENDINGS:
        print(f"{root}: left out: {others}. Convert other images to JPEG or PNG.{remedy}", file=sys.stderr)
    return [name for name in names if fits_in_a_line(name)]


def fits_in_a_line(name: str) -> bool:
    """Whether a name can stand in a line of the CSV: it has no line break and is UTF-8."""
    return name.splitlines() == [name] and not any("\ud800" <= character <= "\udfff" for character in name)


def refuse(line: str) -> NoReturn:
    """End the command because of a wrong argument or file."""
    print(line, file=sys.stderr)
    sys.exit(2)


def begin(file: BinaryIO, job: dict[str, Any], *, has_rows: bool) -> None:
    """Write down what is done. Refuse to add to the rows of another folder or of other options."""
    try:
        begun = json.loads(file.read() or "{}")
    except (ValueError, RecursionError):
        begun = None
    if not isinstance(begun, dict) or (begun and begun.keys() != job.keys()):
        refuse(f"{file.name}: not what this script writes there. Move or remove it, or name another OUT.csv.")
    for key in begun if has_rows else ():
        if begun[key] != job[key]:
            refuse(
                f"{file.name}: the boxes were begun with {key} {begun[key]}, not {job[key]}. Give the same, or "
                "name another file. If only the folder has moved, remove this one."
            )
    file.seek(0)
    file.write(json.dumps(job).encode() + b"\n")
    file.truncate()
    file.flush()


def rows_in(content: bytes, file: str) -> list[list[str]]:
    """The rows of OUT.csv or OUT.csv.part. Anything that this script would not write is refused."""
    rows = []
    try:
        lines = csv.reader(content.decode("utf-8-sig").splitlines())
        if (header := [cell.strip() for cell in next(lines, [])]) != COLUMNS and content:
            refuse(f"{file}: line 1 is {','.join(header)[:80]!r}; expected {HEADER.strip()!r}. Name another OUT.csv.")
        for row in filter(None, lines):
            if len(row) < 6 or row[5].strip() not in HANDS:
                expected = f"{', '.join(COLUMNS[:6])} and so on, with hand {', '.join(HANDS)}"
                refuse(f"{file}, line {lines.line_num}: {','.join(row)[:80]!r}; expected {expected}. Mend this line.")
            row[5] = row[5].strip()
            rows.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        refuse(f"{file}: no CSV in UTF-8 ({error}). Mend it, or name another OUT.csv.")
    return rows


def rows_so_far(part: BinaryIO) -> list[list[str]]:
    """The rows that a stopped run finished. A cut line, and the rows of the last image, are removed from the file."""
    content, header = part.read(), HEADER.encode()
    whole = content[: max(content.rfind(b"\n") + 1, len(header))]
    rows = [] if header.startswith(content) else rows_in(whole, part.name)
    finished = [row for row in rows if row[0] != rows[-1][0]]  # an image's rows stand together
    part.seek(0)
    part.write(header + as_csv(finished))
    part.truncate()
    return finished


def replace_file(file: Path, content: bytes) -> None:
    """Write a file, completely or not at all."""
    new = file.with_name(f"boxes.{os.getpid()}.part")
    with new.open("xb") as opened:
        try:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
            if file.exists():
                shutil.copymode(file, new)
            new.replace(file)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def as_csv(rows: Sequence[Sequence[str]]) -> bytes:
    """Rows as lines of a CSV."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def find_all(root: Path, names: Sequence[str], args: argparse.Namespace) -> Iterator[list[list[str]]]:
    """The rows of each image, in order, found by several processes.

    When a process ends, the next images are searched one by one; the one that ends its process again is "unreadable".
    """
    files, done = [(str(root), name) for name in names], 0
    window = 64 * CHUNK * args.jobs
    while done < len(files):
        try:
            with processes(args.jobs, args) as pool:
                while done < len(files):
                    for rows in pool.map(rows_of, files[done : done + window], chunksize=CHUNK):
                        done += 1
                        yield rows
        except BrokenProcessPool:
            with processes(1, args) as pool:
                pool.submit(os.getpid).result()  # raises if the detector does not start at all
                for file in files[done : done + 2 * CHUNK * args.jobs]:
                    done += 1
                    try:
                        rows = pool.submit(rows_of, file).result()
                    except BrokenProcessPool:
                        yield [row_without_hand(file[1], "unreadable")]
                        break
                    yield rows


def processes(jobs: int, args: argparse.Namespace) -> ProcessPoolExecutor:
    """Processes with a detector each."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, context, start_process, (args.confidence, args.hands))


def path_given(text: str) -> Path:
    """A path of the command line."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty; is a variable not set?")
    return Path(text)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Find hands in images or videos; write boxes and landmarks.")
    kinds = "folder of .jpg, .png and .webp files; with --frames a video, or a folder of videos"
    parser.add_argument("images", type=path_given, metavar="IMAGES", help=kinds)
    parser.add_argument("out", type=path_given, metavar="OUT.csv", help="file of boxes, for data.box")
    parser.add_argument("--frames", type=path_given, help="folder for the frames of videos, the data.root of OUT.csv")
    parser.add_argument("--every", type=int, default=30, help="with --frames: take every n-th frame [30]")
    parser.add_argument("--confidence", type=float, default=0.5, help="least confidence of a hand, 0 to 1 [0.5]")
    parser.add_argument("--hands", type=int, default=4, help="most hands in an image [4]")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes [the cores]")
    args = parser.parse_args()
    if not 0 <= args.confidence <= 1:
        parser.error(f"--confidence {args.confidence}: expected 0 to 1")
    if not (1 <= args.hands <= 100 and 1 <= args.jobs <= 1024):
        parser.error(f"--hands {args.hands} --jobs {args.jobs}: expected 1 to 100 hands and 1 to 1024 processes")
    if args.every < 1:
        parser.error(f"--every {args.every}: expected 1 or more")
    if args.out.suffix.lower() != ".csv":
        parser.error(f"{args.out}: expected a name that ends in .csv, as data.box reads it")
    return args


def main() -> None:
    """Find the hands of all images that OUT.csv does not have yet."""
    args = arguments()
    root, videos, names = args.frames or args.images, list[str](), list[str]()
    if args.frames and args.images.suffix.lower() in VIDEOS and args.images.is_file():
        args.images, videos = args.images.parent, [args.images.name]
    elif not args.images.is_dir():
        kind = "a video or a folder of videos" if args.frames else "a folder of images, or --frames with a video"
        refuse(f"{args.images}: expected {kind}. Check the path.")
    elif args.frames:
        videos = listed(args.images, VIDEOS)
    else:
        names = listed(root)
    out = Path(os.path.realpath(args.out))
    job_file, part_file = (out.with_name(out.name + ending) for ending in (".job", ".part"))
    for file in (out, job_file, part_file):
        if file.exists() and not file.is_file():
            refuse(f"{file}: a folder, a pipe or a device; expected a file of this script. Name another OUT.csv.")
    try:
        rows_in(out.read_bytes() if out.exists() else b"", str(args.out))  # refused before a file is made
        job_file.touch()
        lock = job_file.open("r+b")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(f"{args.out}: another process writes this file. Wait for it, or name another file.")
    except OSError as error:
        refuse(f"{args.out}: {error.strerror}. Name a file that can be written.")
    job = {"IMAGES": str(root.resolve()), "--confidence": args.confidence, "--hands": args.hands}
    with lock:
        content = out.read_bytes() if out.exists() else b""
        rows = rows_in(content, str(args.out))
        done = {row[0].removeprefix("./") for row in rows}
        begun = part_file.exists() and part_file.stat().st_size > len(HEADER)
        begin(lock, job, has_rows=bool(rows) or begun)
        if videos:
            take_frames(args.images, videos, args.frames, args.every)
            names = listed(root)
        part_file.touch()
        with part_file.open("r+b") as part:
            new = [row for row in rows_so_far(part) if row[0] not in done]
            done |= {row[0] for row in new}
            todo = [name for name in names if name not in done]
            total = len(done) + len(todo)
            with tqdm(total=total, initial=len(done), unit=" images", smoothing=0.02, mininterval=1) as progress:
                for found in find_all(root, todo, args):
                    part.write(as_csv(found))
                    part.flush()
                    new += found
                    if found[0][5] == "unreadable":
                        path = str(root / found[0][0])
                        progress.write(f"unreadable: {path if path.isprintable() else ascii(path)}", file=sys.stderr)
                    progress.update()
        if new or not content:
            content = content or HEADER.encode()
            replace_file(out, content + b"\r\n" * (not content.endswith((b"\n", b"\r"))) + as_csv(new))
        part_file.unlink()
    rows += new
    count = Counter(row[5] for row in rows)
    images = len({row[0] for row in rows if row[5] in ("left", "right")})
    print(
        f"{args.out}: {count['left'] + count['right']} hands ({count['left']} left, {count['right']} right) in "
        f"{images} images; {count['none']} images without a hand; {count['unreadable']} unreadable"
    )


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    except BrokenProcessPool:
        sys.exit("a process ended, perhaps for lack of memory; the same command goes on, --jobs 1 needs least")
    except OSError as error:
        refuse(f"{error.filename or 'OUT.csv'}: {error.strerror}. Check it; the same command then goes on.")
