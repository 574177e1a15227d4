"""The import rules of the architecture, read from the source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "experiments", "machine", "models", "pipelines", "train")
FILES = [
    ROOT / "cli.py",
    ROOT / "errors.py",
    ROOT / "bounds.py",
    ROOT / "parsing.py",
    ROOT / "writing.py",
    *(file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))),
]

MAY_IMPORT = {
    "errors": set[str](),
    "bounds": set[str](),
    "parsing": {"errors"},
    "writing": {"errors"},
    "machine": {"errors"},
    "models": {"bounds", "errors"},
    "pipelines": {"bounds", "errors", "machine", "parsing", "writing"},
    "bench": {"bounds", "errors", "machine", "models", "parsing", "pipelines", "train", "writing"},
    "experiments": {"bench", "bounds", "errors", "machine", "models", "parsing", "pipelines", "train", "writing"},
    "train": {"bounds", "errors", "machine", "models", "parsing", "pipelines", "writing"},
    "cli": {"bench", "errors", "experiments", "machine", "train", "pipelines", "models"},
}
"""Of the project's own top-level packages, besides itself."""

CONFINED = {"nvidia.dali": {"pipelines", "bench"}, "torch.distributed": {"train"}}
"""Libraries that only some packages may import."""


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that is imported, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Imports and attributes: `import torch` gives torch.distributed as well."""
    yield from imports(source)
    yield from (
        (node.lineno, ast.unparse(node)) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    )


def violations(owner: str, source: str) -> list[str]:
    """What a file of the package `owner` imports against the rules."""
    found = []
    for line, name in imports(source):
        top = name.split(".")[0]
        if top in MAY_IMPORT and top != owner and top not in MAY_IMPORT[owner]:
            found.append(f"line {line}: {owner} imports {name}")
    for line, name in uses(source):
        for library, owners in CONFINED.items():
            if f"{name}.".startswith(f"{library}.") and owner not in owners:
                found.append(f"line {line}: {owner} uses {name}; only {' and '.join(sorted(owners))} may")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file: Path) -> None:
    owner = file.relative_to(ROOT).parts[0].removesuffix(".py")
    assert violations(owner, file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("owner", "source"),
    [
        ("pipelines", "from models.losses import nt_xent"),
        ("pipelines", "import train.config"),
        ("models", "from pipelines.batch import View"),
        ("models", "def f():\n    from nvidia.dali import fn"),
        ("train", "from nvidia import dali"),
        ("train", "import bench.loaders.peers"),
        ("bench", "from experiments.config import load_experiment"),
        ("models", "import torch.distributed as dist"),
        ("pipelines", "import torch\ntorch.distributed.barrier()"),
        ("cli", "from torch.distributed import barrier"),
        ("errors", "from pipelines.index import Index"),
    ],
)
def test_a_violation_is_seen(owner: str, source: str) -> None:
    assert len(violations(owner, source)) > 0


def test_no_file_escapes_the_rules() -> None:
    """Every package at the top is known here."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert tops - {"tests"} == set(PACKAGES)
