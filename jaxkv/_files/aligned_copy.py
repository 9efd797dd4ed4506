"""Copies NumPy arrays to where JAX uses them in place on a CPU: it copies those that do not begin at its alignment."""

import numpy as np

ALIGNMENT = 64  # bytes


def copy_aligned(x: np.ndarray) -> np.ndarray:
    """Returns a copy that begins at a multiple of `ALIGNMENT`."""
    raw = np.empty(x.nbytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    out = raw[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out
