"""Prediction in pictures that nobody rendered: any size, mode and orientation gives a drawing and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image as Pillow

from errors import UserError
from tests.command_line import run_cli
from tests.train.tiny_hands import untrained_run
from train.pose.predict import assumed_intrinsics, find_images, predict, read_intrinsics, read_picture, result_names

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


def gray_jpeg(path: Path) -> None:
    Pillow.fromarray(drawn_hand(37, 51)).convert("L").save(path.with_suffix(".jpg"))


def palette_png(path: Path) -> None:
    Pillow.fromarray(drawn_hand(300, 200)).convert("P").save(path.with_suffix(".png"))


def rgba_webp(path: Path) -> None:
    Pillow.fromarray(drawn_hand(200, 300)).convert("RGBA").save(path.with_suffix(".webp"))


def cmyk_jpeg(path: Path) -> None:
    Pillow.fromarray(drawn_hand(120, 120)).convert("CMYK").save(path.with_suffix(".jpg"))


def deep_png(path: Path) -> None:
    cv2.imwrite(str(path.with_suffix(".png")), drawn_hand(90, 60).astype(np.uint16) * 257)


def deep_tiff(path: Path) -> None:
    cv2.imwrite(str(path.with_suffix(".tiff")), drawn_hand(90, 60).astype(np.uint16) * 257)


def bitmap(path: Path) -> None:
    cv2.imwrite(str(path.with_suffix(".bmp")), drawn_hand(64, 64))


def ribbon(path: Path) -> None:
    cv2.imwrite(str(path.with_suffix(".png")), drawn_hand(2400, 3))


def turned_jpeg(path: Path) -> None:
    picture = Pillow.fromarray(drawn_hand(80, 120))
    exif = picture.getexif()
    exif[274] = 6
    picture.save(path.with_suffix(".jpg"), exif=exif.tobytes())


KINDS = (gray_jpeg, palette_png, rgba_webp, cmyk_jpeg, deep_png, deep_tiff, bitmap, ribbon, turned_jpeg)


def test_every_kind_of_picture_gives_a_drawing_and_json(run: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for kind in KINDS:
        kind(photos / kind.__name__)
    (photos / "notes.txt").write_text("not a picture")
    results = predict(run, [str(photos)], tmp_path / "out").predictions
    assert [result.image.stem for result in results] == sorted(kind.__name__ for kind in KINDS)
    for result in results:
        drawing = cv2.imread(str(result.picture))
        assert drawing is not None
        assert drawing.std() > 10
        said: dict[str, Any] = json.loads(result.picture.with_suffix(".json").read_text())
        assert np.shape(said["keypoints_px"]) == (21, 2)
        assert np.shape(said["joints"]) == (21, 3)
        assert np.isfinite(said["joints"]).all()
        assert (said["unit"], said["scale_normalised"], said["intrinsics_assumed"]) == ("reference_bone", True, True)
        assert said["box_needed"] in ("likely", "unknown")
        assert "--box" in said["note"]


def test_a_network_that_predicts_the_palm_gives_the_wrist(tmp_path: Path) -> None:
    """Keypoint 0 is called the wrist in the JSON file, so it is where the wrist in 3D is seen."""
    palm = untrained_run(tmp_path / "palm", "pose.first_keypoint=palm")
    cv2.imwrite(str(tmp_path / "hand.png"), drawn_hand(400, 300))
    (found,) = predict(palm, [str(tmp_path / "hand.png")], tmp_path / "out", box_px=(100, 50, 300, 250)).predictions
    assert found.joints is not None
    seen = found.intrinsics @ found.joints[0]
    np.testing.assert_allclose(found.keypoints_px[0], seen[:2] / seen[2], atol=1e-6)
    predicted = found.intrinsics @ found.joints[9]
    np.testing.assert_allclose(found.keypoints_px[9], predicted[:2] / predicted[2], atol=0.05)  # the network's own


def test_a_turned_photo_is_predicted_as_it_is_displayed(run: Path, tmp_path: Path) -> None:
    """Orientation 6 turns a 80 x 120 picture by 90 degrees: keypoints and camera are those of 120 x 80."""
    turned_jpeg(tmp_path / "turned")
    upright = np.rot90(drawn_hand(80, 120), k=-1)
    Pillow.fromarray(np.ascontiguousarray(upright)).save(tmp_path / "upright.jpg")
    words = [str(tmp_path / name) for name in ("turned.jpg", "upright.jpg")]
    turned, plain = predict(run, words, tmp_path / "out").predictions
    assert turned.intrinsics.tolist() == [[120, 0, 60], [0, 120, 40], [0, 0, 1]]
    np.testing.assert_allclose(turned.keypoints_px, plain.keypoints_px, atol=2)
    assert read_picture(str(tmp_path / "turned.jpg")).shape == (80, 120, 3)


def test_the_box_the_camera_and_the_scale_are_used(run: Path, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "hand.png"), drawn_hand(400, 300))
    camera = tmp_path / "camera.json"
    camera.write_text(json.dumps({"fx": 500, "fy": 510, "cx": 190, "cy": 160}))
    words, out = [str(tmp_path / "hand.png")], tmp_path / "out"
    (bare,) = predict(run, words, out, box_px=(100, 50, 300, 150), intrinsics=camera).predictions
    (scaled,) = predict(run, words, out, box_px=(100, 50, 300, 150), intrinsics=camera, scale_m=0.03).predictions
    assert (bare.unit, scaled.unit, bare.box_needed) == ("reference_bone", "m", "no")
    assert scaled.joints is not None
    assert bare.joints is not None
    np.testing.assert_allclose(scaled.joints, 0.03 * bare.joints)
    # A square of 200 around the middle, times the margin of training, 1.5.
    np.testing.assert_allclose(bare.box_px, (200 - 150, 100 - 150, 200 + 150, 100 + 150), atol=1e-3)
    # The pose projects through the camera to where the keypoints are drawn, whatever the network thinks.
    homogeneous = bare.joints @ np.array([[500, 0, 190], [0, 510, 160], [0, 0, 1]]).T
    np.testing.assert_allclose(homogeneous[:, :2] / homogeneous[:, 2:], bare.keypoints_px, atol=1e-2)


def test_a_file_of_boxes_gives_a_prediction_for_each_hand(run: Path, tmp_path: Path) -> None:
    """A left hand is predicted as the right hand of the mirror image, and told of in the picture as it is."""
    picture, photos = drawn_hand(300, 200), tmp_path / "photos"
    (photos / "more").mkdir(parents=True)
    cv2.imwrite(str(photos / "more" / "two.png"), picture)
    cv2.imwrite(str(photos / "other.png"), picture)
    (photos / "bad.png").write_bytes(b"not an image")
    boxes = tmp_path / "boxes.csv"
    rows = ("bad.png,,,,,unreadable", "more/two.png,40,30,140,130,left", "more/two.png,150,20,250,120,right")
    boxes.write_text("\n".join(["file,x0,y0,x1,y1,hand", *rows, "other.png,,,,,none"]))
    assert run_cli("predict", str(run), str(photos), "--box", str(boxes), "--out", str(tmp_path / "out")) == 0
    left, right = (json.loads((tmp_path / "out" / f"two_{number}.json").read_text()) for number in (0, 1))
    assert len(list((tmp_path / "out").iterdir())) == 4
    assert (left["mirrored"], right["mirrored"], left["box_needed"]) == (True, False, "no")
    np.testing.assert_allclose(left["box_px"], (90 - 75, 80 - 75, 90 + 75, 80 + 75), atol=0.01)
    np.testing.assert_allclose(right["box_px"], (200 - 75, 70 - 75, 200 + 75, 70 + 75), atol=0.01)
    cv2.imwrite(str(tmp_path / "mirror.png"), picture[:, ::-1])
    words, box_px = [str(tmp_path / "mirror.png")], (300.0 - 140, 30.0, 300.0 - 40, 130.0)
    (as_right,) = predict(run, words, tmp_path / "mirrored", box_px=box_px).predictions
    expected_px = as_right.keypoints_px * [-1, 1] + [300, 0]
    np.testing.assert_allclose(left["keypoints_px"], expected_px, atol=0.5)
    assert as_right.joints is not None
    np.testing.assert_allclose(left["joints"], as_right.joints * [-1, 1, 1], atol=0.05)


def test_a_file_of_boxes_needs_the_folder_of_its_names(run: Path, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "hand.png"), drawn_hand(60, 50))
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("file,x0,y0,x1,y1\nhand.png,1,1,40,40\n")
    for images in ([str(tmp_path / "hand.png")], [str(tmp_path), str(tmp_path)]):
        with pytest.raises(UserError, match="expected one folder, which the names in this file are relative to"):
            predict(run, images, tmp_path / "out", boxes=boxes)
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over_what_was_there(run: Path, tmp_path: Path) -> None:
    """Neither over a picture that is read, nor over a camera, nor over another file of the user."""
    for name in ("hand.png", "other.jpg", "third.jpg"):
        cv2.imwrite(str(tmp_path / name), drawn_hand(60, 50))
    cv2.imwrite(str(tmp_path / "third.png"), drawn_hand(40, 30))  # not asked for
    camera = tmp_path / "other.json"
    camera.write_text(json.dumps({"fx": 500, "fy": 510, "cx": 30, "cy": 25}))
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    words = [str(tmp_path / name) for name in ("hand.png", "other.jpg", "third.jpg")]
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
        (["x/a.jpg", "y/a.jpg", "y/A.png"], ["a_0", "a_1", "A_2"]),  # some file systems know one case
        (["a.jpg", "a.png", "a_0.jpg", "a_0.png", "a_0_0.jpg"], ["a_0", "a_1", "a_0_1", "a_0_2", "a_0_0"]),
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
    cv2.imwrite(str(tmp_path / "plain.png"), drawn_hand(60, 50))
    (tmp_path / "plain.png").rename(tmp_path / "photos" / name)
    assert run_cli("predict", str(run), str(tmp_path / "photos"), "--out", str(tmp_path / "out")) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\nerror" not in captured.out + captured.err
    assert (tmp_path / "out" / name).exists()


def test_unreadable_pictures_are_left_out_and_named_at_the_end(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others get what they get without them, whatever lies between them in the order."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    cv2.imwrite(str(photos / "b.png"), drawn_hand(50, 40))
    cv2.imwrite(str(photos / "d.png"), drawn_hand(60, 80))
    alone = {name: predict(run, [str(photos / name)], tmp_path / "alone").predictions[0] for name in ("b.png", "d.png")}
    (photos / "a.jpg").write_text("hello")
    cv2.imwrite(str(photos / "c.png"), drawn_hand(1, 1))
    (photos / "e.png").write_bytes(b"")
    for words in ([str(photos)], [str(photos / "*")], [str(file) for file in sorted(photos.iterdir())]):
        assert run_cli("predict", str(run), *words, "--out", str(out)) == 0
        written = capsys.readouterr()
        assert sorted(file.name for file in out.iterdir()) == ["b.json", "b.png", "d.json", "d.png"]
        lines = written.err.splitlines()[-3:]
        for line, start in zip(
            lines,
            ("a.jpg is not a", "c.png has 1 x 1", "e.png is not a"),
            strict=True,
        ):
            assert line.startswith(f"left out: {photos}/{start}")
        for name, expected in alone.items():
            said = json.loads((out / name).with_suffix(".json").read_text())
            np.testing.assert_allclose(said["keypoints_px"], expected.keypoints_px, atol=1e-2)
            assert said["intrinsics"] == expected.intrinsics.tolist()


def test_an_unreadable_picture_of_two_hands_is_named_once(run: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    cv2.imwrite(str(tmp_path / "photos" / "good.png"), drawn_hand(300, 200))
    (tmp_path / "photos" / "bad.png").write_bytes(b"not an image")
    boxes = tmp_path / "boxes.csv"
    rows = ("bad.png,4,3,14,13,left", "bad.png,15,2,25,12,right", "good.png,40,30,140,130,left")
    boxes.write_text("\n".join(["file,x0,y0,x1,y1,hand", *rows]))
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


def test_pictures_come_from_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    everything = [tmp_path / "a.JPG", tmp_path / "b.png"]
    assert find_images([str(tmp_path)]) == everything
    assert find_images([str(tmp_path / "*.png"), str(tmp_path)]) == [everything[1], everything[0]]
    assert find_images([str(tmp_path / "c.txt")]) == [tmp_path / "c.txt"]


@pytest.mark.parametrize(
    "content",
    ["[[500, 0, 100], [0, 500, 90], [0, 0, 1]]", '{"K": [[500, 0, 100], [0, 500, 90], [0, 0, 1]]}',
     '{"fx": 500, "fy": 500, "cx": 100, "cy": 90}'],
)  # fmt: skip
def test_cameras_are_read(content: str, tmp_path: Path) -> None:
    (tmp_path / "camera.json").write_text(content)
    assert read_intrinsics(tmp_path / "camera.json").tolist() == [[500, 0, 100], [0, 500, 90], [0, 0, 1]]


@pytest.mark.parametrize(
    "content",
    ["[[1e30, 0, 1], [0, 1e-30, 3], [0, 0, 1]]", "[[500, 1000, 80], [125, 250, 60], [0, 0, 1]]",
     "[[1.2, 0, 0.5], [0, 1.6, 0.5], [0, 0, 1]]", "[[NaN, 0, 1], [0, 500, 3], [0, 0, 1]]",
     "[[500, 0, 1e39], [0, 500, 3], [0, 0, 1]]"],
)  # fmt: skip
def test_what_is_no_camera_in_pixels_is_refused(content: str, tmp_path: Path) -> None:
    """Out of all bounds, singular, in units of the picture's width, not a number, infinite in float32."""
    (tmp_path / "camera.json").write_text(content)
    with pytest.raises(UserError, match=r"no camera matrix in pixels.* at least 10 pixels"):
        read_intrinsics(tmp_path / "camera.json")


@pytest.mark.parametrize("content", ["[{0}, {0}]", "[{0}]", '{{"K": [{0}, {0}]}}'])
def test_a_datasets_list_of_cameras_is_refused_for_what_it_is(content: str, tmp_path: Path) -> None:
    """FreiHAND's training_K.json, one matrix for each of its pictures."""
    (tmp_path / "training_K.json").write_text(content.format("[[500, 0, 100], [0, 500, 90], [0, 0, 1]]"))
    message = r"training_K\.json holds a list of [12] matrices.*: expected one 3 x 3 camera matrix"
    with pytest.raises(UserError, match=message):
        read_intrinsics(tmp_path / "training_K.json")


def test_an_assumed_camera_sees_53_degrees() -> None:
    assert assumed_intrinsics(400, 300).tolist() == [[400, 0, 200], [0, 400, 150], [0, 0, 1]]


WRONG: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "nothing there": (lambda root: {"images": [str(root / "no*.png")]}, "no such file, and no pattern"),
    "empty folder": (lambda root: {"images": [str(root / "empty")]}, "a folder without pictures"),
    "no picture": (lambda root: {"images": [str(root / "text.png")]}, "text.png is not a readable picture"),
    "a single pixel": (lambda root: {"images": [str(root / "dot.png")]}, "has 1 x 1 pixels"),
    "box upside down": (lambda _: {"box_px": (30.0, 5.0, 20.0, 9.0)}, "--box 30,5,20,9 is not a box"),
    "box outside": (lambda _: {"box_px": (60.0, 5.0, 90.0, 9.0)}, "lies outside the picture of 50 x 40 pixels"),
    "box in fractions": (
        lambda _: {"box_px": (0.1, 0.1, 0.9, 0.9)},
        "is smaller than 2 pixels: expected pixels of the picture",
    ),
    "no camera file": (lambda root: {"intrinsics": root / "no.json"}, "expected a JSON file with a camera matrix"),
    "no camera": (lambda root: {"intrinsics": root / "text.png"}, "holds no camera matrix in pixels"),
    "one box for two": (
        lambda root: {"images": [str(root / "hand.png"), str(root / "dot.png")], "box_px": (1.0, 2.0, 3.0, 4.0)},
        "--box names one place, and there are 2 pictures",
    ),
    "no run": (lambda root: {"run": root / "empty"}, "holds no checkpoint; expected the folder of a fine-tuning run"),
    "out is a file": (lambda root: {"out": root / "text.png"}, "cannot be written to"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_reported_in_one_line(case: str, run: Path, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "hand.png"), drawn_hand(50, 40))
    cv2.imwrite(str(tmp_path / "dot.png"), drawn_hand(1, 1))
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty").mkdir()
    make, message = WRONG[case]
    arguments: dict[str, Any] = {"run": run, "images": [str(tmp_path / "hand.png")], "out": tmp_path / "out"}
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        predict(**{**arguments, **make(tmp_path)})
