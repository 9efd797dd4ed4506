"""Calls of a `PrefixCache` that an exception cuts off anywhere: nothing wrong is found later, and nothing is lost.

An exception is raised at every line of every function of the wing (by night at every instruction, too), on the way in
and on the way out. The caller goes on with the cache it had.
"""

import contextlib
import copy
import functools
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY, skip_by_day
from steps import on_device
from test_prefix import BLOCK, compute, contents, make_config

import jaxkv
from jaxkv._files import atomic, blocks
from jaxkv._tiers.prefix_cache import prefix_cache as watched

WATCHED = str(pathlib.Path(watched.__file__).parents[1])  # all tiers
FILES = (blocks.__file__, atomic.__file__)
A, B, C = list(range(20)), list(range(100, 130)), [*range(8), *range(200, 218)]
PROMPTS = [(tokens, salt) for tokens in (A, B, C) for salt in (None, "other")]
NUM_BLOCKS = 24


class Interrupt(BaseException):
    """Like Ctrl-C."""


def cut_off(call, at, opcodes=False):
    """Make a call, and raise at its `at`-th step in the wing. Whether it has such a step."""
    steps = 0

    def step(frame, event, _):
        nonlocal steps
        frame.f_trace_opcodes = opcodes
        steps += 1
        if steps == at:
            sys.settrace(None)
            raise Interrupt
        return step

    def enter(frame, event, argument):
        watched = frame.f_code.co_filename.startswith(WATCHED) or frame.f_code.co_filename in FILES
        return step(frame, event, argument) if watched else None

    sys.settrace(enter)
    with contextlib.suppress(Interrupt):
        call()
    sys.settrace(None)
    return steps >= at


def read(cache, row, group):
    """What stands for the keys of a row's tokens in the layers of a group; None where the window has passed."""
    table, length = np.asarray(cache.tables[group].tables)[row], int(cache.lengths[row])
    for layer in cache.config.groups[group]:
        kv = np.asarray(cache.pool(layer).kv)
        tokens = [kv[table[i // BLOCK], :, :, i % BLOCK] if table[i // BLOCK] else None for i in range(length)]
        assert all(x is None or (x == x.flat[0]).all() for x in tokens)
        yield [None if x is None else x.flat[0] for x in tokens]


def assert_row_is(cache, row, tokens):
    assert int(cache.lengths[row]) == len(tokens)
    for group in range(len(cache.tables)):
        for found in read(cache, row, group):
            expected = contents(tokens)
            assert all(f is None or f == e for f, e in zip(found, expected, strict=True)), "another prompt's keys"


def agree(prefix, cache):
    """Whether the index knows of every block that the cache keeps, and of no other."""
    prefix.check_invariants(cache)
    return prefix.stats()["blocks"] == [np.count_nonzero(t.kept) for t in cache.tables]


def assert_whole(cache, prefix):
    """Every prompt gets its own keys, and every row and block comes back."""
    prefix.check_invariants(cache)
    jaxkv.check_invariants(cache)
    assert_row_is(cache, 1, C[: int(cache.lengths[1])])
    for tokens, salt in PROMPTS:
        match = prefix.match([*tokens, -1], salt=salt)
        try:
            adopted = prefix.adopt(cache, 3, match)
        except jaxkv.OutOfBlocks:
            continue
        except ValueError as error:  # the index was ahead of the cache: now it is not
            assert "match the prompt again" in str(error)
            match = prefix.match([*tokens, -1], salt=salt)
            adopted = prefix.adopt(cache, 3, match)
        assert_row_is(adopted, 3, tokens[: match.num_tokens])
        cache = free(adopted, 3)
        assert agree(prefix, cache) or not match.num_tokens
    for tokens, salt in PROMPTS:
        for _ in range(2):
            try:
                prefix.unpin(tokens, salt=salt)
            except ValueError:
                break
    cache = prefix.make_room(free(free(cache, 0), 1), NUM_BLOCKS)
    jaxkv.check_invariants(cache)
    assert agree(prefix, cache) and cache.blocks_in_use == 0


free = jax.jit(jaxkv.free, static_argnums=1)
copy_of = jax.jit(lambda cache: jax.tree.map(jnp.copy, cache))  # to be used up


folders = contextlib.ExitStack()  # removed with the process


def new_folder():
    return pathlib.Path(folders.enter_context(tempfile.TemporaryDirectory()))


@functools.cache
def situation(window, spill, crowded=False):
    """A prompt on the device, pinned in part; one mostly on the host or on disk, if it can be; one in a row, not
    indexed yet. `crowded`: hardly any other block is free."""
    config = make_config(window, num_blocks=NUM_BLOCKS)
    on_host = {False: 0, True: 9, "disk": 4}[spill] * config.bytes_per_block
    disk = {"disk": new_folder(), "disk_bytes": 10**6} if spill == "disk" else {}
    prefix = jaxkv.PrefixCache(config, spill_bytes=on_host, **disk)
    cache = on_device(jaxkv.init(config))
    for tokens in (B, A):
        cache, _ = compute(cache, 0, tokens)
        cache = free(prefix.insert(cache, 0, tokens), 0)
    cache = prefix.make_room(cache, NUM_BLOCKS - 7)
    prefix.pin(A[:8])
    cache, _ = compute(cache, 1, C)
    if crowded:
        cache = jaxkv.reserve(cache, [28, 0, 0, 0])
        assert min(int(t.num_free) for t in cache.tables) < 4
    assert agree(prefix, cache)
    return cache, prefix


def copied(prefix):
    """An index like this one, which its own calls change."""
    memo = {}
    other = jaxkv.PrefixCache(prefix.config, spill_bytes=prefix.spill_bytes)
    other._index = copy.deepcopy(prefix._index, memo)
    for identity, root in prefix._index.roots.items():
        other._index.roots[identity] = memo[id(root)]  # what is held weakly is not copied
    if prefix.files is not None:
        other.files = other._index.disk
        other.files.folder = shutil.copytree(prefix.files.folder, new_folder() / "copy")
    return other


CROWDED = "adopt, donated, in the room of others"
CALLS = {
    "insert": lambda cache, prefix: prefix.insert(cache, 1, C, salt="other"),
    "insert beside": lambda cache, prefix: prefix.insert(cache, 1, C),
    "make_room": lambda cache, prefix: prefix.make_room(cache, NUM_BLOCKS - 8),
    "adopt": lambda cache, prefix: prefix.adopt(cache, 2, prefix.match([*A, 1])),
    "adopt from the host": lambda cache, prefix: prefix.adopt(cache, 2, prefix.match([*B, 1])),
    "adopt, donated": lambda cache, prefix: prefix.adopt(cache, 2, prefix.match([*B, 1]), donate=True),
    CROWDED: lambda cache, prefix: prefix.adopt(cache, 2, prefix.match([*B, 1]), donate=True),
    "pin": lambda cache, prefix: (prefix.pin(A), cache)[1],
    "unpin": lambda cache, prefix: (prefix.unpin(A), cache)[1],
    "reset": lambda cache, prefix: prefix.reset(cache),
    "match": lambda cache, prefix: (prefix.match([*B, 1]), cache)[1],
    "flush": lambda cache, prefix: (prefix.flush(cache), cache)[1],
    "swap": lambda cache, prefix: jaxkv.swap_in(*(lambda c, host: (c, 1, host))(*jaxkv.swap_out(cache, 1))),
}

ON_DISK = ("make_room", "match") + NIGHTLY * tuple(CALLS)


# What is raised while a generator is closed, Python drops.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("window", "spill"), [(6, True), (None, "disk")] + NIGHTLY * [(None, False), (None, True), (6, False), (6, "disk")]
)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_cut_off_at_every_line(name, window, spill):
    if spill == "disk" and name not in ON_DISK:
        pytest.skip("the disk takes no part in it")
    call = CALLS[name]
    cache, kept = situation(window, spill, name == CROWDED)
    prefix = copied(kept)
    after = call(copy_of(cache), prefix)
    assert name == "swap" or agree(prefix, after)
    at, points, used_up = 1, 0, 0
    opcodes = NIGHTLY and spill != "disk"  # where there are files to copy, every line takes long enough
    while cut_off(functools.partial(call, given := copy_of(cache), prefix := copied(kept)), at, opcodes):
        used_up += any(x.is_deleted() for x in jax.tree.leaves(given))
        assert_whole(prefix.recover(given), prefix)
        points += 1
        at += 1 if NIGHTLY else max(1, at // 3)
    assert points >= 5
    assert bool(used_up) == (name in ("adopt, donated", CROWDED) and bool(spill))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@skip_by_day(
    "by day interrupts come at chosen points: a real signal within JAX can leave its tracing broken for the process"
)
@pytest.mark.parametrize("window", [None, 6])
def test_signals_arrive_at_any_time(window):
    """Random calls, most of them cut off by a real signal, in one line of caches and one index."""
    cache, kept = situation(window, True)
    prefix, rng, cut, seconds = copied(kept), random.Random(7), 0, dict.fromkeys(CALLS, 1e-3)

    def interrupt(number, frame):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while cut < (100 if NIGHTLY else 10):
            name = rng.choice(list(CALLS))
            started = time.perf_counter()
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1.5 * seconds[name]))
                    result = CALLS[name](copy_of(cache), prefix)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                cache, seconds[name] = free(result, 2), time.perf_counter() - started
            except Interrupt:
                cut += 1
            except ValueError as error:  # XLA makes such a one of what is raised while it compares
                assert "pin" in str(error) or "Interrupt" in str(error), error
            prefix.check_invariants(cache)
            jaxkv.check_invariants(cache)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_whole(cache, prefix)
