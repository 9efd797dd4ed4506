"""An engine whose rows are divided over devices: each goes on as if it were alone, and requests go where room is."""

import dataclasses
import functools
import random
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import LONGEST, Checksum, Placed, finish
from cutting import cut_anywhere
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nightly import NIGHTLY
from test_prefill import some

import jaxkv
from jaxkv._core.state.device_arrays import count_model_shards, split_model
from jaxkv._engine.frontend.data_parallel import split_fields
from jaxkv._engine.frontend.generate import _room as room

# Two rows on each of two devices, and blocks for one long sequence and a half.
ROOM = {"max_seqs": 4, "max_seq_len": LONGEST, "block_size": 8, "num_blocks": 18, "step_tokens": 7, "swap": "always"}
KNOWN = {"prefix_cache": True, "spill_bytes": 10**4, "disk_bytes": 10**5}
OPTIONS = frozenset(KNOWN.items())
WINDOWS = (None, 7)[: 1 + NIGHTLY]  # by day one layer, which is half of what there is to compile
MODEL = Checksum(WINDOWS)


def over(*devices, **axes):
    """The model on devices of a mesh with an axis "data", two of them."""
    axes = {"data": 2} | axes
    place = Mesh(np.array([jax.devices()[n] for n in devices]).reshape(*axes.values()), tuple(axes))
    return Placed(jax.device_put(jnp.zeros(()), NamedSharding(place, PartitionSpec())), MODEL)


@functools.cache
def engine(fields=OPTIONS):
    """One by day, for each device has its programs to compile."""
    fields = dict(fields)
    folder = {"disk": tempfile.mkdtemp()} if fields else {}
    return jaxkv.Engine(over(0, 1), **ROOM | fields | folder)


def check_empty(engine):
    for core, shard in zip(engine._cores, engine.cache.shards, strict=True):
        jaxkv.check_invariants(shard)
        assert not np.asarray(shard.lengths).any() and not np.asarray(shard.failed).any()
        assert sorted(core.cache_manager._free_rows) == [0, 1]
        if core.cache_manager.prefix is None:
            assert not shard.blocks_in_use


@pytest.mark.parametrize("fields", [KNOWN, {}] if NIGHTLY else [KNOWN])
def test_requests_come_and_go(fields):
    draw, one = random.Random(0), engine(frozenset(fields.items()))
    for _ in range(12 if NIGHTLY else 3):
        requests = []
        for prompt, count in some(draw, 9):
            requests.append((one.submit(prompt, count), prompt, count))
            if draw.random() < 0.5:
                one.step()
            if draw.random() < 0.3:
                draw.choice(requests)[0].cancel()
        several = one.submit(prompt := some(draw, 1)[0][0], 5, n=4)
        requests += [(sample, prompt, 5) for sample in several.samples]
        finish(one, requests, WINDOWS)
        check_empty(one)
    stats = one.stats()
    assert stats["steps"] == sum(core.runner.steps for core in one._cores) == one.steps
    assert all(core.runner.steps > 0.3 * one.steps for core in one._cores)  # both have been at work
    assert one.config.max_seqs == 4 and one.config.group_blocks[0] == 18 and one.blocks_peak <= 36
    for i, core in enumerate(one._cores):  # each on its own device, with nothing to say to the other
        assert {d.id for x in jax.tree.leaves(core.cache_manager.cache) for d in x.devices()} == {i}


@pytest.mark.parametrize("event", ["line", *["opcode"] * NIGHTLY])
def test_cut_off_anywhere_it_goes_on(event):
    def work(requests):
        for prompt in ([1, 2], [3, 4, 5], [6] * 9):
            requests.append((engine().submit(prompt, 3), prompt, 3))
        for _ in range(4):
            engine().step()

    def check(requests):
        finish(engine(), requests, WINDOWS)
        check_empty(engine())

    cut_anywhere(work, check, event, 300 if NIGHTLY else 8)


def placed(one):
    """Of how many open requests each device has."""
    return [len(core.open) for core in one._cores]


def test_requests_go_where_most_room_is():
    one = engine()
    one.reset()
    requests = [one.submit([3] * 20, 4), one.submit([4], 2), one.submit([5], 2)]
    one.step()
    assert placed(one) == [1, 2]  # the long one takes more blocks than both of the others
    one._core.submitted.extend(requests)  # as a call leaves them that is cut off at the wrong moment
    one.step()
    assert placed(one) == [1, 2] and not one._core.submitted
    waiting = [one.submit([6] * 20, 14) for _ in range(4)]
    one.step()
    # Who would have to wait is placed where a row becomes free first.
    assert len(one._core.submitted) > 0 and max(placed(one)) <= 2
    waiting[-1].cancel()
    finish(one, [(r, r.prompt, r.limit) for r in [*requests, *waiting]], WINDOWS)
    assert waiting[-1].tokens == [] and not one._core.submitted
    check_empty(one)


def test_requests_go_where_their_prompt_is_known():
    one = engine()
    assert [shard.spill_bytes for shard in one.prefix.shards] == [5000, 5000]
    one.reset()
    before = one.stats()
    prompts = [[i] * 17 for i in range(2)]
    for prompt in prompts:  # at once, so each on a device of its own
        one.submit(prompt, 2)
    for _ in one.run():
        pass
    known = [[core.cache_manager.prefix.known(prompt) for core in one._cores] for prompt in prompts]
    assert known == [[16, 0], [0, 16]]
    computed = one.tokens
    several = [one.submit(prompts[1], 3), one.submit([*prompts[1], 7], 3)]
    finish(one, [(r, r.prompt, 3) for r in several], WINDOWS)
    stats = {name: one.stats()[name] - before[name] for name in ("tokens_saved", "hits", "tokens_asked")}
    assert stats == {"tokens_saved": 32, "hits": 2, "tokens_asked": 17 * 3 + 18}
    assert 0 < one.stats()["hit_rate"] == one.stats()["tokens_saved"] / one.stats()["tokens_asked"]
    assert one.tokens - computed == 2 * 3 + 1  # of each prompt what no block has, and two more tokens
    # What is written is known to the next process, on whatever device; and to the other one here.
    one.prefix.flush(one.cache)
    assert [shard.match([*prompts[1], 7]).num_tokens for shard in one.prefix.shards] == [16, 16]
    check_empty(one)
    assert one.prefix.stats()["disk_bytes"] == max(shard.stats()["disk_bytes"] for shard in one.prefix.shards) > 0
    one.reset()
    assert one.prefix.stats()["blocks"] == [0] * len(WINDOWS)


def test_it_goes_on_on_another_number_of_devices(tmp_path):
    draw, path = random.Random(1), tmp_path / "engine"
    sizes = ROOM | {"max_seqs": 2, "num_blocks": 9}
    alone = jaxkv.Engine(Placed(jax.device_put(jnp.zeros(()), jax.devices()[0]), MODEL), **sizes, prefix_cache=True)
    for one, other in ((engine(), alone), (alone, engine())):
        wanted = {}
        for prompt, count in some(draw, 5):
            wanted[one.submit(prompt, count).number] = (prompt, count)
        several = one.submit([9] * 9, 4, n=3)
        wanted |= {sample.number: (several.prompt, 4) for sample in several.samples}
        for _ in range(6):
            one.step()
        one.save(path)
        held = jaxkv.describe(path).lengths
        loaded = other.load(path)
        assert len(other._cores) == 1 or all(placed(other)) or len(loaded) < 2  # on each device
        assert [r.number for r in loaded] == sorted(r.number for r in loaded)
        finish(other, [(r, *wanted[r.number]) for r in loaded], WINDOWS)
        assert sum(held) > 0
        for _ in one.run():
            pass
    check_empty(engine())


def test_one_that_is_stuck_does_not_stop_the_other(monkeypatch):
    one = engine()
    one.reset()
    requests = [(one.submit(prompt, 3), prompt, 3) for prompt in ([1] * 9, [2])]

    def stuck(due):
        raise jaxkv.OutOfBlocks("no room")

    with monkeypatch.context() as patch:
        patch.setattr(one._cores[0], "end", stuck)
        for _ in range(5):
            with pytest.raises(jaxkv.OutOfBlocks, match="no room"):
                one.step()
    assert [request.done for request, *_ in requests] == [False, True]
    finish(one, requests, WINDOWS)
    check_empty(one)


def pin_on(one, device, prompt):
    """Keep the blocks of a prompt on one device."""
    request = one.submit(prompt, 1)
    one._core.submitted.remove(request)
    one._cores[device].receive(request)
    list(one.run())
    assert one.prefix.shards[device].pin(prompt) == len(prompt) - 1


def test_one_that_cannot_begin_on_one_device_waits_for_the_other():
    """Four of nine blocks are pinned on each, then on one of them."""
    one = engine()
    one.reset()
    pinned = [[1] * 33, [2] * 33]
    pin_on(one, 1, pinned[1])
    busy = [(one.submit([3] * 30, 17), [3] * 30, 17)]
    one.step()
    assert placed(one) == [1, 0]
    big = one.submit([5] * 41, 7)
    smalls = [(one.submit([i] * 5, 3), [i] * 5, 3) for i in (6, 7)]
    for _ in range(8):
        one.step()
    assert not big.done and all(request.done for request, *_ in smalls)
    finish(one, [*busy, *smalls, (big, big.prompt, 7)], WINDOWS)
    assert big.ended == "length"
    pin_on(one, 0, pinned[0])
    big, small = one.submit([5] * 41, 7), one.submit([8] * 5, 3)
    with pytest.raises(jaxkv.OutOfBlocks, match="no room for prompt") as caught:
        for _ in range(20):
            one.step()
    assert caught.value.request is big and big.ended == "error"
    finish(one, [(small, small.prompt, 3)], WINDOWS)
    one.reset()


def test_what_begins_alike_at_once_goes_to_one_device():
    one = engine()
    one.reset()
    computed = one.tokens
    requests = [(one.submit([*range(20, 37), i], 2), [*range(20, 37), i], 2) for i in range(2)]
    finish(one, requests, WINDOWS)
    assert one.tokens - computed == 16 + 2 * (2 + 1)
    check_empty(one)


def test_each_device_has_its_share():
    fields = {
        "num_blocks": np.int64(18),
        "memory_bytes": 10.0,
        "group_blocks": (4, 8),
        "max_tokens": None,
        "dtype": "x",
    }
    share = {"num_blocks": 9, "memory_bytes": 5.0, "group_blocks": (2, 4), "max_tokens": None, "dtype": "x"}
    assert split_fields(2, 4, fields) == (2, share) and fields["num_blocks"] == 18
    with pytest.raises(ValueError, match=r"group_blocks=5 cannot be divided among the 2 devices"):
        split_fields(2, 4, {"group_blocks": (4, 5)})


def test_generate_has_rows_on_each_device():
    assert count_model_shards(over(0, 1)) == len(split_model(over(0, 1))) == 2 and count_model_shards(MODEL) == 1
    assert jaxkv.generate(over(0, 1), []) == []  # a row would do, and each device has one


def test_generate_has_room_for_the_longest_rows_on_each_device():
    assert room([100, 40, 1], n=1, rows=2, max_seq_len=128, devices=2) == {}  # 7 and 3 of 16 blocks, rounded up
    assert room([100, 1, 1], n=1, rows=2, max_seq_len=128, devices=2) == {"max_tokens": 2 * 8 * 16}
    assert room([100, 1, 1], n=2, rows=2, max_seq_len=128, devices=2) == {}


def test_bad_meshes():
    one = over(0, 1)
    for fields, why in [
        ({"max_seqs": 3}, r"max_seqs=3 cannot be divided among the 2 devices of the mesh axis 'data': make it a mult"),
        ({"num_blocks": 7}, r"num_blocks=7 cannot be divided among the 2 devices"),
        ({"num_blocks": None, "memory_bytes": "x"}, r"memory_bytes must be a number"),
        (
            {"prefill": Placed(jnp.zeros(()), MODEL)},
            r"over 2 devices .*'data', but those of prefill= over 1: load",
        ),
    ]:
        with pytest.raises(ValueError, match=why):
            jaxkv.Engine(one, **ROOM | fields)
    with pytest.raises(ValueError, match=r"its 48 tokens take 6 blocks, but the cache has 5: raise num_blocks"):
        jaxkv.Engine(one, **ROOM | {"num_blocks": 10}).submit([1] * 40, 40)
    place = NamedSharding(one.weights.sharding.mesh, PartitionSpec("data"))
    divided = dataclasses.replace(one, weights=jax.device_put(jnp.zeros(2), place))
    with pytest.raises(ValueError, match=r"over the mesh axis 'data', but so is a parameter .* must be whole on each"):
        jaxkv.Engine(divided, **ROOM)
    with pytest.raises(ValueError, match=r"record looks at one cache"), jaxkv.testing.record(engine()):
        pass
