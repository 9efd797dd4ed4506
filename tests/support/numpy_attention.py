"""Paged attention in NumPy, which reads only what a token sees: everything else can be poisoned."""

import numpy as np
from seen import seen_by


def attention(
    q, kv, tables, lengths, new, *, offsets=None, scale=None, soft_cap=None, window=None, sinks=None, chunk=None,
    tree=None, spans=None, sink_tokens=0, rank=None,
):  # fmt: skip
    """Paged attention one token at a time, in float64; table entries are clamped into the pool, lengths to tables."""
    q, kv, tables, lengths, new = (np.asarray(x) for x in (q, kv, tables, lengths, new))
    q, block_size = q.astype(np.float64), kv.shape[3]
    tables, lengths = np.clip(tables, 0, len(kv) - 1), np.clip(lengths, 0, tables.shape[1] * block_size)
    starts = np.cumsum(new) - new if offsets is None else np.asarray(offsets)
    group, head_dim = q.shape[-2] // kv.shape[2], q.shape[-1]
    out, lse = np.zeros((*q.shape[:-1], rank or head_dim)), np.full(q.shape[:-1], -np.inf)
    for row, (length, count) in enumerate(zip(lengths, new, strict=True)):
        first_place = row * q.shape[1] if q.ndim == 4 else starts[row]
        parents, numbers = (
            None if x is None else np.asarray(x).reshape(-1)[first_place : first_place + count] for x in (tree, spans)
        )
        for t in range(count):
            place, last = ((row, t) if q.ndim == 4 else starts[row] + t), length - count + t
            if last < 0:
                continue
            seen = np.array(sorted(seen_by(t, last - t, last, window, chunk, parents, numbers, sink_tokens)))
            kept = kv[tables[row, seen // block_size], :, :, seen % block_size]
            k, v = kept[:, 0, :, :head_dim], kept[:, -1, :, : rank or head_dim]
            k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
            logits = np.einsum("hd,nhd->hn", q[place], k) * (head_dim**-0.5 if scale is None else scale)
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            if sinks is not None:
                logits = np.concatenate([logits, np.asarray(sinks, np.float64)[:, None]], axis=1)
            most = logits.max(axis=1, keepdims=True)
            weights = np.exp(logits - most)
            total = weights.sum(axis=1, keepdims=True)
            out[place] = np.einsum("hn,nhd->hd", (weights / total)[:, : len(seen)], v)
            lse[place] = (most + np.log(total))[:, 0]
    return out, lse
