"""What the pages name exists: keys of configurations with their values, files and links."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from errors import UserError
from models.losses import LOSSES
from train.config.finetuning import FinetuneConfig
from train.config.load import load_config
from train.config.pretraining import Config
from train.config.tables import flatten, to_dict

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KINDS = (Config, FinetuneConfig)
TABLES = {table for kind in KINDS for table in to_dict(kind())}
KEYS = {key for kind in KINDS for key, _ in flatten(to_dict(kind()))}
KEYS |= {f"loss.{field.name}" for loss in LOSSES.values() for field in dataclasses.fields(cast(Any, loss))}
UNSET = {"optim.lr", "data.regressor", "data.annotations", "data.bad_list", "data.shuffle_shards", "pipelines.batch",
         "pipelines.threads", "train.threads"}  # fmt: skip
FILES = (".py", ".jsonl", ".json", ".md", ".txt", ".toml")
QUOTED = re.compile(r"`([^`\n]+)`")
KEY = re.compile(r"([a-z]+)\.(?:\d+\.)?([a-z_]+)(?:\s*=\s*(.+))?")


def named_keys(text: str) -> list[tuple[str, str | None]]:
    """Keys of a configuration in quotes, and their values, if they have any."""
    found = (KEY.fullmatch(quoted) for quoted in QUOTED.findall(text))
    return [(f"{match[1]}.{match[2]}", match[3]) for match in found if match and match[1] in TABLES]


def is_accepted(key: str, value: str) -> bool:
    for kind in KINDS:
        try:
            load_config(kind, [], [f"{key}={value}"])
        except UserError:
            continue
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_exists_and_takes_the_value(page: Path) -> None:
    named = named_keys(page.read_text(encoding="utf-8"))
    unknown = {key for key, _ in named if key not in KEYS | UNSET and Path(key).suffix not in FILES}
    assert unknown == set()
    refused = {(key, value) for key, value in named if value is not None and not is_accepted(key, value)}
    assert refused == set()


def test_fidelity_names_its_keys() -> None:
    assert len(named_keys((ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8"))) > 60
    assert named_keys('`data.bxo = 1` and `geometry.fill = "edge"`') == [("data.bxo", "1"), ("geometry.fill", '"edge"')]
    assert not is_accepted("data.bxo", "1")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_link_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    ours = {file.name for file in ROOT.rglob("*.py") if ".venv" not in file.parts}
    files = {Path(quoted).name for quoted in QUOTED.findall(text) if re.fullmatch(r"[\w/]+\.py", quoted)}
    if page.name in ("fidelity.md", "datasets.md"):  # the authors' files, and one that the reader is to write
        files = {name for name in files if name not in ("utils.py", "yours.py", "test_yours.py")}
    assert files - ours == set()
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_library_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, one after the other, as a reader would type them."""
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert page.count("```") == 2 * len(blocks) > 8
    (tmp_path / "photos").mkdir()
    rng = np.random.default_rng(0)
    for number in range(20):
        pixels = rng.integers(0, 256, (50, 70, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.jpg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/library.md", "exec"), names)


def is_module(name: str) -> bool:
    """Whether a dotted name begins with a module of ours; what stands in it is not looked at."""
    first, *rest = name.split(".")
    folder = ROOT / first
    while rest and (folder / rest[0]).is_dir():
        folder /= rest.pop(0)
    return not rest or (folder / f"{rest[0]}.py").exists() or rest[0][0].isupper()


def test_every_module_that_is_named_exists() -> None:
    packages = [folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists()]
    dotted = re.compile(rf"(?:{'|'.join(packages)})(?:\.\w+)+")
    texts = [*PAGES, *(file for package in packages for file in (ROOT / package).rglob("*.py"))]
    wrong = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in texts
        for name in QUOTED.findall(file.read_text(encoding="utf-8"))
        if dotted.fullmatch(name)
        and name not in KEYS | UNSET
        and Path(name).suffix not in FILES
        and not is_module(name)
    }
    assert wrong == set()
    assert not is_module("pipelines.index.Index")
