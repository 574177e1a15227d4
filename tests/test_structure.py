"""The import rules of the architecture, read from the source without running it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "peclr_dali"
ROOMS = ("bench", "models", "pipelines", "synthetic", "train")
"""Folders of the package; four of them are links to folders of the checkout."""

MODULES = [*sorted(PACKAGE.glob("*.py")), *(file for room in ROOMS for file in sorted((PACKAGE / room).rglob("*.py")))]
PROGRAMS = [ROOT / "cli.py", *(file for name in ("examples", "tools") for file in sorted((ROOT / name).rglob("*.py")))]

_OF_PIPELINES = {"bounds", "errors", "machine", "numba_cache", "parsing", "ranks", "skeleton", "writing"}
_OF_TRAIN = _OF_PIPELINES | {"models", "pipelines", "synthetic"}
MAY_IMPORT = {
    "errors": set[str](),
    "bounds": set[str](),
    "parsing": set(),
    "writing": {"errors", "parsing"},
    "machine": set(),
    "numba_cache": set(),
    "ranks": {"errors"},
    "skeleton": set(),
    "models": {"bounds", "errors", "skeleton"},
    "pipelines": _OF_PIPELINES,
    "synthetic": {"bounds", "errors", "machine", "numba_cache", "skeleton", "writing"},
    "train": _OF_TRAIN,
    "bench": _OF_TRAIN | {"train"},
    "cli": {"", "bench", "errors", "train"},
    "__main__": {"cli", "machine", "train"},
    "__init__": {"errors", "models", "pipelines", "train"},
    "examples": {"", "models", "pipelines", "skeleton", "train"},
    "tools": set[str](),
}
"""What each part of the package may import of the others. Nobody may import `tests`, nor a part without its package."""

ORACLE_MAY_IMPORT = {"Column", "Draw", "AppearanceConfig", "ColourConfig", "GeometryConfig"}
"""From the product, what describes the oracle's input: the names of the table's columns, and the configuration."""

CONFINED = {"nvidia.dali": {"pipelines", "bench"}, "torch.distributed": {"train"}}
"""Libraries that only some packages may import."""


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """All nodes of a file; many tests look at the same files."""
    return list(ast.walk(ast.parse(source)))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that is imported, in functions and under TYPE_CHECKING too."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Imports and attributes: `import torch` gives torch.distributed as well."""
    yield from imports(source)
    yield from ((node.lineno, ast.unparse(node)) for node in nodes_of(source) if isinstance(node, ast.Attribute))


def violations(owner: str, source: str) -> list[str]:
    """What a file of the package `owner` imports against the rules."""
    found = []
    for line, name in imports(source):
        top, _, rest = name.partition(".")
        part = rest.split(".")[0]
        if top == "peclr_dali":
            part = part if part in MAY_IMPORT else ""  # "" is a public name, as in `from peclr_dali import Batch`
            is_wrong = part != owner and part not in MAY_IMPORT[owner]
        else:
            is_wrong = top in {*MAY_IMPORT, "tests"} - ({owner} & {"examples", "tools"})
        if is_wrong:
            found.append(f"line {line}: {owner} imports {name}")
    for line, name in uses(source):
        for library, owners in CONFINED.items():
            if f"{name}.".startswith(f"{library}.") and owner not in owners:
                found.append(f"line {line}: {owner} uses {name}; only {' and '.join(sorted(owners))} may")
    return found


def test_imports_run_one_way() -> None:
    owners = {file: file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in MODULES}
    owners |= {file: file.relative_to(ROOT).parts[0].removesuffix(".py") for file in PROGRAMS[1:]}
    found = [
        f"{file.relative_to(ROOT)}, {violation}"
        for file, owner in owners.items()
        for violation in violations(owner, file.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert violations("pipelines", "def f():\n    from peclr_dali.models.nt_xent import NTXent") != []
    assert violations("pipelines", "import torch\ntorch.distributed.barrier()") != []
    assert violations("bench", "import tests.pipelines.harness") != []


def test_tests_import_no_module_by_a_second_name() -> None:
    sources = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests").rglob("*.py"))}
    found = [(file.name, name) for file, source in sources.items() for _, name in imports(source)]
    assert [(file, name) for file, name in found if name.split(".")[0] in ROOMS] == []


def imported_by_oracle(source: str) -> set[str]:
    """What a file imports from the product besides the description of the oracle's input."""
    names = {name for _, name in imports(source) if name.split(".")[0] == PACKAGE.name}
    return {name for name in names if name.rpartition(".")[2] not in ORACLE_MAY_IMPORT}


def test_the_oracle_imports_nothing_that_it_checks() -> None:
    source = (ROOT / "tests" / "pipelines" / "reference.py").read_text(encoding="utf-8")
    assert imported_by_oracle(source) == set()
    assert imported_by_oracle("from peclr_dali.pipelines.views.draws import Draw, draw_view") == {
        "peclr_dali.pipelines.views.draws.draw_view"
    }
    assert imported_by_oracle("import peclr_dali.pipelines.views.plan") == {"peclr_dali.pipelines.views.plan"}


def module_of(file: Path) -> str:
    """The dotted name that a file is imported by."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(files: Iterable[Path], levels: int | None = None) -> dict[str, set[str]]:
    """Which file imports which; with `levels`, which room, a room being what shares so many leading names."""
    modules = {module_of(file): file for file in files}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        found = (name for _, name in imports(file.read_text(encoding="utf-8")))
        # `from a.b import c` may be the module a.b.c or something in a.b.
        known = {name if name in modules else name.rpartition(".")[0] for name in found} & modules.keys()
        rooms = {".".join(name.split(".")[:levels]) for name in known}
        room = ".".join(module.split(".")[:levels])
        graph.setdefault(room, set()).update(rooms - {room})
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Shortest ways back from each node that is in a circle, as "a -> b -> a"; one for each set of nodes."""
    found: dict[frozenset[str], str] = {}
    for start in sorted(graph):
        ways = [[start]]
        seen: set[str] = set()
        for way in ways:  # grows
            if start in graph[way[-1]]:
                found.setdefault(frozenset(way), " -> ".join([*way, start]))
                break
            following = sorted(graph[way[-1]] - seen)
            seen.update(following)
            ways += [[*way, one] for one in following]
    return list(found.values())


@pytest.mark.parametrize("levels", [2, 3, None], ids=["packages", "rooms", "files"])
def test_there_are_no_import_circles(levels: int | None) -> None:
    assert circles(import_graph(MODULES, levels)) == [], "move what both need to a place of its own"
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}) == ["b -> c -> d -> b"]


def folders_with_circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Folders that import a folder above them, and whose parts are imported by it; `graph` is of `folder_graph`."""
    return sorted(
        inner
        for inner, found in graph.items()
        for outer in found
        if inner.startswith(f"{outer}.") and inner in graph[outer]
    )


def folder_graph(files: Iterable[Path]) -> dict[str, set[str]]:
    """Which folder's own files import which folder's own files, by dotted names; the package's top is ""."""
    modules = {module_of(file): file for file in files}
    folders = {name: ".".join(file.relative_to(PACKAGE).parent.parts) for name, file in modules.items()}
    graph: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for module, found in import_graph(modules.values()).items():
        graph[folders[module]] |= {folders[name] for name in found}
    return graph


FACADE = PACKAGE / "__init__.py"
"""Lends the public names of the folders below it to users. Nothing of the project imports them from it."""


def test_no_folder_imports_the_folder_that_holds_it_and_is_imported_by_it() -> None:
    assert folders_with_circles(folder_graph(set(MODULES) - {FACADE})) == []
    assert folders_with_circles({"a": {"a.b", "a.c"}, "a.b": {"a"}, "a.c": {"a.b"}}) == ["a.b"]


def test_no_folder_holds_more_than_a_dozen_files() -> None:
    """Caches, hidden folders and rows of measurements do not count, nor does the top, where users' files may lie."""
    tops = (path for path in ROOT.iterdir() if path.is_dir() and path.name not in {"tests", "runs", "demo", "site"})
    folders = (folder for top in tops for folder in (top, *top.rglob("*")) if folder.is_dir())
    names = {folder: folder.relative_to(ROOT).as_posix() for folder in folders}
    counts = {
        name: sum(file.is_file() for file in folder.iterdir())
        for folder, name in names.items()
        if not re.search(r"(^|/)(\.|__pycache__)|^bench/results$", name)
    }
    assert counts["pipelines/sources"] > 8
    assert {name: count for name, count in counts.items() if count > 12} == {}


def test_every_file_is_under_the_rules() -> None:
    """Every room and every file at the top is known here; the links are those that the checkout needs."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    linked = {path.name for path in PACKAGE.iterdir() if path.is_symlink()}
    assert tops - {"tests", "examples", "tools", PACKAGE.name} == linked & set(ROOMS)
    assert {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))} == set(ROOMS)
    assert {path.stem for path in PACKAGE.glob("*.py")} | {*ROOMS, "examples", "tools"} == set(MAY_IMPORT)
    assert [path.name for path in ROOT.glob("*.py")] == ["cli.py"]
