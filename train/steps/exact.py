"""The exact gradient of a loss on the embeddings of the whole batch, in micro-batches, on any number of ranks.

Such a loss couples all samples, so its gradient is not a mean over micro-batches. It does split into parts: embed all
micro-batches; take the loss of all embeddings and its gradient with respect to them; send that gradient back through
each micro-batch's network. If memory allows, the graphs of the first part are kept, else each is built again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor

from peclr_dali.models.losses.loss import AnchorLoss
from peclr_dali.models.losses.tensors import require_floats
from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.steps.batch_statistics import one_momentum_step
from peclr_dali.train.steps.memory import free_bytes, with_graph_bytes
from peclr_dali.train.steps.micro_batches import MicroBatchStep

log = logging.getLogger(__name__)

Recompute = Literal["auto", "always", "never"]
B = TypeVar("B", bound=Sized)

# The rest is for the temporary tensors of the backward pass and for whatever else lives on the device.
_SHARE_OF_FREE_MEMORY = 0.8
# Of the largest embedding. Autocast with bfloat16 rounds to 0.4 %, in another order perhaps; dropout changes half.
_RECOMPUTE_TOLERANCE = 0.05


@dataclass(frozen=True)
class StepResult:
    """Result of one step, besides the gradients. All tensors are on the device and without graph.

    Attributes:
        loss: scalar, of the global batch.
        embeddings: (V, N, D), of all N samples of the global batch in global order.
        recompute_difference: scalar, the largest absolute difference between an embedding and its recomputed self
            over all ranks; None if nothing was recomputed.
    """

    loss: Tensor
    embeddings: Tensor
    recompute_difference: Tensor | None


@dataclass(eq=False)
class ExactStep(MicroBatchStep, Generic[B]):
    """Loss and gradient of one global batch, for any module and any loss on its embeddings.

    `recompute` does not change the gradient. The network must be a function of its input, parameters and batch
    statistics. Dropout would draw other masks when recomputing; the first call warns of this. Other attributes as
    `MicroBatchStep`.

    Attributes:
        embed: function that takes a batch and the rows of one micro-batch, and returns embeddings of V views with
            graph, (V, n, D). It must call the network once, since batch norm counts only the last call.
        loss: function that takes the embeddings (V, N, D) of the whole batch, and returns a scalar. The ranks share the
            work of an `AnchorLoss`. Any other loss is computed completely on every rank, with the same result on all.
        recompute: "never" keeps the graphs of all micro-batches. "always" keeps one graph at a time and recomputes.
            "auto" measures the graph of the first micro-batch, and becomes "never" if all graphs fit into free memory,
            else "always".

    Example:
        >>> def embed(images, rows):  # images (N, V, C, H, W)
        ...     views = images[rows].transpose(0, 1)
        ...     return network(views.flatten(0, 1)).unflatten(0, views.shape[:2])
        >>> step = ExactStep(network, embed, NTXent(), batch=2048, micro_batch=128)
        >>> loss = step(images).loss  # and the gradient is in .grad
    """

    embed: Callable[[B, slice], Tensor]
    loss: Callable[[Tensor], Tensor]
    recompute: Recompute = field(default="auto", kw_only=True)
    _is_compared: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (callable(self.embed) and callable(self.loss)):
            raise TypeError(f"embed = {self.embed!r} and loss = {self.loss!r}: expected two functions")
        if self.recompute not in get_args(Recompute):
            raise ValueError(f"recompute = {self.recompute!r}: expected one of {', '.join(get_args(Recompute))}")
        if self.recompute == "auto" and self.batch // self.micro_batch == self.world.world_size:
            self.recompute = "never"  # one micro-batch everywhere

    def __call__(self, batch: B) -> StepResult:
        """Write the gradient of the loss, summed over ranks, to `.grad`. Earlier gradients are dropped.

        Args:
            batch: this rank's share of the global batch, on its device; its `len` is the number of samples.

        Raises:
            TypeError: `embed` or `loss` gives something else than a tensor of floats.
            ValueError: the batch is of another size than this rank's share, or what `embed` or `loss` gives has another
                shape or no graph.
        """
        micro_batches = self.begin(batch)
        with one_momentum_step(self.network, self.world, self.batch // self.micro_batch) as add_statistics:
            embedded = []  # of each micro-batch (V, n, D); with its graph if that is kept
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
            self.sum_gradients()
            if difference is not None:
                difference = self.world.max_(difference)
                self._compare_once(difference, embeddings)
        return StepResult(loss, embeddings, difference)

    def _compare_once(self, difference: Tensor, embeddings: Tensor) -> None:
        """Warn in the first step only: reading a number waits for the GPU."""
        if self._is_compared:
            return
        self._is_compared = True
        share = (difference / embeddings.abs().amax()).item()
        if share > _RECOMPUTE_TOLERANCE and self.world.is_main:
            log.warning(
                "recomputed embeddings differ from the first ones by %.0f %% of the largest value: the gradient is "
                "wrong. Take dropout out of the network, or set recompute = 'never'",
                100 * share,
            )

    def _embed_first(self, batch: B, rows: slice) -> Tensor:
        # With graph even if it is dropped at once: both passes then run the same kernels, compiled ones included, and
        # the second pass needs the memory anyway.
        if self.recompute == "auto":
            embedding, graph_bytes = with_graph_bytes(self.network, lambda: self.embed(batch, rows), self.world.device)
            self.recompute = self._decide(graph_bytes)
        else:
            embedding = self.embed(batch, rows)
        require_floats("what embed gives", embedding, ("V", rows.stop - rows.start, "D"))
        if not embedding.requires_grad:
            raise ValueError("what embed gives has no graph: is the whole network frozen, or does embed detach it?")
        return embedding.detach() if self.recompute == "always" else embedding

    def _decide(self, graph_bytes: int) -> Recompute:
        count = len(self.share) // self.micro_batch
        free = free_bytes(self.world) + graph_bytes  # the first graph is in memory already
        lacks = torch.tensor(float(count * graph_bytes > _SHARE_OF_FREE_MEMORY * free), device=self.world.device)
        decision: Recompute = "always" if self.world.max_(lacks).item() else "never"
        message = "recompute = %r: %.2f GiB for the graphs of %d micro-batches, %.2f GiB free"
        log.info(message, decision, count * graph_bytes / 2**30, count, free / 2**30)
        return decision

    def _loss_and_gradient(self, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, embeddings (V, N, D) of all ranks, and this rank's gradient (V, n, D) times the loss scale."""
        embeddings = self.world.gather_rows(local, self.share, self.batch, dim=1)
        leaf = embeddings.requires_grad_()
        shared = self.loss if isinstance(self.loss, AnchorLoss) else None
        loss = self.loss(leaf) if shared is None else shared.share(leaf, self.share)
        require_floats("what loss gives", loss, ())
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True) if loss.requires_grad else (None,)
        if gradient is None:
            raise ValueError("what loss gives has no graph to the embeddings: does it detach them?")
        loss = loss.detach()
        if shared is not None:
            gradient, loss = self.world.sum_(gradient), self.world.sum_(loss)
        gradient = gradient[:, self.share.start : self.share.stop]
        if self.scaler is not None:
            gradient = self.scaler.scale(gradient)
        return loss, embeddings.detach(), gradient


def embed_views(
    network: Callable[[Tensor], Tensor],
    undo: Callable[[Tensor, Tensor, Tensor], Tensor],
    batch: Batch,
    rows: slice,
    *,
    autocast_dtype: torch.dtype | None = None,
) -> Tensor:
    """Embed both views of some samples by the network and the latent inverse, with graph. Use it as `ExactStep.embed`.

    Args:
        network: (2n, 3, S, S) uint8 to (2n, D) projections.
        undo: projections, matrices (2n, 2, 3) and source_to_view_px (2n, 2, 3) to embeddings (2n, D), as
            `peclr_dali.models.equivariance.build_undo` makes it.
        batch: at least two views; the first two are used.
        rows: the rows of the n samples in `batch`.
        autocast_dtype: 16-bit type for the network; None: no autocast. The latent inverse has at least 32 bits.

    Returns:
        (2, n, D).

    Raises:
        TypeError: the network gives something else than a tensor of floats.
        ValueError: the batch has one view, or the network gives another shape.
    """
    if len(batch.views) < 2:
        raise ValueError(f"the batch has {len(batch.views)} view, expected at least two: give make_loader views=2")
    first, second = batch.views[:2]
    image = torch.cat([first.image[rows], second.image[rows]])
    matrix = torch.cat([first.matrix[rows], second.matrix[rows]])
    source_to_view_px = torch.cat([first.source_to_view_px[rows], second.source_to_view_px[rows]])
    with torch.autocast(image.device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
        projection = network(image)
    require_floats("what the network gives", projection, (len(image), "D"))
    if projection.dtype != torch.float64:
        projection = projection.float()
    return undo(projection, matrix, source_to_view_px).view(2, -1, projection.shape[1])
