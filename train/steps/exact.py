"""The exact gradient of a loss on the embeddings of the whole batch, in micro-batches, on any number of ranks.

Such a loss couples all samples, so its gradient is not a mean over micro-batches. It does split into parts: embed all
micro-batches; take the loss of all embeddings and its gradient with respect to them; send that gradient back through
each micro-batch's network. As many graphs of the first part are kept as memory allows; the others are built again.
"""

import logging
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from peclr_dali.models.nt_xent import AnchorLoss
from peclr_dali.models.tensor_checks import require_floats
from peclr_dali.train.steps.memory import HEADROOM_BYTES, GraphBytes, free_bytes
from peclr_dali.train.steps.micro_batches import MicroBatchStep, casts_once, one_momentum_step

log = logging.getLogger(__name__)

Recompute = Literal["auto", "always", "never"]
B = TypeVar("B", bound=Sized)

# Of a CPU's free memory, for graphs. The rest is for other processes, since Linux may kill one when memory ends.
_SHARE_OF_CPU = 0.8
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
        loss_inputs: function that takes a batch, and returns further tensors (V, n, ...), such as keypoints. The loss
            gets those of the whole batch after the embeddings, without graph. By default there are none.
        recompute: "never" keeps the graphs of all micro-batches. "always" keeps none and recomputes each. "auto" keeps
            as many as fit, by the size of the first one, and at least one: into the memory that is free when the step
            is made, without `reserved_bytes`, gradients, those of one micro-batch and Adam's two moments. So make it
            before the loader and the optimiser take theirs. If a GPU lacks memory all the same, a single process keeps
            one less and repeats the step.
        reserved_bytes: memory of the device that batches will take, those that the loader makes ahead among them.
        spare_graphs: so many graphs less than fit are kept by "auto", at least one: for what else needs memory, such as
            a probe beside a `StepGraph`.
        kept_graphs: number of micro-batches whose graphs a rank keeps, the last ones, the same on all ranks. The others
            are computed twice. None until "auto" has measured, in the first call.
    """

    embed: Callable[[B, slice], Tensor]
    loss: Callable[..., Tensor]
    loss_inputs: Callable[[B], Sequence[Tensor]] = field(default=lambda _: (), kw_only=True)
    recompute: Recompute = field(default="auto", kw_only=True)
    reserved_bytes: int = field(default=0, kw_only=True)
    spare_graphs: int = field(default=0, kw_only=True)
    kept_graphs: int | None = field(init=False, default=None)
    _free_bytes: int = field(init=False, default=0)
    _is_checked: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.loss, type):
            raise TypeError(f"loss is the class {self.loss.__name__}: give a loss, such as {self.loss.__name__}()")
        if self.batch < 2 and isinstance(self.loss, AnchorLoss):
            raise ValueError(f"batch = {self.batch}: one sample has no negatives; expected two or more")
        if self.recompute == "always":
            self.kept_graphs = 0
        elif self.recompute == "never" or self._largest_share == 1:
            self.kept_graphs = self._largest_share
        else:  # not later: how many batches and moments are in memory in the first step differs from run to run
            self._free_bytes = free_bytes(self.world, HEADROOM_BYTES)

    def __call__(self, batch: B) -> StepResult:
        """Write the gradient of the loss, summed over ranks, to `.grad`. Earlier gradients are dropped.

        Args:
            batch: this rank's share of the global batch, on its device; its `len` is the number of samples.

        Raises:
            TypeError: `embed` or `loss` gives something else than a tensor of floats.
            ValueError: the batch is of another size than this rank's share, or what `embed` or `loss` gives has another
                shape, no graph, or a graph to parameters outside of the network.
        """
        while True:
            try:
                return self._step(batch)
            except torch.OutOfMemoryError:  # other ranks cannot know of it, and wait in a collective
                kept = self.kept_graphs or 0
                if self.recompute != "auto" or kept < 2 or self.world.world_size > 1:
                    raise
            self.kept_graphs = kept - 1  # the exception is gone, and with it the graphs that its frames held
            log.warning("out of memory: keeps %d instead of %d graphs from now on", kept - 1, kept)

    def _step(self, batch: B) -> StepResult:
        micro_batches, device = self.begin(batch), self.world.device
        of_all_ranks = self.batch // self.micro_batch
        with casts_once(device), one_momentum_step(self.network, self.world, of_all_ranks) as add_statistics:
            embedded = []  # of each micro-batch (V, n, D); with its graph if that is kept
            with self.own_work.running(device):
                for left, rows in zip(range(len(micro_batches), 0, -1), micro_batches, strict=True):
                    # With graph even if it is dropped at once: both passes then run the same kernels, compiled ones
                    # included, and the second pass needs the memory anyway.
                    if self.kept_graphs is None:
                        graph = GraphBytes(self.network)
                        with graph:
                            embedding = self.embed(batch, rows)
                        self.kept_graphs = self._fitting(graph.count)
                    else:
                        embedding = self.embed(batch, rows)
                    self._require_embedding(embedding, rows)
                    if left > self.kept_graphs:
                        embedding = embedding.detach()
                    embedded.append(embedding)
                    add_statistics()

            loss, embeddings, gradient = self._loss_and_gradient(
                torch.cat([e.detach() for e in embedded], dim=1), batch
            )

            changes = [embeddings.new_zeros(())]
            with self.own_work.running(device):
                # The last first, for any number of kept graphs: gradients are summed in the same order, and kept graphs
                # are free before others are built again.
                for rows in reversed(micro_batches):
                    first = embedded.pop()
                    embedding = first if first.requires_grad else self.embed(batch, rows)
                    self.backward(embedding, gradient[:, rows], last=rows is micro_batches[0])
                    if not first.requires_grad:
                        changes.append((embedding.detach() - first).abs().amax())
            self.sum_gradients()
            difference = None
            if self.kept_graphs != self._largest_share:  # the same on all ranks
                difference = self.world.max_(torch.stack(changes).amax())
                if not self._is_checked:  # in the first step only: reading a number waits for the GPU
                    share = (difference / embeddings.abs().amax()).item()
                    if share > _RECOMPUTE_TOLERANCE and self.world.is_main:
                        log.warning(
                            "recomputed embeddings differ from the first ones by %.0f %% of the largest value: the "
                            "gradient is wrong. Take dropout out of the network, or set recompute = 'never'",
                            100 * share,
                        )
        self._is_checked = True
        return StepResult(loss, embeddings, difference)

    @property
    def _largest_share(self) -> int:
        """The largest number of micro-batches of a rank."""
        return -(-self.batch // self.micro_batch // self.world.world_size)

    def _require_embedding(self, embedding: Tensor, rows: slice) -> None:
        """Errors as `__call__`."""
        require_floats("what embed gives", embedding, ("V", rows.stop - rows.start, "D"))
        if not embedding.requires_grad:
            raise ValueError("what embed gives has no graph: is the whole network frozen, or does embed detach it?")
        self._refuse_others("embed has parameters that are not in `network`", embedding, self.network.parameters())

    def _refuse_others(self, found: str, result: Tensor, known: Iterable[Tensor]) -> None:
        """In the first step: a ValueError if other tensors would get a gradient, which no rank would sum or drop."""
        if self._is_checked:
            return
        leaves, seen = {None, *known}, set[Any]()
        nodes: set[Any] = {result.grad_fn} - {None}
        while nodes:
            seen.add(node := nodes.pop())
            if getattr(node, "variable", None) not in leaves:
                raise ValueError(f"{found}: make them part of it")
            nodes |= {following for following, _ in node.next_functions} - seen - {None}

    def _fitting(self, graph_bytes: int) -> int:
        """How many graphs fit on every rank. All ranks call this together."""
        largest = self._largest_share
        weights = sum(p.nbytes for p in self.network.parameters() if p.requires_grad)
        share = 1 if self.world.device.type == "cuda" else _SHARE_OF_CPU
        # Gradients, those of one micro-batch, Adam's two moments.
        usable = int(share * self._free_bytes) - self.reserved_bytes - 4 * weights
        # One graph at a time has to fit in any case, and the last one is used at once.
        fitting = min(max(usable // max(graph_bytes, 1) - self.spare_graphs, 1), largest)
        kept = min(self.world.gather_objects(fitting))
        log.info(
            "recompute = 'auto': keeps %d of %d graphs of %.2f GiB each, %.2f GiB for them",
            *(kept, largest, graph_bytes / 2**30, usable / 2**30),
        )
        return kept

    def _loss_and_gradient(self, local: Tensor, batch: B) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, embeddings (V, N, D) of all ranks, and this rank's gradient (V, n, D) times the loss scale."""
        embeddings = self.world.gather_rows(local, self.share, self.batch, dim=1)
        inputs = [self.world.gather_rows(table, self.share, self.batch, dim=1) for table in self.loss_inputs(batch)]
        leaf = embeddings.requires_grad_()
        shared = self.loss if isinstance(self.loss, AnchorLoss) else None
        loss = self.loss(leaf, *inputs) if shared is None else shared.share(leaf, self.share, *inputs)
        require_floats("what loss gives", loss, ())
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True) if loss.requires_grad else (None,)
        if gradient is None:
            raise ValueError("what loss gives has no graph to the embeddings: does it detach them?")
        self._refuse_others("loss has parameters, which get no gradient", loss, [leaf])
        loss = loss.detach()
        if shared is not None:
            self.world.sum_in_buckets_([gradient, loss])
        return loss, embeddings.detach(), self.scaler.scale(gradient[:, self.share.start : self.share.stop])
