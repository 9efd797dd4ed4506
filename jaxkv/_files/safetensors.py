"""Reads and writes safetensors files with NumPy alone.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian; a JSON header
that gives each tensor's dtype, shape and range of bytes; then those bytes, row-major and without gaps.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxkv._core.state.errors import DamagedFile
from jaxkv._files.atomic import replacing

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
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
MAX_HEADER = 100_000_000  # bytes; the reference implementation's own limit
MAX_SIZE, MAX_RANK = 2**62, 16
WAY_OUT = "Get a whole copy of it."

PYTORCH = {"format": "pt"}  # transformers requires this before it reads a file


class Contents(NamedTuple):
    """The contents of a file."""

    tensors: dict[str, np.ndarray]  # in the file's order
    metadata: dict[str, str]
    header: bytes  # the JSON text


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns a file's tensors as read-only views of the mapped file: nothing is loaded before it is used.

    Raises:
      DamagedFile, a ValueError: the file is truncated, or does not match its header.
    """
    return read_all(path).tensors


def read_all(path: pathlib.Path) -> Contents:
    """Reads a file as `read` does, and also returns the header's text and metadata."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if size < 8 or start > size:
            raise DamagedFile(
                f"{path} is truncated: its header ends at byte {start}, but the file has {size} bytes. {WAY_OUT}"
            )
        if start > MAX_HEADER:
            raise DamagedFile(f"{path} is no safetensors file: its header would have {start - 8} bytes. {WAY_OUT}")
        text = file.read(start - 8)
        try:
            header = json.loads(text)
            metadata = {str(name): str(value) for name, value in header.get("__metadata__", {}).items()}
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            places = {name: _place(entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedFile(
                f"{path} is no safetensors file: its header cannot be read ({error}). {WAY_OUT}"
            ) from error

    end = 0
    places = dict(sorted(places.items(), key=lambda item: item[1][2:]))
    for name, (dtype, shape, begin, stop) in places.items():
        if begin != end or stop - begin != dtype.itemsize * math.prod(shape):
            raise DamagedFile(
                f"{path} is damaged: tensor {name}, {dtype}{list(shape)}, should take bytes {end} to "
                f"{end + dtype.itemsize * math.prod(shape)}, but its header says {begin} to {stop}. "
                f"{WAY_OUT}"
            )
        end = stop
    if start + end != size:
        what = "truncated" if start + end > size else "damaged"
        raise DamagedFile(
            f"{path} is {what}: its header describes {start + end} bytes, but the file has {size}. {WAY_OUT}"
        )

    data = np.memmap(path, np.uint8, mode="r", offset=start) if end else np.zeros(0, np.uint8)
    try:
        tensors = {
            name: np.asarray(data[begin:stop]).view(dtype).reshape(shape)
            for name, (dtype, shape, begin, stop) in places.items()
        }
    except ValueError as error:  # such as an empty tensor with axes beyond the address space
        raise DamagedFile(f"{path} has a tensor that cannot be made ({error}). {WAY_OUT}") from error
    return Contents(tensors, metadata, text)


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] = PYTORCH) -> None:
    """Saves tensors by name. The file is replaced atomically, or stays unchanged.

    Raises:
      ValueError: the format has no name for a dtype.
    """
    text = header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)
    with replacing(path) as file:
        file.write(preamble(text))
        for tensor in tensors.values():
            file.write(as_bytes(tensor))


def header(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the header's text for tensors of these dtypes and shapes in this order."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in names:
            raise ValueError(f"safetensors has no dtype {dtype}, which {name} has: convert it first.")
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        fields[name] = dict(dtype=names[dtype], shape=shape, data_offsets=(begin, end))
    text = json.dumps(fields).encode()
    return text + b" " * (-len(text) % 8)  # tensors start aligned


def preamble(header: bytes) -> bytes:
    """Returns the start of a file: the header's length, then the header."""
    return len(header).to_bytes(8, "little") + header


def as_bytes(tensor: np.ndarray) -> np.ndarray:
    """Returns a tensor's bytes, `u8[n]`, row-major; a view if the tensor is contiguous."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def _place(entry: dict) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Returns dtype, shape, first byte and end byte (exclusive) of an entry of the header."""
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    begin, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if len(shape) > MAX_RANK or not all(type(n) is int and 0 <= n < MAX_SIZE for n in (begin, stop, *shape)):
        raise ValueError(f"sizes must be whole numbers from 0 to {MAX_SIZE}, of {MAX_RANK} axes at the most")
    return np.dtype(DTYPES[entry["dtype"]]), shape, begin, stop
