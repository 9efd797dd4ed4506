"""Who takes part in `gpu.py`: steps of attention by several implementations, and a decode step of a whole model.

A call's keys and values are other ones than the last call's, in a pool of their own as a model's layers have, so that
the L2 cache does not answer for the memory. Everyone's time is the host's, of what more runs one behind the other take
longer; PyTorch's runs are a graph, so that its host is not what is measured.
"""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from gpu_plans import BY_WARPS, use_form
from gpu_timing import Contender
from gpu_work import Model, Point, Rivals, inputs

from pallas_kernels import gpu, testing, xla
from pallas_kernels.xla import tile_sizes

MOST_COPIED = 10e9  # bytes of K and V that others get in a layout of their own
MOST_IN_XLA = 3e9  # bytes of K and V of a step that XLA takes some milliseconds for


def calls_of(attend: Callable, q, pools, *rest, expected: float, scale: float = 1.0) -> Contender:
    """`q = attend(q, pool, *rest)`, one pool after the other, as a program.

    Its calls share what depends on `rest` alone, as a model's layers do: planning is done once in it. `scale`: of
    queries, for who does not scale them; in the comparison only, where it costs no one time.
    """
    attend = jax.jit(attend)  # traced once
    count = count_calls(pools, expected)
    program = compile_calls(attend, count, q, pools, *rest)
    return Contender(lambda: program(q, pools, *rest), count, expected, once=lambda: attend(q * scale, pools[0], *rest))


def count_calls(pools, expected: float) -> int:
    """Returns how many calls a program makes, one pool after the other: about as many as a model has layers."""
    return max(len(pools), min(16, int(0.05 / expected)), 1)


def compile_calls(attend: Callable, count: int, q, pools, *rest):
    """Returns the program of so many calls. Of the arrays, shapes are enough."""

    def calls(q, pools, *rest):
        for i in range(count):
            q = attend(q, pools[i % len(pools)], *rest)
        return q

    return jax.jit(calls).lower(q, pools, *rest).compile()


def attend_in_xla(*arrays, gpu_steps: bool = True, **options):
    """What runs where there are no kernels, in loops with the steps of a GPU or with those of a CPU."""
    with mock.patch.dict(tile_sizes.SIZES, {True: tile_sizes.SIZES[gpu_steps]}):
        return testing.run(xla.paged_attention.__wrapped__, *arrays, **options)


def ours(point: Point, interpret=None, form: str | None = None) -> Callable:
    def attend(*arrays):
        with use_form(form):
            return attend_as_it_is(*arrays)

    def attend_as_it_is(q, pool, tables, lengths, new):
        kv, options = (pool, {}) if point.kind is None else (pool[0], {"kv_scale": pool[1], "kind": point.kind})
        if point.rank is None:
            return testing.run(gpu.paged_attention, q, kv, tables, lengths, new, **options, interpret=interpret)
        return latent(point, functools.partial(testing.run, gpu.paged_attention), interpret=interpret)(
            q, kv, tables, lengths, new
        )

    return attend


def latent(point: Point, attend: Callable, **options) -> Callable:
    """Attention over latent rows, whose output is made as wide as the next call's queries."""

    def widened(q, *arrays):
        if point.chosen is not None:
            later = jnp.isnan(q[:, :, 0, :1]).astype(jnp.int32)  # each call's own, as each layer chooses by itself
            tokens = jnp.arange(point.chosen, dtype=jnp.int32) * (point.context // point.chosen)
            options["tokens"] = tokens[None, None] + later
        out = attend(q, *arrays, rank=point.rank, scale=point.head_dim**-0.5, **options)
        return jnp.concatenate([out, q[..., point.rank :]], axis=-1)

    return widened


def by_triton(q, kv, tables, lengths):
    from jax.experimental.pallas.ops.gpu import paged_attention as triton

    # As by default, 16 splits of steps of 8 pages, or fewer of fewer; those must divide the table.
    splits = math.gcd(16, tables.shape[1])
    pages = tables.shape[1] // splits
    if pages % min(pages, 8):
        splits, tables = 16, jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % 128)))
    return triton.paged_attention(q[:, 0], *kv, tables, lengths, k_splits=splits)[:, None].astype(q.dtype)


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


def by_torch(point: Point) -> Contender:
    """PyTorch's attention on dense caches."""
    import torch

    def random(*shape):
        return torch.randn(point.batch, *shape, point.head_dim, dtype=torch.bfloat16, device="cuda")

    q = random(point.heads[0], point.new)
    caches = [[random(point.heads[1], point.context) for _ in "kv"] for _ in range(point.pools)]
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    if 1 < point.new < point.context:  # `is_causal` lets the first query see the first key alone
        from torch.nn.attention.bias import causal_lower_right

        attend = functools.partial(attend, attn_mask=causal_lower_right(point.new, point.context))
    else:
        attend = functools.partial(attend, is_causal=point.new > 1)
    return make_graph_contender([lambda c=c: attend(q, *c) for c in caches], point.expected)


def by_flashinfer(point: Point) -> Contender:
    """FlashInfer's paged decode, planned beforehand, on pools of our layout."""
    import flashinfer
    import torch

    held = [-(-length // point.block) for length in point.lengths]
    shape = (sum(held), 2, point.heads[1], point.block, point.head_dim)
    pools = [torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for _ in range(point.pools)]
    q = torch.randn(point.batch, point.heads[0], point.head_dim, dtype=torch.bfloat16, device="cuda")
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    counts = torch.tensor([0, *held], device="cuda")
    starts = torch.cumsum(counts, 0).to(torch.int32)
    last = torch.tensor(point.lengths, device="cuda") - (counts[1:] - 1) * point.block
    order = torch.randperm(sum(held), device="cuda").to(torch.int32)
    wrapper.plan(starts, order, last.to(torch.int32), *point.heads, point.head_dim, point.block, q_data_type=q.dtype)
    return make_graph_contender([lambda p=p: wrapper.run(q, p) for p in pools], point.expected)


def make_graph_contender(runs: list[Callable[[], Any]], expected: float) -> Contender:
    """All of them as one graph; one by one where that cannot be."""
    import torch

    runs = runs * max(1, 8 // len(runs))

    def one_by_one() -> None:
        for run in runs:
            run()

    one_by_one()  # to warm up
    torch.cuda.synchronize()
    play = one_by_one
    with contextlib.suppress(RuntimeError):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_by_one()
        play = graph.replay
    return Contender(play, len(runs), expected, wait=lambda _: torch.cuda.synchronize())


def give_back() -> None:
    """What PyTorch keeps of the device's memory, once its arrays are gone."""
    with contextlib.suppress(Exception):
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()


def contenders(point: Point, who: Rivals, interpret=None) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """Who can do this step, and how to prepare each; the first is this library. Arrays are made when they are wanted,
    and once."""
    expected = point.expected if interpret is None else 1.0
    made = functools.cache(lambda: inputs(point, point.pools if interpret is None else 1))

    def against(attend, pools, *rest: str, less: int = 0, **options):
        def prepare():
            arrays = made()
            others = [arrays[name] - less if name == "tables" else arrays[name] for name in rest]
            return calls_of(attend, arrays["q"], pools(), *others, expected=expected, **options)

        return prepare

    def pools():
        return made()["pools"]

    step = "tables", "lengths", "new"
    yield "ours", against(ours(point, interpret), pools, *step)
    if who == "all":
        yield "ours by warps", against(ours(point, interpret, BY_WARPS), pools, *step)
    if point.rank is not None:
        yield "xla", against(latent(point, attend_in_xla), pools, *step)
    if who == "none" or point.rank is not None or point.kind is not None or point.chunk:
        return

    apart = functools.cache(lambda: [[kv[1:, i] for i in (0, 1)] for kv in pools()])
    turned = functools.cache(lambda: [[jnp.swapaxes(x, 0, 1) for x in kv] for kv in apart()])  # [K, blocks, size, D]

    def in_order():  # the tokens of each row as its table has them: the same numbers for the same result
        shape = (point.batch, -1, point.heads[1], point.head_dim)
        return [[jnp.swapaxes(kv[made()["tables"], i], 2, 3).reshape(shape)[:, : point.context] for i in (0, 1)]
                for kv in pools()]  # fmt: skip

    fits = point.kv_bytes * point.pools < MOST_COPIED
    whole = not point.ragged and point.new in (1, point.context)  # cuDNN's masks let first queries see first keys
    if fits and whole:
        yield "cudnn-paged", against(by_cudnn_paged, apart, *step)
    if point.new == 1:
        yield "flashinfer", lambda: by_flashinfer(point)
        if fits:
            scale = point.head_dim**-0.5
            yield "triton", against(by_triton, turned, "tables", "lengths", less=1, scale=scale)
    if who != "all":
        return
    if fits and whole:
        yield "cudnn", against(by_cudnn, functools.cache(in_order))
    if not point.ragged:
        yield "torch", lambda: by_torch(point)
    if point.kv_bytes < MOST_IN_XLA:
        yield "xla", against(attend_in_xla, pools, *step)
        yield "xla, steps of a CPU", against(functools.partial(attend_in_xla, gpu_steps=False), pools, *step)


def contender_programs(point: Point, who: Rivals) -> dict[str, tuple[Callable, tuple[Any, ...]]]:
    """Returns each JAX contender's call, with the shapes of its queries, pools and the rest. No array is made."""
    found: dict[str, tuple[Callable, tuple[Any, ...]]] = {}

    def prepare_all() -> None:
        for name, prepare in contenders(point, who):
            if name in ("torch", "flashinfer"):
                continue

            def note(attend, q, pools, *rest, name=name, **_):
                shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (q, pools, *rest))
                found[name] = attend, shapes

            with mock.patch.object(sys.modules[__name__], "calls_of", note):
                prepare()

    jax.eval_shape(prepare_all)
    return found


def compile_ahead(point: Point, who: Rivals, wants: Callable[[str], Any]) -> dict[str, Any]:
    """Compiles what `calls_of` will, of who is wanted, for JAX's cache of compiled programs; returns how many seconds
    each took, or why it was not."""
    said: dict[str, Any] = {}
    for name, (attend, (q, pools, *rest)) in contender_programs(point, who).items():
        if not wants(name):
            continue
        start = time.perf_counter()
        try:
            attend = jax.jit(attend)
            compile_calls(attend, count_calls(pools, point.expected), q, pools, *rest)
            if who == "all":
                attend.lower(q, pools[0], *rest).compile()
            said[name] = time.perf_counter() - start
        except Exception as e:  # the measurement says it again
            said[name] = repr(e)[:300]
    return said


def lowered(point: Point, who: Rivals) -> dict[str, str]:
    """What becomes of each JAX contender's call for an NVIDIA GPU, on a machine without one: "lowers", or why not."""
    said = {}
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    cudnn = mock.patch("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", return_value=91_200)
    for name, (attend, (q, pools, *rest)) in contender_programs(point, who).items():
        try:
            with jax.sharding.use_abstract_mesh(mesh) if name == "triton" else cudnn:
                jax.jit(attend).trace(q, pools[0], *rest).lower(lowering_platforms=("cuda",))
            said[name] = "lowers"
        except Exception as e:  # what it says is what is asked for
            said[name] = repr(e)[:300]
    return said


def step_of(model: Model, point: Point, interpret=None) -> Contender:
    """A step of the whole model. The layers share their weights, of which the L2 cache holds an eighth."""
    arrays = inputs(point, model.num_layers)
    keys = jax.random.split(jax.random.key(1), len(model.weights(point)))
    weights = {
        name: jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(shape[0] ** -0.5, jnp.bfloat16)
        for key, (name, shape) in zip(keys, model.weights(point).items(), strict=True)
    }
    shape = (point.batch, 1, -1, point.head_dim)

    @jax.jit
    def layer(x, pool, weights, tables, lengths, new):
        k, v = jnp.split((x @ weights["kv"]).reshape(shape), 2, axis=2)
        pool = testing.run(xla.write_kv, pool, k, v, tables, lengths, new)
        out = ours(point, interpret)((x @ weights["q"]).reshape(shape), pool, tables, lengths, new)
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

    x = jax.random.normal(jax.random.key(2), (point.batch, model.dim), jnp.bfloat16)
    rest = weights, arrays["tables"], arrays["lengths"], arrays["new"]
    program = jax.jit(step, donate_argnums=0).lower(arrays["pools"], x, *rest).compile()
    state = [arrays.pop("pools"), x]

    def run():
        state[:] = program(*state, *rest)
        return state[1]

    return Contender(run, 1, model.bytes(point) / 2e12 + 1e-3 if interpret is None else 1.0)
