"""Configuration: layers, round trip, and errors that tell what to do."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from peclr_dali.errors import UserError
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.config.tables import first_difference, key_meanings, to_dict, to_toml
from tests.command_line import run_cli

ROOT = Path(__file__).parents[2]


def load(*overrides: str, files: list[Path] | None = None) -> Config:
    return load_config(Config, files or [], list(overrides))


def test_defaults_are_the_papers() -> None:
    config = load()
    assert (config.train.batch, config.train.epochs, config.optim.warmup_epochs) == (2048, 100, 10.0)
    assert config.geometry.rotation_deg == (-45.0, 45.0)
    assert config.geometry.scale == (0.6, 2.0)
    assert config.geometry.translation_frac * config.geometry.side_px == 15
    assert config.colour.jitter == "hsv"
    assert config.equivariance.variant == "paper"


def test_later_layers_win(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[train]\nbatch = 64\nmicro_batch = 32\n[optim]\nlr = 1e-4\n")
    second.write_text("[train]\nbatch = 128\n")
    config = load("optim.lr=3e-4", "run.out=somewhere/else", files=[first, second])
    assert (config.train.batch, config.train.micro_batch) == (128, 32)
    assert config.optim.lr == 3e-4
    assert config.run.out == "somewhere/else"


def test_the_resolved_file_gives_the_same_configuration(tmp_path: Path) -> None:
    config = load("train.threads=3", "geometry.fill=edge", "geometry.rotation_deg=[-90, 90]", "optim.lr=0.002")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert load(files=[file]) == config


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
        ("geometry.rotation_deg=45", "geometry.rotation_deg = 45"),
        ("pipelines.views=fast", "'auto', 'cpu', 'gpu' or 'dali'"),
        ("loss.temprature=1", "unknown key loss.temprature: did you mean loss.temperature?"),
    ],
)
def test_errors_name_key_value_and_remedy(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(override)
    assert message in str(caught.value)


def test_a_file_s_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nepoch = 3\n")
    with pytest.raises(UserError, match=r"mine\.toml: unknown key train\.epoch: did you mean train\.epochs\?"):
        load(files=[file])


def test_what_a_resumed_run_may_change() -> None:
    before = to_dict(load())
    free = load("run.log_every=7", "pipelines.views=dali", "train.recompute=always", "data.root=/elsewhere")
    assert first_difference(before, free) is None
    assert first_difference(before, load("optim.lr=1e-3")) == "optim.lr: was None, is now 0.001"
    assert first_difference(before, load("train.micro_batch=256")) is not None


def test_a_run_of_an_earlier_version_had_the_defaults_of_the_keys_that_it_lacks(two_sources: Path) -> None:
    before = to_dict(load(files=[two_sources]))
    del before["appearance"], before["optim"]["lars"], before["data"][1]["label_seed"]
    assert first_difference(before, load(files=[two_sources])) is None
    changed = load("optim.lars=weights", files=[two_sources])
    assert first_difference(before, changed) == "optim.lars: was 'all', is now 'weights'"
    changed = load("data.1.label_seed=3", files=[two_sources])
    assert first_difference(before, changed) == "data.1.label_seed: was 0, is now 3"


@pytest.fixture
def two_sources(tmp_path: Path) -> Path:
    file = tmp_path / "two.toml"
    file.write_text('[[data]]\nroot = "a"\n[[data]]\nsource = "folder"\nroot = "b"\nweight = 2\n')
    return file


def test_several_sources_are_an_array_of_tables(two_sources: Path, tmp_path: Path) -> None:
    config = load("data.1.root=elsewhere", files=[two_sources])
    assert isinstance(config.data, tuple)
    assert [(one.source, one.root, one.weight) for one in config.data] == [
        ("freihand", "a", 1.0), ("folder", "elsewhere", 2.0),
    ]  # fmt: skip
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert load(files=[file]) == config
    before = to_dict(config)
    assert first_difference(before, load("data.0.root=moved", files=[two_sources])) is None
    changed = first_difference(before, load("data.0.weight=3", files=[two_sources]))
    assert changed == "data.0.weight: was 1.0, is now 3.0"
    assert first_difference(before, load()) is not None


def test_one_source_may_be_written_either_way(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text('[[data]]\nroot = "a"\n')
    for override in ("data.root=b", "data.0.root=b"):
        config = load(override, files=[file])
        assert isinstance(config.data, tuple)
        assert config.data[0].root == "b"
        assert load(override).data == config.data[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.root=x",
            "--set data.root=x: there are 2 tables [[data]]: say which one to change, such as --set data",
        ),
        ("data.2.root=x", "--set data.2.root=x: there is no data.2; expected data.0 to data.1"),
        ("data.1.rot=x", "--set data.1.rot=x: unknown key data.1.rot: did you mean data.root?"),
        (
            "data.1.weight=0",
            "--set data.1.weight=0: data.1.weight = 0: input should be greater than or equal to 0",
        ),
        ("data.1=3", "data.1 is a table"),
        ("data=[]", "expected at least 1, found 0"),
        ("data=3", "data = 3"),
    ],
)
def test_errors_name_the_source(two_sources: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(override, files=[two_sources])
    assert message in str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_demo_runs_on_one_process_and_on_two(world_size: int) -> None:
    train = load(files=[ROOT / "configs" / "demo.toml"]).train
    shares = [micro_batch_share(train.batch, train.micro_batch, rank, world_size) for rank in range(world_size)]
    assert sum(len(share) for share in shares) == train.batch


@pytest.mark.parametrize("kind", [Config, FinetuneConfig])
def test_every_key_is_shown_and_unset_ones_say_what_they_mean(
    kind: type[Config] | type[FinetuneConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("pretrain" if kind is Config else "finetune", "--print-config") == 0
    text = capsys.readouterr().out
    tables = dict(zip(*[iter(re.split(r"^\[(\w+)\]\n", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
    shown = {
        (table, key) for table, body in tables.items() for key in re.findall(r"^(?:# )?(\w+) ", body, re.MULTILINE)
    }
    config = kind()
    wanted = {
        (table.name, field.name)
        for table in dataclasses.fields(config)
        for field in dataclasses.fields(getattr(config, table.name))
    }
    assert shown == wanted
    unset = re.findall(r"^# (\w+) is not set: (.+)$", text, re.MULTILINE)
    assert {"regressor", "bad_list", "batch", "threads"} <= {key for key, _ in unset}
    assert all(len(meaning) > 20 for _, meaning in unset)
    file = tmp_path / "shown.toml"
    file.write_text(text)
    assert load_config(kind, [file], []) == config


def test_several_sources_are_shown_with_their_unset_keys(two_sources: Path) -> None:
    text = to_toml(load(files=[two_sources]))
    assert text.count("[[data]]") == text.count("# bad_list is not set: list of files to leave out") == 2


def test_every_key_has_a_meaning() -> None:
    tables = [getattr(kind(), field.name) for kind in (Config, FinetuneConfig) for field in dataclasses.fields(kind)]
    for table in tables:
        assert {field.name for field in dataclasses.fields(table)} <= key_meanings(type(table)).keys()


DEEP = "x = " + "[" * 300 + "]" * 300
VERY_DEEP = "x = " + "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x01\x02" * 1000, "odd.toml is not TOML"),
        (b"\xff\xfe\x00", "odd.toml is not TOML"),
        (DEEP.encode(), "odd.toml: is nested too deeply"),
        (VERY_DEEP.encode(), "odd.toml: is nested too deeply"),
        (("[" + ".".join("a" * 5000) + "]").encode(), "odd.toml: is nested too deeply"),
        (b"[train]\nbatch = " + b"9" * 5000, "odd.toml is not TOML"),
        (b"[train]\nbatch = 0x" + b"f" * 5000, "train.batch has 20000 bits"),
        (b'[train]\nbatch = "' + b"x" * 5000 + b'"', "train.batch = 'xxx"),
        (b'[run]\nout = "a\\u0000b"', "run.out = 'a\\x00b': expected UTF-8 without NUL"),
        (b"[data]\n[data." + b"9" * 5000 + b"]\nroot = 'a'", "there is no data.999"),
        (b"#" * (2**20 + 1), "has 1048577 bytes; expected a TOML file of at most 1048576"),
    ],
    ids=["binary", "no UTF-8", "deep", "very deep", "deep tables", "decimals", "hex", "long", "NUL", "number", "huge"],
)
def test_an_odd_file_is_one_short_line(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.toml"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(files=[file])
    assert message in str(caught.value)
    assert len(str(caught.value)) < len(str(file)) + 500


def test_an_empty_file_and_one_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_bytes(b"")
    assert load(files=[file]) == Config()
    file.write_bytes(b"\xef\xbb\xbf[train]\nepochs = 3\n")
    assert load(files=[file]).train.epochs == 3


def test_a_pipe_a_device_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path, message in {
        tmp_path / "pipe.toml": "pipe.toml: is a pipe or a device",
        Path("/dev/zero"): "/dev/zero: is a pipe or a device",
        tmp_path: "Is a directory",
    }.items():
        with pytest.raises(UserError, match=message):
            load(files=[path])


@pytest.mark.parametrize("kind", [Config, FinetuneConfig])
def test_a_range_upside_down_is_refused(kind: type[Config | FinetuneConfig]) -> None:
    config = load_config(kind, [], [])
    ranges = [
        (f"{table.name}.{field.name}", value)
        for table in dataclasses.fields(config)
        for field in dataclasses.fields(getattr(config, table.name))
        if isinstance(value := getattr(getattr(config, table.name), field.name), tuple)
        and len(value) == 2
        and all(isinstance(number, float) for number in value)
    ]
    assert {"geometry.rotation_deg", "geometry.scale", "colour.hue"} <= {key for key, _ in ranges}
    for key, (low, high) in ranges:
        with pytest.raises(UserError, match=f"{key}.*from low to high"):
            load_config(kind, [], [f"{key}=[{max(high, low + 0.1)}, {low}]"])


def test_a_pose_is_not_learnt_from_flipped_views() -> None:
    with pytest.raises(UserError, match=r"geometry\.flip_probability.*views that are not flipped"):
        load_config(FinetuneConfig, [], ["geometry.flip_probability=0.5"])


@pytest.mark.parametrize("key", ["run.out", "data.root", "data.box", "data.bad_list", "encoder.weights"])
def test_a_path_that_is_not_utf8_is_refused(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key} = 'H\\udce4nde': expected UTF-8"):
        load(f"{key}={os.fsdecode(b'H' + bytes([0xE4]) + b'nde')}")


@pytest.mark.parametrize("override", ["x=" + "[" * 5000, "a" + ".a" * 5000 + "=1", "data." + "9" * 5000 + ".root=a"])
def test_a_deep_or_long_override_is_one_line(override: str) -> None:
    with pytest.raises(UserError):
        load(override)
