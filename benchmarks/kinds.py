"""What each kind of storage costs and saves: bytes, speed of a decode step, error of attention, loss of a model.

    python benchmarks/kinds.py

Speed is that of `pallas_kernels.paged_attention` on this machine, 8 full rows of 2048 tokens, beside bfloat16's. Errors
are of normal data, or with 5 % of the channels of keys and values ten times larger, in the Euclidean norm of one head's
output against float64. The loss is of the model that comes along, on source code, as a share of float32's.
"""

import argparse
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from _harness import save, table, time_side_by_side

import jaxkv
from pallas_kernels import SHAPES, paged_attention
from pallas_kernels.common.quantization import FORMATS, QUANTIZED

ROWS, PLACES, BLOCK_SIZE, HEAD_DIM = 8, 2048, 16, 128


def contender(kind: str | None):
    """A decode step of Llama 3 8B's attention over a pool of a kind; None: bfloat16."""
    shape, rng = SHAPES["llama3-8b"], np.random.default_rng(0)
    width = PLACES // BLOCK_SIZE
    pool = (ROWS * width + 1, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    kv = jnp.asarray(rng.standard_normal(pool, np.float32), jnp.bfloat16)
    options = {}
    if kind is not None:
        kv, scale = FORMATS[kind].encode(kv)
        options = {"kv_scale": scale}
    q = jnp.asarray(rng.standard_normal((ROWS, 1, shape.num_heads, shape.head_dim)), jnp.bfloat16)
    tables = jnp.asarray(1 + rng.permutation(ROWS * width).reshape(ROWS, width), jnp.int32)
    lengths = jnp.full(ROWS, PLACES, jnp.int32)
    attend = jax.jit(lambda *x, **options: paged_attention(*x, **options, kind=kind))
    return lambda: attend(q, kv, tables, lengths, lengths // PLACES, **options)


def error(kind: str, tokens: int, outliers: bool, rotate: bool, new: int = 16, heads: int = 2) -> float:
    """Of attention of a row's last tokens, the largest of any head, in percent."""
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(2, tokens, heads, HEAD_DIM)).astype(np.float32)
    q = rng.normal(size=(new, heads, HEAD_DIM)).astype(np.float32)
    if outliers:
        large = rng.choice(HEAD_DIM, round(0.05 * HEAD_DIM), replace=False)
        k[..., large] *= 10
        v[..., large] *= 10
    layer = jaxkv.LayerConfig(num_kv_heads=heads, head_dim=HEAD_DIM, rotate=rotate)
    config = jaxkv.CacheConfig(layers=(layer,), max_seqs=1, max_seq_len=tokens, max_tokens=tokens, dtype=kind)
    cache = jaxkv.append(jaxkv.init(config), k[None, None, :-new], v[None, None, :-new])
    got, _ = jaxkv.attention(q[None], k[None, -new:], v[None, -new:], jaxkv.extend(cache, [new]), layer=0)
    logits = np.einsum("thd,chd->htc", q.astype(np.float64), k) * HEAD_DIM**-0.5
    seen = np.arange(tokens) <= (tokens - new + np.arange(new))[:, None]
    weights = np.where(seen, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    wanted = np.einsum("htc,chd->thd", weights / weights.sum(axis=-1, keepdims=True), v)
    off = np.linalg.norm(np.asarray(got[0]) - wanted, axis=(0, 2)) / np.linalg.norm(wanted, axis=(0, 2))
    return 100 * float(off.max())


def loss(model, kind: str, rotate: bool | None, rows: int = 16, length: int = 200) -> float:
    source = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8)[: rows * length]
    tokens = source.astype(np.int32).reshape(rows, length)
    config = jaxkv.CacheConfig.from_model(model, max_seqs=rows, max_seq_len=length, dtype=kind)
    config = config.replace(layers=tuple(dataclasses.replace(layer, rotate=rotate) for layer in config.layers))

    @jax.jit
    def of(model, tokens):
        logits, _ = model(tokens, cache=jaxkv.extend(jaxkv.init(config), jnp.full(rows, length, jnp.int32)))
        scores = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    return float(of(model, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 32768], help="of which errors are measured")
    arguments = parser.parse_args()
    seconds = time_side_by_side({kind: contender(kind) for kind in (None, *QUANTIZED)}, arguments.repeats)
    model, rows = jaxkv.models.small(), []
    exact = loss(model, "float32", None)
    layer = jaxkv.LayerConfig(num_kv_heads=8, head_dim=HEAD_DIM)
    sizes = dict(layers=(layer,), max_seqs=ROWS, max_seq_len=PLACES, num_blocks=ROWS * PLACES // BLOCK_SIZE)
    full = jaxkv.CacheConfig(**sizes).bytes
    for kind in QUANTIZED:
        row = {"kind": kind, "capacity": full / jaxkv.CacheConfig(**sizes, dtype=kind).bytes}
        row |= {"ms": seconds[kind] * 1e3, "speed": seconds[None] / seconds[kind]}
        for tokens in arguments.tokens:
            row[f"error %, {tokens}"] = error(kind, tokens, outliers=False, rotate=False)
        for name, rotate in (("", False), (", rotated", True)):
            row[f"outliers %{name}"] = error(kind, 1024, outliers=True, rotate=rotate)
            row[f"loss %{name}"] = 100 * (loss(model, kind, rotate) / exact - 1)
        rows.append(row)
    table(rows)
    save("kinds", rows, bfloat16_ms=seconds[None] * 1e3, rows_of=f"{ROWS} x {PLACES}", repeats=arguments.repeats)


if __name__ == "__main__":
    main()
