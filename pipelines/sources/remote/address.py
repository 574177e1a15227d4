"""Reads parts of files at an address, such as s3://bucket/prefix, and repeats requests that fail.

fsspec opens the address; it takes credentials and endpoints from the environment.
"""

from __future__ import annotations

import logging
import os
import random
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PosixPath
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs

from errors import Outage, UserError
from errors.terminal import in_one_line

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_BYTES: Final = 8 << 20
"""Bytes of one request: small enough to be repeated, large enough to be fast."""

READS: Final = 3
"""Number of attempts to read bytes of the right length and checksum."""

_READ_S: Final = 60.0
"""Time limit of one request."""

# botocore's own repetitions would multiply with those here.
_S3: Final = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 0}}}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {"s3": _S3, "s3a": _S3}
"""Options of fsspec's file systems, by protocol."""

_FINAL: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)
"""Errors that another attempt does not change."""

_CHECK_CREDENTIALS: Final = "Check the credentials in the environment"
_CHECK_ADDRESS: Final = "Check data.root, and AWS_ENDPOINT_URL and AWS_DEFAULT_REGION in the environment"
_MISTAKES: Final = {
    "NoCredentialsError": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "PartialCredentialsError": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "ProfileNotFound": f"{_CHECK_CREDENTIALS}: AWS_PROFILE names a section of ~/.aws/credentials",
    "ConfigParseError": _CHECK_CREDENTIALS,
    "ConfigNotFound": _CHECK_CREDENTIALS,
    "InvalidConfigError": _CHECK_CREDENTIALS,
    "InfiniteLoopConfigError": _CHECK_CREDENTIALS,
    "UnknownCredentialError": _CHECK_CREDENTIALS,
    "SSOTokenLoadError": f"{_CHECK_CREDENTIALS}, or log in again",
    "UnauthorizedSSOTokenError": f"{_CHECK_CREDENTIALS}, or log in again",
    "EndpointProviderError": _CHECK_ADDRESS,
    "BaseEndpointResolverError": _CHECK_ADDRESS,
    "InvalidRegionError": _CHECK_ADDRESS,
    "ParamValidationError": _CHECK_ADDRESS,
    "400": f"{_CHECK_CREDENTIALS}, also AWS_SESSION_TOKEN and AWS_DEFAULT_REGION",  # to HEAD, which gets no other code
    "InvalidToken": f"{_CHECK_CREDENTIALS}: AWS_SESSION_TOKEN is not that of AWS_ACCESS_KEY_ID",
    "TokenRefreshRequired": f"{_CHECK_CREDENTIALS}: AWS_SESSION_TOKEN has to be renewed",
}
"""botocore's kinds of errors and S3's codes that another attempt does not change either, with what to do."""


class Address(PosixPath):
    """An address as the root of an index. Its text keeps both slashes of "s3://"; a path would merge them."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


@dataclass(frozen=True)
class Retries:
    """How often a failed request is repeated. The wait before an attempt doubles each time, and is random.

    Attributes:
        attempts: number of attempts in a row, about two minutes in all.
        first_s: longest wait before the second attempt.
        longest_s: longest wait before any attempt.
    """

    attempts: int = 11
    first_s: float = 0.25
    longest_s: float = 30.0

    def wait_s(self, failed: int) -> float:
        """Time to wait after so many failed attempts; random, so that processes do not return all at once."""
        return random.uniform(0.5, 1) * float(min(self.first_s * 2 ** (failed - 1), self.longest_s))


class WrongBytes(Exception):  # noqa: N818  as errno's names
    """What was read has another length or checksum than expected."""


class Remote:
    """The files of a folder at an address; any thread may read them.

    Raises:
        UserError: no installed package reads such an address, or it contains a password.
    """

    def __init__(self, address: str, retries: Retries | None = None) -> None:
        try:
            parts = urlsplit(address)
        except ValueError as error:
            raise UserError(f"data.root = {address}: {error}. Expected s3://BUCKET/FOLDER, or a folder.") from error
        if parts.password is not None or (parts.username is not None and parts.scheme in ("http", "https")):
            raise UserError(
                f"data.root = {parts.scheme}://...@{parts.hostname}: contains a password. Leave it out, since the "
                "configuration is stored with the run; credentials come from the environment."
            )
        if parts.scheme in _OPTIONS and not parts.netloc:
            raise UserError(f"data.root = {address}: names no bucket. Expected s3://BUCKET/FOLDER.")
        self.address = address.rstrip("/")
        self._retries = retries or Retries()
        protocol = address.partition("://")[0]
        try:
            files, self._folder = url_to_fs(self.address, **_OPTIONS.get(protocol, {}))
        except ImportError as error:
            missing = "pip install s3fs" if protocol in ("s3", "s3a") else f"install the package for {protocol}://"
            raise UserError(f"data.root = {address}: {error}. Do: {missing}.") from error
        except ValueError as error:
            raise UserError(f"data.root = {address}: {error}. Expected s3://BUCKET/FOLDER, or a folder.") from error
        self._files: AbstractFileSystem = files
        self._limits = {"timeout": _READ_S} if isinstance(files, AsyncFileSystem) else {}

    def size(self, name: str) -> int:
        """Size of a file in bytes. Errors as in `read`."""
        return self._with_retries(name, lambda path: int(self._files.info(path, **self._limits)["size"]), None)

    def read_all(self, name: str) -> bytes:
        """A whole small file. Errors as in `read`."""
        return self._with_retries(name, lambda path: bytes(self._files.cat_file(path, **self._limits)), None)

    def read(
        self,
        name: str,
        start: int,
        end: int,
        *,
        check: Callable[[bytes], bool] = lambda data: True,
        stop: threading.Event | None = None,
    ) -> bytes:
        """The bytes [start, end) of a file.

        Args:
            check: whether these are the expected bytes; if not, they are read again.
            stop: ends the wait before another attempt.

        Raises:
            UserError: it does not exist, may not be read, the address or the credentials are wrong, or it holds wrong
                bytes, for which there are fewer attempts.
            Outage: all attempts failed.
            Stopped: `stop` was set.
        """

        def checked(path: str) -> bytes:
            data = bytes(self._files.cat_file(path, start=start, end=end, **self._limits))
            if len(data) != end - start:
                raise WrongBytes(f"{len(data)} bytes, expected {end - start}")
            if not check(data):
                raise WrongBytes("wrong checksum")
            return data

        return self._with_retries(name, checked, stop)

    def _with_retries(self, name: str, request: Callable[[str], T], stop: threading.Event | None) -> T:
        failed = wrong = 0
        while True:
            try:
                return request(f"{self._folder}/{name}")
            except _FINAL as error:
                where = f"{self.address}/{name}"
                if isinstance(error, FileNotFoundError):
                    raise UserError(
                        f"{where}: does not exist ({_one_line(error)}); expected the shards and the index that 'python "
                        "cli.py pack' wrote. Check data.root."
                    ) from error
                raise UserError(f"{where}: {_one_line(error)}. Check the credentials in the environment.") from error
            except Exception as error:  # each of fsspec's file systems has kinds of its own
                failed += 1
                what = f"{self.address}/{name}: {_one_line(error)}"
                if (advice := _advice(error)) is not None:
                    raise UserError(f"{what}. {advice}.") from error
                wrong += isinstance(error, WrongBytes)
                if failed == self._retries.attempts or wrong == READS:
                    remedy = "Check the network and the server, then start again: what the cache holds stays."
                    kind: type[UserError] = Outage
                    if isinstance(error, WrongBytes):
                        remedy, kind = "Copy the file there again, or pack again.", UserError
                    raise kind(f"{what}; {failed} attempts failed. {remedy}") from error
                if failed > 2:
                    log.warning("%s; attempt %d of %d failed", what, failed, self._retries.attempts)
                if (stop or _NEVER).wait(self._retries.wait_s(failed)):
                    raise Stopped from error


class Stopped(Exception):  # noqa: N818  no error: nobody waits for the answer any more
    """The loader was closed."""


_NEVER: Final = threading.Event()


def _advice(error: Exception) -> str | None:
    """What to do about a mistake in the address or the credentials; None if it is another error."""
    if isinstance(error, ValueError) and str(error).startswith("Invalid endpoint"):  # of botocore, for AWS_ENDPOINT_URL
        return _CHECK_ADDRESS
    if type(error).__name__ == "HTTPClientError":  # of botocore: what failed before anything was sent
        return _advice_of_client(getattr(error, "kwargs", {}).get("error"))
    code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")  # s3fs raises an OSError from it
    names = [*(kind.__name__ for kind in type(error).__mro__), code]
    return next((_MISTAKES[name] for name in names if name in _MISTAKES), None)


def _advice_of_client(error: Exception | None) -> str | None:
    unreadable = isinstance(error, FileNotFoundError | IsADirectoryError | PermissionError)
    if unreadable or (isinstance(error, ssl.SSLError) and error.library in ("X509", "PEM")):
        names = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")  # the first that is set counts
        found = next((f"{name} = {os.environ[name]}" for name in names if name in os.environ), "ca_bundle")
        return f"Expected a file of certificates: check {found}, in the environment or in ~/.aws/config"
    if isinstance(error, ValueError) and "headers" in str(error):
        return f"{_CHECK_CREDENTIALS}: one of them contains a line break or another control character"
    return None


def _one_line(error: Exception) -> str:
    text = in_one_line(error).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
