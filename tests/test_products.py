"""Products of few tokens: what they give, and how a CPU does them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nightly import NIGHTLY

import jaxkv
import jaxkv.linen
import jaxkv.nnx
from jaxkv import _products
from jaxkv._products import FEW, SUMMED, dot_general, grouped_product, product, product_by_heads, split_heads
from pallas_kernels.xla.row_product import can_sum, multiply_rows

OUTPUTS, INPUTS = 48, 40


def make(front: tuple[int, ...], dtype=jnp.float32, outputs_first: bool = True):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((OUTPUTS, INPUTS) if outputs_first else (INPUTS, OUTPUTS))
    return jnp.asarray(rng.standard_normal((*front, INPUTS)), dtype), jnp.asarray(weight, dtype)


FORMS = [(jnp.bfloat16, True), (jnp.bfloat16, False), (jnp.float32, True)]
FORMS += [(jnp.float32, False), (jnp.float16, True), (jnp.float16, False)] * NIGHTLY


@pytest.mark.parametrize(("dtype", "outputs_first"), FORMS)
@pytest.mark.parametrize("front", [(), (0,), (1,), (2,), (5,), (6,), (8,), (9,), (17,), (FEW,), (FEW + 1,), (3, 2)])
def test_every_form_gives_the_product(front, dtype, outputs_first):
    x, weight = make(front, dtype, outputs_first)
    y = product(x, weight, outputs_first=outputs_first)
    exact = np.float64(x) @ (np.float64(weight).T if outputs_first else np.float64(weight))
    np.testing.assert_allclose(np.float64(y), exact, rtol=2 * float(jnp.finfo(dtype).eps), atol=4e-6)
    assert y.dtype == dtype and y.shape == (*front, OUTPUTS)


def test_in_another_dtype():
    for count in (1, 2):
        x, weight = make((count,), jnp.bfloat16)
        y = product(x, weight, dtype=jnp.float32)
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, np.float64(x) @ np.float64(weight).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs_first", [True, False])
def test_one_token_widens_no_weight(outputs_first):
    """XLA wrote all of a weight of bfloat16 down in float32 for it, which took eight times as long as the product."""
    x, weight = make((1,), jnp.bfloat16, outputs_first)
    weight = jnp.tile(weight, (16, 16))
    x = jnp.tile(x, 16)
    program = jax.jit(lambda x, weight: product(x, weight, outputs_first=outputs_first)).lower(x, weight).compile()
    assert program.memory_analysis().temp_size_in_bytes < weight.nbytes // 3


@pytest.mark.parametrize("size", [32, 200, 576, 8 * 23, 8 * 24 * 31])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_are_summed_in_pieces_of_any_number(rows, size):
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((rows, size)), rng.standard_normal((6, size))
    assert can_sum(size)
    for outputs_first, kernel in ((True, weight), (False, weight.T)):
        y = multiply_rows(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32), outputs_first=outputs_first)
        np.testing.assert_allclose(y, x @ weight.T, rtol=1e-5, atol=1e-4)
    assert not any(map(can_sum, (8 * 3, 36, 8 * 29)))


@pytest.mark.parametrize(("bytes_", "outputs_first"), SUMMED)
def test_a_cpu_sums_products_of_so_many_tokens(bytes_, outputs_first):
    for more in (0, 1):
        count = SUMMED[bytes_, outputs_first] + more
        x, weight = make((count,), {2: jnp.bfloat16, 4: jnp.float32}[bytes_], outputs_first)
        program = jax.jit(lambda x, weight: product(x, weight, outputs_first=outputs_first)).lower(x, weight).as_text()
        assert ("dot_general" in program) == bool(more)


def test_vmap_joins_rows_and_derivatives_are_products():
    x, weight = make((3, 1), jnp.bfloat16)

    def loss(x, weight):
        return jnp.sum(jnp.sin(product(x, weight).astype(jnp.float32)))

    joined = jax.jit(jax.vmap(product, in_axes=(0, None)))
    assert "stablehlo.reduce" not in joined.lower(x, weight).as_text()
    np.testing.assert_allclose(np.float32(joined(x, weight)[:, 0]), np.float32(product(x[:, 0], weight)), rtol=1e-2)
    found = jax.grad(loss, (0, 1))(x[0], weight)
    wanted = jax.grad(lambda x, w: jnp.sum(jnp.sin((x @ w.T).astype(jnp.float32))), (0, 1))(x[0], weight)
    each = jax.vmap(jax.grad(loss), in_axes=(0, None))(x, weight)
    for a, b in zip((*found, each[0]), (*wanted, wanted[0]), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=5e-2, atol=5e-2)


def test_weights_that_devices_share_are_not_summed():
    """A divided axis cannot be cut into pieces; in `shard_map` each device has a weight of its own."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, weight = make((1,), jnp.bfloat16)
    specs = jax.P(), jax.P("x")
    with jax.set_mesh(mesh):
        shared = jax.device_put(weight, jax.NamedSharding(mesh, specs[1]))
        program = jax.jit(product).lower(x, shared)
        own = jax.jit(jax.shard_map(product, in_specs=specs, out_specs=jax.P(None, "x")))
        assert "dot_general" in program.as_text() and "dot_general" not in own.lower(x, shared).as_text()
        np.testing.assert_array_equal(np.float32(own(x, shared)), np.float32(product(x, weight)))


def test_flax_layers_have_products_of_few_tokens():
    rng = np.random.default_rng(0)

    def general(x, kernel, inner, **options):
        numbers = (tuple(range(x.ndim - inner, x.ndim)), tuple(range(inner))), ((), ())
        y = jax.jit(lambda x, kernel: dot_general(x, kernel, numbers, **options))
        exact = jax.lax.dot_general(x, kernel, numbers, preferred_element_type=jnp.float32)
        np.testing.assert_allclose(np.float32(y(x, kernel)), exact, rtol=1e-2, atol=1e-2)
        return "dot_general" not in y.lower(x, kernel).as_text()

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    assert general(draw(1, 1, 64), draw(64, 4, 8), 1, preferred_element_type=jnp.bfloat16)
    assert general(draw(1, 1, 4, 8), draw(4, 8, 64), 2)
    assert not general(draw(5, 64), draw(64, 4, 8), 1) and not general(draw(1, 64), draw(64, 8), 1, precision="highest")
    others = (((0,), (0,)), ((), ())), (((2,), (1,)), ((0,), (0,)))  # tokens behind, and a batch
    for numbers, x, kernel in zip(others, (draw(64, 1), draw(2, 1, 64)), (draw(64, 8), draw(2, 64, 8)), strict=True):
        np.testing.assert_array_equal(dot_general(x, kernel, numbers), jax.lax.dot_general(x, kernel, numbers))


@pytest.mark.parametrize("kind", ["linen.Attention", "linen.MultiHeadDotProductAttention", "nnx.MultiHeadAttention"])
def test_each_product_of_a_layer_is_summed(kind, monkeypatch):
    config = jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=4, head_dim=8, max_seqs=1, max_seq_len=16)
    x = jnp.ones((1, 1, 32), jnp.bfloat16)
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    if kind.startswith("nnx"):
        layer = jaxkv.nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), **types)
    else:
        module = getattr(jaxkv.linen, kind.removeprefix("linen."))(num_heads=4, **types)
        layer = functools.partial(module.apply, module.init(jax.random.key(0), x))

    def count():
        step = jax.jit(lambda x, cache: layer(x, cache=jaxkv.extend(cache, jnp.ones(1, jnp.int32)), layer=0)[0])
        return step.lower(x, jaxkv.init(config)).as_text().count("stablehlo.dot_general")

    few = count()
    monkeypatch.setattr(_products, "SUMMED", {})
    assert count() == few + 4


def test_few_tokens_are_the_right_operand():
    """A weight is read as it lies: the right operand is what XLA brings into tiles."""
    for count, shape in ((4, (OUTPUTS, 4)), (7, (OUTPUTS, 8)), (FEW + 1, (FEW + 1, OUTPUTS))):
        program = jax.jit(product).lower(*make((count,))).compile().as_text()
        assert re.search(rf"f32\[{shape[0]},{shape[1]}\]\S* (dot|fusion)\(", program), count


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_have_the_plain_product(platform, count):
    x, weight = make((count,), jnp.bfloat16 if count == 1 else jnp.float32)
    program = jax.jit(product).trace(x, weight).lower(lowering_platforms=(platform,)).as_text()
    assert program.count("stablehlo.dot_general") == 1
    assert not any(f"stablehlo.{name}" in program for name in ("optimization_barrier", "pad", "transpose"))


def test_gradients_and_vmap():
    x, weight = make((3, 7))

    def loss(x, weight):
        return jnp.sum(jnp.square(product(x, weight)))

    for ours, exact in zip(
        jax.grad(loss, (0, 1))(x, weight),
        jax.grad(lambda x, w: jnp.sum(jnp.square(x @ w.T)), (0, 1))(x, weight),
        strict=True,
    ):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-4)
    by_one = jax.vmap(product, in_axes=(0, None))(x, weight)
    np.testing.assert_allclose(by_one, product(x, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outputs_first", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("front", [(), (0,), (1,), (2,), (3, 4)])
def test_heads_meet_their_own_weights(front, dtype, outputs_first):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((*front, 5, INPUTS)), dtype)
    weights = jnp.asarray(rng.standard_normal((5, OUTPUTS, INPUTS) if outputs_first else (5, INPUTS, OUTPUTS)), dtype)
    y = product_by_heads(x, weights, outputs_first=outputs_first)
    exact = np.einsum("...hi,hoi->...ho" if outputs_first else "...hi,hio->...ho", np.float64(x), np.float64(weights))
    np.testing.assert_allclose(np.float64(y), exact, rtol=2 * float(jnp.finfo(dtype).eps), atol=4e-6)
    assert y.dtype == dtype and y.shape == exact.shape


@pytest.mark.parametrize("outputs_first", [True, False])
@pytest.mark.parametrize("count", [1, 4])
def test_no_weight_by_heads_is_widened_or_turned(count, outputs_first):
    x = jnp.ones((count, 8, 64), jnp.bfloat16)
    weights = jnp.ones((8, 64, 64), jnp.bfloat16)
    program = jax.jit(lambda x, w: product_by_heads(x, w, outputs_first=outputs_first)).lower(x, weights).compile()
    assert program.memory_analysis().temp_size_in_bytes < weights.nbytes // 2


# Products by groups.


def make_groups(sizes: list[int], dtype=jnp.float32):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((sum(sizes), INPUTS)), dtype)
    return x, jnp.asarray(rng.standard_normal((len(sizes), INPUTS, OUTPUTS)), dtype), jnp.asarray(sizes, jnp.int32)


GROUPS = [[0], [1], [3], [2, 1, 0], [0, 0, 5], [4, 4, 4], [5, 0, 1, 9], [300, 2, 0, 1], [1, 0, 299], [0] * 40 + [7, 1]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_groups_meet_their_own_weights(sizes, dtype):
    x, weights, counts = make_groups(sizes, dtype)
    of = np.repeat(np.arange(len(sizes)), sizes)
    exact = np.einsum("ni,nio->no", np.float64(x), np.float64(weights)[of])
    y = jax.jit(grouped_product)(x, weights, counts)
    np.testing.assert_allclose(np.float64(y), exact, rtol=2 * float(jnp.finfo(dtype).eps), atol=4e-6)
    assert y.dtype == dtype


def test_groups_where_integers_have_64_bits():
    x, weights, counts = make_groups([2, 1, 0])
    wanted = grouped_product(x, weights, counts)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(grouped_product(x, weights, counts), wanted)


def test_weights_of_empty_groups_are_not_read():
    x, weights, counts = make_groups([2, 0, 3, 0])
    poisoned = weights.at[jnp.asarray([1, 3])].set(jnp.nan)
    np.testing.assert_array_equal(grouped_product(x, poisoned, counts), grouped_product(x, weights, counts))


def test_groups_copy_one_weight_at_a_time():
    x, weights, counts = make_groups([2] * 64)
    memory = jax.jit(grouped_product).lower(x, weights, counts).compile().memory_analysis()
    assert memory.temp_size_in_bytes < weights.nbytes // 4


def test_one_program_serves_all_sizes():
    x, weights, _ = make_groups([4, 4, 4])
    program = jax.jit(lambda *arguments: grouped_product(*arguments))
    for sizes in ([12, 0, 0], [0, 0, 12], [5, 2, 5]):
        program(x, weights, jnp.asarray(sizes, jnp.int32))
    assert program._cache_size() == 1


def test_gradients_by_groups():
    x, weights, counts = make_groups([3, 0, 6])

    def loss(product):
        return lambda x, weights: jnp.sum(jnp.sin(product(x, weights, counts)))

    ours = jax.grad(loss(grouped_product), (0, 1))(x, weights)
    for a, b in zip(ours, jax.grad(loss(jax.lax.ragged_dot), (0, 1))(x, weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_have_their_ragged_product(platform):
    x, weights, counts = make_groups([3, 5])
    program = jax.jit(grouped_product).trace(x, weights, counts).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" not in program and "ragged_dot" in program


@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "waits"),
    [(32, 128, False), (33, 128, True), (33, 256, True), (1, 192, True), (64, 64, False), (64, 96, False)],
)
def test_where_heads_wait_for_their_product_on_a_tpu(num_tokens, head_dim, waits):
    x = jnp.ones((num_tokens, 2 * head_dim))
    traced = jax.jit(lambda x: split_heads(x, (2, head_dim))).trace(x)
    for platform, there in (("tpu", waits), ("cpu", False)):
        assert ("optimization_barrier" in traced.lower(lowering_platforms=(platform,)).as_text()) == there
    np.testing.assert_array_equal(split_heads(x, (2, head_dim)), x.reshape(num_tokens, 2, head_dim))
