"""Prediction in pictures that nobody rendered: any size, mode and orientation gives a drawing and a JSON file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from PIL import Image as Pillow
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.pose.predict import (
    assumed_intrinsics,
    find_images,
    predict,
    read_intrinsics,
    read_picture,
    result_names,
)
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint, write_checkpoint
from peclr_dali.train.weights.export import export_onnx
from tests.command_line import run_cli
from tests.train.tiny_hands import untrained_run

Pixels = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_run(tmp_path_factory.mktemp("run"))


def drawn_hand(width: int, height: int) -> Pixels:
    """A mitten of ellipses, off centre, on a gradient."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[..., 0] = np.linspace(0, 255, width)
    picture[..., 2] = np.linspace(255, 0, height)[:, None]
    for x, y, w, h in ((0.4, 0.6, 0.15, 0.2), (0.3, 0.3, 0.03, 0.15), (0.4, 0.25, 0.03, 0.17), (0.5, 0.3, 0.03, 0.15)):
        axes = (max(1, int(w * width)), max(1, int(h * height)))
        cv2.ellipse(picture, (int(x * width), int(y * height)), axes, 0, 0, 360, (120, 160, 220), cv2.FILLED)
    return picture


def save_hand(path: Path, width: int = 60, height: int = 50) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), drawn_hand(width, height))
    return path


def save_turned(path: Path) -> None:
    picture = Pillow.fromarray(drawn_hand(80, 120))
    exif = picture.getexif()
    exif[274] = 6
    picture.save(path, exif=exif.tobytes())


def test_every_kind_of_picture_gives_a_drawing_and_json(run: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for name, mode in (("grey.jpg", "L"), ("palette.png", "P"), ("alpha.webp", "RGBA"), ("cmyk.jpg", "CMYK")):
        Pillow.fromarray(drawn_hand(37, 51)).convert(mode).save(photos / name)
    for name in ("deep.png", "deep.tiff"):
        cv2.imwrite(str(photos / f"{name[-3:]}_{name}"), drawn_hand(90, 60).astype(np.uint16) * 257)
    save_hand(photos / "bitmap.bmp", 64, 64)
    save_hand(photos / "ribbon.png", 2400, 3)
    save_turned(photos / "turned.jpg")
    kinds = sorted(photos.iterdir())
    (photos / "notes.txt").write_text("not a picture")
    results = predict(run, [str(photos)], tmp_path / "out").predictions
    assert [result.image for result in results] == kinds
    for result in results:
        drawing = cv2.imread(str(result.picture))
        assert drawing is not None
        assert drawing.std() > 10
        content: dict[str, Any] = json.loads(result.picture.with_suffix(".json").read_text())
        assert np.shape(content["keypoints_px"]) == (21, 2)
        assert np.shape(content["joints"]) == (21, 3)
        assert np.isfinite(content["joints"]).all()
        assert (content["unit"], content["scale_normalised"]) == ("reference_bone", True)
        assert content["intrinsics_assumed"]
        assert content["box_needed"] in ("likely", "unknown")
        assert "--box" in content["note"]


def test_a_network_that_predicts_the_palm_gives_the_wrist(tmp_path: Path) -> None:
    """Keypoint 0 is called the wrist in the JSON file, so it is where the wrist in 3D is seen."""
    palm = untrained_run(tmp_path / "palm", "pose.first_keypoint=palm")
    hand = save_hand(tmp_path / "hand.png", 400, 300)
    (found,) = predict(palm, [str(hand)], tmp_path / "out", box_px=(100, 50, 300, 250)).predictions
    assert found.joints is not None
    seen = found.intrinsics @ found.joints[0]
    np.testing.assert_allclose(found.keypoints_px[0], seen[:2] / seen[2], atol=1e-6)
    predicted = found.intrinsics @ found.joints[9]
    np.testing.assert_allclose(found.keypoints_px[9], predicted[:2] / predicted[2], atol=0.05)  # the network's own


def test_a_turned_photo_is_predicted_as_it_is_displayed(run: Path, tmp_path: Path) -> None:
    """Orientation 6 turns a 80 x 120 picture by 90 degrees: keypoints and camera are those of 120 x 80."""
    save_turned(tmp_path / "turned.jpg")
    upright = np.rot90(drawn_hand(80, 120), k=-1)
    Pillow.fromarray(np.ascontiguousarray(upright)).save(tmp_path / "upright.jpg")
    words = [str(tmp_path / name) for name in ("turned.jpg", "upright.jpg")]
    turned, plain = predict(run, words, tmp_path / "out").predictions
    assert turned.intrinsics.tolist() == [[120, 0, 60], [0, 120, 40], [0, 0, 1]]
    np.testing.assert_allclose(turned.keypoints_px, plain.keypoints_px, atol=2)
    assert read_picture(str(tmp_path / "turned.jpg")).shape == (80, 120, 3)


def resnet18_with_linear_head(tensors: dict[str, Tensor], image: Tensor) -> Tensor:
    """Views (N, 3, S, S) in [0, 1] -> keypoints (N, 21, 2) in pixels of the view, as He et al. 2015 describe it."""

    def convolved(x: Tensor, conv: str, norm: str, stride: int) -> Tensor:
        kernel = tensors[f"encoder.resnet.{conv}.weight"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        weight, bias, mean, var = (
            tensors[f"encoder.resnet.{norm}.{name}"] for name in ("weight", "bias", "running_mean", "running_var")
        )
        return F.batch_norm(x, mean, var, weight, bias, eps=1e-5)

    mean, std = (torch.tensor(of, dtype=image.dtype).view(3, 1, 1) for of in (
        (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    ))  # fmt: skip
    x = F.max_pool2d(convolved((image - mean) / std, "conv1", "bn1", 2).relu(), 3, stride=2, padding=1)
    for block in (f"layer{layer}.{number}" for layer in (1, 2, 3, 4) for number in (0, 1)):
        shrinks = f"encoder.resnet.{block}.downsample.0.weight" in tensors
        skipped = convolved(x, f"{block}.downsample.0", f"{block}.downsample.1", 2) if shrinks else x
        x = convolved(x, f"{block}.conv1", f"{block}.bn1", 2 if shrinks else 1).relu()
        x = (convolved(x, f"{block}.conv2", f"{block}.bn2", 1) + skipped).relu()
    raw = F.linear(x.mean(dim=(2, 3)), tensors["head.weight"], tensors["head.bias"])
    return (raw.reshape(-1, 21, 3)[..., :2] + 0.5) * image.shape[-1]


@pytest.mark.parametrize("trained_in", ["auto", pytest.param("bf16", marks=pytest.mark.slow)])
def test_keypoints_are_those_of_the_tensors_in_float32_and_of_onnx(
    trained_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the precision of training was. The box makes a view of one block of 8 x 8 pixels per pixel."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)  # "auto" trains in bf16 on such a CPU
    source = untrained_run(tmp_path / "run", "geometry.side_px=64", f"train.precision={trained_in}")
    pixels = drawn_hand(64, 64)
    cv2.imwrite(str(tmp_path / "hand.png"), np.kron(pixels, np.ones((8, 8, 1), np.uint8)))
    side_px = 512 / load_pose_run(source).box_margin
    edges = (256 - side_px / 2, 256 + side_px / 2)
    box_px = (edges[0], edges[0], edges[1], edges[1])
    (found,) = predict(source, [str(tmp_path / "hand.png")], tmp_path / "out", box_px=box_px).predictions

    network = load_checkpoint(load_pose_run(source).path)["network"]
    image = torch.from_numpy(np.ascontiguousarray(pixels[..., ::-1].transpose(2, 0, 1)))[None]
    tensors = {name: tensor.double() for name, tensor in network.items()}
    expected_px = 8 * resnet18_with_linear_head(tensors, image.double() / 255)[0].numpy()
    np.testing.assert_allclose(found.keypoints_px, expected_px, rtol=0, atol=1e-3)

    onnxruntime = pytest.importorskip("onnxruntime")
    export_onnx(source, tmp_path / "pose.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "pose.onnx"))
    camera = np.diag([1 / 8, 1 / 8, 1]).astype(np.float32) @ found.intrinsics.astype(np.float32)
    ours_px, joints = session.run(None, {"image": image.numpy(), "intrinsics": camera[None]})
    np.testing.assert_allclose(found.keypoints_px, 8 * ours_px[0], rtol=0, atol=1e-3)
    assert found.joints is not None
    np.testing.assert_allclose(found.joints, joints[0], rtol=1e-4, atol=1e-4)


def test_the_box_the_camera_and_the_scale_are_used(run: Path, tmp_path: Path) -> None:
    camera = tmp_path / "camera.json"
    camera.write_text(json.dumps({"fx": 500, "fy": 510, "cx": 190, "cy": 160}))
    words, box_px = [str(save_hand(tmp_path / "hand.png", 400, 300))], (100.0, 50.0, 300.0, 150.0)
    bare, scaled = (
        predict(run, words, tmp_path / "out", box_px=box_px, intrinsics=camera, scale_m=scale_m).predictions[0]
        for scale_m in (None, 0.03)
    )
    assert (bare.unit, scaled.unit, bare.box_needed) == ("reference_bone", "m", "no")
    assert scaled.joints is not None
    assert bare.joints is not None
    np.testing.assert_allclose(scaled.joints, 0.03 * bare.joints)
    # A square of 200 around the middle, times the margin of training, 1.5.
    np.testing.assert_allclose(bare.box_px, (200 - 150, 100 - 150, 200 + 150, 100 + 150), atol=1e-3)
    # The pose projects through the camera to where the keypoints are drawn, whatever the network thinks.
    homogeneous = bare.joints @ np.array([[500, 0, 190], [0, 510, 160], [0, 0, 1]]).T
    np.testing.assert_allclose(homogeneous[:, :2] / homogeneous[:, 2:], bare.keypoints_px, atol=1e-2)


def save_boxes(file: Path, *rows: str) -> Path:
    file.write_text("\n".join(["file,x0,y0,x1,y1,hand", *rows]))
    return file


def test_a_file_of_boxes_gives_a_prediction_for_each_hand(run: Path, tmp_path: Path) -> None:
    """A left hand is predicted as the right hand of the mirror image, and described in the picture as it is."""
    photos = tmp_path / "photos"
    save_hand(photos / "more" / "two.png", 300, 200)
    save_hand(photos / "other.png", 300, 200)
    (photos / "bad.png").write_bytes(b"not an image")
    rows = ("bad.png,,,,,unreadable", "more/two.png,40,30,140,130,left", "more/two.png,150,20,250,120,right")
    boxes = save_boxes(tmp_path / "boxes.csv", *rows, "other.png,,,,,none")
    assert run_cli("predict", str(run), str(photos), "--box", str(boxes), "--out", str(tmp_path / "out")) == 0
    left, right = (json.loads((tmp_path / "out" / f"two_{number}.json").read_text()) for number in (0, 1))
    assert len(list((tmp_path / "out").iterdir())) == 4
    assert (left["mirrored"], right["mirrored"], left["box_needed"]) == (True, False, "no")
    np.testing.assert_allclose(left["box_px"], (90 - 75, 80 - 75, 90 + 75, 80 + 75), atol=0.01)
    np.testing.assert_allclose(right["box_px"], (200 - 75, 70 - 75, 200 + 75, 70 + 75), atol=0.01)
    cv2.imwrite(str(tmp_path / "mirror.png"), drawn_hand(300, 200)[:, ::-1])
    words, box_px = [str(tmp_path / "mirror.png")], (300.0 - 140, 30.0, 300.0 - 40, 130.0)
    (as_right,) = predict(run, words, tmp_path / "mirrored", box_px=box_px).predictions
    expected_px = as_right.keypoints_px * [-1, 1] + [300, 0]
    np.testing.assert_allclose(left["keypoints_px"], expected_px, atol=0.5)
    assert as_right.joints is not None
    np.testing.assert_allclose(left["joints"], as_right.joints * [-1, 1, 1], atol=0.05)


def test_a_file_of_boxes_needs_the_folder_of_its_names(run: Path, tmp_path: Path) -> None:
    hand, boxes = save_hand(tmp_path / "hand.png"), save_boxes(tmp_path / "boxes.csv", "hand.png,1,1,40,40,right")
    for images in ([str(hand)], [str(tmp_path), str(tmp_path)]):
        with pytest.raises(UserError, match="expected one folder, which the names in this file are relative to"):
            predict(run, images, tmp_path / "out", boxes=boxes)
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over_what_was_there(run: Path, tmp_path: Path) -> None:
    """Neither over a picture that is read, nor over a camera, nor over another file of the user."""
    words = [str(save_hand(tmp_path / name)) for name in ("hand.png", "other.jpg", "third.jpg")]
    save_hand(tmp_path / "third.png", 40, 30)  # is not predicted
    camera = tmp_path / "other.json"
    camera.write_text(json.dumps({"fx": 500, "fy": 510, "cx": 30, "cy": 25}))
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for _ in range(2):  # the second call finds the results of the first, which are its own
        results = predict(run, words, tmp_path, intrinsics=camera).predictions
        assert [result.picture.name for result in results] == ["hand_0.png", "other_0.png", "third_0.png"]
        assert {file: file.read_bytes() for file in before} == before
        assert len(list(tmp_path.iterdir())) == len(before) + 6
    drawn = tmp_path / "hand_0.png"  # a result is an input like any other
    was = drawn.read_bytes()
    (result,) = predict(run, [str(drawn)], tmp_path).predictions
    assert result.picture.name == "hand_0_0.png"
    assert drawn.read_bytes() == was


@pytest.mark.parametrize(
    ("pictures", "names"),
    [
        (["a.jpg", "a.png", "a_0.jpg"], ["a_1", "a_2", "a_0"]),
        (["a.jpg", "b.png"], ["a", "b"]),
        (["a/1.jpg", "b/1.jpg", "b/2.jpg", "1.jpg", "a_1.jpg"], ["a_1_0", "b_1", "2", "1", "a_1_1"]),
        (["x/a.jpg", "y/a.jpg", "y/A.png"], ["x_a", "y_a_0", "y_A_1"]),  # some file systems know one case
        (["a.jpg", "a.png", "a_0.jpg", "a_0.png", "a_0_0.jpg"], ["a_1", "a_2", "a_0_1", "a_0_2", "a_0_0"]),
    ],
)
def test_each_picture_has_a_result_of_its_own(pictures: list[str], names: list[str], tmp_path: Path) -> None:
    files = [tmp_path / name for name in pictures]
    found = result_names(files, tmp_path / "out", inputs=files)
    assert found == names
    assert len({name.casefold() for name in found}) == len(files)


@pytest.mark.parametrize("name", ["a$b$.png", r"$\frac{$.png", "\x1b[31mred.png", "line\nerror: no.png", "手.png"])
def test_any_name_of_a_file_is_drawn(name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    save_hand(tmp_path / "plain.png").rename(tmp_path / "photos" / name)
    assert run_cli("predict", str(run), str(tmp_path / "photos"), "--out", str(tmp_path / "out")) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\nerror" not in captured.out + captured.err
    assert (tmp_path / "out" / name).exists()


def test_a_prediction_imports_nothing_of_training(run: Path, tmp_path: Path) -> None:
    """Of a prediction of one picture, imports take most of the time; torch and torchvision are most of them."""
    unwanted = ["tensorboard", "sklearn", "pandas", "timm", "onnx", "jinja2", "peclr_dali.synthetic",
                "peclr_dali.train.report", "peclr_dali.train.trainer", "peclr_dali.train.pretrain"]  # fmt: skip
    program = (
        "import sys; from peclr_dali.cli import main\n"
        "try: main(sys.argv[2:])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not (found := {*sys.argv[1].split()} & {*sys.modules}), found"
    )
    words = ["predict", run, save_hand(tmp_path / "hand.png"), "--out", tmp_path / "out"]
    command = [sys.executable, "-c", program, " ".join(unwanted), *map(str, words)]
    call = subprocess.run(command, capture_output=True, check=False, text=True, cwd=Path(__file__).parents[3])
    assert call.returncode == 0, call.stderr
    assert (tmp_path / "out" / "hand.json").exists()


def test_unreadable_pictures_are_left_out_and_named_at_the_end(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others get what they get without them, whatever lies between them in the order."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    good = [str(save_hand(photos / "b.png", 50, 40)), str(save_hand(photos / "d.png", 60, 80))]
    expected = [predict(run, [word], tmp_path / "single").predictions[0] for word in good]
    (photos / "a.jpg").write_text("hello")
    save_hand(photos / "c.png", 1, 1)
    (photos / "e.png").write_bytes(b"")
    for words in ([str(photos)], [str(photos / "*")], [str(file) for file in sorted(photos.iterdir())]):
        assert run_cli("predict", str(run), *words, "--out", str(out)) == 0
        assert sorted(file.name for file in out.iterdir()) == ["b.json", "b.png", "d.json", "d.png"]
        captured = capsys.readouterr()
        assert captured.out.splitlines()[-1].endswith(f"python cli.py report {run} --predictions {out}")
        lines = captured.err.splitlines()[-3:]
        for line, start in zip(lines, ("a.jpg is not a", "c.png has 1 x 1", "e.png is not a"), strict=True):
            assert line.startswith(f"left out: {photos}/{start}")
        for result in expected:
            content = json.loads((out / result.picture.name).with_suffix(".json").read_text())
            np.testing.assert_allclose(content["keypoints_px"], result.keypoints_px, atol=1e-2)
            assert content["intrinsics"] == result.intrinsics.tolist()


def test_an_unreadable_picture_of_two_hands_is_named_once(run: Path, tmp_path: Path) -> None:
    save_hand(tmp_path / "photos" / "good.png", 300, 200)
    (tmp_path / "photos" / "bad.png").write_bytes(b"not an image")
    rows = ("bad.png,4,3,14,13,left", "bad.png,15,2,25,12,right", "good.png,40,30,140,130,left")
    boxes = save_boxes(tmp_path / "boxes.csv", *rows)
    done = predict(run, [str(tmp_path / "photos")], tmp_path / "out", boxes=boxes)
    assert len(done.predictions) == 1
    assert [line.split(" is ")[0] for line in done.unreadable] == [f"{tmp_path}/photos/bad.png"]


def test_it_is_an_error_if_no_picture_can_be_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.jpg", "b.png"):
        (tmp_path / name).write_text("hello")
    for word, message in (
        (tmp_path / "b.png", f"{tmp_path}/b.png is not a readable picture"),
        (tmp_path, f"none of 2 pictures can be used; the first: {tmp_path}/a.jpg is not a readable picture"),
    ):
        assert run_cli("predict", str(run), str(word), "--out", str(tmp_path / "out")) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}")
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_network_of_finite_weights_that_gives_nan_writes_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = load_checkpoint(find_checkpoint(run, ""))
    for name, tensor in saved["network"].items():
        if name.endswith("bn1.running_var"):
            tensor.fill_(-1)
    write_checkpoint(tmp_path / "step_0.pt", 0, {key: saved[key] for key in saved if key not in ("format", "step")})
    hand = save_hand(tmp_path / "hand.png")
    before = sorted(tmp_path.iterdir())
    for command in (
        ["predict", str(tmp_path / "step_0.pt"), str(hand), "--out", str(tmp_path / "out")],
        ["evaluate", str(tmp_path / "step_0.pt"), "--out", str(tmp_path / "out")],
        ["export", str(tmp_path / "step_0.pt"), "--onnx", str(tmp_path / "out.onnx")],
        ["export", str(tmp_path / "step_0.pt"), "--pose", str(tmp_path / "out.safetensors")],
    ):
        assert run_cli(*command) == 2
        assert "step_0.pt: gives keypoints that are NaN or infinite; use another" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_pictures_come_from_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "c.txt", "in/it.png", "out/b.png", ".hidden/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    out = tmp_path / "out"
    everything = [tmp_path / "a.JPG", tmp_path / "b.png", tmp_path / "in/it.png"]
    assert find_images([str(tmp_path)], out) == everything  # not the results of an earlier call
    assert find_images([str(tmp_path / "*.png"), str(tmp_path)], out) == [everything[place] for place in (1, 0, 2)]
    assert find_images([str(tmp_path / "c.txt")], out) == [tmp_path / "c.txt"]
    assert find_images([str(out)], out) == [out / "b.png"]


ROWS = "[[500, 0, 100], [0, 500, 90], [0, 0, 1]]"


def test_cameras_are_read(tmp_path: Path) -> None:
    for content in (ROWS, f'{{"K": {ROWS}}}', '{"fx": 500, "fy": 500, "cx": 100, "cy": 90}'):
        (tmp_path / "camera.json").write_text(content)
        assert read_intrinsics(tmp_path / "camera.json").tolist() == [[500, 0, 100], [0, 500, 90], [0, 0, 1]]
    assert assumed_intrinsics(400, 300).tolist() == [[400, 0, 200], [0, 400, 150], [0, 0, 1]]  # sees 53 degrees


@pytest.mark.parametrize(
    "content",
    ["[[1e30, 0, 1], [0, 1e-30, 3], [0, 0, 1]]", "[[500, 1000, 80], [125, 250, 60], [0, 0, 1]]",
     "[[1.2, 0, 0.5], [0, 1.6, 0.5], [0, 0, 1]]", "[[NaN, 0, 1], [0, 500, 3], [0, 0, 1]]",
     "[[500, 0, 1e39], [0, 500, 3], [0, 0, 1]]", f"[{ROWS}, {ROWS}]", f"[{ROWS}]", f'{{"K": [{ROWS}, {ROWS}]}}',
     f'{{"fx": 1{"0" * 400}, "fy": 500, "cx": 1, "cy": 2}}'],
)  # fmt: skip
def test_what_is_no_camera_in_pixels_is_refused(content: str, tmp_path: Path) -> None:
    """Out of all bounds, singular, in units of the picture's width, not a number, infinite in float32; and FreiHAND's
    training_K.json, one matrix for each of its pictures."""
    (tmp_path / "camera.json").write_text(content)
    with pytest.raises(UserError, match=r"no camera matrix in pixels: expected a single one.* at least 10 pixels"):
        read_intrinsics(tmp_path / "camera.json")


WRONG: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "nothing there": (lambda root: {"images": [str(root / "no*.png")]}, "no such file, and no pattern"),
    "no characters": (lambda _: {"images": [""]}, "an IMAGE has no characters; expected pictures"),
    "out is a link to itself": (lambda root: {"out": root / "loop"}, "loop cannot be written to"),
    "empty folder": (lambda root: {"images": [str(root / "empty")]}, "neither pictures in this folder nor below it"),
    "no picture": (lambda root: {"images": [str(root / "text.png")]}, "text.png is not a readable picture"),
    "a single pixel": (lambda root: {"images": [str(root / "dot.png")]}, "has 1 x 1 pixels"),
    "box upside down": (lambda _: {"box_px": (30.0, 5.0, 20.0, 9.0)}, "--box 30,5,20,9 is no box"),
    "box outside": (lambda _: {"box_px": (60.0, 5.0, 90.0, 9.0)}, "is no box in the picture of 50 x 40 pixels"),
    "box without end": (lambda _: {"box_px": (5.0, 5.0, float("inf"), 9.0)}, "--box 5,5,inf,9 is no box"),
    "box in fractions": (lambda _: {"box_px": (0.1, 0.1, 0.9, 0.9)}, "2 pixels or more apart, in pixels"),
    "no camera file": (lambda root: {"intrinsics": root / "no.json"}, "expected a JSON file with a camera matrix"),
    "no camera": (lambda root: {"intrinsics": root / "text.png"}, "holds no camera matrix in pixels"),
    "one box for two": (
        lambda root: {"images": [str(root / "hand.png"), str(root / "dot.png")], "box_px": (1.0, 2.0, 3.0, 4.0)},
        "--box names one place, and there are 2 pictures",
    ),
    "no run": (lambda root: {"run": root / "empty"}, "holds no checkpoint; expected the folder of a fine-tuning run"),
    "a pipe as run": (lambda root: {"run": root / "pipe"}, "pipe is a pipe or a device; expected the folder of a fine"),
    "out is a file": (lambda root: {"out": root / "text.png"}, "cannot be written to"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_reported_in_one_line(case: str, run: Path, tmp_path: Path) -> None:
    save_hand(tmp_path / "hand.png", 50, 40)
    save_hand(tmp_path / "dot.png", 1, 1)
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    make, message = WRONG[case]
    arguments: dict[str, Any] = {"run": run, "images": [str(tmp_path / "hand.png")], "out": tmp_path / "out"}
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        predict(**{**arguments, **make(tmp_path)})
