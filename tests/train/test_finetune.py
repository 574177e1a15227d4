"""Whole fine-tuning runs: what they learn, what stays frozen, killed and resumed, on one process and on two."""

import itertools
import os
import random
import shutil
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.models.config import EncoderConfig, PoseConfig
from peclr_dali.models.encoders import build_encoder
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.pipelines.sources import load_index
from peclr_dali.skeleton import HAND
from peclr_dali.train.distributed.world import World
from peclr_dali.train.evaluation.errors import evaluation_constants
from peclr_dali.train.export.weights import export_network
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pose.inference import Poses
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.pose.pose_run import load_pose_run, start_pose_network, validate
from peclr_dali.train.runs.checkpoint import Checkpoints, load_checkpoint
from peclr_dali.train.runs.folder import RunFolder
from tests.command_line import as_options
from tests.train import ranks, tiny_hands, tiny_run
from tests.train.narrow import full_resnet18
from tests.train.tiny_hands import config_of
from tests.train.tiny_run import final_weights

pytestmark = pytest.mark.usefixtures("narrow")


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture(scope="module")
def uninterrupted(hands: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run folder of a run that nothing disturbed."""
    return finetune(config_of(hands, tmp_path_factory.mktemp("runs") / "whole"))


def test_a_run_folder_holds_all_its_files(uninterrupted: RunFolder) -> None:
    root = uninterrupted.root
    names = {path.name for path in root.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "validation.jsonl", "checkpoints", "best", "tensorboard"}
    assert names >= {"views.png", "loss.png", "predictions.png"}
    rows, validations = uninterrupted.read_metrics(), uninterrupted.read_validations()
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12, 14, 15]
    assert {"loss", "keypoints_px", "depth", "root_depth", "lr", "wait_share", "images_per_s"} <= rows[0].keys()
    assert [row["step"] for row in validations] == [5, 10, 15]
    best = min(validations, key=lambda row: row["pa_epe_cm"])
    run = load_pose_run(root)
    assert (run.path, run.step) == (uninterrupted.best.latest(), best["step"])
    assert len(uninterrupted.best.paths()) == 1


def test_the_best_checkpoint_gives_the_figures_of_its_row(hands: Path, uninterrupted: RunFolder) -> None:
    run = load_pose_run(uninterrupted.root)
    index = load_index(config_of(hands, uninterrupted.root, "data.split=val").data)
    figures, poses = validate(run.network, index, PoseLabels.of(index), run.config, World())
    row = min(uninterrupted.read_validations(), key=lambda row: float(row["pa_epe_cm"]))
    assert figures == pytest.approx({name: row[name] for name in figures}, rel=1e-6)
    constants = evaluation_constants(index, PoseLabels.of(index))
    assert row["constant_pa_epe_cm"] == constants["rigid_pose"]["pa_epe_cm"]
    assert row["constant_epe_px"] == constants["mean_keypoints"]["epe_px"]
    assert poses.samples.tolist() == list(range(4))  # in batches of three, the last one's surplus dropped


def test_a_network_whose_weights_are_not_finite_is_never_the_best(
    hands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(network: PoseNetwork, *arguments: Any) -> tuple[dict[str, float], Poses]:
        network.head.weight.data.fill_(np.nan)  # type: ignore[operator]
        return validate(network, *arguments)

    monkeypatch.setattr("peclr_dali.train.finetune.validate", broken)
    with pytest.raises(UserError, match="the loss is nan at step 6"):
        finetune(config_of(hands, tmp_path / "run"))
    assert not (tmp_path / "run" / "best").exists()


def test_a_resumed_run_keeps_a_best_network_although_the_better_one_of_before_is_gone(
    hands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of step 10 replaced that of step 5; the run goes on from step 8 and finds nothing as good again."""
    errors_cm = iter([3.0, 2.0, 4.0, 6.0, 7.0])

    def scripted(*arguments: Any) -> tuple[dict[str, float], Poses]:
        figures, poses = validate(*arguments)
        return {**figures, "pa_epe_cm": next(errors_cm)}, poses

    monkeypatch.setattr("peclr_dali.train.finetune.validate", scripted)
    folder = finetune(config_of(hands, tmp_path / "run", "run.keep=9"))
    assert load_pose_run(folder.root).step == 10
    for path in folder.checkpoints.paths():
        if int(path.stem.removeprefix("step_")) > 8:
            path.unlink()
    finetune(config_of(hands, folder.root, "run.keep=9"), "auto")
    assert [row["step"] for row in folder.read_validations()] == [5, 10, 15]
    assert load_pose_run(folder.root).path == folder.best.path_of(10)
    assert load_checkpoint(folder.best.path_of(10))["validation"]["pa_epe_cm"] == 6.0


def test_killed_at_random_steps_and_resumed_the_weights_are_the_same_bits(
    hands: Path, uninterrupted: RunFolder, tmp_path: Path
) -> None:
    out, log = tmp_path / "killed", tmp_path / "log"
    target = random.Random(os.urandom(8)).randrange(1, 12)
    processes = ranks.start_ranks(1, ranks.finetune_slowly, tiny_hands.settings(hands, out), log=log)
    ranks.wait_for_steps(processes[0], out, target)
    assert processes[0].is_alive(), log.read_text()
    ranks.kill(processes)
    finetune(config_of(hands, out), "auto")
    assert_same_bits(final_weights(uninterrupted.root, tiny_hands.STEPS), final_weights(out, tiny_hands.STEPS))
    assert tiny_run.samples_of_steps(out) == tiny_run.samples_of_steps(uninterrupted.root)
    assert RunFolder(out, keep=3).read_validations() == uninterrupted.read_validations()
    assert [path.name for path in Checkpoints(out / "best", keep=1).paths()] == [
        path.name for path in uninterrupted.best.paths()
    ]


def test_two_processes_train_the_same_run(hands: Path, tmp_path: Path) -> None:
    """In float64, batch norm in train mode: two micro-batches on one rank, or one on each of two."""
    one, two = tmp_path / "one", tmp_path / "two"
    words = ["finetune", *as_options(tiny_hands.settings(hands, two, "train.precision=fp64"))]
    ranks.run_ranks(2, ranks.command, words, log=tmp_path / "log")
    finetune(config_of(hands, one, "train.precision=fp64"))
    assert (two / "samples-rank1.jsonl").exists()
    assert tiny_run.samples_of_steps(one) == tiny_run.samples_of_steps(two)
    torch.testing.assert_close(
        final_weights(one, tiny_hands.STEPS), final_weights(two, tiny_hands.STEPS), rtol=1e-9, atol=1e-11
    )
    for ours, theirs in zip(*(RunFolder(out, keep=3).read_validations() for out in (one, two)), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_a_frozen_encoder_keeps_every_bit(hands: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    start = build_encoder(EncoderConfig("resnet18", "random")).library_state_dict()
    torch.save(start, tmp_path / "start.pth")
    out = tmp_path / "frozen"
    keys = f"encoder.weights={tmp_path}/start.pth", "train.frozen=true", "pose.head=mlp"
    finetune(config_of(hands, out, *keys))
    weights = final_weights(out, tiny_hands.STEPS)
    assert_same_bits(
        start, {name.removeprefix("encoder.resnet."): w for name, w in weights.items() if name.startswith("encoder.")}
    )
    saved = torch.load(Checkpoints(out / "checkpoints", keep=3).paths()[0], weights_only=True)["network"]
    assert not torch.equal(saved["head.0.weight"], weights["head.0.weight"])
    assert weights["refinement.zroot_ref.1.num_batches_tracked"] == tiny_hands.STEPS


@full_resnet18()
def test_it_learns_the_hands_that_it_sees(hands: Path, tmp_path: Path) -> None:
    """Held out and trained on are the same images here: the error must fall clearly."""
    settings = (
        "data.split=all", "train.epochs=20", "train.batch=16", "train.micro_batch=16", "geometry.rotation_deg=[0, 0]",
        "geometry.translation_frac=0", "geometry.scale=[1, 1]", "run.checkpoint_every=100", "optim.lr=2e-3",
    )  # fmt: skip
    config = config_of(hands, tmp_path / "learnt", *settings)
    index = load_index(config.data)
    held_out = index, PoseLabels.of(index)
    torch.manual_seed(0)
    before, _ = validate(start_pose_network(config.encoder, config.pose).network, *held_out, config, World())
    folder = finetune(config)
    assert folder.read_validations() == []  # nothing is held out of split "all"
    after, _ = validate(load_pose_run(folder.root).network, *held_out, config, World())
    assert after["pa_epe_cm"] < 0.6 * before["pa_epe_cm"]
    assert after["epe_px"] < 0.4 * before["epe_px"]
    assert after["epe_cm"] < 0.8 * before["epe_cm"]  # the distance to the camera is learnt last


def test_an_encoder_starts_from_a_run_of_pre_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(EncoderConfig("resnet18", "random"))
    network = {f"encoder.resnet.{name}": value for name, value in encoder.library_state_dict().items()}
    config = {"encoder": {"name": "resnet18"}, "geometry": {"side_px": 32}}
    saved = {"config": config, "network": {**network, "projector.0.bias": torch.zeros(3)}}
    run = tmp_path / "run"
    checkpoint = Checkpoints(run / "checkpoints", keep=1).save(7, saved)
    for start in (run, checkpoint):
        started = start_pose_network(EncoderConfig("resnet18", str(start)), PoseConfig()).network
        assert_same_bits(encoder.library_state_dict(), started.encoder.library_state_dict())
    Checkpoints(run / "checkpoints", keep=2).save(8, {**saved, "network": {}})
    best = Checkpoints(run / "best", keep=1).save(7, saved)
    started = start_pose_network(EncoderConfig("resnet18", str(run)), PoseConfig()).network  # the best, not the newest
    assert_same_bits(encoder.library_state_dict(), started.encoder.library_state_dict())
    shutil.rmtree(best.parent)
    with pytest.raises(UserError, match=r"holds a resnet18, and encoder.name = 'resnet50': set encoder.name"):
        start_pose_network(EncoderConfig("resnet50", str(run)), PoseConfig())
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match=r"run holds no checkpoint; expected encoder\.weights to be"):
        start_pose_network(EncoderConfig("resnet18", str(run)), PoseConfig())


def test_a_head_is_kept_where_it_is_the_same_one(tmp_path: Path) -> None:
    run = tiny_hands.untrained_run(tmp_path / "run")
    file = tmp_path / "network.safetensors"
    export_network(run, file)
    whole = load_pose_run(run).network.state_dict()
    for source in (run, file):
        torch.manual_seed(1)
        encoder = EncoderConfig("resnet18", str(source))
        kept = start_pose_network(encoder, PoseConfig())
        assert kept.keeps_head
        assert kept.depth
        torch.testing.assert_close(kept.network.state_dict(), whole, rtol=1e-3, atol=1e-6)  # the file's have 16 bits
        for other in (PoseConfig(weights="random"), PoseConfig(root="middle_mcp"), PoseConfig(refine=False)):
            start = start_pose_network(encoder, other)
            assert not start.keeps_head
            assert not torch.allclose(start.network.state_dict()["head.bias"], whole["head.bias"], atol=1e-3)


def test_few_hands_keep_the_statistics_of_the_start_which_is_the_first_validation(
    hands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each validation is worse than the one before, and the run is interrupted once."""
    errors_cm = itertools.count(1)

    def scripted(*arguments: Any) -> tuple[dict[str, float], Poses]:
        figures, poses = validate(*arguments)
        return {**figures, "pa_epe_cm": next(errors_cm)}, poses

    monkeypatch.setattr("peclr_dali.train.finetune.validate", scripted)
    start = tiny_hands.untrained_run(tmp_path / "start")
    before = load_pose_run(start).network.state_dict()
    config = config_of(hands, tmp_path / "run", f"encoder.weights={start}", "run.keep=9")
    folder = finetune(config)
    folder.checkpoints.paths()[-1].unlink()
    finetune(config, "auto")
    assert [row["step"] for row in folder.read_validations()] == [0, 5, 10, 15]
    assert caplog.text.count("no validation was better than the starting weights") == 2
    best = load_pose_run(folder.root)
    assert best.step == 0
    assert_same_bits(best.network.state_dict(), before)
    finetune(
        config_of(
            hands,
            changed := tmp_path / "changed",
            f"encoder.weights={start}",
            "train.batch_norm=batch",
            "train.epochs=1",
        )
    )
    monkeypatch.setattr("peclr_dali.train.finetune.FEW_HANDS", 44)  # as many as there are
    finetune(config_of(hands, many := tmp_path / "many", f"encoder.weights={start}", "train.epochs=1"))
    for out, steps, kept in ((folder.root, tiny_hands.STEPS, True), (changed, 5, False), (many, 5, False)):
        after = final_weights(out, steps)
        assert not torch.equal(before["head.weight"], after["head.weight"])
        for name in [name for name in before if "running" in name]:
            assert torch.equal(before[name], after[name]) == kept, name


def test_a_share_of_the_starting_weights_is_in_what_is_validated(
    hands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after an interruption; a network with a new head is validated as it is, and a line says so once."""
    monkeypatch.setattr("peclr_dali.train.finetune.best_of", itemgetter(-1))
    start = tiny_hands.untrained_run(tmp_path / "start")
    before = load_pose_run(start).network.state_dict()
    keys = ("validation.start_share=0.7", "train.epochs=1", "run.checkpoint_every=2", "optim.lr=0.01")
    for head, kept in (("auto", 0.7), ("random", 0.0)):
        out = tmp_path / head
        config = config_of(hands, out, f"encoder.weights={start}", f"pose.weights={head}", *keys)
        finetune(config).checkpoints.paths()[-1].unlink()
        finetune(config, "auto")
        after, best = final_weights(out, 5), load_pose_run(out)
        assert best.step == 5
        for name, tensor in best.network.state_dict().items():
            expected = after[name].double().lerp(before[name].double(), kept)
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
        assert caplog.text.count("validation.start_share needs a head") == (head == "random")


def test_depths_stay_where_labels_are_2d_only(hands: Path, tmp_path: Path) -> None:
    """A network that knows depths learns from boxes with landmarks, and is interrupted once."""
    run, images = tiny_hands.untrained_run(tmp_path / "run"), hands / "training" / "rgb"
    index = load_index(config_of(hands, tmp_path, "data.split=all").data)
    names = [f"{name}_{axis}" for name in HAND.keypoints for axis in "xy"]
    box = (0, 0, tiny_hands.SIDE_PX, tiny_hands.SIDE_PX, "right", 1)
    rows = [
        [Path(path).name, *map(str, (*box, *points.ravel()))]
        for path, points in zip(index.paths, index.tables["keypoints_px"], strict=True)
    ]
    header = ["file", "x0", "y0", "x1", "y1", "hand", "confidence", *names]
    (tmp_path / "boxes.csv").write_text("".join(",".join(row) + "\n" for row in [header, *rows]))
    of_2d = ("data.source=folder", f"data.box={tmp_path / 'boxes.csv'}", "data.split=all", "run.keep=9")
    folder = finetune(config_of(images, tmp_path / "mine", *of_2d, f"encoder.weights={run}"))
    folder.checkpoints.paths()[-1].unlink()
    finetune(config_of(images, folder.root, *of_2d, f"encoder.weights={run}"), "auto")
    before, after = load_pose_run(run), load_pose_run(folder.root)
    assert after.depth
    (weight, bias), (moved, moved_bias) = (
        [one.network.state_dict()[f"head.{name}"].unflatten(0, (21, 3)) for name in ("weight", "bias")]
        for one in (before, after)
    )
    assert torch.equal(weight[:, 2], moved[:, 2])  # depths
    assert torch.equal(bias[:, 2], moved_bias[:, 2])
    assert not torch.equal(weight[:, :2], moved[:, :2])
