"""Features of images by a frozen encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peclr_dali.models.encoders import Encoder, make_encoder
from peclr_dali.models.network import Normalize
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World, single_process
from peclr_dali.train.pose.inference import Progress, canonical_loader, inference

Floats = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

_CHUNK = 64
"""Views that pass an encoder together, whatever the number of ranks, so that a feature does not depend on it."""


def trained_encoder(saved: Mapping[str, Any], origin: str, config: Config | FinetuneConfig) -> Encoder:
    """The encoder of a checkpoint's content, in eval mode. One that does not fit is a `UserError` with the origin."""
    encoder = make_encoder(config.encoder.name, config.geometry.side_px)
    encoder.load_weights(saved["network"], origin, config.encoder.name)
    return encoder.eval()


def canonical_batches(
    index: Index, rows: npt.NDArray[np.int64], config: Config | FinetuneConfig, world: World
) -> Iterator[tuple[Batch, Tensor]]:
    """This rank's share of the canonical views of N rows of an index, in batches of one size on the world's device.

    Yields:
        A batch, and (B,) bool, on the CPU: whether its positions are those of `rows`. The others are surplus rows of
        the last step and substitutes of bad files.

    Raises:
        UserError: so many files are bad that no substitute is left.
    """
    wanted, count = torch.from_numpy(rows), len(rows)
    with canonical_loader(index, rows, _CHUNK, config, world) as loader:
        for batch in loader:
            positions = batch.positions
            yield batch.to(world.device), (positions < count) & (batch.samples[:, 0] == wanted[positions % count])


def features_of_rows(
    encoder: Encoder | None,
    index: Index,
    rows: npt.NDArray[np.int64],
    config: Config | FinetuneConfig,
    progress: Progress,
) -> tuple[npt.NDArray[np.bool_], Floats, Pixels]:
    """The features of the canonical views of N rows of an index, computed by one process in float32.

    Args:
        encoder: in eval mode; None: the features are the pixels.
        config: of the run whose views are taken.

    Returns:
        Which images could be read (N,), the features (N, D), and the views (N, S, S, 3).

    Raises:
        UserError: so many files are bad that no substitute is left.
    """
    world, count, side_px = single_process(), len(rows), config.geometry.side_px
    normalize = Normalize().to(world.device)
    encoder = None if encoder is None else encoder.to(world.device)
    width = 3 * side_px**2 if encoder is None else encoder.feature_dim
    readable, features = np.zeros(count, np.bool_), np.zeros((count, width), np.float32)
    views = np.zeros((count, side_px, side_px, 3), np.uint8)
    with inference(world.device):
        for batch, kept in canonical_batches(index, rows, config, world):
            places, image = batch.positions[kept].numpy(), batch.views[0].image
            found = image.flatten(1) if encoder is None else encoder(normalize(image))
            features[places] = found.float().cpu()[kept].numpy()
            views[places] = image.permute(0, 2, 3, 1).cpu()[kept].numpy()
            readable[places] = True
            progress(int(readable.sum()), count)
    return readable, features, views
