"""Every number of every configuration and command has bounds, and every value gives a configuration or one line."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import click
import pytest
from pydantic import TypeAdapter

from peclr_dali.cli import main
from peclr_dali.errors import UserError
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config, to_toml
from peclr_dali.train.config.pretraining import Config
from tests.command_line import as_options, run_cli
from tests.train import tiny_run

KINDS: tuple[type[object], ...] = (Config, FinetuneConfig)
ODD = ("inf", "-inf", "nan", "1e308", "-1e308", "1e-308", "-1", "0", str(10**40), str(-(10**40)))
BEYOND = ("inf", "-inf", "1e308", "-1e308", str(10**40), "9" * 5000)


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


@pytest.fixture(scope="module")
def numbers() -> list[tuple[type[object], str]]:
    """Kind of configuration and key of every number; those of `data` without the number of the source."""
    return [(kind, key.replace("data.*.", "data.")) for kind in KINDS for key in numbers_of(kind)]


def test_every_number_has_bounds() -> None:
    unbounded = [
        f"{kind.__name__}: {key}"
        for kind in KINDS
        for key, schema in numbers_of(kind).items()
        if not (schema.keys() & {"minimum", "exclusiveMinimum"} and schema.keys() & {"maximum", "exclusiveMaximum"})
    ]
    assert unbounded == []
    assert len(numbers_of(Config)) > 40


def wrong_answer(kind: type[object], key: str, value: str, folder: Path) -> str | None:
    """What is wrong with the answer to an odd value: no line that names the key, or a configuration that changes."""
    name = key.removesuffix(".*")
    override = f"{name}={f'[{value}, {value}]' if key.endswith('.*') else value}"
    try:
        config = load_config(kind, [], [override])
    except UserError as error:
        return None if name in str(error).replace("data.0.", "data.") and "\n" not in str(error) else str(error)
    except Exception as error:
        return repr(error)
    if isinstance(config, (Config, FinetuneConfig)):
        (folder / "again.toml").write_text(to_toml(config))
        if load_config(type(config), [folder / "again.toml"], []) != config:
            return "accepted, but another one when it is read back"
    return None


def test_an_odd_number_gives_a_configuration_or_one_line(
    numbers: list[tuple[type[object], str]], tmp_path: Path
) -> None:
    answers = {
        f"{kind.__name__}: {key} = {value[:12]}": wrong_answer(kind, key, value, tmp_path)
        for kind, key in numbers
        for value in ODD
    }
    assert {case: answer for case, answer in answers.items() if answer is not None} == {}


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    "override",
    [
        "optim.warmup_epochs=1e6", "loss.temperature=1e-12", "optim.lr=1e18", "geometry.scale=[1000, 1000]",
        "geometry.rotation_deg=[-1e6, 1e6]", "pipelines.ahead=1024",
    ],
)  # fmt: skip
def test_a_run_at_the_bounds_ends_well_or_in_one_line(
    override: str, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny_run.settings(images, tmp_path / "out", "train.epochs=1", override)
    code = run_cli("pretrain", *as_options(settings))
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


def is_bounded(option: click.Option) -> bool:
    """Whether an option has two bounds, and refuses what lies beyond all of them."""
    kind = option.type
    if not isinstance(kind, (click.IntRange, click.FloatRange)) or None in (kind.min, kind.max):
        return False
    return math.isfinite(cast(float, kind.max)) and not any(accepts(option, value) for value in BEYOND)


def accepts(option: click.Option, value: str) -> bool:
    try:
        option.type(value, option)
    except click.BadParameter:
        return False
    return True


def test_every_number_of_a_command_has_bounds() -> None:
    options = command_numbers()
    assert len(options) > 12
    assert [f"{command} {option.opts[0]}" for command, option in options if not is_bounded(option)] == []
