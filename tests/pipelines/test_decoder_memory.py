"""The decoder's temporary images begin where rows are stored into the caches."""

import ctypes
import os
import subprocess
import sys

import pytest

from pipelines import decoder_memory
from pipelines.decoder_memory import _jpeg_library, _slots, keep_decoded_in_cache, new_array
from tests.pipelines.decoder_fuzz import decode, good_files

LIBC = ctypes.CDLL(None)
LIBC.free.argtypes = [ctypes.c_size_t]
NEW_ARRAY = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)(new_array.address)

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="only x86 stores past the caches")


ODD_STEPS = """
import ctypes
import numpy as np
from pipelines.decoder_memory import LEAST_BYTES, new_array
libc = ctypes.CDLL(None)
libc.free.argtypes = [ctypes.c_size_t]
take = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)(new_array.address)
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


def test_large_arrays_begin_at_odd_steps_whatever_is_taken_and_given_back() -> None:
    """In a process of its own: what earlier tests have left in the heap may offer nothing but even steps."""
    run = subprocess.run([sys.executable, "-c", ODD_STEPS], capture_output=True, text=True, check=True)
    assert float(run.stdout) > 0.95


def test_small_arrays_stay_where_malloc_puts_them() -> None:
    starts = [NEW_ARRAY(100) for _ in range(64)]
    assert {start % 32 for start in starts} <= {0, 16}
    for start in starts:
        LIBC.free(start)


def test_the_decoder_takes_it_and_decodes_as_before() -> None:
    assert keep_decoded_in_cache()
    assert keep_decoded_in_cache()
    library = _jpeg_library()
    assert library is not None
    held = [ctypes.c_size_t.from_address(slot).value for slot in _slots(library, b"_Znam")]
    assert held
    assert set(held) == {new_array.address}
    assert decode([good_files()["jpeg one colour"]] * 4)


def test_nothing_is_touched_where_the_library_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _slots(ctypes.CDLL(None), b"_Znam") == []
    monkeypatch.setattr(decoder_memory, "find_spec", lambda name: None)
    assert not keep_decoded_in_cache()


def test_a_table_that_may_not_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_memory, "_write_pointer", lambda slot, value: False)
    assert not keep_decoded_in_cache()
