"""Cases of states for the TPU kernels, and how they are interpreted and checked."""

import interpreter
import jax.numpy as jnp
import numpy as np
from interpreter import PLAIN
from state_kernels import Mixing, check, make_arrays, make_batch

from pallas_kernels.tpu import mixers

TWO_HEADS = 2 * 16 * 128 * 4  # bytes of an item: half of a row, so that there are twice as many
# Row 1 goes on from a snapshot's position, in the slot that it shares; row 3 from the middle of a chunk.
CHUNKS = Mixing(
    before=(0, 64, 3, 70), new=(70, 2, 0, 60), slots=(2, 5, 0, 1), to_slots=(2, 6, 0, 1),
    snapshots=(3, -1, -1, 8), packed=True, every=64,
)  # fmt: skip
CHANNEL_CHUNKS = CHUNKS._replace(by_channel=True)
IN_CHUNKS = {"delta": CHUNKS, "channels": CHANNEL_CHUNKS, "space": CHUNKS._replace(op="state_space")}
ONE_ROW = dict(before=(3,), new=(70,), slots=(5,), to_slots=(6,), snapshots=(-1,))
# Three heads of one key: the last one has no second beside it where triangles' blocks are inverted.
SHORT = CHUNKS._replace(dtypes=("bfloat16", "float32"), heads=3)
# A row begins behind one whose states leave.
EMPTIED = CHUNKS._replace(before=(64, 0, 3, 70), new=(2, 70, 0, 60), snapshots=(-1, 3, -1, 8))
# Of a row so long there is a step in which nothing is decided.
LONG = CHUNKS._replace(**ONE_ROW | {"new": (8 * 64 - 3,)}, heads=2)
OWN_KEYS = CHUNKS._replace(keys=4)  # two heads whose triangles lie side by side have not one key
# Rows of one token go by the kernel of these, beside the others.
MIXED = Mixing(
    before=(5, 0, 3, 63, 70), new=(1, 70, 0, 1, 2), slots=(2, 5, 0, 1, 4), to_slots=(2, 6, 0, 7, 4),
    snapshots=(-1, 3, -1, 8, -1), packed=True, every=64, heads=2,
)  # fmt: skip
# Row 1 reads what 2, of one token, writes, which reads what 3 does; and writes what 0, of one token, reads.
CHAIN = MIXED._replace(
    before=(4, 64, 7, 2), new=(1, 6, 1, 1), slots=(5, 6, 3, 2), to_slots=(9, 5, 6, 3), snapshots=(-1,) * 4
)


def run(case, mode, module=mixers, tolerance=None):
    """Runs a case in the interpreter, and checks it: of chunks all digits, or 16 bits where values are no longer."""
    tolerance, is_given = tolerance or 2e-5, tolerance is not None
    if case.packed and case.op == "gated_delta_rule" and not is_given:
        tolerance = 1e-4 if case.dtypes[0] == "bfloat16" else 4e-6
    check(interpreter.run(bind(case, module), make_arrays(case), mode=mode), case, tolerance=tolerance)


def bind(case, module=mixers):
    """Returns a function of a case's arrays."""
    batch = make_batch(case)

    def step(arrays, interpret):
        return getattr(module, case.op)(**arrays, **case.options, batch=batch, interpret=interpret)

    return step


def check_strong_gates(module=mixers, by_channel=False):
    """Half of all gates forget all, the others next to nothing: sums are large, and what lies between tokens small."""
    case = CHUNKS._replace(**ONE_ROW | {"new": (61,)}, heads=2, by_channel=by_channel)
    arrays = make_arrays(case)
    weak = np.random.default_rng(1).random(arrays["g"].shape) < 0.5
    arrays["g"] = jnp.where(weak & (arrays["g"] == arrays["g"]), arrays["g"] / 4096, 32 * arrays["g"])
    check(interpreter.run(bind(case, module), arrays, mode=PLAIN), case, arrays, tolerance=2e-5)
