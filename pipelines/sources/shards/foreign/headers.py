"""Finds the images of tar files by their headers, in compiled code. Contents are not read."""

from __future__ import annotations

import errno
import os
from typing import Any, Final, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from machine.compiled import cached
from pipelines.files.image_file import MAX_FILE_BYTES
from pipelines.sources.folder import IMAGE_ENDINGS
from pipelines.sources.shards.shard_store import BLOCK_BYTES, member_name

# A function of the C library, with the types of 64-bit Linux.
_pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.intp, types.uintp, types.int64))

_WINDOW_BYTES: Final = 4096
"""Bytes read at once: a header, and those of small members after it."""

_MAX_RECORD_BYTES: Final = 2**20
"""Largest extended header (long name, PAX) that is read."""

_MAX_LEAD_BYTES: Final = 2**22
"""Most bytes from a member's first header to its content."""

_ROWS: Final = 2**14
"""Images found by one call of the compiled code."""

_TRIES: Final = 10
"""Attempts to read a place of a file, each of which a signal may interrupt."""

SKIPPED: Final = ("other", "links", "sparse", "hidden", "empty", "too large")
"""Kinds of members that are no samples."""

_OTHER, _LINKS, _SPARSE, _HIDDEN, _EMPTY, _TOO_LARGE = range(len(SKIPPED))
_SAMPLE, _WITHOUT_DATA = -1, -2  # members that are not counted; the latter are folders and devices

# Entries of the state of a scan: the next member, the bytes in memory, how it ended, where the member that is cut has
# its content, and then a count for each of SKIPPED.
_AT, _HELD_AT, _HELD_BYTES, _END, _CONTENT, _COUNTS = range(6)

_GOING_ON, _MARKED, _UNMARKED, _CUT, _DAMAGED, _UNREADABLE = range(6)

_SHORT_ENDINGS: Final = tuple(int.from_bytes(e.encode(), "big") for e in IMAGE_ENDINGS if len(e) == 4)
_LONG_ENDINGS: Final = tuple(int.from_bytes(e.encode(), "big") for e in IMAGE_ENDINGS if len(e) == 5)

# Kinds of members (tar's type flag) and characters.
_OLD_FILE, _FILE, _HARD_LINK, _SYMBOLIC_LINK, _FIRST_SPECIAL, _FIFO, _CONTIGUOUS = 0, *b"012367"
_GNU_SPARSE, _GNU_NAME, _GNU_LINK, _PAX, _PAX_SOLARIS, _PAX_GLOBAL = b"SLKxXg"
_DOT, _SLASH, _SPACE, _EQUALS, _DIGIT_0, _DIGIT_7, _DIGIT_9 = b"./ =079"
_PATH_KEY, _SIZE_KEY, _SPARSE_KEY = (np.frombuffer(key, np.uint8) for key in (b"path", b"size", b"GNU.sparse."))

Places = npt.NDArray[np.int64]
"""(N, 3): offset and size of each image's content in bytes, and the bytes of the headers before it."""


class HeaderScan:
    """Finds the images of a tar file, a part at a time.

    Args:
        descriptor: of the open file.
        file_bytes: size of the file; what comes later is not read.
    """

    def __init__(self, descriptor: int, file_bytes: int) -> None:
        self._descriptor, self._bytes = descriptor, file_bytes
        self._state = np.zeros(_COUNTS + len(SKIPPED), np.int64)
        self._memory = np.empty(_MAX_RECORD_BYTES + BLOCK_BYTES, np.uint8)  # pages that are not written cost nothing

    @property
    def at(self) -> int:
        """Byte of the next header."""
        return int(self._state[_AT])

    @property
    def skipped(self) -> dict[str, int]:
        """Number of members that are no samples, for each kind."""
        return {kind: count for kind, count in zip(SKIPPED, self._state[_COUNTS:].tolist(), strict=True) if count}

    def next_images(self) -> Places:
        """The next images in the order of the file: `_ROWS` of them, or fewer at its end.

        Raises:
            OSError: the file cannot be read.
        """
        places = np.empty((_ROWS, 3), np.int64)
        for _ in range(_TRIES):
            found = _scan(self._descriptor, self._bytes, self._memory, self._state, places)
            if self._state[_END] != _UNREADABLE:
                return places[:found]
            self._state[_END] = _GOING_ON
            if found:
                return places[:found]
            at = int(self._state[_HELD_AT] + self._state[_HELD_BYTES])
            os.pread(self._descriptor, _WINDOW_BYTES, at)  # raises the error, unless a signal was the cause
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    @property
    def is_finished(self) -> bool:
        """Whether nothing more can be found."""
        return bool(self._state[_END] != _GOING_ON)

    @property
    def is_tar(self) -> bool:
        """Whether the file begins as a tar file does."""
        return bool(self.at or self._state[_END] in (_MARKED, _UNMARKED) or self._state[_CONTENT])

    @property
    def ended_early(self) -> str | None:
        """Why images may be missing at the end of the file, or None if it has its end marker and nothing after it."""
        end, at = int(self._state[_END]), self.at
        if end == _MARKED:
            if os.pread(self._descriptor, 1 << 16, at).strip(b"\0"):
                return f"more data after its end marker at byte {at}, as in joined tar files; they are left out"
            return None
        if end == _UNMARKED and not self._bytes:
            return "empty (0 bytes)"
        if end == _UNMARKED:
            return "no end marker: complete, or cut between two members"
        if end == _CUT and self._state[_CONTENT]:
            records = os.pread(self._descriptor, int(self._state[_CONTENT]) - at, at)
            return f"cut within {member_name(records) or 'a member'} at byte {at}; it is left out"
        what = "cut within a header" if end == _CUT else "no valid header"
        return f"{what} at byte {at}; what follows is left out"


@cached(numba.njit, nogil=True)
def _held(descriptor: int, memory: Any, state: Any, at: int, count: int) -> int:
    """Position in memory of the bytes [at, at + count) of a file. They are read if necessary.

    Returns:
        -1 if the file ends before their end, -2 if it cannot be read.
    """
    first = at - state[_HELD_AT]
    if first >= 0 and first + count <= state[_HELD_BYTES]:
        return int(first)
    state[_HELD_AT], state[_HELD_BYTES] = at, 0
    wanted = max(count, _WINDOW_BYTES)
    while state[_HELD_BYTES] < wanted:
        held = state[_HELD_BYTES]
        got = _pread(descriptor, memory.ctypes.data + held, wanted - held, at + held)
        if got < 0:
            return -2
        if got == 0:
            break
        state[_HELD_BYTES] += got
    return 0 if state[_HELD_BYTES] >= count else -1


@cached(numba.njit, nogil=True)
def _number(field: Any) -> int:
    """A number of a header, octal or base-256; -1 if it is none, is negative or is absurdly large."""
    value = 0
    if field[0] == 0x80:
        for byte in field[1:]:
            if value >= 2**54:
                return -1
            value = value * 256 + byte
        return value
    at = 0
    while at < len(field) and field[at] == _SPACE:
        at += 1
    while at < len(field) and _DIGIT_0 <= field[at] <= _DIGIT_7:
        value = value * 8 + (field[at] - _DIGIT_0)
        at += 1
    return value if at == len(field) or field[at] == 0 or field[at] == _SPACE else -1


@cached(numba.njit, nogil=True)
def _sums(header: Any) -> tuple[Any, Any]:
    """The two checksums that programs write: sums of unsigned or signed bytes, with spaces in the checksum's place."""
    unsigned = signed = np.int64(8 * _SPACE)
    for at in range(BLOCK_BYTES):
        if not 148 <= at < 156:
            byte = np.int64(header[at])
            unsigned += byte
            signed += byte - (256 if byte > 127 else 0)
    return unsigned, signed


@cached(numba.njit, nogil=True)
def _until_zero(text: Any) -> Any:
    for at in range(len(text)):
        if text[at] == 0:
            return text[:at]
    return text


@cached(numba.njit, nogil=True)
def _is_image(name: Any) -> bool:
    """Whether a name has the ending of an image, in small or capital letters."""
    tail = 0
    for byte in name[max(0, len(name) - 5) :]:
        tail = tail << 8 | (byte + 32 if 65 <= byte <= 90 else byte)
    return tail & 0xFFFFFFFF in _SHORT_ENDINGS or tail in _LONG_ENDINGS


@cached(numba.njit, nogil=True)
def _is_hidden(name: Any) -> bool:
    """Whether a file or folder of a name begins with a dot; "." and ".." are not hidden."""
    for at in range(len(name) - 1):
        if name[at] == _DOT and (at == 0 or name[at - 1] == _SLASH):
            after = at + 2 if name[at + 1] == _DOT else at + 1
            if after < len(name) and name[after] != _SLASH:
                return True
    return False


@cached(numba.njit, nogil=True)
def _begins(text: Any, key: Any) -> bool:
    return len(text) >= len(key) and bool((text[: len(key)] == key).all())


@cached(numba.njit, nogil=True)
def _pax(data: Any) -> tuple[bool, int, int, int, bool]:
    """Read a PAX extended header, a sequence of records "LENGTH KEY=VALUE\\n".

    Returns:
        Whether the records are sound; start and end of the path; size of the member, -1 if not given; whether the
        member is sparse. The end of the path is 0 if no path is given.
    """
    path_start = path_stop = 0
    size, sparse = -1, False
    at = 0
    while at < len(data) and data[at] != 0:
        length, start = 0, at
        while at < len(data) and _DIGIT_0 <= data[at] <= _DIGIT_9 and length <= len(data):
            length = length * 10 + (data[at] - _DIGIT_0)
            at += 1
        stop = start + length
        if stop > len(data) or stop <= at or data[at] != _SPACE:
            return False, 0, 0, -1, False
        at += 1
        key = at
        while at < stop and data[at] != _EQUALS:
            at += 1
        if at >= stop:
            return False, 0, 0, -1, False
        if _begins(data[key:at], _SPARSE_KEY):
            sparse = True
        elif at - key == 4 and _begins(data[key:at], _PATH_KEY):
            path_start, path_stop = at + 1, stop - 1
        elif at - key == 4 and _begins(data[key:at], _SIZE_KEY):
            size = 0
            for byte in data[at + 1 : stop - 1]:
                if not _DIGIT_0 <= byte <= _DIGIT_9 or size > 2**54:
                    return False, 0, 0, -1, False
                size = size * 10 + (byte - _DIGIT_0)
        at = stop
    return True, path_start, path_stop, size, sparse


@cached(numba.njit, nogil=True)
def _record(kind: np.uint8, data: Any) -> tuple[bool, int, int, int, bool]:
    """What an extended header tells of its member, as `_pax` returns it."""
    return (True, 0, len(data), -1, False) if kind == _GNU_NAME else _pax(data)


@cached(numba.njit, nogil=True)
def _in_blocks(size: int) -> int:
    return (size + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


class _Member(NamedTuple):
    """A member of a tar file, as its headers tell.

    Attributes:
        end: `_GOING_ON`, or why there is no member; the others are then 0.
        content: byte where its content begins.
        size: bytes of its content.
        kind: tar's type flag.
        is_folder: whether it is a folder of an old tar file.
    """

    end: int
    content: int
    size: int
    kind: np.uint8
    is_folder: bool
    is_image: bool
    is_hidden: bool
    is_sparse: bool


@cached(numba.njit, nogil=True)
def _no_member(end: int) -> _Member:
    return _Member(end, 0, 0, np.uint8(0), False, False, False, False)


@cached(numba.njit, nogil=True)
def _cut_or_unreadable(held: int) -> _Member:
    """No member, since `_held` found no bytes."""
    return _no_member(_CUT if held == -1 else _UNREADABLE)


@cached(numba.njit, nogil=True)
def _read_headers(descriptor: int, memory: Any, state: Any) -> _Member:
    """The member at `state[_AT]`: its extended headers, if there are any, and its own."""
    start = at = state[_AT]
    told_name = told_size = False
    is_image = is_hidden = is_sparse = False
    size = 0
    while True:
        first = _held(descriptor, memory, state, at, BLOCK_BYTES)
        if first == -1 and at == start and not memory[: state[_HELD_BYTES]].any():
            return _no_member(_UNMARKED)
        if first < 0:
            return _cut_or_unreadable(first)
        header = memory[first : first + BLOCK_BYTES]
        unsigned, signed = _sums(header)
        told_sum, own_size = _number(header[148:156]), _number(header[124:136])
        if unsigned == 8 * _SPACE and at == start and told_sum == 0:
            return _no_member(_MARKED)
        if own_size < 0 or (told_sum != unsigned and told_sum != signed):
            return _no_member(_DAMAGED)
        kind = header[156]
        at += BLOCK_BYTES
        if kind not in (_GNU_NAME, _GNU_LINK, _PAX, _PAX_SOLARIS, _PAX_GLOBAL):
            break
        if own_size > _MAX_RECORD_BYTES or at + _in_blocks(own_size) - start > _MAX_LEAD_BYTES:
            return _no_member(_DAMAGED)
        if kind not in (_GNU_LINK, _PAX_GLOBAL):
            first = _held(descriptor, memory, state, at, own_size)
            if first < 0:
                return _cut_or_unreadable(first)
            data = memory[first : first + own_size]
            sound, path_start, path_stop, record_size, record_sparse = _record(kind, data)
            if not sound:
                return _no_member(_DAMAGED)
            is_sparse = is_sparse or record_sparse
            if path_stop and not told_name:  # the first one counts, as in Python's tarfile
                name = _until_zero(data[path_start:path_stop])
                told_name, is_image, is_hidden = True, _is_image(name), _is_hidden(name)
            if record_size >= 0 and not told_size:
                told_size, size = True, record_size
        at += _in_blocks(own_size)
    name = _until_zero(header[:100])
    if not told_name:
        is_image, is_hidden = _is_image(name), _is_hidden(name) or _is_hidden(_until_zero(header[345:500]))
    is_folder = kind == _OLD_FILE and not told_name and len(name) > 0 and name[-1] == _SLASH
    if is_folder or _HARD_LINK <= kind < _CONTIGUOUS:
        size = 0
    elif not told_size:
        size = own_size
    if kind == _GNU_SPARSE:
        at = _after_sparse_map(descriptor, memory, state, at, header[482])
        if at < 0:
            return _cut_or_unreadable(at)
    return _Member(_GOING_ON, at, size, kind, is_folder, is_image, is_hidden, is_sparse or kind == _GNU_SPARSE)


@cached(numba.njit, nogil=True)
def _after_sparse_map(descriptor: int, memory: Any, state: Any, at: int, continues: int) -> int:
    """Byte after the map of a sparse member, whose blocks begin at `at` if it `continues`; else as of `_held`."""
    while continues:
        first = _held(descriptor, memory, state, at, BLOCK_BYTES)
        if first < 0:
            return int(first)
        continues = memory[first + 504]
        at += BLOCK_BYTES
    return at


@cached(numba.njit, nogil=True)
def _kind_of_member(member: _Member) -> int:
    """`_SAMPLE`, `_WITHOUT_DATA`, or the place of its kind in `SKIPPED`."""
    if member.is_folder or _FIRST_SPECIAL <= member.kind <= _FIFO:
        return _WITHOUT_DATA
    if member.is_sparse:
        return _SPARSE
    if member.kind in (_HARD_LINK, _SYMBOLIC_LINK):
        return _LINKS
    if not member.is_image or member.kind not in (_OLD_FILE, _FILE, _CONTIGUOUS):
        return _OTHER
    if member.is_hidden:
        return _HIDDEN
    if member.size == 0:
        return _EMPTY
    return _TOO_LARGE if member.size > MAX_FILE_BYTES else _SAMPLE


@cached(numba.njit, nogil=True)
def _scan(descriptor: int, file_bytes: int, memory: Any, state: Any, places: Any) -> int:
    """Follow the headers from the member at `state[_AT]` until `places` is full or the file ends.

    Every header moves on by at least one block, so that this ends on any file.

    Returns:
        The number of images written to `places`. `state` says where and why it ended.
    """
    rows = 0
    state[_CONTENT] = 0
    while rows < len(places):
        member = _read_headers(descriptor, memory, state)
        if member.end != _GOING_ON:
            state[_END] = member.end
            return rows
        if member.size > file_bytes - member.content:
            state[_END], state[_CONTENT] = _CUT, member.content
            return rows
        kind = _kind_of_member(member)
        if kind == _SAMPLE:
            places[rows, 0], places[rows, 1] = member.content, member.size
            places[rows, 2] = member.content - state[_AT]
            rows += 1
        elif kind != _WITHOUT_DATA:
            state[_COUNTS + kind] += 1
        state[_AT] = member.content + _in_blocks(member.size)
    return rows
