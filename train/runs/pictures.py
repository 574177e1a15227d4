"""Pictures of a run: its views and its loss."""

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from peclr_dali.errors import UserError, printable
from peclr_dali.parsing import regular
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.skeleton import HAND
from peclr_dali.writing import write_bytes

Image = npt.NDArray[np.uint8]

_GAP_PX = 8  # margin between and around the pictures of a sheet


def draw_skeleton(image: Image, keypoints_px: npt.NDArray[np.floating], *, grey: int | None = None) -> None:
    """Draw keypoints (K, 2), corner-based, and their bones onto `image` (H, W, 3) RGB, in place.

    Each finger has its colour, or all are `grey`. Unknown keypoints (NaN) are left out.
    """
    shift = 4  # OpenCV draws at sixteenths of a pixel, with 0 at a pixel's centre
    thick = max(1, round(max(image.shape) / 200))
    known = np.isfinite(keypoints_px).all(axis=1)
    places = np.rint((np.nan_to_num(keypoints_px).clip(-1e4, 1e4) - 0.5) * 2**shift).astype(int).tolist()
    for chain, colour in (*HAND.limbs, ((0, 0), (255, 255, 255))):  # the wrist last, as a limb of length 0
        shown = colour if grey is None else (grey, grey, grey)
        for start, end in itertools.pairwise(chain):
            if known[start] and known[end]:
                cv2.line(image, places[start], places[end], shown, thick, cv2.LINE_AA, shift)
        for keypoint in chain[1:]:
            if known[keypoint]:
                cv2.circle(image, places[keypoint], 2 * thick << shift, shown, cv2.FILLED, cv2.LINE_AA, shift)


def shown_side_px(side_px: int) -> int:
    """Side of a view in the picture of `save_views`: a multiple of `side_px`, at least 192."""
    return side_px * -(-192 // side_px)


def save_views(path: Path, batch: Batch, index: Index, *, samples: int = 24) -> None:
    """Write a sheet with the views of each sample side by side, and the keypoints transformed by their matrices."""
    side_px = batch.views[0].image.shape[-1]
    enlarge = shown_side_px(side_px) // side_px
    pairs = []
    for row, shown in enumerate(batch.samples[:samples].tolist()):
        pictures: list[Image] = []
        for view, sample in zip(batch.views, shown, strict=True):
            image = view.image[row].permute(1, 2, 0).cpu().numpy()
            resized = cv2.resize(image, None, fx=enlarge, fy=enlarge, interpolation=cv2.INTER_CUBIC)
            pictures.append(np.asarray(resized, np.uint8))
            if index.keypoints_px is not None:
                matrix = view.source_to_view_px[row].double().cpu().numpy()
                keypoints = index.keypoints_px[sample] @ matrix[:, :2].T + matrix[:, 2]
                if np.isfinite(keypoints).any():  # one of several sources may have no keypoints
                    draw_skeleton(pictures[-1], keypoints * enlarge)
        pairs.append(np.concatenate(pictures, axis=1))
    save_sheet(path, pairs, columns=3)


def save_sheet(path: Path, pictures: Sequence[Image], *, columns: int) -> None:
    """Write pictures (H, W, 3) RGB of one size in rows. Errors as in `writing.whole_file`."""
    height, width, _ = pictures[0].shape
    rows, columns = -(-len(pictures) // columns), min(columns, len(pictures))
    sheet = np.full((rows * (height + _GAP_PX) + _GAP_PX, columns * (width + _GAP_PX) + _GAP_PX, 3), 255, np.uint8)
    for cell, picture in zip(_cells(sheet, height, width), pictures, strict=False):  # the last row may have gaps
        cell[:] = picture
    try:
        _, encoded = cv2.imencode(path.suffix, sheet[..., ::-1])
    except cv2.error as error:  # too large for the format
        raise UserError(
            f"{path}: {sheet.shape[1]} x {sheet.shape[0]} pixels are too many: show fewer samples"
        ) from error
    write_bytes(path, encoded.tobytes())


def save_figure(path: Path, figure: Figure, *, dpi: int) -> None:
    """Write a figure in the format of the path's ending: .png, .svg or .pdf. Errors as in `writing.whole_file`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=dpi)
    write_bytes(path, buffer.getbuffer())  # only now, since drawing is slow and a kill leaves the file that is open


def legend_name(name: str) -> str:
    """A run's name for a legend: Matplotlib takes $ for mathematics, and leaves out what begins with _."""
    return re.sub("^_", " _", printable(name).replace("$", r"\$"))[:60]


def log_axis(axis: Axes) -> None:
    """Make y logarithmic, with plain numbers at its ticks: 36, not 3.6 x 10^1. Call it after everything is drawn."""
    axis.set_yscale("log")
    low, high = np.log10(axis.get_ylim())
    shown = "123456789" if high - low < 0.5 else "25" if high - low < 3 else ""  # more would overlap
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in shown else "")


def level_line(axes: Axes, y: float, words: str, colour: str) -> None:
    """Draw a dashed line across the axes, with a label."""
    axes.axhline(y, color=colour, linestyle="--", linewidth=1)
    axes.annotate(
        words, (1, y), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points", ha="right",
        color=colour, bbox={"fc": "white", "ec": "none", "pad": 1}, zorder=1.6,  # above the grid, below the curves
    )  # fmt: skip


def read_picture(path: Path) -> Image | None:
    """A picture (H, W, 3) RGB as displayed; None if it cannot be read. A pipe, which might never end, is not opened."""
    try:
        decoded = cv2.imdecode(np.frombuffer(regular(path).read_bytes(), np.uint8), cv2.IMREAD_COLOR)
    except (OSError, cv2.error):  # OpenCV's of an empty file, and of more pixels than it allows
        return None
    return None if decoded is None else np.ascontiguousarray(decoded[..., ::-1], np.uint8)


def read_sheet(path: Path, *, height: int, width: int) -> list[Image]:
    """Read the pictures (height, width, 3) RGB of a sheet that `save_sheet` wrote. Another file is a `UserError`."""
    sheet = read_picture(path)
    if sheet is None or any(
        (length - _GAP_PX) % (cell + _GAP_PX) for length, cell in zip(sheet.shape, (height, width), strict=False)
    ):
        raise UserError(f"{path} holds no pictures of {width} x {height} pixels. Run the command that wrote it again")
    return [cell for cell in _cells(sheet, height, width) if not (cell == 255).all()]


def _cells(sheet: Image, height: int, width: int) -> list[Image]:
    """The pictures of a sheet, row by row."""
    rows, columns = (sheet.shape[0] - _GAP_PX) // (height + _GAP_PX), (sheet.shape[1] - _GAP_PX) // (width + _GAP_PX)
    places = itertools.product(range(rows), range(columns))
    corners = ((_GAP_PX + row * (height + _GAP_PX), _GAP_PX + column * (width + _GAP_PX)) for row, column in places)
    return [sheet[top : top + height, left : left + width] for top, left in corners]


def save_loss(path: Path, rows: Sequence[Mapping[str, float]], *, chance: tuple[float, str] | None) -> None:
    """Draw the loss, with its value at chance if it has one, and below it the rank of the positive."""
    steps = [row["step"] for row in rows]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 5), layout="constrained")
        loss, rank = figure.subplots(2, 1, sharex=True)
        if chance is not None:
            level_line(loss, chance[0], f"chance, {chance[1]} = {chance[0]:.2f}", "0.5")
        loss.plot(steps, [row["loss"] for row in rows], color="#1f6fb4")
        loss.set_ylabel("loss")
        rank.plot(steps, [row["positive_rank"] for row in rows], color="#c0504d")
        log_axis(rank)
        rank.set(xlabel="optimiser step", ylabel="mean rank of the positive")
        save_figure(path, figure, dpi=130)
