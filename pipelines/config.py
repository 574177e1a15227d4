"""Configuration of the data and of the loader. The augmentations have theirs in `views/augmentation.py`.

This file imports neither torch nor DALI nor Numba, so that a mistake in a configuration is reported at once.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import STRICT, Count, Factor, Fraction, Positive, PositiveFraction, Queue, Seed, Threads, one_of
from peclr_dali.errors import UserError

SOURCES = ("freihand", "youtube3d", "ho3d", "dexycb", "dexter_object", "coco", "folder", "shards")
"""The layouts. Each is a module in `pipelines/sources/`, imported when it is used, with a function `load_NAME`."""


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The images, and the square of each image that becomes the canonical view.

    Attributes:
        source: layout of the files: "freihand", "youtube3d", "ho3d", "dexycb", "dexter_object", "coco" (images with
            keypoints in COCO's JSON format), "folder" (any tree of JPEG, PNG and WebP files) or "shards" (what the
            command `pack` writes).
        root: the dataset's folder. For shards, also an address such as "s3://bucket/folder".
        part: the dataset's part, for layouts that have parts. YouTube3DHands and DexYCB: "evaluation" is the test part.
        split: "train" and "val" divide the training part 90/10: FreiHAND by pose, HO-3D by recording, COCO and folders
            by image (of fewer than 1,000, "val" has 100, or a fifth if that is less), shards by the group that was
            packed (such as FreiHAND's pose). YouTube3DHands and DexYCB have train and val parts of their own; "all" is
            YouTube3DHands' train part, and both of DexYCB.
        setup: DexYCB: the published split, "s0" by sequence, "s1" by person, "s2" by camera, "s3" by object.
        versions: FreiHAND's background versions.
        box: FreiHAND: "center" (needs no labels), "joints" (from the labels, as in the authors' code) or a CSV or JSON
            file of boxes. A folder: a file of boxes, or "center" for the square around the whole image. HO-3D and
            Dexter+Object: a file of boxes; without it, the square around the keypoints. YouTube3DHands, DexYCB, COCO
            and packed shards: leave it out; the box is the square around the hand's mesh or the keypoints, the
            annotation's box, or the packed box. Tar files of other programs: as for a folder.
        center_frac: FreiHAND: side of the "center" box over the image's shorter side.
        box_margin: factor of the box's side. The whole image gets no margin.
        annotations: COCO: the JSON file, relative to `root`; unset, annotations.json.
        regressor: YouTube3DHands: your file of MANO's 16 x 778 joint regressor; without it there are no keypoints.
        label_fraction: share of the samples to use, for fine-tuning with fewer labels. Whole poses or frames are
            chosen; a smaller share is a subset of a larger one.
        label_seed: seed of this choice.
        positive: the second image of a row's pair of views. "self": the same image, as in PeCLR. "version": the same
            pose before another background, in FreiHAND and shards of it. "file": as `pairs` says. An image without an
            admissible partner is its own. For pre-training only.
        pairs: "file": a CSV file with the header `file,positive`, or `file,number,positive,positive_number` for images
            with several hands, numbered from 0; several rows of an image are several admissible partners. Names as in
            a file of boxes.
        bad_list: list of files to leave out, written by the `check-data` command.
        max_bad_share: a run stops if a larger share of the drawn images cannot be used.
        weight: for several sources. A source's share of every batch is its weight over the sum of all weights.
    """

    source: Annotated[str, one_of(SOURCES)] = "freihand"
    root: str = ".data/hands"
    part: Literal["training", "evaluation"] = "training"
    split: Literal["all", "train", "val"] = "all"
    setup: Literal["s0", "s1", "s2", "s3"] = "s0"
    versions: tuple[Literal["gs", "hom", "sample", "auto"], ...] = ("gs", "hom", "sample", "auto")
    box: str = "center"
    center_frac: PositiveFraction = 0.6
    box_margin: Factor = 1.5
    annotations: str | None = None
    regressor: str | None = None
    label_fraction: PositiveFraction = 1.0
    label_seed: Seed = 0
    positive: Literal["self", "version", "file"] = "self"
    pairs: str | None = None
    bad_list: str | None = None
    max_bad_share: Fraction = 0.01
    weight: Positive = 1.0


@dataclass(frozen=True, config=STRICT)
class PipelinesConfig:
    """How views are made. These keys change the views only by rounding.

    Attributes:
        decoder: where DALI decodes. "auto" is "gpu" on a GPU with JPEG engines (A100, H100, H200, B200), else "cpu".
        views: what makes the views of the decoded images. "gpu" is one Triton kernel; images that were decoded on the
            CPU are copied to it. "cpu" is a Numba kernel, which warps and jitters as OpenCV would. "dali" is the graph
            of DALI's own operators, on the device of the batches: the reference that the other two are tested against.
            "auto" is "gpu" on a GPU and "cpu" without one; on a GPU without a C compiler and Python's headers, "dali".
        batch: samples that are read and decoded together (a chunk, one batch of DALI), independent of the training
            batch; fewer if the images are large. Unset, 256.
        threads: CPU threads of the decoder, and the same number for views = "cpu"; unset, this process's share of the
            cores, at most 16 if a GPU decodes.
        prefetch: chunks in DALI at once.
        ahead: training batches prepared ahead of the step.
        decode: "whole" decodes whole images, "region" only the part of a large image that the views show. The decoded
            pixels are the same; a view of a region may differ by some levels before the colour jitter. "auto" decodes
            regions on a CPU if a sample of the images contains a large one, else whole images.
    """

    decoder: Literal["auto", "cpu", "gpu"] = "auto"
    views: Literal["auto", "cpu", "gpu", "dali"] = "auto"
    batch: Annotated[Count, Field(le=65536)] | None = None
    threads: Threads | None = None
    prefetch: Queue = 2
    ahead: Queue = 2
    decode: Literal["auto", "whole", "region"] = "auto"

    @model_validator(mode="after")
    def _possible(self) -> "PipelinesConfig":
        if self.decoder == "gpu" and self.views == "cpu":
            raise ValueError('views = "cpu" needs images decoded there: set decoder = "cpu", or views = "gpu"')
        return self


def box_file(config: DataConfig) -> Path | None:
    """The file of boxes that a source was given, if any."""
    return None if config.box in ("center", "joints") else Path(config.box)


def is_address(root: str) -> bool:
    """Whether `data.root` is an address, such as "s3://bucket/folder", and not a folder."""
    return re.match(r"\w[\w+.:-]*://", root) is not None


def refuse_among_images(out: Path, sources: Iterable[DataConfig]) -> None:
    """Refuse an output whose pictures a source of kind "folder" would read as images.

    Raises:
        UserError: `out` is inside the root of such a source.
    """
    for source in sources:
        is_tree = source.source == "folder" and not is_address(source.root)
        if is_tree and out.resolve().is_relative_to(os.path.realpath(source.root)):
            raise UserError(
                f"{out} is within {source.root}, whose images are read: its pictures would be read as images too. Name "
                "a place outside it"
            )
