"""Prefix reuse: what is matched, shared, kept and given back; and never another prompt's keys and values."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import gather_row, on_device

import jaxkv

BLOCK = 4
CHUNK = 8  # tokens of a step


def make_config(window=None, **fields):
    layers = (
        jaxkv.LayerConfig(num_kv_heads=1, head_dim=4, window=window),
        jaxkv.LayerConfig(num_kv_heads=2, head_dim=2, bounds=True),
    )
    fields = {"max_seqs": 4, "max_seq_len": 64, "num_blocks": 40, "head_dim_multiple": 1} | fields
    return jaxkv.CacheConfig(layers=layers, block_size=BLOCK, dtype="float32", **fields)


def contents(tokens):
    """What stands for the keys of tokens: like a model's, they depend on everything before."""
    state, out = 0, []
    for token in tokens:
        state = (state * 31 + token + 1) % 65521
        out.append(state)
    return np.array(out, np.float32)


@functools.partial(jax.jit, donate_argnums=0)
def append_chunk(cache, values, num_tokens):
    kv = [
        jnp.broadcast_to(values[..., None, None], (*values.shape, layer.num_kv_heads, layer.head_dim))
        for layer in cache.config.layers
    ]
    return jaxkv.append(cache, kv, kv, num_tokens)


def compute(cache, row, tokens):
    """Add the tokens of a row's sequence that are not there yet; the cache, and how many those were."""
    start, rows = int(cache.lengths[row]), cache.lengths.shape[0]
    cache = jax.tree.map(jnp.copy, cache)  # it is donated
    for at in range(start, len(tokens), CHUNK):
        chunk = contents(tokens)[at : at + CHUNK]
        values, counts = np.zeros((rows, CHUNK), np.float32), np.zeros(rows, np.int32)
        values[row, : len(chunk)], counts[row] = chunk, len(chunk)
        cache = append_chunk(cache, values, counts)
    jaxkv.check(cache)
    return cache, len(tokens) - start


def assert_holds(cache, row, tokens, window=None, first=0):
    jaxkv.check_invariants(cache)
    assert int(cache.lengths[row]) == len(tokens)
    for layer in range(cache.num_layers):
        k, v = gather_row(cache, row, layer)
        seen = np.arange(len(tokens))
        seen = seen[(seen > len(tokens) - window) | (seen < first)] if layer == 0 and window else seen
        expected = np.broadcast_to(contents(tokens)[:, None, None], k.shape)[seen]
        np.testing.assert_array_equal(np.asarray(k)[seen], expected)
        np.testing.assert_array_equal(np.asarray(v)[seen], expected)


def start(window=None, *, prompts=(), config=None, **options):
    """A cache and an index into which prompts have been inserted, row by row, and their rows freed."""
    config = config or make_config(window)
    cache, prefix = on_device(jaxkv.init(config)), jaxkv.PrefixCache(config, **options)
    for prompt in prompts:
        cache, _ = compute(cache, 0, prompt)
        cache = jaxkv.free(prefix.insert(cache, 0, prompt), 0)
    prefix.check_invariants(cache)
    jaxkv.check_invariants(cache)
    return cache, prefix


A, B = list(range(20)), list(range(100, 130))


@pytest.mark.parametrize(
    ("tokens", "matched"),
    [(A, 16), (A[:17], 16), (A[:16], 12), (A[:4], 0), (A[:5], 4), ([*A, 7, 7, 7], 20), ([*A[:10], 0, *A[11:]], 8),
     ([0], 0), ([], 0), (B, 0), ([1, *A[1:]], 0)],
)  # fmt: skip
def test_a_match_is_whole_blocks_and_leaves_a_token_to_compute(tokens, matched):
    _, prefix = start(prompts=[A])
    assert prefix.match(tokens).num_tokens == matched
    assert prefix.match(np.array(tokens, np.int32)).num_tokens == matched


def test_adopting_shares_blocks_without_a_copy():
    cache, prefix = start(prompts=[A])
    used = cache.blocks_in_use
    prompt = [*A[:18], 55, 56, 57]
    adopted = prefix.adopt(cache, 2, prefix.match(prompt))
    assert adopted.blocks_in_use == used == 5
    assert all(a.kv is b.kv for a, b in zip(adopted.pools, cache.pools, strict=True))
    assert_holds(adopted, 2, prompt[:16])
    both = prefix.adopt(adopted, 3, prefix.match(prompt))
    both, computed = compute(both, 2, prompt)
    assert computed == 5
    both, _ = compute(both, 3, A)
    assert_holds(both, 2, prompt)
    assert_holds(both, 3, A)
    assert (np.asarray(both.tables[0].tables)[2, :4] == np.asarray(both.tables[0].tables)[3, :4]).all()
    assert int(both.tables[0].refcounts[int(both.tables[0].tables[2, 0])]) == 3  # two rows and the index
    prefix.check_invariants(both)
    stats = prefix.stats()
    assert (stats["lookups"], stats["hits"], stats["tokens_asked"], stats["tokens_saved"]) == (2, 2, 42, 32)
    assert stats["hit_rate"] == 32 / 42


def test_a_row_that_is_cut_back_into_a_kept_block_gets_a_copy():
    cache, prefix = start(prompts=[A])
    cache = prefix.adopt(cache, 1, prefix.match([*A, 1]))
    cache = jaxkv.truncate(cache, [64, 10, 64, 64])
    other = [*A[:10], 77, 78]
    cache, _ = compute(cache, 1, other)
    assert_holds(cache, 1, other)
    cache = prefix.adopt(cache, 2, prefix.match([*A, 1]))
    assert_holds(cache, 2, A)


def test_salts_and_adapters_share_nothing():
    cache, prefix = start()
    identities = [{}, {"salt": "a"}, {"salt": "b"}, {"salt": b"a"}, {"adapter": "a"}, {"salt": "a", "adapter": "a"}]
    held = []
    for identity in identities:
        assert prefix.match(A, **identity).num_tokens == 0
        cache, _ = compute(cache, 0, A)
        held.append(set(np.asarray(cache.tables[0].tables)[0, :5].tolist()))
        cache = jaxkv.free(prefix.insert(cache, 0, A, **identity), 0)
    assert len(set.union(*held)) == 5 * len(identities), "no block is in two tenants' hands"
    for identity, blocks in zip(identities, held, strict=True):
        adopted = prefix.adopt(cache, 1, prefix.match(A, **identity))
        assert set(np.asarray(adopted.tables[0].tables)[1, :4].tolist()) < blocks


def test_a_block_has_one_salt():
    cache, prefix = start()
    cache, _ = compute(cache, 0, A[:8])
    cache = prefix.insert(prefix.insert(cache, 0, A, salt="a"), 0, A, salt="b")
    cache, _ = compute(cache, 0, A)
    cache = prefix.insert(cache, 0, A, salt="b")
    prefix.check_invariants(cache)
    assert prefix.match(A, salt="a").num_tokens == 8 and prefix.match(A, salt="b").num_tokens == 0
    cache = prefix.make_room(jaxkv.free(cache, 0), 40)
    assert cache.blocks_in_use == 0


def test_salts_that_are_gone_leave_nothing_behind():
    cache, prefix = start()
    for number in range(100):
        assert prefix.match(A, salt=f"asked {number}").num_tokens == 0
        cache, _ = compute(cache, 0, A)
        cache = jaxkv.free(prefix.insert(cache, 0, A, salt=f"tenant {number}"), 0)
        cache = prefix.make_room(cache, 37)
    assert prefix.match(A, salt="tenant 99").num_tokens == 12 and len(prefix._index.roots) == 1


@pytest.mark.parametrize("hash_function", [lambda key: 0, lambda key: hash(key) % 2])
def test_a_hash_collision_costs_a_comparison_and_nothing_else(hash_function):
    cache, prefix = start(prompts=[A, B, [*A[:8], *B[:8]]], hash_function=hash_function)
    for tokens, matched in [(A, 16), (B, 28), ([*A[:8], *B], 16), ([*B[:8], *A], 8), (A[::-1], 0)]:
        match = prefix.match(tokens)
        assert match.num_tokens == matched
        assert_holds(prefix.adopt(cache, 1, match), 1, tokens[:matched])
    cache = prefix.make_room(cache, 40)
    prefix.check_invariants(cache)
    assert cache.blocks_in_use == 0


def test_blocks_that_were_computed_twice_are_indexed_once():
    cache, prefix = start()
    cache, _ = compute(cache, 0, A)
    cache, _ = compute(cache, 1, A)
    cache = prefix.insert(prefix.insert(cache, 0, A), 1, A)
    assert prefix.stats()["blocks"] == [5]
    cache = jaxkv.free(cache, [0, 1])
    assert cache.blocks_in_use == 5
    prefix.check_invariants(cache)


def test_only_what_the_row_holds_is_indexed():
    cache, prefix = start()
    cache, _ = compute(cache, 0, A[:11])
    cache = prefix.insert(cache, 0, A)  # the row holds 11 of these 20
    assert prefix.match(A).num_tokens == 8
    cache = prefix.insert(cache, 0, A[:6])
    assert prefix.match(A).num_tokens == 8
    cache = prefix.insert(cache, 3, A)  # an empty row
    assert prefix.stats()["blocks"] == [2]


def test_the_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_beginning():
    cache, prefix = start(prompts=[A, B])  # 5 and 7 blocks; A is older
    cache = prefix.make_room(cache, 30)
    assert cache.blocks_in_use == 10 and prefix.match(A).num_tokens == 12  # two blocks fewer, from its end
    cache = prefix.make_room(cache, 32)  # A was just used, so B goes
    assert (prefix.match(A).num_tokens, prefix.match([*B, 1]).num_tokens) == (12, 20)
    cache = prefix.make_room(cache, 32)
    assert cache.blocks_in_use == 8, "nothing goes where there is room already"
    prefix.check_invariants(cache)


def test_what_a_row_uses_or_what_is_pinned_stays():
    cache, prefix = start(prompts=[A, B])
    cache = prefix.adopt(cache, 1, prefix.match(A))  # 4 of its 5 blocks
    assert prefix.pin(B[:8]) == 8
    assert prefix.available(cache) == [28 + 8 - 2]
    cache = prefix.make_room(cache, 40)
    assert cache.blocks_in_use == 4 + 2
    assert_holds(cache, 1, A[:16])
    assert (prefix.match(A).num_tokens, prefix.match(B).num_tokens) == (16, 8)
    prefix.unpin(B[:8])
    cache = prefix.make_room(jaxkv.free(cache, 1), 40)
    assert cache.blocks_in_use == 0 and prefix.available(cache) == [40]
    prefix.check_invariants(cache)


def test_pins_hold_on_the_host_too_and_while_the_index_grows():
    config = make_config()
    cache, prefix = start(prompts=[A[:8], B], config=config, spill_bytes=3 * config.bytes_per_block)
    cache = prefix.make_room(cache, 32)  # what is older goes first: A is on the host now
    assert prefix.pin(A) == 8
    cache = prefix.make_room(cache, 40)
    prefix.check_invariants(cache)
    assert prefix.match(A).num_tokens == 8, "B was dropped from the host, not A"
    cache, _ = compute(cache, 0, A)
    cache = jaxkv.free(prefix.insert(cache, 0, A), 0)
    cache = prefix.make_room(cache, 40)
    assert cache.blocks_in_use == 2
    prefix.unpin(A)
    with pytest.raises(ValueError, match="not pinned"):
        prefix.unpin(A)
    assert prefix.make_room(cache, 40).blocks_in_use == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_unpin_undoes_a_pin_of_its_own_tokens_alone(is_there):
    """Also where the pin of a longer prompt ends at the block where that of a shorter one ends, for its last blocks
    are not there."""
    cache, prefix = start(prompts=[A])
    short, long = A[:8], A if is_there else [*A[:8], *B[:12]]

    def count():
        return prefix.stats()["blocks_pinned"][0]

    for tokens in (short, long, long, short):
        prefix.pin(tokens)
    every = count()
    assert every == len(long if is_there else short) // BLOCK
    for _ in range(2):
        assert count() == every
        prefix.unpin(long)
    with pytest.raises(ValueError, match="These tokens are not pinned"):
        prefix.unpin(long)
    for left in (2, 0):
        prefix.unpin([*short, 1])  # whose last token fills no block
        assert count() == left
        prefix.check_invariants(cache)
    with pytest.raises(ValueError, match="These tokens are not pinned"):
        prefix.unpin(short)


@pytest.mark.parametrize("window", [None, 6])
def test_what_was_pinned_and_is_gone_leaves_nothing_behind(window):
    """Pins hold blocks against eviction, but a new cache has none: the index then keeps the place in the chain alone,
    and not longer than the pin."""
    config = make_config(window)
    prefix, count = jaxkv.PrefixCache(config), 8 if window is None else 20
    cache = prefix.insert(compute(jaxkv.init(config), 0, A)[0], 0, A)
    for _ in range(2):
        assert prefix.pin(A[:count]) == count
    cache = prefix.insert(jaxkv.init(config), 0, A)
    assert prefix.match([*A, 1]).num_tokens == 0 and len(prefix._index.nodes) == count // BLOCK
    prefix.unpin(A[:count])
    prefix.check_invariants(cache)
    assert len(prefix._index.nodes) == count // BLOCK
    prefix.unpin(A[:count])
    prefix.check_invariants(cache)
    assert not prefix._index.nodes


def test_free_blocks_are_taken_before_indexed_ones():
    cache, prefix = start(prompts=[A])
    cache, _ = compute(cache, 1, list(range(200, 264)))
    cache, _ = compute(cache, 2, list(range(300, 364)))
    assert cache.blocks_in_use == 37 and prefix.match(A).num_tokens == 16
    cache = prefix.make_room(cache, 4)
    assert cache.tables[0].num_free == 4 and prefix.match([*A, 1]).num_tokens == 16


def test_reset_forgets_everything():
    cache, prefix = start(prompts=[A, B], spill_bytes=100)
    prefix.pin(A)
    cache = prefix.reset(prefix.make_room(cache, 30))
    assert cache.blocks_in_use == 0 and prefix.match(A).num_tokens == 0
    prefix.check_invariants(cache)
    jaxkv.check_invariants(cache)


def test_with_a_window_only_what_is_seen_must_be_there():
    window = 6
    cache, prefix = start(window)
    long = list(range(40))
    cache, _ = compute(cache, 0, long)  # the windowed layer holds its last blocks only
    cache = jaxkv.free(prefix.insert(cache, 0, long), 0)
    assert prefix.stats()["blocks"][0] < prefix.stats()["blocks"][1] == 10
    prompt = [*long, 1, 2, 3]
    match = prefix.match(prompt)
    assert match.num_tokens == 40
    adopted = prefix.adopt(cache, 1, match)
    assert_holds(adopted, 1, long, window)
    adopted, computed = compute(adopted, 1, prompt)
    assert computed == 3
    assert_holds(adopted, 1, prompt, window)
    assert prefix.match(long[:30]).num_tokens == 0, "in the middle the window's blocks are gone"
    # Once they are inserted as they are computed, it is found there too: up to 20, and with what was there, up to 28.
    cache, _ = compute(cache, 0, long[:20])
    cache = prefix.insert(cache, 0, long[:20])
    assert [prefix.match(long[:n]).num_tokens for n in (19, 23, 30)] == [16, 20, 20]
    prefix.check_invariants(cache)
    cache = prefix.make_room(jaxkv.free(cache, 0), [40, 0])
    prefix.check_invariants(cache)
    assert prefix.match(prompt).num_tokens == prefix.match(long[:20]).num_tokens == 0


def test_of_first_tokens_and_a_window_both_must_be_there(tmp_path):
    """Adopted from the device, from the host, and by another index from the disk; what lies between is nowhere."""
    full = make_config()
    first = dataclasses.replace(full.layers[0], window=6, sink_tokens=5)
    config = full.replace(layers=(first, full.layers[1]))
    options = {"config": config, "spill_bytes": 10_000, "disk": tmp_path, "disk_bytes": 100_000}
    long, (cache, prefix) = list(range(40)), start(**options)
    cache, _ = compute(cache, 0, long)
    cache = jaxkv.free(prefix.insert(cache, 0, long), 0)
    assert prefix.stats()["blocks"] == [2 + 4, 10]  # the last step saw two blocks more than the next one
    prefix.flush(cache)

    def assert_adopts(cache, prefix, tokens):
        match = prefix.match([*tokens, 1])
        assert match.num_tokens == len(tokens)
        adopted = prefix.adopt(cache, 1, match)
        prefix.check_invariants(adopted)
        assert_holds(adopted, 1, tokens, 6, first=5)
        adopted, _ = compute(adopted, 1, [*tokens, 1, 2, 3])
        assert_holds(adopted, 1, [*tokens, 1, 2, 3], 6, first=5)

    assert_adopts(cache, prefix, long)
    assert prefix.match(long[:30]).num_tokens == 8, "in the middle the window's blocks are gone"
    cache = prefix.make_room(cache, [40 - 1, 0])  # the end goes first: a prompt's first block is left, and to the host
    assert prefix.stats()["blocks"] == [1, 10]
    assert_adopts(cache, prefix, long)
    assert_adopts(*start(**options), long)
    cache, without = start(config=config, prompts=[long[:4]])
    assert_adopts(cache, without, long[:4])


@pytest.mark.parametrize("window", [None, 6])
def test_what_is_evicted_comes_back_from_the_host(window):
    cache, prefix = start(window, prompts=[B], spill_bytes=10_000)
    cache = prefix.make_room(cache, 40)
    assert cache.blocks_in_use == 0
    match = prefix.match([*B, 1])
    assert match.num_tokens == 28
    adopted = prefix.adopt(cache, 1, match)
    prefix.check_invariants(adopted)
    assert_holds(adopted, 1, B[:28], window)
    assert prefix.stats()["blocks_restored"] > 0
    again = prefix.adopt(adopted, 2, prefix.match([*B, 1]))
    assert again.blocks_in_use == adopted.blocks_in_use
    assert_holds(again, 2, B[:28], window)


def test_the_host_memory_is_bounded():
    config = make_config()
    per_block = config.bytes_per_block
    cache, prefix = start(prompts=[A, B], config=config, spill_bytes=3 * per_block + 1)
    cache = prefix.make_room(cache, 40)
    assert prefix.stats()["host_bytes"] == 3 * per_block
    assert prefix.stats()["blocks_spilled"] == 12
    prefix.check_invariants(cache)
    assert prefix.match([*B, 1]).num_tokens == 12, "the beginning of what was used last"


def test_without_room_for_what_is_on_the_host_nothing_is_lost():
    cache, prefix = start(prompts=[B], spill_bytes=10_000)
    cache = prefix.make_room(cache, 40)
    for row in (0, 1):
        cache, _ = compute(cache, row, list(range(200 + 100 * row, 264 + 100 * row)))
    cache, _ = compute(cache, 2, list(range(500, 510)))
    match = prefix.match([*B, 1])
    with pytest.raises(jaxkv.OutOfBlocks, match="7 blocks of this match are in host memory, and there is room for 5"):
        prefix.adopt(cache, 3, match)
    prefix.check_invariants(cache)
    cache = jaxkv.free(cache, 1)
    assert_holds(prefix.adopt(cache, 3, prefix.match([*B, 1])), 3, B[:28])


def test_what_is_adopted_makes_no_room_for_itself():
    config = make_config(num_blocks=24)
    cache, prefix = start(prompts=[B], config=config, spill_bytes=10_000)
    cache = prefix.make_room(cache, 20)  # 4 of its 7 blocks stay
    cache, _ = compute(cache, 0, list(range(200, 264)))
    cache, _ = compute(cache, 1, list(range(300, 312)))
    match = prefix.match([*B, 1])
    assert (match.num_tokens, int(cache.tables[0].num_free)) == (28, 1)
    with pytest.raises(jaxkv.OutOfBlocks, match="3 blocks of this match are in host memory, and there is room for 1"):
        prefix.adopt(cache, 2, match)
    prefix.check_invariants(cache)
    assert_holds(prefix.adopt(jaxkv.free(cache, 1), 2, match), 2, B[:28])


def test_donation_reuses_the_pools():
    cache, prefix = start(prompts=[B], spill_bytes=10_000)
    cache = prefix.make_room(cache, 40)
    pointers = [pool.kv.unsafe_buffer_pointer() for pool in cache.pools]
    cache = prefix.adopt(cache, 1, prefix.match([*B, 1]), donate=True)
    assert [pool.kv.unsafe_buffer_pointer() for pool in cache.pools] == pointers
    assert_holds(cache, 1, B[:28])


def test_an_older_cache_gets_what_it_has_and_nothing_else():
    before, prefix = start()
    cache, _ = compute(before, 0, A)
    cache = jaxkv.free(prefix.insert(cache, 0, A, salt="a"), 0)
    with pytest.raises(ValueError, match="or are not in this cache: match the prompt again"):
        prefix.adopt(before, 1, prefix.match(A, salt="a"))
    assert prefix.match(A, salt="a").num_tokens == 0, "the index follows the caches it is given"
    prefix.check_invariants(before)
    assert prefix.make_room(cache, 40).blocks_in_use == 0, "what it does not know is given back"


def test_the_same_block_of_an_older_cache_is_not_taken_for_a_newer_one():
    """The prompts A, B and A again in the same blocks, each of another tenant."""
    caches, (cache, prefix) = [], start()
    for tokens, salt in [(A, "a"), (B[:20], "b"), (A, "c")]:
        cache = prefix.make_room(cache, 40)
        cache, _ = compute(cache, 0, tokens)
        assert set(np.asarray(cache.tables[0].tables)[0, :5].tolist()) == {1, 2, 3, 4, 5}
        cache = jaxkv.free(prefix.insert(cache, 0, tokens, salt=salt), 0)
        caches.append((cache, tokens, salt))
    for held, *_ in caches * 2:
        for _, tokens, salt in caches:
            match = prefix.match(tokens, salt=salt)
            try:
                adopted = prefix.adopt(held, 1, match)
            except ValueError as error:
                assert "not in this cache" in str(error)
            else:
                assert_holds(adopted, 1, tokens[: match.num_tokens])
            prefix.check_invariants(held)


def test_a_row_of_an_older_cache_does_not_give_a_block_a_second_salt():
    cache, prefix = start()
    cache, _ = compute(cache, 0, A)
    first = prefix.insert(cache, 0, A, salt="a")
    second = prefix.insert(cache, 0, A, salt="b")
    prefix.check_invariants(second)
    assert [prefix.match(A, salt=salt).num_tokens for salt in "ab"] == [0, 16]
    with pytest.raises(ValueError, match="not in this cache"):
        prefix.adopt(first, 1, prefix.match(A, salt="b"))
    assert prefix.make_room(jaxkv.free(first, 0), 40).blocks_in_use == 0


def sentence(text):
    return re.compile(text.replace("(", r"\(").replace(")", r"\)").replace("*", ".*"))


def test_bad_input_is_refused_and_nothing_is_lost():
    cache, prefix = start(prompts=[A])
    match = prefix.match([*A, 1])
    full = prefix.adopt(cache, 1, match)
    reserved = jaxkv.reserve(cache, [0, 0, 3, 0])
    other = jaxkv.init(make_config(num_blocks=39))
    half = jaxkv.PrefixCache(cache.config, max_pinned=0.1)
    half.insert(compute(jaxkv.init(cache.config), 1, A)[0], 1, A)
    for error, text, call in [
        (ValueError, "Row 1 holds 20 tokens in 5 blocks: adopt into an empty", lambda: prefix.adopt(full, 1, match)),
        (ValueError, "Row 2 holds 0 tokens in 1 blocks", lambda: prefix.adopt(reserved, 2, match)),
        (IndexError, "row must be an integer from 0 to 3, not 4", lambda: prefix.adopt(cache, 4, match)),
        (IndexError, "row must be an integer from 0 to 3, not -1", lambda: prefix.insert(cache, -1, A)),
        (IndexError, "row must be an integer from 0 to 3, not 'a'", lambda: prefix.insert(cache, "a", A)),
        (ValueError, "another config", lambda: prefix.insert(other, 0, A)),
        (ValueError, "another config", lambda: prefix.make_room(other, 1)),
        (ValueError, "tokens must be a list of integers, not float64*", lambda: prefix.match([1.5, 2.0])),
        (ValueError, "tokens must be a list of integers, not int64*2, 2*", lambda: prefix.match([[1, 2], [3, 4]])),
        (ValueError, "salt must be a str, bytes or None, not int", lambda: prefix.match(A, salt=7)),
        (ValueError, "adapter must be a str or None, not bytes", lambda: prefix.insert(cache, 0, A, adapter=b"x")),
        (ValueError, "would pin 5 of 40 blocks, more than the 4 that max_pinned=0.1", lambda: half.pin(A)),
        (ValueError, "These tokens are not pinned", lambda: prefix.unpin(A)),
        (ValueError, "These tokens are not pinned", lambda: prefix.unpin(B)),
        (ValueError, "max_pinned, a share of the blocks, must be at most 1",
         lambda: jaxkv.PrefixCache(cache.config, max_pinned=2)),
        (ValueError, "in the contiguous layout rows share no blocks",
         lambda: jaxkv.PrefixCache(cache.config.replace(layers=cache.config.layers[:1], layout="contiguous"))),
    ]:  # fmt: skip
        with pytest.raises(error, match=sentence(text)):
            call()
        prefix.check_invariants(cache)
    prefix.make_room(cache, 40)
    with pytest.raises(ValueError, match="evicted since"):
        prefix.adopt(cache, 1, match)
