"""A prefix cache and a model with recurrent layers: prompts are found up to snapshots of their states, and every token
is that of a lone row."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import LONGEST, VOCAB, finish
from compiled import compiled
from cutting import cut_anywhere
from hybrid_model import SEEN, Hybrid
from nightly import NIGHTLY

import jaxkv
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._tiers.prefix_cache.node import Node
from jaxkv._tiers.prefix_cache.snapshots import Snapshots

SIZE = 4
ROOM = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": SIZE, "step_tokens": 13, "prefix_cache": True}


@functools.cache
def make_engine(num_blocks=200, **fields):
    return jaxkv.Engine(Hybrid(), num_blocks=num_blocks, **ROOM | fields)


def serve(engine, *prompts, count=5, **fields):
    """Returns the tokens that were computed for prompts, and what was added to each; all is checked."""
    before = engine.tokens
    requests = [(engine.submit(prompt, count, **fields), prompt, count) for prompt in prompts]
    finish(engine, requests, SEEN)
    jaxkv.check_invariants(engine.cache)
    engine.prefix.check_invariants(engine.cache)
    return engine.tokens - before, [request.tokens for request, *_ in requests]


def draw_tokens(draw, count):
    return [draw.randrange(VOCAB) for _ in range(count)]


@pytest.fixture
def engine():
    engine = make_engine()
    engine.reset()
    return engine


@pytest.mark.parametrize("length", [5, 32, 33, 40])
def test_a_prompt_met_again_is_computed_from_its_last_full_block(engine, length):
    prompt = draw_tokens(random.Random(length), length)
    assert serve(engine, prompt, count=1)[0] == length
    assert serve(engine, prompt, count=1)[0] <= SIZE
    assert serve(engine, prompt, count=1, salt="another")[0] == length


def test_prompts_go_on_where_they_part(engine):
    draw = random.Random(0)
    common, *own = (draw_tokens(draw, n) for n in (22, 6, 7, 9))
    first, second, third = (serve(engine, common + end, count=1)[0] for end in own)
    assert first == 28 and second == 29  # all is known up to block 5, but no state
    assert third == 9 + 22 % SIZE


def test_prompts_side_by_side_compute_their_beginning_once(engine):
    draw = random.Random(1)
    common, *own = (draw_tokens(draw, n) for n in (22, 6, 7, 9))
    computed, _ = serve(engine, *(common + end for end in own), count=1)
    assert computed <= 22 + 6 + 7 + 9 + 2 * (22 % SIZE)
    engine.reset()
    assert serve(engine, *[own[2] + common] * 3, count=1)[0] <= 31 + 2 * SIZE


def test_a_chat_goes_on_behind_its_last_answer(engine):
    draw, chats = random.Random(2), [draw_tokens(random.Random(i), 9) for i in range(5)]
    for turn in range(4):
        for i, chat in enumerate(chats):
            computed, (answer,) = serve(engine, chat, count=4)
            # The last token of an answer has never been computed, and its block may not be full.
            assert computed <= (SIZE if turn else 9) + 3 + 4
            chats[i] = chat + answer + draw_tokens(draw, 3)
    stats = engine.prefix.stats()
    assert 0 < stats["snapshot_bytes"] == 12 * stats["snapshots"] <= 0.1 * engine.cache.bytes


def test_what_is_known_survives_without_device_memory():
    engine, prompt = make_engine(num_blocks=18, spill_bytes=2000), draw_tokens(random.Random(4), 21)
    engine.reset()
    request = engine.submit(prompt, 9)
    for _ in range(4):
        engine.step()
    engine.release()
    engine.restore()
    finish(engine, [(request, prompt, 9)], SEEN)
    assert serve(engine, prompt, count=1)[0] == 1
    assert f"jaxkv_snapshots {engine.prefix.stats()['snapshots']}" in engine.metrics_text().replace(".0", "")


@pytest.mark.skipif(not NIGHTLY, reason="all programs of an engine are compiled")
def test_after_warmup_nothing_compiles():
    engine = make_engine(num_blocks=19)
    engine.warmup(kinds=("greedy",), progress=False)
    prompt = draw_tokens(random.Random(5), 21)

    def submit():
        for _ in range(2):
            engine.submit(prompt, 5)
            list(engine.run())

    assert compiled(submit) == 0 and engine.prefix.stats()["hits"] == 1


def test_an_engine_says_how_much_snapshots_may_take():
    engine = jaxkv.Engine(Hybrid(), num_blocks=18, snapshot_bytes=36, **ROOM)
    assert engine.prefix.snapshot_bytes == 36
    with pytest.raises(ValueError, match="snapshot_bytes= is for a prefix cache"):
        jaxkv.Engine(Hybrid(), num_blocks=18, snapshot_bytes=36, **ROOM | {"prefix_cache": False})


@pytest.mark.parametrize("fields", [{}, {"draft": Hybrid(wrong=3), "draft_tokens": 3}][: 1 + NIGHTLY])
def test_rows_come_and_go_in_little_room(fields):
    engine, draw = make_engine(num_blocks=18, spill_bytes=2000, **fields), random.Random(3)
    known = [draw_tokens(draw, 30) for _ in range(3)]
    for _ in range(12 if NIGHTLY else 3):
        requests = []
        for _ in range(6):
            prompt = draw.choice(known)[: draw.randint(1, 30)] + draw_tokens(draw, draw.choice([0, 1, 5]))
            count, n = draw.randint(1, 12), draw.choice([1, 1, 2])
            requests += [(sample, prompt, count) for sample in engine.submit(prompt, count, n=n).samples]
            if draw.random() < 0.5:
                engine.step()
        draw.choice(requests)[0].cancel()
        finish(engine, requests, SEEN)
        jaxkv.check_invariants(engine.cache)
        engine.prefix.check_invariants(engine.cache)
    assert engine.prefix.stats()["hits"] and engine.set_back


CUT = {
    "computed again": {"swap": "never", "steps_per_dispatch": 3},
    "swapped": {"swap": "always", "spill_bytes": 2000},
    "some guesses wrong": {"draft": Hybrid(wrong=3), "draft_tokens": 3},
}


@pytest.mark.skipif(not NIGHTLY, reason="minutes of cuts: 5,000 of them")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("event", ["line", "opcode"])
@pytest.mark.parametrize("way", CUT)
def test_whatever_cuts_off_a_call_no_token_is_wrong(way, event):
    engine = make_engine(num_blocks=18, **CUT[way])
    prompts = [[5, 7, 11] * 4, [3], [5, 7, 11, 5, 7, 11, 1, 2], [9, 8] * 6]

    def work(requests):
        for prompt in prompts:
            requests.append((engine.submit(prompt, 9), prompt, 9))
            engine.step()
        list(engine.run())

    def check(requests):
        finish(engine, requests, SEEN)
        jaxkv.check_invariants(engine.cache)
        engine.prefix.check_invariants(engine.cache)
        assert engine.cache.is_empty

    cut_anywhere(work, check, event, 850)


# On a cache of one's own.

LAYERS = jaxkv.LayerConfig(num_kv_heads=1, head_dim=4), jaxkv.LayerConfig.recurrent(state=((1,), "float32"))


def make_config(**fields):
    sizes = dict(max_seqs=3, max_seq_len=48, num_blocks=30, block_size=SIZE, dtype="float32", head_dim_multiple=1)
    return CacheConfig(layers=LAYERS, **sizes | fields)


def extend(cache, row, count):
    """Extends a row; its state is then its length."""
    cache = jaxkv.extend(cache, jnp.zeros(3, jnp.int32).at[row].set(count))
    return jaxkv.write_states(cache, {"state": cache.lengths.astype(jnp.float32)[:, None]}, layer=1)


def states_of(cache):
    return jaxkv.read_states(jaxkv.extend(cache, [0, 0, 0]), layer=1)["state"][:, 0].tolist()


def test_a_row_is_found_up_to_its_snapshots():
    config, tokens = make_config(snapshot_every=8), list(range(40))
    cache, prefix = jaxkv.init(config), jaxkv.PrefixCache(config)
    for count in (8, 8, 4, 2):
        cache = extend(cache, 0, count)
    cache = prefix.insert(cache, 0, tokens)
    assert prefix.match(tokens).num_tokens == 16 and prefix.known(tokens[:12]) == 8
    cache = extend(cache, 0, 2)
    cache = jaxkv.free(prefix.insert(cache, 0, tokens), [0])
    match = prefix.match(tokens)
    assert match.num_tokens == 24 and prefix.stats()["snapshots"] == 3
    cache = prefix.adopt(cache, 2, match)
    assert cache.lengths.tolist() == [0, 0, 24] and states_of(cache) == [0, 0, 24]
    jaxkv.check_invariants(cache)
    cache = prefix.adopt(extend(cache, 2, 1), 1, prefix.match(tokens[:20]))
    assert states_of(cache) == [0, 16, 25]  # each of its own
    assert not prefix.match(tokens, salt="another").num_tokens
    cache = prefix.reset(cache)
    assert not prefix.match(tokens).num_tokens and not prefix.stats()["snapshots"]


def test_no_snapshot_no_prefix():
    config, tokens = make_config(), list(range(40))
    cache, prefix = jaxkv.init(config), jaxkv.PrefixCache(config, snapshot_bytes=0)
    cache = prefix.insert(extend(cache, 0, 8), 0, tokens)
    assert not prefix.match(tokens).num_tokens
    with pytest.raises(ValueError, match="snapshot_bytes"):
        jaxkv.PrefixCache(config, snapshot_bytes=-1)


def test_snapshots_go_by_what_they_save():
    """A long chat stays in a turn's snapshot, a common beginning stays, and of equals the last used."""
    snapshots = Snapshots(make_config(), 4 * 4)
    root, nodes, made = Node(None, (), 0, [], [], b"", None), {}, {}

    def chain(name, count):
        node = root
        for depth in range(count):
            if (name, depth) not in made:
                made[name, depth] = Node(node, (depth,), 0, [1], [None], f"{name} {depth}".encode(), None, depth)
                nodes[made[name, depth].label] = made[name, depth]
            node = made[name, depth]
        return node

    def add(name, count):
        snapshots.add({chain(name, count): np.zeros(())}, nodes, [], 0)

    for name, count in (("short", 1), ("long", 9), ("fork", 3), ("fork", 5)):
        add(name, count)
    made["fork", 2].is_fork = True
    add("long", 10)
    assert {(n, d) for (n, d), node in made.items() if snapshots.has(node)} == {
        ("short", 0), ("long", 9), ("fork", 2), ("fork", 4)
    }  # fmt: skip
    add("other", 2)
    assert not snapshots.has(made["short", 0]) and snapshots.has(made["fork", 2])
    del nodes[made["long", 9].label]  # its blocks are gone
    add("other", 3)
    assert not snapshots.has(made["long", 9]) and len(snapshots.on_device) == 4


# Tiers.

STATE, BLOCK = 4, 2 * 4 * SIZE * 4  # bytes


def insert_chats(prefix, cache, chats):
    """Inserts rows of 8 tokens, one after another, each from the row that is freed behind."""
    for tokens in chats:
        cache = prefix.insert(extend(cache, 0, 8), 0, tokens)
        cache = jaxkv.free(cache, [0])
        prefix.check_invariants(cache)
    return cache


def adopt(prefix, cache, tokens, **identity):
    """Returns how many tokens are found; the state is then their number."""
    match = prefix.match([*tokens, 0], **identity)
    adopted = prefix.adopt(cache, 1, match)
    assert states_of(adopted)[1] == match.num_tokens
    prefix.check_invariants(adopted)
    return match.num_tokens


CHATS = [[chat] * 8 for chat in range(1, 6)]


def test_snapshots_go_to_host_memory_and_come_back():
    config = make_config(num_blocks=10)
    prefix = jaxkv.PrefixCache(config, snapshot_bytes=2 * STATE, spill_bytes=6 * STATE + 5 * BLOCK)
    cache = insert_chats(prefix, jaxkv.init(config), CHATS)
    stats = prefix.stats()
    assert stats["snapshots"] == 2 and stats["snapshots_on_host"] == 3 and stats["host_bytes"] == 3 * STATE
    assert [adopt(prefix, cache, tokens) for tokens in CHATS] == [8] * 5
    assert not adopt(prefix, cache, CHATS[0], salt="another")
    cache = prefix.make_room(cache, 10)  # blocks too: room for 5 of 10 beside the states
    prefix.check_invariants(cache)
    assert sum(adopt(prefix, cache, tokens) for tokens in CHATS) == 16
    small = jaxkv.PrefixCache(config, snapshot_bytes=2 * STATE)  # no host memory: they are gone
    cache = insert_chats(small, jaxkv.init(config), CHATS)
    assert small.stats()["snapshots_on_host"] == 0
    assert [adopt(small, cache, tokens) for tokens in CHATS] == [0, 0, 0, 8, 8]


def test_snapshots_go_to_the_disk_and_come_back(tmp_path):
    config = make_config(num_blocks=10)
    options = {"snapshot_bytes": STATE, "spill_bytes": 6 * STATE + 2 * BLOCK, "disk": tmp_path, "disk_bytes": 10**5}
    prefix = jaxkv.PrefixCache(config, **options)
    cache = insert_chats(prefix, jaxkv.init(config), CHATS)
    cache = prefix.make_room(cache, 10)
    assert prefix.stats()["host_bytes"] <= options["spill_bytes"] and prefix.stats()["disk_blocks_written"] >= 3
    prefix.flush(cache)
    assert [adopt(prefix, cache, tokens) for tokens in CHATS] == [8] * 5
    other = jaxkv.PrefixCache(config, **options)  # another process
    empty = jaxkv.init(config)
    assert not adopt(other, empty, CHATS[0], salt="another")
    assert [adopt(other, empty, tokens) for tokens in (*CHATS, *CHATS)] == [8] * 10
    assert all(event.group == 0 for event in other.events())
    assert not adopt(jaxkv.PrefixCache(config, **options, model="another"), empty, CHATS[0])
    for path in tmp_path.glob("*/*/*.1"):  # states
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    damaged = jaxkv.PrefixCache(config, **options)
    assert [adopt(damaged, empty, tokens) for tokens in CHATS] == [0] * 5
    assert damaged.stats()["disk_blocks_damaged"] == 5
    prefix.reset(cache)
    assert not list(tmp_path.glob("*/*/*.?"))


DEEP = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=4),) * 12 + (
    jaxkv.LayerConfig.recurrent(state=((48,), "float32")),
) * 30


@functools.partial(jax.jit, donate_argnames="cache")
def advance(cache, count, value):
    """Extends row 0; all of its states are then a value."""
    cache = jaxkv.extend(cache, jnp.zeros(2, jnp.int32).at[0].set(count))
    for layer in range(12, 42):
        cache = jaxkv.write_states(cache, {"state": jnp.full((2, 48), value)}, layer=layer)
    return cache


@pytest.mark.skipif(not NIGHTLY, reason="a thousand turns")
@pytest.mark.timeout(1800)
def test_a_hundred_chats_of_ten_turns_are_found():
    """Of what chats over 30 layers of states have said, little is computed again."""
    config = CacheConfig(layers=DEEP, max_seqs=2, max_seq_len=256, num_blocks=6000, block_size=SIZE, dtype="float32")
    cache, prefix, draw = jaxkv.init(config), jaxkv.PrefixCache(config), random.Random(7)
    chats, known, found = [draw_tokens(draw, 20) for _ in range(100)], 0, 0
    for turn in range(10):
        for i in draw.sample(range(100), 100):
            chat = chats[i]
            match = prefix.match(chat)
            cache = prefix.adopt(prefix.make_room(cache, 2 * SIZE), 0, match)
            if match.num_tokens:
                held = jaxkv.read_states(jaxkv.extend(cache, [0, 0]), layer=41)["state"][0]
                assert (held == sum(chat[: match.num_tokens])).all()
            known, found = known + (len(chat) - 13 if turn else 0), found + match.num_tokens
            chat, at = chat + draw_tokens(draw, 8), match.num_tokens  # the answer, whose last token is not computed
            for end in ((len(chat) - 9) // SIZE * SIZE, (len(chat) - 1) // SIZE * SIZE, len(chat) - 1):
                if end > at:
                    cache, at = advance(cache, end - at, float(sum(chat[:end]))), end
                    cache = prefix.insert(cache, 0, chat[:end])
            cache = jaxkv.free(cache, [0])
            chats[i] = chat + draw_tokens(draw, 12)
    prefix.check_invariants(cache)
    share = prefix.stats()["snapshot_bytes"] / cache.bytes
    print(f"{found} of {known} known tokens found, snapshots take {share:.1%} of the cache's bytes")
    assert found >= 0.95 * known and share < 0.1
