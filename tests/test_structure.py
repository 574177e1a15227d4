"""The import rules of the architecture, read from the source without running it."""

from __future__ import annotations

import ast
import functools
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
    "models": {"bounds", "errors", "parsing", "skeleton"},
    "pipelines": _OF_PIPELINES,
    "synthetic": {"bounds", "errors", "machine", "numba_cache", "skeleton", "writing"},
    "train": _OF_TRAIN,
    "bench": _OF_TRAIN | {"train"},
    "cli": {"", "bench", "errors", "train"},
    "__main__": {"cli", "machine", "train"},
    "__init__": {"errors", "models", "pipelines", "train"},
    "examples": {"", "models", "pipelines", "skeleton", "synthetic", "train"},
    "tools": set[str](),
}
"""What each part of the package may import of the others. Nobody may import `tests`, nor a part without its package."""

ORACLE_MAY_IMPORT = {"Draw", "AppearanceConfig", "ColourConfig", "GeometryConfig"}
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
    assert imported_by_oracle((ROOT / "tests" / "pipelines" / "reference.py").read_text(encoding="utf-8")) == set()
    assert imported_by_oracle("from peclr_dali.pipelines.views.draws import Draw, draw_view") == {
        "peclr_dali.pipelines.views.draws.draw_view"
    }
    assert imported_by_oracle("import peclr_dali.pipelines.views.plan") == {"peclr_dali.pipelines.views.plan"}


def module_of(file: Path) -> str:
    """The dotted name that a file is imported by."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str, file: Path) -> str:
    """The folder of a module; at the top of the package, where files are of every level, the module itself."""
    return ".".join(file.relative_to(PACKAGE).parent.parts) or module


def import_graph(files: Iterable[Path], *, rooms: bool) -> dict[str, set[str]]:
    """Which module imports which, or which room."""
    modules = {module_of(file): file for file in files}
    names = {module: room_of(module, file) if rooms else module for module, file in modules.items()}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        found = (name for _, name in imports(file.read_text(encoding="utf-8")))
        # `from a.b import c` may be the module a.b.c or something in a.b.
        known = {name if name in modules else name.rpartition(".")[0] for name in found} & modules.keys()
        graph.setdefault(names[module], set()).update({names[name] for name in known} - {names[module]})
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


FACADE = PACKAGE / "__init__.py"
"""Lends the public names of the folders below it to users. Nothing of the project imports them from it."""


@pytest.mark.parametrize("rooms", [True, False])
def test_there_are_no_import_circles(rooms: bool) -> None:
    assert circles(import_graph(set(MODULES) - {FACADE}, rooms=rooms)) == [], (
        "move what both need to a place of its own"
    )
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}) == ["b -> c -> d -> b"]


def test_every_file_is_under_the_rules() -> None:
    """Every room and every file at the top is known here; the links are those that the checkout needs."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    linked = {path.name for path in PACKAGE.iterdir() if path.is_symlink()}
    assert tops - {"tests", "examples", "tools", PACKAGE.name} == linked & set(ROOMS)
    assert {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))} == set(ROOMS)
    assert {path.stem for path in PACKAGE.glob("*.py")} | {*ROOMS, "examples", "tools"} == set(MAY_IMPORT)
    assert [path.name for path in ROOT.glob("*.py")] == ["cli.py"]
