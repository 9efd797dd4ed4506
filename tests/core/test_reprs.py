"""What the objects of a cache say of themselves."""

import jax
import jax.numpy as jnp
import pytest

import jaxkv
import jaxkv.scores

LOCAL = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, window=32)
FULL = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
SIZES = dict(max_seqs=2, max_seq_len=64, block_size=16)


@pytest.mark.parametrize(
    ("config", "written"),
    [
        (
            jaxkv.CacheConfig(layers=(FULL,) * 32, num_blocks=8, **SIZES),
            "CacheConfig(layers=(LayerConfig(num_kv_heads=2, head_dim=8),) * 32, max_seqs=2, max_seq_len=64, "
            "num_blocks=8, block_size=16)",
        ),
        (
            jaxkv.CacheConfig(layers=(LOCAL, FULL) * 2, group_blocks=(4, 8), dtype="int8", stacked=True, **SIZES),
            "CacheConfig(layers=(LayerConfig(num_kv_heads=2, head_dim=8, window=32), LayerConfig(num_kv_heads=2, "
            "head_dim=8)) * 2, max_seqs=2, max_seq_len=64, group_blocks=(4, 8), block_size=16, dtype='int8', "
            "stacked=True)",
        ),
        (
            jaxkv.CacheConfig(layers=(FULL, FULL, LOCAL), max_seqs=2, max_seq_len=64, num_blocks=8),
            "CacheConfig(layers=(LayerConfig(num_kv_heads=2, head_dim=8),) * 2 + (LayerConfig(num_kv_heads=2, "
            "head_dim=8, window=32),), max_seqs=2, max_seq_len=64, num_blocks=8, block_size=16)",
        ),
        (
            jaxkv.CacheConfig(layers=(FULL,), max_seqs=2, max_seq_len=64, layout="contiguous"),
            "CacheConfig(layers=(LayerConfig(num_kv_heads=2, head_dim=8),), max_seqs=2, max_seq_len=64, "
            "layout='contiguous')",
        ),
        (
            jaxkv.LayerConfig.latent(rank=16, rope_dim=8, dtype="float32"),
            "LayerConfig(num_kv_heads=1, head_dim=24, dtype='float32', rank=16)",
        ),
        (
            jaxkv.CacheConfig(layers=(jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, evict="head"),), num_blocks=8,
                              join_kv="head", head_dim_multiple=64, **SIZES),
            "CacheConfig(layers=(LayerConfig(num_kv_heads=2, head_dim=8, evict='head'),), max_seqs=2, max_seq_len=64, "
            "num_blocks=8, block_size=16, head_dim_multiple=64, join_kv='head')",
        ),
    ],
)  # fmt: skip
def test_a_config_writes_what_makes_it_again(config, written):
    assert repr(config) == written
    assert eval(written, {"CacheConfig": jaxkv.CacheConfig, "LayerConfig": jaxkv.LayerConfig}) == config


@pytest.fixture(scope="module")
def config():
    return jaxkv.CacheConfig(layers=(LOCAL, FULL), group_blocks=(4, 8), dtype="float32", **SIZES)


def test_parts_of_a_cache_say_what_they_hold(config):
    cache = jaxkv.extend(jaxkv.init(config), [20, 0])
    tables = "BlockTables(2 rows of up to 4 blocks, 6 of 8 blocks free, lengths [20, 0])"
    assert repr(cache.tables[1]) == tables
    assert repr(cache.layers[1]) == f"Layer(1 of 2, LayerConfig(num_kv_heads=2, head_dim=8), {tables})"
    assert repr(cache.pools[1]) == "Pool(float32[9, 2, 2, 16, 8])"
    assert repr(jaxkv.plan_step(cache, (2, 20))) == "Step(step, padded i32[2, 20], 20 tokens in 1 row)"
    alone = jaxkv.extend(jaxkv.init(config), [1, 1])
    assert repr(jaxkv.plan_step(alone, (2,))) == "Step(decode step, packed i32[2], 2 tokens in 2 rows)"
    prefix = jaxkv.PrefixCache(config)
    prefix.insert(cache, 0, list(range(20)))
    prefix.match([*range(20), 5])
    assert repr(prefix) == "PrefixCache(2 of 12 blocks kept, 0 hits in 1 lookups, 0 of 21 tokens saved)"


def test_quantised_and_traced_parts(config):
    quantised = jaxkv.init(config.replace(dtype="int8"))
    assert repr(quantised.pools[0]) == "Pool(int8[5, 2, 2, 16, 8], scale float32[5, 2, 2, 16])"
    said = []

    def look(cache):
        step = jaxkv.plan_step(cache, (2, 1))
        said.extend(map(repr, (cache.layers[0], cache.tables[0], step, cache.pools[0])))
        return cache

    jax.eval_shape(look, quantised)
    assert said[1] == "BlockTables(2 rows of up to 4 blocks, traced)" and said[0].endswith(f"{said[1]})")
    assert said[2] == "Step(decode step, padded i32[2, 1])" and said[3] == repr(quantised.pools[0])
    specs = jaxkv.partition_specs(config, jax.make_mesh((1,), ("model",)))
    assert repr(specs.tables[0]).startswith("BlockTables(") and repr(specs.pools[0]).startswith("Pool(")


@pytest.mark.parametrize("function", [jaxkv.stats, jaxkv.check, jaxkv.check_invariants])
def test_shapes_hold_no_numbers(config, function):
    shapes = jax.eval_shape(lambda: jaxkv.init(config))
    with pytest.raises(ValueError, match=f"{function.__name__} reads numbers .* only shapes, .* cache.config"):
        function(shapes)


def test_what_was_donated_says_so(config):
    cache = jaxkv.init(config)
    layer, tables, pool, step = cache.layers[0], cache.tables[0], cache.pools[0], jaxkv.plan_step(cache, (2, 1))
    after = jax.jit(lambda cache: jaxkv.extend(cache, jnp.array([1, 0])), donate_argnames="cache")(cache)
    for x in (cache, layer, tables, pool, step):
        assert repr(x) == f"{type(x).__name__}(donated: go on with the one that the step returned)"
    assert cache._repr_html_() == repr(cache) and "donated" not in repr(after)
    for function in (
        jaxkv.stats,
        jaxkv.check,
        lambda cache: jaxkv.extend(cache, [1, 1]),
        lambda cache: jaxkv.fork(cache, 0, 1),
    ):
        with pytest.raises(ValueError, match="This cache was donated: go on with the one that the step returned"):
            function(cache)


READ_POOLS = {
    "attention": lambda c, x: jaxkv.attention(x, x, x, c, layer=0),
    "attend": lambda c, x: jaxkv.attend(x, c, layer=0),
    "write with a layer": lambda c, x: jaxkv.write(c.layers[0], x, x),
    "gather": lambda c, x: jaxkv.gather(c, 0, layer=0),
    "extend": lambda c, x: jaxkv.extend(c, [1, 1]),
    "fork": lambda c, x: jaxkv.fork(c, 0, 1),
    "append": lambda c, x: jaxkv.append(c, x[None], x[None]),
    "swap_out": lambda c, x: jaxkv.swap_out(c, 0),
    "save": lambda c, x: jaxkv.save("file", c),
    "send": lambda c, x: jaxkv.send(c, 0, to=c),
}


@pytest.mark.parametrize("name", READ_POOLS)
def test_whatever_shares_pools_with_what_was_donated_says_so(name):
    """free outside of jit returns other tables and the same pools."""
    cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig(layers=(FULL,), num_blocks=8, **SIZES)), [1, 1])
    after = jaxkv.free(cache, [1])
    jax.jit(lambda cache: jaxkv.extend(cache, jnp.array([1, 1])), donate_argnames="cache")(after)
    says = r"This (cache|layer) shares its pools with a cache that was donated: .* copy one before: jax\.tree\.map"
    with pytest.raises(ValueError, match=says):
        READ_POOLS[name](cache, jnp.ones((2, 1, 2, 8)))


READERS = {
    "attention": lambda c, x: jaxkv.attention(x, x, x, c, layer=0),
    "attend": lambda c, x: jaxkv.attend(x, c, layer=0),
    "write": lambda c, x: jaxkv.write(c, x, x, layer=0),
    "positions": lambda c, x: jaxkv.positions(c.layers[0], (2, 1)),
    "attention with a layer": lambda c, x: jaxkv.attention(x, x, x, c.layers[0]),
    "write with a layer": lambda c, x: jaxkv.write(c.layers[0], x, x),
    "lengths": lambda c, x: c.lengths,
    "new": lambda c, x: c.new,
    "failed": lambda c, x: c.failed,
    "is_empty": lambda c, x: c.is_empty,
    "num_tokens": lambda c, x: c.num_tokens,
    "blocks_in_use": lambda c, x: c.blocks_in_use,
    "held": lambda c, x: c.layers[0].held,
    "token": lambda c, x: c.token(0, 0),
    "read": lambda c, x: c.read(0, 0, 0),
    "separate": lambda c, x: c.separate(0),
    "combined": lambda c, x: c.combined(0),
    "snapkv": lambda c, x: jaxkv.scores.snapkv(c, layer=0, q=x),
    "tova": lambda c, x: jaxkv.scores.tova(c, layer=0, q=x),
    "knorm": lambda c, x: jaxkv.scores.knorm(c, layer=0),
    "streaming_llm": lambda c, x: jaxkv.scores.streaming_llm(c, layer=0),
    "quest": lambda c, x: jaxkv.scores.quest(c, layer=0, q=x, num_blocks=1),
    "uniform": lambda c, x: jaxkv.scores.uniform(c, 0.5),
    "pyramid": lambda c, x: jaxkv.scores.pyramid(c, 0.5, layer=0, window_size=1),
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_reads_what_was_donated_says_so(name):
    cache = jaxkv.init(jaxkv.CacheConfig(layers=(FULL,), num_blocks=8, **SIZES))
    after = jax.jit(lambda cache: jaxkv.extend(cache, jnp.array([1, 1])), donate_argnames="cache")(cache)
    x = jnp.ones((2, 1, 2, 8))
    with pytest.raises(ValueError, match=r"This (cache|layer) was donated: go on with the one that the step returned"):
        READERS[name](cache, x)
    READERS[name](after, x)
