"""Reading and writing safetensors files with NumPy alone.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian; a JSON header
that gives each tensor's dtype, shape and range of bytes; then those bytes, row-major and without gaps.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "U64": np.uint64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
MAX_HEADER = 100_000_000  # bytes; the reference implementation's own limit


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a file, as read-only views of the file itself: nothing is loaded before it is used.

    Raises:
      ValueError: the file is truncated or its header does not describe it; the sentence says what is wrong.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if size < 8 or start > size:
            raise ValueError(f"{path} is truncated: its header ends at byte {start}, but the file has {size} bytes.")
        if start > MAX_HEADER:
            raise ValueError(f"{path} is no safetensors file: its header would have {start - 8} bytes.")
        try:
            header = json.loads(file.read(start - 8))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            places = {name: _place(entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no safetensors file: its header cannot be read ({error}).") from error

    end = 0
    for name, (dtype, shape, begin, stop) in sorted(places.items(), key=lambda item: item[1][2:]):
        if begin != end or stop - begin != dtype.itemsize * math.prod(shape):
            raise ValueError(
                f"{path} is damaged: tensor {name}, {dtype}{list(shape)}, should take bytes {end} to "
                f"{end + dtype.itemsize * math.prod(shape)}, but its header says {begin} to {stop}."
            )
        end = stop
    if start + end != size:
        what = "truncated" if start + end > size else "damaged"
        raise ValueError(f"{path} is {what}: its header describes {start + end} bytes, but the file has {size}.")

    data = np.memmap(path, np.uint8, mode="r", offset=start) if end else np.zeros(0, np.uint8)
    return {
        name: np.asarray(data[begin:stop]).view(dtype).reshape(shape)
        for name, (dtype, shape, begin, stop) in places.items()
    }


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Save tensors by name.

    Raises:
      ValueError: a dtype that the format has no name for.
    """
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers asks for before it reads a file
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise ValueError(f"safetensors has no dtype {tensor.dtype}, which {name} has: convert it first.")
        header[name] = dict(dtype=names[tensor.dtype], shape=tensor.shape, data_offsets=(end, end + tensor.nbytes))
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def _place(entry: dict) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """dtype, shape, first byte and the one after the last, of one entry of the header."""
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    begin, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (begin, stop, *shape)):
        raise ValueError("sizes must be whole numbers from 0")
    return np.dtype(DTYPES[entry["dtype"]]), shape, begin, stop
