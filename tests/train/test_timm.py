"""Encoders of timm, from the configuration to a prediction."""

from pathlib import Path
from typing import Any

import pytest
import torch

from peclr_dali.models.config import EncoderConfig
from peclr_dali.models.encoders import build_encoder, make_encoder
from peclr_dali.models.network import Normalize
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.export.weights import export_encoder
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.pose.predict import predict
from peclr_dali.train.pretrain import pretrain
from tests.train import tiny_hands

STEPS = 6
NAMES = ("timm/test_vit", "timm/test_convnext")


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def settings(hands: Path, name: str, out: Path, *overrides: str) -> list[str]:
    return tiny_hands.settings(hands, out, f"encoder.name={name}", "train.epochs=1", *overrides)


def checkpoint(run: Path, step: int = STEPS) -> dict[str, Any]:
    return dict(torch.load(run / f"checkpoints/step_{step:09d}.pt", weights_only=True))


@pytest.fixture(scope="module")
def run(hands: Path, name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    own = ("projector.hidden=16", "projector.dim=8", "run.checkpoint_every=3")
    keys = [key for key in settings(hands, name, out, *own) if not key.startswith("validation.")]
    return pretrain(load_config(Config, [], keys)).root


def test_all_weights_decay_except_biases_norms_and_positions(name: str, run: Path) -> None:
    decayed, exempt = (len(group["params"]) for group in checkpoint(run)["optimizer"]["param_groups"])
    network = make_encoder(name, 32)
    held = dict(network.network.named_parameters())  # type: ignore[union-attr]
    special = {"timm/test_vit": {"pos_embed", "reg_token", "cls_token"} & held.keys(), "timm/test_convnext": set()}
    few = [key for key, value in held.items() if value.ndim < 2 or key in special[name]]
    assert (len(special[name]) > 0) == (name == "timm/test_vit")
    assert exempt == len(few) + 3  # of the projector: a bias, and batch norm's two
    assert decayed == len(held) - len(few) + 2


def test_timm_loads_what_is_exported(name: str, run: Path, tmp_path: Path) -> None:
    import timm  # takes long, and every process collects all tests

    file = tmp_path / "encoder.safetensors"
    note = export_encoder(run, file)
    options: dict[str, Any] = {"img_size": 32} if name == "timm/test_vit" else {}
    assert f"num_classes=0{', img_size=32' if options else ''})" in note
    model = timm.create_model(name.removeprefix("timm/"), num_classes=0, checkpoint_path=str(file), **options)
    encoder = build_encoder(EncoderConfig(name, str(file)), 32).eval()
    encoder_of_run = build_encoder(EncoderConfig(name, str(run / f"checkpoints/step_{STEPS:09d}.pt")), 32).eval()
    image = Normalize()(torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8))
    with torch.no_grad():
        features = model.eval()(image)
        assert features.shape == (3, encoder.feature_dim)
        assert features.std() > 0
        torch.testing.assert_close(encoder(image), features, rtol=0, atol=0)
        torch.testing.assert_close(encoder_of_run(image), features, rtol=0, atol=0)


def test_fine_tuning_starts_from_the_run_and_predicts(hands: Path, name: str, run: Path, tmp_path: Path) -> None:
    """On larger views: position embeddings are resampled."""
    keys = settings(hands, name, tmp_path / "fine", f"encoder.weights={run}", "geometry.side_px=48", "optim.lr=1e-12")
    fine = finetune(load_config(FinetuneConfig, [], keys)).root
    pose = load_pose_run(fine)
    tuned, start = pose.network.encoder.library_state_dict(), checkpoint(run)["network"]
    alike = [key for key, value in tuned.items() if value.shape == start[f"encoder.network.{key}"].shape]
    assert {*tuned} - {*alike} == ({"pos_embed"} if name == "timm/test_vit" else set())
    for key in alike:
        torch.testing.assert_close(tuned[key], start[f"encoder.network.{key}"], rtol=0, atol=1e-6)
    picture = next((hands / "training/rgb").iterdir())
    (found,) = predict(fine, [str(picture)], tmp_path / "out").predictions
    assert len(found.keypoints_px) == 21
