"""Read-out of a frozen encoder: a pose network whose linear head is fitted in closed form."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import to_dict
from peclr_dali.train.distributed.world import described_world
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.pose_run import start_pose_network
from peclr_dali.train.probe import ALPHA, fit_ridge, of_canonical_views
from peclr_dali.train.runs.folder import Resume, RunFolder
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.train.runs.run import set_threads

log = logging.getLogger(__name__)


def fit_read_out(config: FinetuneConfig, resume: Resume = "never") -> RunFolder:
    """Fit a linear head to the features of a frozen encoder, by ridge regression on canonical views.

    The result is a run's folder like fine-tuning's. The head is linear and the root's depth is not refined, whatever
    `config.pose` says; the precision is fp32. Nothing is augmented.

    Args:
        config: data, size of the views, encoder with its weights, folder of the run. Keys of training are not used.
        resume: "auto": a fit that is there already is kept.

    Raises:
        UserError: the input cannot be used, no image has all its labels, or there are several processes.
    """
    config = dataclasses.replace(
        config,
        pose=dataclasses.replace(config.pose, head="linear", refine=False),
        train=dataclasses.replace(config.train, precision="fp32", frozen=True),
    )
    world, folder = described_world(config.train.device), RunFolder(Path(config.run.out), keep=1)
    if world.world_size > 1:
        raise UserError(
            f"a read-out is fitted by one process, and torchrun started {world.world_size}: leave torchrun out"
        )
    with folder.lock():
        if folder.check(config, resume) is not None:
            log.info("%s holds the fitted head already", folder.root)
            return folder
        set_threads(config.train.threads, world)
        torch.manual_seed(config.run.seed)
        index = load_index(config.data)
        labels = labels_to_learn(index)
        network = start_pose_network(config.encoder, config.pose, config.geometry.side_px).network
        network = network.to(world.device).eval()
        folder.claim(config, 0)

        def read(batch: Batch) -> Sequence[Tensor]:
            view = batch.views[0]
            true = labels.of_view(view, batch.samples[:, 0], config.pose, torch.float64)
            depth = true.relative_depth if labels.in_metres else torch.zeros_like(true.relative_depth)
            # As a linear head of `PoseNetwork` gives them: x and y in sides of the view, from its middle.
            wanted = torch.cat([true.keypoints_px / config.geometry.side_px - 0.5, depth[..., None]], dim=2)
            return network.features(view.image).double(), wanted.flatten(1)

        with progress_bar("reading features") as progress:
            rows = np.arange(len(index))
            _, (features, targets) = of_canonical_views(read, index, rows, config, world, progress)
        known = targets.isfinite().all(dim=1)
        if not known.any():
            raise UserError(f"{index.root} ({index.name}): no image has all its labels: use another source")
        weight, bias = fit_ridge(features[known], targets[known], ALPHA)
        with torch.no_grad():
            cast(nn.Linear, network.head).weight.copy_(weight)
            cast(nn.Linear, network.head).bias.copy_(bias)
        saved = {"config": to_dict(config), "network": network.state_dict(), "depth": labels.in_metres}
        folder.checkpoints.save(1, saved)
        log.info("%s: head fitted to %d of %d images", folder.root, int(known.sum()), len(index))
    return folder
