"""A convolution's last inputs with channels in groups, `[slots, groups, taps, n]` for `[slots, channels, taps]`.

A TPU lays each slot of the former out as whole register tiles of channels, one behind another, where it can; the latter
it lays out by what pads least, and a row's inputs lie in pieces.
"""

from typing import Any

LANES, SUBLANES = 128, 8  # channels of a register's row; its rows


def group_channels(channels: int, taps: int) -> tuple[int, ...]:
    """Returns the shape of a row's last inputs as a TPU keeps them best: in groups of 128 channels if whole tiles come
    of these, else without.

    >>> group_channels(8192, 3), group_channels(24, 3)
    ((64, 3, 128), (24, 3))
    """
    if channels % (LANES * SUBLANES) or not has_channel_tiles(taps):
        return channels, taps
    return channels // LANES, taps, LANES


def has_channel_tiles(taps: int) -> bool:
    """Tells whether XLA's tiles of a TPU are of channels: of a power of two of inputs, or of eights, it makes tiles."""
    return bool(taps & (taps - 1)) and bool(taps % SUBLANES)


def join_groups(x: Any) -> Any:
    """Returns last inputs `[n, groups, taps, m]`, of NumPy or JAX, as `[n, channels, taps]`; these as they are."""
    return x if x.ndim == 3 else x.swapaxes(2, 3).reshape(x.shape[0], x.shape[1] * x.shape[3], x.shape[2])


def split_groups(x: Any, shape: tuple[int, ...]) -> Any:
    """Returns last inputs `[n, channels, taps]`, of NumPy or JAX, as `[n, *shape]`: the same, or in groups."""
    return x if len(shape) == 2 else x.reshape(x.shape[0], shape[0], shape[2], shape[1]).swapaxes(2, 3)
