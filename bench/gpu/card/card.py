"""Tensors that report the device "cuda:0" and are computed on the CPU, and a record of what the host did with them."""

from __future__ import annotations

import ctypes
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peclr_dali.errors import UserError

CUDA: Final = torch.device("cuda", 0)
_PACKAGE: Final = Path(__file__).parents[3]
_aten = torch.ops.aten

_WAIT: Final = {
    "_local_scalar_dense", "allclose", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "repeat_interleave.Tensor", "_linalg_solve_ex", "linalg_inv_ex", "_linalg_svd",
    "linalg_lu_factor_ex", "_linalg_eigh",
}  # fmt: skip
"""Operators whose result on a card the host waits for."""

Place = tuple[str, tuple[str, ...]]
"""What was done, and the functions of the product that did it, the innermost first: "train/steps/exact.py _decide"."""


@dataclass(eq=False)
class Card:
    """A card, and what was seen of it.

    Attributes:
        has_data: False: tensors have shapes only, so a step of any size runs in little memory. A number that is read
            is 0, or what was copied to the card as a number; a tensor that is copied to the host is ones.
        free_bytes: what torch.cuda.mem_get_info gives.
        on_operator: called with each operator on the card, its arguments (args, kwargs), and its result.
        on_tensor: called with each tensor made on the card.
        operators: how often each operator ran.
        waits: where the host would wait for the card.
        copies: copies to the card that are not asynchronous from pinned memory.
        recorded: calls of a tensor's `record_stream`, each with the priority of the stream.
        mixed: operators on tensors of different devices. Each raises an error, too.
    """

    has_data: bool = True
    has_bf16: bool = True
    free_bytes: int = 20 << 30
    on_operator: list[Callable[[Any, tuple[Any, Any], Any], None]] = field(default_factory=list)
    on_tensor: list[Callable[[CardTensor], None]] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)
    waits: Counter[Place] = field(default_factory=Counter)
    copies: Counter[Place] = field(default_factory=Counter)
    recorded: Counter[tuple[int, tuple[str, ...]]] = field(default_factory=Counter)
    mixed: list[str] = field(default_factory=list)
    _pinned: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # held, so that no address is used again

    def clear(self) -> None:
        """Forget what was seen."""
        for seen in (self.operators, self.waits, self.copies, self.recorded, self.mixed):
            seen.clear()

    def wait(self, how: str) -> None:
        """Record that the host would wait."""
        self.waits[how, callers()] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        """Remember that a tensor of the host is in pinned memory."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in pinned memory of the host."""
        return not isinstance(tensor, CardTensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on the host's tensors behind those of the card."""
        name = operator._schema.name.split("::")[-1]
        if name == "device":
            return CUDA
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name == "_to_copy":
            return self._to_copy(operator, args[0], **kwargs)
        if name == "copy_":
            return self._copy(operator, *args, **kwargs)
        tensors = [one for one in leaves((args, kwargs)) if isinstance(one, Tensor)]
        cards = [one for one in tensors if isinstance(one, CardTensor)]
        if cards:
            self._check(operator, name, args, tensors)
        if name == "_local_scalar_dense" and not self.has_data:
            return args[0].number if args[0].is_floating_point() else int(args[0].number)
        device = kwargs.get("device")
        to_card = torch.device(device).type == "cuda" if device is not None else bool(cards)
        inner_args, inner = mapped(self._behind, (args, kwargs))
        if device is not None:
            inner["device"] = torch.device("cpu" if self.has_data or not to_card else "meta")
        pinned = inner.pop("pin_memory", False)
        result = self._call(operator, name, inner_args, inner)
        if not to_card:
            return self.pin(result) if pinned else result
        known = {id(one.behind): one for one in cards}  # what an operator changes in place stays the same tensor

        def on_card(one: Any) -> Any:
            if id(one) in known:
                return known[id(one)]
            return CardTensor(one) if isinstance(one, Tensor) else one

        made = mapped(on_card, result)
        self._ran(operator, (args, kwargs), made)
        for one in cards:
            if one.shape != one.behind.shape:  # an operator such as resize_
                _set_data(one, CardTensor(one.behind))
        return made

    def _check(self, operator: Any, name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        """Record waits and copies of an operator on the card, and refuse tensors of other devices."""
        on_host = [one for one in tensors if not isinstance(one, CardTensor)]
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [one for one in args[1] if one is not None]
            if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
                self.wait(f"{name} by a mask")
            if any(one.device.type == "cpu" for one in indices):  # torch copies them
                self.copies[f"{name} by indices on the host", callers()] += 1
            on_host = [one for one in on_host if not any(one is index for index in indices)]
        if any(one.ndim > 0 or one is args[0] for one in on_host):
            places = ", ".join(f"{one.device.type} {tuple(one.shape)}" for one in tensors)
            self.mixed.append(f"{operator}: {places} at {' < '.join(callers())}")
            raise RuntimeError(f"Expected all tensors to be on the same device: {self.mixed[-1]}")
        if name in _WAIT or str(operator).removeprefix("aten.") in _WAIT:
            self.wait(name)

    def _call(self, operator: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "_batch_norm" in name and not self.has_data:  # torch's own way to the shapes takes milliseconds
            image = args[0]
            of_channels = [image.new_empty(image.shape[1], dtype=args[2].dtype) for _ in range(2)]
            reserved = [image.new_empty(0, dtype=torch.uint8)] * (name == "cudnn_batch_norm")
            return (torch.empty_like(image), *of_channels, *reserved)
        if name == "cudnn_batch_norm":
            result = _aten.native_batch_norm(*args)
            return (*result, result[0].new_empty(0, dtype=torch.uint8))
        if name == "cudnn_batch_norm_backward":
            image, gradient, weight, mean, variance, saved_mean, saved_invstd, eps, _ = args
            of_training = (weight, mean, variance, saved_mean, saved_invstd, True, eps, [True] * 3)
            return _aten.native_batch_norm_backward(gradient, image, *of_training)
        return operator(*args, **kwargs)

    def _to_copy(
        self, operator: Any, source: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any
    ) -> Tensor:
        target = torch.device(device or source.device)
        options.pop("pin_memory", None)
        self._check_copy(target, source, non_blocking and self.is_pinned(source))
        if target.type != "cuda" and not self.has_data:
            return torch.ones(source.shape, dtype=options.get("dtype") or source.dtype)
        behind = self._behind(source)
        copy: Tensor = operator(behind, **options)
        if target.type != "cuda":
            return copy.clone() if copy is behind else copy
        made = CardTensor(copy.clone() if copy is behind else copy)
        if source.device.type == "cpu" and source.ndim == 0:
            made.number = source.item()
        self._ran(operator, ((source,), options), made)
        return made

    def _copy(self, operator: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        host = source if isinstance(target, CardTensor) else target
        self._check_copy(target.device, source, non_blocking and self.is_pinned(host))
        if self.has_data or isinstance(target, CardTensor):
            self._behind(target).copy_(self._behind(source))
            self._ran(operator, ((target, source), {}), target)
        return target

    def _check_copy(self, target: torch.device, source: Tensor, asynchronous: bool) -> None:
        if isinstance(source, CardTensor) and target.type == "cpu" and not asynchronous:
            self.wait("copy to the host")
        if not isinstance(source, CardTensor) and target.type == "cuda" and not asynchronous:
            self.copies["copy to the card", callers()] += 1

    def _behind(self, one: Any) -> Any:
        if isinstance(one, CardTensor):
            return one.behind
        return one.to("meta") if isinstance(one, Tensor) and not self.has_data else one

    def _ran(self, operator: Any, given: tuple[Any, Any], made: Any) -> None:
        self.operators[str(operator).removeprefix("aten.")] += 1
        for call in self.on_operator:
            call(operator, given, made)


_cards: list[Card] = []
"""The card of the `with` block of `card`."""


class CardTensor(Tensor):
    """A tensor of the card.

    Attributes:
        behind: the tensor on the host, or on torch's meta device if the card has no data.
        number: what was copied to the card, if that is one number.
    """

    behind: Tensor
    number: float = 0.0

    @staticmethod
    def __new__(cls, behind: Tensor, requires_grad: bool = False) -> CardTensor:
        """A tensor of the card with this one behind it."""
        shell = torch.empty_strided(behind.shape, behind.stride(), dtype=behind.dtype, device="meta")
        options = {"dispatch_device": True, "device_for_backend_keys": CUDA}
        made: CardTensor = Tensor._make_subclass(cls, shell, requires_grad, **options)  # type: ignore[arg-type]
        made.behind = behind
        for call in _cards[-1].on_tensor:
            call(made)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _cards[-1].run(operator, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CardTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """The numbers, for which the host waits."""
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def data_ptr(self) -> int:
        """The host's address."""
        return self.behind.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage behind."""
        return self.behind.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """Recorded only: all streams are one."""
        _cards[-1].recorded[stream.priority, callers()] += 1

    @property
    def data(self) -> Tensor:
        """Without graph; assigned to in order to change a parameter's memory format."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        assert isinstance(other, CardTensor)
        self.behind = other.behind
        _set_data(self, other)


def _set_data(tensor: CardTensor, other: CardTensor) -> None:
    Tensor.data.__set__(tensor, Tensor.data.__get__(other))  # type: ignore[attr-defined]


class _Mode(TorchDispatchMode):
    """Takes what makes tensors of the card, or pinned ones, from nothing or from the host's tensors."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_card = any(
            isinstance(one, CardTensor) or getattr(one, "type", None) == "cuda" for one in leaves((args, kwargs))
        )
        if of_card or kwargs.get("pin_memory") or operator is _aten.is_pinned.default:
            return _cards[-1].run(operator, args, kwargs)
        return operator(*args, **kwargs)


class _Stream:
    device = CUDA
    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        _cards[-1].wait("Stream.synchronize")

    def record_event(self, event: Any = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event  # type: ignore[no-any-return]

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...


class _Event:
    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        _cards[-1].wait("Event.synchronize")

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def elapsed_time(self, other: _Event) -> float:
        return (other.at_s - self.at_s) * 1e3


@contextmanager
def card(**options: Any) -> Iterator[Card]:
    """In the `with` block torch has one GPU, which is a new `Card` with these options. Its threads have it too.

    Raises:
        UserError: the process was started without `environment.card_environment`.
    """
    try:
        count = ctypes.c_byte.in_dll(ctypes.CDLL(None), "card_count")
    except ValueError:
        raise UserError("this process has no card of make-believe: start it with card_environment()") from None
    torch._C._ensureCUDADeviceGuardSet()  # guards of devices do nothing, if there are none
    count.value = 127  # a backward pass asks every device that a guard may know for its context
    made, default, of_thread, run_thread = Card(**options), _Stream(), threading.local(), threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        with _Mode():
            run_thread(thread)

    def current_stream(device: Any = None) -> _Stream:
        return getattr(of_thread, "stream", default)

    @contextmanager
    def on_stream(stream: _Stream | None) -> Iterator[None]:
        before = current_stream()
        of_thread.stream = stream or before
        try:
            yield
        finally:
            of_thread.stream = before

    def nothing(*_: Any, **__: Any) -> None: ...

    of_cuda: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "set_device": nothing,
        "_lazy_init": nothing, "_lazy_call": nothing, "empty_cache": nothing,
        "Stream": _Stream, "Event": _Event, "current_stream": current_stream,
        "stream": on_stream, "device_of": nullcontext, "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: made.wait("cuda.synchronize"),
        "mem_get_info": lambda device=None: (made.free_bytes, made.free_bytes + (1 << 30)),
        "memory_allocated": lambda device=None: 0, "memory_reserved": lambda device=None: 0,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "get_device_name": lambda device=None: "card of make-believe",
        "is_bf16_supported": lambda including_emulation=True: made.has_bf16,
    }  # fmt: skip
    of_tensors: dict[str, Any] = {
        "pin_memory": lambda tensor, *_: made.pin(tensor.clone()),
        "is_pinned": lambda tensor, *_: made.is_pinned(tensor),
    }
    patches = [
        mock.patch.multiple(torch.cuda, **of_cuda),
        mock.patch.multiple(Tensor, **of_tensors),
        mock.patch.object(threading.Thread, "run", run_in_mode),
        mock.patch.multiple(torch.accelerator, synchronize=lambda *_: made.wait("accelerator.synchronize")),
        mock.patch.multiple(torch.cuda.amp.common, amp_definitely_not_available=lambda: False),
        mock.patch.multiple(torch, inference_mode=torch.no_grad),  # a tensor made there has no views
        mock.patch.multiple(torch.__future__, get_overwrite_module_params_on_conversion=lambda: True),
        _Mode(),
    ]
    with ExitStack() as stack:
        _cards.append(made)
        stack.callback(_cards.pop)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda")
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        for patch in patches:
            stack.enter_context(patch)
        yield made


def leaves(nested: Any) -> list[Any]:
    """What is in nested lists, tuples and dicts. Torch's own function takes several times as long."""
    if isinstance(nested, dict):
        nested = [*nested.values()]
    return [leaf for one in nested for leaf in leaves(one)] if isinstance(nested, (list, tuple)) else [nested]


def mapped(function: Callable[[Any], Any], nested: Any) -> Any:
    """Nested lists, tuples and dicts with a function's result for each of their leaves."""
    if isinstance(nested, dict):
        return {key: mapped(function, one) for key, one in nested.items()}
    if isinstance(nested, (list, tuple)):
        return type(nested)([mapped(function, one) for one in nested])
    return function(nested)


def callers() -> tuple[str, ...]:
    """The functions of the product that are running in this thread, the innermost first."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(None) if frame.f_code.co_filename != __file__)
    start = f"{_PACKAGE}/"
    return tuple(
        f"{code.co_filename.removeprefix(start)} {code.co_name}"
        for code in codes if code.co_filename.startswith(start)
    )  # fmt: skip
