"""Prediction in pictures that nobody rendered: any kind, size and orientation gives a pose and a drawing."""

import json
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image as Pillow

from peclr_dali.errors import UserError
from peclr_dali.train.pose import predict as predict_file
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.pose.predict import predict, read_intrinsics
from peclr_dali.train.pose.predictions import read_predictions
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint, write_checkpoint
from peclr_dali.train.runs.pictures import read_picture
from tests.command_line import refusal, run_cli
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


def test_every_kind_of_picture_gives_a_pose_and_a_drawing(run: Path, tmp_path: Path) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    for name, mode in (("grey.jpg", "L"), ("palette.png", "P"), ("alpha.webp", "RGBA"), ("cmyk.jpg", "CMYK")):
        Pillow.fromarray(drawn_hand(37, 51)).convert(mode).save(photos / name)
    cv2.imwrite(str(photos / "deep.png"), drawn_hand(90, 60).astype(np.uint16) * 257)
    save_hand(photos / "ribbon.png", 2400, 3)
    save_turned(photos / "turned.jpg")
    kinds = sorted(map(str, photos.iterdir()))
    assert run_cli("predict", str(run), *kinds, "--out", str(out)) == 0
    found = read_predictions(out)
    assert [hand["image"] for hand in found["predictions"]] == kinds
    for hand in found["predictions"]:
        assert np.asarray(read_picture(out / hand["drawing"])).std() > 10
        assert (np.shape(hand["keypoints_px"]), np.shape(hand["joints"])) == ((21, 2), (21, 3))
        assert np.isfinite(hand["joints"]).all()
    assert (found["unit"], found["intrinsics_assumed"]) == ("reference_bone", True)


def test_a_stopped_call_leaves_what_it_has_and_the_next_one_replaces_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(predict_file, "_BATCH", 8)
    words, out = [str(save_hand(tmp_path / f"{number}.png")) for number in range(10)], tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        predict(run, words, out, drawings=2, progress=Mock(side_effect=KeyboardInterrupt))
    found = read_predictions(out)
    assert [hand["image"] for hand in found["predictions"]] == words[:8]
    assert (found["complete"], found["hands_done"], found["hands"]) == (False, 8, 10)
    assert sorted(file.name for file in out.iterdir()) == ["0000_0.jpg", "0001_1.jpg", "predictions.json"]
    predict(run, words, out, drawings=0)
    found = read_predictions(out)
    assert [hand["drawing"] for hand in found["predictions"]] == [None] * 10
    assert (found["complete"], found["hands_done"], found["hands"]) == (True, 10, 10)
    assert caplog.messages == [f"{out / 'predictions.json'} has 8 of 10 hands: the call was stopped"]
    assert [file.name for file in out.iterdir()] == ["predictions.json"]  # no drawing of an earlier call
    mine = out / "0001_1.jpg"
    mine.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"0001_1\.jpg: exists already"):
        predict(run, words, out, drawings=2)
    assert mine.read_bytes() == b"mine"
    predict(run, words, out, drawings=2, force=True)
    predict(run, [str(mine)], out, drawings=0, force=True)  # an earlier drawing as the picture
    assert sorted(file.name for file in out.iterdir()) == ["0001_1.jpg", "predictions.json"]


def test_a_network_that_predicts_the_palm_gives_the_wrist(tmp_path: Path) -> None:
    """Keypoint 0 is called the wrist in the file, so it is where the wrist in 3D is seen."""
    palm = untrained_run(tmp_path / "palm", "pose.first_keypoint=palm")
    hand = save_hand(tmp_path / "hand.png", 400, 300)
    (found,) = predict(palm, [str(hand)], tmp_path / "out", box_px=(100, 50, 300, 250)).predictions
    for keypoint, atol in ((0, 1e-6), (9, 0.05)):  # keypoint 9 is the network's own
        seen = found.intrinsics @ np.asarray(found.joints)[keypoint]
        np.testing.assert_allclose(found.keypoints_px[keypoint], seen[:2] / seen[2], atol=atol)


def test_a_turned_photo_is_predicted_as_it_is_displayed(run: Path, tmp_path: Path) -> None:
    """Orientation 6 turns a 80 x 120 picture by 90 degrees: keypoints and camera are those of 120 x 80."""
    save_turned(tmp_path / "turned.jpg")
    Pillow.fromarray(np.ascontiguousarray(np.rot90(drawn_hand(80, 120), k=-1))).save(tmp_path / "upright.jpg")
    words = [str(tmp_path / name) for name in ("turned.jpg", "upright.jpg")]
    turned, plain = predict(run, words, tmp_path / "out").predictions
    assert turned.intrinsics.tolist() == [[120, 0, 60], [0, 120, 40], [0, 0, 1]]
    np.testing.assert_allclose(turned.keypoints_px, plain.keypoints_px, atol=2)


def test_keypoints_are_those_of_the_network_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the precision of training was. The box makes a view of one block of 8 x 8 pixels per pixel."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)  # "auto" trains in bf16 on such a CPU
    source = untrained_run(tmp_path / "run", "geometry.side_px=64")
    pixels = drawn_hand(64, 64)
    cv2.imwrite(str(tmp_path / "hand.png"), np.kron(pixels, np.ones((8, 8, 1), np.uint8)))
    run = load_pose_run(source)
    low, high = 256 - 256 / run.box_margin, 256 + 256 / run.box_margin
    (found,) = predict(
        source, [str(tmp_path / "hand.png")], tmp_path / "out", box_px=(low, low, high, high)
    ).predictions
    network = run.network.double()
    network.normalize.double()
    image = torch.from_numpy(np.ascontiguousarray(pixels[..., ::-1].transpose(2, 0, 1)))[None]
    with torch.inference_mode():
        features = network.encoder(network.normalize(image))
        expected = network.from_features(features, torch.eye(3, dtype=torch.float64)[None], side_px=64)
    np.testing.assert_allclose(found.keypoints_px, 8 * expected.keypoints_px[0].numpy(), rtol=0, atol=1e-3)


def test_the_spread_is_that_of_four_turned_views_mapped_back(tmp_path: Path) -> None:
    """A network that always answers with one point, a quarter of the view right of its centre."""
    source = untrained_run(tmp_path / "run")
    path = find_checkpoint(source, "")
    saved = load_checkpoint(path)
    for name in ("weight", "bias"):
        saved["network"][f"head.{name}"].zero_()
    saved["network"]["head.bias"][::3] = 0.25
    write_checkpoint(path, saved["step"], saved)
    (found,) = predict(source, [str(save_hand(tmp_path / "hand.png"))], tmp_path / "out").predictions
    points = np.exp(1j * np.radians([-60, -20, 20, 60])) * 0.25 * (found.box_px[2] - found.box_px[0])
    assert found.spread_px == pytest.approx(np.abs(points - points.mean()).mean(), abs=0.01)


def test_a_call_that_stops_in_a_drawing_can_be_repeated(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, out = [str(save_hand(tmp_path / f"{number}.png")) for number in range(3)], tmp_path / "out"
    monkeypatch.setattr(predict_file, "save_sheet", Mock(side_effect=[None, KeyboardInterrupt, *[None] * 3]))
    with pytest.raises(KeyboardInterrupt):
        predict(run, words, out)
    (out / "0001_1.jpg").write_bytes(b"drawn, but for the last moment")
    assert len(predict(run, words, out).predictions) == 3


def test_the_box_the_camera_and_the_scale_are_used(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    camera = tmp_path / "camera.json"
    camera.write_text(json.dumps([[500, 0, 190], [0, 510, 160], [0, 0, 1]]))
    words, box_px = [str(save_hand(tmp_path / "hand.png", 400, 300))], (100.0, 50.0, 300.0, 150.0)
    bare, scaled = (
        predict(run, words, tmp_path / "out", box_px=box_px, intrinsics=camera, scale_m=scale_m).predictions[0]
        for scale_m in (None, 0.03)
    )
    assert not caplog.messages
    joints = np.asarray(bare.joints)
    np.testing.assert_allclose(np.asarray(scaled.joints), 0.03 * joints)
    # A square of 200 around the middle, times the margin of training, 1.5.
    np.testing.assert_allclose(bare.box_px, (200 - 150, 100 - 150, 200 + 150, 100 + 150), atol=1e-3)
    # The pose projects through the camera to where the keypoints are drawn, whatever the network thinks.
    homogeneous = joints @ np.array([[500, 0, 190], [0, 510, 160], [0, 0, 1]]).T
    np.testing.assert_allclose(homogeneous[:, :2] / homogeneous[:, 2:], bare.keypoints_px, atol=1e-2)
    camera.write_text(json.dumps([[500, 0, 960], [0, 500, 540], [0, 0, 1]]))
    predict(run, words, tmp_path / "out", intrinsics=camera)
    assert "camera.json: cx, cy is far from the middle of the pictures of 1 of 1 hands" in caplog.text


def test_a_file_of_boxes_gives_a_prediction_for_each_hand(run: Path, tmp_path: Path) -> None:
    """A left hand is predicted as the right hand of the mirror image, and described in the picture as it is."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    save_hand(photos / "more" / "two.png", 300, 200)
    (photos / "bad.png").write_bytes(b"not an image")
    boxes = tmp_path / "boxes.csv"
    rows = ("bad.png,4,3,14,13,left", "more/two.png,40,30,140,130,left", "more/two.png,150,20,250,120,right")
    boxes.write_text("\n".join(["file,x0,y0,x1,y1,hand", *rows]), encoding="utf-8-sig")
    assert run_cli("predict", str(run), str(photos), "--box", str(boxes), "--out", str(out), "--pictures", "0") == 0
    left, right = read_predictions(out)["predictions"]
    assert (left["mirrored"], right["mirrored"], len(list(out.iterdir()))) == (True, False, 1)
    np.testing.assert_allclose(left["box_px"], (90 - 75, 80 - 75, 90 + 75, 80 + 75), atol=0.01)
    cv2.imwrite(str(tmp_path / "mirror.png"), drawn_hand(300, 200)[:, ::-1])
    words, box_px = [str(tmp_path / "mirror.png")], (300.0 - 140, 30.0, 300.0 - 40, 130.0)
    (as_right,) = predict(run, words, tmp_path / "mirrored", box_px=box_px).predictions
    np.testing.assert_allclose(left["keypoints_px"], as_right.keypoints_px * [-1, 1] + [300, 0], atol=0.5)
    np.testing.assert_allclose(left["joints"], np.asarray(as_right.joints) * [-1, 1, 1], atol=0.05)
    with pytest.raises(UserError, match="expected one folder, which its names are relative to"):
        predict(run, words, out, boxes=boxes)


def test_pictures_come_from_files_and_folders_outside_the_results(run: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    files = [save_hand(photos / name) for name in ("a.JPG", "b.png", "in/b.png", ".hidden/b.png")]
    found = predict(run, [str(files[1]), str(photos)], tmp_path / "out").predictions
    assert [one.image for one in found] == [files[1], files[0], files[2]]
    assert [one.drawing for one in found] == ["0000_b.jpg", "0001_a.jpg", "0002_b.jpg"]
    with pytest.raises(UserError, match=r"exists, and .*photos holds no results of this command"):
        predict(run, [str(files[0])], photos)


def save_png_that_does_not_decode(path: Path) -> None:
    """Sound in its structure, but its compressed data is none."""
    content = cv2.imencode(".png", drawn_hand(60, 50))[1].tobytes()
    start = content.index(b"IDAT")
    length = int.from_bytes(content[start - 4 : start])
    data = b"IDAT" + bytes(length)
    path.write_bytes(content[:start] + data + zlib.crc32(data).to_bytes(4) + content[start + 8 + length :])


def test_unreadable_pictures_are_left_out_and_named_at_the_end(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others get what they get without them, and no other hand is told under their names."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    good = [str(save_hand(photos / "b.png", 50, 40)), str(save_hand(photos / "e.png", 60, 80))]
    expected = [predict(run, [word], tmp_path / "single").predictions[0] for word in good]
    (photos / "a.jpg").write_text("hello")
    save_hand(photos / "c.png", 1, 1)
    save_png_that_does_not_decode(photos / "d.png")
    assert run_cli("predict", str(run), str(photos), "--out", str(out)) == 0
    told = capsys.readouterr().err.splitlines()[-4:]
    assert told[0].startswith("left out 3 pictures, which cannot be read, or are not JPEG, PNG or WebP of 4 to")
    assert [line.strip() for line in told[1:]] == [str(photos / name) for name in ("a.jpg", "c.png", "d.png")]
    found = read_predictions(out)
    assert [hand["image"] for hand in found["predictions"]] == good
    for hand, alone in zip(found["predictions"], expected, strict=True):
        np.testing.assert_allclose(hand["keypoints_px"], alone.keypoints_px, atol=1e-2)
    assert (found["complete"], found["hands_done"], len(found["unreadable"])) == (True, 5, 3)
    for file in (*good, str(photos / "d.png")):
        Path(file).write_bytes(b"")
    with pytest.raises(UserError, match=r"none of 5 pictures can be used, such as .*a\.jpg; expected JPEG"):
        predict(run, [str(photos)], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_network_of_finite_weights_that_gives_nan_writes_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = load_checkpoint(find_checkpoint(run, ""))
    for name, tensor in saved["network"].items():
        if name.endswith("bn1.weight"):
            tensor.fill_(1e38)
    write_checkpoint(tmp_path / "step_0.pt", 0, {key: saved[key] for key in saved if key not in ("format", "step")})
    hand = save_hand(tmp_path / "hand.png")
    before = sorted(tmp_path.iterdir())
    error = refusal(capsys, "predict", str(tmp_path / "step_0.pt"), str(hand), "--out", str(tmp_path / "out"))
    assert "step_0.pt: gives keypoints that are NaN or infinite; use another" in error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "content",
    ["[[500, 1000, 80], [125, 250, 60], [0, 0, 1]]", "[[1.2, 0, 0.5], [0, 1.6, 0.5], [0, 0, 1]]",
     "[[NaN, 0, 1], [0, 500, 3], [0, 0, 1]]", "[[500, 0, 1e39], [0, 500, 3], [0, 0, 1]]", "{",
     "[[500, 0, 50], [0, 5000, 50], [0, 0, 1]]", "[[500, 60, 50], [0, 500, 50], [0, 0, 1]]",
     "[[2e5, 0, 50], [0, 2e5, 50], [0, 0, 1]]"],
)  # fmt: skip
def test_what_is_no_camera_in_pixels_is_refused(content: str, tmp_path: Path) -> None:
    """Singular, in units of the picture's width, not a number, infinite, no JSON, squeezed, skewed, of a telescope."""
    (tmp_path / "camera.json").write_text(content)
    with pytest.raises(
        UserError, match=r"no camera matrix in pixels: expected a single one.* focal lengths of 10 to 100000 px"
    ):
        read_intrinsics(tmp_path / "camera.json")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"images": ["no.png"]}, "no.png': no picture, and no folder"),
        ({"images": ["h\udcff"]}, "no folder of pictures with a name in UTF-8"),
        ({"box_px": (60.0, 5.0, 90.0, 9.0)}, "--box: 1 of 1 boxes are mostly outside of their images"),
        ({"box_px": (0.1, 0.1, 0.9, 0.9)}, "Are these fractions of the image"),
        ({"images": ["hand.png", "text.txt"], "box_px": (1.0, 2.0, 3.0, 4.0)}, "--box names one place"),
        ({"run": Path("empty")}, "holds no checkpoint; expected the folder of a fine-tuning run"),
    ],
)
def test_wrong_input_is_reported_in_one_line(
    wrong: dict[str, Any], message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_hand(Path("hand.png"), 50, 40)
    Path("text.txt").write_text("hello")
    Path("empty").mkdir()
    Path("h\udcff").mkdir()
    with pytest.raises(UserError, match=message):
        predict(**{"run": run, "images": ["hand.png"], "out": Path("out"), **wrong})
