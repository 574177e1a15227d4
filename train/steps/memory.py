"""Measures free memory and the memory of autograd graphs."""

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from peclr_dali.train.distributed.world import World

# torch allocates a multiple of this on a GPU (kMinBlockSize of its caching allocator).
_BLOCK_BYTES = 512

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


class GraphBytes(saved_tensors_hooks):
    """Counts the bytes that the autograd graph of the `with` block keeps for the backward pass.

    These are the saved tensors, each memory block once and rounded up as torch does it on a GPU, without the network's
    own parameters and buffers. What other threads allocate meanwhile does not count.

    Attributes:
        count: bytes so far.
    """

    def __init__(self, network: nn.Module) -> None:
        # A compiled network would also compile the hook, for every shape.
        super().__init__(torch.compiler.disable(self._note), lambda saved: saved)  # type: ignore[no-untyped-call]
        self.count = 0
        self._seen = {tensor.untyped_storage() for tensor in [*network.parameters(), *network.buffers()]}

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._seen.clear()  # what keeps the hook must not keep the saved memory

    def _note(self, saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            self.count += -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        return saved.detach()  # otherwise a saved result and its node would reference each other and never be freed
