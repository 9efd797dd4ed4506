"""What keeps state whole when a call is cut off: at any instruction arrays are there or their successors are."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import pytest
from cutting import Cut, CutAt

from jaxkv._core.state.interrupts import HandOver, Numbers, Soundness


@functools.partial(jax.jit, donate_argnums=0)
def successor(leaves, by):
    return [x + by for x in leaves]


def test_at_any_instruction_arrays_are_whole_or_the_results_are_here():
    successor([jnp.zeros(3)], 1)
    points = met = 0
    while not points or points == met:
        points += 1
        hand_over, given = HandOver(), [jnp.arange(3)]
        try:
            with CutAt(points, "opcode"):
                hand_over.call(successor, given, 1)
        except Cut:
            met += 1
        (found,) = hand_over.results or [given]
        assert (found[0] == jnp.arange(3) + len(hand_over.results)).all(), points
        assert given[0].is_deleted() == bool(hand_over.results), points
    assert met > 20


def test_results_stay_in_order():
    hand_over = HandOver()
    for i in range(3):
        assert hand_over.call(int, str(i)) == i
    assert list(hand_over.results) == [0, 1, 2]


def test_a_change_that_was_cut_off_is_remembered():
    soundness = Soundness()
    with soundness:
        assert not soundness.is_kept
    assert soundness.is_kept
    with pytest.raises(RuntimeError), soundness:
        raise RuntimeError
    assert not soundness.is_kept
    soundness.end()
    assert soundness.is_kept and not Soundness(is_kept=False).is_kept


def test_each_number_is_given_once_to_any_thread():
    numbers = Numbers(2**70)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: [numbers.take() for _ in range(500)], range(8)))
    assert sorted(n - 2**70 for several in taken for n in several) == list(range(4000))
    assert numbers.next == numbers.take() == 2**70 + 4000
