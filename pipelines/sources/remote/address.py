"""Reads files at an address, such as s3://bucket/folder, and repeats requests that fail.

fsspec opens the address; it takes credentials and endpoints from the environment.
"""

from __future__ import annotations

import logging
import random
import re
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any, Final
from urllib.parse import urlsplit

from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs

from peclr_dali.errors import UserError
from peclr_dali.errors.terminal import in_one_line

log = logging.getLogger(__name__)

ATTEMPTS: Final = 11
"""Attempts of one request in a row, about two minutes in all."""

PIECE_BYTES: Final = 8 << 20
"""Bytes of one request: small enough to be repeated, large enough to be fast."""

# botocore's own repetitions would multiply with those here.
_S3: Final = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 0}}}

_MAY_PASS: Final = {
    "HTTPClientError", "ConnectionError", "IncompleteReadError", "ChecksumError", "FlexibleChecksumError",
    "CredentialRetrievalError", "MetadataRetrievalError", "TokenRetrievalError", "CapacityNotAvailableError",
}  # fmt: skip
"""botocore's kinds of errors that another attempt may change. The others are of credentials, settings and addresses."""

_CHECK: Final = (
    "Check data.root, and the credentials in the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, with "
    "AWS_SESSION_TOKEN if they are temporary, or AWS_PROFILE. If they are set, also AWS_ENDPOINT_URL, "
    "AWS_DEFAULT_REGION, AWS_CA_BUNDLE and REQUESTS_CA_BUNDLE."
)


class Remote:
    """The files of a folder at an address; any thread may read them.

    Raises:
        UserError: no installed package reads such an address, or it contains a password.
    """

    def __init__(self, address: str) -> None:
        scheme = address.partition("://")[0]
        is_s3 = scheme in ("s3", "s3a")
        self.address = address.rstrip("/")
        try:
            parts = urlsplit(address)
            if parts.password is not None or (parts.username is not None and scheme in ("http", "https")):
                raise UserError(
                    f"data.root = {scheme}://...@{parts.hostname}: contains a password. Leave it out, since the "
                    "configuration is stored with the run; credentials come from the environment."
                )
            if is_s3 and not parts.netloc:
                raise ValueError("names no bucket")
            self._files, self._folder = url_to_fs(self.address, **(_S3 if is_s3 else {}))
        except ImportError as error:
            package = "'peclr-dali[s3]'" if is_s3 else f"the package that reads {scheme}://"
            raise UserError(f"data.root = {address}: {error}. Do: pip install {package}.") from error
        except ValueError as error:
            raise UserError(f"data.root = {address}: {error}. Expected s3://BUCKET/FOLDER, or a folder.") from error
        self._limits = {"timeout": 60.0} if isinstance(self._files, AsyncFileSystem) else {}

    def read(self, name: str) -> bytes:
        """A whole file. Errors as in `pieces`."""
        return b"".join(self.pieces(name, int(self._repeated("info", name, threading.Event())["size"])))

    def pieces(self, name: str, size: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        """The `size` bytes of a file, piece by piece.

        Raises:
            UserError: it does not exist, may not be read, or the address or the credentials are wrong.
            UserError: all attempts failed.
            CancelledError: `stop` was set.
        """
        for start in range(0, size, PIECE_BYTES):
            yield self._repeated("cat_file", name, stop, start=start, end=min(start + PIECE_BYTES, size))

    def _repeated(self, method: str, name: str, stop: threading.Event | None, **span: int) -> Any:
        """Call a method of fsspec, again after failures; the bytes of a `span` must be as many as it says."""
        stop = stop or threading.Event()
        for failed in range(ATTEMPTS):
            if stop.wait(wait_s(failed)):
                raise CancelledError
            try:
                found = getattr(self._files, method)(f"{self._folder}/{name}", **span, **self._limits)
                if not span or len(found) == span["end"] - span["start"]:
                    return found
                raise EOFError(f"{len(found)} bytes from {span['start']} to {span['end']}")
            except Exception as error:  # each of fsspec's file systems has kinds of its own
                what = f"{self.address}/{name}: {type(error).__name__}: {in_one_line(error).rstrip('.')}"
                if isinstance(error, FileNotFoundError):
                    expected = "expected the shards and the index that 'python cli.py pack' wrote"
                    raise UserError(f"{what}; it does not exist, {expected}. Check data.root.") from error
                if _is_mistake(error):
                    raise UserError(f"{what}. {_CHECK}") from error
                if failed > 1:
                    log.warning("%s; attempt %d of %d failed", what, failed + 1, ATTEMPTS)
        remedy = "Check the network and the server, then start again: what the cache holds stays."
        raise UserError(f"{what}; {ATTEMPTS} attempts failed. {remedy}")


def wait_s(failed: int) -> float:
    """Seconds to wait after so many failed attempts; random, so that processes do not return all at once."""
    return random.uniform(0.125, 0.25) * min(2.0**failed - 1, 120.0)


def _is_mistake(error: Exception) -> bool:
    """Whether the address, the credentials or a setting of them is wrong, so that no other attempt can succeed."""
    cause = getattr(error, "kwargs", {}).get("error")  # hidden by botocore: a bad file of certificates, or a bad header
    if isinstance(cause, ssl.SSLError):
        return cause.library in ("X509", "PEM")
    if isinstance(cause or error, ValueError) and re.search("Invalid endpoint|header", str(cause or error)):
        return True
    kinds = {kind.__name__ for kind in type(error).__mro__}
    code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")  # s3fs raises an OSError from it
    is_refused = code in ("400", "InvalidToken", "TokenRefreshRequired")  # 400 to HEAD, which gets no other code
    final = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)
    return isinstance(cause or error, final) or is_refused or ("BotoCoreError" in kinds and not kinds & _MAY_PASS)
