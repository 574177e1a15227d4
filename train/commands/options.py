"""What several commands share: options, and the configuration that they give."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bounds import LARGEST_COUNT, LARGEST_SEED
from errors import ToldByAnother, UserError
from errors.terminal import printable
from train.config.shell import is_left_to_shell

if TYPE_CHECKING:
    from train.config.pretraining import Config

F = TypeVar("F", bound=Callable[..., Any])


class IntegerRange(click.IntRange):
    """An integer within bounds; click's own type calls it an "integer range"."""

    name = "integer"


class FiniteRange(click.FloatRange):
    """A number within bounds; click's own type takes nan."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number that the text stands for."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class PathOfUser(click.Path):
    """A path as the user gave it, without what a shell should have replaced.

    An empty one would be the working directory, and is a variable that is not set.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path that the text stands for."""
        if not os.fspath(value).strip():
            self.fail("the path is empty; is a variable not set?", param, ctx)
        if is_left_to_shell(os.fsdecode(value)):
            self.fail(f"{os.fsdecode(value)}: ~ and $NAME are not replaced here; write the path out.", param, ctx)
        return super().convert(value, param, ctx)


COUNT = IntegerRange(1, LARGEST_COUNT)
SEED = IntegerRange(0, LARGEST_SEED)
WORKERS = IntegerRange(1, 1024)
PATH = PathOfUser(path_type=Path)
FILE = PathOfUser(path_type=Path, dir_okay=False)
FOLDER = PathOfUser(path_type=Path, file_okay=False)


def config_options(command: F) -> F:
    """`-c` and `--set`, as every command with a configuration takes them."""
    later = "Configuration; repeatable, later files win. Without it: the paper's values."
    files = click.option("-c", "--config", "files", multiple=True, type=PATH, metavar="FILE.toml", help=later)
    change = "Change one key, such as optim.lr=3e-4; repeatable."
    return files(click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=change)(command))


def run_options(command: F) -> F:
    """`--out`, `--resume` and `--print-config`, as every command that trains takes them."""
    out = click.option("--out", metavar="FOLDER", help="The run's folder; short for --set run.out=FOLDER.")
    newest = "auto: go on from the newest checkpoint in the run's folder, if there is one."
    choice = click.Choice(["never", "auto"])
    resume = click.option("--resume", type=choice, default="never", show_default=True, help=newest)
    printing = click.option("--print-config", is_flag=True, help="Print the resolved configuration as TOML and leave.")
    return out(resume(printing(command)))


@contextmanager
def same_on_this_host() -> Iterator[None]:
    """For what all ranks of a host find alike, such as a mistake in the configuration: the first of them reports it."""
    try:
        yield
    except UserError as error:
        if not is_first_on_host():
            raise ToldByAnother(str(error)) from error
        raise


def pretraining_config(files: Sequence[Path], overrides: Sequence[str]) -> Config:
    """What `config_options` gave, as a configuration of pre-training."""
    from train.config.load import load_config
    from train.config.pretraining import Config

    with same_on_this_host():
        return load_config(Config, files, overrides)


def is_main_rank() -> bool:
    """Whether this process speaks for all that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


def is_first_on_host() -> bool:
    """Whether this process speaks for those that `torchrun` started on this host."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def is_one_host() -> bool:
    """Whether all processes that `torchrun` started run on this host."""
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def say(line: str, *, err: bool = False) -> None:
    """Print a line, which may hold names of files: what would change the terminal or begin another line is escaped."""
    click.echo(printable(line), err=err)
