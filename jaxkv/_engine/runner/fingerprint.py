"""Makes an engine's `PrefixCache`, keyed by a fingerprint of its model."""

import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import flag, real
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache


def make_prefix(
    model: Any,
    config: CacheConfig,
    prefix_cache: Any,
    spill_bytes: Any,
    disk: Any,
    disk_bytes: Any,
    snapshot_bytes: Any = None,
) -> PrefixCache | None:
    """Makes the `PrefixCache` that an engine's options ask for. Raises ValueError for invalid options."""
    spill_bytes = int(real("spill_bytes", spill_bytes, least=0))
    options = {"disk": disk, "disk_bytes": disk_bytes, "snapshot_bytes": snapshot_bytes}
    if not flag("prefix_cache", prefix_cache):
        for option, value in {**options, "spill_bytes": spill_bytes or None}.items():
            if value is not None:
                raise ValueError(f"{option}= is for a prefix cache: give prefix_cache=True, too, or leave it out.")
        return None
    name = None if disk is None else fingerprint(model)
    if disk is not None and name is None:
        raise ValueError(
            "disk= needs a model that is a pytree of its parameters, by which files tell its keys and values from "
            "another model's: this one has none that can be seen."
        )
    return PrefixCache(config, model=name, spill_bytes=spill_bytes, **options)


def fingerprint(model: Any) -> str | None:
    """Returns a fingerprint: equal in every process for models of equal parameters, structure and config, and for no
    others as far as their `repr` differs; None without parameters.

    It tells models apart, but is not secure against deliberate collisions.
    """
    leaves, structure = jax.tree.flatten(model)
    arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]
    others = [(i, type(x).__name__, x) for i, x in enumerate(leaves) if not isinstance(x, jax.Array | np.ndarray)]
    said = f"{type(model).__name__} {getattr(model, 'config', None)!r} {others!r} {structure}"
    # An object's address says nothing about it, and differs between processes.
    digest = hashlib.blake2b(re.sub(r" at 0x[0-9a-f]+", "", said).encode(), digest_size=16)
    numbers = [x for x in map(jnp.asarray, arrays) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    if not numbers:
        return None
    for x, mixed in zip(numbers, jax.device_get([_mix(x) for x in numbers]), strict=True):
        digest.update(f"{x.dtype}{x.shape}{mixed.tolist()}".encode())
    return digest.hexdigest()


@jax.jit
def _mix(x: jax.Array) -> jax.Array:
    """Returns `u32[2]`, a hash of all bits and their positions (the finaliser of MurmurHash3)."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    size = x.dtype.itemsize
    is_plain = x.dtype.name not in ("bool", "int4", "uint4", "int2", "uint2")
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * min(size, 4)}") if is_plain else x.astype(jnp.int8)
    bits = bits.reshape(-1).astype(jnp.uint32)
    place = jax.lax.iota(jnp.uint32, bits.shape[0])
    h = bits + place * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    h ^= h >> np.uint32(16)
    return jnp.stack([jnp.sum(h, dtype=jnp.uint32), jnp.sum(h * (place | np.uint32(1)), dtype=jnp.uint32)])
