"""What the pytrees of a cache say of themselves. Arrays may be traced, donated, or stand for gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DONATED = "donated: go on with the one that the step returned"


def is_donated(tree: Any) -> bool:
    """Tells whether any array of a pytree was donated, so that nothing can be read from it."""
    return any(map(_is_deleted, jax.tree.leaves(tree)))


def check_living(what: str, array: Any) -> None:
    """Raises ValueError if `array`, of the cache or layer that `what` names, was donated. Traced ones never are."""
    if _is_deleted(array):
        raise ValueError(f"This {what} was {DONATED}.")


def check_pools(what: str, pools: Any) -> None:
    """Raises ValueError if pools, of the cache or layer that `what` names, were donated with another cache.

    Functions that change only tables return a cache with the same pools: to donate that one deletes both.
    """
    first = next((pool for pool in pools if pool is not None), None)  # a donated cache has lost all of its pools
    if first is not None and _is_deleted(first.kv):
        raise ValueError(
            f"This {what} shares its pools with a cache that was {DONATED}. To keep both, copy one before: "
            "jax.tree.map(jnp.copy, cache)."
        )


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()


def read_integers(x: Any) -> np.ndarray | None:
    """Returns an array of integers on the host; None if its numbers are not known here."""
    if isinstance(x, jax.core.Tracer) or not hasattr(x, "__array__") or not jnp.issubdtype(x.dtype, jnp.integer):
        return None
    return np.asarray(x) if getattr(x, "is_fully_addressable", True) else None


def describe_array(x: Any) -> str:
    """Returns an array's dtype and shape: `bfloat16[17, 2, 8, 16, 128]`; of what is no array the type."""
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return type(x).__name__
    return f"{getattr(x.dtype, 'name', x.dtype)}{list(x.shape)}"


def describe_tables(tables: Any) -> str:
    """Returns the `repr` of `BlockTables`."""
    if is_donated(tables):
        return f"BlockTables({DONATED})"
    shape = getattr(tables.tables, "shape", None)
    if shape is None or len(shape) != 2:
        return f"BlockTables({describe_array(tables.tables)})"
    size = f"{shape[0]} rows of up to {shape[1]} blocks"
    free, lengths = read_integers(tables.num_free), read_integers(tables.lengths)
    if free is None or lengths is None:
        return f"BlockTables({size}, traced)"
    shown = ", ".join(map(str, lengths[:16].tolist())) + ", …" * (len(lengths) > 16)
    return f"BlockTables({size}, {int(free.sum())} of {tables.num_blocks} blocks free, lengths [{shown}])"


def describe_pool(pool: Any) -> str:
    """Returns the `repr` of a `Pool`."""
    if is_donated(pool):
        return f"Pool({DONATED})"
    arrays = dict(zip(("scale", "bounds", "index", "index scale"), pool.arrays[1:], strict=True))
    others = "".join(f", {name} {describe_array(x)}" for name, x in arrays.items() if x is not None)
    axes = {"heads": pool.heads, "context": pool.context}
    others += "".join(f", {name} over the mesh axis {axis!r}" for name, axis in axes.items() if axis is not None)
    return f"Pool({describe_array(pool.kv)}{others})"


def describe_layer(layer: Any) -> str:
    """Returns the `repr` of a `Layer`."""
    if is_donated((layer.pool, layer.tables)):
        return f"Layer({DONATED})"
    name = f"{layer.number} of {layer.config.num_layers}"
    shared = "" if layer.pool is not None else f", reads layer {layer.config.owner(layer.number)}"
    return f"Layer({name}, {layer.layer_config!r}{shared}, {describe_tables(layer.tables)})"


def describe_slots(slots: Any) -> str:
    """Returns the `repr` of `StateSlots`."""
    if is_donated(slots):
        return f"StateSlots({DONATED})"
    named = read_integers(slots.slots)
    if named is None or named.ndim != 1:
        return f"StateSlots({describe_array(slots.slots)})"
    return f"StateSlots({len(set(named[named > 0].tolist()))} of {len(named)} slots used)"


def describe_state_layer(layer: Any) -> str:
    """Returns the `repr` of a `StateLayer`."""
    name = f"{layer.number} of {layer.config.num_layers}"
    return f"StateLayer({name}, {layer.layer_config!r}, {describe_slots(layer.slots)})"


def describe_step(step: Any) -> str:
    """Returns the `repr` of a `Step`."""
    if is_donated((step.tables, step.token)):
        return f"Step({DONATED})"
    kind = "decode step" if step.decode else "step"
    layout = "packed" if len(step.token_axes) == 1 else "padded"
    new = read_integers(step.tables[0].new)
    rows = 0 if new is None else int((new > 0).sum())
    tokens = "" if new is None or new.ndim != 1 else f", {int(new.sum())} tokens in {rows} row{'s' * (rows != 1)}"
    notes = ", a tree" * (step.tree is not None) + ", shared prefixes read once" * (step.shared is not None)
    return f"Step({kind}, {layout} i32{list(step.token_axes)}{tokens}{notes})"
