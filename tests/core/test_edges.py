"""What no other test came to: steps and reads of nothing, plans that are closed over, rows that failed before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nightly import NIGHTLY
from three_rows import CONFIG, filled, ones

import jaxkv
import jaxkv.convert
import jaxkv.nnx
import jaxkv.scores

Q = ones(3, 1, 2, 8)
BY_HEAD = jaxkv.LayerConfig(num_kv_heads=2, head_dim=4, evict="head")


def made(layer, dtype="float32", **fields):
    sizes = dict(max_seqs=3, max_seq_len=32, num_blocks=24, block_size=4) | fields
    return jaxkv.init(jaxkv.CacheConfig(layers=(layer,), dtype=dtype, **sizes))


def attended(q, cache, step=None):
    return jaxkv.attend(q, cache, layer=0, step=step)


@pytest.mark.parametrize("inner", [jax.checkpoint, jax.jit, lambda f: lambda q: jax.lax.map(f, q[None])[0]])
def test_a_plan_is_used_within_a_trace_and_again_behind_it(inner):
    cache = jaxkv.extend(filled(), [1, 0, 2])  # of the last row one token too many for what is planned
    step = jaxkv.plan_step(cache, (3, 1))
    other = jax.tree.map(lambda x: x, cache)  # one that the plan has not seen, and has to be held against it

    def twice(q, cache, step):
        return inner(lambda q: attended(q, cache, step))(q), attended(q, cache, step)

    for found in (jax.jit(twice)(Q, cache, step), twice(Q, other, step)):
        for out in found:
            np.testing.assert_allclose(out, attended(Q, cache), atol=1e-6)


def test_rows_that_failed_keep_their_places_for_quest():
    cache = made(jaxkv.LayerConfig(num_kv_heads=1, head_dim=4), max_seqs=2)
    kv = jax.random.normal(jax.random.key(0), (1, 2, 24, 1, 4))

    @jax.jit
    def chosen(number, asked, cache=cache):
        cache = jaxkv.extend(jaxkv.extend(jaxkv.append(cache, kv, kv, [0, 24]), asked), [3, 1])
        q = jnp.concatenate([jnp.full((3, 1, 4), number), 10 * kv[0, 1, 5][None]])
        return jaxkv.scores.quest(jaxkv.write(cache, q, q, layer=0), layer=0, q=q, num_blocks=3)[1]

    wanted = chosen(0.0, np.array([0, 0])).tolist()
    found = [chosen(number, np.array([100, 0])) for number in (0.0, 9.0, -9.0)]
    assert np.array(found).tolist() == [wanted] * 3


@pytest.mark.parametrize("dtype", ["int8", *["int4"] * NIGHTLY])
def test_raw_numbers_of_rows_thinned_by_heads(dtype):
    kv = jax.random.normal(jax.random.key(1), (1, 3, 6, 2, 4))
    sizes, counts = dict(max_seqs=3, max_seq_len=32, num_blocks=24, block_size=4, dtype=dtype), [6, 3, 0]
    whole = jaxkv.LayerConfig(num_kv_heads=2, head_dim=4)
    caches = [jaxkv.init(jaxkv.CacheConfig(layers=(layer,), **sizes)) for layer in (BY_HEAD, whole)]
    caches = [jaxkv.append(cache, kv, kv, counts) for cache in caches]
    for row in range(3):
        found, wanted = (jaxkv.gather(cache, row, layer=0, raw=True) for cache in caches)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_an_empty_row_on_a_mesh():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    config = jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    k, v = jaxkv.gather(jaxkv.init(config, mesh=mesh), 1, layer=0)
    assert k.shape == v.shape == (0, 2, 8)


def test_steps_of_no_tokens_in_a_layer_that_evicts_by_heads():
    cache = jaxkv.extend(made(BY_HEAD), [0, 0, 0])
    for nothing in (ones(3, 0, 2, 4), ones(0, 2, 4)):
        assert jaxkv.attention(nothing, nothing, nothing, cache, layer=0)[0].shape == nothing.shape


@pytest.mark.parametrize("option", [{"blocks": np.zeros((3, 0), int)}, {"mask": jnp.zeros((3, 1, 0), bool)}])
def test_nothing_to_see(option):
    def total(q, cache):
        return jaxkv.attend(q, cache, layer=0, **option).sum()

    value, slope = jax.value_and_grad(total)(Q, jaxkv.append(filled(), [Q, ones(3, 1, 1, 4)], [Q, ones(3, 1, 1, 4)]))
    assert value == 0 and not np.asarray(slope).any()


@pytest.mark.parametrize("bounds", [False, True])
def test_a_step_of_which_nothing_is_kept(bounds):
    kv = ones(1, 3, 5, 2, 8)
    cache = jaxkv.append(made(jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, bounds=bounds)), kv, kv, [5, 3, 0])
    for holder in (cache, jax.device_get(cache)):  # in NumPy's arrays too
        kept = jaxkv.keep(holder, np.zeros((3, 0), int))
        assert kept.lengths.tolist() == [0, 0, 0] and kept.blocks_in_use == 0
        assert jaxkv.keep(holder, [[0, 2], [1, -1], [-1, -1]]).lengths.tolist() == [2, 1, 0]


@pytest.mark.parametrize("max_len", [-1, 2**40, 1.5, True, "a", np.nan])
def test_places_that_no_row_has(max_len):
    with pytest.raises(ValueError, match="max_len must be"):
        jaxkv.gather(filled(), 0, layer=0, max_len=max_len)


@pytest.mark.parametrize("layer", [7, -1, (0, 9), (0, -3), (0, 2**40), 1.7, (0, 1.7), (0, "a"), np.array([0, 1])])
def test_layers_that_a_stack_has_not(layer):
    alike = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=8),) * 2
    cache = jaxkv.init(jaxkv.CacheConfig(layers=alike, max_seqs=3, max_seq_len=20, stacked=True, num_blocks=9))
    cache = jaxkv.extend(cache, [1, 1, 0])
    for number in (layer, layer if isinstance(layer, tuple) else jnp.asarray(layer)):
        with pytest.raises((IndexError, ValueError, TypeError), match=r"layer|Layer"):
            jaxkv.write(cache, Q, Q, layer=number)


def test_numbers_of_64_bits_do_not_wrap():
    kv = ones(1, 3, 5, 2, 8)
    with jax.enable_x64(True):
        cache = jaxkv.append(made(jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)), kv, kv, [5, 3, 0])
        path = jnp.array([[2**32, 2**32 + 2], [0, -1], [-1, -1]])
        kept = jaxkv.keep(cache, path)
        assert kept.failed.tolist() == [True, False, False] and kept.lengths.tolist() == [5, 1, 0]
        tree = jnp.full((3, 5), 2**32)  # no token's number: parents are the context
        assert jaxkv.positions(cache, (3, 5), tree=tree).tolist() == [[0] * 5] * 3


def test_no_tokens_at_the_end_of_no_places():
    assert jaxkv.last(jnp.zeros((2, 0, 3)), [0, 0]).tolist() == [[0.0] * 3] * 2


OPTIONS = [
    ("scale", "0.1"), ("scale", [1, 2]), ("scale", 10**400), ("scale", True), ("soft_cap", {}), ("alibi", "x"),
    ("alibi", 10**400), ("alibi", [[1], [2, 3]]), ("sinks", "x"), ("sinks", [1]), ("mask", [1]), ("return_lse", "no"),
    ("return_lse", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OPTIONS, ids=lambda x: str(x)[:20])
def test_options_that_make_no_sense(name, value):
    cache = jaxkv.extend(filled(), [1, 1, 1])
    with pytest.raises(ValueError, match=f"^{name} must "):
        jaxkv.attend(Q, cache, layer=0, **{name: value})


def test_options_as_lists():
    cache = jaxkv.append(filled(), [Q, ones(3, 1, 1, 4)], [Q, ones(3, 1, 1, 4)])
    found = jaxkv.attend(Q, cache, layer=0, sinks=[0.5, 1.0], mask=[[[True] * 3]] * 3)
    wanted = jaxkv.attend(Q, cache, layer=0, sinks=jnp.array([0.5, 1.0]), mask=jnp.ones((3, 1, 3), bool))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("change", [{"num_tokens": "a"}, {"num_tokens": {}}, {"num_tokens": [None] * 3}, {"k": None}])
def test_what_cannot_be_appended(change):
    kv = [ones(3, 1, c.num_kv_heads, c.head_dim) for c in CONFIG.layers]
    arguments = {"k": kv, "v": kv, "num_tokens": [1, 1, 1]} | change
    with pytest.raises(ValueError, match=f"^{next(iter(change))} must "):
        jaxkv.append(filled(), **arguments)


def test_rows_and_indices_that_are_none_are_not_converted():
    cache = filled()
    for rows in ([False, True, False], [0.9], "ab"):
        with pytest.raises(ValueError, match="rows must be"):
            jaxkv.convert.to_hugging_face(cache, rows=rows)
    dense = np.ones((2, 9, 4, 8))
    for index in (3.7, np.array([1, 2]), None):
        with pytest.raises(ValueError, match="cache_index must be"):
            jaxkv.convert.from_flax({"attn": {"cached_key": dense, "cached_value": dense, "cache_index": index}})


def test_caches_that_are_no_numbers_can_be_printed():
    config = jaxkv.CacheConfig(layers=(jaxkv.LayerConfig(num_kv_heads=2, head_dim=4),), max_seqs=2, max_tokens=64)
    cache = jaxkv.extend(jaxkv.init(config.replace(dtype="float32")), [1, 2])
    gradient = jax.grad(lambda c: jnp.sum(c.pools[0].kv), allow_int=True)(cache)
    for text in (repr(gradient), gradient._repr_html_()):
        assert text.startswith("Cache(a gradient, 1 layer")

    class Model(nnx.Module):
        def __init__(self):
            self.cache = jaxkv.nnx.CacheVariable(cache)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cache)
    assert repr(shapes) == f"Cache(traced, 1 layer, {repr(cache).split('layer, ')[1]}"
    assert "Cache(" in str(Model()) and "Cache(" in repr(nnx.state(Model()))


def test_explain_refuses_what_attend_refuses():
    cache, q = filled(), jax.ShapeDtypeStruct((3, 1, 2, 8), jnp.float32)
    assert jaxkv.explain(q, cache, platform="gpu") == jaxkv.explain(q, cache, platform="cuda")
    for platform in ("GPU", "cuda:0", 3):
        with pytest.raises(ValueError, match="platform must be None or one of cpu, cuda, rocm, tpu, not"):
            jaxkv.explain(q, cache, platform=platform)
    wrong = {"window": 0, "scale": "a", "soft_cap": -1.0, "sink_tokens": 2, "causal": "x", "sinks": jnp.ones(3)}
    for name, x in wrong.items():
        with pytest.raises(ValueError, match=name):
            jaxkv.explain(q, cache, platform="cuda", **{name: x})
    with pytest.raises(ValueError, match="1 query heads cannot be shared among"):
        jaxkv.explain(jax.ShapeDtypeStruct((3, 1, 1, 8), jnp.float32), cache)
    with pytest.raises(TypeError, match="attention takes no kind: it takes alibi, "):
        jaxkv.explain(q, cache, kind="int8")


@pytest.mark.parametrize(
    "option", [{"window": 0}, {"window": 2.5}, {"window": "a"}, {"scale": float("nan")}, {"soft_cap": 0.0}]
)
def test_without_a_cache_options_are_read_as_with_one(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be "):
        jaxkv.nnx.Attention(8, num_heads=2, rngs=nnx.Rngs(0), **option)(jnp.ones((1, 3, 8)))


def test_masks_and_windows_of_the_drop_ins():
    cache, q, kv = jaxkv.extend(filled(), [1, 1, 1]), ones(3, 1, 2, 8), ones(3, 1, 2, 8)
    with pytest.raises(ValueError, match=r"mask must broadcast to the query's tokens \(3, 1\), .* shape \(2, 1, 4\)"):
        jaxkv.dot_product_attention(q, kv, kv, mask=jnp.ones((2, 1, 1, 4)), cache=cache, layer=0)
    with pytest.raises(ValueError, match="mask must be an array of flags"):
        jaxkv.dot_product_attention(q, kv, kv, mask="a", cache=cache, layer=0)
    for window in ((1, 2, 3), (2, -3), "a", -1, (1,)):
        with pytest.raises(ValueError, match="local_window_size must be "):
            jaxkv.jax_attention(q, kv, kv, local_window_size=window, cache=cache, layer=0)
    by_pair, by_list, alone = (
        jaxkv.jax_attention(q, kv, kv, local_window_size=window, cache=cache, layer=0)[0]
        for window in ((1, 0), [1, 0], 1)
    )
    assert (by_pair == by_list).all() and (by_pair == alone).all()


def test_what_reads_numbers_says_so_inside_jit():
    with pytest.raises(ValueError, match="to_hugging_face cannot be part of jit"):
        jax.jit(lambda c: jaxkv.convert.to_hugging_face(c)[1])(filled())
    with pytest.raises(ValueError, match="check=True cannot be part of jit"):
        jax.jit(lambda m: jaxkv.counts(mask=m, check=True))(jnp.ones((2, 3), bool))


def test_a_row_swaps_into_a_cache_on_another_device():
    config = jaxkv.CacheConfig(layers=(jaxkv.LayerConfig(num_kv_heads=1, head_dim=4),), max_seqs=4, max_tokens=128)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    one, two = jaxkv.init(config, mesh=mesh, rows="data").shards
    kv = jnp.arange(2 * 20 * 4.0).reshape(1, 2, 20, 1, 4)
    one = jaxkv.append(one, *(jax.device_put(x, jax.devices()[0]) for x in (kv, kv)), [20, 3])
    _, host = jaxkv.swap_out(one, 0)
    two = jaxkv.swap_in(two, 1, host)
    jaxkv.check_invariants(two)
    assert two.pools[0].kv.devices() == {jax.devices()[1]} and two.lengths.tolist() == [0, 20]
    np.testing.assert_array_equal(jaxkv.gather(two, 1, layer=0)[0], kv[0, 0].astype(jnp.bfloat16))
