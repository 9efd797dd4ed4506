"""Functions called outside of any program, as in a notebook: what they need is compiled once, not at every call."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from compiled import compiled
from nightly import NIGHTLY

import jaxkv

LAYER = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
EVICTING = dataclasses.replace(LAYER, evict="layer")
ROWS, PLACES = 3, 5


def make_config(*layers, **fields):
    return jaxkv.CacheConfig(layers=layers, max_seqs=ROWS, max_seq_len=40, num_blocks=31, block_size=4, **fields)


CONFIGS = {
    "stacked": make_config(LAYER, LAYER, stacked=True),
    "a window": make_config(LAYER, dataclasses.replace(LAYER, window=6, sink_tokens=2)),
    "it evicts": make_config(EVICTING, dataclasses.replace(LAYER, evict="head")),
}


def filled(config, counts=(9, 5, 0)):
    shape = (config.num_layers, ROWS, max(counts), 2, 8)
    kv = jax.random.normal(jax.random.key(0), shape)
    return jaxkv.append(jaxkv.init(config), kv, kv, list(counts))


def calls(config, folder):
    """By name what is called, each of the same shapes whenever it is called."""
    cache = filled(config)
    empty, host = jaxkv.swap_out(cache, [0])
    q, kv = jnp.ones((ROWS, 2, 4, 8)), jnp.ones((ROWS, 2, 2, 8))
    tree = jaxkv.extend(cache, [2, 2, 0])
    jaxkv.save(folder / "rows", cache)

    def adopt():
        prefixes = jaxkv.PrefixCache(config)
        kept = jaxkv.free(prefixes.insert(cache, 0, list(range(9))), [0])
        return prefixes.adopt(kept, 2, prefixes.match([*range(9), 9]))

    found = {
        "extend": lambda: jaxkv.extend(cache, [1, 1, 0]),
        "reserve": lambda: jaxkv.reserve(cache, [12, 9, 0]),
        "append": lambda: jaxkv.append(cache, [kv] * 2, [kv] * 2, [2, 1, 0]),
        "attention": lambda: jaxkv.attention(q, kv, kv, tree, layer=0),
        "plan_step": lambda: jaxkv.plan_step(tree, (ROWS, 2)),
        "fork": lambda: jaxkv.fork(cache, [0], [2]),
        "reorder": lambda: jaxkv.reorder(cache, [1, 0, 2]),
        "truncate": lambda: jaxkv.truncate(cache, [8, 5, 0]),
        "free": lambda: jaxkv.free(cache, [0]),
        "swap_out": lambda: jaxkv.swap_out(cache, [0]),
        "swap_in": lambda: jaxkv.swap_in(empty, [0], host),
        "send": lambda: jaxkv.send(cache, [0], to=jaxkv.init(config), at=[1]),
        "save": lambda: jaxkv.save(folder / "again", cache),
        "load": lambda: jaxkv.load(folder / "rows"),
        "gather": lambda: jaxkv.gather(cache, 0, layer=0),
        "check": lambda: (jaxkv.check(cache), jaxkv.check_invariants(cache), jaxkv.stats(cache), repr(cache)),
    }
    if config.layers[0].evict is None:
        path = jnp.array([[0, 1], [0, -1], [-1, -1]])
        found |= {"keep": lambda: jaxkv.keep(tree, path), "adopt": adopt}
    else:
        keep = jnp.arange(40)[None] % 2 == jnp.zeros((ROWS, 1), jnp.int32)
        found["evict"] = lambda: jaxkv.evict(cache, keep, layer=0)
        heads = jnp.broadcast_to(keep[:, None], (ROWS, 2, 40))
        found["evict heads"] = lambda: jaxkv.evict(cache, heads, layer=1)
    return found


@pytest.mark.parametrize("name", CONFIGS if NIGHTLY else ("it evicts",))
def test_nothing_is_compiled_a_second_time(name, tmp_path):
    again = []
    for what, call in calls(CONFIGS[name], tmp_path).items():
        call()
        again += [what] * compiled(call)
    assert not again
