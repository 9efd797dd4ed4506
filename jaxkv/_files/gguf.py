"""Reads GGUF files: the header with NumPy alone, tensors by the `gguf` package, which knows the quantized formats.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): a magic number, counts, named values, then name,
shape, format and offset of each tensor, then the tensors. Every count is compared with what the file and `MAX_HEADER`
leave before anything is made of it, so that a crafted file costs nothing.
"""

import concurrent.futures
import contextvars
import math
import mmap
import os
import pathlib
import re
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxkv._core.config.validation import show
from jaxkv._core.state.errors import DamagedFile

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_HEADER = 64 << 20  # bytes; a vocabulary of 262,144 tokens has 7 MiB
MAX_STRINGS = 1 << 21  # in arrays, all together
MAX_RANK, MAX_SIZE, MAX_NAME = 4, 2**48, 1 << 16
WAY_OUT = "Get a whole copy of it."
STRING, ARRAY = 8, 9
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens in tokenizer.ggml.token_type
NUMBERS = {
    0: np.uint8, 1: np.int8, 2: np.uint16, 3: np.int16, 4: np.uint32, 5: np.int32, 6: np.float32, 7: np.bool_,
    10: np.uint64, 11: np.int64, 12: np.float64,
}  # fmt: skip
FLOATS = {0: np.float32, 1: np.float16, 30: ml_dtypes.bfloat16}  # by GGML's number
SLICE = 1 << 18  # numbers dequantized at a time, by each of so many threads
THREADS = 4
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class StoredTensor(NamedTuple):
    """A tensor as it lies in a file.

    Fields:
      shape: axes in NumPy's order, of the numbers that it stands for.
      format: the format's number in GGML.
      data: its bytes, `u8[n]`: a view of the mapped file.
    """

    shape: tuple[int, ...]
    format: int
    data: np.ndarray

    def read(self, dtype: np.dtype | None = None) -> np.ndarray:
        """Returns the numbers, dequantized; a view if they are stored as floats of the wanted type.

        Args:
          dtype: the type to convert to; default: the stored one, float32 for what is quantized.

        Raises:
          ValueError: a format that the gguf package cannot dequantize.
        """
        if (stored := FLOATS.get(self.format)) is not None:
            return self.data.view(stored).reshape(self.shape).astype(dtype or stored, copy=False)
        gguf = import_gguf()
        format = gguf.GGMLQuantizationType(self.format)
        out = np.empty(math.prod(self.shape), dtype or np.float32)
        group, size = gguf.GGML_QUANT_SIZES[format]
        step = max(1, SLICE // group)

        def read_slice(first: int) -> None:
            encoded = self.data[first * size : (first + step) * size]
            out[first * group : (first + step) * group] = gguf.dequantize(encoded, format)

        # Slice by slice, for the package needs several times the memory of what it is given; NumPy lets threads pass.
        try:
            with concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
                slices = [  # each in the caller's context, which has its np.errstate
                    threads.submit(contextvars.copy_context().run, read_slice, first)
                    for first in range(0, len(self.data) // size, step)
                ]
            for done in slices:
                done.result()
        except NotImplementedError:
            raise ValueError(f"The gguf package cannot dequantize the format {format.name}.") from None
        return out.reshape(self.shape)

    def split(self) -> list["StoredTensor"]:
        """Returns the tensors along the first axis, which lie one after another."""
        parts = self.data.reshape(self.shape[0], -1)
        return [StoredTensor(self.shape[1:], self.format, part) for part in parts]

    @property
    def dtype(self) -> np.dtype:
        """What `read` returns by default."""
        return np.dtype(FLOATS.get(self.format, np.float32))


class GgufContents(NamedTuple):
    """The contents of a file, or of all files of a split model."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def import_gguf() -> Any:
    """Returns the gguf package. Raises ModuleNotFoundError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ModuleNotFoundError("Reading GGUF files needs the extra 'gguf': pip install 'jaxkv[gguf]'.") from None
    return gguf


def split_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files of a split model, given any of them; the file alone if it is whole.

    Raises:
      FileNotFoundError: one of them is missing.
    """
    found = SPLIT.fullmatch(path.name)
    if not found:
        return [path]
    count = int(found[3])
    if not 1 <= int(found[2]) <= count <= 4096:
        raise ValueError(f"{path} cannot be part {int(found[2])} of {count}.")
    files = [path.with_name(f"{found[1]}-{i:05d}-of-{found[3]}.gguf") for i in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FileNotFoundError(f"{path} is a part of {count}, but {', '.join(missing[:3])}{more} is not beside it.")
    return files


def read_metadata(path: pathlib.Path) -> dict[str, Any]:
    """Returns the named values of a model's file, of a split model's first: numbers, strings, arrays, lists of strings.

    Raises:
      DamagedFile, a ValueError: it is truncated, or no GGUF file.
    """
    return _Header(split_files(path)[0]).metadata


def read(path: pathlib.Path) -> GgufContents:
    """Reads a model, all parts of it if it is split; nothing of a tensor is loaded before it is used.

    Raises:
      DamagedFile, a ValueError: a file is truncated, or its header does not fit it.
      FileNotFoundError: a part is missing.
    """
    headers = [_Header(file) for file in split_files(path)]
    tensors: dict[str, StoredTensor] = {}
    for i, header in enumerate(headers):
        count = header.metadata.get("split.count", 1)
        if count != len(headers) or header.metadata.get("split.no", 0) != i:
            raise DamagedFile(
                f"{header.path} says that it is part {header.metadata.get('split.no', 0)}, counted from 0, of {count}, "
                f"but by its name it is part {i} of {len(headers)}: give split files the names they were made with."
            )
        if twice := tensors.keys() & (own := header.read_tensors()).keys():
            raise DamagedFile(f"{header.path} has {show(min(twice))}, which an earlier part has too. {WAY_OUT}")
        tensors |= own
    return GgufContents(headers[0].metadata, tensors)


class _Header:
    """The header of one file, read field by field from a mapped file.

    Fields:
      metadata: the named values.
      at: where the next field begins.
      left: how many strings may still be read.
    """

    def __init__(self, path: pathlib.Path):
        self.path, self.at, self.left = path, 0, MAX_STRINGS
        self.metadata: dict[str, Any] = {}
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise DamagedFile(f"{path} is no GGUF file: it does not begin with GGUF. {WAY_OUT}")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.at, self.end = 4, min(len(self.data), MAX_HEADER)
        version = self._number("I")
        if version not in VERSIONS:
            raise DamagedFile(
                f"{path} is a GGUF file of version {version}, which is not read: convert it to 3, little-endian."
            )
        self.num_tensors, count = self._number("Q"), self._number("Q")
        self._check_count("tensors", self.num_tensors, 24)
        self._check_count("values", count, 13)
        for _ in range(count):
            name = self._string(MAX_NAME)
            if name in self.metadata:
                raise DamagedFile(f"{path} has {show(name)} twice in its header. {WAY_OUT}")
            self.metadata[name] = self._value(name)

    def read_tensors(self) -> dict[str, StoredTensor]:
        """Returns the file's tensors; the values before them have been read."""
        formats = {int(t): size for t, size in import_gguf().GGML_QUANT_SIZES.items()}
        found: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
        for _ in range(self.num_tensors):
            name, rank = self._string(MAX_NAME), self._number("I")
            if not 1 <= rank <= MAX_RANK:
                raise DamagedFile(
                    f"{self.path} has a tensor {show(name)} of {rank} axes, not 1 to {MAX_RANK}. {WAY_OUT}"
                )
            shape = tuple(self._number("Q") for _ in range(rank))[::-1]
            format, begin = self._number("I"), self._number("Q")
            if name in found:
                raise DamagedFile(f"{self.path} has the tensor {show(name)} twice. {WAY_OUT}")
            if format not in formats:
                raise ValueError(
                    f"{self.path} has the tensor {show(name)} in the format {format} of GGML, which the gguf package "
                    "does not know: a newer version of the package may."
                )
            group, size = formats[format]
            if (
                not all(1 <= n < MAX_SIZE for n in shape)
                or (count := math.prod(shape)) >= MAX_SIZE
                or shape[-1] % group
            ):
                raise DamagedFile(
                    f"{self.path} has a tensor {show(name)} of {show(list(shape))}, in groups of {group}. {WAY_OUT}"
                )
            found[name] = shape, format, begin, begin + count // group * size
        return self._place(found)

    def _place(self, found: dict[str, tuple[tuple[int, ...], int, int, int]]) -> dict[str, StoredTensor]:
        """Returns tensors as views, given `(shape, format, begin, end)` of each, counted from where tensors begin."""
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align & (align - 1) or align > 1 << 20:
            raise DamagedFile(f"{self.path} has general.alignment {show(align)}, which is no power of 2. {WAY_OUT}")
        start, last = -(-self.at // align) * align, 0
        for name, (_, _, begin, end) in sorted(found.items(), key=lambda item: item[1][2]):
            if begin < last or begin % align:
                raise DamagedFile(f"{self.path} has the tensor {show(name)} inside another one. {WAY_OUT}")
            last = end
        if start + last > len(self.data):
            raise DamagedFile(
                f"{self.path} is truncated: its header describes {start + last} bytes, but it has {len(self.data)}. "
                f"{WAY_OUT}"
            )
        whole = np.frombuffer(self.data, np.uint8)
        return {
            name: StoredTensor(shape, format, whole[start + begin : start + end])
            for name, (shape, format, begin, end) in found.items()
        }

    def _take(self, size: int) -> int:
        """Moves behind so many bytes, and returns where they begin."""
        begin = self.at
        if size > self.end - begin:
            why = (
                "truncated"
                if self.end == len(self.data)
                else f"damaged, or its header has more than {MAX_HEADER} bytes"
            )
            raise DamagedFile(f"{self.path} is {why}: its header goes on behind byte {self.end}. {WAY_OUT}")
        self.at += size
        return begin

    def _number(self, code: str) -> int:
        return struct.unpack_from(f"<{code}", self.data, self._take(struct.calcsize(code)))[0]

    def _check_count(self, what: str, count: int, least: int) -> None:
        """Refuses a count of things of so many bytes at the least, for which the header has no room."""
        if count * least > self.end - self.at:
            raise DamagedFile(
                f"{self.path} is truncated or damaged: its header has no room for the {count} {what} in it. {WAY_OUT}"
            )

    def _string(self, most: int = MAX_HEADER) -> str:
        size = self._number("Q")
        if size > most:
            raise DamagedFile(
                f"{self.path} is truncated or damaged: its header claims a string of {size} bytes. {WAY_OUT}"
            )
        begin = self._take(size)
        return self.data[begin : begin + size].decode("utf-8", errors="replace")

    def _strings(self, count: int) -> list[str]:
        """Reads strings as `_string` does: a vocabulary has a hundred thousand of them."""
        data, at, end, read_size, found = self.data, self.at, self.end, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            if end - at < 8 or (size := read_size(data, at)[0]) > end - at - 8:
                break
            begin, at = at + 8, at + 8 + size
            found.append(data[begin:at].decode("utf-8", errors="replace"))
        self.at = at
        return found + [self._string() for _ in range(count - len(found))]  # where one does not fit, this says so

    def _value(self, name: str) -> Any:
        kind = self._number("I")
        if kind == STRING:
            return self._string()
        if kind in NUMBERS:
            dtype = np.dtype(NUMBERS[kind])
            return (
                np.frombuffer(self.data, dtype, 1, self._take(dtype.itemsize))[0].item() if kind != 6 else self._float()
            )
        if kind != ARRAY:
            raise DamagedFile(f"{self.path} has {show(name)} of a type {kind}, which GGUF does not have. {WAY_OUT}")
        kind, count = self._number("I"), self._number("Q")
        if kind in NUMBERS:
            dtype = np.dtype(NUMBERS[kind])
            self._check_count(f"numbers in {show(name)}", count, dtype.itemsize)
            return np.frombuffer(self.data, dtype, count, self._take(count * dtype.itemsize))
        if kind != STRING:  # arrays in arrays are allowed by the format, and no model has them
            raise DamagedFile(f"{self.path} has {show(name)}, an array of type {kind}: of numbers and strings only.")
        self._check_count(f"strings in {show(name)}", count, 8)
        self.left -= count
        if self.left < 0:
            raise DamagedFile(f"{self.path} has more than {MAX_STRINGS} strings in its header. {WAY_OUT}")
        return self._strings(count)

    def _float(self) -> float:
        """Returns a float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.frombuffer(self.data, np.float32, 1, self._take(4))[0]))
