"""One fine-tuning step: the L1 losses of the 2.5D pose and of the root's depth, and their exact gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from models.pose import PoseOutput
from pipelines.batch import Batch
from train.config.finetuning import FinetuneConfig
from train.distributed.watchdog import activity
from train.distributed.world import World, micro_batch_share
from train.pose.labels import PoseTargets
from train.steps.batch_statistics import one_momentum_step
from train.steps.stopwatch import Stopwatch


class PoseLosses(NamedTuple):
    """The losses of some views, scalars with graph.

    Attributes:
        keypoints_px: mean absolute error of the 2D keypoints' coordinates.
        depth: of the root-relative depths.
        root_depth: of the refined root depth; 0 where the network does not refine.
    """

    keypoints_px: Tensor
    depth: Tensor
    root_depth: Tensor


def pose_losses(output: PoseOutput, targets: PoseTargets, *, refined: bool) -> PoseLosses:
    """The L1 losses (paper, eq. 5; the root's as in Spurr et al. 2020).

    A target that is not known (NaN) adds nothing, and still counts in the mean: so means over micro-batches and ranks
    of equal size average to the mean over all.

    Without refinement (`refined` is False) the root's loss is 0.
    """
    keypoints_px = _mean_absolute(output.keypoints_px, targets.keypoints_px)
    depth = _mean_absolute(output.relative_depth, targets.relative_depth)
    root_depth = _mean_absolute(output.root_depth, targets.root_depth) if refined else torch.zeros_like(depth)
    return PoseLosses(keypoints_px, depth, root_depth)


def _mean_absolute(predicted: Tensor, target: Tensor) -> Tensor:
    known = target.isfinite()
    # The target is filled in before the difference: a NaN behind a mask would still make the gradient NaN.
    return (predicted - target.where(known, predicted.detach())).abs().mean()


class PoseStepResult(NamedTuple):
    """What one step gives besides the gradients, over the global batch; all on the device and without graph.

    Attributes:
        loss: scalar, the weighted sum.
        losses: its parts before weighting.
    """

    loss: Tensor
    losses: PoseLosses

    def figures(self) -> dict[str, float]:
        """The parts of the loss; waits for the device."""
        return dict(zip(self.losses._fields, torch.stack(self.losses).tolist(), strict=True))


class PoseStep:
    """Loss and gradient of one global batch; the optimiser is the caller's.

    Batch norm sees one micro-batch, and running statistics take one momentum step per call, as in pre-training
    (`train.steps.contrastive`). So loss, gradient and buffers depend on `micro_batch`, but not on the number of ranks,
    up to the order of sums.

    Args:
        network: whose parameters get the gradient.
        forward: views (n, 3, S, S) uint8 and intrinsics (n, 3, 3) to poses; may be compiled.
        config: its `train.batch` images make a global batch, of which `train.micro_batch` go through the network
            together.
        autocast_dtype: 16-bit type for the network; None for none.
        scaler: scales the gradients, which the caller unscales (fp16).
        world: this rank among all.

    Raises:
        UserError: the batch is not made of whole micro-batches, or there are fewer of them than ranks.
    """

    def __init__(
        self,
        network: nn.Module,
        forward: Callable[[Tensor, Tensor], PoseOutput],
        config: FinetuneConfig,
        *,
        autocast_dtype: torch.dtype | None = None,
        scaler: GradScaler | None = None,
        world: World | None = None,
    ) -> None:
        self.network, self.forward = network, forward
        self.refined, self.weights = config.pose.refine, config.loss
        self.batch, self.micro_batch = config.train.batch, config.train.micro_batch
        self.autocast_dtype, self.scaler = autocast_dtype, scaler
        self.world = World() if world is None else world
        self.own_work = Stopwatch()
        self.share = micro_batch_share(self.batch, self.micro_batch, self.world.rank, self.world.world_size)

    def __call__(self, batch: Batch, targets: PoseTargets) -> PoseStepResult:
        """Leaves the gradient of the mean loss over the global batch in `.grad`, in place of what was there.

        Args:
            batch: this rank's share of the global batch, on its device; the first view is used.
            targets: of that view.

        Raises:
            ValueError: the batch is of another size than this rank's share.
        """
        if len(batch) != len(self.share):
            raise ValueError(f"a batch of {len(batch)} samples, but this rank's share is {len(self.share)}")
        for parameter in self.network.parameters():
            parameter.grad = None
        micro_batches = self.batch // self.micro_batch  # over all ranks
        total = torch.zeros(4, device=self.world.device, dtype=targets.root_depth.dtype)
        with one_momentum_step(self.network, self.world, micro_batches) as add_statistics:
            with self.own_work.running(self.world.device):
                for start in range(0, len(batch), self.micro_batch):
                    activity.moved()
                    rows = slice(start, start + self.micro_batch)
                    loss, losses = self._losses(batch.views[0].image[rows], targets[rows])
                    add_statistics()
                    mean = loss / micro_batches
                    (mean if self.scaler is None else self.scaler.scale(mean)).backward()  # type: ignore[no-untyped-call]
                    total += torch.stack([part.detach().to(total.dtype) for part in (loss, *losses)]) / micro_batches
            self.world.sum_in_buckets_([p.grad for p in self.network.parameters() if p.grad is not None])
        self.world.sum_(total)
        return PoseStepResult(total[0], PoseLosses(*total[1:]))

    def _losses(self, image: Tensor, targets: PoseTargets) -> tuple[Tensor, PoseLosses]:
        enabled = self.autocast_dtype is not None
        with torch.autocast(self.world.device.type, dtype=self.autocast_dtype, enabled=enabled):
            output = self.forward(image, targets.intrinsics)
        losses = pose_losses(output, targets, refined=self.refined)
        weights = self.weights
        total = weights.keypoints * losses.keypoints_px + weights.depth * losses.depth
        return total + weights.root_depth * losses.root_depth, losses
