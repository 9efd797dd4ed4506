"""The tier on disk of a prefix index: found again by the next process, and never another prompt's keys and values."""

import dataclasses
import errno
import os
import pathlib
import random
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from nightly import NIGHTLY
from test_prefix import BLOCK, A, B, assert_holds, compute, make_config, start

import jaxkv
from jaxkv._files import atomic, blocks
from jaxkv._files.blocks import BlockFiles, SavedBlock
from jaxkv._tiers.prefix_cache.index import digest_of
from pallas_kernels.common.quantization import FORMATS

PLENTY = 10**6
DATA = pathlib.Path(__file__)


def options(folder, config, on_host=8, **fields):
    """Of an index with host memory for a few blocks, and plenty of room in a folder."""
    return {"spill_bytes": on_host * config.bytes_per_block, "disk": folder, "disk_bytes": PLENTY} | fields


def files_of(folder):
    return sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file())


def fill(folder, *prompts, window=None, **identity):
    """A folder with the blocks of prompts, written by an index that is gone."""
    config = make_config(window)
    cache, prefix = jaxkv.init(config), jaxkv.PrefixCache(config, **options(folder, config))
    for prompt in prompts:
        cache, _ = compute(cache, 0, prompt)
        cache = jaxkv.free(prefix.insert(cache, 0, prompt, **identity), 0)
    prefix.flush(cache)
    assert prefix.match([*prompts[0], 1], **identity).num_tokens, "nothing is lost by it"
    prefix.check_invariants(cache)
    return config


@pytest.mark.parametrize("window", [6] + NIGHTLY * [None])
def test_the_next_index_finds_what_the_one_before_wrote(tmp_path, window):
    config = fill(tmp_path, A, B, window=window)
    cache, prefix = start(config=config, **options(tmp_path, config))
    for row, (prompt, matched) in enumerate([([*B, 1], 28), ([*A[:18], 9], 16), ([*A[:10], 0, 0, 0], 8), ([5] * 9, 0)]):
        if window and matched in (8, 16):  # in the middle the window's blocks were never indexed
            continue
        match = prefix.match(prompt)
        assert match.num_tokens == matched
        cache = prefix.adopt(cache, row, match)
        assert_holds(cache, row, prompt[:matched], window)
        prefix.check_invariants(cache)
    stats = prefix.stats()
    assert stats["disk_blocks_read"] == stats["blocks_restored"] > 0 and stats["host_bytes"] == 0
    cache = prefix.make_room(jaxkv.free(cache, [0, 1, 2, 3]), 40)
    assert cache.blocks_in_use == 0 and prefix.stats()["disk_blocks_written"] == 0, (
        "what has a file is not written again"
    )
    assert_holds(prefix.adopt(cache, 0, prefix.match([*B, 1])), 0, B[:28], window)


def test_blocks_that_leave_the_host_go_to_files_and_no_others(tmp_path):
    config = make_config()
    cache, prefix = start(prompts=[A, B], config=config, **options(tmp_path, config, on_host=3))
    assert not files_of(tmp_path)
    cache = prefix.make_room(cache, 40)  # 12 blocks, 3 of which stay on the host
    stats = prefix.stats()
    assert stats["disk_blocks_written"] == len(files_of(tmp_path)) == 9
    assert stats["host_bytes"] == 3 * config.bytes_per_block
    assert stats["disk_bytes"] == sum(path.stat().st_size for path in files_of(tmp_path))
    # Of a chain comes back what the host has room for, beside its own blocks there: those stand at its beginning.
    assert prefix.match([*B, 1]).num_tokens == 12
    cache = prefix.adopt(cache, 1, prefix.match([*B, 1]))
    assert prefix.match([*B, 1]).num_tokens == 24, "what is on the device takes no room there"
    cache = prefix.adopt(jaxkv.free(cache, 1), 1, prefix.match([*B, 1]))
    assert_holds(cache, 1, B[:24])
    prefix.check_invariants(cache)


def test_pinned_blocks_on_the_host_are_not_given_up_for_others_on_disk(tmp_path):
    config = make_config()
    cache, prefix = start(prompts=[A[:8], B], config=config, **options(tmp_path, config, on_host=3))
    prefix.pin(A[:8])
    cache = prefix.make_room(jaxkv.free(prefix.adopt(cache, 1, prefix.match([*A[:8], 1])), 1), 40)
    assert cache.blocks_in_use == 2, "on the device they stay"
    other = jaxkv.init(config)  # what was on the device is gone with its cache, and on the host there is room for 3
    prefix.check_invariants(other)
    cache, _ = compute(other, 0, A[:8])
    cache = prefix.make_room(jaxkv.free(prefix.insert(cache, 0, A[:8]), 0), 40)
    assert prefix.match([*B, 1]).num_tokens <= 12
    prefix.check_invariants(cache)


def test_two_indices_over_one_folder_find_each_others_blocks(tmp_path):
    config = make_config()
    one, first = start(config=config, **options(tmp_path, config))
    two, second = start(config=config, **options(tmp_path, config))
    cache, _ = compute(one, 0, B)
    first.flush(first.insert(cache, 0, B))
    match = second.match([*B, 1])
    assert match.num_tokens == 28
    assert_holds(second.adopt(two, 1, match), 1, B[:28])
    first.reset(jaxkv.init(config))
    assert not files_of(tmp_path)
    two = second.make_room(second.reset(two), 40)
    assert second.match([*B, 1]).num_tokens == first.match([*B, 1]).num_tokens == 0


def test_what_is_of_another_salt_adapter_model_or_config_is_not_found(tmp_path):
    config = fill(tmp_path, A, salt="a")
    cache, prefix = start(config=config, **options(tmp_path, config))
    prompt = [*A, 1]
    for identity in ({}, {"salt": "b"}, {"salt": b"a"}, {"salt": "a", "adapter": "x"}, {"adapter": "a"}):
        assert prefix.match(prompt, **identity).num_tokens == 0
    assert prefix.match(prompt, salt="a").num_tokens == 20
    layers = (config.layers[0], jaxkv.LayerConfig(num_kv_heads=2, head_dim=4))
    others = [
        (config, {"model": "llama"}),
        (config.replace(dtype="bfloat16"), {}),
        (config.replace(dtype="int8"), {}),
        (config.replace(block_size=2), {}),
        (config.replace(head_dim_multiple=16, join_kv=True), {}),
        (config.replace(layers=layers), {}),
        (make_config(window=6), {}),
    ]
    for other, fields in others:
        index = jaxkv.PrefixCache(other, **options(tmp_path, config, **fields))
        assert index.match(prompt, salt="a").num_tokens == 0, other
        index.reset(jaxkv.init(other))
    more = config.replace(num_blocks=50, max_seqs=2, max_seq_len=32)
    assert jaxkv.PrefixCache(more, **options(tmp_path, more)).match(prompt, salt="a").num_tokens == 20
    prefix.reset(cache)
    assert not files_of(tmp_path) and prefix.match(prompt, salt="a").num_tokens == 0


@pytest.mark.parametrize(
    "fields", [{"dtype": "int8"}, {"dtype": "int4"}, {"head_dim_multiple": 8, "dtype": "bfloat16"}]
)
def test_every_kind_of_storage_comes_back_to_the_bit(tmp_path, fields):
    config = make_config(num_blocks=8).replace(**fields)
    files = BlockFiles(tmp_path, PLENTY, config, None)
    pools = [jax.tree.map(noise, jaxkv.init(config).pool(layer)) for layer in range(2)]
    contents = [jax.tree.map(lambda x: np.asarray(x)[3], pool) for pool in pools]
    block = SavedBlock(b"h" * 20, b"p" * 20, (1, 2, 3, 4), 0)
    assert files.write(block, contents) and not files.write(block, contents)
    found = BlockFiles(tmp_path, PLENTY, config, None).read(block)
    for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(contents), strict=True):
        assert new.dtype == old.dtype and new.shape == old.shape
        np.testing.assert_array_equal(new.view(np.uint8), old.view(np.uint8))


def test_blocks_of_another_revision_of_a_format_are_not_found(monkeypatch):
    """Bits of int4 meant other numbers once."""
    names = []
    for revision in (1, 2):
        monkeypatch.setitem(FORMATS, "int4", dataclasses.replace(FORMATS["int4"], revision=revision))
        names.append(
            {dtype: blocks.fingerprint(make_config().replace(dtype=dtype), None) for dtype in ("int4", "int8")}
        )
    assert names[0]["int4"] != names[1]["int4"] and names[0]["int8"] == names[1]["int8"]


def noise(x):
    data = np.random.default_rng(x.size).integers(0, 256, x.nbytes, dtype=np.uint8)
    return data.view(np.asarray(x).dtype).reshape(x.shape)


def chain_blocks(files, count, seed=0):
    """Blocks of a chain, each with its contents."""
    rng, digest = np.random.default_rng(seed), digest_of(files.owner, (str, "a salt", seed))
    for number in range(count):
        parent, tokens = digest, tuple(range(number * BLOCK, number * BLOCK + BLOCK))
        digest = digest_of(parent, tokens)
        contents = [
            jax.tree.map(lambda x: rng.standard_normal(x.shape[1:], np.float32), jaxkv.init(files.config).pool(layer))
            for layer in range(2)
        ]
        yield SavedBlock(digest, parent, tokens, 0), contents


def equal(found, contents):
    return all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(contents)))


def damages(draw, path, data, others):
    """One damage after another of a file; what the file is then."""
    while True:
        flipped = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 50))):
            flipped[draw.randrange(len(data))] ^= draw.randrange(1, 256)
        yield bytes(flipped)
        yield data[: draw.randrange(len(data))]
        yield data + draw.randbytes(draw.randrange(1, 9))
        yield draw.choice(others)
        yield bytes(len(data))
        begin, end = sorted(draw.sample(range(len(data)), 2))
        yield data[:begin] + draw.randbytes(end - begin) + data[end:]


def test_300_damaged_files_are_300_misses(tmp_path):
    config = make_config(num_blocks=4)
    files, draw, wrong = BlockFiles(tmp_path, PLENTY, config, None), random.Random(3), 0
    pairs = list(chain_blocks(files, 6))
    for block, contents in pairs:
        assert files.write(block, contents)
    wholes = {files.folder / name: (files.folder / name).read_bytes() for name in files.files}
    path, data = next(iter(wholes.items()))
    kinds = damages(draw, path, data, [other for other in wholes.values() if other != data])
    for number in range(300):
        damaged = next(kinds)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(damaged)
        reader = files if number % 2 else BlockFiles(tmp_path, PLENTY, config, None)
        found = reader.read(pairs[0][0])
        assert found is None or (damaged == data and equal(found, pairs[0][1]))
        wrong += found is not None
        assert not path.exists() or damaged == data, "it is out of the way for the next"
    assert wrong <= 2 and equal(files.read(pairs[1][0]), pairs[1][1])
    assert files.write(*pairs[0]) and equal(files.read(pairs[0][0]), pairs[0][1]), "and is written anew"


def test_a_damaged_file_ends_a_match_before_it(tmp_path):
    config, draw = fill(tmp_path, B), random.Random(5)
    wholes = {path: path.read_bytes() for path in files_of(tmp_path)}
    by_start = {int(re.search(rb'tokens\\": \[(\d+)', data)[1]): path for path, data in wholes.items()}
    for number in range(7) if NIGHTLY else (0, 4):
        damaged = by_start[B[number * BLOCK]]
        data = bytearray(wholes[damaged])
        data[draw.randrange(len(data))] ^= 1
        damaged.write_bytes(data)
        cache, prefix = start(config=config, **options(tmp_path, config))
        match = prefix.match([*B, 1])
        assert match.num_tokens == number * BLOCK and prefix.stats()["disk_blocks_damaged"] == 1
        prefix.check_invariants(cache)
        assert_holds(prefix.adopt(cache, 1, match), 1, B[: number * BLOCK])
        assert not damaged.exists()
        damaged.write_bytes(wholes[damaged])


KILLS = """
import itertools, os, random, signal, sys, time
sys.path[:0] = sys.argv[3:]
from test_prefix_disk import BlockFiles, PLENTY, chain_blocks, equal, files_of, make_config

folder, kills, config = sys.argv[1], int(sys.argv[2]), make_config(num_blocks=4).replace(block_size=512)
files = BlockFiles(folder, PLENTY, config, None)
pairs = [(block, contents) for block, contents in chain_blocks(files, 12)]
seen = unfinished = 0
for kill in range(kills):
    child = os.fork()
    if not child:
        while True:
            for block, contents in pairs:
                files.write(block, contents)
            files.clear()
    time.sleep(random.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    unfinished += sum(path.name.endswith(".tmp") for path in files_of(folder))
    after = BlockFiles(folder, PLENTY, config, None)
    assert not any(path.name.endswith(".tmp") for path in files_of(folder)), "what is left of it is removed"
    for block, contents in pairs:
        if after.has(block):
            assert equal(after.read(block), contents), "a block that is there is whole"
            seen += 1
    assert after.counts["damaged"] == 0
print(seen, unfinished, pairs[-1][0].hash.hex())
"""


def test_a_writer_that_is_killed_leaves_whole_files_or_none(tmp_path):
    kills = 200 if NIGHTLY else 5
    paths = [str(DATA.parent), str(DATA.parents[1] / "support")]
    result = subprocess.run([sys.executable, "-c", KILLS, tmp_path, str(kills), *paths], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *counts, digest = result.stdout.split()
    seen, unfinished = map(int, counts)
    config = make_config(num_blocks=4).replace(block_size=512)
    *_, (last, _) = chain_blocks(BlockFiles(tmp_path, PLENTY, config, None), 12)
    assert last.hash.hex() == digest, "the same names in every process"
    assert seen >= kills // 2 and unfinished >= kills // 20


def test_what_is_left_of_a_process_with_our_number_is_removed(tmp_path):
    """In containers every process may have the same."""
    place = tmp_path / ("0" * 32) / "00"
    place.mkdir(parents=True)
    host, own = atomic.socket.gethostname(), os.getpid()
    other = (atomic._FIRST + 2**40) % 2**62
    names = {f".{n}.{host}.{process}.{number}.tmp": kept for n, process, number, kept in [
        ("a", own, atomic._FIRST + 1, True), ("b", own, other, False), ("c", 2**22 + 5, 1, False),
    ]} | {f".d.{host}x.{own}.{other}.tmp": True, "e.tmp": True}  # fmt: skip
    for name in names:
        (place / name).write_bytes(b"x")
    BlockFiles(tmp_path, PLENTY, make_config(), None)
    assert {path.name for path in files_of(tmp_path)} == {name for name, kept in names.items() if kept}


def test_the_least_recently_used_goes_and_the_next_process_knows_which(tmp_path):
    config = make_config(num_blocks=4)
    pairs = list(chain_blocks(BlockFiles(tmp_path, PLENTY, config, None), 5))
    size = 0
    for number, (block, contents) in enumerate(pairs[:3]):
        files = BlockFiles(tmp_path, PLENTY, config, None)
        assert files.write(block, contents)
        size = max(size, *files.files.values())
        os.utime(files.folder / files._name(block), ns=(number, number))
    (tmp_path / "mine.txt").write_text("left alone")
    assert files.read(pairs[0][0]), "so it was used last"
    most = 3 * size + 64
    files = BlockFiles(tmp_path, most, config, None)
    for block, contents in pairs[3:]:
        assert files.write(block, contents) and files.num_bytes <= most
    assert [files.has(block) for block, _ in pairs] == [True, False, False, True, True]
    assert files.counts["dropped"] == 2 and (tmp_path / "mine.txt").read_text() == "left alone"
    for path in files_of(tmp_path):
        path.unlink()  # by another process, say
    assert [files.read(block) for block, _ in pairs] == [None] * 5 and files.num_bytes == 0


def test_a_full_disk_is_said_once_and_nothing_else_changes(tmp_path, monkeypatch):
    config = make_config()
    cache, prefix = start(prompts=[A, B], config=config, **options(tmp_path, config, on_host=2))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(blocks.zlib, "crc32", full)  # in the middle of a file
        with pytest.warns(UserWarning, match="could not be written to .*No space left") as said:
            cache = prefix.make_room(cache, 40)
    assert len(said) == 1 and prefix.stats()["disk_blocks_refused"] == 10 and not files_of(tmp_path)
    prefix.check_invariants(cache)
    assert prefix.match([*B, 1]).num_tokens == 8
    assert_holds(prefix.adopt(cache, 0, prefix.match([*B, 1])), 0, B[:8])
    cache, _ = compute(cache, 0, A)
    prefix.flush(prefix.insert(cache, 0, A))
    assert prefix.stats()["disk_blocks_written"] == 5, "once there is room again, it goes on"


def test_files_that_cannot_be_removed_are_no_blocks(tmp_path, monkeypatch):
    config = fill(tmp_path, A)
    for path in files_of(tmp_path):
        path.write_bytes(b"damaged")

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "unlink", refused)
    cache, prefix = start(config=config, **options(tmp_path, config))
    assert prefix.match([*A, 1]).num_tokens == prefix.match([*A, 1]).num_tokens == 0
    cache, _ = compute(cache, 0, A)
    prefix.flush(prefix.insert(cache, 0, A))


def test_bad_options_are_one_sentence_each(tmp_path, monkeypatch):
    config = make_config()
    (tmp_path / "file").write_text("")
    closed = tmp_path / "closed"
    real = blocks.tempfile.TemporaryFile

    def refused(dir):  # a folder without rights, which tests that run as root do not have
        if dir == closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(dir=dir)

    monkeypatch.setattr(blocks.tempfile, "TemporaryFile", refused)
    for fields, sentence in [
        ({"disk": tmp_path / "file"}, "disk must be a folder that can be written to, but .*file is none .File exists"),
        ({"disk": tmp_path / "file" / "x"}, "disk must be a folder .*Not a directory"),
        ({"disk": closed}, "disk must be a folder .*Permission denied"),
        ({"disk": 7}, "disk must be a folder, a path, not 7"),
        ({"disk": "a\0b"}, "disk has characters that no name of a file can have"),
        ({"disk_bytes": 0}, "disk_bytes must be above 0, not 0"),
        ({"disk_bytes": 288}, "disk_bytes must be at least a block's file, [0-9]+ bytes, not 288"),
        ({"disk_bytes": float("nan")}, "disk_bytes must be a finite number, not nan"),
        ({"disk_bytes": "1GB"}, "disk_bytes must be a number, not '1GB'"),
        ({"disk_bytes": True}, "disk_bytes must be a number, not True"),
        ({"disk_bytes": 10**30}, "disk_bytes must be at most [0-9]+, not 1"),
        ({"disk_bytes": None}, "disk and disk_bytes go together, but disk_bytes, how much may lie there, is missing"),
        ({"disk": None}, "disk and disk_bytes go together, but disk, a folder, is missing"),
        ({"spill_bytes": 0}, "Blocks go to the disk through host memory, so spill_bytes must hold at least one, 288"),
        ({"model": 7}, "model must be a name or a fingerprint, a str, not 7"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            jaxkv.PrefixCache(config, **options(tmp_path / "new", config, **fields))
    assert jaxkv.PrefixCache(config, **options(tmp_path / "new", config, disk_bytes=np.float32(1e5)))


def follow(held, prefix):
    """What a router thinks is held, after what it is told now."""
    for event in prefix.events():
        place = (event.hash, event.group, event.tier)
        assert (place in held) != event.stored, "nothing is stored twice, or removed that was not told"
        if event.stored:
            held[place] = event
            assert len(event.tokens) == BLOCK and event.start % BLOCK == 0
        else:
            del held[place]
    assert prefix.events() == []
    return held


def held_by(prefix):
    """What an index holds, read out of it."""
    index = prefix._index
    found = {(n.digest.hex(), g, "device") for n in index.nodes.values() for g, block in enumerate(n.blocks) if block}
    found |= {(n.digest.hex(), g, "host") for n in index.nodes.values() for g, x in enumerate(n.host) if x is not None}
    names = [path.name.split(".") for path in files_of(index.disk.folder)]
    return found | {(digest, int(group), "disk") for digest, group in names}


def test_whoever_follows_the_events_knows_what_is_held(tmp_path):
    config, draw, model = make_config(window=6, num_blocks=24), random.Random(2), {}
    prompts = [(tokens, salt) for tokens in (A, B, [*A[:8], *B[:10]]) for salt in (None, "x", b"x")]
    size = 600  # of a file, roughly
    cache, prefix = start(config=config, **options(tmp_path, config, on_host=4, disk_bytes=12 * size))
    seen = set()
    for turn in range(200 if NIGHTLY else 40):
        tokens, salt = draw.choice(prompts)
        match draw.randrange(5):
            case 0 | 1:
                cache = prefix.make_room(cache, 10)
                cache, _ = compute(cache, 0, tokens)
                cache = jaxkv.free(prefix.insert(cache, 0, tokens, salt=salt), 0)
            case 2:
                cache = prefix.adopt(cache, 1, prefix.match([*tokens, 1], salt=salt))
                assert_holds(cache, 1, tokens[: int(cache.lengths[1])], window=6)
                cache = jaxkv.free(cache, 1)
            case 3:
                cache = prefix.make_room(cache, draw.choice((24, 12, [24, 0])))
            case 4 if turn % 7 == 0:
                cache = prefix.reset(cache)
        if turn % 3:
            continue
        follow(model, prefix)
        seen |= {place[2] for place in model}
        assert set(model) == held_by(prefix)
        for tokens, salt in prompts:
            for start_at, name in enumerate(prefix.hashes(tokens, salt=salt)):
                event = next((e for (h, *_), e in model.items() if h == name), None)
                at = start_at * BLOCK
                assert event is None or (event.salt, event.adapter, event.start) == (salt, None, at)
                assert event is None or list(event.tokens) == tokens[at : at + BLOCK]
                assert event is None or event.parent == (prefix.hashes(tokens[:at], salt=salt) or [None])[-1]
    assert seen == {"device", "host", "disk"}
    prefix.reset(cache)
    assert not follow(model, prefix)
