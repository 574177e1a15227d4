"""Options that several commands share, and the configuration made from them."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from peclr_dali.bounds import LARGEST_COUNT, LARGEST_SEED
from peclr_dali.errors import printable
from peclr_dali.machine import available_cores
from peclr_dali.parsing import is_left_to_shell

if TYPE_CHECKING:
    from peclr_dali.train.config.pretraining import Config

CALL = {"peclr-dali": "peclr-dali", "__main__.py": "python -m peclr_dali"}.get(Path(sys.argv[0]).name, "python cli.py")
"""How this program was called."""

F = TypeVar("F", bound=Callable[..., Any])


class PathOfUser(click.Path):
    """A path as the user gave it. Refused are an empty one, and ~ or $NAME."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, if it is usable."""
        text = os.fsdecode(value)
        if not text.strip() or is_left_to_shell(text):
            self.fail(f"{text!r}: ~ and $NAME are not replaced here, and no path is empty; write it out.", param, ctx)
        return super().convert(value, param, ctx)


class Number(click.FloatRange):
    """A number within bounds. Click lets NaN pass, which no bound excludes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        return self.fail(f"{value} is no number.", param, ctx) if number != number else number


COUNT = click.IntRange(1, LARGEST_COUNT)
SEED = click.IntRange(0, LARGEST_SEED)
PATH = PathOfUser(path_type=Path)
FILE = PathOfUser(path_type=Path, dir_okay=False)


def config_options(command: F) -> F:
    """Add `-c` and `--set`."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change one key, such as optim.lr=3e-4; repeatable.",
    )(command)
    return click.option(
        "-c",
        "--config",
        "files",
        multiple=True,
        type=PATH,
        metavar="FILE.toml",
        help="Configuration file; repeatable, later files override earlier ones.  [default: the paper's values]",
    )(command)


def run_options(command: F) -> F:
    """Add `--out`, `--resume` and `--print-config`."""
    command = click.option("--print-config", is_flag=True, help="Print the complete configuration as TOML and exit.")(
        command
    )
    command = click.option(
        "--resume",
        type=click.Choice(["never", "auto"]),
        default="never",
        show_default=True,
        help="auto: continue from the newest checkpoint in the run's folder, if there is one.",
    )(command)
    return click.option("--out", metavar="FOLDER", help="The run's folder; short for --set run.out=FOLDER.")(command)


def workers_option(text: str) -> Callable[[F], F]:
    """Add `--workers`."""
    return click.option(
        "--workers", default=available_cores, show_default="one per core", type=click.IntRange(1, 1024), help=text
    )


force_option = click.option("--force", is_flag=True, help="Replace files that are there already.")


def pretraining_config(files: Sequence[Path], overrides: Sequence[str]) -> "Config":
    """The pre-training configuration from the values of `config_options`."""
    from peclr_dali.train.config.load import load_config
    from peclr_dali.train.config.pretraining import Config

    return load_config(Config, files, overrides)


def is_main_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def as_called(text: str) -> str:
    """Help or a message, which are written for the checkout, with the command as it was called; torchrun's too."""
    text = text.replace("python cli.py", CALL)
    return text if CALL == "python cli.py" else text.replace(" cli.py ", " -m peclr_dali ")


def say(line: str, *, err: bool = False) -> None:
    """Print a line as `as_called`. Control characters and newlines, as file names may contain them, are escaped."""
    click.echo(printable(as_called(line)), err=err)
