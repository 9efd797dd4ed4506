"""Gradients: of every implementation against those of the reference, whatever wraps the call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import use_sizes
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels import IMPLEMENTATIONS, reference, testing
from pallas_kernels.api import reference_backend
from pallas_kernels.common.quantization import FORMATS
from pallas_kernels.testing import Case
from pallas_kernels.xla import tile_sizes


def make_problem(case, seed=0):
    """What to differentiate with respect to, the rest, and a loss that weights every number differently."""
    inputs, options = testing.make_inputs(case, seed), testing.make_options(case, seed)
    variables = {"q": inputs.q, "kv": inputs.kv, "scale": jnp.float32(0.1)}
    if case.soft_cap:
        variables["soft_cap"] = jnp.float32(case.soft_cap)
    if case.sinks:
        variables["sinks"] = options["sinks"]
    rest = inputs._asdict() | options
    rest = {name: x for name, x in rest.items() if name not in variables and x is not None}
    rng = np.random.default_rng(seed + 5)
    tokens = inputs.q.shape[:-1]
    shapes = (*tokens, case.rank or case.head_dim), tokens
    weights = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]

    def loss(attend, variables, rest=rest):
        out, lse = attend(**rest, **variables, return_lse=True)
        lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
        return (weights[0] * out.astype(jnp.float32)).sum() + (weights[1] * lse).sum()

    return variables, rest, loss


def assert_gradients_close(actual, expected, bound=2e-5):
    for name in expected:
        a, e = (np.asarray(x[name], np.float32) for x in (actual, expected))
        assert np.abs(e).max() > 0.01, f"the gradient of {name} is too small to tell"
        np.testing.assert_allclose(a, e, rtol=0, atol=bound * np.abs(e).max(), err_msg=name)


CASES = [
    Case(lengths=(5, 17), new=(1, 1)),
    Case(lengths=(5, 30, 17, 300), new=(3, 3, 3, 3), block_size=5, window=12, soft_cap=3.0, sinks=True, mask=True),
    Case(lengths=(5, 0, 17, 90), new=(1, 0, 3, 40), packed=True, head_dim=16, stored_head_dim=24, num_kv_heads=1),
    Case(lengths=(400, 5), new=(40, 2), packed=True, block_size=301, num_heads=2),  # blocks longer than a tile
    Case(lengths=(5, 30), new=(1, 4), num_heads=6, num_kv_heads=1, head_dim=24, rank=16, scale=0.2, sinks=True),
]


@pytest.mark.parametrize("case", CASES if NIGHTLY else CASES[1::3] + CASES[2:3], ids=str)
def test_against_the_reference(case):
    variables, _, loss = make_problem(case)
    attend = functools.partial(pallas_kernels.paged_attention, implementation="xla")
    actual = jax.jit(jax.grad(functools.partial(loss, attend)))(variables)
    expected = jax.jit(jax.grad(functools.partial(loss, reference.paged_attention)))(variables)
    assert_gradients_close(actual, expected)
    assert (np.asarray(actual["kv"])[np.isnan(variables["kv"])] == 0).all()


@pytest.mark.usefixtures("traced_anew")
def test_tiles_of_a_gpu(monkeypatch):
    """Which are longer: of queries and of tokens, several of each in a row."""
    _, _, _, queries, context, _ = tile_sizes.SIZES[True]
    use_sizes(monkeypatch, **tile_sizes.SIZES[True]._asdict())
    new = (queries + 3, 1, 2)
    test_against_the_reference(Case((context + queries + 9, 5, 130), new, packed=True, head_dim=16, num_heads=2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation(implementation):
    """Kernels have no gradients of their own: the rule is the front door's."""
    variables, _, loss = make_problem(Case(lengths=(5, 17), new=(1, 1), sinks=True, dtype="bfloat16", head_dim=128))
    home = IMPLEMENTATIONS[implementation]
    if home and home != pallas_kernels.api.backends.current_platform():
        pytest.skip(f"needs the platform {home}")
    attend = functools.partial(pallas_kernels.paged_attention, implementation=implementation)
    actual = jax.jit(jax.grad(functools.partial(loss, attend)))(variables)
    assert {name: x.dtype for name, x in actual.items()} == {name: x.dtype for name, x in variables.items()}
    wide = {name: x.astype(jnp.float32) for name, x in variables.items()}
    expected = jax.jit(jax.grad(functools.partial(loss, reference.paged_attention)))(wide)
    assert_gradients_close(actual, expected, 1e-2)


def test_a_kernel_without_a_gradient_of_its_own(monkeypatch):
    """As kernels are: the forward pass is opaque to differentiation, and runs once."""
    runs = []

    def opaque(*bundles):
        jax.debug.callback(lambda: runs.append(None))
        return jax.lax.stop_gradient(reference.attend(*bundles))

    monkeypatch.setattr(reference_backend, "paged_attention", opaque)
    variables, _, loss = make_problem(CASES[0])
    attend = functools.partial(pallas_kernels.paged_attention, implementation="reference")
    actual = jax.grad(functools.partial(loss, attend))(variables)
    monkeypatch.undo()
    jax.effects_barrier()
    assert len(runs) == 1
    expected = jax.grad(functools.partial(loss, reference.paged_attention))(variables)
    assert_gradients_close(actual, expected)


def test_scales_of_a_quantised_pool():
    case = Case(lengths=(5, 30), new=(1, 4))
    variables, rest, loss = make_problem(case)
    rng = np.random.default_rng(0)
    integers = jnp.asarray(rng.integers(-127, 128, variables["kv"].shape), jnp.int8)
    scales = jnp.asarray(rng.uniform(0.5, 1.5, integers.shape[:-1]) / 60, jnp.float32)
    variables |= {"kv_scale": scales}
    del variables["kv"]

    def gradient(attend):
        return jax.jit(jax.grad(lambda variables: loss(attend, variables, rest | {"kv": integers})))(variables)

    def dequantised(kv, kv_scale, **arguments):
        return reference.paged_attention(kv=kv.astype(jnp.float32) * kv_scale[..., None], **arguments)

    assert_gradients_close(gradient(pallas_kernels.paged_attention), gradient(dequantised))


def test_scales_of_keys_and_values_that_share_bits():
    case = Case(lengths=(5, 30), new=(1, 4), head_dim=128)
    variables, rest, loss = make_problem(case)
    rng, shape = np.random.default_rng(0), variables.pop("kv").shape
    stored = jnp.asarray(rng.integers(0, 256, (*shape[:-1], 64)), jnp.uint8)
    variables["kv_scale"] = jnp.asarray(rng.uniform(0.5, 1.5, (*shape[:-1], 2)) / 6000, jnp.float32)

    def gradient(attend):
        return jax.jit(jax.grad(lambda variables: loss(attend, variables, rest | {"kv": stored})))(variables)

    def decoded(kv, kv_scale, **arguments):
        return reference.paged_attention(kv=FORMATS["k5v3"].decode(kv, kv_scale, 128, axis=1), **arguments)

    attend = functools.partial(pallas_kernels.paged_attention, kind="k5v3")
    assert_gradients_close(gradient(attend), gradient(decoded))


def test_scales_of_joined_rows():
    """Those of keys by the logits, those of values by the output: as of keys and values apart."""
    case = Case(lengths=(5, 30), new=(1, 4), head_dim=8)
    variables, rest, loss = make_problem(case)
    integers = np.random.default_rng(0).integers(-127, 128, variables["kv"].shape).astype(np.int8)
    variables["kv_scale"] = jnp.asarray(np.random.default_rng(1).uniform(0.005, 0.02, integers.shape[:-1]), jnp.float32)
    del variables["kv"]
    keys, values = integers[:, :1], integers[:, 1:]

    def joined(q, kv, **arguments):
        q = jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(8, 0)])
        return pallas_kernels.paged_attention(q=q, kv=kv, kind="int8", rank=8, **arguments)

    def apart(**arguments):
        return pallas_kernels.paged_attention(kind="int8", **arguments)

    rows = np.concatenate([values, keys], axis=-1)
    actual, expected = (
        jax.jit(jax.grad(lambda variables, f=f, kv=kv: loss(f, variables, rest | {"kv": kv})))(variables)
        for f, kv in ((joined, rows), (apart, integers))
    )
    assert_gradients_close(actual, expected)


def test_padding_has_no_gradient():
    """Nor does a NaN in it, in the queries or in the cotangent, reach anything."""
    case = Case(lengths=(5, 40), new=(2, 3), padding=2)
    inputs = testing.make_inputs(case)
    valid = np.arange(5)[None] < np.array(case.new)[:, None]
    q = jnp.where(valid[..., None, None], inputs.q, jnp.nan)

    def out(q, kv):
        return pallas_kernels.paged_attention(q, kv, *inputs[2:])

    @jax.jit
    def pull(bar):
        return jax.vjp(out, q, inputs.kv)[1](bar)

    clean = jax.random.normal(jax.random.key(0), q.shape)
    bars = [pull(jnp.where(valid[..., None, None], clean, tail)) for tail in (jnp.nan, 7.0)]
    for bar in bars:
        assert (np.asarray(bar[0])[~valid] == 0).all() and (np.asarray(bar[0])[valid] != 0).any()
        assert np.isfinite(bar[1]).all()
    np.testing.assert_array_equal(bars[0][1], bars[1][1])


@pytest.mark.parametrize("write_and_attend", [False, True] if NIGHTLY else [True])
def test_through_the_write(write_and_attend):
    """Loss -> attention -> pool -> the keys and values of this step, and what the pool held before."""
    case = Case(lengths=(5, 30), new=(2, 3), block_size=4, packed=True, padding=1)
    inputs = testing.make_inputs(case)
    kv = jnp.where(jnp.isnan(inputs.kv), 0.0, inputs.kv)
    k, v = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 2, 64)), jnp.float32)
    where = inputs.tables, inputs.lengths, inputs.new

    def fused(q, k, v, kv):
        return pallas_kernels.write_and_attend(q, k, v, kv, *where)

    def apart(q, k, v, kv):
        kv = pallas_kernels.write_kv(kv, k, v, *where)
        return pallas_kernels.paged_attention(q, kv, *where), kv

    def plain(q, k, v, kv):
        kv = reference.write_kv(kv, k, v, *where)
        return reference.paged_attention(q, kv, *where), kv

    def gradients(f):
        def loss(q, k, v, kv):
            out, kv = f(q, k, v, kv)
            return jnp.sin(out[:5]).sum() + jnp.cos(kv).sum()  # the last token is padding

        bars = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(inputs.q[:6], k, v, kv)
        return dict(zip(["q", "k", "v", "kv"], bars, strict=True))

    assert_gradients_close(gradients(fused if write_and_attend else apart), gradients(plain))


@pytest.mark.skipif(not NIGHTLY, reason="large programs; tests/core/test_transforms.py has vmap and gradients by day")
def test_vmap_over_problems_under_jit_and_scan():
    """Several whole problems at once, values and gradients; and again inside a scan."""
    case = Case(lengths=(5, 40), new=(2, 3), block_size=4)
    cases = [case, Case(lengths=(39, 2), new=(3, 1), block_size=4)]  # as many blocks in all
    problems = [testing.make_inputs(c, seed) for seed, c in enumerate(cases)]
    width = max(p.tables.shape[1] for p in problems)
    problems = [p._replace(tables=jnp.pad(p.tables, ((0, 0), (0, width - p.tables.shape[1])))) for p in problems]
    blocks = max(p.kv.shape[0] for p in problems)
    problems = [p._replace(kv=jnp.pad(p.kv, ((0, blocks - p.kv.shape[0]), *[(0, 0)] * 4))) for p in problems]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *problems)

    def value_and_gradient(inputs):
        def loss(q, kv):
            out = pallas_kernels.paged_attention(q, kv, *inputs[2:])
            return jnp.sin(out).sum(), out

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(inputs.q, inputs.kv)

    one_by_one = [jax.jit(value_and_gradient)(p) for p in problems]
    expected = jax.tree.map(lambda *x: np.stack(x), *one_by_one)
    scanned = jax.jit(lambda s: jax.lax.scan(lambda c, p: (c, value_and_gradient(p)), 0, s)[1])(stacked)
    for actual in (jax.jit(jax.vmap(value_and_gradient))(stacked), scanned):
        jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-5), actual, expected)


def test_memory_of_the_backward_pass():
    """The pool's own cotangent and a few tiles: not every row's dense keys and values."""
    rows, length, heads, head_dim = 16, 8192, 2, 64
    dense = rows * length * heads * head_dim * 4 * 2
    kv = jax.ShapeDtypeStruct((65, 2, heads, 16, head_dim), jnp.float32)  # rows share most blocks
    q = jax.ShapeDtypeStruct((rows, 1, heads, head_dim), jnp.float32)
    where = jax.ShapeDtypeStruct((rows, length // 16), jnp.int32), *[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 2
    gradient = jax.grad(lambda q, kv, *where: pallas_kernels.paged_attention(q, kv, *where).sum(), argnums=(0, 1))
    temp = jax.jit(gradient).lower(q, kv, *where).compile().memory_analysis().temp_size_in_bytes
    assert temp < 6 * tile_sizes.find_sizes().step_bytes < dense / 2
