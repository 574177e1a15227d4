"""The configuration of a run: tables composed from the components' own, layered from TOML files and `--set`."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, Union, cast, get_args, get_origin, get_type_hints

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
from errors import UserError, is_left_to_shell
from models.config import EncoderConfig, EquivarianceConfig, LossConfig, ProjectorConfig
from parsing import regular
from pipelines.config import DataConfig, PipelinesConfig
from pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig

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

    @property
    def augmentation(self) -> Augmentation:
        """How views are made at random."""
        return Augmentation(self.geometry, self.colour, self.appearance)


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


_EXPECTED = {
    "tuple_type": 'expected a list in brackets, such as [1, 2] or ["a", "b"]',
    "too_long": "expected at most {max_length} items, found {actual_length}",
    "too_short": "expected at least {min_length}, found {actual_length}",
    "dataclass_type": "expected a table of keys, as [{key}] in a file or --set {key}.KEY=VALUE",
    "string_type": 'expected a string; write it in quotes: {key} = "...", or --set \'{key}="..."\'',
}
"""Pydantic's types of errors whose messages speak of Python."""


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
        _note_origin(origin, (key for key, _ in flatten(layer)), str(file))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise UserError(f"--set {override or repr('')}: expected table.key=value, such as --set optim.lr=3e-4")
        *tables, leaf = key.strip().split(".")
        layer = {leaf: _parse_value(text.strip())}
        for table in reversed(tables):
            layer = {table: layer}
        _check_values(layer, origin=f"--set {override}")
        _merge(values, layer, origin=f"--set {override}")
        _note_origin(origin, (key.strip(), *dict(flatten(layer))), f"--set {override}")
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise UserError(_explain(kind, error, origin)) from error


def require_whole_micro_batches(batch: int, micro_batch: int) -> None:
    """A batch is made of whole micro-batches.

    Raises:
        UserError: it is not.
    """
    if batch % micro_batch:
        raise UserError(
            f"train.batch = {batch} is not a multiple of train.micro_batch = {micro_batch}: batch norm sees whole "
            "micro-batches, so change one of the two."
        )


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
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; expected a TOML file; configs/ and launch/ hold some") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not TOML: {_shortened(str(error))}. Give a text file, and save it in UTF-8"
        ) from error
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise UserError(f"{file}: {TOO_DEEP}") from error
    except ValueError as error:
        raise UserError(f"{file} is not TOML: {_shortened(str(error))}{_remedy_for(text)}") from error


def _remedy_for(text: str) -> str:
    """What to do about two mistakes, of word processors and of Windows' paths, if a text that is no TOML has one."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    if any(quote in line for line in lines for quote in "\u201c\u201d\u201e\u2018\u2019"):
        return '. It has typographic quotes: write straight ones, "..."'
    if any("\\" in line for line in lines):
        return ". In \"...\" a backslash begins an escape: write / in paths, or '...'"
    return ""


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
            elif isinstance(value, str) and not value.strip():
                raise UserError(f"{origin}: {key} is empty: give a value, or leave the key out. Is a variable not set?")
            elif isinstance(value, str) and is_left_to_shell(value):
                raise UserError(f"{origin}: {key} = {value!r}: ~ and $NAME are not replaced here; write the path out")
        level = inner
    if level:
        raise UserError(f"{origin}: {TOO_DEEP}")


def _note_origin(origin: dict[str, str], keys: Iterable[str], where: str) -> None:
    """Remember who set keys; who set the table or value in their place before is forgotten."""
    for key in keys:
        parts = key.split(".")
        for end in range(1, len(parts)):
            origin.pop(".".join(parts[:end]), None)
        origin[key] = where


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
    where = (
        origin.get(shown)
        or origin.get(shown.rpartition(".")[0])  # of an array's item
        or next((o for k, o in origin.items() if k.startswith(shown + ".")), None)
    )
    prefix = f"{where}: " if where else ""
    if unknown:
        matches = difflib.get_close_matches(_without_numbers(shown), known, 1, 0.6) or [
            k for k in sorted(known) if "." in k and k.split(".")[-1] == path[-1]
        ]
        table = path[0] if len(path) > 1 and path[0] in known else None
        siblings = sorted(k for k in known if (k.startswith(f"{table}.") if table else "." not in k))
        hint = f"did you mean {matches[0]}?" if matches else f"known are {', '.join(siblings)}"
        other = _other_command(shown, known)
        if other is not None:
            hint = f"it is one of '{other}', not of this command"
        return f"{prefix}unknown key {_shortened(shown)}: {hint}"
    if first["type"] == "missing":
        where = where or next(iter(origin.values()), None)
        return f"{f'{where}: ' if where else ''}{'.'.join(path)} is missing: give it a value"
    expected = _EXPECTED.get(first["type"])
    message = (
        expected.format(key=shown, **first.get("ctx", {})) if expected else first["msg"].removeprefix("Value error, ")
    )
    value = first["input"]
    found = str(value) if isinstance(value, date | time) else repr(value)
    return f"{prefix}{shown} = {_shortened(found)}: {message[0].lower()}{message[1:]}"


def _other_command(key: str, known: set[str]) -> str | None:
    """The command that a key belongs to, which is unknown to the one that was called."""
    from train.finetune_config import FinetuneConfig

    for command, kind in (("pretrain", Config), ("finetune", FinetuneConfig)):
        keys = set(_known_keys(kind))
        if not keys <= known and _without_numbers(key) in keys:
            return command
    return None


def _known_keys(kind: type[object], prefix: str = "") -> Iterator[str]:
    types = get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        yield f"{prefix}{field.name}"
        for table in _tables_in(types[field.name]):
            yield from _known_keys(table, f"{prefix}{field.name}.")


def _tables_in(annotation: Any) -> Iterator[type[object]]:
    """The dataclass of a table, or of an array of tables."""
    if dataclasses.is_dataclass(annotation):
        yield cast(type[object], annotation)
    elif get_origin(annotation) in (tuple, Union):
        for one in get_args(annotation):
            yield from _tables_in(one)
