"""Rows to host memory and back: equal to the bit, wherever they return to, in one transfer per layer."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from steps import on_device

import jaxkv
from jaxkv import LayerConfig

ROWS = 3
LAYERS = (
    LayerConfig(num_kv_heads=2, head_dim=8),
    LayerConfig(num_kv_heads=1, head_dim=4, window=3),
    LayerConfig(num_kv_heads=2, head_dim=8, window=3, shares_with=0),
)


def make_cache(**fields):
    default = {"layers": LAYERS, "max_seqs": ROWS, "max_seq_len": 30, "dtype": "float32", "head_dim_multiple": 1}
    sizes = {} if "layout" in fields else {"block_size": 4}
    if not {"layout", "group_blocks"} & fields.keys():
        sizes["num_blocks"] = 14
    return on_device(jaxkv.init(jaxkv.CacheConfig(**(default | sizes | fields))))


def random_kv(config, places, seed=0):
    rng = np.random.default_rng(seed)
    return [
        [
            None
            if layer.shares_with is not None
            else jnp.asarray(
                rng.standard_normal((config.max_seqs, places, layer.num_kv_heads, layer.head_dim)), "float32"
            )
            for layer in config.layers
        ]
        for _ in range(2)
    ]


append = jax.jit(jaxkv.append)
LONGEST = 30  # places of a step, whatever it fills of them: one program


def filled(*steps, **fields):
    """A cache after steps of so many tokens for each row."""
    cache = make_cache(**fields)
    for seed, counts in enumerate(steps or [(9, 0, 6), (2, 0, 1)]):
        cache = append(cache, *random_kv(cache.config, LONGEST, seed), jnp.array(counts, jnp.int32))
    return cache


def row_of(cache, row):
    return jax.tree.map(lambda x: np.asarray(x)[row], [cache.combined(layer) for layer in range(cache.num_layers)])


def assert_same(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), actual, expected)


def test_rows_come_back_equal_to_the_bit():
    cache = filled()
    before = [row_of(cache, row) for row in range(ROWS)]
    out, host = jaxkv.swap_out(cache, [2, 0])
    assert out.lengths.tolist() == [0, 0, 0] and out.blocks_in_use == 0
    assert (len(host), host.num_tokens, host.lengths.tolist()) == (2, 18, [7, 11])
    back = jaxkv.swap_in(out, [2, 0], host)
    jaxkv.check_invariants(back)
    assert_same([row_of(back, row) for row in range(ROWS)], before)
    assert (back.lengths.tolist(), back.new.tolist()) == ([11, 0, 7], [0, 0, 0])
    assert cache.lengths.tolist() == [11, 0, 7], "the cache that was given is as it was"


def test_a_row_goes_on_where_it_was():
    """The next step gives the same, whether or not the row was away, and in whichever row it is now."""
    cache = filled()
    away, host = jaxkv.swap_out(cache, 0)
    moved = jaxkv.swap_in(away, 1, host)
    rng = np.random.default_rng(9)
    q = [jnp.asarray(rng.standard_normal((ROWS, 1, 4, layer.head_dim)), jnp.float32) for layer in LAYERS]
    k, v = random_kv(cache.config, 1, seed=9)
    q, k, v = (jax.tree.map(lambda x: jnp.stack([x[0], x[0], x[2]]), xs) for xs in (q, k, v))

    @jax.jit
    def outputs(cache):
        cache = jaxkv.extend(cache, (cache.lengths > 0).astype(jnp.int32))
        outs = []
        for layer in range(len(LAYERS)):
            out, cache = jaxkv.attention(q[layer], k[layer], v[layer], cache, layer=layer)
            outs.append(out)
        return outs

    for stayed, went in zip(outputs(cache), outputs(moved), strict=True):
        np.testing.assert_array_equal(went[1], stayed[0])
        np.testing.assert_array_equal(went[2], stayed[2])


FIELDS = {
    "head_dim padding": {"head_dim_multiple": 128},
    "keys and values joined": {"head_dim_multiple": 128, "join_kv": True},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "block_size 1": {"block_size": 1, "group_blocks": (60, 20)},
    "contiguous": {"layout": "contiguous"},
}


@pytest.mark.parametrize("name", FIELDS if NIGHTLY else ["bfloat16", "block_size 1", "contiguous"])
def test_every_kind_of_cache(name):
    cache = filled(**FIELDS[name])
    before = row_of(cache, 0)
    out, host = jaxkv.swap_out(cache, 0)
    assert all(x is None or x.dtype == cache.config.dtype for x in host.blocks)
    back = jaxkv.swap_in(out, 1, host)
    jaxkv.check_invariants(back)
    assert_same(row_of(back, 1), before)
    assert not any(x.any() for x in row_of(back, 0))


@pytest.mark.parametrize(
    "fields", [{"group_blocks": (5, 5)}, {"max_seqs": 7}, {"max_seq_len": 12}, {"group_blocks": (3, 2)}]
)
def test_into_another_cache(fields):
    cache = filled()
    _, host = jaxkv.swap_out(cache, 0)
    other = jaxkv.swap_in(make_cache(**fields), 2, host)
    jaxkv.check_invariants(other)
    jaxkv.check(other)
    for layer in range(len(LAYERS)):
        assert_same(jaxkv.gather(other, 2, layer=layer), jaxkv.gather(cache, 0, layer=layer))


def test_a_row_that_has_left_its_window_behind():
    cache = filled((9, 0, 0), (9, 0, 0), (9, 0, 0))
    held = int(cache.tables[1].num_blocks_per_row[0])
    assert held < cache.tables[0].num_blocks_per_row[0] == 7
    before = row_of(cache, 0)
    out, host = jaxkv.swap_out(cache, 0)
    assert [c.tolist() for c in host.count] == [[7], [held]] and host.first[1].tolist() == [7 - held]
    assert host.blocks[1].shape[0] == 1 << (held - 1).bit_length(), "only what the window still holds is moved"
    back = jaxkv.swap_in(out, 2, host)
    jaxkv.check_invariants(back)
    assert_same(row_of(back, 2), before)
    assert back.tables[1].tables[2, : 7 - held].tolist() == [0] * (7 - held)


def test_shared_blocks_return_shared():
    cache = jaxkv.fork(filled(), 0, 1)
    before = row_of(cache, 0)
    out, host = jaxkv.swap_out(cache, [0, 1])
    back = jaxkv.swap_in(out, [0, 1], host)
    jaxkv.check_invariants(back)
    assert_same([row_of(back, 0), row_of(back, 1)], [before, before])
    assert back.tables[0].num_blocks_per_row.tolist() == [3, 3, 2] and back.tables[0].num_free == 14 - 6
    assert [len(blocks) for blocks in host.blocks if blocks is not None] == [4, 4], "moved once"


def test_a_shared_row_stays_when_the_other_is_swapped_out():
    cache = jaxkv.fork(filled(), 0, 1)
    before = row_of(cache, 0)
    out, _ = jaxkv.swap_out(cache, 1)
    jaxkv.check_invariants(out)
    assert_same(row_of(out, 0), before)


def test_reserved_blocks_and_failures_stay_behind():
    cache = jaxkv.reserve(filled(), jnp.array([16, 16, 100], jnp.int32))
    assert cache.failed.tolist() == [False, False, True]
    out, host = jaxkv.swap_out(cache, [0, 1, 2])
    assert [c.tolist() for c in host.count] == [[3, 0, 2], [2, 0, 1]]
    assert out.blocks_in_use == 0 and not out.failed.any()


def test_one_row_of_several():
    cache = filled()
    before = [row_of(cache, row) for row in range(ROWS)]
    out, host = jaxkv.swap_out(cache, [0, 1, 2])
    assert [one.num_tokens for one in host] == [11, 0, 7]
    back = jaxkv.swap_in(jaxkv.swap_in(out, 0, host[2]), 2, host[0])
    jaxkv.check_invariants(back)
    assert_same([row_of(back, row) for row in range(ROWS)], before[::-1])


def test_no_rows_at_all():
    cache = filled()
    out, host = jaxkv.swap_out(cache, [])
    assert len(host) == 0 and out.lengths.tolist() == cache.lengths.tolist()
    assert jaxkv.swap_in(out, [], host).lengths.tolist() == cache.lengths.tolist()


def test_rows_by_mask_and_by_index():
    cache = filled()
    for rows in (2, [2], np.array([2]), jnp.array([2]), [False, False, True], jnp.array([False, False, True])):
        out, host = jaxkv.swap_out(cache, rows)
        assert (out.lengths.tolist(), host.lengths.tolist()) == ([11, 0, 0], [7])


def test_one_transfer_per_layer(monkeypatch):
    cache = filled()
    sent = []
    put = jax.device_put

    def counting_put(x, *args, **kwargs):
        sent.append(np.shape(x))
        return put(x, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", counting_put)
    out, host = jaxkv.swap_out(cache, [0, 2])
    assert len(sent) <= 2, "one for each layer that stores"  # none where there is only one kind of memory
    assert [None if x is None else x.shape[0] for x in host.blocks] == [8, 4, None]  # 5 and 3 blocks, padded
    sent.clear()
    jaxkv.swap_in(out, [0, 2], host)
    assert sent == [x.shape for x in host.blocks if x is not None]


def test_blocks_lie_in_host_memory():
    _, host = jaxkv.swap_out(filled(), 0)
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    for one in (host, host[0]):
        assert {x.sharding.memory_kind for x in one.blocks if x is not None} == {
            "pinned_host" if "pinned_host" in kinds else jax.devices()[0].default_memory().kind
        }
    assert host.bytes == sum(x.nbytes for x in host.blocks if x is not None)
    assert repr(host) == f"HostBlocks(11 tokens of 1 row, {host.bytes} bytes)"


def test_host_blocks_can_be_pickled():
    cache = filled()
    out, host = jaxkv.swap_out(cache, [0, 2])
    copy = pickle.loads(pickle.dumps(jax.device_get(host)))
    assert_same(row_of(jaxkv.swap_in(out, 1, copy[0]), 1), row_of(cache, 0))


def test_in_jit_with_donation_the_pools_stay_where_they_are():
    cache = filled()
    before = row_of(cache, 0)
    swap_in = jax.jit(jaxkv.swap_in, donate_argnames="cache")
    cache, host = jaxkv.swap_out(cache, 0)
    pointers = [pool.kv.unsafe_buffer_pointer() for pool in cache.pools if pool]
    cache = swap_in(cache, jnp.array([1]), host)
    assert [pool.kv.unsafe_buffer_pointer() for pool in cache.pools if pool] == pointers
    jaxkv.check_invariants(cache)
    assert_same(row_of(cache, 1), before)
    jaxkv.testing.assert_no_copy(swap_in, make_cache(num_blocks=400), jnp.array([1]), host)


def test_sizes_share_programs():
    """However many blocks a row has, there are few programs."""
    swap_in = jax.jit(lambda *args: jaxkv.swap_in(*args))  # a function of its own has a cache of its own
    for tokens in (1, 3, 4, 5, 8, 9, 16, 17, 27, 30):
        out, host = jaxkv.swap_out(filled((tokens, 0, 0), layers=LAYERS[:1]), 0)
        swap_in(out, jnp.array([0]), host)
    assert swap_in._cache_size() == 4  # 1, 2, 4 and 8 blocks


def test_a_host_that_is_a_constant_of_the_program():
    cache = filled()
    out, host = jaxkv.swap_out(cache, 0)
    back = jax.jit(lambda cache: jaxkv.swap_in(cache, 1, host))(out)
    assert_same(row_of(back, 1), row_of(cache, 0))


def in_jit(cache, rows, host):
    return jax.jit(jaxkv.swap_in)(cache, jnp.array(rows, jnp.int32), host)


def test_too_few_blocks_leave_the_row_empty():
    _, host = jaxkv.swap_out(filled(), [0, 2])
    for swap_in in (jaxkv.swap_in, in_jit):
        other = swap_in(make_cache(group_blocks=(4, 14)), [1, 0], host)  # 3 + 2 blocks, and 2 + 1
        jaxkv.check_invariants(other)
        assert (other.lengths.tolist(), other.failed.tolist()) == ([0, 11, 0], [True, False, False])
        with pytest.raises(jaxkv.OutOfBlocks, match=r"Row 0 .* needs 2 more blocks .* 7 tokens, but 1 of 4 blocks"):
            jaxkv.check(other)


def test_a_row_that_got_nothing_leaves_its_blocks_to_the_next():
    _, host = jaxkv.swap_out(filled(), [0, 2])
    other = jaxkv.swap_in(make_cache(group_blocks=(4, 1)), [0, 1], host)
    assert other.lengths.tolist() == [0, 7, 0] and other.failed.tolist() == [True, False, False]


def test_too_long_for_the_other_cache():
    _, host = jaxkv.swap_out(filled(), 0)
    other = jaxkv.swap_in(make_cache(max_seq_len=10), 0, host)
    jaxkv.check_invariants(other)
    with pytest.raises(jaxkv.SequenceTooLong, match="max_seq_len = 10"):
        jaxkv.check(other)


@pytest.mark.parametrize("rows", [[0], [-1], [ROWS], [2**31 - 1]])
def test_in_jit_rows_that_are_taken_or_none_are_left_alone(rows):
    cache = filled()
    _, host = jaxkv.swap_out(cache, 2)
    after = in_jit(cache, rows, host)
    jaxkv.check_invariants(after)
    assert after.failed.tolist() == [rows == [0], False, False]
    assert_same([row_of(after, row) for row in range(ROWS)], [row_of(cache, row) for row in range(ROWS)])


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_in_jit_a_row_that_holds_anything_is_left_alone(layout):
    cache = filled(**({} if layout == "paged" else {"layout": layout}))
    _, host = jaxkv.swap_out(cache, 2)
    cache = jaxkv.reserve(cache, [0, 9, 0])  # in blocks of its own, where it has none from the start
    for row in (0, 1):
        after = in_jit(cache, [row], host)
        jaxkv.check_invariants(after)
        assert after.failed[row] == (row == 0 or layout == "paged")
        assert after.lengths[row] == (cache.lengths[row] if after.failed[row] else host.num_tokens)


def test_in_jit_a_row_named_twice_takes_the_first():
    cache = filled()
    out, host = jaxkv.swap_out(cache, [2, 0])
    after = in_jit(out, [1, 1], host)
    jaxkv.check_invariants(after)
    assert after.lengths.tolist() == [0, 7, 0] and after.failed.tolist() == [False, True, False]
    assert_same(row_of(after, 1), row_of(cache, 2))


WIDER = LayerConfig(num_kv_heads=1, head_dim=4, window=9)


def swapped():
    return jaxkv.swap_out(filled(), 0)


CALLS = {
    "out of a row that is not there": (
        lambda: jaxkv.swap_out(filled(), 3), IndexError, "rows must be rows from 0 to 2, not 3",
    ),
    "out of a negative row": (lambda: jaxkv.swap_out(filled(), -1), IndexError, "from 0 to 2, not -1"),
    "out twice": (lambda: jaxkv.swap_out(filled(), [1, 1]), ValueError, r"rows names a row twice: \[1, 1\]"),
    "out of half a row": (lambda: jaxkv.swap_out(filled(), [0.5]), ValueError, "a row index or a list of them"),
    "out by a short mask": (lambda: jaxkv.swap_out(filled(), [True]), ValueError, r"rows must be bool\[3\]"),
    "out in jit": (
        lambda: jax.jit(lambda c: jaxkv.swap_out(c, 0))(filled()), ValueError, "swap_out cannot be part of jit",
    ),
    "into a row that is not empty": (
        lambda: jaxkv.swap_in(filled(), 0, swapped()[1]), ValueError,
        r"into empty rows, but \[0\] hold tokens or blocks: free them first",
    ),
    "into a row with reserved blocks": (
        lambda: jaxkv.swap_in(jaxkv.reserve(filled(), [0, 3, 0]), 1, swapped()[1]), ValueError, r"but \[1\] hold",
    ),
    "into a row that is not there": (lambda: jaxkv.swap_in(filled(), 3, swapped()[1]), IndexError, "0 to 2, not 3"),
    "into too many rows": (
        lambda: jaxkv.swap_in(filled(), [1, 2], swapped()[1]), ValueError, "rows must name 1 rows, .* not 2",
    ),
    "into a row twice": (
        lambda: jaxkv.swap_in(make_cache(), [1, 1], jaxkv.swap_out(filled(), [0, 2])[1]), ValueError, "a row twice",
    ),
    "nothing of a host": (lambda: jaxkv.swap_in(filled(), 1, None), ValueError, "what swap_out returned, not NoneType"),
    "another block_size": (
        lambda: jaxkv.swap_in(make_cache(block_size=2), 1, swapped()[1]), ValueError,
        r"blocks of layer 0 are float32\[2, 2, 4, 8\], but the cache's are float32\[2, 2, 2, 8\]",
    ),
    "another dtype": (
        lambda: jaxkv.swap_in(make_cache(dtype="bfloat16"), 1, swapped()[1]), ValueError, "float32.* but .* bfloat16",
    ),
    "other groups": (
        lambda: jaxkv.swap_in(make_cache(layers=LAYERS[:1]), 1, swapped()[1]), ValueError,
        r"the groups \[0\] without a window, \[1\] with a window of 3, but here they form the groups \[0\] without a",
    ),
    "a wider window, of which too little is there": (
        lambda: jaxkv.swap_in(make_cache(layers=(LAYERS[0], WIDER, LAYERS[2])), 1, swapped()[1]), ValueError,
        "with a window of 3.*, but here they form .*with a window of 9",
    ),
    "a row that was not swapped out": (lambda: swapped()[1][1], IndexError, "There are 1 rows, so there is no row 1"),
    "a negative one": (lambda: swapped()[1][-1], IndexError, "no row -1 among them"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_bad_input_is_one_sentence(name):
    call, error, sentence = CALLS[name]
    with pytest.raises(error, match=sentence) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_refused_call_loses_nothing():
    cache = filled()
    before = jax.tree.map(np.array, cache)
    _, host = jaxkv.swap_out(cache, 0)
    kept = jax.tree.map(np.array, host)
    for call in (lambda: jaxkv.swap_in(cache, 2, host), lambda: jaxkv.swap_out(cache, [0, 5])):
        with pytest.raises((ValueError, IndexError)):
            call()
    assert_same(jax.tree.map(np.asarray, cache), before)
    assert_same(jax.tree.map(np.asarray, host), kept)
