"""Trackers: what each gets, what a resumed run goes on with, and that none ends a run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import pty
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from peclr_dali.errors import UserError
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config, RunConfig
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs import trackers
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.trackers import TRACKERS, Tracker, Trackers, require_installed
from tests.train import tiny_run
from tests.train.ranks import free_port
from tests.train.tiny_run import final_weights, settings, write_images

SHORT = ("train.epochs=2", "run.checkpoint_every=4")
ALL = 'run.trackers=["tensorboard", "mlflow", "wandb"]'


class Recorder(Tracker):
    """Keeps what it is given; fails at one call."""

    def __init__(self, fails_at: str = "", error: type[BaseException] = ConnectionError) -> None:
        self._error = error
        self.calls: list[tuple[Any, ...]] = []
        self._fails_at = fails_at

    def __call__(self, folder: Path, first_step: int, run_id: str | None) -> Tracker:
        self._note("made", folder, first_step, run_id)
        self.id = run_id or "first"
        return self

    def _note(self, *call: Any) -> None:
        if call[0] == self._fails_at:
            raise self._error(f"no server\nat {call[0]}")
        self.calls.append(call)

    def configuration(self, tables: Mapping[str, Any]) -> None:
        self._note("configuration", tables)

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        self._note("scalars", row, step)

    def picture(self, path: Path, step: int) -> None:
        self._note("picture", path.name, path.read_text(), step)

    def close(self) -> None:
        self._note("close")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, keep=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder, and an environment in which nothing leaves the machine."""
    root = tmp_path_factory.mktemp("trackers")
    write_images(root / "images")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "MLFLOW_TRACKING_URI": (root / "mlruns").as_uri(),
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "WANDB_ERROR_REPORTING": "false",
            "WANDB__SERVICE_WAIT": "300",
            "WANDB_INIT_TIMEOUT": "300",
        }.items():
            patch.setenv(name, value)
        patch.setattr(trackers, "_PATIENCE_S", 300.0)
        yield root


def registered(monkeypatch: pytest.MonkeyPatch, **recorders: Recorder) -> list[str]:
    for name, recorder in recorders.items():
        monkeypatch.setitem(TRACKERS, name, recorder)
    return [*recorders]


def tracked(names: list[str], folder: RunFolder, first_step: int = 0) -> None:
    """Two rows; a picture that is there at the first, one that changes before the end."""
    running = Trackers(names, folder, {"run": {"seed": 1}}, first_step=first_step)
    folder.views_picture.write_text("views")
    running.scalars({"loss": 1.0}, 2)
    running.scalars({"loss": 0.5}, 4)
    folder.loss_picture.write_text("curve")
    running.close()


def test_a_tracker_gets_everything_in_order(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    tracked(registered(monkeypatch, one=recorder), folder)
    assert recorder.calls == [
        ("made", folder.root, 0, None),
        ("configuration", {"run": {"seed": 1}}),
        ("scalars", {"loss": 1.0}, 2),
        ("picture", "views.png", "views", 2),
        ("scalars", {"loss": 0.5}, 4),
        ("picture", "loss.png", "curve", 4),
        ("close",),
    ]


def test_a_resumed_run_gets_the_id_that_it_had(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    names = registered(monkeypatch, one=recorder)
    tracked(names, folder)
    tracked(names, folder, first_step=4)
    made = [call for call in recorder.calls if call[0] == "made"]
    assert made == [("made", folder.root, 0, None), ("made", folder.root, 4, "first")]


def test_a_name_that_is_given_twice_is_one_tracker(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    registered(monkeypatch, one=recorder)
    tracked(["one", "one"], folder)
    assert [call[0] for call in recorder.calls].count("made") == 1


@pytest.mark.parametrize("error", [ConnectionError, SystemExit])
@pytest.mark.parametrize("where", ["made", "configuration", "scalars", "picture", "close"])
def test_one_that_fails_is_left_out_with_one_warning(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    error: type[BaseException],
) -> None:
    bad, good = Recorder(fails_at=where, error=error), Recorder()
    tracked(registered(monkeypatch, bad=bad, good=good), folder)
    assert len(good.calls) == 7
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert warning.getMessage() == (
        f'the tracker "bad" is dropped and the run continues: {error.__name__}: no server at {where}'
    )


def test_wandb_without_a_login_asks_nothing_at_a_terminal(tmp_path: Path) -> None:
    """W&B prompts where stdin and stderr are a terminal; the answer that never comes would end the run with SIGABRT."""
    program = """
import logging, sys
from pathlib import Path
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.trackers import Trackers
logging.basicConfig()
running = Trackers(["wandb"], RunFolder(Path(sys.argv[1]), keep=1), {}, first_step=0)
running.scalars({"loss": 1.0}, 1)
running.close()
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_ERROR_REPORTING": "false"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parents[3], env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    with suppress(OSError):  # Linux's end of a terminal
        while read := os.read(ours, 4096):
            said += read
    os.close(ours)
    assert process.wait() == 0, said
    (line,) = said.decode().splitlines()
    assert line.startswith('WARNING:peclr_dali.train.runs.trackers:the tracker "wandb" is dropped')
    assert "no login: run 'wandb login'" in line


def test_an_mlflow_server_that_is_down_costs_seconds_and_one_line(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without urllib3's warning of each attempt."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    connection = importlib.import_module("urllib3.connection").HTTPConnection
    attempts, connect = [], connection.connect

    def counted(self: Any) -> None:
        attempts.append(self.port)
        connect(self)

    monkeypatch.setattr(connection, "connect", counted)
    with patch.dict(os.environ):
        tracked(["mlflow"], folder)
    assert len(attempts) == 3
    (warning,) = caplog.records
    assert warning.getMessage().startswith('the tracker "mlflow" is dropped and the run continues: MlflowExc')
    assert "Max retries exceeded" in warning.getMessage()
    assert "Connection refused" in warning.getMessage()


def test_mlflow_is_dropped_with_one_line_when_its_threads_lose_a_row(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, root: Path
) -> None:
    def fail(*arguments: object) -> None:
        raise ConnectionError("the server has gone")

    running = Trackers(["mlflow"], folder, {"run": {"seed": 1}}, first_step=0)
    monkeypatch.setattr("mlflow.store.tracking.file_store.FileStore._log_run_metric", fail)
    running.scalars({"loss": 1.0}, 2)
    importlib.import_module("mlflow").flush_async_logging()
    running.scalars({"loss": 0.5}, 4)
    running.scalars({"loss": 0.4}, 6)
    running.close()
    importlib.import_module("mlflow").end_run()
    (warning,) = caplog.messages
    assert warning.startswith('the tracker "mlflow" is dropped and the run continues: ConnectionError: Run Id ')
    assert "the server has gone" in warning


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_installed(["tensorboard", "mlflow", "wandb"])
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else found(name))
    with pytest.raises(UserError, match=r'run.trackers has "mlflow".*peclr-dali\[mlflow\].*out of') as caught:
        require_installed(["tensorboard", "mlflow"])
    assert "\n" not in str(caught.value)


def test_names(tmp_path: Path) -> None:
    assert RunConfig().trackers == ("tensorboard",)
    with pytest.raises(UserError, match=r"run\.trackers\.0 = 'wandbb'.* did you mean wandb\?"):
        load_config(Config, [], ['run.trackers=["wandbb"]'])


# One run with all trackers, resumed from its first checkpoint, beside one with none.


@pytest.fixture(scope="module")
def runs(root: Path, narrow: None) -> Path:
    def run(out: str, *overrides: str) -> None:
        pretrain(load_config(Config, [], settings(root / "images", root / out, *SHORT, *overrides)), "auto")

    run("untracked", "run.trackers=[]")
    run("tracked", ALL, "run.profile_steps=2")
    (root / "tracked" / "first_profile.txt").write_bytes((root / "tracked" / "profile.txt").read_bytes())
    (root / "tracked" / "checkpoints" / "step_000000008.pt").unlink()
    run("tracked", ALL, "run.profile_steps=2", "run.keep=4")
    return root


def rows_of(out: Path) -> dict[int, dict[str, float]]:
    return {int(row.pop("step")): row for row in tiny_run.rows_of(out)}


def test_trackers_and_profiler_change_no_number(runs: Path) -> None:
    """Nor does a run without any need one."""
    tracked, untracked = (final_weights(runs / out, 8) for out in ("tracked", "untracked"))
    assert all(torch.equal(tracked[name], value) for name, value in untracked.items())
    assert not (runs / "untracked" / "tensorboard").exists()
    assert not [*(runs / "untracked").glob("tracker-*")]


def test_tensorboard_has_the_rows(runs: Path) -> None:
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    board = accumulator.EventAccumulator(str(runs / "tracked" / "tensorboard"))
    board.Reload()
    for name in ("loss", "lr", "images_per_s"):
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert shown == pytest.approx({step: row[name] for step, row in rows_of(runs / "tracked").items()})


def test_mlflow_has_one_run_with_rows_parameters_and_pictures(runs: Path) -> None:
    client = importlib.import_module("mlflow").MlflowClient()
    (run,) = client.search_runs(["0"], "attributes.run_name = 'tracked'")
    assert run.info.run_id == (runs / "tracked" / "tracker-mlflow.txt").read_text().strip()
    assert (run.info.run_name, run.info.status) == ("tracked", "FINISHED")
    assert (run.data.params["train.batch"], run.data.params["run.keep"]) == ("12", "3")  # as it was begun
    config = Path(client.download_artifacts(run.info.run_id, "config.json", str(runs)))
    assert json.loads(config.read_text())["run"]["keep"] == 4  # as it is now
    rows = rows_of(runs / "tracked")
    for name in rows[2]:
        history = client.get_metric_history(run.info.run_id, name)
        assert [metric.step for metric in history] == [2, 4, 6, 8, 6, 8]
        assert {metric.step: metric.value for metric in history} == {step: row[name] for step, row in rows.items()}
    for name in ("views.png", "loss.png"):
        copied = Path(client.download_artifacts(run.info.run_id, name, str(runs)))
        assert copied.read_bytes() == (runs / "tracked" / name).read_bytes()


def test_wandb_has_the_rows_config_and_pictures_under_one_id(runs: Path) -> None:
    """Offline, the resumed run is a second file with the same id, which `wandb sync` joins."""
    files = sorted((runs / "tracked" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    rows = rows_of(runs / "tracked")
    for file, steps, keep in zip(files, ([2, 4, 6, 8], [6, 8]), (3, 4), strict=True):
        (run_id,) = {record.run.run_id for record in records_of(file) if record.HasField("run")}
        assert run_id == (runs / "tracked" / "tracker-wandb.txt").read_text().strip()
        history: dict[int, dict[str, Any]] = {}
        config: dict[str, Any] = {}
        for record in records_of(file):
            for item in record.history.item:
                name = item.key or item.nested_key[0]
                history.setdefault(record.history.step.num, {})[name] = json.loads(item.value_json)
            for item in record.run.config.update:
                config[item.key] = json.loads(item.value_json)
            for item in record.config.update:
                config[item.key] = json.loads(item.value_json)
        assert sorted(history) == steps
        assert config["run"]["keep"] == keep
        assert history[8]["loss"] == rows[8]["loss"]
        assert {"pictures/views", "pictures/loss"} <= {name for row in history.values() for name in row}
        assert len([*(file.parent / "files" / "media" / "images" / "pictures").glob("*.png")]) >= 2


def records_of(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a block's end is too short for a header
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record.FromString(parts)
            parts = b""


def test_the_profile_is_written_once(runs: Path) -> None:
    tracked = runs / "tracked"
    assert (tracked / "profile.txt").read_bytes() == (tracked / "first_profile.txt").read_bytes()
    assert "aten::convolution_backward" in (tracked / "profile.txt").read_text()
    assert not (runs / "untracked" / "profile.txt").exists()
