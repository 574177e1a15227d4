"""Measures free memory and the memory of autograd graphs."""

from __future__ import annotations

from collections.abc import Callable

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

from peclr_dali.train.distributed.world import World

_BLOCK_BYTES = 512
"""torch allocates a multiple of this on a GPU (kMinBlockSize of its caching allocator)."""

HEADROOM_BYTES = 3 * 2**29
"""Of a GPU, left to what is not counted: DALI, the libraries' kernels and workspaces, gaps between blocks."""


def free_bytes(world: World, headroom_bytes: int = 0) -> int:
    """Free bytes for this rank on its device; on the CPU, its share of the machine's.

    On a GPU, what torch holds unused is free, and torch's limit for this process counts, by
    `set_per_process_memory_fraction` or by PYTORCH_ALLOC_CONF.

    `headroom_bytes` of a GPU are left to others than torch, so they do not count towards torch's limit.
    """
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        reserved = torch.cuda.memory_reserved(world.device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(world.device) * total) - reserved
        return max(0, min(free - headroom_bytes, allowed) + reserved - torch.cuda.memory_allocated(world.device))
    return int(psutil.virtual_memory().available / world.local_world_size)


def with_graph_bytes(network: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Run `forward`: its result with graph, and the bytes that the graph keeps for the backward pass.

    This is the sum of the saved tensors, each memory block once and rounded up as torch does it on a GPU, without the
    network's own parameters and buffers. What other threads allocate meanwhile does not count.
    """
    seen = {tensor.untyped_storage() for tensor in [*network.parameters(), *network.buffers()]}
    count = 0

    def note(saved: Tensor) -> Tensor:
        nonlocal count
        storage = saved.untyped_storage()
        if storage not in seen:
            seen.add(storage)
            count += -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        return saved.detach()  # otherwise a saved result and its node would reference each other and never be freed

    # A compiled network would also compile the hook, for every shape.
    note = torch.compiler.disable(note)  # type: ignore[no-untyped-call]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        result = forward()
    seen.clear()  # what keeps the hook must not keep the saved memory
    return result, count
