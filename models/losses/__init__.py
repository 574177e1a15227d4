"""The losses of pre-training by name. Each loss has its own file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainValidator, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails

from peclr_dali.models.losses.loss import Loss
from peclr_dali.models.losses.nt_xent import NTXent

LOSSES: dict[str, type[Loss]] = {"nt_xent": NTXent}
"""Value of `loss.name` -> class of the loss. Entries may be added before a configuration is read."""


def build_loss(table: Any) -> Loss:
    """Build the loss that a table [loss] describes. If `table` is a loss already, it is returned.

    Raises:
        ValidationError: (pydantic) there is no loss of that name, or it does not have the table's keys.
    """
    if isinstance(table, Loss):
        return table
    name = table.get("name", "nt_xent") if isinstance(table, Mapping) else "nt_xent"
    if name not in list(LOSSES):  # a list, since `name` may be anything
        known = " or ".join(repr(one) for one in LOSSES)
        unknown = InitErrorDetails(type="literal_error", loc=("name",), input=name, ctx={"expected": known})
        raise ValidationError.from_exception_data("loss", [unknown])
    return TypeAdapter(LOSSES[name]).validate_python(table)


if TYPE_CHECKING:
    AnyLoss = Loss
else:
    AnyLoss = Annotated[Loss, PlainValidator(build_loss, json_schema_input_type=reduce(or_, LOSSES.values()))]
    """The table [loss] of a configuration. Its loss is looked up when the configuration is built."""
