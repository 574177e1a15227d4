"""Splits the photographs of the Sign Language Digits Dataset by person, for `make photographs`.

    python tools/sign_digits.py FOLDER [--fold K]

FOLDER has images/DIGIT/IMG_NUMBER.JPG, of people who each show the digits 0 to 9, and boxes.csv of tools/find_boxes.py.
A fifth of the people is held out: part "test". FOLDER/fold_K gets labels.csv (file,label,person,part) and the rows of
FOLDER/boxes.csv in two parts: boxes.csv of "train", for pre-training, and held_out.csv of "test".

The dataset does not say who is who. By number, a person's pictures nearly always follow each other with ascending
digits. Where some are missing, two people may count as one, so nobody is on both sides of the split.
"""

import csv
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import click

FOLDS = 5


def people_of(digits: list[int]) -> list[int]:
    """The number of the person in each picture, given the digits they show: a 0 after an 8 or 9 begins a person."""
    return [*accumulate(int(digit == 0 and last >= 8) for last, digit in pairwise([0, *digits]))]


@click.command()
@click.argument("folder", type=Path)
@click.option("--fold", type=click.IntRange(0, FOLDS - 1), default=0, help="Which fifth of the people is held out.")
def main(folder: Path, fold: int) -> None:
    """Split the photographs in FOLDER."""
    pictures = sorted((folder / "images").glob("[0-9]/IMG_*"), key=lambda file: int(file.stem[4:]))
    names = [f"{picture.parent.name}/{picture.name}" for picture in pictures]
    digits = [int(name[0]) for name in names]
    people = people_of(digits)
    part_of = {name: "test" if person % FOLDS == fold else "train" for name, person in zip(names, people, strict=True)}
    with (folder / "boxes.csv").open(newline="", encoding="utf-8") as file:
        head, *boxes = csv.reader(file)
    files: dict[str, list[Any]] = {
        "labels.csv": [("file", "label", "person", "part"), *zip(names, digits, people, part_of.values(), strict=True)],
        "boxes.csv": [head, *(box for box in boxes if part_of.get(box[0]) == "train")],
        "held_out.csv": [head, *(box for box in boxes if part_of.get(box[0]) == "test")],
    }
    out = folder / f"fold_{fold}"
    out.mkdir(exist_ok=True)
    for name, rows in files.items():
        with (out / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
