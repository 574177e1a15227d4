"""How much memory an autograd graph holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def with_graph_bytes(network: nn.Module, forward: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, int]:
    """Runs `forward` and counts what its graph keeps for the backward pass.

    On a GPU that is what the allocator hands out meanwhile and does not get back. On the CPU the saved tensors are
    counted, each memory block once, without the network's own parameters and buffers.

    Returns:
        The result of `forward` with its graph, and the bytes.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        result = forward()
        return result, torch.cuda.memory_allocated(device) - allocated

    own = {tensor.untyped_storage().data_ptr() for tensor in [*network.parameters(), *network.buffers()]}
    blocks: dict[int, int] = {}  # address to bytes; none is reused while the graph lives

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in own:
            blocks[storage.data_ptr()] = storage.nbytes()
        return saved.detach()  # else a saved result and its node would keep each other alive

    # A compiled network would compile the hook as well, for every shape.
    note = torch.compiler.disable(note)  # type: ignore[no-untyped-call]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        result = forward()
    return result, sum(blocks.values())
