"""An engine that is saved at work goes on elsewhere: with the tokens that it would have given itself."""

import dataclasses
import functools
import json
import os
import random
import threading

import numpy as np
import pytest
from checksum_model import VOCAB, Checksum, continuation
from nightly import NIGHTLY
from test_prefill import ROOM, WINDOWS, on  # the same programs, to compile less

import jaxkv
from jaxkv._files import safetensors
from jaxkv._files.format import CHECKSUMS, open_saved

OTHER = ROOM | {"max_seqs": 2, "block_size": 5, "num_blocks": 16}


@functools.cache
def engine(**fields):
    return jaxkv.Engine(on(0), **(fields or ROOM))


def emptied(engine):
    for request in [*engine._core.open, *(s for r in engine._core.submitted for s in r.samples)]:
        request.cancel()
    for _ in engine.run():
        pass
    return engine


@pytest.fixture
def path(tmp_path):
    return tmp_path / "engine.safetensors"


def submit_some(engine, draw):
    for _ in range(5):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([1, 2, 9, 16]))]
        ways = [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 3, "logprobs": 2}] if NIGHTLY else [{}]
        options = {"eos": [draw.randrange(VOCAB)], "n": draw.choice([1, 1, 3])} | draw.choice(ways)
        several = engine.submit(prompt, draw.randint(3, 12), salt=draw.choice([None, "a", b"\xff"]), **options)
        yield from several.samples


def told(engine, tokens=None):
    """Each request's tokens as they are handed out, by its number."""
    tokens = {} if tokens is None else tokens
    for request, token in engine.run():
        tokens.setdefault(request.number, []).append(token)
    return tokens


@pytest.mark.parametrize("fields", [ROOM, OTHER] if NIGHTLY else [ROOM])
@pytest.mark.parametrize("seed", range(12 if NIGHTLY else 2))
def test_it_goes_on_with_the_same_tokens(seed, fields, path):
    draw, one, other, before = random.Random(seed), emptied(engine()), emptied(engine(**fields)), {}
    requests = list(submit_some(one, draw))
    for _ in range(draw.randint(1, 8)):
        for request, token in one.step():
            before.setdefault(request.number, []).append(token)
    draw.choice(requests).cancel()
    one.save(path)
    expected = told(one, {number: list(tokens) for number, tokens in before.items()})
    loaded = {r.number: r for r in other.load(path)}
    assert told(other, before) == expected
    assert loaded.keys() >= {r.number for r in requests if not r.done}
    for request in requests:
        if request.number in loaded:
            twin = loaded[request.number]
            assert (twin.tokens, twin.logprobs, twin.done) == (request.tokens, request.logprobs, True)
            assert dataclasses.replace(twin.params, stops=()) == dataclasses.replace(request.params, stops=())
    jaxkv.check_invariants(other.cache)
    assert other.cache.is_empty and other.cache.blocks_in_use == 0
    assert other.submit([1], 1).number > max(r.number for r in requests)
    emptied(other)


def test_tokens_that_were_not_handed_out_are_handed_out_later(path):
    one = emptied(engine())
    requests = [one.submit([3, 4], 3), one.submit([5], 12)]
    while not requests[0].done:
        one._core.advance()
    one.save(path)
    other, held = emptied(engine(**ROOM, seed=1)), jaxkv.describe(path).lengths
    computed = other.tokens
    first, second = other.load(path)
    assert first.done and first.tokens == requests[0].tokens
    tokens = told(other)
    assert tokens == {first.number: [*first.tokens, None], second.number: [*second.tokens, None]}
    assert second.tokens == continuation(WINDOWS, [5], 12, None)
    assert len(held) == 1 and other.tokens - computed == 12 - held[0] < 12  # what its row held is not computed again
    emptied(one)


def test_rows_of_which_a_window_leaves_the_first_tokens(path):
    windows, sizes = ((7, 4),), {"max_seqs": 2, "max_seq_len": 48, "block_size": 4, "num_blocks": 32}
    one, other = (jaxkv.Engine(Checksum(windows=windows), **sizes) for _ in range(2))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    one.submit(prompt, 16)
    for _ in range(5):
        one.step()
    one.save(path)
    (request,) = other.load(path)
    list(other.run())
    assert request.tokens == continuation(windows, prompt, 16, None)
    jaxkv.check_invariants(other.cache)
    assert other.cache.blocks_in_use == 0


def test_a_leader_is_cancelled_while_it_is_saved(path, monkeypatch):
    one, prompt = emptied(engine()), [3, 4] * 8
    several = one.submit(prompt, 3, n=3)
    one.step()  # the prompt takes more than one: the others wait for the first
    settle = one._core.settle

    def cancelled_meanwhile():
        settle()
        thread = threading.Thread(target=several.samples[0].cancel)
        thread.start()
        thread.join(0.5)  # it takes itself out of the engine's work when that has ended

    monkeypatch.setattr(one._core, "settle", cancelled_meanwhile)
    one.save(path)
    monkeypatch.undo()
    emptied(one)
    requests = [r for r in emptied_by_running(path) if r.number != several.samples[0].number]
    assert [r.tokens for r in requests] == [continuation(WINDOWS, prompt, 3, None)] * 2


def emptied_by_running(path):
    other = emptied(engine(**OTHER))
    requests = other.load(path)
    list(other.run())
    jaxkv.check_invariants(other.cache)
    assert other.cache.blocks_in_use == 0
    return requests


def test_how_tokens_are_chosen_is_kept(path):
    """By night it is seen in tokens, too."""
    one = emptied(engine())
    several = one.submit(np.array([3, 4]), 3, temperature=0.1, top_k=np.int32(5), top_p=0.3, eos=[7], salt=b"\xff", n=2,
                         logprobs=2)  # fmt: skip
    several.samples[0].output, several.samples[0].output_logprobs = [5], [{5: -0.1, 6: -np.inf}]
    one.save(path)
    emptied(one)
    loaded = one.load(path)
    for old, new in zip(several.samples, loaded, strict=True):
        for name in ("number", "prompt", "tokens", "logprobs", "limit"):
            assert getattr(new, name) == getattr(old, name)
        assert dataclasses.replace(new.params, stops=()) == dataclasses.replace(old.params, stops=())
        np.testing.assert_array_equal(new.column, old.column)
    emptied(one)


def test_a_crash_while_it_is_saved_leaves_the_one_before(path, monkeypatch):
    one = emptied(engine())
    one.submit([3, 4], 3)
    one.save(path)
    one.submit([5], 3)

    def crash(*_):
        raise OSError("no power")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(OSError, match="no power"):
            one.save(path)
    assert os.listdir(path.parent) == [path.name]
    emptied(one)
    (request,) = one.load(path)
    assert request.prompt == [3, 4] and len(told(one)[request.number]) == 3 + 1


def rewritten(path, change):
    """The file with another state of the engine in it, and checksums that say so."""
    import zlib

    _, tensors = open_saved(path)
    tensors = {name: np.array(x) for name, x in tensors.items()}
    fields = safetensors.read_all(path).metadata
    metadata = json.loads(fields["metadata"])
    fields["metadata"] = json.dumps(change(metadata))
    specs = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    specs[CHECKSUMS] = (np.dtype(np.uint32), (len(tensors) + 1,))
    header = safetensors.header(specs, fields)
    sums = [zlib.crc32(header), *(zlib.crc32(safetensors.as_bytes(x)) for x in tensors.values())]
    safetensors.write(path, tensors | {CHECKSUMS: np.array(sums, np.uint32)}, fields)


def test_what_cannot_go_on_is_refused_and_nothing_changes(path):
    one = emptied(engine())
    one.submit([3, 4] * 5, 12, n=2)
    for _ in range(3):
        one.step()
    one.save(path)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="load is for an engine without requests"):
        one.load(path)
    emptied(one)

    def refused(error, message, engine=one):
        with pytest.raises(error, match=message):
            engine.load(path)
        assert not engine._core.is_busy and not engine._reader.news

    short = engine(**ROOM | {"max_seq_len": 20})
    refused(jaxkv.CacheFileError, "it is to reach 22 tokens, and max_seq_len = 20", short)
    refused(jaxkv.CacheFileError, "but the cache has 1: raise num_blocks", engine(**ROOM | {"num_blocks": 1}))
    refused(jaxkv.CacheFileError, "with another model, whose keys", jaxkv.Engine(Checksum(WINDOWS), **ROOM))
    refused(
        jaxkv.CacheFileError, "layer 0 in float32, but the cache has int8", engine(**ROOM | {"cache_dtype": "int8"})
    )
    for at in (20, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:at])
        refused(jaxkv.DamagedFile, "truncated|damaged")
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused(jaxkv.DamagedFile, "damaged|cannot be read")

    def with_request(**fields):
        return lambda m: m["engine"]["requests"][0].update(fields) or m

    for change, message in [
        (lambda m: {}, "is a saved cache, but not of an engine"),
        (lambda m: m["engine"].update(version=2) or m, "they are in version 2"),
        (lambda m: {"engine": 5}, "cannot read"),
        (lambda m: {"engine": {"version": 1}}, "cannot read"),
        (with_request(prompt=[]), "has no prompt"),
        (with_request(prompt=["a"]), "a token must be an integer"),
        (with_request(tokens=[1] * 13), "more tokens than its limit"),
        (with_request(row=7), "cannot read"),
        (with_request(prompt=[1]), "a row holds 1. tokens of"),
        (lambda m: [r.update(number=9, leader=None) for r in m["engine"]["requests"]] and m, "two have one number"),
        (with_request(leader=99), "cannot read"),
        (with_request(salt=None), "cannot read"),
        (with_request(choice={}), "cannot read"),
        (with_request(given=50), "given must be at most"),
        (with_request(prompt=[2**31] * 10), "a token must be at most"),
    ]:
        path.write_bytes(whole)
        rewritten(path, change)
        refused(jaxkv.CacheFileError, message)
    with pytest.raises(FileNotFoundError):
        one.load(path.with_name("none"))
