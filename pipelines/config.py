"""The configuration of the data and of the loader; that of the augmentations stands in `draws.py`.

Nothing heavy is imported here, neither torch nor DALI nor Numba: a mistake in a configuration is answered at once.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from bounds import Count, Factor, Fraction, Positive, PositiveFraction, Queue, Seed, Threads, one_of
from errors import UserError

SOURCES: Final = {
    name: f"pipelines.sources.{name}:load_{name}"
    for name in ("freihand", "youtube3d", "ho3d", "dexter_object", "coco", "folder", "shards")
}
"""For each layout the function that reads it: a `DataConfig` to an `Index`. It is imported when it is called."""

D = TypeVar("D", bound="DataConfig")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DataConfig:
    """Which images, and which square of each is the canonical view.

    Attributes:
        source: layout of the files: "freihand", "youtube3d", "ho3d", "dexter_object", "coco" (images with keypoints in
            COCO's JSON format), "folder" (any tree of JPEG, PNG and WebP files) or "shards" (what the `pack` command
            writes).
        root: the dataset's folder.
        part: the dataset's part. YouTube3DHands: "evaluation" is its test part.
        split: "train" and "val" of the training part: FreiHAND 90/10 by pose, YouTube3DHands its own train and val
            parts, "all" being its train part; HO-3D 90/10 by recording; COCO 90/10 by image; shards 90/10 by what was
            packed as FreiHAND's pose or the like.
        versions: FreiHAND's background versions.
        box: FreiHAND: "center" (label-free), "joints" (ground truth, as in the authors' code) or a CSV or JSON file of
            boxes. A folder: a file of boxes, or "center" for the square around the whole image. YouTube3DHands: always
            the square around the hand's mesh. HO-3D and Dexter+Object: a file of boxes, or else
            around the keypoints. COCO: always the annotation's. Shards: always the box that was packed.
        center_frac: FreiHAND: side of the "center" box over the image's shorter side.
        box_margin: the canonical square is the box times this. The whole image takes no margin.
        annotations: COCO: the JSON file, relative to `root`; unset, annotations.json.
        regressor: YouTube3DHands: file of MANO's 16 x 778 joint regressor, which you bring; without it keypoints are
            not known.
        label_fraction: use this share of the samples only, chosen by pose or frame; smaller shares are subsets of
            larger ones. For fine-tuning with fewer labels.
        label_seed: another seed, another choice.
        shuffle_shards: of shards, shuffle within so many at a time, for storage that is slow at random reads; without
            it, over all of them.
        bad_list: files to leave out: a list that the `check-data` command wrote.
        max_bad_share: a run stops when more than this share of what it has drawn cannot be used.
        weight: of several sources, this one's share of every batch is its weight over the sum of all weights.
    """

    source: Annotated[str, one_of(SOURCES)] = "freihand"
    root: str = ".data/hands"
    part: Literal["training", "evaluation"] = "training"
    split: Literal["all", "train", "val"] = "all"
    versions: tuple[Literal["gs", "hom", "sample", "auto"], ...] = ("gs", "hom", "sample", "auto")
    box: str = "center"
    center_frac: PositiveFraction = 0.6
    box_margin: Factor = 1.5
    annotations: str | None = None
    regressor: str | None = None
    label_fraction: PositiveFraction = 1.0
    label_seed: Seed = 0
    shuffle_shards: Count | None = None
    bad_list: str | None = None
    max_bad_share: Fraction = 0.01
    weight: Positive = 1.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PipelinesConfig:
    """How views are made; nothing here changes what they are beyond rounding.

    Attributes:
        backend: "dali" makes every pixel in the DALI graph; "opencv" is the fast path for CPUs, where DALI decodes and
            a kernel of ours, compiled by Numba, makes what OpenCV would; "auto" takes "dali" on a GPU, else "opencv".
        batch: samples in one DALI batch, independent of the training batch; unset, 256, or fewer where the images are
            large.
        threads: CPU threads of the decoder and as many of the fast path; unset, this process's share of the cores.
        prefetch: DALI batches under way at once.
        ahead: training batches made ahead of the step.
        hw_decoder_load: share of the images for the GPU's JPEG engines, where it has them.
        decode: "whole" images, or only the "region" of large ones that the views reach. The same pixels are decoded; a
            view of a region may differ by two levels before the colour jitter. "auto" decodes regions on a CPU where a
            few of the images are large, and else whole images.
        decoder_memory: "auto" sets up the process's memory for a decoder on the CPU, which makes it faster: malloc
            keeps what is freed, and the JPEG decoder's images begin where their rows go through the caches. "off"
            changes nothing. A decoder on a GPU never needs it.
    """

    backend: Literal["auto", "dali", "opencv"] = "auto"
    batch: Annotated[Count, Field(le=65536)] | None = None
    threads: Threads | None = None
    prefetch: Queue = 2
    ahead: Queue = 2
    hw_decoder_load: Fraction = 0.65
    decode: Literal["auto", "whole", "region"] = "auto"
    decoder_memory: Literal["auto", "off"] = "auto"


def box_file(config: DataConfig) -> Path | None:
    """The file of boxes that a source was given, if any."""
    return None if config.box in ("center", "joints") else Path(config.box)


def each_source(config: D | Sequence[D]) -> tuple[D, ...]:
    """One source, or several, as several."""
    return (config,) if isinstance(config, DataConfig) else tuple(config)


def refuse_among_images(out: Path, config: DataConfig | Sequence[DataConfig]) -> None:
    """Nothing is written where a source of kind "folder" would take its pictures for images.

    Raises:
        UserError: `out` is below the root of such a source, and not hidden there.
    """
    for one in each_source(config):
        if one.source != "folder":
            continue
        try:
            within = out.resolve().relative_to(Path(one.root).resolve())
        except (OSError, ValueError, RuntimeError):  # elsewhere, or a loop of links
            continue
        if not any(part.startswith(".") for part in within.parts):
            raise UserError(
                f"{out} is within data.root = {one.root}: its pictures would be taken for images of the data. Name a "
                "place outside"
            )


def require_roots(config: DataConfig | Sequence[DataConfig]) -> None:
    """Look for the folders of all sources, before anything heavy is imported and ranks meet; `load_index` says more.

    Raises:
        UserError: one does not exist, or is no folder.
    """
    for one in each_source(config):
        try:
            status = Path(one.root).stat()
        except FileNotFoundError:
            stand_in = f", or make a stand-in with 'python cli.py make-data {one.root}'"
            raise UserError(
                f"{one.root}: does not exist; expected the folder of the images (data.root, data.source = "
                f"{one.source!r}). Check the path{stand_in if one.source == 'freihand' else ''}."
            ) from None
        except (OSError, ValueError):
            continue
        if not stat.S_ISDIR(status.st_mode):
            raise UserError(
                f"{one.root}: is a file; expected a folder, that of the images (data.root, data.source = "
                f"{one.source!r}). Check the path; unpack an archive first."
            )
