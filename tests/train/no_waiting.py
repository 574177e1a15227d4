"""A guard for the CPU: the host may not ask for values that would be on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.__bool__, Tensor.__int__,
    Tensor.__float__, Tensor.__index__, Tensor.__contains__, torch.equal, Tensor.equal, torch.allclose,
}  # fmt: skip
# The size of their result, or their result, depends on values; `index` by a mask does too.
_OPERATORS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "repeat_interleave", "bincount",
}  # fmt: skip
# What the loader gives the host: the rows and positions of a batch, and what the ranks tell each other between hosts.
_OF_THE_HOST = torch.int64


class WaitedError(AssertionError):
    """The host asked the device for a value."""


class _Calls(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READS:
            _require_of_host(function.__name__, args)
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name.removeprefix("aten::")
        if name in _OPERATORS:
            _require_of_host(name, args)
        if name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        ):
            raise WaitedError(f"{name} by a mask")
        return operator(*args, **(kwargs or {}))


def _require_of_host(name: str, args: Any) -> None:
    asked = [argument for argument in args if isinstance(argument, Tensor) and argument.dtype != _OF_THE_HOST]
    if asked:
        raise WaitedError(f"{name} of a tensor of {asked[0].dtype}, {tuple(asked[0].shape)}")


@contextmanager
def no_waiting() -> Iterator[None]:
    """In the `with` block of this thread, `WaitedError` where the host would wait for a GPU.

    On the CPU the device's tensors are those that are not int64: pixels, matrices, weights, losses.
    """
    with _Calls(), _Operators():
        yield
