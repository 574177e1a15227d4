"""tools/sign_digits.py: who is one person, and the messages when the pictures cannot be fetched."""

from __future__ import annotations

import csv
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tools.sign_digits import ADDRESS, people_of

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "sign_digits.py"


@pytest.mark.parametrize(
    ("digits", "people"),
    [
        ("0123456789" "0123456789", "00000000001111111111"),
        ("0123456798" "0132456789", "00000000001111111111"),  # pictures were swapped
        ("012345678" "012345679", "000000000111111111"),  # the last picture of each is missing
        ("0123456789" "123456789", "0000000000000000000"),  # the 0 of the second is missing: one person, to be safe
        ("01234" "0123456789", "000000000000000"),  # the first person's 8 and 9 are missing
        ("3456789" "01", "000000011"),
    ],
)  # fmt: skip
def test_a_person_begins_at_a_0_after_the_last_digits(digits: str, people: str) -> None:
    assert people_of(map(int, digits)) == list(map(int, people))


def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment or None)


def checkout(root: Path) -> Path:
    for number in range(60):
        file = root / "Dataset" / str(number % 10) / f"IMG_{1000 + number}.JPG"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return root


def names_in(boxes: Path) -> list[str]:
    with boxes.open() as file:
        return [row["file"] for row in csv.DictReader(file)]


def test_a_fold_holds_whole_people_out_of_labels_and_boxes(tmp_path: Path) -> None:
    signs = tmp_path / "signs"
    assert call("fetch", signs, "--from", checkout(tmp_path / "copy")).returncode == 0
    names = [f"{number % 10}/IMG_{1000 + number}.JPG" for number in range(60)]
    unseen = set(names[::3])  # no hand was found in them
    (signs / "boxes.csv").write_text(
        "".join(f"{line}\n" for line in ["file,x0", *(f"{name},{'' if name in unseen else 1}" for name in names)])
    )
    for fold in (0, 1):
        assert call("split", signs, "--fold", fold).returncode == 0
        with (signs / f"fold_{fold}" / "labels.csv").open() as file:
            rows = list(csv.DictReader(file))
        test = {row["person"] for row in rows if row["part"] == "test"}
        assert test == ({"0", "5"} if fold == 0 else {"1"})
        assert not test & {row["person"] for row in rows if row["part"] == "train"}
        boxed = set(names_in(signs / f"fold_{fold}" / "boxes.csv"))
        assert boxed == {row["file"] for row in rows if row["part"] == "train"}
        held_out, labelled = (names_in(signs / f"fold_{fold}" / f"{name}.csv") for name in ("held_out", "labelled_20"))
        assert set(held_out) == {row["file"] for row in rows if row["part"] == "test"}
        assert len(set(labelled)) == 20
        assert labelled != sorted(labelled)
        assert not (signs / f"fold_{fold}" / "labelled_50.csv").exists()  # there are 48 or fewer
        assert boxed > set(labelled)
        assert not unseen & set(labelled)


def test_pictures_are_fetched_by_git(tmp_path: Path) -> None:
    repository = checkout(tmp_path / "repository")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b@c", "commit", "-qm", "d"]):
        (repository / "Dataset" / "0" / "IMG_1000.JPG").write_text("not empty")
        subprocess.run(["git", *command], cwd=repository, check=True)
    fetched = call("fetch", tmp_path / "signs", SIGN_DIGITS=str(repository), PATH="/usr/bin:/bin")
    assert f"{tmp_path / 'signs' / 'images'}: 60 pictures" in fetched.stdout, fetched.stderr
    again = call("fetch", tmp_path / "signs", SIGN_DIGITS="/nowhere")
    assert again.returncode == 0


def test_what_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    unreachable = call("fetch", tmp_path / "a", SIGN_DIGITS=str(tmp_path / "nowhere.git"), PATH="/usr/bin:/bin")
    no_git = call("fetch", tmp_path / "a", PATH=str(tmp_path))
    wrong = call("fetch", tmp_path / "b", "--from", tmp_path)
    early = call("split", tmp_path / "b")
    (tmp_path / "c").mkdir(parents=True)
    (tmp_path / "c" / "images").write_text("mine")
    file = call("fetch", tmp_path / "c", "--from", checkout(tmp_path / "copy"))
    messages = ["PHOTOGRAPHS=", "git is not installed", f"a checkout of {ADDRESS}", "run 'fetch'", "Move it elsewhere"]
    for done, part in zip((unreachable, no_git, wrong, early, file), messages, strict=True):
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert part in done.stderr
    assert not (tmp_path / "b").exists()
    assert (tmp_path / "c" / "images").read_text() == "mine"


def test_boxes_must_be_those_of_all_pictures(tmp_path: Path) -> None:
    signs, copy = tmp_path / "signs", checkout(tmp_path / "copy")
    assert "60 pictures; the dataset has 2,062" in call("fetch", signs, "--from", copy).stdout
    rows = [f"{number % 10}/IMG_{1000 + number}.JPG,1" for number in range(60)]
    for lines, part in (
        ([], "is no file of boxes"),
        (["file,x0", *rows[:20]], "has no row for 40 of 60 pictures, such as 0/IMG_1020.JPG"),
        (["\udcff"], "is no file of boxes"),
    ):
        (signs / "boxes.csv").write_text("".join(f"{line}\n" for line in lines), errors="surrogateescape")
        done = call("split", signs)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert part in done.stderr
    (signs / "boxes.csv").write_text("\n".join(["file,x0", "", *rows, "0/another.jpg,1"]))
    assert call("split", signs).returncode == 0
    second = call("fetch", signs, "--from", checkout(tmp_path / "second"))
    assert second.returncode == 2
    assert "Move it elsewhere to begin with" in second.stderr


def test_make_ends_at_a_wrong_folder(tmp_path: Path) -> None:
    stamp = ROOT / ".venv" / f".installed-{hashlib.sha256((ROOT / 'requirements.lock').read_bytes()).hexdigest()}"
    if not stamp.exists():
        pytest.skip("there is no .venv that make has set up for this requirements.lock")
    command = ["make", f"--old-file={stamp.relative_to(ROOT)}", "photographs", f"PHOTOGRAPHS={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected a checkout" in done.stderr
