"""Configuration: layers, round trip, bounds of every number, and errors that tell what to do."""

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from pydantic import TypeAdapter

from peclr_dali.cli import main
from peclr_dali.errors import UserError
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import first_difference, load_config, to_toml
from peclr_dali.train.config.pretraining import Config
from tests.command_line import as_options, run_cli
from tests.train import tiny_run

ROOT = Path(__file__).parents[2]


def load(*overrides: str, files: list[Path] | None = None) -> Config:
    return load_config(Config, files or [], list(overrides))


def tables_of(config: Config | FinetuneConfig) -> list[tuple[str, Any]]:
    """Name and table; of the sources, the first."""
    found = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return [(name, table[0] if isinstance(table, tuple) else table) for name, table in found]


def test_later_layers_win(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys one by one; sources in place of those of an earlier file, which is told."""
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[train]\nbatch = 64\nmicro_batch = 32\n[optim]\nlr = 1e-4\n[data]\ncenter_frac = 0.45\n")
    second.write_text('[train]\nbatch = 128\n[[data]]\nroot = "b"\n')
    config = load("optim.lr=3e-4", "run.out=somewhere/else", files=[first, second])
    assert (config.train.batch, config.train.micro_batch) == (128, 32)
    assert config.optim.lr == 3e-4
    assert config.run.out == "somewhere/else"
    assert [source.center_frac for source in config.data] == [0.6]
    assert caplog.messages == [f"{second}: its [[data]] replaces [data] of {first} and all keys in it"]


@pytest.mark.parametrize(
    "file",
    sorted(file for folder in ("configs", "configs/cards", "networks") for file in (ROOT / folder).glob("*.toml")),
    ids=lambda file: file.stem,
)
def test_shipped_configurations_are_valid(file: Path) -> None:
    tunes = file.stem.startswith("finetune") or "finetune -c" in file.read_text()
    config = load_config(FinetuneConfig, [file], []) if tunes else load_config(Config, [file], [])
    assert (config.pipelines.decoder, config.pipelines.views) == ("auto", "auto")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch=1", "--set batch=1: unknown key batch: did you mean train.batch?"),
        ("train.batch=1", "greater than or equal to 2"),
        ("pipelines.views=gpuu", "pipelines.views = 'gpuu': input should be 'auto', 'cpu', 'gpu' or 'dali'"),
        ("run.log_every=5\nrun.keep=0", "should be a valid integer"),
        ("data.weight=" + "[" * 9999, "data.0.weight = "),
        ("nothing.like=it", "unknown key nothing: --print-config shows all keys"),
        ("geometry.fill=Edge", "geometry.fill = 'Edge': input should be a grey value in [0, 255], or \"edge\""),
        ("geometry.fill=256", "geometry.fill = 256: input should be a grey value"),
        ("geometry.scale=[true,2]", "geometry.scale = [True, 2]: input should be a number"),
        ("train.epochs=true", "--set train.epochs=true: train.epochs = True: input should be a number"),
        ("projector.hidden=1000000", "projector.hidden = 1000000: input should be less than or equal to 32768"),
        ("run=3", "run = 3: input should be a dictionary"),
        ("loss.temprature=1", "unknown key loss.temprature: did you mean loss.temperature?"),
        ("pose.head=mlp", "--set pose.head=mlp: unknown key pose: it is one of finetune and probe; take it out"),
    ],
)
def test_errors_name_key_value_and_remedy(override: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load(override)


def test_what_a_resumed_run_may_change() -> None:
    before = load()
    free = load("run.log_every=7", "pipelines.views=dali", "train.recompute=always", "data.root=/elsewhere")
    assert first_difference(before, free) is None
    assert first_difference(before, load("optim.lr=1e-3")) == "optim.lr: was None, is now 0.001"
    assert first_difference(before, load("train.micro_batch=256")) is not None


@pytest.fixture
def two_sources(tmp_path: Path) -> Path:
    file = tmp_path / "two.toml"
    file.write_text('[[data]]\nroot = "a"\n[[data]]\nsource = "folder"\nroot = "b"\nweight = 2\n')
    return file


def test_several_sources_are_an_array_of_tables(two_sources: Path, tmp_path: Path) -> None:
    """Also in the resolved file, which gives the same configuration."""
    others = ("train.threads=3", "geometry.fill=edge", "geometry.rotation_deg=[-90, 90]", "optim.lr=0.002")
    config = load("data.1.root=elsewhere", *others, files=[two_sources])
    assert [(one.source, one.root, one.weight) for one in config.data] == [
        ("freihand", "a", 1.0), ("folder", "elsewhere", 2.0),
    ]  # fmt: skip
    file, text = tmp_path / "config.toml", to_toml(config)
    file.write_text(text)
    assert load(files=[file]) == config
    assert text.count("[[data]]") == text.count("# bad_list is not set") == 2
    assert first_difference(config, load("data.0.root=moved", files=[file])) is None
    assert first_difference(config, load("data.0.weight=3", files=[file])) == "data.0.weight: was 1.0, is now 3.0"
    assert first_difference(config, load()) is not None


def test_one_source_may_be_written_either_way(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text('[[data]]\nroot = "a"\n')
    for override in ("data.root=b", "data.0.root=b"):
        config = load(override, files=[file])
        assert config.data[0].root == "b"
        assert load(override).data == config.data
        assert "\n[data]\n" in to_toml(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.root=x", "--set data.root=x: 2 tables [[data]]: expected data.0.key=value or data.1.key=value"),
        ("data.2.root=x", "--set data.2.root=x: 2 tables [[data]]: expected data.0.key=value or data.1.key=value"),
        ("data.1.weight=0", "--set data.1.weight=0: data.1.weight = 0: input should be greater than or equal to 0"),
        ("data.1=3", "--set data.1=3: 2 tables [[data]]: expected data.0.key=value or"),
        ("data=[]", "data = []: value should have at least 1 item"),
    ],
)
def test_errors_name_the_source(two_sources: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load(override, files=[two_sources])


@pytest.mark.parametrize("kind", [Config, FinetuneConfig])
def test_every_key_is_shown_and_unset_ones_say_so(
    kind: type[Config] | type[FinetuneConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / 'a "quoted" folder'
    assert run_cli("pretrain" if kind is Config else "finetune", "--out", str(out), "--print-config") == 0
    text = capsys.readouterr().out
    assert not out.exists()
    tables = dict(zip(*[iter(re.split(r"^\[(\w+)\]\n", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
    shown = {
        (table, key) for table, body in tables.items() for key in re.findall(r"^(?:# )?(\w+) ", body, re.MULTILINE)
    }
    config = load_config(kind, [], [f"run.out={out}"])
    assert shown == {(name, field.name) for name, table in tables_of(config) for field in dataclasses.fields(table)}
    assert {"regressor", "bad_list", "batch", "threads"} <= {*re.findall(r"^# (\w+) is not set$", text, re.MULTILINE)}
    file = tmp_path / "shown.toml"
    file.write_text(text)
    assert load_config(kind, [file], []) == config


@pytest.mark.parametrize(("epochs", "warned"), [(9, True), (10, True), (11, False)])
def test_a_warm_up_as_long_as_the_run_is_named(
    epochs: int, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (f"data.root={tmp_path}", f"train.epochs={epochs}", "train.batch=4", "train.micro_batch=4")
    assert run_cli("pretrain", *as_options(settings)) == 2  # there are no images
    printed = capsys.readouterr().err
    assert (f"optim.warmup_epochs = 10 and train.epochs = {epochs}: the learning rate only rises" in printed) == warned


def test_an_empty_file_and_one_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_bytes(b"")
    assert load(files=[file]) == Config()
    file.write_bytes(b"\xef\xbb\xbf[train]\nepochs = 3\n")
    assert load(files=[file]).train.epochs == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[train]\nepoch = 3\n", r"unknown key train\.epoch: did you mean train\.epochs\?"),
        (b"\x00\x01\x02" * 1000, ".*; expected a TOML file"),
        (b"\xff\xfe\x00", ".*; expected a TOML file"),
        (None, "Is a directory; expected a TOML file"),
    ],
)
def test_the_errors_of_a_file_name_it(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(UserError, match=rf"mine\.toml: {message}"):
        load(files=[file])


@pytest.mark.parametrize("kind", [Config, FinetuneConfig])
def test_a_range_upside_down_is_refused(kind: type[Config | FinetuneConfig]) -> None:
    config = load_config(kind, [], [])
    ranges = [
        (f"{name}.{field.name}", value)
        for name, table in tables_of(config)
        for field in dataclasses.fields(table)
        if isinstance(value := getattr(table, field.name), tuple)
        and len(value) == 2
        and all(isinstance(number, float) for number in value)
    ]
    assert {"geometry.rotation_deg", "geometry.scale", "colour.hue"} <= {key for key, _ in ranges}
    for key, (low, high) in ranges:
        with pytest.raises(UserError, match=f"{key}.*from low to high"):
            load_config(kind, [], [f"{key}=[{max(high, low + 0.1)}, {low}]"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("geometry.flip_probability=0.5", r"geometry: flip_probability.*views that are not flipped"),
        ("data.positive=version", "a pose is learnt from single views"),
    ],
)
def test_what_a_pose_is_not_learnt_from(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(FinetuneConfig, [], [override])


@pytest.mark.parametrize("key", ["run.out", "data.root", "data.box", "data.bad_list", "encoder.weights"])
def test_a_path_that_cannot_be_used_is_refused(key: str) -> None:
    for path, message in {
        os.fsdecode(b"H" + bytes([0xE4]) + b"nde"): "unicode string",
        "": "at least 1 character",
        "~/hands": r"~ and \$NAME are not replaced here; write it out",
        "$HANDS/all": r"~ and \$NAME are not replaced here; write it out",
        "runs/$JOB": r"~ and \$NAME are not replaced here; write it out",
        "runs/a\0b": "write it out",
    }.items():
        with pytest.raises(UserError, match=rf"^--set {key}=.*: {key.replace('data', 'data.0')} = .*{message}"):
            load(f"{key}={path}")


def test_a_later_name_is_not_refused_because_of_an_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "first.toml"
    file.write_text('[encoder]\nname = "timm/vit_small_patch16_224"\nweights = "random"\n[loss]\nname = "mine"\n')
    config = load("encoder.name=resnet18", "loss.name=nt_xent", files=[file])
    assert (config.encoder.name, config.loss.name) == ("resnet18", "nt_xent")


KINDS: tuple[type[Config] | type[FinetuneConfig], ...] = (Config, FinetuneConfig)
ODD = ("inf", "-inf", "nan", "1e308", "-1e308", "1e-308", "-1", "0", str(10**40), str(-(10**40)))
BEYOND = ("inf", "-inf", "1e308", "-1e308", str(10**40), str(-(10**40)), "9" * 5000)


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


def test_every_number_has_bounds() -> None:
    unbounded = [
        f"{kind.__name__}: {key}"
        for kind in KINDS
        for key, schema in numbers_of(kind).items()
        if not (schema.keys() & {"minimum", "exclusiveMinimum"} and schema.keys() & {"maximum", "exclusiveMaximum"})
    ]
    assert unbounded == []
    assert len(numbers_of(Config)) > 40


def wrong_answer(kind: type[Config] | type[FinetuneConfig], key: str, value: str, folder: Path) -> str | None:
    """What is wrong with the answer to an odd value: no line that names the key, or a configuration that changes."""
    name = key.removesuffix(".*").replace("data.*.", "data.")  # without the number of the source
    override = f"{name}={f'[{value}, {value}]' if key.endswith('.*') else value}"
    try:
        config = load_config(kind, [], [override])
    except UserError as error:
        return None if name in str(error).replace("data.0.", "data.") and "\n" not in str(error) else str(error)
    except Exception as error:
        return repr(error)
    (folder / "again.toml").write_text(to_toml(config))
    again = load_config(kind, [folder / "again.toml"], [])
    return None if again == config else "accepted, but another one when it is read back"


def test_an_odd_number_gives_a_configuration_or_one_line(tmp_path: Path) -> None:
    answers = {
        f"{kind.__name__}: {key} = {value[:12]}": wrong_answer(kind, key, value, tmp_path)
        for kind in KINDS
        for key in numbers_of(kind)
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


def test_every_number_of_a_command_has_bounds() -> None:
    """So it refuses what lies beyond all bounds."""
    options = [
        option
        for command in main.commands.values()
        for option in command.params
        if isinstance(option, click.Option)
        and isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType))
    ]
    assert len(options) > 12
    for option, value in itertools.product(options, BEYOND):
        with pytest.raises(click.BadParameter):
            option.type(value, option)
