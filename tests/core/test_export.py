"""Programs with a cache as bytes: `jax.export`, in this process and in another."""

import os
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._core.state.static_fields import parse_static, render_static

pytest.importorskip("flatbuffers", reason="jax.export writes with flatbuffers")
FULL = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
CONFIGS = {
    "full": jaxkv.CacheConfig(layers=(FULL,) * 2, max_seqs=2, max_seq_len=64, num_blocks=16, dtype="float32"),
    "int8": jaxkv.CacheConfig(
        layers=(FULL,), max_seqs=2, max_seq_len=64, max_tokens=128, dtype="int8", head_dim_multiple=64
    ),
    "windows": jaxkv.CacheConfig(
        layers=(FULL, jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, window=16, sink_tokens=4, dtype="float8_e4m3fn")),
        max_seqs=2, max_seq_len=64, group_blocks=(16, 8), block_size=4,
    ),
    "evicting": jaxkv.CacheConfig(
        layers=(jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, evict="head"),), max_seqs=2, max_seq_len=64, num_blocks=16
    ),
    "stacked": jaxkv.CacheConfig(
        layers=(FULL,) * 2, max_seqs=2, max_seq_len=64, num_blocks=16, stacked=True, join_kv="head"
    ),
    "contiguous": jaxkv.CacheConfig(layers=(FULL,), max_seqs=2, max_seq_len=64, layout="contiguous"),
}  # fmt: skip
Q, KV = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 2, 8))


def decode(q, kv, cache):
    cache = jaxkv.extend(cache, [1, 1])
    for i in range(cache.num_layers):
        q, cache = jaxkv.attention(q, kv, kv, cache, layer=i)
    return q, cache


def through_bytes(function, *arguments):
    program = jax.export.export(jax.jit(function))(*arguments)
    return jax.export.deserialize(bytearray(program.serialize()))


def check_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_come_back_equal_and_as_settled_as_before(name):
    config = CONFIGS[name]
    (back,) = parse_static(render_static((config,)))
    assert back == config and hash(back) == hash(config)
    assert {*back.settled_fields, "block_size"} == {*config.settled_fields, "block_size"}


@pytest.mark.parametrize("name", ["full", "windows"])
def test_a_step_with_a_cache(name):
    cache = jaxkv.append(jaxkv.init(CONFIGS[name]), *[jnp.ones((2, 2, 3, 2, 8))] * 2, [3, 2])
    loaded = through_bytes(decode, Q, KV, cache)
    check_same(loaded.call(Q, KV, cache), jax.jit(decode)(Q, KV, cache))


def test_every_state_of_the_public_functions():
    cache = jaxkv.append(jaxkv.init(CONFIGS["full"]), *[jnp.ones((2, 2, 3, 2, 8))] * 2, [3, 2])
    _, host = jaxkv.swap_out(cache, [0])
    mesh = jax.make_mesh((1,), ("data",))
    states = {
        "layer": cache.layers[1],
        "step": jaxkv.plan_step(jaxkv.extend(cache, [1, 1]), (2, 1), tree=[[-1], [-1]], cascade=True),
        "host": host,
        "bounds": jaxkv.block_bounds(cache, layer=0),
        "rows": jaxkv.init(CONFIGS["full"], mesh=mesh, rows="data"),
        "beams": jaxkv.Beams(jnp.ones((1, 2, 3), jnp.int32), jnp.ones((1, 2))),
    }
    for state in states.values():
        loaded = through_bytes(lambda x: jax.tree.map(jnp.asarray, x), state)
        check_same(loaded.call(state), state)


def test_what_was_written_elsewhere_is_called_here(tmp_path):
    """Another process exports the step, and saves a cache; this one has never traced it."""
    program = f"""
import jax, jax.export, sys
sys.path[:0] = {sys.path!r}
import jaxkv
from core.test_export import CONFIGS, Q, KV, decode
cache = jaxkv.init(CONFIGS["windows"])
program = jax.export.export(jax.jit(decode))(Q, KV, cache)
open({str(tmp_path / "step")!r}, "wb").write(program.serialize())
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)
    loaded = jax.export.deserialize(bytearray((tmp_path / "step").read_bytes()))
    cache = jaxkv.init(CONFIGS["windows"])
    check_same(loaded.call(Q, KV, cache), jax.jit(decode)(Q, KV, cache))
    with pytest.raises(ValueError, match=r"(?i)pytree"):
        loaded.call(Q, KV, jaxkv.init(CONFIGS["full"]))


def test_what_is_no_static_field_is_refused():
    with pytest.raises(TypeError, match="plain values, not object"):
        render_static((object(),))
