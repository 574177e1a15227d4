"""Where the JPEG decoder's temporary image begins, which decides how fast it decodes.

nvImageCodec 0.9, behind DALI 2.4, decodes a JPEG into memory of its own and copies the result out. If a row begins at a
multiple of 32 bytes, libjpeg-turbo stores it past the caches, and the copy waits for main memory. malloc gives each
thread such a place or another one by chance, and then again and again. So that library, and no other, gets an `operator
new[]` that hardly ever begins a large array there. bench-loader's "decode only (DALI)" is without it, its part "decode
only" with it.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numba
from numba import types

from machine.compiled import cached

LEAST_BYTES: Final = 16384
"""Smaller arrays are no images and are left where malloc puts them."""

TRIES: Final = 8
"""Arrays that are held at most while another place is sought; the last is taken wherever it begins."""

_OPERATOR_NEW_ARRAY: Final = b"_Znam"
_LIBRARY: Final = "libjpeg_turbo_ext.so*"
_PAGE: Final = mmap.PAGESIZE
# Of elf.h: tags of the dynamic section, and the kinds of relocation that hold a function's address.
_NULL, _STRING_TABLE, _SYMBOL_TABLE, _RELA, _RELA_SIZE, _PLT, _PLT_SIZE = 0, 5, 6, 7, 8, 23, 2
_GLOB_DAT, _JUMP_SLOT = 6, 7

_malloc: Any = types.ExternalFunction("malloc", types.intp(types.intp))
_free: Any = types.ExternalFunction("free", types.void(types.intp))


@cached(numba.njit, types.intp(types.intp, types.intp))
def _odd_step(size: Any, tries: Any) -> Any:
    start = _malloc(size)
    if start % 32 or tries == 1:
        return start
    other = _odd_step(size, tries - 1)  # while this one is held, often right behind it
    _free(start)
    return other


@cached(numba.cfunc, types.intp(types.intp), nopython=True)
def new_array(size: Any) -> Any:
    """An array of `size` bytes, of malloc; a large one begins at an odd multiple of 16 bytes. `free` takes it back."""
    if size < LEAST_BYTES:
        return _malloc(size)
    odd = size + 16 if (size + 23) // 16 % 2 == 0 else size  # malloc's block is then an odd number of steps
    return _odd_step(odd, TRIES)


def keep_decoded_in_cache() -> bool:
    """Give nvImageCodec's JPEG decoder that `operator new[]`, for the whole process; once is enough.

    Returns:
        Whether it has it. False where the library is not found or not built as expected: decoding is slower there.
    """
    library = _jpeg_library()
    slots = [] if library is None else _slots(library, _OPERATOR_NEW_ARRAY)
    return bool(slots) and all(_write_pointer(slot, new_array.address) for slot in slots)


def _jpeg_library() -> ctypes.CDLL | None:
    """Loaded here if it is not yet; nvImageCodec then gets the same one."""
    if platform.machine() != "x86_64":  # others do not store past the caches
        return None
    spec = find_spec("nvidia.nvimgcodec")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in Path(folder, "extensions").glob(_LIBRARY)]
    try:
        return ctypes.CDLL(str(files[0])) if len(files) == 1 else None
    except OSError:
        return None


def _slots(library: ctypes.CDLL, symbol: bytes) -> list[int]:
    """Addresses at which a loaded library keeps the address of a function that it takes from another one."""
    base, _, dynamic = struct.unpack("PPP", ctypes.string_at(library._handle, 3 * 8))  # struct link_map of link.h
    entries: dict[int, int] = {}
    while (entry := struct.unpack("QQ", ctypes.string_at(dynamic, 16)))[0] != _NULL:
        entries.setdefault(*entry)
        dynamic += 16
    slots = []
    for table, size in ((_RELA, _RELA_SIZE), (_PLT, _PLT_SIZE)):
        if table in entries:
            for offset, info, _ in struct.iter_unpack("QQq", ctypes.string_at(entries[table], entries[size])):
                if info & 0xFFFFFFFF in (_GLOB_DAT, _JUMP_SLOT):
                    name = struct.unpack("I", ctypes.string_at(entries[_SYMBOL_TABLE] + 24 * (info >> 32), 4))[0]
                    if ctypes.string_at(entries[_STRING_TABLE] + name) == symbol:
                        slots.append(base + offset)
    return slots


def _write_pointer(slot: int, value: int) -> bool:
    """Whether it may: one aligned store, so that threads that run see the old function or the new one.

    The dynamic linker has made the page read-only; it stays writable, since others may have written to it, too.
    """
    libc = ctypes.CDLL(None)
    page = ctypes.c_void_p(slot & -_PAGE)
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mprotect(page, ctypes.c_size_t(_PAGE), writable) != 0:
        return False
    ctypes.c_void_p.from_address(slot).value = value
    return True
