"""Frozen encoders, and the features that they give to the images of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter, ValidationError

from peclr_dali.errors import UserError
from peclr_dali.errors.terminal import in_one_line
from peclr_dali.models.config import EncoderConfig
from peclr_dali.models.encoders import Encoder, build_encoder
from peclr_dali.pipelines.config import each_source, is_address
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.pose.inference import Progress
from peclr_dali.train.probe.features import Floats, Pixels, features_of_rows, trained_encoder
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint
from peclr_dali.train.trainer import set_threads

IMAGENET: Final = "imagenet"
BASELINES: Final = ("random", "pixels")


@dataclass(frozen=True)
class Frozen:
    """An encoder that is not trained any more.

    Attributes:
        name: path of the run as it was given, or "imagenet", "random" or "pixels".
        config: the run's; the first run's, if this is none. It makes the views, without augmentation.
        encoder: in eval mode; None for the pixels of the views.
        is_run: whether it was trained as `config` says.
        steps: how many steps it was trained for.
    """

    name: str
    config: Config | FinetuneConfig
    encoder: Encoder | None
    is_run: bool = False
    steps: int = 0

    def about(self) -> dict[str, Any]:
        """How it was made, for a row."""
        config = self.config
        about: dict[str, Any] = {
            "name": self.name, "encoder": config.encoder.name, "side_px": config.geometry.side_px
        }  # fmt: skip
        if not self.is_run:
            return about
        if isinstance(config, Config):
            about |= {"trained": "pre-training", "variant": config.equivariance.variant}
        else:
            about["trained"] = "fine-tuning"
        return about | {"steps": self.steps, "batch": config.train.batch, "seed": config.run.seed}


def load_frozen(sources: Sequence[str]) -> list[Frozen]:
    """The encoders of runs (folders or checkpoints) and "imagenet", and then the baselines.

    The baselines are the first run's network with random weights, and the pixels of its views.

    Raises:
        UserError: there is no run, or one cannot be used.
    """
    if taken := {*BASELINES, "constant"} & set(sources):
        raise UserError(f"{min(taken)} is the name of a baseline: write ./{min(taken)} for the run in this folder")
    runs = {source: _load_run(source) for source in sources if source != IMAGENET}
    if not runs:
        raise UserError(f"{' '.join(sources)}: expected a run too, since 'imagenet' takes its network and its views")
    first = next(iter(runs.values())).config
    side_px = first.geometry.side_px
    found = []
    for name in dict.fromkeys([*sources, *BASELINES]):
        if name in runs:
            found.append(runs[name])
            continue
        torch.manual_seed(0)
        weights = EncoderConfig(name=first.encoder.name, weights=name)
        found.append(Frozen(name, first, None if name == "pixels" else build_encoder(weights, side_px).eval()))
    return found


def _load_run(source: str) -> Frozen:
    path = find_checkpoint(Path(source), "the folder of a run, a checkpoint, or the word 'imagenet'")
    saved = load_checkpoint(path)
    kind: Any = FinetuneConfig if "pose" in saved["config"] else Config
    try:
        config: Config | FinetuneConfig = TypeAdapter(kind).validate_python(saved["config"])
    except ValidationError as error:
        raise UserError(f"{path} was written by another version: {in_one_line(error)}") from error
    return Frozen(source, config, trained_encoder(saved, str(path), config), is_run=True, steps=saved["step"])


def features_of(frozen: Frozen, index: Index, progress: Progress) -> tuple[npt.NDArray[np.bool_], Floats, Pixels]:
    """The features of N samples, see `features_of_rows`. Boxes are without margin; the run's is added."""
    margin = each_source(frozen.config.data)[0].box_margin
    index = replace(index, box_px=index.box_px * np.array([1, 1, margin], np.float32))
    set_threads(None, single_process())
    return features_of_rows(frozen.encoder, index, np.arange(len(index)), frozen.config, progress)


def images_that_trained(frozen: Frozen, images: Path) -> set[Path] | None:
    """The resolved paths of the images in a folder that trained an encoder; None if that cannot be told.

    It cannot for a run that began with weights of another run, or read from an address. Sources elsewhere are not read:
    copies of the images there are not recognised.
    """
    if not frozen.is_run:
        return set()
    sources = each_source(frozen.config.data)
    if frozen.config.encoder.weights not in ("random", IMAGENET) or any(is_address(one.root) for one in sources):
        return None
    folder, found = images.resolve(), set[Path]()
    for source in sources:
        root = Path(source.root).resolve()
        if root.is_relative_to(folder) or folder.is_relative_to(root):
            try:
                found |= {(root / path).resolve() for path in load_index(source).paths}
            except UserError:
                return None
    return found
