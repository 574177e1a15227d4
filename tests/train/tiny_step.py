"""A small network, batches for it, its exact step, and autograd through everything at once to compare with."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peclr_dali import AnchorLoss, Batch, NTXent, View, World
from peclr_dali.models.config import EquivarianceConfig
from peclr_dali.models.equivariance import build_undo
from peclr_dali.models.network import build_network
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pretrain import build_step, is_recorded, pretraining_optimizer
from peclr_dali.train.steps.embed import ViewEmbedder, keypoints_of_pairs
from peclr_dali.train.steps.exact import ExactStep, StepResult
from peclr_dali.train.steps.step_graph import StepGraph
from peclr_dali.train.steps.train_state import TrainState, build_state, on_device

Recompute = Literal["auto", "always", "never"]
SIDE_PX = 8
NT_XENT = NTXent()
UNDO = build_undo(EquivarianceConfig(), output_side_px=SIDE_PX)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, bias=False),
        nn.BatchNorm2d(6, momentum=0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 8),
    ).to(dtype)  # without biases before batch norm, whose gradient is zero and cannot be compared to a relative bound


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def images(samples: int, side_px: int = SIDE_PX, seed: int = 0) -> Batch:
    """All tensors of both views are others with each seed; pixels are channels-last, as the loader's."""
    generator = torch.Generator().manual_seed(samples + 1000 * seed)

    def view() -> View:
        angle_rad, scale = torch.rand(2, samples, generator=generator) + 0.5
        cos, sin = scale * angle_rad.cos(), scale * angle_rad.sin()
        shift = torch.rand(samples, 2, 1, generator=generator) * 0.2 - 0.1
        matrix = torch.cat([torch.stack([cos, -sin, sin, cos], dim=1).view(-1, 2, 2), shift], dim=2)
        pixels = torch.randint(0, 256, (samples, 3, side_px, side_px), generator=generator, dtype=torch.uint8)
        return View(pixels.contiguous(memory_format=torch.channels_last), matrix, SIDE_PX * matrix)

    row = torch.arange(samples)
    keypoints_px = torch.randn(samples, 3, 2, generator=generator).numpy()
    return Batch((view(), view()), row[:, None].expand(-1, 2), row, all_keypoints_px=keypoints_px)


def part(batch: Batch, rows: range) -> Batch:
    cut = slice(rows.start, rows.stop)
    views = tuple(View(v.image[cut], v.matrix[cut], v.source_to_view_px[cut]) for v in batch.views)
    return dataclasses.replace(batch, views=views, samples=batch.samples[cut], positions=batch.positions[cut])


def to_double(image: Tensor) -> Tensor:
    return image.double() / 255


def to_float(image: Tensor) -> Tensor:
    return image.float() / 255


def exact_step(
    model: nn.Module,
    loss: Callable[..., Tensor] = NT_XENT,
    *,
    preprocess: Callable[[Tensor], Tensor] = to_double,
    autocast_dtype: torch.dtype | None = None,
    kept_graphs: int | None = None,
    **settings: Any,
) -> ExactStep[Batch]:
    """A step of `batch` images with the latent inverse; `kept_graphs` as if it had been measured."""
    embed = ViewEmbedder(lambda image: model(preprocess(image)), UNDO, autocast_dtype)
    step = ExactStep(model, embed, loss, loss_inputs=lambda batch: inputs_of(loss, batch), **settings)
    step.kept_graphs = step.kept_graphs if kept_graphs is None else kept_graphs
    return step


class Pretraining:
    """The network, state and step of pre-training without a run; ten steps per epoch, the same weights each time.

    Attributes:
        step: the exact step, or its recording.
    """

    def __init__(self, config: Config, world: World | None = None) -> None:
        torch.manual_seed(0)
        world = world or World()
        built = build_network(config.encoder, config.projector, config.geometry.side_px)
        self.network = on_device(built, config, world)
        self.state: TrainState = build_state(config, self.network, pretraining_optimizer(config, self.network), 10)
        self.exact = build_step(config, self.network, self.state, world)
        self.step: Callable[[Batch], StepResult] = self.exact
        if is_recorded(config, world):
            self.step = StepGraph(self.exact)

    def take_step(self, batch: Batch) -> StepResult:
        """A step of the training loop."""
        result = self.step(batch)
        self.state.update()
        return result


class OfKeypoints(AnchorLoss):
    """A sum over anchors that takes the keypoints: the likeness of embeddings, times the distance of the hands."""

    def share(self, embeddings: Tensor, rows: range, keypoints_px: Tensor | None = None) -> Tensor:
        assert keypoints_px is not None
        anchors = slice(rows.start, rows.stop)
        first, second = keypoints_px.flatten(2).to(embeddings.dtype)
        likeness = F.normalize(embeddings[0, anchors]) @ F.normalize(embeddings[1]).T
        return (likeness.exp() * torch.cdist(first[anchors], second)).sum()


def spread(embeddings: Tensor) -> Tensor:
    """A loss of the mean and covariance of the whole batch, which is no sum over anchors."""
    centred = embeddings - embeddings.mean(dim=1, keepdim=True)
    covariance = centred.mT @ centred / (embeddings.shape[1] - 1)
    unlike = (covariance - torch.eye(embeddings.shape[2], dtype=embeddings.dtype)).square().sum()
    return (embeddings[0] - embeddings[1]).square().sum(dim=1).mean() + unlike + embeddings.mean(dim=1).sin().sum()


def inputs_of(loss: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, ...]:
    return keypoints_of_pairs(batch) if isinstance(loss, OfKeypoints) else ()


def run(
    model: nn.Module,
    samples: int,
    micro_batch: int,
    recompute: Recompute = "never",
    world: World | None = None,
    loss: Callable[..., Tensor] = NT_XENT,
    **settings: Any,
) -> StepResult:
    world = world or World()
    step = exact_step(model, loss, batch=samples, micro_batch=micro_batch, recompute=recompute, world=world, **settings)
    return step(part(images(samples), step.share))


class Operators(TorchDispatchMode):
    """Counts the operators of the `with` block by name and type of their first tensor: ("add_", torch.int64).

    Attributes:
        largest: the number of elements of the largest tensor that one of them gives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, torch.dtype | None]] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = next((one.dtype for one in tree_leaves(args) if isinstance(one, Tensor)), None)
        self.counts[operator._schema.name.removeprefix("aten::"), dtype] += 1
        result = operator(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(one.numel() for one in tree_leaves(result) if isinstance(one, Tensor))])
        return result


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(ours: list[Tensor], theirs: list[Tensor], relative: float = 1e-10) -> None:
    """Each tensor's difference is small against its largest number."""
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= relative * float(b.abs().max())


def plain_gradients(
    model: nn.Module, samples: int, micro_batch: int, loss_of: Callable[..., Tensor] = NT_XENT
) -> tuple[Tensor, list[Tensor]]:
    """Autograd through everything at once; batch norm sees micro-batches."""
    batch = images(samples)
    views: list[list[Tensor]] = [[], []]
    for start in range(0, samples, micro_batch):
        small = part(batch, range(start, start + micro_batch))
        image = torch.cat([to_double(view.image) for view in small.views])
        matrix = torch.cat([view.matrix for view in small.views])
        for k, embedding in enumerate(UNDO(model(image), matrix, matrix).chunk(2)):
            views[k].append(embedding)
    loss = loss_of(torch.stack([torch.cat(view) for view in views]), *inputs_of(loss_of, batch))
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))
