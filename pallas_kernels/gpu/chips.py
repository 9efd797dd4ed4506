"""The GPUs that the kernels are for: what a program traced now may use of its chip."""

import dataclasses

import jax

from pallas_kernels.common.platforms import find_described_device, read_name

# Compute capability -> bytes of shared memory that a thread block may have. All of them have the bulk copies and
# barriers that the kernels are made of, which Ampere and Ada (8.0 to 8.9) lack.
SHARED_MEMORY = {
    "9.0": 232_448,  # Hopper
    "10.0": 232_448,  # Blackwell: B200, GB200
    "10.3": 232_448,  # B300, GB300
    "12.0": 101_376,  # GeForce RTX 50, RTX PRO
    "12.1": 101_376,  # GB10
}
# What names of devices say of a capability, for a program that is compiled where there is no such device.
CAPABILITIES = {
    "H100": "9.0", "H200": "9.0", "H800": "9.0", "H20": "9.0", "B200": "10.0", "B300": "10.3",
    "GeForce RTX 50": "12.0", "RTX PRO": "12.0", "GB10": "12.1",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GpuChip:
    name: str
    num_cores: int  # multiprocessors: chips of one name may differ in that
    capability: str | None = "9.0"  # None: its name does not say

    @property
    def is_known(self) -> bool:
        """Whether the kernels run on it."""
        return self.capability in SHARED_MEMORY

    @property
    def shared_memory(self) -> int:
        """Bytes that a thread block may have, of a chip that is known."""
        assert self.capability is not None
        return SHARED_MEMORY[self.capability]

    @property
    def has_wgmma(self) -> bool:
        """Whether a warpgroup multiplies what lies in shared memory, as on Hopper alone: see `products`."""
        return self.capability == "9.0"


H200 = GpuChip("NVIDIA H200", 132)


def find_chip() -> GpuChip:
    """Returns the chip that a program traced now is for: the mesh's, else the one at hand; an H200 if there is none."""
    device = find_described_device()
    if device is not None and read_name(device.platform) == "cuda" and device.num_cores:
        here = _find_chip_at_hand()
        if here is not None and here.name == device.device_kind:
            return here
        named = (capability for name, capability in CAPABILITIES.items() if name in device.device_kind)
        return GpuChip(device.device_kind, device.num_cores, next(named, None))
    return _find_chip_at_hand() or H200


def _find_chip_at_hand() -> GpuChip | None:
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None) or H200.capability
    return GpuChip(device.device_kind, device.core_count, capability)
