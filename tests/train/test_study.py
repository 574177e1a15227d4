"""The augmentations of the paper's study, from the documented command to the loader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from peclr_dali.pipelines.views.augmentation import AppearanceConfig, Augmentation
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.config.tables import flatten, to_dict
from peclr_dali.train.data.preview import preview
from peclr_dali.train.pretrain import pretrain
from tests.train import tiny_run

SECTION = (tiny_run.ROOT / "docs" / "fidelity.md").read_text().split("**To repeat the study**")[1].split("\n## ")[0]
COMMAND, TABLE = SECTION.split("which augments nothing")
AUGMENTATIONS = dict(re.findall(r"^\| ([A-Za-z -]+) \| `--set '?([^'`]+)'?`", TABLE, flags=re.M))


def documented(*overrides: str) -> dict[str, Any]:
    files = [tiny_run.ROOT / name for name in re.findall(r"-c (\S+)", COMMAND)]
    base = re.findall(r"--set '?([^'\s]+)'?", COMMAND)
    return dict(flatten(to_dict(load_config(Config, files, [*base, *overrides]))))


def test_the_documented_study_has_its_ten_augmentations() -> None:
    assert len(AUGMENTATIONS) == 10
    base = documented()
    assert base["equivariance.variant"] == "none"
    assert base["geometry.rotation_deg"] == [0, 0]
    assert base["geometry.translation_frac"] == base["geometry.crop_probability"] == 0
    assert base["geometry.scale"] == [1, 1]
    assert base["colour.jitter"] == "none"
    assert not any(value for key, value in base.items() if key.endswith("_probability"))
    for name, override in AUGMENTATIONS.items():
        changed = {key for key, value in documented(override).items() if base[key] != value}
        assert changed == {override.split("=")[0]}, name


def test_the_views_command_shows_them(images: Path, tmp_path: Path) -> None:
    plain, dropped = tmp_path / "plain.png", tmp_path / "dropped.png"
    preview(tiny_run.config_of(images, tmp_path), plain, samples=4)
    preview(tiny_run.config_of(images, tmp_path, "appearance.colour_drop_probability=1"), dropped, samples=4)
    colourful, grey = (np.ptp(np.asarray(cv2.imread(str(path)), int), axis=-1) for path in (plain, dropped))
    assert colourful.max() > 50
    assert grey.max() <= 1  # enlarging rounds


def test_pretraining_asks_the_loader_for_them(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):  # noqa: N818  not an error
        pass

    def loader(_: object, __: object, ___: object, augmentation: Augmentation, **____: object) -> None:
        raise Asked(augmentation.appearance)

    monkeypatch.setattr("peclr_dali.train.trainer.Loader", loader)
    threads = torch.get_num_threads()
    with pytest.raises(Asked) as asked:
        pretrain(tiny_run.config_of(images, tmp_path / "run", "appearance.blur_probability=0.5"))
    torch.set_num_threads(threads)
    assert asked.value.args == (AppearanceConfig(blur_probability=0.5),)
