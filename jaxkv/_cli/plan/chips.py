"""Devices by chip name, with the makers' own figures: every time computed from them is a lower bound."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxkv._core.config.kv_packing import can_hold, can_share_bytes
from jaxkv._core.config.validation import show
from pallas_kernels.common.quantization import FORMATS


@dataclasses.dataclass(frozen=True)
class Link:
    """An interconnect of devices, and the bytes/s that each device can send over all its links at once."""

    name: str
    rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A device as JAX counts them.

    Fields:
      platform: "tpu" or "gpu", which determines the padding of head_dim.
      memory: bytes. memory_rate: bytes/s read from memory.
      peak: operations/s of the matrix units in bfloat16, without sparsity; additions count like multiplications.
      host: devices of each host, where there are several.
      link: between the `reach` devices of a pod or host; network: between pods or hosts.
      source: origin of the figures.
    """

    name: str
    platform: str
    memory: int
    memory_rate: float
    peak: float
    host: int
    link: Link
    reach: int
    network: Link
    source: str


# Makers add both directions of a link; half of that is sent. Networks are given a host or pod, and divided here.
NVLINK, INFINIBAND = Link("NVLink 4", 450e9), Link("InfiniBand NDR", 50e9)  # 900 GB/s both ways; 400 Gb/s for each GPU
NVLINK_5 = Link("NVLink 5", 900e9)
CHIPS = {
    chip.name: chip
    for chip in (
        # 400 GB/s of ICI both ways; 6.4 Tb/s of network for a pod.
        Chip(name="v5e", platform="tpu", memory=16 * 10**9, memory_rate=819e9, peak=197e12, link=Link("ICI", 200e9),
             host=4, reach=256, network=Link("data centre network", 3.125e9), source="cloud.google.com/tpu/docs/v5e"),
        # 800 GB/s of ICI both ways; 100 Gb/s of network a chip.
        Chip(name="v6e", platform="tpu", memory=32 * 10**9, memory_rate=1638e9, peak=918e12, link=Link("ICI", 400e9),
             host=4, reach=256, network=Link("data centre network", 12.5e9),
             source="cloud.google.com/tpu/docs/v6e and /tpu7x"),
        # A chip is two devices, each with half of 192 GiB, 7,380 GB/s, 2,307 TFLOP/s, 1,200 GB/s both ways, 100 Gb/s.
        Chip(name="tpu7x", platform="tpu", memory=96 * 2**30, memory_rate=3690e9, peak=1153.5e12, host=8,
             link=Link("ICI", 300e9), reach=2 * 9216, network=Link("data centre network", 6.25e9),
             source="cloud.google.com/tpu/docs/tpu7x, half a chip"),
        Chip(name="h100", platform="gpu", memory=80 * 10**9, memory_rate=3.35e12, peak=989e12, link=NVLINK, reach=8,
             host=8, network=INFINIBAND, source="NVIDIA's data sheets of the H100 SXM and the DGX H100"),
        Chip(name="h200", platform="gpu", memory=141 * 10**9, memory_rate=4.8e12, peak=989e12, link=NVLINK, reach=8,
             host=8, network=INFINIBAND, source="NVIDIA's data sheets of the H200 SXM and the DGX H200"),
        # Of eight: 1,440 GB, 64 TB/s, 36 PFLOP/s in float8 without sparsity, 14.4 TB/s of NVLink both ways.
        Chip(name="b200", platform="gpu", memory=180 * 10**9, memory_rate=8e12, peak=2250e12, link=NVLINK_5, reach=8,
             host=8, network=INFINIBAND, source="NVIDIA's data sheet of the DGX B200, an eighth"),
    )
}  # fmt: skip


# The formats that each platform's kernels read, and the tokens that their blocks have multiples of. To ask the kernels
# would import their compilers, which takes longer than all the rest; a test asks them.
QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2", "int4", "k5v3")
KERNEL_BLOCKS: dict[str, dict[str, int]] = {
    "gpu": {"bfloat16": 8, "float16": 8} | dict.fromkeys(QUANTIZED, 32),
    "tpu": {"bfloat16": 16, "float32": 8} | dict.fromkeys(QUANTIZED, 128),
}


def reads(platform: str, layer: Any, name: str, block_size: int | None = None) -> bool:
    """Tells whether a platform's kernels read a layer in a format, and in blocks of a size; None: of a fitting one."""
    if (least := KERNEL_BLOCKS[platform].get(name)) is None or layer.count_entries(block_size or 0) % least:
        return False
    format = FORMATS[name]
    if not can_hold(layer, format):
        return False
    if platform == "gpu" and format.is_quantized and layer.row_rank is not None:
        return False
    return format.group_size is None or reads_groups(platform, layer, format)


def reads_groups(platform: str, layer: Any, format: Any) -> bool:
    """Tells whether a platform's kernels read a layer in a format whose scales are of groups of numbers."""
    if platform == "gpu":
        return layer.row_rank is None and layer.head_dim % 16 == 0 and layer.head_dim <= 256
    return can_share_bytes(layer, format)


def has_kernel(chip: Chip | None, layers: Iterable[Any], name: str, block_size: int | None = None) -> bool:
    """Tells whether a chip's kernels read all attention layers in a format, as `reads` does; True without a chip."""
    attending = (layer for layer in layers if not layer.is_recurrent)
    return chip is None or all(reads(chip.platform, layer, name, block_size) for layer in attending)


def chip_named(name: str) -> Chip:
    """Returns a chip by name. Raises ValueError for an unknown chip.

    >>> chip_named("h200").link.name
    'NVLink 4'
    """
    if name.lower() not in CHIPS:
        raise ValueError(
            f"--chip must be one of {', '.join(CHIPS)}, not {show(name)}: of another, say what each device has with "
            "--memory."
        )
    return CHIPS[name.lower()]
