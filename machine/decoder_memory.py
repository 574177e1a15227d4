"""Sets up the memory of this process so that JPEGs decode faster on a CPU. Only commands do this.

nvImageCodec 0.9, the decoder of DALI 2.4, decodes a JPEG into its own memory and then copies the result. If a row
starts at a multiple of 32 bytes, libjpeg-turbo writes it with stores that bypass the caches, and the copy waits for
main memory. malloc places the rows at random, but always alike in the same thread. So nvImageCodec, and no other
library, gets an `operator new[]` that avoids these addresses for large arrays.

The decoder also allocates memory for each image. Every new page of the system costs a page fault and is cleared, which
takes longer than reading the files. So malloc is set to keep freed memory.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import platform
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import llvmlite.binding as llvm

log = logging.getLogger(__name__)

LEAST_BYTES: Final = 16384
"""Bytes from which an array counts as an image; smaller arrays are left to malloc."""

TRIES: Final = 8
"""Attempts to get another address; the last one is used in any case."""

_OPERATOR_NEW_ARRAY: Final = b"_Znam"
_LIBRARY: Final = "libjpeg_turbo_ext.so*"
_PAGE: Final = mmap.PAGESIZE
# From elf.h: tags of the dynamic section, and types of relocation that hold a function's address.
_NULL, _STRING_TABLE, _SYMBOL_TABLE, _RELA, _RELA_SIZE, _PLT, _PLT_SIZE = 0, 5, 6, 7, 8, 23, 2
_GLOB_DAT, _JUMP_SLOT = 6, 7
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # from glibc's malloc.h
_MIB = 2**20

# Sizes are rounded up so that malloc's block is an odd multiple of 16 bytes. If there is no memory, the code jumps to
# the library's own operator, which throws.
_NEW_ARRAY: Final = """
define i64 @new_array(i64 %size) {{
  %held = alloca i64, i32 {tries}
  %above = sub i64 %size, {least}
  %large = icmp ult i64 %above, 140737488355328
  br i1 %large, label %begin, label %plain
plain:
  %taken = musttail call i64 inttoptr (i64 {plain} to i64 (i64)*)(i64 %size)
  ret i64 %taken
begin:
  %rounded = add i64 %size, 23
  %step = and i64 %rounded, 16
  %more = xor i64 %step, 16
  %odd = add i64 %size, %more
  br label %try
try:
  %count = phi i64 [0, %begin], [%next, %hold]
  %start = call i64 inttoptr (i64 {malloc} to i64 (i64)*)(i64 %odd)
  %next = add i64 %count, 1
  %none = icmp eq i64 %start, 0
  br i1 %none, label %leave, label %look
look:
  %beyond = and i64 %start, 31
  %good = icmp ne i64 %beyond, 0
  %last = icmp eq i64 %next, {tries}
  %done = or i1 %good, %last
  br i1 %done, label %leave, label %hold
hold:
  %place = getelementptr i64, i64* %held, i64 %count
  store i64 %start, i64* %place
  br label %try
leave:
  %left = phi i64 [%count, %try], [%count, %look], [%fewer, %give_back]
  %empty = icmp eq i64 %left, 0
  br i1 %empty, label %end, label %give_back
give_back:
  %fewer = sub i64 %left, 1
  %which = getelementptr i64, i64* %held, i64 %fewer
  %other = load i64, i64* %which
  call void inttoptr (i64 {free} to void (i64)*)(i64 %other)
  br label %leave
end:
  br i1 %none, label %plain, label %found
found:
  ret i64 %start
}}
"""


@functools.cache
def prepare_decoder_memory() -> None:
    """Set up the memory of this process for decoding on its CPU, and log it on rank 0. A second call does nothing."""
    kept, in_cache = keep_freed_memory(), keep_decoded_in_cache()
    done = [words for words, works in (("malloc reuses memory", kept), ("cached JPEG rows", in_cache)) if works]
    if os.environ.get("RANK", "0") == "0":
        told = 'CPU decoder set up (pipelines.decoder_memory = "auto"): %s'
        log.info(told, ", ".join(done) or "not possible here")


def keep_freed_memory() -> bool:
    """Set malloc to keep freed memory, for the whole process.

    Returns:
        Whether it was done. False if the C library is not glibc.
    """
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # The largest value that mallopt accepts; smaller blocks get no mapping of their own.
    mallopt(_MMAP_THRESHOLD, 32 * _MIB)
    mallopt(_TRIM_THRESHOLD, 1024 * _MIB)
    mallopt(_TOP_PAD, 32 * _MIB)
    return True


def keep_decoded_in_cache() -> bool:
    """Give nvImageCodec's JPEG decoder the `operator new[]` of `new_array`, for the whole process.

    Returns:
        Whether it was done. False if the library is not found or is built differently; decoding is then slower.
    """
    library = _jpeg_library()
    slots = [] if library is None else _slots(library, _OPERATOR_NEW_ARRAY)
    if library is None or not slots:
        return False
    own = ctypes.cast(library._Znam, ctypes.c_void_p).value
    assert own is not None
    return all(_write_pointer(slot, new_array(own)) for slot in slots)


@functools.cache
def new_array(plain: int) -> int:
    """Compile an `operator new[]` whose large arrays start at odd multiples of 16 bytes; returns its address.

    Args:
        plain: address of the `operator new[]` for small arrays and for lack of memory. `free` releases all arrays.
    """
    libc = ctypes.CDLL(None)
    malloc, free = (ctypes.cast(function, ctypes.c_void_p).value for function in (libc.malloc, libc.free))
    code = _NEW_ARRAY.format(tries=TRIES, least=LEAST_BYTES, plain=plain, malloc=malloc, free=free)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code), target)
    _ENGINES.append(engine)
    engine.finalize_object()
    return int(engine.get_function_address("new_array"))


_ENGINES: Final[list[Any]] = []
"""Keeps the compiled code alive until the process ends."""


def _jpeg_library() -> ctypes.CDLL | None:
    """nvImageCodec's JPEG library; loaded if it is not yet. nvImageCodec gets the same one."""
    if platform.machine() != "x86_64":  # on other processors, libjpeg-turbo does not bypass the caches
        return None
    spec = find_spec("nvidia.nvimgcodec")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in Path(folder, "extensions").glob(_LIBRARY)]
    try:
        return ctypes.CDLL(str(files[0])) if len(files) == 1 else None
    except OSError:
        return None


def _slots(library: ctypes.CDLL, symbol: bytes) -> list[int]:
    """Addresses of the slots in which a loaded library holds the address of an imported function."""
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
    """Write a function's address into a slot; returns whether the slot can be written.

    One aligned store lets running threads see either the old or the new function. The dynamic linker has made the page
    read-only; it stays writable afterwards.
    """
    libc = ctypes.CDLL(None)
    page = ctypes.c_void_p(slot & -_PAGE)
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mprotect(page, ctypes.c_size_t(_PAGE), writable) != 0:
        return False
    ctypes.c_void_p.from_address(slot).value = value
    return True
