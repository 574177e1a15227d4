"""The commands, and what becomes of their errors.

Each command is defined beside the code that it calls, and imports that code only when it runs, so that `--help` is
fast.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from peclr_dali import __version__
from peclr_dali.bench.loaders import command as loaders
from peclr_dali.bench.training import command as steps
from peclr_dali.errors import ReportedByAnotherRank, UserError
from peclr_dali.errors.refused import is_transient, machine_error_line
from peclr_dali.errors.terminal import OneLine
from peclr_dali.machine.compiled import choose_cache_folder
from peclr_dali.machine.freed_memory import keep_freed_memory
from peclr_dali.machine.workers import Terminated
from peclr_dali.train.commands import data, networks, training
from peclr_dali.train.commands.options import CALL, as_called, is_first_on_host, is_main_rank, say
from peclr_dali.train.distributed.interrupt import Interrupted, stop_with_torchrun

_REPORT_S = 5.0
"""Seconds in which a rank prints its error, while the others wait to end."""


class OneLineErrors(click.Group):
    """Turns errors into one line and exit code 2. An interrupted run prints where it stopped."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that the arguments name."""
        if (mark := _bad_input_mark()) is not None and mark.exists():
            sys.exit(2)  # torchrun tries again what a restart cannot help
        stop_with_torchrun()
        choose_cache_folder()
        keep_freed_memory()
        # Torch's C++ code writes a page of stack frames for each attempt to connect to the other ranks.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        if logging.lastResort is not None:  # this handler prints the warnings of commands that configure no log
            logging.lastResort.setFormatter(OneLine("%(message)s"))
        if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not be UTF-8
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            _check_environment()
            super().main(
                *args,
                **{"prog_name": CALL.replace("python cli.py", "cli.py"), **kwargs, "standalone_mode": False},
            )
        except ReportedByAnotherRank as error:
            _leave_in_silence(restart=is_transient(error))
        except UserError as error:
            _fail(str(error), restart=is_transient(error))
        except Interrupted as stop:
            if is_main_rank():
                say(str(stop), err=True)
            _leave(stop.exit_code)
        except Terminated:
            say("stopped by SIGTERM", err=True)
            raise
        except click.exceptions.NoArgsIsHelpError as request:
            click.echo(request.format_message())
        except click.UsageError as error:
            words = error.ctx.command_path.split()[1:] if error.ctx is not None else []
            see = f"See '{' '.join([CALL, *words, '--help'])}'."
            _fail(f"{error.format_message()}{_hint(error)} {see}", on_every_rank=True)
        except click.ClickException as error:
            _fail(error.format_message(), on_every_rank=True)
        except (click.Abort, KeyboardInterrupt):
            click.echo("aborted", err=True)
            _leave(130)
        except Exception as error:
            message = machine_error_line(error)
            if message is None:  # a bug of ours
                if not _ranks_are_joined():
                    raise
                traceback.print_exc()
                _leave(1)
            _fail(message, restart=is_transient(error))
        sys.exit(0)


def _fail(message: str, *, on_every_rank: bool = False, restart: bool = False) -> None:
    if on_every_rank and not is_first_on_host():
        _leave_in_silence()
    prefix = "error" if is_main_rank() else f"rank {os.environ['RANK']} on {platform.node()}: error"
    say(f"{prefix}: {' '.join(_shortened(word) for word in message.split())}", err=True)
    _exit(restart=restart)


def _check_environment() -> None:
    """Refuse settings that make Numba or DALI fail with a traceback, and a folder from which torch cannot be loaded."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder does not exist any more: change to another, and give its paths") from None
    threads = os.environ.get("NUMBA_NUM_THREADS", "1")
    if not threads.isdecimal() or int(threads) < 1:
        raise UserError(f"NUMBA_NUM_THREADS = {threads!r} in the environment: expected a number above 0. Unset it.")
    if (value := os.environ.get("NUMBA_DISABLE_JIT", "0")).strip() not in ("", "0"):
        raise UserError(f"NUMBA_DISABLE_JIT = {value!r} in the environment: the kernels run only compiled. Unset it.")
    if sys.flags.optimize > 1:
        raise UserError("Python runs without docstrings (-OO or PYTHONOPTIMIZE = 2), which DALI needs. Unset it.")


def _shortened(word: str) -> str:
    """Cut the middle out of a word that is longer than any sensible path."""
    return word if len(word) <= 500 else f"{word[:200]}...{word[-100:]} ({len(word)} characters)"


def _hint(error: click.UsageError) -> str:
    """A hint for options and arguments that click does not know."""
    if isinstance(error, click.NoSuchOption):
        if error.ctx is not None and error.ctx.parent is None:
            return " Options come after the command."
        if "." in error.option_name:
            return f" A key of the configuration is set by --set {error.option_name.lstrip('-')}=VALUE."
    elif "unexpected extra argument" in error.message:
        return ": an option takes one value; repeat -c and --set for more, and put a value with spaces in quotes."
    return ""


def _leave_in_silence(*, restart: bool = False) -> None:
    if _bad_input_mark() is not None:  # when one rank ends, torchrun ends the others: let one of them report first
        time.sleep(_REPORT_S)
    _exit(restart=restart)


def _exit(*, restart: bool) -> NoReturn:
    """End this rank; without `restart`, later attempts of torchrun end at once."""
    mark = _bad_input_mark()
    if not restart and mark is not None:
        with suppress(OSError):  # torchrun has ended and removed its folder
            mark.touch()
    _leave(2)


def _leave(code: int) -> NoReturn:
    """End this process. Ranks with GPUs are still joined after an error: then end it without Python's own steps.

    They would wait for threads and kernels of NCCL, which may wait for a lost rank.
    """
    if _ranks_are_joined():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _ranks_are_joined() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _bad_input_mark() -> Path | None:
    """A file in the folder of all attempts of torchrun on this host; None without torchrun.

    torchrun makes a folder with files ATTEMPT/LOCAL_RANK/error.json for each launch, and removes it at the end.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return None if error_file is None else Path(error_file).parents[2] / "bad_input"


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="peclr-dali %(version)s")
def main() -> None:
    """Pre-train pose encoders on unlabelled images: PeCLR on NVIDIA DALI.

    A first try, in minutes and without a GPU:

    \b
      python cli.py make-data .data/hands --poses 800
      python cli.py pretrain -c configs/demo.toml

    Your own images, on a GPU:

    \b
      python cli.py pretrain -c configs/peclr_rn50.toml -c configs/cards/rtx_11gb.toml \\
          --set data.source=folder --set data.root=/path/to/images
    """


main.help = as_called(main.help or "")
for module in (loaders, steps, data, networks, training):
    for command in vars(module).values():
        if isinstance(command, click.Command):
            command.help = as_called(command.help or "")
            main.add_command(command)
