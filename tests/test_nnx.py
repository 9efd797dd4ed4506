"""`jaxkv.nnx.Attention`."""

import adapters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nightly import NIGHTLY

import jaxkv
import jaxkv.nnx


def make(**options):
    options = adapters.OPTIONS | options
    shapes = nnx.eval_shape(lambda: jaxkv.nnx.Attention(adapters.WIDTH, **options, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(shapes)  # which compiles nothing
    return nnx.merge(graph, adapters.randomise(params))


def apply(model, x, **arguments):
    return model(jnp.asarray(x), **arguments)


@pytest.mark.parametrize("variant", adapters.VARIANTS if NIGHTLY else ["plain", "soft cap and scale"])
def test_padded_steps_equal_the_dense_path(variant):
    adapters.check_padded(apply, make(**adapters.VARIANTS[variant]))


def test_every_option_matters():
    adapters.check_options_matter(lambda **options: (apply, make(**options)))


def test_padded_steps_under_nnx_jit():
    adapters.check_padded(apply, make(), jit=nnx.jit)


@pytest.mark.skipif(not NIGHTLY, reason="tests/test_linen.py has it by day")
def test_packed_steps_equal_the_dense_path():
    adapters.check_packed(apply, make(use_bias=True))


@pytest.mark.skipif(not NIGHTLY, reason="tests/test_linen.py has it by day")
def test_scan_over_steps():
    adapters.check_scan(apply, make())


@pytest.mark.skipif(not NIGHTLY, reason="each layer is a program to compile")
def test_position_fn_may_be_a_module():
    class Shift(nnx.Module):
        def __init__(self):
            self.by = nnx.Param(jnp.full((1,), 0.5))

        def __call__(self, q, k, positions):
            turn = jnp.cos(positions.astype(jnp.float32) * self.by[0])[..., None, None]
            return q * turn, k * turn

    model = make(position_fn=Shift())
    assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) == 5
    adapters.check_padded(apply, model)


def test_layers_of_one_cache_do_not_mix():
    first, second = make(), make(window=3)
    x = jnp.asarray(adapters.sequences()[0])[None].repeat(4, axis=0)
    cache = jaxkv.extend(adapters.new_cache(num_layers=2), [x.shape[1]] * 4)
    y, cache = first(x, cache=cache, layer=0)
    y, cache = second(y, cache=cache, layer=1)
    np.testing.assert_allclose(y, second(first(x)[0])[0], rtol=1e-4, atol=1e-5)


def test_dtypes():
    model = jaxkv.nnx.Attention(8, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert model(jnp.ones((1, 3, 8)))[0].dtype == jnp.bfloat16
    assert model.query.dtype == jnp.float32
    model = jaxkv.nnx.Attention(8, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert model(jnp.ones((1, 3, 8)))[0].dtype == jnp.bfloat16


def test_no_projection_copies_its_kernel():
    """Neither one that sums over heads and their numbers, nor one that makes them."""
    x, heads = jnp.zeros((40, 24)), jnp.zeros((40, 4, 6))  # of few tokens it is what comes out that is turned

    def both(x, heads, into, out):
        return jaxkv.nnx.project("...e,hde->...hd", x, into), jaxkv.nnx.project("...hd,hde->...e", heads, out)

    program = jax.jit(both).lower(x, heads, jnp.zeros((4, 6, 24)), jnp.zeros((4, 6, 24))).compile().as_text()
    assert "copy" not in program and "transpose" not in program


def test_gradients_reach_every_parameter():
    model = make(use_bias=True, use_sinks=True)
    x = jnp.asarray(adapters.sequences()[0])
    grads = jax.jit(jax.grad(lambda model: jnp.sum(jnp.square(model(x)[0]))))(model)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (dict(in_features=8, num_heads=4, num_kv_heads=3), "4 query heads cannot be shared among 3 KV heads"),
        (dict(in_features=8, num_heads=4, num_kv_heads=0), "num_kv_heads must be at least 1, not 0"),
        (dict(in_features=10, num_heads=4), "in_features 10 is not a multiple of num_heads 4"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        jaxkv.nnx.Attention(**arguments, rngs=nnx.Rngs(0))


NO_SIZES = [True, 1.5, 0, -1, 2**31, float("nan"), "8", [], (8,), np.ones(2)]
NO_SCALES = [True, 0, -1, float("inf"), "1", [], np.ones(2)]
NO_FLAGS = [1, 0, "yes", [], np.ones(2)]
NO_DTYPES = [1, "int3", "int32", bool, [], {}, np.ones(2), object()]
WRONG = {
    **dict.fromkeys(
        ("num_heads", "in_features", "num_kv_heads", "head_dim", "v_head_dim", "window", "chunk"), NO_SIZES
    ),
    **dict.fromkeys(("use_bias", "use_out_bias", "use_sinks"), NO_FLAGS),
    **dict.fromkeys(("scale", "soft_cap"), NO_SCALES),
    **dict.fromkeys(("dtype", "param_dtype"), NO_DTYPES),
    "position_fn": [1, "rope", []],
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_another_kind_are_told_by_name(name):
    """A layer without heads would end the process within XLA."""
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=rf"^{name} must be .*\.$"):
            jaxkv.nnx.Attention(**{"num_heads": 4, "in_features": 32, "rngs": nnx.Rngs(0)} | {name: value})


def test_a_call_with_arguments_of_another_kind():
    attn = jaxkv.nnx.Attention(num_heads=4, in_features=32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x must be \[S, T, 32\] .*, but it is a NoneType\."):
        attn(None)
    cache = jaxkv.init(jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=4, head_dim=8, max_seqs=1, max_seq_len=8))
    for value in (1, "yes", None, np.ones(2)):
        with pytest.raises(ValueError, match="deterministic must be True or False, not "):
            attn(jnp.ones((1, 1, 32)), cache, deterministic=value)


@pytest.mark.parametrize("shape", [(2, 5, 32), (5, 32), (2, 5, 128), ()])
def test_an_input_of_another_width(shape):
    attn = jaxkv.nnx.Attention(64, num_heads=4, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"packed \[N, 64\], since this layer was made with in_features=64, but its shape"
    ):
        attn(jnp.ones(shape))
    assert attn(jnp.ones((2, 5, 64)))[0].shape == (2, 5, 64)
