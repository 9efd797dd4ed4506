"""Engines of two processes that are given other weights: by all of them, or it is said who has not."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import pytest
from checksum_model import Checksum, Placed

import jaxkv

WINDOWS = (None,)
SIZES = {"max_seqs": 4, "max_seq_len": 48, "block_size": 8, "num_blocks": 12, "step_tokens": 16}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shifted(Placed):
    """Says the token of a `Checksum` plus its parameter."""

    def __call__(self, tokens, *, cache, logits_at):
        logits, cache = self.model(tokens, cache=cache, logits_at=logits_at)
        return jnp.roll(logits, self.weights.astype(jnp.int32), axis=-1), cache


def shift(by):
    return Shifted(jnp.array(by, jnp.float32), Checksum(WINDOWS))


def test_all_processes_go_on_with_other_weights(store, make_as_process, follower):
    """The first lends its memory to a trainer, the others leave `follow` for it; all give what they have trained."""
    first, other = (make_as_process(n, lambda: jaxkv.Engine(shift(0), **SIZES, prefix_cache=True)) for n in range(2))
    store.processes = []
    alone, ends = jaxkv.Engine(shift(0), **SIZES), []

    def train():
        while other.follow(until_release=True):
            ends.append("released")
            other.update(shift(len(ends)))

    follower(train)
    request = first.submit([4] * 9, 12)
    while len(request.tokens) < 3:
        first.step()
    with pytest.raises(RuntimeError, match="1 requests are running"):
        first.update(shift(1))
    for by in (1, 2):
        first.release(parameters=by == 1)
        first.update(shift(by), restart=True)
        alone.update(shift(by))
        first.restore()
        assert request.result() == alone.submit([4] * 9, 12).result()
        request = first.submit([4] * 9, 12)
        first.step()
    first.close()
    while not other.is_closed:
        time.sleep(0.01)
    assert ends == ["released", "released"] and other.tokens == first.tokens


def test_an_update_that_fails_in_all_processes_ends_in_all(store, make_as_process, follower):
    """Else the others would give their older weights at the first one's next update."""
    first, other = (make_as_process(n, lambda: jaxkv.Engine(shift(0), **SIZES)) for n in range(2))

    def fail():
        raise KeyError("in an update")

    def train():
        assert other.follow(until_release=True)
        with pytest.raises(KeyError, match="in an update"):
            other._core.update(fail)
        other.update(shift(1))
        assert other._cores[0].runner.leaves[0] == 1
        assert not other.follow()

    follower(train)
    first.release()
    with pytest.raises(KeyError, match="in an update"):
        first._core.update(fail)
    first.update(shift(1))
    first.close()


def test_an_update_that_only_the_others_call(store, make_as_process):
    first, other = (make_as_process(n, lambda: jaxkv.Engine(Checksum(WINDOWS), **SIZES)) for n in range(2))
    first.release()
    assert other.follow(until_release=True)
    with pytest.raises(ValueError, match="make another Engine for another model"):
        other.update(Checksum((None, 7)))
    first.restore()
    first.close()
    with pytest.raises(RuntimeError, match="update is a call of all processes, but process 0 has closed the engine"):
        other.update(Checksum(WINDOWS))
    assert not other.follow() and other.is_closed
