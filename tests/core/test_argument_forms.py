"""Numbers as callers have them: lists, tuples, NumPy's, JAX's and traced ones mixed, eagerly and under `jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
import jaxkv.convert
import jaxkv.scores
from jaxkv._core.state.arguments import cast_int32, read_numbers

EVICTS = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, evict="layer")
PLAIN = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
SIZES = dict(max_seqs=3, max_seq_len=64, num_blocks=24, block_size=4, dtype="float32")


@functools.cache
def start(layer=PLAIN):
    kv = jax.random.normal(jax.random.key(0), (1, 3, 9, 2, 8))
    return jaxkv.append(jaxkv.init(jaxkv.CacheConfig(layers=(layer,), **SIZES)), kv, kv, jnp.array([9, 5, 3]))


@pytest.fixture(autouse=True)
def made_outside_of_programs():
    """What is cached must not be made of tracers."""
    return start(), start(EVICTS), start_step(), swapped()


@functools.cache
def swapped():
    cache, host = jaxkv.swap_out(start(), np.array([0]))
    return cache, host


KV, Q = jnp.ones((1, 3, 2, 2, 8)), jnp.ones((3, 2, 4, 8))
SCORES = np.arange(27, dtype=np.float32).reshape(3, 9)

# name: (function of the numbers, the numbers)
CALLS = {
    "extend": (lambda n: jaxkv.extend(start(), n), [1, 0, 2]),
    "reserve": (lambda n: jaxkv.reserve(start(), n), [20, 0, 9]),
    "truncate": (lambda n: jaxkv.truncate(start(), n), [4, 4, 3]),
    "reorder": (lambda n: jaxkv.reorder(start(), n), [1, 0, 2]),
    "free": (lambda n: jaxkv.free(start(), n), [1, 2]),
    "free a mask": (lambda n: jaxkv.free(start(), n), [True, False, True]),
    "fork src": (lambda n: jaxkv.fork(start(), n, [1]), [0]),
    "fork dst": (lambda n: jaxkv.fork(start(), 0, n), [1, 2]),
    "keep": (lambda n: jaxkv.keep(jaxkv.extend(start(), np.array([3, 3, 0])), n), [[0, 2], [1, -1], [-1, -1]]),
    "append": (lambda n: jaxkv.append(start(), KV, KV, n), [2, 1, 0]),
    "swap_in": (lambda n: jaxkv.swap_in(swapped()[0], n, swapped()[1]), [0]),
    "evict keep": (lambda n: jaxkv.evict(start(EVICTS), n, layer=0), [[True, False] * 4 + [True]] * 3),
    "evict budget": (lambda n: jaxkv.evict(start(EVICTS), scores=SCORES, budget=n, layer=0), [4, 5, 1]),
    "evict scores": (lambda n: jaxkv.evict(start(EVICTS), scores=n, budget=4, layer=0), SCORES.tolist()),
    "counts mask": (lambda n: jaxkv.counts(mask=n), [[0, 1], [1, 1]]),
    "counts ids": (lambda n: jaxkv.counts(segment_ids=n, max_seqs=3), [1, 1, 2, 0]),
    "counts positions": (lambda n: jaxkv.counts(positions=n), [[-1, 7], [0, 1]]),
    "left_align": (lambda n: jaxkv.left_align(np.arange(6).reshape(2, 3), n), [2, 3]),
    "right_align": (lambda n: jaxkv.right_align(n, [1, 2]), [[7, 0, 0], [5, 6, 0]]),
    "last": (lambda n: jaxkv.last(n, [1, 2]), [[7, 0, 0], [5, 6, 0]]),
    "last counts": (lambda n: jaxkv.last(np.arange(6).reshape(2, 3), n), [2, 0]),
    "attend num_tokens": (
        lambda n: jaxkv.attend(Q, start(), layer=0, causal=False, num_tokens=n, implementation="xla"), [2, 1, 0]
    ),
    "attend spans": (lambda n: jaxkv.attend(Q, start_step(), layer=0, spans=n), [[1, 1], [2, 3], [0, 0]]),
    "attend alibi": (lambda n: jaxkv.attend(Q, start_step(), layer=0, alibi=n), [0.5, 0.25, 0.125, 1.0]),
    "attend blocks": (lambda n: jaxkv.attend(Q, start_step(), layer=0, blocks=n), [[0, 2], [0, 1], [0, -1]]),
    "plan_step tree": (lambda n: jaxkv.plan_step(start_step(), (3, 2), tree=n).positions, [[-1, -1], [-1, 0], [-1, 0]]),
    "positions tree": (lambda n: jaxkv.positions(start_step(), (3, 2), tree=n), [[-1, -1], [-1, 0], [-1, 0]]),
    "scores.ada": (lambda n: jaxkv.scores.ada(np.stack([SCORES, SCORES], 1), n), [2, 3, 1]),
    "scores.snapkv": (lambda n: jaxkv.scores.snapkv(start(), layer=0, q=Q, num_tokens=n, window_size=2), [2, 1, 1]),
    "cache.read": (lambda n: start().read(0, n, 1), [0, 2]),
    "cache.slots": (lambda n: start().slots(1, n), [0, 2]),
    "gather": (lambda n: jaxkv.gather(start(), n, layer=0, max_len=9), 1),
    "cache.load": (lambda n: start().load(0, 0, n, 1), 1),
    "cache.token": (lambda n: start().token(1, n), 2),
    "uniform": (lambda n: jaxkv.scores.uniform(start(), n), 3),
}  # fmt: skip
STATIC = {"uniform"}  # it is looked up on the host


@functools.cache
def start_step():
    cache = jaxkv.extend(start(), np.array([2, 2, 2]))
    return jaxkv.write(cache, KV[0], KV[0], layer=0)


def map_numbers(function, numbers):
    return [map_numbers(function, x) for x in numbers] if isinstance(numbers, list) else function(numbers)


def as_tuples(numbers):
    return tuple(map(as_tuples, numbers)) if isinstance(numbers, list) else numbers


HOST_FORMS = {
    "list": lambda numbers: numbers,
    "tuple": as_tuples,
    "array": np.asarray,
    "numpy numbers": lambda numbers: map_numbers(lambda x: np.asarray(x)[()], numbers),
    "jax array": jnp.asarray,
    "jax numbers": lambda numbers: map_numbers(jnp.asarray, numbers),
}


def check_equal(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", CALLS)
def test_numbers_in_every_form(name):
    function, numbers = CALLS[name]
    expected = function(np.asarray(numbers) if isinstance(numbers, list) else numbers)
    for form, convert in HOST_FORMS.items():
        try:
            got = function(convert(numbers))
        except Exception as error:
            raise AssertionError(f"{name} of {form}") from error
        check_equal(got, expected)
    if name in STATIC:
        return

    def mixed(leaves):
        """Every other number is traced, the others are Python's or NumPy's."""
        number = iter(range(99))

        def pick(x):
            i = next(number)
            return leaves[i] if i % 2 == 0 else np.asarray(x)[()]

        return function(map_numbers(pick, numbers))

    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(expected)]
    for traced in (
        jax.eval_shape(function, numbers),  # a list of traced numbers
        jax.eval_shape(lambda x: function(x), jnp.asarray(numbers)),
        jax.eval_shape(mixed, jax.tree.leaves(numbers)),
    ):
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(traced)] == shapes


def test_traced_numbers_beside_others_keep_their_values():
    @jax.jit
    def read(n, flag, x):
        return [
            read_numbers("a", [n, 1, np.int64(2**40), np.uint8(7), jnp.int8(-3)]),
            read_numbers("b", [[n, 1], (np.int32(2), n + 1)]),
            read_numbers("c", [flag, True, np.bool(False)]),
            read_numbers("d", [x, 1, np.float64(0.5), jnp.bfloat16(2)]),
            read_numbers("e", [np.array([1, 2]), [n, n]]),
        ]

    a, b, c, d, e = read(5, False, 0.25)
    assert a.tolist() == [5, 1, 2**31 - 1, 7, -3] and a.dtype == jnp.int32
    assert b.tolist() == [[5, 1], [2, 6]] and e.tolist() == [[1, 2], [5, 5]]
    assert c.tolist() == [False, True, False] and c.dtype == bool
    assert d.tolist() == [0.25, 1, 0.5, 2] and d.dtype == jnp.float32
    lengths = jax.jit(lambda n: jaxkv.extend(start(), [n + 1, 1, np.int64(0)]).lengths)(2)
    assert lengths.tolist() == [12, 6, 3]


def test_numbers_beyond_int32_stay_large():
    for x in (np.uint32(2**32 - 1), np.int64(2**40), jnp.uint32(2**32 - 1)):
        assert cast_int32(x) == 2**31 - 1
    assert cast_int32(np.int64(-(2**40))) == -(2**31) + 1


def test_flax_variables_are_their_arrays():
    counts = nnx.Variable(jnp.array([1, 0, 2]))
    assert jaxkv.extend(start(), counts).lengths.tolist() == [10, 5, 5]
    assert jax.jit(lambda v: jaxkv.extend(start(), v).lengths)(counts).tolist() == [10, 5, 5]


def test_lists_that_are_no_arrays_are_named():
    with pytest.raises(ValueError, match="num_tokens must be an array, or lists of equal lengths"):
        jaxkv.extend(start(), [[1], [1, 2], 3])
    with pytest.raises(ValueError, match="path must be lists of equal lengths"):
        jax.jit(lambda n: jaxkv.keep(start(), [[n], [n, 1], [n]]))(0)
    with pytest.raises(ValueError, match="swap_out cannot be part of jit"):
        jax.jit(lambda n: jaxkv.swap_out(start(), [n])[0])(0)
    with pytest.raises(ValueError, match="rows must be known on the host"):
        jax.jit(lambda n: jaxkv.convert.to_hugging_face(start(), [n])[1])(0)
    with pytest.raises(ValueError, match="must be integers, not float32"):
        jax.jit(lambda n: jaxkv.extend(start(), [n, 0.5, 1]))(1)
