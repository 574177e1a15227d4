"""The examples at toy size, by the command that their first line names."""

import importlib
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from examples.simhand import weighted_nt_xent
from peclr_dali.models.config import EncoderConfig, ProjectorConfig
from peclr_dali.models.network import build_network
from peclr_dali.models.nt_xent import NTXent
from peclr_dali.train.config.load import load_config, to_dict
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.runs.checkpoint import write_checkpoint
from tests.command_line import as_options, run_cli
from tests.train import tiny_hands
from tests.train.narrow import narrow_resnet18
from tools import sign_digits

ROOT = Path(__file__).parents[1]
FILES = sorted(file for file in (ROOT / "examples").glob("*.py") if file.name != "__init__.py")


def run(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """As `python -m` does in this process, which has imported torch already; what it prints."""
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    monkeypatch.delitem(sys.modules, name, raising=False)  # runpy warns of it
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    return capsys.readouterr().out


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_short_and_says_its_command(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert 40 <= len(lines) <= 120
    assert lines[0].startswith(f'"""Run `.venv/bin/python -m examples.{file.stem}`: ')
    assert importlib.import_module(f"examples.{file.stem}").main


def test_simhand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_hands.write_hands(tmp_path, 24)
    printed = run("examples.simhand", f"--root {tmp_path} --batch 32 --micro-batch 8 --epochs 5", monkeypatch, capsys)
    (distance,) = numbers(r"nearest: ([\d.]+)", printed)
    assert 0 < distance < 0.5
    losses = numbers(r"loss ([\d.]+)", printed)
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_simhands_loss_is_the_written_out_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    keypoints_px = torch.randn(2, 4, 21, 2, generator=generator, dtype=torch.float64)
    z, p = embeddings.flatten(0, 1), keypoints_px.flatten(0, 1)
    distance = torch.tensor([[float((a - b).norm(dim=1).mean()) for b in p] for a in p])
    of_pairs = [float(distance[i, i + 4]) for i in range(4)]
    losses = []
    for i in range(8):

        def weighted(j: int, smallest: float, largest: float, i: int = i) -> float:
            cosine = float(torch.nn.functional.cosine_similarity(z[i], z[j], dim=0))
            return cosine * (largest - float(distance[i, j])) / (largest - smallest) / 0.5

        below = sum(math.exp(weighted(j, 0, float(distance.max()))) for j in range(8) if j != i)
        losses.append(math.log(below) - weighted((i + 4) % 8, min(of_pairs), max(of_pairs)))
    assert float(weighted_nt_xent(embeddings, keypoints_px)) == pytest.approx(sum(losses) / 8, rel=1e-5)
    equal = weighted_nt_xent(embeddings, torch.zeros(2, 4, 21, 2))  # all weights are 1
    assert float(equal) == pytest.approx(float(NTXent()(embeddings)), rel=1e-12)


@narrow_resnet18()
def test_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The encoder of such a run is reported on, exported and fine-tuned."""
    run_folder, encoder = tmp_path / "run", tmp_path / "encoder.pth"
    arguments = f"--poses 6 --batch 12 --epochs 2 --data {tmp_path / 'images'} --out {run_folder}"
    printed = run("examples.own_loss", arguments, monkeypatch, capsys)
    again = run("examples.own_loss", arguments, monkeypatch, capsys)  # has finished
    rows = r"step (\d): loss (\S+) = (\S+) \+ 0.5 \* (\S+)"
    found = [[float(number) for number in row] for row in re.findall(rows, printed)]
    assert [step for step, *_ in found] == [1, 2, 3, 4]
    for _, loss, aligned, uniform in found:
        assert loss == pytest.approx(aligned + 0.5 * uniform, abs=2e-3)
        assert uniform < 0 < aligned
    assert re.findall(rows, again) == re.findall(rows, printed)
    hands = tiny_hands.write_hands(tmp_path / "hands", 6)
    settings = tiny_hands.settings(hands, tmp_path / "fine", "train.epochs=1", "optim.lr=1e-12")
    assert run_cli("report", str(run_folder), "--out", str(tmp_path / "report.html")) == 0
    assert run_cli("export", str(run_folder), str(encoder)) == 0
    assert run_cli("finetune", *as_options(settings), "--from", str(run_folder)) == 0
    tuned = load_pose_run(tmp_path / "fine").network.encoder.library_state_dict()
    assert "align_uniform" in (tmp_path / "report.html").read_text()
    for name, weight in torch.load(encoder, weights_only=True).items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked", "fc.weight", "fc.bias")):
            torch.testing.assert_close(tuned[name], weight, rtol=0, atol=1e-6)


@narrow_resnet18()
def test_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn pictures of twelve people, in a ResNet-18 with random weights: a ring is a 0, bars are a 9."""
    boxes = ["file,x0,y0,x1,y1,hand,confidence"]
    for number in range(24):
        name, picture = f"{9 * (number % 2)}/IMG_{1000 + number}.JPG", np.full((48, 48, 3), 150 + number, np.uint8)
        colour = np.random.default_rng(number // 2).integers(0, 120, 3).tolist()
        if number % 2 == 0:
            cv2.circle(picture, (24, 24), 12, colour, 4)
        else:
            cv2.line(picture, (24, 8), (24, 40), colour, 8)
        (tmp_path / "images" / name[0]).mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(tmp_path / "images" / name), picture)
        boxes.append(f"{name},4,4,44,44,right,0.9")
    (tmp_path / "boxes.csv").write_text("\n".join(boxes))
    sign_digits.main([str(tmp_path)], standalone_mode=False)
    assert [len((tmp_path / "fold_0" / f"{name}.csv").read_text().split()) for name in ("boxes", "held_out")] == [19, 7]
    config = to_dict(load_config(Config, [], ["encoder.name=resnet18", "geometry.side_px=32"]))
    network = build_network(EncoderConfig("resnet18", "random"), ProjectorConfig()).state_dict()
    write_checkpoint(tmp_path / "network.pt", 1, {"config": config, "network": network})
    printed = run("examples.digits", f"{tmp_path / 'network.pt'} --root {tmp_path}", monkeypatch, capsys)
    for name in ("network.pt", "untrained encoder", "raw pixels"):
        assert numbers(rf"{name}: .*% \(2 people\), .*% \(5 people\), ([\d.]+)% \(9 people\)", printed) == [100], name


def test_a_person_begins_at_a_0_behind_an_8_or_9() -> None:
    assert sign_digits.people_of([0, 1, 8, 9, 0, 3, 8, 0, 0, 9, 2, 0]) == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples" / "loader.ipynb").read_text(encoding="utf-8"))["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
