"""What a `PrefixCache` keeps of windows and chunks, and what it still finds: against everything that is held, tried one
length after another, and against a cache that forgets nothing. Tables alone: no keys are computed."""

import itertools
import random
import sys

import jax
import numpy as np
import pytest
from nightly import NIGHTLY
from steps import on_device

import jaxkv
from jaxkv._core.config.retention import Window

BLOCK, CHUNK = 4, 8
extend = jax.jit(jaxkv.extend)
free = jax.jit(jaxkv.free, static_argnums=1)


def layer(**fields):
    return jaxkv.LayerConfig(num_kv_heads=1, head_dim=2, **fields)


LAYERS = {
    "all": (layer(),),
    "window": (layer(window=6), layer()),
    "first tokens and a window": (layer(), layer(window=6, sink_tokens=5)),
    "chunks": (layer(chunk=8), layer()),
    "two windows": (layer(window=6), layer(), layer(window=14)),
    "windows alone": (layer(window=6), layer(window=14)),
}


def make_config(name, **fields):
    fields = {"max_seqs": 2, "max_seq_len": 96, "num_blocks": 60} | fields
    return jaxkv.CacheConfig(layers=LAYERS[name], block_size=BLOCK, dtype="float32", **fields)


def is_visible(layer, position, length):
    """Whether a token behind `length` others sees one of them."""
    if layer.chunk is not None:
        return position // layer.chunk == length // layer.chunk
    return layer.window is None or position > length - layer.window or position < (layer.sink_tokens or 0)


def blocks_needed(config, group, count):
    """The blocks that a row of `count` full ones needs; its last one too, behind which it goes on."""
    layer = config.layers[config.groups[group][0]]
    length = count * BLOCK
    seen = {position // BLOCK for position in range(length) if is_visible(layer, position, length)}
    return seen | ({count - 1} if count else set())


class Server:
    """Prompts answered one after another, like an engine's with one row."""

    def __init__(self, config, **options):
        self.config, self.prefix = config, jaxkv.PrefixCache(config, **options)
        self.cache = on_device(jaxkv.init(config))
        self.held = set()  # what events have told of: (hash, group, tier)

    def answer(self, prompt, new, salt=None, row=0):
        """Compute a prompt and what follows it; how many tokens were found."""
        tokens, prefix = [*prompt, *new], self.prefix
        match = prefix.match(prompt, salt=salt)
        self.cache = prefix.adopt(self.cache, row, match)
        at = match.num_tokens
        while at < len(tokens):
            end = min(at + CHUNK, len(prompt)) if at < len(prompt) else min(at + 2, len(tokens))
            self.compute(row, end - at)
            if end <= len(prompt):
                self.cache = prefix.insert(self.cache, row, tokens[:end], salt=salt)
            at = end
        self.cache = free(prefix.insert(self.cache, row, tokens, salt=salt), row)
        return match.num_tokens

    def compute(self, row, count):
        counts = np.zeros(self.config.max_seqs, np.int32)
        self.cache = extend(self.cache, counts)  # what has left windows is given back
        self.cache = self.prefix.make_room(self.cache, -(-count // BLOCK))
        counts[row] = count
        self.cache = extend(self.cache, counts)
        assert not self.cache.failed.any()

    def follow(self):
        """What is held now, as events tell it."""
        for event in self.prefix.events():
            (self.held.add if event.stored else self.held.remove)((event.hash, event.group, event.tier))
        return {place[:2] for place in self.held}

    def longest(self, tokens, salt):
        """The most tokens that a row could go on behind: every length tried, with all that is held."""
        held, names = self.follow(), self.prefix.hashes(tokens[:-1], salt=salt)
        return BLOCK * max(
            count
            for count in range(len(names) + 1)
            if all(
                (names[i], group) in held
                for group in range(len(self.config.groups))
                for i in blocks_needed(self.config, group, count)
            )
        )


def text(length, seed):
    draw = random.Random(str(seed))
    return [draw.randrange(10**6) for _ in range(length)]


def common(a, b):
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


TIERS = {"device": (0, None), "host": (40, None), "disk": (20, 60)}  # blocks on the host, and on disk


BY_DAY = [("chunks", "device"), ("two windows", "device"), ("two windows", "host"), ("windows alone", "device"),
          ("first tokens and a window", "disk")]  # fmt: skip


@pytest.mark.parametrize(("name", "tier"), [*itertools.product(LAYERS, TIERS)] if NIGHTLY else BY_DAY)
def test_what_is_found_is_the_longest_that_is_held(name, tier, tmp_path):
    draw, config = random.Random(f"{name} {tier}"), make_config(name, num_blocks=26)
    on_host, on_disk = TIERS[tier]
    options = {"spill_bytes": on_host * config.bytes_per_block // len(config.groups)}
    if on_disk:
        options |= {"disk": tmp_path, "disk_bytes": on_disk * 1000}
    server, said, pinned, matched = Server(config, **options), [(text(9, 1), None)], [], 0
    for turn in range(400 if NIGHTLY else 30):
        tokens, salt = draw.choice(said[-6:])
        prompt = [*tokens[: draw.choice((len(tokens), len(tokens), draw.randrange(len(tokens) + 1)))]]
        prompt = [*prompt[:70], *text(draw.randrange(1, 12), turn)]
        salt = draw.choice((salt, salt, salt, "other"))
        match draw.randrange(8):
            case 0:
                wanted = [draw.randrange(n + 1) for n in config.group_blocks]
                server.cache = server.prefix.make_room(server.cache, wanted)
            case 1 if len(pinned) < 2 and tier != "disk":
                if server.prefix.pin(tokens[:24], salt=salt):
                    pinned.append((tokens[:24], salt))
            case 2 if pinned:
                tokens, salt = pinned.pop()
                server.prefix.unpin(tokens, salt=salt)
            case _:
                longest = server.longest(prompt, salt)
                found = server.prefix.match(prompt, salt=salt).num_tokens
                # What is on disk comes back as far as the host has room.
                assert found == longest if tier != "disk" else found <= longest
                assert server.prefix.known(prompt, salt=salt) == found
                matched += found > 0
                server.answer(prompt, new := text(draw.randrange(1, 12), -turn), salt)
                said.append(([*prompt, *new], salt))
        server.prefix.check_invariants(server.cache)
        jaxkv.check_invariants(server.cache)
    assert matched > 5


def chats(count=6, turns=4):
    """Chats in turn: all that was said, and something new."""
    said = [text(20, -i) for i in range(count)]
    for turn, i in itertools.product(range(turns), range(count)):
        yield i, said[i].copy(), (new := text(6, (turn, i)))
        said[i] += new + text(7, (turn, i, "user"))


def chats_of_two_tenants():
    for i, prompt, new in chats():
        yield i, [7, *prompt[1:]], new


def questions(count=6, turns=6):
    """One-off questions behind few system prompts, one after another; none of these ends with a block."""
    systems = [text(21 + i, ("system", i)) for i in range(count)]
    for turn, i in itertools.product(range(turns), range(count)):
        yield i, [*systems[i], *text(6, (turn, i, "asked"))], text(5, (turn, i))


def regenerated(count=6, turns=6):
    """The same prompts again and again, with other answers."""
    prompts = [text(22, ("prompt", i)) for i in range(count)]
    for turn, i in itertools.product(range(turns), range(count)):
        yield i, prompts[i], text(9, (turn, i))


def edited(count=6, turns=5):
    """Chats whose last message is written anew every other time."""
    said = [text(20, ("edited", i)) for i in range(count)]
    for turn, i in itertools.product(range(turns), range(count)):
        yield i, [*said[i], *text(7, (turn, i, "user"))], (new := text(6, (turn, i)))
        if turn % 2:
            said[i] += text(7, (turn, i, "user")) + new


# How many windows each wants held, and how much of what could be found then is found. Where a message is written anew
# for the first time, what stands before it may be gone.
WORKS = {"chats": (chats, 6, 0.9), "two tenants": (chats_of_two_tenants, 6, 0.9), "questions": (questions, 6, 0.9),
         "regenerated": (regenerated, 6, 0.9), "edited": (edited, 18, 0.85)}  # fmt: skip
HYBRID = [name for name in LAYERS if name not in ("all", "windows alone")]


def share_found(config, work, warm=2, **options):
    """How much of what a cache that forgets nothing would find is found; the first turns are not counted."""
    server, said, findable, found, seen = Server(config, **options), [], 0, 0, {}
    for i, prompt, new in work():
        salt = "ab"[i % 2] if work is chats_of_two_tenants else None
        here = server.answer(prompt, new, salt)
        server.prefix.check_invariants(server.cache)
        if seen.get(i, 0) >= warm:
            best = max(common(prompt[:-1], [*tokens]) for tokens, other in said if other == salt)
            findable, found = findable + best // BLOCK * BLOCK, found + here
        seen[i] = seen.get(i, 0) + 1
        said.append(([*prompt, *new], salt))
    return found / findable


def own_blocks(config, windows):
    """For each group the blocks of so many windows; of one that sees everything, enough."""
    most = [max(len(blocks_needed(config, g, count)) for count in range(1, 20)) for g in range(len(config.groups))]
    return [10**3 if reach is None else n * windows for n, reach in zip(most, config.group_visible_tokens, strict=True)]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("name", HYBRID if NIGHTLY else ("window",))
def test_nine_tenths_are_found_at_one_and_a_half_of_the_windows_blocks(name, work):
    config = make_config(name)
    make, windows, least = WORKS[work]
    blocks = [int(1.5 * n) for n in own_blocks(config, windows)]
    assert share_found(make_config(name, num_blocks=None, group_blocks=blocks), make) >= least


@pytest.mark.parametrize(
    ("name", "tier"),
    [("window", "disk"), ("chunks", "host"), *[("window", "host"), ("chunks", "disk")] * NIGHTLY],
)
def test_so_it_is_in_host_memory_and_on_disk(name, tier, tmp_path):
    """The device has room for a row's window and hardly more."""
    config = make_config(name)
    window = config.group_visible_tokens.index(max(r for r in config.group_visible_tokens if r is not None))
    own = own_blocks(config, 6)[window]
    blocks = [own // 6 + 4 if g == window else 200 for g in range(2)]
    config = make_config(name, num_blocks=None, group_blocks=blocks)
    size = config.bytes_per_group_block(window)
    options = {"spill_bytes": int(1.5 * own) * size}
    if tier == "disk":
        options = {"spill_bytes": 6 * size, "disk": tmp_path, "disk_bytes": int(1.5 * own) * 1000}
    assert share_found(config, chats, **options) >= 0.9


def test_the_least_recently_used_chat_goes_as_a_whole_when_room_shrinks():
    config = make_config("window")
    server, said = Server(config), [text(26, i) for i in range(4)]
    for tokens in said:
        server.answer(tokens[:20], tokens[20:])
    for room, expected in (([60 - 8, 0], [24] * 4), ([60 - 6, 0], [0, 24, 24, 24]), ([60 - 2, 60 - 6], [0, 0, 0, 24])):
        server.cache = server.prefix.make_room(server.cache, room)
        assert [server.prefix.known([*tokens, 1]) for tokens in said] == expected
    assert server.prefix.stats()["blocks"] == [2, 6]
    server.cache = server.prefix.make_room(server.cache, 60)
    assert server.prefix.stats()["blocks"] == [0, 0]


def test_what_one_group_cannot_serve_any_more_no_other_one_keeps():
    config = make_config("window")
    server, said = Server(config), [text(26, i) for i in range(3)]
    for tokens in said:
        server.answer(tokens[:20], tokens[20:])
    server.cache = server.prefix.make_room(server.cache, [60 - 4, 0])  # the window of the first
    assert server.prefix.match([*said[0], 1]).num_tokens == 0
    for tokens in (said[1], said[2]):
        server.prefix.match([*tokens, 1])
    assert server.prefix.stats()["blocks"] == [4, 18]
    server.cache = server.prefix.make_room(server.cache, [0, 60 - 12])  # so its other blocks are the first to go
    assert [server.prefix.known([*tokens, 1]) for tokens in said] == [0, 24, 24]


def test_a_pin_is_of_what_a_match_needs():
    config = make_config("window", max_seqs=1)
    server, tokens = Server(config, max_pinned=0.12), text(30, 1)
    server.answer(tokens[:28], tokens[28:])
    assert server.prefix.stats()["blocks"][0] > 2
    assert server.prefix.pin(tokens) == 28
    assert server.prefix.stats()["blocks_pinned"] == [2, 7]
    server.cache = server.prefix.make_room(server.cache, 60)
    assert server.prefix.stats()["blocks"] == [2, 7] and server.prefix.available(server.cache) == [58, 53]
    assert server.prefix.match([*tokens, 1]).num_tokens == 28
    server.prefix.check_invariants(server.cache)
    server.prefix.unpin(tokens)
    server.cache = server.prefix.make_room(server.cache, 60)
    assert server.cache.blocks_in_use == 0


@pytest.mark.parametrize("name", LAYERS)
def test_a_pin_is_of_what_a_match_finds(name):
    """Not of what is only known: in the middle of a prompt the blocks of a window may be gone, and no prompt can go on
    there."""
    server, tokens = Server(make_config(name, max_seqs=1)), text(48, 1)
    for _ in range(0, 48, CHUNK):
        server.compute(0, CHUNK)
    server.cache = free(server.prefix.insert(server.cache, 0, tokens), 0)
    found = [server.prefix.known([*tokens[:n], 1]) for n in range(49)]
    assert any(there < n // BLOCK * BLOCK for n, there in enumerate(found)) == (name != "all")
    for n, there in enumerate(found):
        assert server.prefix.pin(tokens[:n]) == there, n
        if there:
            server.prefix.unpin(tokens[:n])
        assert not any(server.prefix.stats()["blocks_pinned"])
    there = server.prefix.pin(tokens[:31])
    server.cache = server.prefix.make_room(server.cache, 60)
    assert server.prefix.match([*tokens[:31], 1]).num_tokens == there
    server.prefix.check_invariants(server.cache)


def test_where_a_row_goes_on_is_worth_less_than_where_none_does():
    """A row that decodes comes with a later end; what was said in another chat comes back to where it was."""
    config = make_config("window")
    server, idle, running = Server(config), text(26, 1), text(20, 2)
    server.answer(idle[:20], idle[20:])
    server.compute(1, 20)
    server.cache = server.prefix.insert(server.cache, 1, running)
    for _ in range(4):
        server.compute(1, 4)
    assert server.prefix.known([*running, 1]) == 20
    own = int(server.cache.tables[0].num_blocks_per_row[1])
    server.cache = server.prefix.make_room(server.cache, [60 - 2 - own, 0])
    assert (server.prefix.known([*idle, 1]), server.prefix.known([*running, 1])) == (24, 0)


def test_a_window_that_is_gone_leaves_what_can_be_served_without_it():
    """An end that loses its last block moves back, as far as the windows before it are still there."""
    config = make_config("window", max_seqs=1)
    server, tokens = Server(config), text(40, 1)
    server.cache = extend(server.cache, np.array([40], np.int32))
    server.cache = free(server.prefix.insert(server.cache, 0, tokens), 0)
    for left in range(9, 0, -1):
        server.cache = server.prefix.make_room(server.cache, [0, 60 - left])
        assert server.prefix.known([*tokens, 1]) == 4 * left
        server.prefix.check_invariants(server.cache)


def test_finding_takes_time_in_proportion_to_a_prompt():
    """100k tokens are matched with a comparison of each block, not of each pair of them."""
    config = make_config("two windows", max_seq_len=10**5, num_blocks=25_000, max_seqs=1)
    server, tokens = Server(config), text(10**5, 1)
    server.cache = extend(server.cache, np.array([99_999], np.int32))
    server.cache = free(server.prefix.insert(server.cache, 0, tokens), 0)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    found = server.prefix.match(tokens).num_tokens
    sys.setprofile(None)
    assert found == 99_996 and calls < 40 * found // BLOCK


class Windowed:
    layer_configs, dtype = (layer(window=64),) * 5 + (layer(),), "float32"


def test_a_prefix_cache_costs_less_than_a_third_of_the_tokens():
    sizes = {"max_seqs": 8, "max_seq_len": 4096, "step_tokens": 256}
    for memory in (10**6, 10**7):
        without, own = (
            jaxkv.CacheConfig.from_model(Windowed, **sizes, memory_bytes=memory, prefix_cache=prefix_cache)
            for prefix_cache in (False, True)
        )
        assert own.bytes <= memory
        assert without.num_blocks / 1.3 < own.num_blocks <= without.num_blocks
        assert own.group_blocks[0] > without.group_blocks[0] == own.window_blocks(Window(64), 256)
    for size in ({}, {"num_blocks": 512}, {"max_tokens": 10_000}):
        without, own = (
            jaxkv.CacheConfig.from_model(Windowed, **sizes, **size, prefix_cache=prefix_cache)
            for prefix_cache in (False, True)
        )
        assert own.num_blocks == without.num_blocks and without.bytes < own.bytes < 1.3 * without.bytes
    # Where windows take as much as everything, they get no more.
    assert jaxkv.CacheConfig.from_model(Windowed, **sizes, num_blocks=9, prefix_cache=True).group_blocks == (9, 9)
