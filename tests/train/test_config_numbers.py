"""Every number of every configuration and command has bounds, and every value gives a configuration or one line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import pytest
from pydantic import TypeAdapter

from bench.training.scaling import Cluster
from cli import main
from errors import UserError
from experiments.config import Study
from tests.command_line import run_cli
from tests.train import tiny_run
from train.config.finetuning import FinetuneConfig
from train.config.load import load_config
from train.config.pretraining import Config
from train.config.tables import to_toml

T = TypeVar("T")
KINDS: tuple[type[object], ...] = (Config, FinetuneConfig, Cluster, Study)
ODD = ("inf", "-inf", "nan", "1e308", "-1e308", "1e-308", "-1", "0", str(10**40), str(-(10**40)), "0x" + "f" * 5000)
NEEDED = 'title = "a"\nsource = "b"\n[arms.a]\n[scales]\n[maps]\nbetter = "a"\nthan = "b"\n'
"""What a study has no defaults for."""


def leaves(schema: Mapping[str, Any], definitions: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Key and schema of every number; of an array, "key.*" is any of its items."""
    if "$ref" in schema:
        yield from leaves(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions, key)
    for name, one in schema.get("properties", {}).items():
        yield from leaves(one, definitions, f"{key}.{name}".lstrip("."))
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from leaves(one, definitions, key)
    for one in schema.get("prefixItems", ()):
        yield from leaves(one, definitions, f"{key}.*")
    if isinstance(schema.get("items"), dict):
        yield from leaves(schema["items"], definitions, f"{key}.*")
    if schema.get("type") in ("integer", "number"):
        yield key, schema


def numbers_of(kind: type[object]) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema()
    return dict(leaves(schema, schema.get("$defs", {})))


NUMBERS = [(kind, key) for kind in KINDS for key in numbers_of(kind) if not key.startswith(("data.*", "compare.*"))]


def test_the_walk_finds_the_numbers() -> None:
    found = {key for _, key in NUMBERS}
    assert {
        "run.rank_timeout_s",
        "optim.lr",
        "train.threads",
        "geometry.scale.*",
        "geometry.fill",
        "data.weight",
    } <= found
    assert {"validation.every_epochs", "seeds.*", "maps.rotations", "inside.latency_s"} <= found
    assert len(NUMBERS) > 80


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_has_bounds(kind: type[object]) -> None:
    unbounded = [
        key
        for key, schema in numbers_of(kind).items()
        if not (schema.keys() & {"minimum", "exclusiveMinimum"} and schema.keys() & {"maximum", "exclusiveMaximum"})
    ]
    assert unbounded == []


def loaded(kind: type[T], files: list[Path], override: str) -> tuple[T | None, str]:
    """The configuration, or None and what is wrong."""
    try:
        return load_config(kind, files, [override]), ""
    except UserError as error:
        return None, str(error)


@pytest.mark.parametrize("value", ODD, ids=lambda value: value[:12])
@pytest.mark.parametrize(("kind", "key"), NUMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_an_odd_number_gives_a_configuration_or_one_line(
    kind: type[object], key: str, value: str, tmp_path: Path
) -> None:
    files = []
    if kind is Study:
        files = [tmp_path / "study.toml"]
        files[0].write_text(NEEDED)
    override = f"{key.removesuffix('.*')}={f'[{value}, {value}]' if key.endswith('.*') else value}"
    config, message = loaded(kind, files, override)
    if config is None:
        assert key.removesuffix(".*") in message
        assert "\n" not in message
        return
    if isinstance(config, (Config, FinetuneConfig)):
        again = tmp_path / "again.toml"
        again.write_text(to_toml(config))
        assert load_config(type(config), [again], []) == config


@pytest.mark.parametrize(
    "override",
    [
        "optim.warmup_epochs=1e6", "loss.temperature=1e-12", f"run.seed={2**63 - 1}", "optim.lr=1e18",
        "data.label_fraction=1e-12", "geometry.scale=[0.001, 0.001]", "geometry.scale=[1000, 1000]",
        "geometry.rotation_deg=[-1e6, 1e6]", "colour.value_scale=[1e6, 1e6]", "pipelines.ahead=1024",
    ],
)  # fmt: skip
def test_a_run_at_the_bounds_ends_well_or_in_one_line(
    override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run.write_images(tmp_path / "images", count=12)
    settings = tiny_run.settings(tmp_path / "images", tmp_path / "out", "train.epochs=1", override)
    code = run_cli("pretrain", *(word for setting in settings for word in ("--set", setting)))
    error = capsys.readouterr().err
    assert code in (0, 2), error
    assert "Traceback" not in error


def command_numbers() -> list[tuple[str, click.Option]]:
    return [
        (name, option)
        for name, command in main.commands.items()
        for option in command.params
        if isinstance(option, click.Option)
        and isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType))
    ]


@pytest.mark.parametrize(("command", "option"), command_numbers(), ids=lambda value: getattr(value, "name", value))
def test_every_number_of_a_command_has_bounds(command: str, option: click.Option) -> None:
    kind = option.type
    assert isinstance(kind, (click.IntRange, click.FloatRange)), f"{command} {option.opts[0]}"
    assert kind.min is not None
    assert kind.max is not None
    assert math.isfinite(kind.max)
    for value in ("inf", "-inf", "nan", "1e308", "-1e308", str(10**40), "9" * 5000):
        with pytest.raises(click.BadParameter):
            kind(value, option)
