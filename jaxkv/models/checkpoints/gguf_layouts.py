"""Tensors of GGUF files that are laid out as Hugging Face's checkpoints have them, when they are read."""

import dataclasses
from typing import Any

import numpy as np

from jaxkv._files.gguf import StoredTensor


@dataclasses.dataclass(frozen=True)
class Converted:
    """A tensor that is dequantized, and laid out as a Hugging Face checkpoint has it, when it is read.

    Fields:
      heads: the number of heads whose entries RoPE pairs in another order; 0: they stay.
      offset: what is subtracted.
    """

    stored: StoredTensor
    heads: int = 0
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        dtype = np.dtype(dtype or self.dtype)
        if self.offset:
            return (self.stored.read(np.dtype(np.float32)) - np.float32(self.offset)).astype(dtype)
        x = self.stored.read(dtype)
        if self.heads:  # pairs (2 i, 2 i + 1) become (i, i + D/2)
            x = np.swapaxes(x.reshape(self.heads, -1, 2, *x.shape[1:]), 1, 2).reshape(x.shape)
        return x


@dataclasses.dataclass(frozen=True)
class ByInputs:
    """Matrices of experts `[experts, inputs, outputs]`, which are stored by outputs, or their biases; with several
    parts, an output of each in turn."""

    parts: tuple[StoredTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        count, outputs, *inputs = self.parts[0].shape
        return (count, *inputs, outputs * len(self.parts))

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        read = [np.moveaxis(part.read(np.dtype(dtype or self.dtype)), 1, -1) for part in self.parts]
        return np.stack(read, axis=-1).reshape(self.shape)
