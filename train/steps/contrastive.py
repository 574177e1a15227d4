"""One training step: the exact gradient of the full contrastive batch, in micro-batches, on any number of ranks.

The loss couples all samples, so its gradient is not a mean over micro-batches. It does split into two parts: embed all
micro-batches; take the loss of all embeddings and its gradient with respect to them; send that gradient back through
each micro-batch's network. If memory allows, the graphs of the first part are kept, else each is built again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from models.health import health
from models.losses import nt_xent_rows
from pipelines.batch import Batch
from train.distributed.watchdog import activity
from train.distributed.world import World, micro_batch_share
from train.steps.batch_statistics import one_momentum_step
from train.steps.memory import free_bytes, with_graph_bytes
from train.steps.stopwatch import Stopwatch

log = logging.getLogger(__name__)

Recompute = Literal["auto", "always", "never"]

# The rest is for the temporary tensors of the backward pass and for whatever else lives on the device.
_SHARE_OF_FREE_MEMORY = 0.8


@dataclass(frozen=True)
class StepResult:
    """What one step gives besides the gradients; all on the device and without graph.

    Attributes:
        loss: scalar, mean over the 2N anchors of the global batch.
        embeddings: (2, N, D), both views of all N samples of the global batch in global order, after the inverse.
        recompute_difference: scalar, the largest absolute difference between an embedding and its recomputed self
            over all ranks; None if nothing was recomputed.
    """

    loss: Tensor
    embeddings: Tensor
    recompute_difference: Tensor | None

    def figures(self) -> dict[str, float]:
        """What a row of metrics says besides the loss; waits for the device."""
        return {name: figure.item() for name, figure in health(self.embeddings)._asdict().items()}


@dataclass(eq=False)
class ContrastiveStep:
    """Loss and gradient of one global batch; the optimiser is the caller's.

    Batch norm sees one micro-batch, both views of its images together. Running statistics take one momentum step per
    call, towards the mean of the statistics of all micro-batches on all ranks. So loss, gradient and buffers depend on
    `micro_batch`, but not on the number of ranks, up to the order of sums, nor on `recompute`. The network must be a
    function of its input, parameters and batch statistics; dropout would draw other masks when recomputing.

    Attributes:
        network: (n, 3, S, S) image to (n, D) projection; may be compiled.
        undo: projections (n, D), matrices (n, 2, 3) and source_to_view_px (n, 2, 3) to embeddings (n, D), as
            `models.equivariance.build_undo` makes it.
        batch: source images of a global batch.
        micro_batch: source images that go through the network together; divides `batch`.
        preprocess: the pictures of a batch (n, 3, S, S) uint8 to the network's input; None hands them over as they are.
        temperature: of the loss.
        recompute: "never" keeps the graphs of all micro-batches, "always" of one at a time, "auto" measures the first
            micro-batch of the first call, keeps all if they fit into free memory, and is no longer "auto" then.
        autocast_dtype: 16-bit type for the network; None for none. Inverse and loss have at least 32 bits.
        scaler: scales the gradients, which the caller unscales (fp16).
        world: this rank among all.
        share: the positions within the global batch that this rank's batches hold.
        own_work: times what this rank does without the others.

    Raises:
        UserError: `batch` is not made of whole micro-batches, or there are fewer of them than ranks.
    """

    network: nn.Module
    undo: Callable[[Tensor, Tensor, Tensor], Tensor]
    _: KW_ONLY
    batch: int
    micro_batch: int
    preprocess: Callable[[Tensor], Tensor] | None = None
    temperature: float = 0.5
    recompute: Recompute = "auto"
    autocast_dtype: torch.dtype | None = None
    scaler: GradScaler | None = None
    world: World = field(default_factory=World)
    share: range = field(init=False)
    own_work: Stopwatch = field(init=False, default_factory=Stopwatch)

    def __post_init__(self) -> None:
        self.share = micro_batch_share(self.batch, self.micro_batch, self.world.rank, self.world.world_size)
        if self.recompute == "auto" and self.batch // self.micro_batch == self.world.world_size:
            self.recompute = "never"  # one micro-batch everywhere

    def __call__(self, batch: Batch) -> StepResult:
        """Leaves the gradient of the mean loss, summed over ranks, in `.grad`, in place of what was there.

        Of this rank's share of the global batch, on its device, the first two views are used.

        Raises:
            ValueError: the batch is of another size than this rank's share.
        """
        if len(batch) != len(self.share):
            raise ValueError(f"a batch of {len(batch)} samples, but this rank's share is {len(self.share)}")
        micro_batches = [slice(i, i + self.micro_batch) for i in range(0, len(batch), self.micro_batch)]
        for parameter in self.network.parameters():
            parameter.grad = None
        with one_momentum_step(self.network, self.world, self.batch // self.micro_batch) as add_statistics:
            embedded = []  # of each micro-batch (2, n, D); with its graph if that is kept
            with self.own_work.running(self.world.device):
                for rows in micro_batches:
                    embedded.append(self._embed_first(batch, rows))
                    add_statistics()

            loss, embeddings, gradient = self._loss_and_gradient(torch.cat([e.detach() for e in embedded], dim=1))

            difference = None
            with self.own_work.running(self.world.device):
                for first, rows in zip(embedded, micro_batches, strict=True):
                    embedding = self.embed(batch, rows) if self.recompute == "always" else first
                    torch.autograd.backward([embedding], [gradient[:, rows]])
                    if self.recompute == "always":
                        change = (embedding.detach() - first).abs().amax()
                        difference = change if difference is None else torch.maximum(difference, change)
            self.world.sum_in_buckets_([p.grad for p in self.network.parameters() if p.grad is not None])
            if difference is not None:
                difference = self.world.max_(difference)
        return StepResult(loss, embeddings, difference)

    def embed(self, batch: Batch, rows: slice) -> Tensor:
        """Both views of one micro-batch through network and inverse, with graph: (2, n, D)."""
        activity.moved()
        first, second = batch.views[:2]
        image = torch.cat([first.image[rows], second.image[rows]])  # (2n, 3, S, S)
        matrix = torch.cat([first.matrix[rows], second.matrix[rows]])  # (2n, 2, 3)
        source_to_view_px = torch.cat([first.source_to_view_px[rows], second.source_to_view_px[rows]])
        if self.preprocess is not None:
            image = self.preprocess(image)
        enabled = self.autocast_dtype is not None
        with torch.autocast(self.world.device.type, dtype=self.autocast_dtype, enabled=enabled):
            projection = self.network(image)  # (2n, D)
        if projection.dtype != torch.float64:
            projection = projection.float()
        return self.undo(projection, matrix, source_to_view_px).view(2, -1, projection.shape[1])

    def _embed_first(self, batch: Batch, rows: slice) -> Tensor:
        # With graph even if it is dropped at once: both passes then run the same kernels, compiled ones included, and
        # the second pass needs the memory anyway.
        if self.recompute == "auto":
            embedding, graph_bytes = with_graph_bytes(self.network, lambda: self.embed(batch, rows), self.world.device)
            self.recompute = self._decide(graph_bytes)
        else:
            embedding = self.embed(batch, rows)
        return embedding.detach() if self.recompute == "always" else embedding

    def _decide(self, graph_bytes: int) -> Recompute:
        count = len(self.share) // self.micro_batch
        free = free_bytes(self.world) + graph_bytes  # the first graph is in memory already
        lacks = torch.tensor(float(count * graph_bytes > _SHARE_OF_FREE_MEMORY * free), device=self.world.device)
        decision: Recompute = "always" if self.world.max_(lacks).item() else "never"
        told = "recompute = %r: %.2f GiB for the graphs of %d micro-batches, %.2f GiB free"
        log.info(told, decision, count * graph_bytes / 2**30, count, free / 2**30)
        return decision

    def _loss_and_gradient(self, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Global loss, global embeddings (2, N, D), and the gradient for this rank's embeddings (2, n, D), scaled."""
        embeddings = self.world.gather_rows(local, self.share, self.batch, dim=1)
        leaf = embeddings.requires_grad_()
        loss = nt_xent_rows(leaf, self.share, self.temperature)  # local anchors, global columns
        (gradient,) = torch.autograd.grad(loss, leaf)
        gradient = self.world.sum_(gradient)[:, self.share.start : self.share.stop]
        if self.scaler is not None:
            gradient = self.scaler.scale(gradient)
        return self.world.sum_(loss.detach()), embeddings.detach(), gradient
