import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor
from torch.nn import functional as F

from peclr_dali.errors import UserError
from peclr_dali.models.config import EncoderConfig, PoseConfig
from peclr_dali.models.encoders import build_encoder, make_encoder
from peclr_dali.models.network import IMAGENET_MEAN, IMAGENET_STD
from peclr_dali.models.pose import PoseNetwork, PoseOutput
from peclr_dali.skeleton import FINGERS, HAND
from peclr_dali.train.convert import convert
from peclr_dali.train.runs.checkpoint import load_checkpoint

State = dict[str, Tensor]


def published_pose() -> State:
    """Names and shapes of the authors' published fine-tuned file, for a hand somewhere in the picture."""
    torch.manual_seed(0)
    resnet = torchvision.models.resnet18(weights=None)
    state = {f"backend_model.{key}": value for key, value in resnet.state_dict().items() if key[:3] != "fc."}
    for key, value in state.items():
        if key.endswith("running_mean"):
            value.normal_(0, 0.1)
        if key.endswith("running_var"):
            value.uniform_(0.8, 1.2)
    features = resnet.fc.in_features
    keypoints = torch.cat([torch.rand(21, 2) * 120 + 50, torch.randn(21, 1)], dim=1)
    keypoints[[3, 8]] = torch.tensor([[110, 120, 0.2], [118, 95, 0.5]])  # a reference bone of usual size
    resnet.load_state_dict({key[14:]: value for key, value in state.items()}, strict=False)
    resnet.fc = torch.nn.Identity()
    with torch.no_grad():
        size = resnet.eval()(torch.randn(2, 3, 64, 64)).norm(dim=1).mean()
    state["backend_model.fc.weight"] = torch.randn(64, features) / size  # the picture moves keypoints by about a pixel
    state["backend_model.fc.weight"][2::3] /= 10  # and depths by a tenth
    state["backend_model.fc.bias"] = torch.cat([keypoints.flatten(), torch.tensor([99.0])])
    sizes = {"0": (128, 64), "1": (128,), "3": (128, 128), "4": (128,), "6": (1, 128)}
    for layer, shape in sizes.items():
        prefix = f"zroot_ref.zroot_ref.{layer}."
        state[prefix + "weight"] = torch.randn(shape) * 0.2
        state[prefix + "bias"] = torch.randn(shape[0]) * 0.1
        if layer in "14":
            state[prefix + "running_mean"], state[prefix + "running_var"] = torch.randn(128), torch.rand(128) + 0.5
            state[prefix + "num_batches_tracked"] = torch.tensor(1000)
    return state


def theirs_by_hand(state: State, image: Tensor, k: Tensor) -> dict[str, Tensor]:
    """The authors' network, derived again from the papers' formulas, in their order of keypoints: float64."""
    resnet = torchvision.models.resnet18(weights=None, num_classes=64).double().eval()
    resnet.load_state_dict({key[14:]: value for key, value in state.items() if key.startswith("backend_model.")})
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    with torch.no_grad():
        out = resnet((image.double() / 255 - mean) / std)[:, :63].reshape(-1, 21, 3)
    kp2d, d = out[..., :2], out[..., 2].clone()
    d[:, 0] = 0
    rays = torch.linalg.solve(k[:, None], torch.cat([kp2d, torch.ones_like(kp2d[..., :1])], 2)[..., None])[..., 0]
    # The reference bone: middle finger's mcp and pip in their order. |rays_n (z + d_n) - rays_m (z + d_m)| = 1.
    n, m = 8, 3
    slope, offset = rays[:, n] - rays[:, m], rays[:, n] * d[:, n : n + 1] - rays[:, m] * d[:, m : m + 1]
    a, half_b, c = (slope**2).sum(1), (slope * offset).sum(1), (offset**2).sum(1) - 1
    z = (-half_b + (half_b**2 - a * c).clamp(min=2.5e-9).sqrt()) / a.clamp(min=1e-8)
    z = z.clamp(4, 50)
    x = torch.cat([d, rays[..., :2].reshape(-1, 42), z[:, None]], dim=1)
    weights = {key.removeprefix("zroot_ref.zroot_ref."): v.double() for key, v in state.items() if "zroot" in key}
    for linear, norm in (("0", "1"), ("3", "4")):
        x = x @ weights[linear + ".weight"].T + weights[linear + ".bias"]
        x = (x - weights[norm + ".running_mean"]) / (weights[norm + ".running_var"] + 1e-5).sqrt()
        x = F.leaky_relu(x * weights[norm + ".weight"] + weights[norm + ".bias"], 0.01)
    refined = z + (x @ weights["6.weight"].T + weights["6.bias"])[:, 0]
    return {"kp2d": kp2d, "d": d, "z": z, "refined": refined, "kp3d": rays * (d + refined[:, None])[..., None]}


def in_freihands_order(theirs: Tensor) -> Tensor:
    """By name: theirs are the wrist (palm), then all mcp, pip, dip, tip."""
    names = ["wrist", *(f"{finger}_{joint}" for joint in ("mcp", "pip", "dip", "tip") for finger in FINGERS)]
    return theirs[:, [names.index(name) for name in HAND.keypoints]]


def converted(state: State, folder: Path, cameras: Tensor) -> PoseOutput:
    """The poses of the converted file's network, float64."""
    torch.save({"state_dict": state}, folder / "published.pth")
    convert(folder / "published.pth", folder / "ours.pth")
    saved = load_checkpoint(folder / "ours.pth")
    network = PoseNetwork(make_encoder(saved["config"]["encoder"]["name"]), PoseConfig(**saved["config"]["pose"]))
    network.load_state_dict(saved["network"])
    network.eval().double().normalize.double()
    with torch.no_grad():
        features = network.encoder(network.normalize(IMAGES))
        return network.from_features(features, cameras, side_px=224)  # theirs know one side only


IMAGES = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
K = torch.tensor(
    [[[480.0, 0, 112], [0, 470, 110], [0, 0, 1]], [[500.0, 0, 30], [0, 510, 200], [0, 0, 1]],
     [[350.0, -200, 90], [200, 350, 80], [0, 0, 1]]]
)  # fmt: skip


def test_published_pose_network_gives_the_same_hands(tmp_path: Path) -> None:
    state = published_pose()
    found = converted(state, tmp_path, K.double())
    expected = theirs_by_hand(state, IMAGES, K.double())
    palm = in_freihands_order(expected["kp3d"])
    joints = torch.cat([2 * palm[:, :1] - palm[:, 9:10], palm[:, 1:]], dim=1)  # their test code's wrist
    for ours, theirs in (
        (found.keypoints_px, in_freihands_order(expected["kp2d"])),
        (found.relative_depth, in_freihands_order(expected["d"])),
        (found.root_depth_unrefined, expected["z"]),
        (found.root_depth, expected["refined"]),
        (found.joints, joints),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert 4 < expected["z"].min() < expected["z"].max() < 50  # the closed form was at work, not the clamp


class Callback:
    """What Lightning's old checkpoints name: a class that the reader does not need."""


class EasyDict(dict[str, Any]):
    """As the settings in SiMHand's checkpoints: items that are attributes too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items)


def test_pretrained_and_lightning_files_are_read_as_encoders(tmp_path: Path) -> None:
    resnet = torchvision.models.resnet18(weights=None).state_dict()
    torch.save({"state_dict": resnet}, tmp_path / "published.pth")
    torch.save(resnet, tmp_path / "resnet50_simhand.pth")  # as SiMHand's hubconf.py loads it, with fc
    children = ["conv1", "bn1", "", "", "layer1", "layer2", "layer3", "layer4"]
    lightning = {
        f"encoder.features.{children.index(key.split('.')[0])}.{key.split('.', 1)[1]}": value
        for key, value in resnet.items()
        if key[:3] != "fc."
    }
    lightning |= {"encoder.final_layer.0.weight": torch.zeros(64, 512), "encoder.final_layer.0.bias": torch.zeros(64)}
    lightning |= {"projection_head.0.weight": torch.zeros(512, 512)}
    others = {"epoch": 3, "optimizer_states": [{"lr": 1.0}], "callbacks": {Callback: {"best": 1.0}, "one": Callback()}}
    others |= {"hyper_parameters": {"config": EasyDict(lr=EasyDict(start=1.0)), "logger_debug": None}}
    torch.save({"state_dict": lightning, **others}, tmp_path / "lightning.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "lightning.ckpt", weights_only=True)
    image = torch.randn(2, 3, 64, 64)
    full = torchvision.models.resnet18(weights=None)
    full.load_state_dict(resnet)
    full.fc = torch.nn.Identity()
    expected = full.eval()(image)
    for source in ("published.pth", "lightning.ckpt", "resnet50_simhand.pth"):
        torch.testing.assert_close(
            build_encoder(EncoderConfig("resnet18", str(tmp_path / source))).eval()(image), expected
        )
        with pytest.raises(UserError, match=r"a resnet18, which encoder\.weights reads as it is"):
            convert(tmp_path / source, tmp_path / "out.pth")


@pytest.mark.parametrize("prefix", ["module._orig_mod.", "model.backbone.", "encoder_q.", "_orig_mod.encoder.resnet."])
def test_the_prefix_of_another_trainer_is_found(prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    resnet = torchvision.models.resnet18(weights=None).state_dict()
    saved = {prefix + key: value for key, value in resnet.items()} | {"projector.weight": torch.zeros(3)}
    if prefix == "encoder_q.":  # MoCo's other encoder
        saved |= {f"encoder_k.{key}": value + 1 for key, value in resnet.items()}
    torch.save({"state_dict": saved}, tmp_path / "other.pth")
    started = build_encoder(EncoderConfig("resnet18", str(tmp_path / "other.pth"))).library_state_dict()
    assert all(torch.equal(tensor, resnet[key]) for key, tensor in started.items())
    assert len(started) == len(resnet) - 2  # without fc
    assert f"taken are the tensors of {prefix!r}" in caplog.text or prefix.startswith("_orig_mod.encoder")


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("__import__('os').mkdir('made')",)


def test_malicious_files_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"conv1.weight": torch.zeros(1)}, "evil": Evil()}, "evil.pth")
    with pytest.raises(UserError):
        convert(Path("evil.pth"), Path("out.pth"))
    assert [path.name for path in tmp_path.iterdir()] == ["evil.pth"]


def test_wrong_files_end_in_one_line(tmp_path: Path) -> None:
    good = published_pose()
    for name, content, message in (
        ("no_refinement.pth", {k: v for k, v in good.items() if "zroot_ref.6" not in k}, "zroot_ref.6.weight"),
        ("scalar.pth", {**good, "backend_model.fc.weight": torch.tensor(1.0)}, "does not fit"),
        ("narrow.pth", {**good, "backend_model.fc.weight": torch.zeros(63, 512)}, "shape"),
        ("more.pth", {**good, "surprise": torch.zeros(1)}, "surprise"),
        ("vgg.pth", {"features.0.weight": torch.zeros(1)}, "holds features.0.weight: expected a published"),
    ):
        torch.save(content, tmp_path / name)
        with pytest.raises(UserError, match=message) as caught:
            convert(tmp_path / name, tmp_path / "out.pth")
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    torch.save(good, tmp_path / "good.pth")
    for out in ("out.onnx", "out.safetensors"):
        with pytest.raises(UserError, match=out):
            convert(tmp_path / "good.pth", tmp_path / out)
    assert not (tmp_path / "out.pth").exists()
