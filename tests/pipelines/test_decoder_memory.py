"""The decoder's temporary images begin where rows are stored into the caches."""

import ctypes
import os
import subprocess
import sys

import pytest

from machine import decoder_memory
from machine.decoder_memory import LEAST_BYTES, _jpeg_library, _slots, keep_decoded_in_cache, new_array
from tests.pipelines.decoder_fuzz import decode, good_files

LIBC = ctypes.CDLL(None)
LIBC.free.argtypes = [ctypes.c_size_t]
ASKED = list[int]()
ALLOCATOR = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)


def _plain(size: int) -> int:
    """Stands in for the library's own operator."""
    ASKED.append(size)
    return 0xAFFE


PLAIN = ALLOCATOR(_plain)
NEW_ARRAY = ALLOCATOR(new_array(ctypes.cast(PLAIN, ctypes.c_void_p).value or 0))

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="only x86 stores past the caches")


ODD_STEPS = """
import ctypes
import numpy as np
from machine.decoder_memory import LEAST_BYTES, new_array
libc = ctypes.CDLL(None)
libc.free.argtypes = [ctypes.c_size_t]
take = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)(new_array(0))
rng, taken, odd, count = np.random.default_rng(0), {}, 0, 4000
for _ in range(count):
    size = int(rng.integers(LEAST_BYTES, 400_000))
    start = take(size)
    odd += start % 32 == 16
    ctypes.memset(start, 0xA5, size)
    assert all(start + size <= other or other + length <= start for other, length in taken.items()), "overlap"
    taken[start] = size
    while len(taken) > rng.integers(1, 9):
        gone = list(taken)[rng.integers(len(taken))]
        del taken[gone]
        libc.free(gone)
print(odd / count)
"""


def test_large_arrays_begin_at_odd_multiples_of_16_bytes() -> None:
    """In a process of its own: what earlier tests have left in the heap may offer nothing but even steps."""
    run = subprocess.run([sys.executable, "-c", ODD_STEPS], capture_output=True, text=True, check=True)
    assert float(run.stdout) > 0.95


@pytest.mark.parametrize("size", [0, 100, LEAST_BYTES - 1, 2**46, 2**63, 2**64 - 4])
def test_small_arrays_and_lack_of_memory_use_the_librarys_own_operator(size: int) -> None:
    """Which throws where there is no memory, as a caller of `new[]` relies on."""
    ASKED.clear()
    assert NEW_ARRAY(size) == 0xAFFE
    assert [size] == ASKED


LITTLE_MEMORY = """
import resource
import cv2, numpy as np, psutil
from errors import UserError
from machine.decoder_memory import keep_decoded_in_cache
from tests.pipelines.decoder_fuzz import decode, good_files
assert keep_decoded_in_cache()
large = cv2.imencode(".jpg", np.zeros((9000, 9000, 3), np.uint8))[1].tobytes()  # 243 MB, twice while it is copied
assert decode([good_files()["jpeg one colour"]])
said = []
for mib in (200, 300, 350, 400):
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20, -1))
    try:
        said.append(str(decode([large])))
    except UserError as error:
        said.append(str(error))
assert said[0].startswith("out of memory"), said
assert {text.split(":")[0] for text in said} <= {"out of memory", "False", "True"}, said
"""


def test_an_image_without_memory_is_an_error_and_not_a_crash() -> None:
    run = subprocess.run([sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_decoder_uses_the_operator_and_decodes_the_same_pixels() -> None:
    assert keep_decoded_in_cache()
    assert keep_decoded_in_cache()
    library = _jpeg_library()
    assert library is not None
    held = [ctypes.c_size_t.from_address(slot).value for slot in _slots(library, b"_Znam")]
    assert held
    assert set(held) == {new_array(ctypes.cast(library._Znam, ctypes.c_void_p).value or 0)}
    assert decode([good_files()["jpeg one colour"]] * 4)


def test_another_library_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _slots(ctypes.CDLL(None), b"_Znam") == []
    monkeypatch.setattr(decoder_memory, "find_spec", lambda name: None)
    assert not keep_decoded_in_cache()


def test_a_table_that_may_not_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_memory, "_write_pointer", lambda slot, value: False)
    assert not keep_decoded_in_cache()
