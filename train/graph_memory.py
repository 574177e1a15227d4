"""How much memory an autograd graph holds, and how much there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from train.distributed.world import World


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


def free_bytes(world: World) -> int:
    """Memory that this rank may still take on its device; on the CPU, its part of what the machine has."""
    if world.device.type == "cuda":
        cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
        return torch.cuda.mem_get_info(world.device)[0] + cached
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 // world.local_world_size
