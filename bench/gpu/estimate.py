"""Counts what a training step does on a card of make-believe, and computes how long a real card would take for it.

Counted are live bytes, kernels, floating-point operations and bytes moved. Not counted: the allocator's fragmentation,
workspaces of cuDNN and cuBLAS, the driver's context, DALI, and the loader's batches ahead; the step leaves memory for
them. Nothing is timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock
from weakref import ref

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from peclr_dali.bench.gpu.card.card import CUDA, Card, CardTensor, card, leaves
from peclr_dali.bench.gpu.card.environment import card_environment
from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.shipped import PACKAGE
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pretrain import Pretraining


class Gpu(NamedTuple):
    """A card, by its maker's figures: memory bandwidth, and dense operations per second.

    Attributes:
        overlay: the file of configs/cards/ for it.
        peak_16_bit: of products of 16-bit numbers, summed in 32 bits.
        peak_32_bit: of all others.
    """

    name: str
    overlay: str
    memory_bytes: float
    bytes_per_s: float
    peak_16_bit: float
    peak_32_bit: float
    has_bf16: bool = True


GPUS: Final = (
    Gpu("RTX 2080 Ti", "rtx_11gb", 11 * 2**30, 616e9, 53.8e12, 13.4e12, has_bf16=False),
    Gpu("RTX 3090", "rtx_24gb", 24 * 2**30, 936e9, 71e12, 35.6e12),
    Gpu("RTX 4090", "rtx_24gb", 24 * 2**30, 1008e9, 165.2e12, 82.6e12),
    Gpu("A100, 40 GB", "a100", 40 * 2**30, 1555e9, 312e12, 19.5e12),
    Gpu("A100, 80 GB", "a100", 80 * 2**30, 2039e9, 312e12, 19.5e12),
    Gpu("H100, 80 GB", "h100", 80 * 2**30, 3350e9, 989.5e12, 67e12),
)
"""Cards of one overlay and memory stand together: they are counted once."""

COUNTED: Final = ("encoder.weights=random", "probe.every_epochs=0", "train.compile=false", "train.cuda_graph=false")
"""Settings of every counted step. What torch.compile fuses is not seen, so it is off; the card records nothing."""


class Assumed(NamedTuple):
    """What kernels reach of a card: shares of its bandwidth and of its peak, and the least time of one."""

    bandwidth_share: float
    peak_share: float
    kernel_s: float


ASSUMED: Final = (Assumed(0.85, 0.6, 2e-6), Assumed(0.95, 0.75, 1e-6), Assumed(0.7, 0.45, 4e-6))
"""The likely values, and the best and the worst ones. Nobody measured them."""


class Operator(NamedTuple):
    """What a call of an operator takes: bytes read and written, floating-point operations, and kernels."""

    bytes: int
    flop: int
    kernels: int
    is_16_bit: bool

    def seconds(self, gpu: Gpu, assumed: Assumed) -> float:
        """The roofline: the longest of moving the bytes, of computing, and of the kernels' least time."""
        peak = gpu.peak_16_bit if self.is_16_bit else gpu.peak_32_bit
        return max(
            self.bytes / (gpu.bytes_per_s * assumed.bandwidth_share),
            self.flop / (peak * assumed.peak_share),
            self.kernels * assumed.kernel_s,
        )


_BLOCK_BYTES: Final = 512
"""Torch's allocator for GPUs rounds up to it."""

_KERNELS: Final = {"native_batch_norm": 3, "native_batch_norm_backward": 2, "cudnn_batch_norm": 1}
"""Kernels of an operator: statistics, their update, the map; one for those that are not here."""

_READ_TWICE: Final = {
    "native_batch_norm": 1, "native_batch_norm_backward": 2, "cudnn_batch_norm": 1, "cudnn_batch_norm_backward": 2,
}  # fmt: skip
"""How many of an operator's first tensors are read twice: for statistics and for the map."""

_NOT_READ: Final = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}
"""Operators that only write to their first argument."""

_TENSORS_PER_KERNEL: Final = {1: 110, 2: 64, 3: 48, 4: 36}
_VALUES_PER_KERNEL: Final = 320 * 65536
"""Torch's `multi_tensor_apply` takes so many tensors for each number of lists, in 320 blocks of 65,536 values."""


@dataclass
class Count:
    """What was seen on a card.

    Attributes:
        live_bytes: of all storages on the card, each rounded up as torch's allocator does.
        peak_bytes: their maximum.
        operators: how often each ran.
    """

    block_bytes: int = _BLOCK_BYTES
    live_bytes: int = 0
    peak_bytes: int = 0
    operators: Counter[Operator] = field(default_factory=Counter)
    _storages: dict[int, ref[torch.UntypedStorage]] = field(default_factory=dict)

    def restart(self) -> None:
        """Forget operators and peak, not what is live."""
        self.peak_bytes = self.live_bytes
        self.operators.clear()

    def on_tensor(self, tensor: CardTensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._storages:
            count = -(-storage.nbytes() // self.block_bytes) * self.block_bytes
            self._storages[key] = ref(storage, partial(self._freed, key, count))
            self.live_bytes += count
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int, count: int, _: Any) -> None:
        del self._storages[key]
        self.live_bytes -= count

    def on_operator(self, operator: Any, given: tuple[Any, Any], made: Any) -> None:
        """Count an operator, unless it only makes a view or reserves memory."""
        name = operator._schema.name.split("::")[-1]
        if not (operator.is_view or "empty" in name or name in ("_local_scalar_dense", "_unsafe_view")):
            self.operators[cost(operator, given, made)] += 1

    def total(self, what: str) -> int:
        """Sum of a field of `Operator` over all calls."""
        return sum(getattr(operator, what) * count for operator, count in self.operators.items())

    def seconds(self, gpu: Gpu, assumed: Assumed, *, of_products: bool = False) -> float:
        """Roofline time of all calls, or only of those of convolutions and products of matrices."""
        return sum(
            operator.seconds(gpu, assumed) * count
            for operator, count in self.operators.items()
            if operator.flop or not of_products
        )


def cost(operator: Any, given: tuple[Any, Any], made: Any) -> Operator:
    """What a call takes, from its arguments (args, kwargs) and its result."""
    args, kwargs = given
    name = operator._schema.name.split("::")[-1]
    read = _tensors(given)
    new = [one for one in _tensors(made) if not any(one is other for other in read)]
    written = [
        tensor
        for value, argument in zip(args, operator._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value)
    ]
    twice = _READ_TWICE.get(name, 0) if name != "convolution_backward" else int(all(args[-1][:2]))  # by both products
    count = _bytes(read) + _bytes(new) + _bytes(written) + _bytes(read[:twice])
    if name in _NOT_READ or name.endswith("_like"):
        count -= _bytes(_tensors(args[0]))
    packet = operator.overloadpacket
    flop = flop_registry[packet](*args, **kwargs, out_val=made) if packet in flop_registry else 0
    is_16_bit = any(one.dtype in (torch.float16, torch.bfloat16) for one in read)
    return Operator(count, flop, _kernels(name, args, kwargs, made), is_16_bit)


def _kernels(name: str, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> int:
    lists = [one for one in (*args, *kwargs.values(), made) if isinstance(one, (list, tuple)) and _tensors(one)]
    if "foreach" in name or "fused" in name:
        first = lists[0]
        if any([one.shape for one in other] != [one.shape for one in first] for other in lists[:2]):
            return len(first)  # torch's slow way: a kernel for each tensor
        values: int = sum(one.numel() for one in first)
        return max(-(-len(first) // _TENSORS_PER_KERNEL.get(len(lists), 30)), -(-values // _VALUES_PER_KERNEL))
    if name == "convolution_backward":
        return int(sum(args[-1]))  # its mask: which gradients are wanted
    return _KERNELS.get(name, 1)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Of the values; those of an expanded tensor are in memory once."""
    return sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in tensors)


def _tensors(nested: Any) -> list[Tensor]:
    return [one for one in leaves(nested) if isinstance(one, Tensor)]


@contextmanager
def counting(memory_bytes: float, *, block_bytes: int = _BLOCK_BYTES, **options: Any) -> Iterator[tuple[Card, Count]]:
    """A card with so much memory for torch, and what it counts; `options` as of `card`."""
    count = Count(block_bytes)
    memory: dict[str, Any] = {
        "mem_get_info": lambda device=None: (int(memory_bytes) - count.live_bytes, int(memory_bytes)),
        "memory_allocated": lambda device=None: count.live_bytes,
        "memory_reserved": lambda device=None: count.live_bytes,
    }
    with (
        card(on_tensor=[count.on_tensor], on_operator=[count.on_operator], **options) as made,
        mock.patch.multiple(torch.cuda, **memory),
    ):
        yield made, count


def make_batch(images: int, side_px: int, device: torch.device = CUDA) -> Batch:
    """A batch of black views on a device."""

    def view() -> View:
        image = torch.zeros(images, side_px, side_px, 3, dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
        matrix = torch.eye(2, 3).repeat(images, 1, 1).to(device)
        return View(image, matrix, matrix)

    return Batch((view(), view()), torch.arange(images), torch.arange(images))


def count_step(config: Config, gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    """Figures of the second step of a configuration, for each of some cards that are alike in memory and precision.

    Raises:
        UserError: the network does not fit.
    """
    train, passes = config.train, Counter[str]()
    graphs = train.batch // train.micro_batch
    with counting(gpus[0].memory_bytes, has_data=False, has_bf16=gpus[0].has_bf16) as (_, count):
        state = Pretraining(config, World(device=CUDA), 100, fresh=True)
        state.network.register_forward_hook(lambda *_: passes.update(["forward"]))
        batch = make_batch(train.batch, config.geometry.side_px)
        state.step(batch)  # decides which graphs are kept, and makes Adam's moments
        count.restart()
        passes.clear()
        held_bytes = count.live_bytes
        state.step(batch)
        graphs_kept = 2 * graphs - passes["forward"]
        figures = {
            "encoder": config.encoder.name, "side_px": config.geometry.side_px, "precision": state.precision,
            "batch": train.batch, "micro_batch": train.micro_batch, "graphs": graphs, "graphs_kept": graphs_kept,
            "peak_bytes": count.peak_bytes, "held_bytes": held_bytes,
            "kernels": count.total("kernels"), "flop": count.total("flop"), "bytes": count.total("bytes"),
        }  # fmt: skip
        computed = [_computed(count, gpu) for gpu in gpus]
        if graphs_kept < graphs:
            state.exact.kept_graphs = graphs
            count.restart()
            state.step(batch)
        for one, gpu in zip(computed, gpus, strict=True):
            one["over_all_kept"] = round(one["computed_s"][0] / count.seconds(gpu, ASSUMED[0]), 3)
    return [figures | one for one in computed]


def _computed(count: Count, gpu: Gpu) -> dict[str, Any]:
    seconds = [count.seconds(gpu, assumed) for assumed in ASSUMED]
    products = count.seconds(gpu, ASSUMED[0], of_products=True)
    share = count.total("flop") / seconds[0] / gpu.peak_16_bit
    rounded = {"products_share": round(products / seconds[0], 3), "peak_share": round(share, 3)}
    return {"gpu": gpu.name, "overlay": gpu.overlay, "computed_s": [round(one, 4) for one in seconds], **rounded}


def groups() -> list[list[Gpu]]:
    """`GPUS`, those together for which a step is the same."""
    key = attrgetter("overlay", "memory_bytes", "has_bf16")
    return [list(alike) for _, alike in groupby(GPUS, key)]


def figures_of(files: Sequence[Path], overrides: Sequence[str], gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    """`count_step` of a configuration with the overlay of one of `groups`, in a process of its own.

    Raises:
        UserError: there is no C compiler, or the step cannot be counted.
    """
    words = json.dumps([[*map(str, files)], [*overrides], gpus])
    with card_environment() as environment:
        environment |= {"PYTHONPATH": str(PACKAGE.parent), "CUDA_VISIBLE_DEVICES": ""}
        line = [sys.executable, "-P", "-m", "peclr_dali.bench.gpu.estimate", words]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"the step on {' and '.join(gpu.name for gpu in gpus)} cannot be counted: {last}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main() -> None:
    files, overrides, fields = json.loads(sys.argv[1])
    gpus = [Gpu(*one) for one in fields]
    try:
        overlay = PACKAGE / "configs" / "cards" / f"{gpus[0].overlay}.toml"
        config = load_config(Config, [*map(Path, files), overlay], [*overrides, *COUNTED])
        figures = count_step(config, gpus)
    except UserError as error:
        sys.exit(str(error))
    sys.stdout.write(f"{json.dumps(figures)}\n")


if __name__ == "__main__":
    _main()
