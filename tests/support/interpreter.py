"""Runs a TPU kernel on the CPU: uninitialised memory is NaN, reads out of bounds raise, races are found."""

import functools

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import testing, xla

STRICT = {"uninitialized_memory": "nan", "out_of_bounds_reads": "raise"}
# Copies happen as late as possible (at the wait), and as early as possible: each finds what the other cannot.
PLAIN = pltpu.InterpretParams(**STRICT)
# By default all copies of a core share one entry of the vector clocks, so that to wait for any of them hides the races
# of the others: with as many entries as a kernel has copies under way, and more, each is seen.
RACES = pltpu.InterpretParams(**STRICT, detect_races=True, dma_execution_mode="eager", vector_clock_size=64)
MODES = {"plain": PLAIN, "races": RACES}

# One program, not one for each operation.
write_kv = jax.jit(functools.partial(testing.run, xla.write_kv), static_argnames=("kind", "rank"))


def run(function, *arrays, mode, **options):
    """`function` on the interpreter, compiled. Raises AssertionError where a race was found."""
    bound = function if isinstance(function, functools.partial) else functools.partial(function)
    if getattr(bound.func, "__name__", None) in testing.POSITIONAL:
        function = functools.partial(testing.run, bound.func, *bound.args, **bound.keywords)
    pltpu.reset_tpu_interpret_mode_state()
    try:
        # Most of the time goes into compiling the interpreter's program, which runs once: compile it carelessly.
        careless = {"xla_backend_optimization_level": 0}
        program = jax.jit(lambda *x: function(*x, interpret=mode, **options), compiler_options=careless)
        results = jax.block_until_ready(program(*arrays))
        races = interpret_pallas_call.races
        assert not (mode.detect_races and races.races_found), "there is a race"
        return results
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def bits(x):
    """An array's bits: NaN equals NaN."""
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def check_attention(tpu, case, mode, **options):
    """With the LSE in one mode and without it in the other, where the kernel sums the weights in another way."""
    inputs = testing.hide_unseen(case, testing.make_inputs(case))
    wanted = not mode.detect_races
    result = run(tpu.paged_attention, *inputs, mode=mode, **testing.make_options(case), return_lse=wanted, **options)
    _check(case, inputs, *(result if wanted else (result, None)))


def check_write_and_attention(tpu, case, mode, **options):
    inputs = testing.hide_unseen(case, testing.make_inputs(case))
    q, kv, *rest = inputs
    k, v = new_tokens(case, q)
    kv = poison_new(kv, case, inputs)
    (out, lse), written = run(
        tpu.write_and_attend, q, k, v, kv, *rest, mode=mode, **testing.make_options(case), return_lse=True, **options
    )
    expected = write_kv(kv, k, v, *rest)
    np.testing.assert_array_equal(bits(written), bits(expected))
    _check(case, inputs._replace(kv=expected), out, lse)


def new_tokens(case, q):
    """Keys and values of a step's tokens; no values of latent rows. NumPy's, for that compiles nothing."""
    shape = (2, *q.shape[:-2], case.num_kv_heads, case.head_dim)
    k, v = np.random.default_rng(1).standard_normal(shape).astype(q.dtype)
    return k, v if case.rank is None else None


def poison_new(kv, case, inputs):
    """The places that the step will write hold NaN: what attends before it writes is caught."""
    nan = np.full((2, *inputs.q.shape[:-2], case.num_kv_heads, case.head_dim), np.nan, kv.dtype)
    return write_kv(kv, nan[0], nan[1] if case.rank is None else None, *inputs[2:])


def _check(case, inputs, out, lse):
    expected_out, expected_lse = testing.expected(case, inputs, return_lse=True)
    testing.assert_close(out, expected_out)
    if lse is not None:
        testing.assert_close(lse, expected_lse, dtype=case.dtype)
