"""Rows that begin with the same blocks read them once, in kernels that know nothing of it: two calls, and a merge.

In the first a group of rows is one row, whose queries are those of all of them and see all of it. In the second every
row is what it holds besides: its table begins that many blocks later. For kernels measure no positions but distances.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.api.backends import IMPLEMENTATIONS, backend_of, unsupported, unusual
from pallas_kernels.common import shared_prefix as prefixes
from pallas_kernels.common.merge import merge_attention
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.common.shared_prefix import TOGETHER, Shared

STORAGE = ("kv_scale", "kind", "rank")
OF_LOGITS = ("scale", "soft_cap")


def why_alone(implementation: str, arguments: dict[str, Any]) -> str | None:
    """Why rows read by themselves what they share, in what `find_shared` found too; None: they read it once.

    Args:
      implementation: what runs them.
      arguments: those of `paged_attention`; of arrays only shapes and dtypes are read.

    >>> why_alone("tpu", {"window": 5})
    'Of rows with a window each reads by itself what they share, with the tpu kernels.'
    """
    for name in ("deterministic", "blocks", "sink_tokens"):
        if name in unusual(arguments):
            return f"With {name} every row is read by itself."
    if shares(implementation):
        return None
    if IMPLEMENTATIONS[implementation] is None:
        return f"The implementation {implementation!r} reads every row by itself."
    for name in ("window", "chunk"):
        if arguments.get(name) is not None:
            return f"Of rows with a {name} each reads by itself what they share, with the {implementation} kernels."
    q, tables = arguments["q"], arguments["tables"]
    queries = jax.ShapeDtypeStruct((_places(q, tables), *q.shape[-2:]), q.dtype)
    given = {name: arguments.get(name) for name in ("kv", *STORAGE)}
    return unsupported(implementation, "paged_attention", given | {"q": queries, "tables": tables, "causal": False})


def shares(implementation: str) -> bool:
    """Whether it takes `shared` itself."""
    return getattr(backend_of(implementation), "SHARES", False)


def read_once(
    run: Callable, attend: Callable, *, q, kv, tables, lengths, new, shared, offsets=None, return_lse=False,
    branches=True, **options,
) -> Any:  # fmt: skip
    """`run`, a backend's `paged_attention` or `write_and_attend`, of rows that read what they share only once.

    Args:
      attend: the backend's `paged_attention`.
      shared: `i32[4, S]`, of `find_shared`.
      branches: where no row shares anything, the first call is not made; else it has nothing to do then.
      others: as for `run`; what `why_alone` has nothing against.
    """
    of, axes, block_size = Shared.unpack(shared), q.shape[:-2], kv.shape[3]
    if not q.size:
        return run(
            q=q, kv=kv, tables=tables, lengths=lengths, new=new, offsets=offsets, return_lse=return_lse, **options
        )
    rest = dict(tables=_later(tables, of.tokens // block_size), lengths=lengths - of.tokens, new=new, offsets=offsets)
    result = run(q=q, kv=kv, **rest, return_lse=True, **options)
    (out, lse), *written = result if "k" in options else (result,)
    stored = {name: options[name] for name in (*STORAGE, *OF_LOGITS, "interpret", "step_tokens") if name in options}
    pool = written[0] if written else kv
    if written and options.get("kind") is not None:
        pool, stored["kv_scale"] = pool

    # What follows from tables and counts is not in the branch: layers have it in common.
    group_tables, group_tokens, group_queries = _groups(of, tables)
    token = jax.tree.map(jnp.ravel, locate(axes, lengths, new, offsets))
    shares = token.valid & (of.tokens[token.row] > 0)
    places, number = _places(q, tables), jnp.arange(token.row.size, dtype=jnp.int32)
    place = of.place[token.row] + token.position - (lengths - new)[token.row]
    there = jnp.where(shares, place, places + number)  # each has one of its own, those that are dropped too
    order = jnp.zeros(places, jnp.int32).at[there].set(number, mode="drop", unique_indices=True)
    place = jnp.where(shares, place, 0)

    def together() -> tuple[jax.Array, jax.Array]:
        queries = q.reshape(-1, *q.shape[-2:])[order]
        first, first_lse = attend(
            queries, pool, group_tables, group_tokens, group_queries, causal=False, return_lse=True, **stored
        )
        first_lse = jnp.where(shares[:, None], first_lse[place], -jnp.inf)
        outs = jnp.stack([first[place].reshape(out.shape), out])
        return merge_attention(outs, jnp.stack([first_lse.reshape(lse.shape), lse]))

    out, lse = jax.lax.cond(jnp.any(of.tokens > 0), together, lambda: (out, lse)) if branches else together()
    found = (out, lse) if return_lse else out
    return (found, *written) if written else found


def _places(q, tables) -> int:
    """For how many queries there must be room in groups."""
    return min(max(1, q.size // (q.shape[-2] * q.shape[-1])), tables.shape[0] * TOGETHER)


def _groups(of: Shared, tables: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of as many groups as there can be: their tables, tokens and queries; 0 of those there are not."""
    leads, rows = of.queries > 0, tables.shape[0]
    most = max(1, rows // (prefixes.WORTH_ROWS + 1))
    group = jnp.arange(1, most + 1, dtype=jnp.int32)[:, None]
    is_leader = leads[None] & (jnp.cumsum(leads, dtype=jnp.int32)[None] == group)

    def of_leader(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_leader, x[None], 0), axis=1, dtype=jnp.int32)

    leader = of_leader(jnp.arange(rows, dtype=jnp.int32))
    return tables[leader], of_leader(of.tokens), of_leader(of.queries)


def _later(tables: jax.Array, columns: jax.Array) -> jax.Array:
    """Each row's table from a column of its own on, and the null block behind it. Bit by bit of the column: what
    gathers is a loop over rows on a TPU, if not over entries."""
    for bit in range(tables.shape[1].bit_length()):
        later = jnp.pad(tables, ((0, 0), (0, 1 << bit)))[:, 1 << bit :]
        tables = jnp.where(((columns >> bit) & 1 == 1)[:, None], later, tables)
    return tables
