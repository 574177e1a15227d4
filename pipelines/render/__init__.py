"""Makes the pixels of views by DALI, Numba or Triton."""
