"""Encoders of timm: from files of weights to predictions, and to the backbone of HaMeR and ViTPose."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali.errors import UserError
from peclr_dali.models.config import EncoderConfig
from peclr_dali.models.encoders import build_encoder, make_encoder
from peclr_dali.models.network import IMAGENET_MEAN, IMAGENET_STD, Normalize
from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.export.weights import export_encoder, vitpose_from_timm
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.pose.predict import predict
from peclr_dali.train.pretrain import pretrain
from tests.command_line import run_cli
from tests.train import tiny_hands, tiny_run

CONFIG = tiny_run.ROOT / "configs" / "peclr_vits.toml"
NARROW = (
    "encoder.name=timm/test_vit", "geometry.rotation_deg=[-10,10]", "geometry.scale=[0.9,1.1]", "colour.hue=[1,1]",
    "colour.saturation=[1,1]", "geometry.translation_frac=0.02", "loss.temperature=0.2", "train.batch=24",
    "train.micro_batch=12", "train.epochs=40", "run.log_every=20", "probe.every_epochs=0",
)  # fmt: skip


class Block(nn.Module):
    """Of ViTPose's ViT, by the names and shapes of its published weights."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attn["qkv"](self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = (qkv[0] @ qkv[1].mT / qkv[0].shape[-1] ** 0.5).softmax(-1) @ qkv[2]
        x = x + self.attn["proj"](mixed.transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x)))))


class VitPose(nn.Module):
    """The backbone of ViTPose and HaMeR for pictures of 256 x 192: (N, 3, 256, 192) to (N, 192, C)."""

    def __init__(self, embed_dim: int, depth: int, num_heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, embed_dim, 16, 16, padding=2)})
        self.pos_embed = nn.Parameter(torch.empty(1, 16 * 12 + 1, embed_dim))
        self.blocks = nn.Sequential(*(Block(embed_dim, num_heads, embed_dim * mlp_ratio) for _ in range(depth)))
        self.last_norm = nn.LayerNorm(embed_dim, eps=1e-6)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed["proj"](image).flatten(2).mT + self.pos_embed[:, 1:] + self.pos_embed[:, :1]
        return cast(Tensor, self.last_norm(self.blocks(x)))


@pytest.fixture(scope="module")
def vit(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = tiny_run.settings(images, tmp_path_factory.mktemp("runs") / "vit", *NARROW)
    return pretrain(load_config(Config, [CONFIG], keys)).root


def test_the_shipped_configuration_trains_a_vit(vit: Path) -> None:
    assert load_config(Config, [CONFIG], []).optim.lars == "none"
    losses = [row["loss"] for row in tiny_run.rows_of(vit)]
    assert losses[-1] < 0.75 * losses[0] < 3, losses


@pytest.mark.slow
def test_its_features_tell_more_of_the_pose(tmp_path: Path) -> None:
    """The shipped configuration on hands that `make-data` renders, with the demo's views and a tiny ViT."""
    make_dataset(tmp_path / "hands", poses=300, seed=0)
    demo = ("data.center_frac=0.45", "geometry.side_px=48", "geometry.scale=[0.8,1.25]", "loss.temperature=0.2",
            "appearance.colour_drop_probability=0.5", "optim.lr=2e-3", "optim.warmup_epochs=1")  # fmt: skip
    sizes = ("encoder.name=timm/test_vit", "train.batch=128", "train.micro_batch=128", "train.epochs=10")
    places = (f"data.root={tmp_path / 'hands'}", f"run.out={tmp_path / 'run'}", "probe.every_epochs=10")
    folder = pretrain(load_config(Config, [CONFIG], [*demo, *sizes, *places, "train.precision=fp32"]))
    before, after = (row["epe_px_of_224"] for row in folder.read_validations())
    assert after < before - 1
    assert after < folder.read_validations()[0]["constant_epe_px_of_224"] < before


def test_hamers_backbone_computes_what_the_exported_vit_does(vit: Path, tmp_path: Path) -> None:
    from timm import create_model
    from timm.layers.pos_embed import resample_abs_pos_embed

    for name, *options in (("vit.pth", "--keys=vitpose"), ("vit.safetensors", "--keys=vitpose"), ("timm.pth",)):
        assert run_cli("export", str(vit), str(tmp_path / name), *options) == 0
    card = json.loads((tmp_path / "vit.pth.json").read_text())
    sizes = dict(re.findall(r"(embed_dim|depth|num_heads|mlp_ratio)=(\d+)", card["tensors"]))
    backbone = VitPose(**{name: int(size) for name, size in sizes.items()}).eval()
    backbone.load_state_dict(torch.load(tmp_path / "vit.pth", map_location="cpu")["state_dict"], strict=True)

    state = torch.load(tmp_path / "timm.pth")
    del state["cls_token"]
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], [16, 12], num_prefix_tokens=1)[:, 1:]
    theirs = create_model("test_vit", num_classes=0, img_size=(256, 192), class_token=False, global_pool="").eval()
    theirs.load_state_dict(state, strict=True)
    image = torch.randn(2, 3, 256, 192)
    with torch.no_grad():
        # Its patches begin 2 pixels later.
        torch.testing.assert_close(backbone(image), theirs(F.pad(image, (2, -2, 2, -2))), rtol=1e-4, atol=1e-4)
    with safetensors.safe_open(tmp_path / "vit.safetensors", "pt") as file:
        assert set(file.keys()) == set(backbone.state_dict())
        assert {**json.loads(file.metadata()["card"]), "tensors": 0} == {**card, "tensors": 0}
    assert (card["steps"], card["height_width_px"], card["normalisation"]["mean"]) == (80, [256, 192], [*IMAGENET_MEAN])
    assert card["normalisation"]["deviation"] == [*IMAGENET_STD]
    assert card["licence"] == {"code": "MIT", "data": "not stated", "starting weights": "not stated"}
    assert json.loads((tmp_path / "timm.pth.json").read_text())["height_width_px"] == [32, 32]
    assert card["commit"] == json.loads((vit / "versions.json").read_text())["commit"]
    assert card["configuration"]["geometry"]["rotation_deg"] == [-10, 10]


def test_other_networks_are_no_vitpose() -> None:
    encoder: Any = make_encoder("timm/test_vit", 32)
    state = encoder.library_state_dict()
    for changed, found in (
        ({**state, "blocks.0.ls1.gamma": torch.ones(64)}, "blocks.0.ls1.gamma"),
        ({**state, "patch_embed.proj.weight": torch.ones(64, 3, 8, 8)}, "its patches"),
        (make_encoder("resnet18").library_state_dict(), "bn1"),
    ):
        with pytest.raises(UserError, match=rf"ViTPose's ViT differs in {found}"):
            vitpose_from_timm(encoder.network, changed)
    vitpose_from_timm(encoder.network, state)
    encoder.network.blocks[1].mlp.act = nn.GELU(approximate="tanh")
    with pytest.raises(UserError, match=r"ViTPose's ViT differs in its activation; expected .* exact GELU"):
        vitpose_from_timm(encoder.network, state)


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "vit_tiny_patch16_dinov3_qkvb"])
def test_published_files_are_read(name: str, tmp_path: Path) -> None:
    """timm's with their classifier; DINOv3's by Meta's own names."""
    from timm import create_model

    published: Any = create_model(name).eval()
    state = {re.sub(r"gamma_(\d)", r"ls\1.gamma", key): value for key, value in published.state_dict().items()}
    if "dinov3" in name:
        state |= {"storage_tokens": state.pop("reg_token"), "mask_token": torch.zeros(1, 192)}
    torch.save(state, tmp_path / "weights.pth")
    encoder = build_encoder(EncoderConfig(f"timm/{name}", str(tmp_path / "weights.pth"))).eval()
    image = torch.randn(2, *published.pretrained_cfg["input_size"])
    with torch.no_grad():
        features = published.forward_head(published.forward_features(image), pre_logits=True)
        torch.testing.assert_close(encoder(image), features, rtol=1e-4, atol=1e-4)


LAST = "checkpoints/step_000000006.pt"


@pytest.fixture(scope="module", params=["timm/test_vit", "timm/test_convnext"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def settings(hands: Path, name: str, out: Path, *overrides: str) -> list[str]:
    return tiny_hands.settings(hands, out, f"encoder.name={name}", "train.epochs=1", *overrides)


@pytest.fixture(scope="module")
def run(hands: Path, name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    own = ("projector.hidden=16", "projector.dim=8", "run.checkpoint_every=3")
    keys = [key for key in settings(hands, name, out, *own) if not key.startswith("validation.")]
    return pretrain(load_config(Config, [], keys)).root


def test_all_weights_decay_except_biases_norms_and_positions(name: str, run: Path) -> None:
    decayed, exempt = (len(group["params"]) for group in torch.load(run / LAST)["optimizer"]["param_groups"])
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
    encoder_of_run = build_encoder(EncoderConfig(name, str(run / LAST)), 32).eval()
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
    tuned, start = pose.network.encoder.library_state_dict(), torch.load(run / LAST)["network"]
    alike = [key for key, value in tuned.items() if value.shape == start[f"encoder.network.{key}"].shape]
    assert {*tuned} - {*alike} == ({"pos_embed"} if name == "timm/test_vit" else set())
    for key in alike:
        torch.testing.assert_close(tuned[key], start[f"encoder.network.{key}"], rtol=0, atol=1e-6)
    picture = next((hands / "training/rgb").iterdir())
    (found,) = predict(fine, [str(picture)], tmp_path / "out").predictions
    assert len(found.keypoints_px) == 21
