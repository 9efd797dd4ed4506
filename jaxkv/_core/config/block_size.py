"""How many tokens a block holds where nobody says it: what the kernels of a platform read."""

from collections.abc import Iterable

from pallas_kernels.common.quantization import StorageFormat

BLOCK_SIZE = 16  # tokens: few are wasted, and kernels read keys and values that are not quantised
# What the stored head_dim is rounded up to, by platform: with less, XLA for TPUs copies the whole pool at every step,
# and the kernels for GPUs refuse it.
HEAD_DIM_MULTIPLES = {"tpu": 128, "gpu": 64}
# Of quantised kinds: a block's scales fill the lanes of a TPU's register, or one bulk copy of a GPU.
QUANTIZED_BLOCK_SIZES = {"tpu": 128, "gpu": 32}
# Entries of block tables that fit a TPU's scalar memory, beside the work list of a step.
TABLE_ENTRIES = {"tpu": 200_000}


def choose_block_size(
    platform: str | None, kinds: Iterable[StorageFormat], max_seqs: int, max_seq_len: int
) -> int:  # fmt: skip
    """Return the tokens of a block with which the kernels of a platform take a cache.

    Args:
      platform: "tpu" or "gpu"; None, or one without kernels: it is 16.
      kinds: how the layers are stored.
      max_seqs: lines of the largest block table: rows, or as many for each head of a layer that evicts by heads.

    >>> from jaxkv._core.config.layer_config import kind_of
    >>> bfloat16, int8 = kind_of("bfloat16", "dtype"), kind_of("int8", "dtype")
    >>> choose_block_size("tpu", [int8], 8, 4096), choose_block_size("gpu", [int8], 8, 4096)
    (128, 32)
    >>> choose_block_size("tpu", [bfloat16], 256, 32768), choose_block_size(None, [int8], 8, 4096)
    (64, 16)
    """
    is_quantized = any(kind.is_quantized for kind in kinds)
    size = QUANTIZED_BLOCK_SIZES.get(platform or "", BLOCK_SIZE) if is_quantized else BLOCK_SIZE
    most = TABLE_ENTRIES.get(platform or "")
    while most is not None and max_seqs * -(-max_seq_len // size) > most and size < max_seq_len:
        size *= 2
    return size


def kernel_platform(head_dim_multiple: int) -> str | None:
    """Return the platform whose kernels read such heads, or None.

    It is the one at hand where nobody said what to round up to, and else the one that it was said for.

    >>> kernel_platform(128), kernel_platform(64), kernel_platform(1)
    ('tpu', 'gpu', None)
    """
    return next((name for name, least in HEAD_DIM_MULTIPLES.items() if head_dim_multiple % least == 0), None)
