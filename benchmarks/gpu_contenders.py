"""What `gpu.py` measures: steps of attention by several implementations, and a decode step of a whole model.

A call's keys and values are other ones than the last call's, in a pool of their own as a model's layers have, so that
the L2 cache does not answer for the memory. All data are random: constant data lets a chip run faster.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gpu, xla

L2_BYTES = 52_428_800
MOST_POOLS = 32


@dataclasses.dataclass(frozen=True)
class Point:
    """A step in which each of `batch` rows has `context` tokens, `new` of them the step's."""

    heads: tuple[int, int]
    batch: int
    context: int
    block: int
    new: int = 1
    head_dim: int = 128
    rank: int | None = None  # latent rows, of which so many numbers are the values

    @property
    def parts(self) -> int:
        """What a token is stored as: keys and values, or one row."""
        return 2 if self.rank is None else 1

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.heads[1] * self.head_dim * self.parts * 2

    @property
    def flops(self) -> float:
        """Of causal attention: both products, over what each new token sees."""
        seen = self.context - self.new / 2
        return 2 * self.batch * self.new * seen * self.heads[0] * (self.head_dim + (self.rank or self.head_dim))

    @property
    def pools(self) -> int:
        """As many as the L2 cache holds no half of."""
        return max(1, min(MOST_POOLS, -(-2 * L2_BYTES // self.kv_bytes)))

    @property
    def expected(self) -> float:
        """Seconds of a call at half the speed to hope for."""
        return self.kv_bytes / 2e12 + self.flops / 3e14 + 10e-6


def inputs(point: Point, pools: int) -> dict[str, Any]:
    """The step's arrays: `pools` pools of blocks in the same random order, and one table for all."""
    key = jax.random.key(0)
    held = -(-point.context // point.block)
    blocks = point.batch * held
    shape = (blocks + 1, point.parts, point.heads[1], point.block, point.head_dim)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    return {
        "q": jax.random.normal(key, (point.batch, point.new, point.heads[0], point.head_dim), jnp.bfloat16),
        "pools": [make(key) for key in jax.random.split(key, pools)],
        "tables": (jax.random.permutation(key, blocks).astype(jnp.int32) + 1).reshape(point.batch, held),
        "lengths": jnp.full(point.batch, point.context, jnp.int32),
        "new": jnp.full(point.batch, point.new, jnp.int32),
    }


def seconds_per_call(attend: Callable, q, pools, *rest, expected: float) -> tuple[float, Callable[[], Any]]:
    """Seconds of `q = attend(q, pool, *rest)`, one pool after the other, and what runs them all once.

    The calls of a program share what depends on `rest` alone, as a model's layers do: planning is done once in it.
    """
    attend = jax.jit(attend)  # traced once

    def calls(q, pools, *rest):
        for i in range(count):
            q = attend(q, pools[i % len(pools)], *rest)
        return q

    count = max(len(pools), 8) if expected < 0.01 else len(pools)
    program = jax.jit(calls).lower(q, pools, *rest).compile()

    def run():
        return program(q, pools, *rest)

    return seconds_of(run, expected * count) / count, run


def seconds_of(run: Callable[[], Any], expected: float) -> float:
    """Median of five, each of as many runs one behind the other as take about 40 ms."""
    times, repeats = [], max(1, min(200, int(0.04 / expected)))
    jax.block_until_ready(run())
    for _ in range(5):
        start = time.perf_counter()
        out = [run() for _ in range(repeats)][-1]
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def ours(interpret) -> Callable:
    def attend(q, kv, tables, lengths, new):
        return gpu.paged_attention(q, kv, tables, lengths, new, interpret=interpret)

    return attend


def latent(point: Point, attend: Callable, **options) -> Callable:
    """Attention over latent rows, whose output is made as wide as the next call's queries."""

    def widened(q, *arrays):
        out = attend(q, *arrays, rank=point.rank, scale=point.head_dim**-0.5, **options)
        return jnp.concatenate([out, q[..., point.rank :]], axis=-1)

    return widened


def by_triton(q, kv, tables, lengths):
    from jax.experimental.pallas.ops.gpu import paged_attention as triton

    return triton.paged_attention(q[:, 0], *kv, tables, lengths)[:, None].astype(q.dtype)


def by_cudnn(q, kv):
    return jax.nn.dot_product_attention(q, *kv, is_causal=q.shape[1] > 1, implementation="cudnn")


def by_cudnn_paged(q, kv, tables, lengths, new):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    table = tables[:, None, :, None] - 1  # without the null block
    kind = cudnn.MaskType.PADDING if q.shape[1] == 1 else cudnn.MaskType.PADDING_CAUSAL
    out = cudnn.paged_attention(
        jnp.swapaxes(q, 1, 2), *kv, new, lengths, table, table, scale=q.shape[-1] ** -0.5, mask_type=kind,
        qkv_layout="BNTH",
    )  # fmt: skip
    return jnp.swapaxes(out[0] if isinstance(out, tuple | list) else out, 1, 2)


def by_torch(point: Point) -> float:
    """PyTorch's attention on dense caches."""
    import torch

    def random(*shape):
        return torch.randn(point.batch, *shape, point.head_dim, dtype=torch.bfloat16, device="cuda")

    q = random(point.heads[0], point.new)
    caches = [[random(point.heads[1], point.context) for _ in "kv"] for _ in range(point.pools)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return _torch_seconds([lambda c=c: attend(q, *c, is_causal=point.new > 1, enable_gqa=True) for c in caches])


def by_flashinfer(point: Point) -> float:
    """FlashInfer's paged decode, planned beforehand, on pools of our layout."""
    import flashinfer
    import torch

    held = -(-point.context // point.block)
    blocks = point.batch * held
    shape = (blocks, 2, point.heads[1], point.block, point.head_dim)
    pools = [torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for _ in range(point.pools)]
    q = torch.randn(point.batch, point.heads[0], point.head_dim, dtype=torch.bfloat16, device="cuda")
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    starts = torch.arange(point.batch + 1, dtype=torch.int32, device="cuda") * held
    last = torch.full((point.batch,), point.context - (held - 1) * point.block, dtype=torch.int32, device="cuda")
    order = torch.randperm(blocks, device="cuda").to(torch.int32)
    wrapper.plan(starts, order, last, *point.heads, point.head_dim, point.block, q_data_type=q.dtype)
    return _torch_seconds([lambda p=p: wrapper.run(q, p) for p in pools])


def _torch_seconds(runs: list[Callable[[], Any]]) -> float:
    import torch

    times = []
    for _ in range(6):  # the first to warm up
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for run in runs * max(1, 8 // len(runs)):
            run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1000 / (len(runs) * max(1, 8 // len(runs))))
    return statistics.median(times[1:])


def contenders(point: Point, arrays: dict[str, Any], interpret) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and measurement of each implementation that can do this step; ours also gives a program to profile."""
    q, pools, tables, lengths, new = arrays.values()

    def seconds(attend, pools, *rest):
        return seconds_per_call(attend, q, pools, *rest, expected=point.expected)[0]

    expected = point.expected if interpret is None else 1.0
    if point.rank is not None:
        by_us = latent(point, gpu.paged_attention, interpret=interpret)
        yield "ours", lambda: seconds_per_call(by_us, *arrays.values(), expected=expected)
        if interpret is None:
            yield "xla", lambda: seconds(latent(point, xla.paged_attention), pools, tables, lengths, new)
        return
    yield "ours", lambda: seconds_per_call(ours(interpret), *arrays.values(), expected=expected)
    if interpret is not None or point.block == 128:
        return
    apart = [[kv[1:, i] for i in (0, 1)] for kv in pools] if point.kv_bytes * point.pools < 10e9 else None
    if apart is not None:
        yield "cudnn-paged", lambda: seconds(by_cudnn_paged, apart, tables, lengths, new)
    if point.new == 1:
        yield "flashinfer", lambda: by_flashinfer(point)
        if apart is not None:  # [K, blocks, block_size, D] each: Triton's layout
            turned = [[jnp.swapaxes(x, 0, 1) for x in kv] for kv in apart]
            yield "triton", lambda: seconds(by_triton, turned, tables - 1, lengths)
    if point.block != 16:  # the dense ones once
        return
    if point.kv_bytes < 2e9:
        yield "xla", lambda: seconds(xla.paged_attention, pools, tables, lengths, new)
    if point.new in (1, point.context):
        shape = (point.batch, point.context, point.heads[1], point.head_dim)
        if apart is not None:  # the same random numbers, in another shape
            count = point.batch * point.context
            tokens = [[jnp.swapaxes(x, 1, 2).reshape(-1, *shape[2:]) for x in kv] for kv in apart]
            dense = [[x[:count].reshape(shape) for x in kv] for kv in tokens]
            yield "cudnn", lambda: seconds(by_cudnn, dense)
        yield "torch", lambda: by_torch(point)


@dataclasses.dataclass(frozen=True)
class Model:
    """A decode step of a whole model: projections, write, attention and MLP of each layer, weights read each time."""

    num_layers: int = 32
    dim: int = 4096
    hidden: int = 14336

    def weights(self, point: Point) -> dict[str, tuple[int, int]]:
        (heads, kv_heads), head_dim = point.heads, point.head_dim
        return {
            "q": (self.dim, heads * head_dim), "kv": (self.dim, 2 * kv_heads * head_dim),
            "o": (heads * head_dim, self.dim),
            "up": (self.dim, 2 * self.hidden), "down": (self.hidden, self.dim),
        }  # fmt: skip

    def bytes(self, point: Point) -> int:
        """What a step must read."""
        return self.num_layers * (sum(2 * a * b for a, b in self.weights(point).values()) + point.kv_bytes)

    def seconds(self, point: Point, interpret=None) -> tuple[float, Callable[[], Any]]:
        """Of one step, and what runs it. The layers share their weights, of which the L2 cache holds an eighth."""
        arrays = inputs(point, self.num_layers)
        keys = jax.random.split(jax.random.key(1), len(self.weights(point)))
        weights = {
            name: jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(shape[0] ** -0.5, jnp.bfloat16)
            for key, (name, shape) in zip(keys, self.weights(point).items(), strict=True)
        }
        shape = (point.batch, 1, -1, point.head_dim)

        @jax.jit
        def layer(x, pool, weights, tables, lengths, new):
            k, v = jnp.split((x @ weights["kv"]).reshape(shape), 2, axis=2)
            pool = xla.write_kv(pool, k, v, tables, lengths, new)
            out = ours(interpret)((x @ weights["q"]).reshape(shape), pool, tables, lengths, new)
            x = x + out.reshape(point.batch, -1) @ weights["o"]
            gate, up = jnp.split(x @ weights["up"], 2, axis=1)
            x = x + (jax.nn.silu(gate) * up) @ weights["down"]
            return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True)), pool

        def step(pools, x, *rest):
            written = []
            for pool in pools:
                x, pool = layer(x, pool, *rest)
                written.append(pool)
            return written, x

        x = jax.random.normal(jax.random.key(2), (point.batch, self.dim), jnp.bfloat16)
        rest = weights, arrays["tables"], arrays["lengths"], arrays["new"]
        program = jax.jit(step, donate_argnums=0).lower(arrays["pools"], x, *rest).compile()
        state = [arrays.pop("pools"), x]

        def run():
            state[:] = program(*state, *rest)
            return state[1]

        return seconds_of(run, self.bytes(point) / 2e12 + 1e-3 if interpret is None else 1.0), run
