"""Every function under every setting of JAX that changes what arithmetic may do: it works."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nightly import NIGHTLY

import jaxkv
from jaxkv._layers import dense_attention
from jaxkv.models import DecoderConfig, Rope
from jaxkv.models.config import ExpertsConfig
from jaxkv.models.experts import Experts

pytestmark = pytest.mark.usefixtures("rows_in_tiles")

LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=4, window=5),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=2),
)
ROWS, PLACES = 3, 4


@contextlib.contextmanager
def option(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


SETTINGS = {
    "x64": lambda: option("jax_enable_x64", True),
    "standard promotion": lambda: option("jax_numpy_dtype_promotion", "standard"),
    "rank promotion": lambda: option("jax_numpy_rank_promotion", "raise"),
    "debug_nans": lambda: option("jax_debug_nans", True),
    "debug_infs": lambda: option("jax_debug_infs", True),
    "leaks": jax.checking_leaks,
    "no jit": jax.disable_jit,
    "checkpoint": contextlib.nullcontext,  # see `under`
}


def step(x=1.0):
    """Keys and values of a step."""
    kv = [jnp.full((ROWS, PLACES, layer.num_kv_heads, layer.head_dim), x, jnp.float32) for layer in LAYERS]
    return kv, kv


def queries(layer):
    return jnp.ones((ROWS, PLACES, 2, LAYERS[layer].head_dim), jnp.float32)


def make():
    config = jaxkv.CacheConfig(
        layers=LAYERS, max_seqs=ROWS, max_seq_len=24, num_blocks=18, block_size=4, dtype="float32"
    )
    return jaxkv.append(jaxkv.init(config), *step(), [4, 0, 3])


def attend(function, cache, layer):
    cache = jaxkv.extend(cache, [2, 0, 4])
    k, v = (x[layer] for x in step())
    return function(queries(layer), k, v, cache, layer=layer)


def gradient(cache, layer):
    cache = jaxkv.extend(cache, [2, 0, 4])
    k, v = (x[layer] for x in step())

    def loss(q, k, v):
        return jnp.sum(jaxkv.attention(q, k, v, cache, layer=layer)[0])

    return jax.grad(loss, argnums=(0, 1, 2))(queries(layer), k, v)


def prefix(cache):
    index = jaxkv.PrefixCache(cache.config, spill_bytes=10_000)
    cache = jaxkv.free(index.insert(cache, 0, [1, 2, 3, 4]), 0)
    cache = index.make_room(cache, 18)
    cache = index.adopt(cache, 1, index.match([1, 2, 3, 4, 5]))
    index.check_invariants(cache)
    return index.reset(cache)


def swap(cache):
    cache, host = jaxkv.swap_out(cache, [0, 2])
    return jaxkv.swap_in(cache, [1, 0], host)


def store(cache, folder):
    jaxkv.save(folder / "a.safetensors", cache)
    return jaxkv.load(folder / "a.safetensors", into=jaxkv.free(cache, [0, 1, 2]))


CALLS = {
    "append": lambda cache: jaxkv.append(cache, *step(), [1, 4, 0]),
    "append all": lambda cache: jaxkv.append(cache, *step()),
    "write": lambda cache: jaxkv.write(jaxkv.extend(cache, [1, 1, 4]), step()[0][1], step()[1][1], layer=1),
    "attention": lambda cache: attend(jaxkv.attention, cache, 0),
    "attention of all": lambda cache: attend(jaxkv.attention, cache, 1),
    "gradient": lambda cache: gradient(cache, 0),
    "lse": lambda cache: attend(functools.partial(jaxkv.attention, return_lse=True, soft_cap=5.0), cache, 1),
    "attend": lambda cache: jaxkv.attend(queries(1), cache, layer=1),
    "plan_step": lambda cache: jaxkv.plan_step(jaxkv.extend(cache, [1, 1, 1]), (ROWS, PLACES)),
    "positions": lambda cache: jaxkv.positions(jaxkv.extend(cache, [1, 1, 1]), (3,)),
    "gather": lambda cache: jaxkv.gather(cache, 0, layer=1, max_len=8),
    "fork": lambda cache: jaxkv.fork(cache, 2, [0, 1]),
    "reorder": lambda cache: jaxkv.reorder(cache, [2, 0, 0]),
    "truncate": lambda cache: jaxkv.truncate(jaxkv.fork(cache, 2, 1), [2, 1, 3]),
    "reserve": lambda cache: jaxkv.reserve(cache, [9, 9, 99]),
    "free": lambda cache: jaxkv.free(cache, [True, False, True]),
    "views": lambda cache: (cache.combined(0), cache.separate(1), cache.token(0, 1), jnp.asarray(cache.num_tokens)),
    "repr": lambda cache: bool(repr(cache)),
    "store": lambda cache: cache.store(1, 0, 0, 1, np.ones(2, np.float32), np.ones(2, np.float32)),
    "checks": lambda cache: (jaxkv.check(cache), jaxkv.check_invariants(cache), jaxkv.stats(cache)["tokens"]),
    "prefix": prefix,
    "swap": swap,
}
ON_HOST = ("checks", "prefix", "swap")


# By day one cache, made under no setting; by night under each its own.
made = make if NIGHTLY else functools.cache(make)


def under(setting, name):
    """What a call gives under a setting. `jax.checkpoint` is for what can be traced; the others say so."""
    if setting != "checkpoint":
        with SETTINGS[setting]():
            return CALLS[name](made())
    rematerialised = jax.checkpoint(CALLS[name])
    if name in ON_HOST:
        with pytest.raises(ValueError, match=r"cannot be (part of|used inside) jit"):
            rematerialised(made())
        return CALLS[name](made())
    return rematerialised(made())


def arrays(x):
    """Its numbers: what comes back from `jax.checkpoint` as an array may be a number without."""
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(x) if hasattr(leaf, "dtype") or np.isscalar(leaf)]


@functools.cache
def expected(name):
    return arrays(CALLS[name](made()))


# By day attention is not run operation by operation: that takes as long as all of the others.
PAIRS = [(name, setting) for name in CALLS for setting in SETTINGS]
BY_DAY = [pair for pair in PAIRS if pair[0] in ("attention", "prefix") and pair != ("attention", "no jit")]


@pytest.mark.parametrize(("name", "setting"), PAIRS if NIGHTLY else BY_DAY)
def test_a_function_under_a_setting(name, setting):
    right, found = expected(name), arrays(under(setting, name))
    if name == "prefix":  # labels differ from index to index
        return
    assert len(found) == len(right)
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("setting", ["debug_nans", "debug_infs"])
@pytest.mark.parametrize("kind", ["cached", "sinks", "dense"])
def test_a_gradient_through_a_checkpoint(kind, setting):
    """Nothing that is kept or computed on the way is infinite: only an LSE that is asked for may be."""
    cache = jaxkv.extend(made(), [2, 0, 4])
    k, v = (x[0] for x in step())
    sinks = jnp.ones(2, jnp.float32) if kind == "sinks" else None

    def loss(q, k, v):
        if kind == "dense":
            return jnp.sum(dense_attention(q, k, v, window=2))
        return jnp.sum(jaxkv.attention(q, k, v, cache, layer=0, sinks=sinks)[0])

    inputs = queries(0), k, v
    right = jax.grad(loss, argnums=(0, 1, 2))(*inputs)
    with SETTINGS[setting]():
        found = jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2))(*inputs)
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_experts_are_chosen_without_an_infinity():
    own = ExpertsConfig(count=4, per_token=1, mlp_dim=2, scores="sigmoid", groups=2, groups_per_token=1)
    config = DecoderConfig(
        vocab_size=8, embed_dim=5, mlp_dim=6, num_heads=2, num_kv_heads=1, head_dim=4, max_seq_len=16, windows=(None,),
        ropes=(Rope(),), attention_scale=0.5,
    )  # fmt: skip
    experts = Experts(config, own, "float32", nnx.Rngs(0))
    with SETTINGS["debug_infs"]():
        experts.route(jnp.ones((2, config.embed_dim), jnp.float32))
