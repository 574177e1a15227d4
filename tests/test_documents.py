"""What the pages name exists: keys of configurations with their values, files and links."""

import difflib
import pkgutil
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from peclr_dali.cli import main
from peclr_dali.errors import UserError
from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import flatten, load_config, to_dict, without_numbers
from peclr_dali.train.config.pretraining import Config

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "networks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
KINDS = (Config, FinetuneConfig)
TABLES = {table for kind in KINDS for table in to_dict(kind())}
DEFAULTS = [{without_numbers(key): value for key, value in flatten(to_dict(kind()))} for kind in KINDS]
KEYS = {key for defaults in DEFAULTS for key in defaults}
UNSET = {"optim.lr", "data.regressor", "data.annotations", "data.pairs", "data.bad_list",
         "pipelines.batch", "pipelines.threads", "train.threads"}  # fmt: skip
PLACEHOLDERS = {("key", "value"), ("data.source", "yours")}  # the reader puts something else there
FILES = (".py", ".jsonl", ".json", ".md", ".txt", ".toml")
SUFFIXES = {".pth", ".safetensors", ".venv", ".csv", ".jpeg", ".jpg", ".jpe", ".jfif", ".json", ".npy", ".npz", ".onnx",
            ".png", ".webp", ".py", ".jsonl", ".md", ".txt", ".toml"}  # fmt: skip
QUOTED = re.compile(r"`([^`\n]+)`")
SET = re.compile(r"--set[ =](?:'([^'\n]+)'|([^\s`|]+))")
KEY = re.compile(r"([a-z]*)\.(?:\d+\.)?([a-z_]+)(?:\s*=\s*(.+))?")


def named_keys(text: str) -> list[tuple[str, str | None]]:
    """Keys of a configuration in quotes, and their values, if they have any.

    `.name` is of the table of the key before it. A table whose name is near that of one is taken for it, misspelt.
    """
    found, table = [], ""
    for quoted in QUOTED.findall(text):
        match = KEY.fullmatch(quoted)
        if match is None or f".{match[2]}" in SUFFIXES:
            continue
        named = match[1] or table
        if named in TABLES or (named != "decoders" and difflib.get_close_matches(named, TABLES, cutoff=0.75)):
            found.append((f"{named}.{match[2]}", match[3]))
            table = named
    return found


def named_settings(text: str) -> list[tuple[str, str]]:
    """Keys and values after `--set`."""
    found = ((quoted or bare).partition("=") for quoted, bare in SET.findall(text))
    return [(key, value) for key, equals, value in found if equals and (key, value) not in PLACEHOLDERS]


@cache  # not when the file is imported, since every process collects all tests
def our_files() -> dict[str, str]:
    """Paths from the root, with the text of Python files; no hidden folder, no tests' text."""
    found = {}
    for kind in ("*.py", "*.jsonl", "*.md", "*.toml"):
        for file in ROOT.rglob(kind):
            path = file.relative_to(ROOT)
            if not path.parts[0].startswith(".") and path.parts[0] != "runs":
                is_code = kind == "*.py" and path.parts[0] != "tests"
                found[path.as_posix()] = file.read_text(encoding="utf-8") if is_code else ""
    return found


OTHERS = {"src/models/utils.py", "utils.py", "bad.0.jsonl", "bad.1.jsonl", "mine.jsonl", "pipelines/sources/yours.py",
          "tests/pipelines/sources/test_yours.py"}  # fmt: skip
"""The authors' files, and those that a reader names."""


def is_accepted(key: str, value: str) -> bool:
    for kind in KINDS:
        try:
            load_config(kind, [], [f"{key}={value}"])
        except UserError:
            continue
        return True
    return False


def wrong_keys(text: str) -> set[tuple[str, str | None]]:
    """Keys that no configuration has, and values that their key does not take."""
    named, settings = named_keys(text), named_settings(text)
    unknown = {(key, value) for key, value in named if key not in KEYS | UNSET}
    unknown |= {(key, value) for key, value in settings if re.sub(r"\.\d+", "", key) not in KEYS | UNSET}
    given = {
        (key, value)
        for key, value in (*named, *settings)
        if value is not None and ".1." not in key and value[:1] != "$"
    }
    return unknown | {(key, value) for key, value in given - unknown if not is_accepted(key, value)}


def test_every_key_exists_and_takes_the_value() -> None:
    found = {page.name: wrong_keys(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert wrong_keys("`data.bxo = 1`, `train.batch = 8`, --set colour.hue=x") == {
        ("data.bxo", "1"), ("colour.hue", "x")
    }  # fmt: skip


def test_fidelity_names_its_keys() -> None:
    assert len(named_keys((ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8"))) > 60
    assert named_keys("`colour.hue`, `.value_shfit`, `.csv`") == [("colour.hue", None), ("colour.value_shfit", None)]
    assert named_keys("`geometyr.fill`, `nvidia.dali`") == [("geometyr.fill", None)]
    assert named_settings("x --set 'a.b=[1, 2]' --set c.d=e`") == [("a.b", "[1, 2]"), ("c.d", "e")]
    assert named_keys('`data.bxo = 1` and `geometry.fill = "edge"`') == [("data.bxo", "1"), ("geometry.fill", '"edge"')]


PRETRAINING, FINETUNING = DEFAULTS
PRETRAINING |= {key: value for key, value in FINETUNING.items() if key.startswith("pose.")}


def wrong_defaults(page: str) -> tuple[int, list[str]]:
    """Number of defaults in the last columns "switch = default", and those that differ from the configuration's.

    A key without a value must have no default. Several sources and options of commands are no keys.
    """
    section, is_table, count, wrong = "", False, 0, []
    for line in page.splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if line.startswith("#"):
            section = line.lstrip("# ")
        if not cells or cells[-1].strip() == "switch = default":
            is_table = bool(cells)
            continue
        defaults = FINETUNING if section == "Fine-tuning" else PRETRAINING
        for key, value in named_keys(cells[-1]) if is_table else ():
            count += 1
            expected = defaults.get(key)
            if expected is None if value is None else tomllib.loads(f"value = {value}")["value"] == expected:
                continue
            wrong.append(f"{section}: {key} = {value}, but the default is {expected!r}")
    return count, wrong


def test_fidelity_gives_the_defaults() -> None:
    count, wrong = wrong_defaults((ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8"))
    assert wrong == []
    assert count > 80
    page = "## Optimiser\n| here | switch = default |\n|---|---|\n| | `optim.lr`, `colour.hue = [0.02, 1]`, `.jitter` |"
    assert len(wrong_defaults(page)[1]) == 2


def is_file(name: str) -> bool:
    """Whether a path, of which the beginning may be left out, is a file of ours, or a file's name that our code has."""
    written = "/" not in name and any(f'"{name}"' in text for text in our_files().values())
    return written or any(f"/{file}".endswith(f"/{name}") for file in our_files())


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_and_link_exists() -> None:
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        words = {word for quoted in QUOTED.findall(text) for word in quoted.split()}
        named = {word for word in words if re.fullmatch(r"[\w/.-]+\.(py|jsonl|md|toml)", word)}
        wrong += [f"{page.name}: {name}" for name in named - OTHERS if not is_file(name)]
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                wrong.append(f"{page.name}: {link}")
    assert wrong == []
    assert not is_file("train/nowhere.py")
    assert {"a-runs-folder", "installing"} < anchors(ROOT / "docs" / "commands.md")


def test_the_architecture_quotes_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    way = page[page.index("## The way of an image") : page.index("## Frames and units")]
    quoted = [line.strip() for line in way.splitlines() if line.startswith("    ") and line.strip() != "..."]
    files = [ROOT / f for f in ("pipelines/loader/loader.py", "train/trainer.py", "train/steps/exact.py")]
    code = {line.strip() for file in files for line in file.read_text().splitlines()}
    assert len(quoted) > 20
    assert [line for line in quoted if line not in code] == []


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_the_library_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, one after the other, as a reader would type them, on fewer hands; the first one learns."""
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert page.count("```") == 2 * len(blocks) > 8
    make_dataset(tmp_path / "photos", poses=16, seed=0, scenes=16, workers=1)
    monkeypatch.chdir(tmp_path)
    losses: list[float] = []
    names: dict[str, Any] = {"print": lambda *found: losses.append(found[-1])}
    exec(compile(blocks[0], "docs/library.md", "exec"), names)
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.2
    (readme,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks[1:]:
        exec(compile(block, "docs/library.md", "exec"), names)
    losses.clear()
    exec(compile(readme, "README.md", "exec"), {"print": names["print"]})
    assert len(losses) == 5


def commands_of(text: str) -> list[list[str]]:
    """The words after `cli.py` of each indented line of a page, with those of the lines that continue it."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    found = [re.search(r"^    .*cli\.py (.*)$", line) for line in lines]
    return [shlex.split(match[1], comments=True) for match in found if match is not None]


def test_every_command_is_accepted() -> None:
    found = [(page.name, words) for page in PAGES for words in commands_of(page.read_text(encoding="utf-8"))]
    assert len(found) > 40
    for page, (name, *words) in found:
        given = main.commands[name].make_context(name, words).params
        has_placeholder = re.search(r"yours|\$seed", str(given.get("overrides"))) is not None
        if "overrides" in given and name != "evaluate" and not has_placeholder:
            kind: Any = FinetuneConfig if name in ("finetune", "probe") else Config
            assert load_config(kind, given["files"], given["overrides"]), page
    with pytest.raises(click.UsageError):
        main.commands["pretrain"].make_context("pretrain", ["--otu", "runs"])


def test_every_module_that_is_named_exists() -> None:
    texts = {**our_files(), **{page.name: page.read_text(encoding="utf-8") for page in PAGES}}
    named = {
        name for text in texts.values() for name in QUOTED.findall(text) if re.fullmatch(r"peclr_dali[.\w]+", name)
    }
    assert len(named) > 3
    for name in named:
        pkgutil.resolve_name(name)
