"""Dequantizes the weight formats of checkpoints: MXFP4, block-scaled float8, and both in one (DeepSeek V4).

Each quantized weight is dequantized when it is read, so that a large model is never in memory twice.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxkv._core.config.validation import integer

MXFP4, FP8 = "mxfp4", "fp8"
# Behind the refusal of any other format.
GIVE_OTHERS = "give a folder with weights of 16 or 32 bits, in MXFP4 or in blocks of float8, or a GGUF file"
# Buffers in old checkpoints that follow from the config.
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
# The values of the 4-bit codes, with a sign bit: OCP Microscaling Formats, https://arxiv.org/abs/2310.10537.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])


@dataclasses.dataclass(frozen=True)
class Quantised:
    """A quantized tensor that is dequantized on access."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read().astype(dtype or self.dtype, copy=False)


def dequantize(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a checkpoint's tensors with quantized ones dequantized, and without buffers.

    Args:
      config: the checkpoint's config.json.
      where: name of the config in errors.
    """
    kept = {name: tensor for name, tensor in tensors.items() if not BUFFERS.fullmatch(name)}
    return _fp8(_fp4(_mxfp4(kept)), config, where)


def _mxfp4(tensors: dict[str, Any]) -> dict[str, Any]:
    """Dequantizes GPT-OSS `[E, out, in]`: blocks `u8[E, out, in / 32, 16]`, two values a byte, scales powers of 2."""
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors[f"{name}_blocks"], tensors.get(f"{name}_scales")
        if scales is None or blocks.ndim < 2 or blocks.dtype != np.uint8 or blocks.shape[:-1] != scales.shape:
            continue  # left as they are, and refused by name later
        del tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        *outer, rows, groups, size = blocks.shape

        def read(blocks: np.ndarray = blocks, scales: np.ndarray = scales) -> np.ndarray:
            numbers = read_fp4(blocks)
            numbers = np.ldexp(numbers, scales[..., None].astype(np.int32) - 127)
            return np.swapaxes(numbers.reshape(*blocks.shape[:-2], -1), -1, -2)

        tensors[name] = Quantised((*outer, groups * size * 2, rows), read)
    return tensors


def read_fp4(codes: np.ndarray) -> np.ndarray:
    """Returns the numbers `f32[..., 2 n]` of bytes `u8[..., n]`, the lower four bits of each first."""
    return np.stack([FP4[codes & 15], FP4[codes >> 4]], axis=-1).reshape(*codes.shape[:-1], -1)


def _fp4(tensors: dict[str, Any]) -> dict[str, Any]:
    """Dequantizes matrices of 4-bit floats, two to a byte, with a scale for each of the blocks of a row, beside those
    of 8 bits (the experts of DeepSeek V4)."""
    for name in [name.removesuffix("_scale_inv") for name in tensors if name.endswith("_scale_inv")]:
        weight, scales = tensors.get(name), tensors[f"{name}_scale_inv"]
        if weight is None or weight.dtype != np.int8 or weight.ndim != 2 or scales.ndim != 2:
            continue
        rows, columns = weight.shape[0], 2 * weight.shape[1]
        if scales.shape[0] != rows or columns % max(scales.shape[1], 1):
            raise ValueError(
                f"{name}_scale_inv has shape {list(scales.shape)}, not one scale for each of {rows} rows' blocks of "
                f"{columns} numbers of four bits."
            )
        del tensors[f"{name}_scale_inv"]

        def read(weight: np.ndarray = weight, scales: np.ndarray = scales) -> np.ndarray:
            numbers = read_fp4(weight.view(np.uint8)).reshape(*scales.shape, -1)
            return (numbers * scales.astype(np.float32)[..., None]).reshape(weight.shape[0], -1)

        tensors[name] = Quantised((rows, columns), read)
    return tensors


def _fp8(tensors: dict[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Dequantizes 8-bit floats: of matrices with a scale for each of their blocks (DeepSeek V3), or, where the size of
    a block is null, with a scale for a tensor, or for each of its experts and of their halves (Ministral 3)."""
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, Mapping) else {}
    sizes = quantization.get("weight_block_size", [128, 128])
    names = [name.removesuffix("_scale_inv") for name in tensors if name.endswith("_scale_inv")]
    if names and sizes is not None and (not isinstance(sizes, list) or len(sizes) != 2):
        raise ValueError(f"weight_block_size in {where} must be two sizes, not {sizes!r}.")
    if quantization.get("activation_scheme") == "static":  # activations stay as they are
        tensors = {name: x for name, x in tensors.items() if not name.endswith("activation_scale")}
    for name in names:
        weight, scales = tensors.get(name), tensors[f"{name}_scale_inv"]
        if weight is None or weight.ndim < 2 or (sizes is not None and weight.ndim != 2):
            continue
        block = [integer(f"weight_block_size in {where}", size, least=1) for size in sizes or ()]
        wanted = scales.shape
        if block:
            wanted = (-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1]))
        if scales.shape != wanted:
            raise ValueError(
                f"{name}_scale_inv has shape {list(scales.shape)}, not {list(wanted)}: one scale for each block of "
                f"{block[0]} x {block[1]} of {list(weight.shape)}."
            )
        if not block and scales.ndim not in (0, weight.ndim):
            raise ValueError(f"{name}_scale_inv has shape {list(scales.shape)}, not one scale of {list(weight.shape)}.")
        del tensors[f"{name}_scale_inv"]

        def read(weight: np.ndarray = weight, scales: np.ndarray = scales, block: list[int] = block) -> np.ndarray:
            scale = scales.astype(np.float32)
            for axis in range(-scale.ndim, 0):
                size = block[axis] if block else -(-weight.shape[axis] // scale.shape[axis])
                scale = np.repeat(scale, size, axis).take(np.arange(weight.shape[axis]), axis)
            return weight.astype(np.float32) * scale

        tensors[name] = Quantised(weight.shape, read)
    return tensors
