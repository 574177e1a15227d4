"""What is read from a frozen encoder, by the probe of pre-training and by the read-out: scikit-learn's regression."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from peclr_dali import UserError, World, described_world, joined
from peclr_dali.models.network import ContrastiveNetwork, build_network
from peclr_dali.pipelines.sources import load_index, write_bad_list
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.evaluation.errors import evaluation_config
from peclr_dali.train.pose.inference import canonical_loader, estimate_poses
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.probe import ALPHA, Probe, build_probe, fit_read_out, fit_ridge, probed_rows
from peclr_dali.train.runs.folder import RunFolder
from tests.train import ranks, tiny_hands, tiny_run
from tests.train.narrow import narrow_resnet18

POSES = 60
ON = ("data.source=freihand", "probe.every_epochs=1", "probe.images=200", "train.epochs=12")


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hands.write_hands(tmp_path_factory.mktemp("data") / "hands", POSES)


def config_of(root: Path, out: Path, *overrides: str) -> Config:
    return tiny_run.config_of(root, out, *ON, *overrides)


def probe_of(config: Config, world: World) -> Probe:
    probe = build_probe(load_index(config.data), config, world)
    assert probe is not None
    return probe


@narrow_resnet18()
def seeded_network(config: Config) -> ContrastiveNetwork:
    torch.manual_seed(7)
    network = build_network(config.encoder, config.projector)
    for module in network.encoder.modules():  # as if it had been trained: nothing is at its start
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    return network


@pytest.mark.parametrize(("count", "features"), [(40, 7), (9, 30), (2, 5)])
@pytest.mark.parametrize("alpha", [1e-3, 1.0, 1e4])
def test_the_closed_form_equals_scikit_learn(count: int, features: int, alpha: float) -> None:
    rng = np.random.default_rng(count)
    x = rng.normal(3.0, rng.uniform(0.1, 50.0, features), (count, features))
    x[:, 1], x[:, 2] = 0.1, 0.0  # features that never change
    y, others = rng.normal(2.0, 1.0, (count, 4)), rng.normal(3.0, 10.0, (11, features))
    expected = make_pipeline(StandardScaler(), Ridge(alpha)).fit(x, y)
    weight, bias = fit_ridge(torch.from_numpy(x), torch.from_numpy(y), alpha)
    read = torch.from_numpy(others) @ weight.mT + bias
    np.testing.assert_allclose(read.numpy(), expected.predict(others), rtol=0, atol=1e-9)


def test_figures_equal_those_of_scikit_learn_on_the_same_features(hands: Path, tmp_path: Path) -> None:
    """The images, the split and the keypoints are taken from the labels anew, without the probe."""
    config = config_of(hands, tmp_path / "run", "probe.every_epochs=100")
    index = load_index(config.data)
    rows, fitted = probed_rows(index, config)
    probe, network = probe_of(config, World()), seeded_network(config)
    features, figures = probe._features(network, None).numpy(), probe.figures(network, None)

    for place in (0, 70, len(rows) - 1):  # each image alone
        with canonical_loader(index, rows[place : place + 1], 1, config, World()) as loader, torch.inference_mode():
            single = network.eval().encoder(network.normalize(next(iter(loader)).views[0].image))
        np.testing.assert_allclose(single[0].numpy(), features[place], rtol=0, atol=1e-5)

    box = index.box_px[rows].astype(np.float64)[:, None]
    view = (index.tables["keypoints_px"][rows] - box[..., :2]) / box[..., 2:]  # a canonical view is its box, in sides
    measured = ~fitted
    model = make_pipeline(StandardScaler(), Ridge(ALPHA)).fit(features[fitted], view[fitted].reshape(-1, 42))
    read = model.predict(features[measured]).reshape(-1, 21, 2)
    wanted = 224 * np.linalg.norm(read - view[measured], axis=2).mean()
    assert figures["epe_px_of_224"] == pytest.approx(wanted, rel=1e-6)
    apart = np.linalg.norm(view[measured] - view[fitted].mean(axis=0), axis=2).mean()
    assert figures["constant_epe_px_of_224"] == pytest.approx(224 * apart, rel=1e-5)


def test_poses_are_not_split_and_the_images_are_a_sixteenth_of_what_is_trained_on(hands: Path, tmp_path: Path) -> None:
    config = config_of(hands, tmp_path / "run", "probe.every_epochs=5")
    index = load_index(config.data)
    rows, fitted = probed_rows(index, config)
    assert len(rows) == 5 * 4 * POSES / 16 + 1  # whole poses
    probe = Probe(index, rows, fitted, config, World())
    groups = [set(index.groups[rows][part.numpy()].tolist()) for part in (probe._fitted, probe._measured)]
    assert [len(part) for part in groups] == [14, 5]
    assert not groups[0] & groups[1]


@pytest.fixture(scope="module")
@narrow_resnet18()
def run_with_probe(hands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "probed"
    return pretrain(config_of(hands, out, "train.epochs=2", "train.batch=60", "run.keep=1")).root


@narrow_resnet18()
def test_a_run_has_the_same_bits_with_and_without_the_probe(hands: Path, run_with_probe: Path, tmp_path: Path) -> None:
    out = tmp_path / "plain"
    pretrain(config_of(hands, out, "train.epochs=2", "train.batch=60", "run.keep=1", "probe.every_epochs=0"))
    torch.testing.assert_close(*[tiny_run.final_weights(folder, 8) for folder in (run_with_probe, out)], rtol=0, atol=0)
    for key in ("loss", "alignment", "positive_rank"):
        assert [row[key] for row in tiny_run.rows_of(run_with_probe)] == [row[key] for row in tiny_run.rows_of(out)]
    assert [row["step"] for row in RunFolder(run_with_probe, keep=1).read_validations()] == [1, 4, 8]
    assert RunFolder(out, keep=1).read_validations() == []


def one_rank(root: str, out: str) -> None:
    """Runs in a process of its own, as torchrun would start it."""
    world, config = described_world("cpu"), config_of(Path(root), Path(out), "probe.every_epochs=100")
    with joined(world, 60.0):
        figures = probe_of(config, world).figures(seeded_network(config), None)
    Path(f"{out}-{world.rank}.json").write_text(json.dumps(figures))


def test_figures_are_the_same_to_the_bit_on_two_ranks(hands: Path, tmp_path: Path) -> None:
    """On one rank the same function is called, here: another process's thread counts may change the last bits."""
    ranks.run_ranks(2, one_rank, str(hands), str(tmp_path / "rank"), log=tmp_path / "log")
    one_rank(str(hands), str(tmp_path / "alone"))
    first, second, alone = (json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))[::-1])
    assert first == second
    assert alone == pytest.approx(first, rel=1e-9)


def test_the_network_is_left_as_it_was(hands: Path, tmp_path: Path) -> None:
    config = config_of(hands, tmp_path / "run")
    probe, network = probe_of(config, World()), seeded_network(config).train()
    before, random = {name: tensor.clone() for name, tensor in network.state_dict().items()}, torch.get_rng_state()
    probe.figures(network, torch.bfloat16)
    assert all(module.training for module in network.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in network.parameters())
    torch.nn.init.constant_(next(network.encoder.parameters()), math.nan)
    assert [name for name, value in probe.figures(network, None).items() if math.isnan(value)] == ["epe_px_of_224"]


def test_an_image_that_cannot_be_read_is_left_out(hands: Path, tmp_path: Path) -> None:
    root = tmp_path / "hands"
    shutil.copytree(hands, root)
    config = config_of(root, tmp_path / "run", "probe.every_epochs=100")
    index = load_index(config.data)
    rows, fitted = probed_rows(index, config)
    index.path(int(rows[3])).write_bytes(b"no picture")
    index.tables["keypoints_px"][np.setdiff1d(np.arange(len(index)), rows)] = (
        np.nan
    )  # those of a substitute may be unknown
    probe = Probe(index, rows, fitted, config, World())
    assert np.flatnonzero(~(probe._fitted | probe._measured).numpy()).tolist() == [3]
    assert all(math.isfinite(value) for value in probe.figures(seeded_network(config), None).values())


def test_without_keypoints_there_is_no_probe_and_a_line_says_so(
    hands: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(hands, tmp_path / "run", "probe.every_epochs=100")
    index = load_index(config.data)
    index.tables["keypoints_px"][:] = np.nan
    for unknown in (index, replace(index, keypoints_px=None)):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert build_probe(unknown, config, World()) is None
        assert f"no probe: 0 of the {len(index)} images" in caplog.text


@narrow_resnet18()
def test_the_poses_of_a_read_out_are_those_of_scikit_learn(hands: Path, tmp_path: Path) -> None:
    """Targets come from the labels and boxes without the read-out."""
    run = load_pose_run(fit_read_out(tiny_hands.config_of(hands, tmp_path / "run", "train.frozen=true")).root)
    assert run.network.refinement is None
    features, views, boxes = {}, {}, {}
    for split in ("train", "val"):
        config = evaluation_config(run, (), [f"data.split={split}"])
        index = load_index(config.data)
        with canonical_loader(index, np.arange(len(index)), 1, config, World()) as loader, torch.inference_mode():
            features[split] = (
                torch.cat([run.network.features(batch.views[0].image) for batch in loader]).double().numpy()
            )
        box = index.box_px.astype(np.float64)[:, None]
        xyz = index.targets["xyz_m"].astype(np.float64)
        depth = (xyz[..., 2] - xyz[:, :1, 2]) / index.targets["scale_m"].astype(np.float64)[:, None]
        views[split] = np.concatenate(
            [((index.tables["keypoints_px"] - box[..., :2]) / box[..., 2:]), depth[..., None]], axis=2
        )
        boxes[split] = box
    model = make_pipeline(StandardScaler(), Ridge(ALPHA)).fit(features["train"], views["train"].reshape(-1, 63))
    expected = (
        model.predict(features["val"]).reshape(-1, 21, 3)[..., :2] * boxes["val"][..., 2:] + boxes["val"][..., :2]
    )
    labels = labels_to_learn(index)  # of the validation split
    poses = estimate_poses(run.network, index, labels.intrinsics, config, World())
    np.testing.assert_allclose(poses.keypoints_px, expected, rtol=0, atol=0.02)
    assert np.abs(poses.keypoints_px - labels.keypoints_px).max() > 0.5  # nothing is read off the labels


@narrow_resnet18()
def test_a_substitute_is_not_fitted_as_a_sample_of_its_own(hands: Path, tmp_path: Path) -> None:
    """With a file that cannot be read, the head is that of the other files."""
    root = shutil.copytree(hands, tmp_path / "hands")
    index = load_index(tiny_hands.config_of(root, tmp_path).data)
    bad = index.path(3)
    write_bad_list(tmp_path / "bad.jsonl", {index.paths[3]: "cannot be read"})
    without = fit_read_out(tiny_hands.config_of(root, tmp_path / "without", f"data.bad_list={tmp_path / 'bad.jsonl'}"))
    bad.write_bytes(b"no picture")
    damaged = fit_read_out(tiny_hands.config_of(root, tmp_path / "damaged", "data.max_bad_share=0.5"))
    one, other = (load_pose_run(folder.root).network.head.state_dict() for folder in (without, damaged))
    assert isinstance(one["weight"], torch.Tensor)
    torch.testing.assert_close(one["weight"], other["weight"], rtol=1e-4, atol=1e-6)


@narrow_resnet18()
def test_a_read_out_by_two_processes_is_refused(hands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would fit to its share of the images."""
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="by one process, and torchrun started 2: leave torchrun out"):
        fit_read_out(tiny_hands.config_of(hands, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@narrow_resnet18()
def test_a_read_out_is_fitted_once_and_the_encoder_stays(hands: Path, tmp_path: Path) -> None:
    start = fit_read_out(tiny_hands.config_of(hands, tmp_path / "start", "run.seed=3")).checkpoints.paths()[-1]
    config = tiny_hands.config_of(hands, tmp_path / "run", f"encoder.weights={start}", "data.label_fraction=0.5")
    path = fit_read_out(config).checkpoints.paths()[-1]
    before, after = (torch.load(one, weights_only=True)["network"] for one in (start, path))
    assert all(torch.equal(before[key], after[key]) for key in before if key.startswith("encoder"))
    assert not torch.equal(before["head.weight"], after["head.weight"])
    written = path.stat().st_mtime_ns
    fit_read_out(config, "auto")
    assert path.stat().st_mtime_ns == written
    with pytest.raises(UserError, match=r"label_fraction: was 0\.5, is now 1\.0"):
        fit_read_out(tiny_hands.config_of(hands, tmp_path / "run", f"encoder.weights={start}"), "auto")
