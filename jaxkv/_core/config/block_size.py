"""The default block size: the one that the kernels of a platform read."""

from collections.abc import Iterable

from pallas_kernels.common.quantization import StorageFormat

BLOCK_SIZE = 16  # tokens: wastes few, and kernels read it in formats that are not quantized
# The multiple that the stored head_dim is rounded up to, by platform: with a smaller one XLA for TPUs copies the whole
# pool at every step, and the GPU kernels refuse the pool.
HEAD_DIM_MULTIPLES = {"tpu": 128, "gpu": 64}
# For quantized formats: a block's scales fill the lanes of a TPU's register, or one bulk copy of a GPU.
QUANTIZED_BLOCK_SIZES = {"tpu": 128, "gpu": 32}
# Entries of block tables that fit a TPU's scalar memory, beside the work list of a step.
TABLE_ENTRIES = {"tpu": 200_000}


def choose_block_size(platform: str | None, kinds: Iterable[StorageFormat], max_seqs: int, max_seq_len: int) -> int:
    """Returns the tokens of a block that the kernels of a platform read.

    Args:
      platform: "tpu" or "gpu"; None or a platform without kernels gives 16.
      kinds: storage formats of the layers.
      max_seqs: rows of the largest block table; times K if a layer evicts by heads.

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
    """Returns the platform whose kernels read heads of this multiple, or None.

    The default multiple names the current platform.

    >>> kernel_platform(128), kernel_platform(64), kernel_platform(1)
    ('tpu', 'gpu', None)
    """
    return next((name for name, least in HEAD_DIM_MULTIPLES.items() if head_dim_multiple % least == 0), None)
