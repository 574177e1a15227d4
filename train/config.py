"""The configuration of a run: tables composed from the components' own, layered from TOML files and `--set`."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

import tomli_w
from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from bounds import LARGEST_SEED, Count, Epochs, NotNegative, Positive, Seed, Threads, Timeout
from errors import UserError
from models.config import EncoderConfig, EquivarianceConfig, LossConfig, ProjectorConfig
from pipelines.config import DataConfig, PipelinesConfig
from pipelines.draws import AppearanceConfig, ColourConfig, GeometryConfig
from pipelines.parsing import regular

T = TypeVar("T")
D = TypeVar("D", bound=DataConfig)

OneOrMore = Annotated[
    Annotated[D, Tag("[data]")] | Annotated[tuple[D, ...], Field(min_length=1, max_length=256), Tag("[[data]]")],
    Discriminator(lambda value: "[[data]]" if isinstance(value, Sequence) else "[data]"),
]
"""One source as a table, or several as an array of tables."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RunConfig:
    """Where a run lives and what it writes.

    Attributes:
        out: the run folder.
        seed: of the order, the augmentations and the weights.
        log_every: optimiser steps between two rows of metrics.
        checkpoint_every: optimiser steps between two checkpoints; the last step always writes one.
        keep: checkpoints that stay.
        log_samples: write which samples every step saw, for audits.
        rank_timeout_s: seconds after which a rank that does not come, or does not get on, is named and the run ends.
    """

    out: str = "runs/pretrain"
    seed: Seed = 0
    log_every: Count = 10
    checkpoint_every: Count = 200
    keep: Count = 3
    log_samples: bool = False
    rank_timeout_s: Timeout = 600.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StepsConfig:
    """What pre-training and fine-tuning have in common in how they step.

    Attributes:
        epochs: passes over the data.
        batch: images in one optimiser step, over all ranks.
        micro_batch: images that pass batch norm together, 128 in the authors' code. It belongs to the method: neither
            memory nor the number of ranks changes it, and N ranks need N of them in a batch.
        precision: "fp32", "bf16" or "fp16" (with loss scaling) under autocast, "fp64" for exact comparisons; "auto" is
            bf16 on GPUs that have it, fp16 on others, fp32 on CPUs.
        device: "auto" takes a GPU if there is one.
        compile: torch.compile the network.
        channels_last: keep the network's tensors channels-last.
        threads: CPU threads of torch; unset, torch's choice, and for each of several processes its share of the cores.
    """

    epochs: Count = 100
    batch: Annotated[Count, Field(ge=2)] = 2048
    micro_batch: Count = 128
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    channels_last: bool = True
    threads: Threads | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainConfig(StepsConfig):
    """How pre-training steps (paper, supplement, "Self-supervised pre-training"); each image gives two views.

    The other attributes as `StepsConfig`.

    Attributes:
        sync_batch_norm: batch norm over the micro-batches of all ranks that are at the same place in their shares
            (GPUs only). The number of ranks then belongs to the method, too.
        recompute: "never" keeps all graphs, "always" embeds first and recomputes with graph, "auto" looks at the
            memory. The gradient is the same.
    """

    sync_batch_norm: bool = False
    recompute: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OptimConfig:
    """The optimiser; the defaults are the paper's (supplement, "Training details"), else the authors' code's.

    Attributes:
        lr: learning rate at the end of the warm-up; unset, it is lr_per_sqrt_image * sqrt(images per step).
        lr_per_sqrt_image: see `lr`.
        weight_decay: of all parameters that `decay_exempt` does not exempt.
        trust_coefficient: c of LARS.
        clip: whether LARS only ever lowers the learning rate of a tensor.
        eps: added to the denominator of LARS.
        backend: the inner Adam: "torch" (fused), "apex" (NVIDIA apex's FusedAdam), or "auto": apex if it is
            installed and the parameters are on a GPU.
        decay_exempt: what has no weight decay: "paper", all biases and norm parameters, or "upstream", what
            the authors' search for "bias" or "bn" in names finds: there the norm weights of stem, downsampling and
            projector decay.
        warmup_epochs: length of the linear warm-up.
    """

    lr: Positive | None = None
    lr_per_sqrt_image: Positive = 1e-4
    weight_decay: NotNegative = 1e-6
    trust_coefficient: Positive = 0.02
    clip: bool = True
    eps: NotNegative = 1e-8
    backend: Literal["auto", "torch", "apex"] = "auto"
    decay_exempt: Literal["paper", "upstream"] = "paper"
    warmup_epochs: Epochs = 10.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """All of a pre-training run, one attribute per table of the TOML file; `data` may be an array of tables."""

    run: RunConfig = RunConfig()
    data: OneOrMore[DataConfig] = DataConfig()
    geometry: GeometryConfig = GeometryConfig()
    colour: ColourConfig = ColourConfig()
    appearance: AppearanceConfig = AppearanceConfig()
    pipelines: PipelinesConfig = PipelinesConfig()
    encoder: EncoderConfig = EncoderConfig()
    projector: ProjectorConfig = ProjectorConfig()
    equivariance: EquivarianceConfig = EquivarianceConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()


FREE_ON_RESUME = (
    "run.out",
    "run.log_every",
    "run.checkpoint_every",
    "run.keep",
    "run.log_samples",
    "run.rank_timeout_s",
    "data.root",
    "data.max_bad_share",
    "data.regressor",
    "pipelines",
    "encoder.weights",
    "train.recompute",
    "train.compile",
    "train.device",
    "train.threads",
    "validation",
)
"""Keys, and tables, that do not change which function is trained on what, so that a resumed run may change them."""


LARGEST_FILE = 2**20
"""Bytes of a configuration."""

DEEPEST = 6
"""Levels of tables and arrays in a configuration; three are in use."""

TOO_DEEP = "is nested too deeply; expected tables of keys, as --print-config shows them"

_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
"""Name and meaning in a docstring's list of attributes."""


def load_config(
    kind: type[T], files: Sequence[Path], overrides: Sequence[str], *, base: Mapping[str, Any] | None = None
) -> T:
    """Layer TOML files and then `key=value` overrides, the last one winning.

    Args:
        kind: the dataclass to fill, such as `Config`.
        files: TOML files.
        overrides: "table.key=value", the value in TOML's spelling; what is no TOML is taken as a string. Of an array of
            tables, "table.0.key=value" changes the first, and "table.key=value" the only one.
        base: tables that stand below the files, as `to_dict` gives them; none by default.

    Raises:
        UserError: a file that cannot be read, an unknown key, a value of the wrong type or out of range.
    """
    values: dict[str, Any] = copy.deepcopy(dict(base or {}))
    origin: dict[str, str] = {}
    for file in files:
        layer = read_toml(file)
        _check_values(layer, origin=str(file))
        _merge(values, layer, origin=str(file))
        origin.update((key, str(file)) for key, _ in flatten(layer))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise UserError(f"--set {override}: expected table.key=value, such as --set optim.lr=3e-4")
        *tables, leaf = key.strip().split(".")
        layer = {leaf: _parse_value(text.strip())}
        for table in reversed(tables):
            layer = {table: layer}
        _check_values(layer, origin=f"--set {override}")
        _merge(values, layer, origin=f"--set {override}")
        origin.update((name, f"--set {override}") for name in (key.strip(), *dict(flatten(layer))))
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise UserError(_explain(kind, error, origin)) from error


def to_dict(config: object) -> dict[str, Any]:
    """Plain nested tables of a config, without the keys that are None: TOML has no such value."""
    tables: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json", exclude_none=True)
    return tables


def to_toml(config: Any) -> str:
    """The config as a TOML file that gives it back; keys that are None are comments, which say what they mean."""
    parts: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, tuple):
            parts += [f"[[{field.name}]]\n{_table_as_toml(table)}" for table in value]
        else:
            parts.append(f"[{field.name}]\n{_table_as_toml(value)}")
    return "\n".join(parts)


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UserError: it is no regular file, cannot be read, is too large, or is not TOML.
    """
    try:
        size = regular(file).stat().st_size
        if size > LARGEST_FILE:
            raise UserError(
                f"{file}: has {size} bytes; expected a TOML file of at most {LARGEST_FILE}, such as configs/demo.toml"
            )
        return tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; -c expects a TOML file, such as configs/demo.toml") from error
    except RecursionError as error:
        raise UserError(f"{file}: {TOO_DEEP}") from error
    except ValueError as error:
        raise UserError(f"{file} is not TOML: {_shortened(str(error))}") from error


def as_toml(value: Any) -> str:
    """A value in TOML's spelling, as `--set` takes it."""
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip()


def flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables; tables of an array are numbered from 0."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif _is_array_of_tables(value):
            yield from flatten({str(number): table for number, table in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def first_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What a resumed run may not change and does, as "key: was x, is now y"; None if nothing."""
    before, after = dict(flatten(saved)), dict(flatten(now))
    for key in sorted(before.keys() | after.keys()):
        free = _without_numbers(key) in FREE_ON_RESUME or key.split(".")[0] in FREE_ON_RESUME
        if not free and before.get(key) != after.get(key):
            return f"{key}: was {before.get(key)!r}, is now {after.get(key)!r}"
    return None


def _is_array_of_tables(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(table, Mapping) for table in value)


def _without_numbers(key: str) -> str:
    """data.1.root -> data.root."""
    return ".".join(part for part in key.split(".") if not part.isdecimal())


def _table_as_toml(table: Any) -> str:
    """One line for each key."""
    values, meanings = to_dict(table), key_meanings(type(table))
    return "".join(
        tomli_w.dumps({field.name: values[field.name]})
        if field.name in values
        else f"# {field.name} is not set: {meanings[field.name]}\n"
        for field in dataclasses.fields(table)
    )


def key_meanings(kind: type[object]) -> dict[str, str]:
    """What each attribute means, in one line, from the docstrings of a class and of those that it extends."""
    meanings: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        _, _, attributes = (inspect.getdoc(one) or "").partition("Attributes:\n")
        meanings |= {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(attributes)}
    return meanings


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _check_values(layer: Mapping[str, Any], *, origin: str) -> None:
    """Refuse what no key can have: numbers beyond 64 bits, strings that are no path, deep nests."""
    level: list[tuple[str, Any]] = [("", layer)]
    for _ in range(DEEPEST):
        inner: list[tuple[str, Any]] = []
        for key, value in level:
            if isinstance(value, Mapping):
                inner += [(f"{key}.{name}".lstrip("."), one) for name, one in value.items()]
            elif isinstance(value, list):
                inner += [(key, one) for one in value]
            elif isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{origin}: {key} = {value!r}: expected finite numbers, so give others")
            elif isinstance(value, int) and abs(value) > LARGEST_SEED:
                raise UserError(f"{origin}: {key} has {value.bit_length()} bits: expected a number of 64 bits at most")
            elif isinstance(value, str) and ("\0" in value or _has_surrogates(value)):
                raise UserError(f"{origin}: {key} = {value!r}: expected UTF-8 without NUL; rename the file or folder")
        level = inner
    if level:
        raise UserError(f"{origin}: {TOO_DEEP}")


def _has_surrogates(text: str) -> bool:
    """Whether it comes from bytes that are not UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _merge(into: dict[str, Any], layer: Mapping[str, Any], *, origin: str) -> None:
    for key, value in layer.items():
        below = into.get(key)
        if isinstance(value, Mapping) and value and all(part.isdecimal() for part in value):
            into.setdefault(key, {})
            for number, table in value.items():
                if not isinstance(table, Mapping):
                    raise UserError(f"{origin}: {key}.{number} is a table: change one of its keys, {key}.{number}.key")
                _merge(_numbered(into[key], key, number, origin), table, origin=origin)
        elif isinstance(value, Mapping) and _is_array_of_tables(below):
            if len(below) > 1:
                raise UserError(
                    f"{origin}: there are {len(below)} tables [[{key}]]: say which one to change, such as "
                    f"--set {key}.0.{next(iter(value), 'key')}=..."
                )
            _merge(below[0], value, origin=origin)
        elif isinstance(value, Mapping) and isinstance(below, dict):
            _merge(below, value, origin=origin)
        else:
            into[key] = copy.deepcopy(value)


def _numbered(tables: Any, key: str, number: str, origin: str) -> dict[str, Any]:
    """The table of that number; a single table is number 0."""
    array = tables if _is_array_of_tables(tables) else [tables]
    if len(number) > 9 or int(number) >= len(array) or not isinstance(array[int(number)], dict):
        raise UserError(f"{origin}: there is no {key}.{_shortened(number)}; expected {key}.0 to {key}.{len(array) - 1}")
    table: dict[str, Any] = array[int(number)]
    return table


def _explain(kind: type[object], error: ValidationError, origin: Mapping[str, str]) -> str:
    """One line for the first thing that is wrong: where, what was found, what was expected."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if not str(part).startswith("[")]  # without the tags of `OneOrMore`
    known = set(_known_keys(kind))
    # A union's alternatives appear behind the key; the key is the longest known prefix.
    prefixes = (".".join(path[:end]) for end in range(len(path), 0, -1))
    key = next((prefix for prefix in prefixes if _without_numbers(prefix) in known), None)
    unknown = first["type"] == "unexpected_keyword_argument"
    shown = ".".join(path) if unknown or key is None else key
    where = origin.get(shown) or next((o for k, o in origin.items() if k.startswith(shown + ".")), None)
    prefix = f"{where}: " if where else ""
    if unknown:
        matches = difflib.get_close_matches(_without_numbers(shown), known, 1, 0.6) or [
            k for k in sorted(known) if "." in k and k.split(".")[-1] == path[-1]
        ]
        table = path[0] if len(path) > 1 and path[0] in known else None
        siblings = sorted(k for k in known if (k.startswith(f"{table}.") if table else "." not in k))
        hint = f"did you mean {matches[0]}?" if matches else f"known are {', '.join(siblings)}"
        return f"{prefix}unknown key {_shortened(shown)}: {hint}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{prefix}{shown} = {_shortened(repr(first['input']))}: {message[0].lower()}{message[1:]}"


def _known_keys(kind: type[object], prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        yield f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.default):  # every table has a default, so that it need not be written
            yield from _known_keys(type(field.default), f"{prefix}{field.name}.")
