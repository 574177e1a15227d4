"""A command replaces no file that it did not write, unless --force; and draws nothing among images that are read."""

import tarfile
from pathlib import Path

import pytest
import torch

from peclr_dali.cli import main
from tests.command_line import as_options, refusal, run_cli
from tests.train import tiny_run
from tests.train.test_convert import published_pose
from tests.train.tiny_hands import untrained_run, write_hands

MINE = b'{"checkpoint": 1}'
DATA = as_options(["data.source=folder", "data.root={root}/images", "pipelines.threads=1", "train.device=cpu"])
OUTPUTS = {
    "views": (["views", *DATA, "{root}/out/views.png"], "views.png"),
    "check-data": (["check-data", *DATA, "{root}/out/bad.jsonl"], "bad.jsonl"),
    "pack": (["pack", "--index", "{root}/out"], "index.npz"),
    "convert": (["convert", "{root}/published.pth", "{root}/out/theirs.pth"], "theirs.pth"),
    "export": (["export", "{root}/run", "{root}/out/encoder.safetensors"], "encoder.safetensors"),
    "export --pose": (["export", "{root}/run", "--pose", "{root}/out/pose.safetensors"], "pose.safetensors"),
    "export --onnx": (["export", "{root}/run", "--onnx", "{root}/out/pose.onnx"], "pose.onnx"),
    "predict": (["predict", "{root}/run", "{root}/images/00.jpg", "--out", "{root}/out"], "predictions.json"),
    "report": (["report", "--predictions", "{root}/predicted", "--out", "{root}/out/report.html"], "report.html"),
    "evaluate": (["evaluate", "{root}/run", "--out", "{root}/out", "--worst", "1"], "metrics.json"),
}
"""Arguments, and the file that they write."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("replacing")
    tiny_run.write_images(root / "images", count=4)
    write_hands(root / "hands", 12)
    untrained_run(root / "run", f"data.root={root / 'hands'}", "data.split=train")
    torch.save({"state_dict": published_pose()}, root / "published.pth")
    assert run_cli("predict", str(root / "run"), f"{root}/images/00.jpg", "--out", str(root / "predicted")) == 0
    return root


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "export --onnx")) for case in OUTPUTS]
)
def test_a_file_of_somebody_else_stays_unless_force(
    case: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, name = OUTPUTS[case]
    file = tmp_path / "out" / name
    words = [word.replace("{root}/out", str(file.parent)).format(root=root) for word in arguments]
    file.parent.mkdir()
    file.write_bytes(MINE)
    with tarfile.open(file.with_name("images.tar"), "w") as tar:
        tar.add(root / "images")
    before = {path: path.read_bytes() for path in file.parent.iterdir()}
    if name.endswith(("png", "jsonl", "pth", "safetensors")):
        file.rename(elsewhere := tmp_path / "elsewhere")
        file.symlink_to("nowhere")  # a link is somebody's too, wherever it leads
        assert run_cli(*words) == 2
        elsewhere.rename(file)
    assert "--force" in refusal(capsys, *words)
    assert {path: path.read_bytes() for path in file.parent.iterdir()} == before
    assert run_cli(*words, "--force") == 0
    assert file.read_bytes() != MINE
    assert run_cli(*words) == (0 if case in ("predict", "report", "evaluate") else 2)  # what they wrote says so


def test_pack_does_not_take_a_folder_of_somebody_else_for_its_own(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thesis = tmp_path / "hands.unfinished" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("mine")
    words = ["pack", *(word.format(root=root) for word in DATA), str(tmp_path / "hands")]
    assert f"{thesis}: 'pack' would replace this folder" in refusal(capsys, *words)
    assert thesis.read_text() == "mine"
    shard = thesis.rename(thesis.with_name("shard-000000.tar"))
    assert f"{shard}: 'pack' would replace this folder" in refusal(capsys, *words)
    shard.with_name("process.lock").touch()  # as a call that was killed leaves it
    assert run_cli(*words) == 0


def test_every_command_that_writes_a_file_has_the_option() -> None:
    options = {name: {option.name: option.type for option in one.params} for name, one in main.commands.items()}
    writes = {
        name
        for name, types in options.items()
        if any(getattr(kind, "dir_okay", True) is False and option != "record" for option, kind in types.items())
    }
    assert writes <= {name for name, types in options.items() if "force" in types}
    assert {name for name, types in options.items() if "force" in types} == {case.split()[0] for case in OUTPUTS}


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_no_command_draws_among_the_images_of_a_folder(
    force: list[str], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = root / "images"
    (tmp_path / "link.png").symlink_to(images / "00.jpg")
    before = {path: path.read_bytes() for path in images.iterdir()}
    data = [word.format(root=root) for word in DATA]
    of_folder = [*data, *as_options(["data.split=all", "data.box=center"])]
    for command in (
        ["views", *data, str(images / "views.png")],
        ["views", *data, str(tmp_path / "link.png")],
        ["predict", str(root / "run"), str(images), "--out", str(images / "out")],
        ["evaluate", str(root / "run"), *of_folder, "--out", str(images / "out")],
        ["pretrain", *data, "--out", str(images / "out")],
    ):
        error = refusal(capsys, *command, *(force if command[0] != "pretrain" else []))
        assert f"is within {images}, whose images are read" in error
    assert {path: path.read_bytes() for path in images.iterdir()} == before
