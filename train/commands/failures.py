"""What becomes of the errors of commands: one line on the terminal and an exit code."""

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from peclr_dali.errors import UserError
from peclr_dali.train.commands.options import CALL, say
from peclr_dali.train.distributed.interrupt import Interrupted

# What an error of the system is about if it names no file.
_WITHOUT_NAME: dict[int | None, str] = {
    errno.ENOENT: "the working folder",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO), "the output"),
}


def fail(line: str, exit_code: int = 2) -> NoReturn:
    """Print a message as one line, with the rank in front if there are several, and exit with a code."""
    rank, line = os.environ.get("RANK"), " ".join(line.split())
    say(line if rank is None else f"rank {rank} on {platform.node()}: {line}", err=True)
    raise click.exceptions.Exit(exit_code)


@contextmanager
def failures() -> Iterator[None]:
    """End with one line and an exit code on errors that a user can mend, and on requests to stop."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError as request:
        click.echo(request.format_message())
        raise click.exceptions.Exit from request
    except click.UsageError as error:
        fail(f"error: {error.format_message()} See '{error.ctx.command_path if error.ctx else CALL} --help'.")
    except UserError as error:
        fail(f"error: {error}", error.exit_code)
    except Interrupted as stop:
        fail(str(stop), stop.exit_code)
    except KeyboardInterrupt:
        fail("aborted", 130)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("peclr_dali"):
            raise
        remedy = (
            "\"pip install '.[all]' torch==X\", with the torch that you have, installs what all commands need, or use "
            ".venv/bin/python of 'make setup'"
        )
        fail(f"error: {error}. In the checkout, {remedy}")
    except OSError as error:
        if error.filename is None and error.errno not in _WITHOUT_NAME:
            raise
        place = os.fsdecode(error.filename or _WITHOUT_NAME[error.errno])
        fail(f"error: {place}: {error.strerror}. Check the path, its permissions and the disk")
