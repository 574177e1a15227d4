"""The losses of fine-tuning, and their gradient over micro-batches."""

import pytest
import torch
from torch import Tensor, nn

from peclr_dali.models.pose import PoseOutput
from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.train.config.finetuning import PoseLossConfig
from peclr_dali.train.pose.labels import PoseTargets
from peclr_dali.train.pose.pose_step import PoseStep, pose_losses


def output(keypoints_px: Tensor, depth: Tensor, root_depth: Tensor) -> PoseOutput:
    return PoseOutput(keypoints_px, depth, root_depth, root_depth, torch.zeros(len(depth), 21, 3))


def targets(keypoints_px: Tensor, depth: Tensor, root_depth: Tensor) -> PoseTargets:
    return PoseTargets(torch.eye(3).expand(len(depth), 3, 3), keypoints_px, depth, root_depth)


def test_losses_are_means_of_absolute_errors() -> None:
    """Two hands: keypoints 3 px off in x and 1 px in y, depths 0.5 off in one of the two, roots 2 and 4 off."""
    zero = torch.zeros(2, 21)
    shifted = torch.tensor([3.0, -1.0]).expand(2, 21, 2)
    depth = torch.stack([torch.full((21,), -0.5), torch.zeros(21)])
    predicted = output(shifted, depth, torch.tensor([2.0, -4.0]))
    losses = pose_losses(predicted, targets(torch.zeros(2, 21, 2), zero, torch.zeros(2)), refined=True)
    assert losses.keypoints_px.item() == 2.0
    assert losses.depth.item() == 0.25
    assert losses.root_depth.item() == 3.0
    assert pose_losses(predicted, targets(shifted, depth, torch.zeros(2)), refined=False).root_depth.item() == 0


def test_unknown_keypoints_add_nothing_to_loss_and_gradient() -> None:
    keypoints_px, depth = torch.ones(1, 21, 2, requires_grad=True), torch.ones(1, 21, requires_grad=True)
    root_depth = torch.ones(1, requires_grad=True)
    known_px, known = torch.full((1, 21, 2), torch.nan), torch.full((1, 21), torch.nan)
    known_px[0, 4] = torch.tensor([0.0, 3.0])
    losses = pose_losses(
        output(keypoints_px, depth, root_depth), targets(known_px, known, torch.tensor([torch.nan])), refined=True
    )
    assert losses.keypoints_px.item() == pytest.approx((1 + 2) / 42)
    assert (losses.depth.item(), losses.root_depth.item()) == (0, 0)
    (losses.keypoints_px + losses.depth + losses.root_depth).backward()  # type: ignore[no-untyped-call]
    expected = torch.zeros(1, 21, 2)
    expected[0, 4] = torch.tensor([1.0, -1.0]) / 42
    torch.testing.assert_close(keypoints_px.grad, expected)
    torch.testing.assert_close(depth.grad, torch.zeros(1, 21), rtol=0, atol=0)


class Linear(nn.Module):
    """Poses that are linear in the pixels, without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 4 * 4, 64, dtype=torch.float64)

    def forward(self, image: Tensor, intrinsics: Tensor) -> PoseOutput:
        raw = self.layer(image.flatten(1).double() / 255)
        return output(raw[:, :42].unflatten(1, (21, 2)), raw[:, 42:63], raw[:, 63])


def batch_of(count: int) -> tuple[Batch, PoseTargets]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (count, 3, 4, 4), dtype=torch.uint8, generator=generator)
    matrix = torch.eye(3)[:2].expand(count, 2, 3)
    wanted = [torch.randn(*shape, generator=generator).double() for shape in ((count, 21, 2), (count, 21), (count,))]
    rows = torch.arange(count)
    return Batch((View(image, matrix, matrix),), rows, rows), targets(*wanted)


@pytest.mark.parametrize("micro_batch", [2, 3, 6, 12])
def test_micro_batches_give_the_gradient_of_the_whole(micro_batch: int) -> None:
    """Against autograd of the written-out loss, with unequal weights. Keypoint errors are in sides of the view."""
    torch.manual_seed(0)
    network = Linear()
    batch, wanted = batch_of(12)
    weights = PoseLossConfig(keypoints=0.5, depth=2, root_depth=3)
    result = PoseStep(network, network, True, weights, batch=12, micro_batch=micro_batch)(batch, wanted)

    predicted = network(batch.views[0].image, wanted.intrinsics)
    loss = (
        0.5 * ((predicted.keypoints_px - wanted.keypoints_px) / 4).abs().sum() / (12 * 42)
        + 2 * (predicted.relative_depth - wanted.relative_depth).abs().sum() / (12 * 21)
        + 3 * (predicted.root_depth - wanted.root_depth).abs().sum() / 12
    )
    expected = torch.autograd.grad(loss, list(network.parameters()))
    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-12, atol=0)
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)
    keypoints_px, depth, root_depth = (part.item() for part in result.losses)
    assert loss.item() == pytest.approx(0.5 * keypoints_px / 4 + 2 * depth + 3 * root_depth, rel=1e-12)
