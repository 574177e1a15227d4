"""Prepares the photographs of the Sign Language Digits Dataset, for `make photographs`.

    python tools/sign_digits.py fetch FOLDER [--from CHECKOUT]
    uv run tools/find_boxes.py FOLDER/images FOLDER/boxes.csv
    python tools/sign_digits.py split FOLDER [--fold K]

The dataset (Apache 2.0) has 2,062 pictures of 100 x 100 pixels, Dataset/DIGIT/IMG_NUMBER.JPG, of people who each show
the digits 0 to 9. `fetch` makes FOLDER/images, a link to Dataset/ of a checkout, which git fetches if none is given.
`split` holds a fifth of the people out and writes into FOLDER/fold_K:

- labels.csv: file,label,person,part, where part is "train" or "test";
- boxes.csv: the rows of FOLDER/boxes.csv of the people of "train", for pre-training;
- held_out.csv: those of the people of "test";
- labelled_20.csv, _50, _200 and _1000: so many hands of "train", if it has them, the first of one random order.

The dataset does not say who is who. By number, a person's pictures follow each other with ascending digits, nearly. A
person is taken to begin at each 0 that follows an 8 or 9. Where a picture of 0 or the last ones are missing, two people
then count as one, so nobody is on both sides of the split.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

ADDRESS = "https://github.com/ardamavi/Sign-Language-Digits-Dataset"
PICTURES = 2062
FOLDS = 5
LABELLED = (20, 50, 200, 1000)
COLUMNS = ("file", "label", "person", "part")


def refuse(line: str) -> NoReturn:
    """End the command because of wrong input."""
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def pictures_in(images: Path) -> list[str]:
    """The names DIGIT/IMG_NUMBER.JPG of the pictures in a folder, by number."""
    names = (file.relative_to(images).as_posix() for file in images.glob("[0-9]/*"))
    found = (re.fullmatch(r"[0-9]/IMG_([0-9]+)\.jpg", name, re.IGNORECASE) for name in names)
    return [match[0] for match in sorted(filter(None, found), key=lambda match: int(match[1]))]


def people_of(digits: Iterable[int]) -> list[int]:
    """The number of the person in each picture, given the digits that the pictures show."""
    people, last = [0], 0
    for digit in digits:
        people.append(people[-1] + (digit == 0 and last >= 8))
        last = digit
    return people[1:]


def fetch(folder: Path, checkout: Path | None) -> None:
    """Make the link FOLDER/images."""
    if checkout is None and not pictures_in(folder / "images"):
        checkout = clone(folder / "checkout")
    if checkout is not None:
        if not pictures_in(checkout / "Dataset"):
            refuse(f"{checkout}: has no pictures Dataset/DIGIT/IMG_NUMBER.JPG; expected a checkout of {ADDRESS}")
        folder.mkdir(parents=True, exist_ok=True)
        link, pictures = folder / "images", (checkout / "Dataset").resolve()
        if link.exists() and not link.is_symlink():
            refuse(f"{link}: is no link; expected a link, or nothing. Move it elsewhere.")
        if link.exists() and link.resolve() != pictures and (folder / "boxes.csv").exists():
            refuse(f"{folder}: was made from {link.resolve()}. Move it elsewhere to begin with {pictures}.")
        link.unlink(missing_ok=True)
        link.symlink_to(pictures)
    found = len(pictures_in(folder / "images"))
    print(f"{folder / 'images'}: {found} pictures{'' if found == PICTURES else f'; the dataset has {PICTURES:,}'}")


def clone(checkout: Path) -> Path:
    """Fetch the dataset by git, 24 MB."""
    if checkout.exists():
        return checkout
    address = os.environ.get("SIGN_DIGITS", ADDRESS)
    checkout.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=checkout.parent) as folder:
        part = Path(folder, "part")
        command = ["git", "clone", "--quiet", "--depth", "1", address, str(part)]
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        try:
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        except FileNotFoundError:
            refuse(f"git is not installed: install it, or fetch {address} elsewhere and give its folder")
        except subprocess.CalledProcessError as error:
            refuse(
                f"{address} cannot be fetched ({' '.join(error.stderr.split())}): try again with a network, or fetch "
                "it elsewhere and run 'make photographs PHOTOGRAPHS=its folder'"
            )
        part.rename(checkout)
    return checkout


def split(folder: Path, fold: int) -> None:
    """Write FOLDER/fold_K."""
    images, boxes = folder / "images", folder / "boxes.csv"
    pictures = pictures_in(images)
    if not pictures or not boxes.is_file():
        refuse(f"{folder}: expected images and boxes.csv in it; run 'fetch' and find_boxes.py first")
    digits = [int(picture[0]) for picture in pictures]
    people = people_of(digits)
    parts = dict(zip(pictures, ("test" if person % FOLDS == fold else "train" for person in people), strict=True))
    try:
        with boxes.open(newline="", encoding="utf-8") as file:
            head, *rows = (row for row in csv.reader(file) if row)
    except ValueError:  # empty, or not UTF-8
        refuse(f"{boxes}: is no file of boxes. Move it elsewhere, and run find_boxes.py again.")
    rows = [row for row in rows if row[0] in parts]  # images that are none of the dataset have boxes too
    if missing := sorted(parts.keys() - {row[0] for row in rows}):
        refuse(
            f"{boxes}: has no row for {len(missing)} of {len(parts)} pictures, such as {missing[0]}. Run find_boxes.py "
            "again: it goes on where it was interrupted."
        )
    out = folder / f"fold_{fold}"
    out.mkdir(exist_ok=True)
    write(out / "labels.csv", [COLUMNS, *zip(pictures, digits, people, parts.values(), strict=True)])
    of_part = {part: [row for row in rows if parts[row[0]] == part] for part in ("train", "test")}
    write(out / "boxes.csv", [head, *of_part["train"]])
    write(out / "held_out.csv", [head, *of_part["test"]])
    hands = [row for row in of_part["train"] if row[1]]  # an image without a hand has a row without a box
    random.Random(fold).shuffle(hands)
    for count in (count for count in LABELLED if count <= len(hands)):
        write(out / f"labelled_{count}.csv", [head, *hands[:count]])
    held_out = {person for person in people if person % FOLDS == fold}
    print(f"{out}: {len(set(people))} people, {len(held_out)} of them held out")


def write(file: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write a CSV."""
    with file.open("w", newline="") as out:
        csv.writer(out).writerows(rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Prepare the photographs of the Sign Language Digits Dataset.")
    commands = parser.add_subparsers(required=True, dest="command")
    fetching = commands.add_parser("fetch", help="make FOLDER/images")
    fetching.add_argument("--from", dest="checkout", type=Path, help="a checkout of the dataset [git fetches one]")
    splitting = commands.add_parser("split", help="write labels and boxes with some people held out")
    splitting.add_argument("--fold", type=int, default=0, choices=range(FOLDS), help="which fifth of the people [0]")
    for command in (fetching, splitting):
        command.add_argument("folder", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    try:
        if args.command == "fetch":
            fetch(args.folder, args.checkout)
        else:
            split(args.folder, args.fold)
    except OSError as error:
        refuse(f"{error.filename or args.folder}: {error.strerror}. Make it usable, or name another folder.")


if __name__ == "__main__":
    main()
