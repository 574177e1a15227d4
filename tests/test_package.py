"""What `pip install` gives: one package under one name, with all that it needs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import peclr_dali
from peclr_dali.parsing import PACKAGE, or_shipped
from tests.train.tiny_run import write_images

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        commands = archive.read(f"peclr_dali-{peclr_dali.__version__}.dist-info/entry_points.txt").decode()
    here = [file for top in PACKAGE.iterdir() for file in (top, *top.rglob("*")) if file.is_file()]
    expected = {f"peclr_dali/{file.relative_to(PACKAGE)}" for file in here}
    expected = {name for name in expected if not re.search("bench/results/|__pycache__", name)}
    assert {"peclr_dali/py.typed", "peclr_dali/train/report/page.html"} < expected
    info = f"peclr_dali-{peclr_dali.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == expected
    assert "peclr-dali = peclr_dali.__main__:run" in commands


def test_the_version_is_said_once_and_cited_alike() -> None:
    assert f"\nversion: {peclr_dali.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"\n## {peclr_dali.__version__} \(20\d\d-\d\d-\d\d\)\n", (ROOT / "CHANGELOG.md").read_text())


def test_public_names_exist_and_no_others() -> None:
    assert all(getattr(peclr_dali, name) is not None for name in peclr_dali.__all__)
    assert {*peclr_dali.__all__} <= {*dir(peclr_dali)}
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: peclr_dali\.(\w+)$", page, re.MULTILINE)) == sorted(peclr_dali.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        _ = peclr_dali.Loader


def test_the_site_describes_every_public_name_and_fetches_nothing(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True)
    assert 'href="commands/">commands and install</a>' in (tmp_path / "index.html").read_text(encoding="utf-8")
    page = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert [name for name in peclr_dali.__all__ if f'id="peclr_dali.{name}"' not in page] == []
    assert 'id="peclr_dali.ExactStep.__call__"' in page
    fetched = re.compile(r"""<(?:script|img|iframe)[^>]+src=.https?:|<link[^>]+href=.https?:""")
    assert [file for file in tmp_path.rglob("*.html") if fetched.search(file.read_text(encoding="utf-8"))] == []


def test_the_public_names_need_no_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {re.split(r"[>=\[]", line)[0] for lines in project["optional-dependencies"].values() for line in lines}
    modules = {"scikit-learn": "sklearn"}
    blocked = [modules.get(name, name.replace("-", "_")) for name in extras - {"peclr-dali"}]
    assert {"matplotlib", "tensorboard", "jinja2", "torchvision"} <= {*blocked}
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from peclr_dali import *"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_names_of_shipped_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("peclr_rn50", "peclr_rn50.toml", "configs/peclr_rn50.toml"):
        assert or_shipped(Path(name), ".toml") == PACKAGE / "configs" / "peclr_rn50.toml"
    assert or_shipped(Path("cards/a100"), ".toml").is_file()
    assert or_shipped(Path("peclr_rn18"), ".safetensors") == PACKAGE / "networks" / "peclr_rn18.safetensors"
    for path in ("peclr_rn5", "../configs/peclr_rn50", "/peclr_rn50", "", "x" * 5000, "a\0b"):
        assert or_shipped(Path(path), ".toml") == Path(path)
    (tmp_path / "peclr_rn50").touch()
    assert or_shipped(Path("peclr_rn50"), ".toml") == Path("peclr_rn50"), "the user's own file comes first"


def test_no_printed_command_needs_the_checkout(tmp_path: Path) -> None:
    printed = subprocess.check_output(
        [sys.executable, "-m", "peclr_dali", "pretrain", "--help"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
    )  # fmt: skip
    assert re.search(r"torchrun --standalone --nproc-per-node=\d+ -m peclr_dali pretrain", printed)
    assert "python -m peclr_dali " in printed
    assert "cli.py" not in printed


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with modules of his own, and an environment with an older torch and the wheel, no extra."""
    folder = tmp_path_factory.mktemp("project")
    environment = folder / ".venv"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    install(folder, OLDER_TORCH)
    install(folder, str(wheel))
    (folder / "models").mkdir()
    for name in ("models/__init__.py", "train.py", "tools.py"):
        (folder / name).write_text("raise RuntimeError('imported')\n")
    write_images(folder / "photos", 64)
    yield folder
    shutil.rmtree(environment)


OLDER_TORCH = "torch==2.10.*"


def install(project: Path, *what: str) -> None:
    subprocess.run([UV, "pip", "install", "--quiet", "--python", project / ".venv/bin/python", *what], check=True)
    assert [*(project / ".venv").glob("lib/python*/site-packages/torch-2.10.*.dist-info")]


def run_in(project: Path, *command: str, code: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "VIRTUAL_ENV": str(project / ".venv")}
    line = [str(project / ".venv" / "bin" / command[0]), *command[1:]]
    done = subprocess.run(line, cwd=project, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_pages_blocks_run_beside_an_older_torch_and_are_typed(project: Path) -> None:
    for page in ("docs/library.md", "README.md"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
        (project / "page.py").write_text(
            "\n".join(block for block in blocks if not re.search("lightning|nn.parallel", block))
        )
        run_in(project, "python", "page.py")
        subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--python-executable", project / ".venv/bin/python", "page.py"],
            cwd=project, check=True,
        )  # fmt: skip
    tops = {path.name for path in (project / ".venv/lib").glob("python*/site-packages/*")}
    assert {name for name in tops if "peclr" in name} == {
        "peclr_dali",
        f"peclr_dali-{peclr_dali.__version__}.dist-info",
    }
    assert not tops & {"matplotlib", "tensorboard", "torchvision"}  # torch itself needs jinja2
    assert "pip install '.[all]'" in run_in(project, "peclr-dali", "make-data", "hands", code=2)


@pytest.mark.slow
def test_the_commands_run_where_models_and_train_are_the_users_own(wheel: Path, project: Path) -> None:
    install(project, f"peclr-dali[train] @ file://{wheel}", OLDER_TORCH)
    photos = ("--set", "data.source=folder", "--set", "data.root=photos", "--set", "data.box=center")
    run_in(project, "peclr-dali", "make-data", "hands", "--poses", "2")
    run_in(project, "peclr-dali", "views", *photos, "views.png")
    small = ("train.batch=8", "train.micro_batch=8", "train.epochs=1", "run.out=run")
    settings = [word for setting in small for word in ("--set", setting)]
    assert "what the network saw" in run_in(project, "peclr-dali", "pretrain", "-c", "photographs", *photos, *settings)
    image = next((project / "photos").iterdir())
    run_in(project, "peclr-dali", "predict", "hand_photos_rn18", str(image), "--box", "0,0,60,60")
    assert (project / "predictions" / f"0000_{image.stem}.jpg").stat().st_size > 0
    assert "peclr-dali pretrain" in run_in(project, "peclr-dali", "pretrain", "--help")
