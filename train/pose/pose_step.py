"""One fine-tuning step: the L1 losses of the 2.5D pose and of the root's depth, and their exact gradient."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from peclr_dali.models.pose import PoseOutput
from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.config.finetuning import PoseLossConfig
from peclr_dali.train.pose.labels import PoseTargets
from peclr_dali.train.steps.micro_batches import MicroBatchStep, one_momentum_step


class PoseLosses(NamedTuple):
    """The losses of some views, scalars with graph.

    Attributes:
        keypoints_px: mean absolute error of the 2D keypoints' coordinates.
        depth: mean absolute error of the root-relative depths.
        root_depth: mean absolute error of the refined root depth; 0 if the network does not refine.
    """

    keypoints_px: Tensor
    depth: Tensor
    root_depth: Tensor


def pose_losses(output: PoseOutput, targets: PoseTargets, *, refined: bool) -> PoseLosses:
    """The L1 losses (paper, eq. 5; the root's as in Spurr et al. 2020).

    An unknown target (NaN) adds 0 but counts in the divisor, so equal micro-batches average exactly.

    Without refinement (`refined` is False) the root's loss is 0.
    """
    keypoints_px = _mean_absolute(output.keypoints_px, targets.keypoints_px)
    depth = _mean_absolute(output.relative_depth, targets.relative_depth)
    root_depth = _mean_absolute(output.root_depth, targets.root_depth) if refined else torch.zeros_like(depth)
    return PoseLosses(keypoints_px, depth, root_depth)


def _mean_absolute(predicted: Tensor, target: Tensor) -> Tensor:
    # The target is filled in before the difference: a NaN behind a mask would still make the gradient NaN.
    return (predicted - target.where(target.isfinite(), predicted.detach())).abs().mean()


class PoseStepResult(NamedTuple):
    """Result of a step over the global batch, besides the gradients; on the device and without graph.

    Attributes:
        loss: scalar, the weighted sum.
        losses: its parts before weighting.
    """

    loss: Tensor
    losses: PoseLosses


@dataclass(eq=False)
class PoseStep(MicroBatchStep):
    """Loss and gradient of one global batch. Other attributes as `MicroBatchStep`.

    Attributes:
        forward: computes poses from views (n, 3, S, S) uint8 and intrinsics (n, 3, 3); may be compiled.
        refined: whether the network refines the root's depth.
        weights: weights of the losses.
        autocast_dtype: 16-bit type for the network; None: no autocast.
    """

    forward: Callable[[Tensor, Tensor], PoseOutput]
    refined: bool
    weights: PoseLossConfig
    autocast_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __call__(self, batch: Batch, targets: PoseTargets) -> PoseStepResult:
        """Write the gradient of the mean loss over the global batch to `.grad`. Earlier gradients are dropped.

        Args:
            batch: this rank's share of the global batch, on its device; the first view is used.
            targets: targets of the first view.

        Raises:
            ValueError: the batch is of another size than this rank's share.
        """
        rows_of_each = self.begin(batch)
        micro_batches = self.batch // self.micro_batch  # over all ranks
        total = torch.zeros(4, device=self.world.device, dtype=targets.root_depth.dtype)
        with one_momentum_step(self.network, self.world, micro_batches) as add_statistics:
            with self.own_work.running(self.world.device):
                for rows in rows_of_each:
                    loss, losses = self._losses(batch.views[0].image[rows], targets[rows])
                    add_statistics()
                    self.backward(self.scaler.scale(loss / micro_batches), last=rows is rows_of_each[-1])
                    total += torch.stack([part.detach().to(total.dtype) for part in (loss, *losses)]) / micro_batches
            self.sum_gradients()
        self.world.sum_(total)
        return PoseStepResult(total[0], PoseLosses(*total[1:]))

    def _losses(self, image: Tensor, targets: PoseTargets) -> tuple[Tensor, PoseLosses]:
        with torch.autocast(self.world.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            output = self.forward(image, targets.intrinsics)
        losses = pose_losses(output, targets, refined=self.refined)
        weights, keypoints_sides = self.weights, losses.keypoints_px / image.shape[-1]
        total = weights.keypoints * keypoints_sides + weights.depth * losses.depth
        return total + weights.root_depth * losses.root_depth, losses
