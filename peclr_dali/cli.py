"""The commands, and what becomes of their errors.

Each command is defined beside the code that it calls, and imports that code only when it runs, so that `--help` is
fast.
"""

from __future__ import annotations

import errno
import io
import itertools
import logging
import os
import platform
import sys
import time
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

import click

from peclr_dali import __version__
from peclr_dali.bench import commands as measurements
from peclr_dali.errors import AnotherRankFailed, UserError
from peclr_dali.machine import keep_freed_memory
from peclr_dali.train.commands import data, networks, training
from peclr_dali.train.commands.options import CALL, as_called, is_first_on_host, is_main_rank, say
from peclr_dali.train.distributed.interrupt import Interrupted, stop_with_torchrun

_REPORT_S = 5.0
"""Seconds in which a rank prints its error, before the others end: when one rank ends, torchrun ends the others."""


COMMANDS: dict[str, list[click.Command]] = {
    title: [command for module in modules for command in vars(module).values() if isinstance(command, click.Command)]
    for title, modules in {
        "Data": (data,),
        "Training": (training,),
        "Trained networks": (networks,),
        "Measurements": (measurements,),
    }.items()
}
"""The commands by their group in the help."""


class Commands(click.Group):
    """Turns a user's mistakes into one line and exit code 2. An interrupted run prints where it stopped."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by group, each with the first sentence of its help."""
        for title, commands in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(command.name or "", command.get_short_help_str(200)) for command in commands])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that the arguments name."""
        stop_with_torchrun()
        keep_freed_memory()
        # Torch's C++ code writes a page of stack frames as a warning for each attempt to connect to the other ranks.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not be UTF-8
            sys.stdout.reconfigure(errors="backslashreplace")
        program = CALL.replace("python cli.py", "cli.py")
        # Processes that a command starts do not run the caller's script again, which may have no main guard.
        script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            super().main(*args, **{"prog_name": program, **kwargs, "standalone_mode": False})
        except AnotherRankFailed:
            time.sleep(_REPORT_S)
            _leave(2)
        except UserError as error:
            _fail(str(error), error.exit_code)
        except Interrupted as stop:
            if is_main_rank():
                say(str(stop), err=True)
            _leave(stop.exit_code)
        except click.exceptions.NoArgsIsHelpError as request:
            click.echo(request.format_message())
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            command = "" if context is None else context.command_path.removeprefix(program)
            _fail(f"{error.format_message()} See '{CALL}{command} --help'.")
        except (click.Abort, KeyboardInterrupt):
            click.echo("aborted", err=True)
            _leave(130)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("peclr_dali"):
                raise
            remedy = "\"pip install '.[all]'\" installs what all commands need, or use .venv/bin/python of 'make setup'"
            _fail(f"{error}. In the checkout, {remedy}")
        except Exception as error:
            if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
                place = os.fsdecode(error.filename or "the output")
                _fail(f"{place}: {error.strerror}. Check the path, its permissions and the disk")
            if not _ranks_are_joined():
                raise
            sys.excepthook(*sys.exc_info())  # torch's, which names the rank in each line
            _leave(1)
        finally:
            sys.modules["__main__"] = script
        sys.exit(0)


def _fail(message: str, code: int = 2) -> NoReturn:
    """Print an error and end. If all ranks of a host make the same mistake, only the first one prints it."""
    if not (is_first_on_host() or _ranks_are_joined()):
        time.sleep(_REPORT_S)  # torchrun ends this rank meanwhile, if the first rank has failed
    prefix = "error" if is_main_rank() else f"rank {os.environ['RANK']} on {platform.node()}: error"
    say(f"{prefix}: {' '.join(message.split())}", err=True)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End this process. Ranks are still joined after an error: then end it without Python's own steps.

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


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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
    from peclr_dali.train.runs.log import configure_logging

    configure_logging()


main.help = as_called(main.help or "")
for command in itertools.chain(*COMMANDS.values()):
    command.help = as_called(command.help or "")
    main.add_command(command)
