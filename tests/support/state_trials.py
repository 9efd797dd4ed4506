"""Small steps of layers that keep a state: what the GPU kernel's tests pass and each mutant must fail."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gpu, reference_mixers
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.common.state_batch import StateBatch, share_rows
from pallas_kernels.gpu.mixers import LEAST_CHUNKED
from pallas_kernels.gpu.recurrence.rows import NEXT, TURNS

SLOTS = 12
STORED = ("float32", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Trial:
    """A step: a mixer, its rows, and how its arrays are stored."""

    mixer: str  # "delta", "channels" or "space"
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    slots: tuple[int, ...]
    to_slots: tuple[int, ...] | None = None
    snapshots: tuple[tuple[int, ...], ...] | None = None
    every: int | None = None
    gap: int | None = None  # packed: places before each row's tokens
    heads: tuple[int, int] = (2, 1)  # of values, of keys
    sizes: tuple[int, int] = (8, 64)  # keys, values; of a state space 32, 16
    dtype: str = "float32"
    stored: str = "float32"
    skip: int = 1  # axes of D; 0: none
    close: float = 1e-5  # how near float32's results are: of chunks, whose operands are halves of 16 bits, less
    gates: tuple[float, ...] = ()  # that are drawn from, if not random
    same_keys: bool = False  # of all tokens, which forget nothing and learn twice what they lack

    @property
    def axes(self) -> tuple[int, ...]:
        if self.gap is not None:
            return (sum(self.new) + self.gap * (len(self.new) + 1),)
        return len(self.new), max(self.new)

    def batch(self) -> StateBatch:
        starts = None
        if self.gap is not None:
            starts = np.cumsum(self.new) - self.new + self.gap * (1 + np.arange(len(self.new)))
        rows = (self.slots, self.lengths, self.new, starts, self.to_slots, self.snapshots)
        return StateBatch(*(None if x is None else jnp.asarray(x, jnp.int32) for x in rows), self.every)

    def arrays(self, seed=0) -> dict[str, jax.Array]:
        """Random arrays; NaN in places of no token, and in slots that no row reads."""
        draw = np.random.default_rng(seed).standard_normal
        (heads, groups), (keys, values) = self.heads, self.sizes
        if self.mixer == "space":
            tokens = {"x": (heads, values), "dt": (heads,), "B": (groups, keys), "C": (groups, keys)}
            made = {name: draw((*self.axes, *shape)) for name, shape in tokens.items()}
            made["dt"] = np.log1p(np.exp(made["dt"]))
            fixed = {"A": -np.exp(draw((heads,))), "D": draw((heads, values)[: self.skip]) if self.skip else None}
            state = heads, values, keys
        else:
            gates = (heads, keys) if self.mixer == "channels" else (heads,)
            tokens = {"q": (groups, keys), "k": (groups, keys), "v": (heads, values), "g": gates, "beta": (heads,)}
            made = {name: draw((*self.axes, *shape)) for name, shape in tokens.items()}
            made["k"] /= np.linalg.norm(made["k"], axis=-1, keepdims=True)
            made["g"] = -np.exp(made["g"]) * np.where(made["g"] > 1, 60, 1)  # some forget everything
            if self.gates:
                made["g"] = np.random.default_rng(seed).choice(np.array(self.gates, float), made["g"].shape)
            made["beta"] = 2 / (1 + np.exp(-made["beta"]))
            if self.same_keys:
                made |= {"k": 0 * made["k"] + made["k"][:1, :1], "g": 0 * made["g"], "beta": 0 * made["beta"] + 2}
            fixed, state = {}, (heads, keys, values)
        held = draw((SLOTS, *state))
        rows = zip(self.slots, self.lengths, self.new, strict=True)
        read = {slot for slot, length, new in rows if 0 < new < length}
        held[[slot for slot in range(SLOTS) if slot not in read]] = np.nan
        for x in made.values():
            x[~self.valid()] = np.nan
        wide = {"g"} if self.mixer == "channels" else set()  # sums of gates are of numbers in halves
        made = {
            name: jnp.asarray(x, "float32" if name in wide else self.dtype)
            for name, x in (made | fixed).items()
            if x is not None
        }
        if self.mixer == "space" and not self.skip:
            made["D"] = None
        return made | {"states": jnp.asarray(held, self.stored)}

    def valid(self) -> np.ndarray:
        batch = self.batch()
        return np.asarray(locate(self.axes, batch.kv_lens, batch.query_lens, batch.query_starts).valid)

    def check(self, interpret, seed=0) -> None:
        """Raises AssertionError unless outputs and states are the reference's, and other slots untouched."""
        self.check_turns()
        self.check_turns(LEAST_CHUNKED)
        arrays, batch = self.arrays(seed), self.batch()
        name = "state_space" if self.mixer == "space" else "gated_delta_rule"
        arrays |= {} if self.mixer == "space" else {"scale": 0.3}
        y, states = jax.jit(lambda arrays: getattr(gpu.mixers, name)(**arrays, batch=batch, interpret=interpret))(
            arrays
        )
        wanted, expected = getattr(reference_mixers, name)(**arrays, batch=batch)
        valid, (error, loss) = self.valid(), (self.close if x == "float32" else 2e-2 for x in (self.dtype, self.stored))
        y, wanted, states, expected = (np.asarray(x, np.float32) for x in (y, wanted, states, expected))
        np.testing.assert_allclose(y, np.where(valid[..., None, None], wanted, 0), rtol=error, atol=error)
        np.testing.assert_allclose(states, expected, rtol=loss, atol=loss)  # NaN equals NaN
        assert not np.isnan(states[list(self.written())]).any()

    def check_turns(self, least: int | None = None) -> None:
        """Raises AssertionError unless every row with tokens has one turn, and rows of which one writes a slot that
        others read have them one after another in one thread block, readers first, or in a kernel after the readers'.
        The interpreter runs thread blocks one by one, and sees no race between them.

        Args:
          least: the tokens with which a row goes to a second kernel; None: there is one.
        """
        batch = self.batch().flatten(self.axes)
        batches = (batch,) if least is None else share_rows(batch, least, SLOTS)[:2]
        taken, block = [], {}
        for number, own in enumerate(batches):
            rows = np.asarray(gpu.mixers.plan_rows(own, SLOTS, int(np.prod(self.axes))))
            for first in range(len(rows)):
                row = first
                for _ in range(rows[first, TURNS]):
                    taken.append(row)
                    block[row], row = (number, first), rows[row, NEXT]
        assert sorted(taken) == [row for row, new in enumerate(self.new) if new]
        to, snapshots = self.to_slots or self.slots, self.snapshots or ((),) * len(self.new)
        for reader in (row for row in taken if self.lengths[row] > self.new[row]):
            for writer in set(taken) - {reader}:
                if self.slots[reader] in (to[writer], *snapshots[writer]):
                    (kernel, first), (later, other) = block[reader], block[writer]
                    assert kernel < later or (kernel, first) == (later, other)
                    assert taken.index(reader) < taken.index(writer)

    def written(self) -> set[int]:
        to = self.slots if self.to_slots is None else self.to_slots
        return {slot for slot, new in zip(to, self.new, strict=True) if new and 0 <= slot < SLOTS}


DECODE = dict(lengths=(9, 5, 1, 7), new=(1, 0, 1, 1), slots=(4, 2, 3, 7))
SPACE = dict(mixer="space", sizes=(32, 16))
CHUNKS = dict(mixer="space", sizes=(128, 64), dtype="bfloat16", close=5e-5)
DELTA_CHUNKS = CHUNKS | dict(mixer="delta")
CHANNEL_CHUNKS = DELTA_CHUNKS | dict(mixer="channels", sizes=(128, 64))
TRIALS = {
    # A row in the middle, one without a token, and one that begins in a slot of NaN.
    "delta": Trial("delta", **DECODE),
    "channels": Trial("channels", **DECODE, sizes=(16, 128)),
    "space": Trial(**DECODE, **SPACE),
    # Rows of 3, 0, 5 and 1 tokens; states on the way, of which some go nowhere.
    "tokens": Trial(
        "delta", (20, 4, 5, 7), (3, 0, 5, 1), (4, 2, 3, 7), gap=2, every=2,
        snapshots=((8, -1), (9, 9), (10, 11), (-1, -1)),
    ),
    "channels, tokens": Trial("channels", (20, 4, 5), (3, 0, 5), (4, 2, 3), heads=(2, 2)),
    "space, tokens": Trial(
        lengths=(20, 4), new=(3, 4), slots=(4, 3), every=4, snapshots=((9,), (8,)), gap=1, skip=2, **SPACE,
    ),
    # Three rows read slot 4, and one that begins writes it last; rows of another queue and of none beside them.
    "shared slots": Trial(
        "delta", (9, 5, 9, 4, 9, 1), (1,) * 6, (4, 6, 4, 6, 4, 2), (8, 3, 9, 6, -1, 4), heads=(1, 1),
    ),
    # Each reads what the next one writes.
    "chain": Trial("delta", (9, 5, 6, 4), (1,) * 4, (4, 6, 3, 2), (8, 4, 6, 3), heads=(1, 1)),
    "a snapshot in a slot that was read": Trial(
        "delta", (9, 8), (1, 1), (4, 6), (8, 6), every=4, snapshots=((-1,), (4,)), heads=(1, 1)
    ),
    "16 bits": Trial("delta", **DECODE, dtype="bfloat16", stored="bfloat16"),
    "space, 16 bits, no skip": Trial(**DECODE, dtype="float16", stored="bfloat16", skip=0, **SPACE),
    "odd sizes": Trial("delta", (9, 3), (2, 1), (1, 2), sizes=(24, 192), heads=(3, 1)),
    "wide space": Trial("space", (9, 3), (1, 2), (1, 2), sizes=(64, 48), heads=(2, 2), skip=2),
    "wild slots": Trial("delta", (9, 3, 4), (1, 1, 1), (1, 2, 5), (99, -7, 6), heads=(1, 1)),
    "chunks of one row": Trial(
        lengths=(100,), new=(60,), slots=(4,), **CHUNKS | dict(sizes=(64, 64), heads=(1, 1), skip=0)
    ),
    # 34 and 56 tokens of a row's chunks, one of a row of one token, 17 of one that begins, and a whole one.
    "chunks": Trial(
        lengths=(120, 4, 9, 17, 128), new=(90, 0, 1, 17, 64), slots=(4, 2, 3, 7, 5), gap=2, every=64, **CHUNKS,
        snapshots=((8, 9), (-1, -1), (10, -1), (-1, -1), (11, -1)),
    ),
    "chunks, padded, two parts": Trial(
        lengths=(20, 70), new=(20, 3), slots=(4, 3), **CHUNKS | dict(sizes=(64, 128), skip=2, heads=(2, 2)),
    ),
    "delta, chunks of one row": Trial(
        lengths=(100,), new=(60,), slots=(4,), **DELTA_CHUNKS | dict(sizes=(64, 64), heads=(1, 1)),
    ),
    "delta, chunks": Trial(
        lengths=(120, 4, 9, 17, 128), new=(90, 0, 1, 17, 64), slots=(4, 2, 3, 7, 5), gap=2, every=64, **DELTA_CHUNKS,
        snapshots=((8, 9), (-1, -1), (10, -1), (-1, -1), (11, -1)),
    ),
    "delta, chunks, padded, two parts": Trial(
        lengths=(20, 70), new=(20, 3), slots=(4, 3), **DELTA_CHUNKS | dict(sizes=(64, 128), heads=(2, 2)),
    ),
    "delta, chunks, the same keys": Trial(
        lengths=(60,), new=(60,), slots=(4,), **DELTA_CHUNKS | dict(heads=(1, 1), close=5e-3), same_keys=True,
    ),
    "channels, chunks of one row": Trial(lengths=(100,), new=(60,), slots=(4,), **CHANNEL_CHUNKS | dict(heads=(1, 1))),
    "channels, chunks": Trial(
        lengths=(120, 4, 9, 17, 128), new=(90, 0, 1, 17, 64), slots=(4, 2, 3, 7, 5), gap=2, every=64, **CHANNEL_CHUNKS,
        snapshots=((8, 9), (-1, -1), (10, -1), (-1, -1), (11, -1)),
    ),
    "channels, chunks, padded, two parts": Trial(
        lengths=(20, 70), new=(20, 15), slots=(4, 3), **CHANNEL_CHUNKS | dict(sizes=(128, 128), heads=(2, 2)),
    ),
    "channels, chunks, the same keys": Trial(
        lengths=(60,), new=(60,), slots=(4,), **CHANNEL_CHUNKS | dict(heads=(1, 1), close=2e-3), same_keys=True,
    ),
    # From none to what forgets everything: all pairs of them stand beside one another in some channel.
    "channels, chunks, any gates": Trial(
        lengths=(130,), new=(130,), slots=(4,), **CHANNEL_CHUNKS | dict(heads=(1, 1), stored="float32"),
        gates=(0, -1e-3, -0.1, -1, -5, -18, -100, -1e4, -np.inf),
    ),
    "channels, chunks, nothing forgotten": Trial(
        lengths=(80,), new=(16,), slots=(4,), **CHANNEL_CHUNKS | dict(heads=(1, 1)), gates=(0,),
    ),
    "channels, chunks, all forgotten": Trial(
        lengths=(130,), new=(65,), slots=(4,), **CHANNEL_CHUNKS | dict(heads=(1, 1)), gates=(-100,),
    ),
    "channels, chunks, shared slots": Trial(
        lengths=(80, 30, 40), new=(20, 18, 16), slots=(4, 4, 6), to_slots=(8, 4, -1),
        **CHANNEL_CHUNKS | dict(stored="bfloat16", heads=(1, 1)),
    ),
    "delta, chunks, shared slots": Trial(
        lengths=(80, 30, 40), new=(20, 18, 16), slots=(4, 4, 6), to_slots=(8, 4, -1),
        **DELTA_CHUNKS | dict(stored="bfloat16", heads=(1, 1)),
    ),
    # A chunk each, in one thread block: the third is where the first was.
    "chunks, shared slots": Trial(
        lengths=(40, 30, 40), new=(20, 18, 16), slots=(4, 4, 6), to_slots=(8, 4, -1),
        **CHUNKS | dict(skip=0, stored="bfloat16", heads=(1, 1)),
    ),
    # A kernel of few tokens beside that of chunks: a row that goes on with one, one of the most and one of the least.
    "few beside many": Trial(
        lengths=(5, 80, 4, 15), new=(1, 16, 0, 15), slots=(4, 2, 3, 7), gap=1, **DELTA_CHUNKS | dict(sizes=(64, 64)),
    ),
    # Row 1 of many tokens writes what 0 of few reads, which can stay where it is.
    "few beside many, shared slots": Trial(
        lengths=(5, 80, 4), new=(1, 17, 1), slots=(4, 4, 7), to_slots=(8, 4, 7),
        **CHUNKS | dict(sizes=(64, 64), heads=(1, 1), skip=0),
    ),
    # Row 2 of few tokens writes what 1 of many reads, and 3 what 2 does; 0 reads what 1 writes.
    "few beside many, a chain": Trial(
        lengths=(5, 80, 9, 3), new=(1, 16, 2, 1), slots=(5, 6, 3, 2), to_slots=(9, 5, 6, 3),
        **CHUNKS | dict(sizes=(64, 64), heads=(1, 1), skip=0),
    ),
    "few beside many, a snapshot in a slot that was read": Trial(
        lengths=(80, 64), new=(20, 1), slots=(4, 6), to_slots=(5, 6), every=64, snapshots=((-1,), (4,)), gap=0,
        **DELTA_CHUNKS | dict(sizes=(64, 64), heads=(1, 1)),
    ),
}  # fmt: skip
COUNTS = (0, 1, 15, 16, 17, 63, 64, 65, 200)
TRIALS |= {
    f"{mixer}, rows of {'all' if gap else 'many'} counts": Trial(
        lengths=tuple(n + i % 3 * 30 for i, n in enumerate(new)), new=new, slots=tuple(range(len(new))), gap=gap,
        every=64, snapshots=((9, 10), *[(-1, -1)] * (len(new) - 2), (-1, 11)), **CHUNKS | dict(mixer=mixer),
    )
    for mixer in ("delta", "space")
    for new, gap in ((COUNTS, 1), ((1, 65, 3, 16), None))
}  # fmt: skip


def draw_trial(seed: int, *, chunks: bool = False) -> Trial:
    """A random step: rows come, go, share slots in any way that the door allows. Of `chunks`, rows have many tokens."""
    draw = np.random.default_rng(seed)
    count, pick = int(draw.integers(1, 5)), draw.choice
    packed, most = bool(draw.integers(2)), int(pick((1, 1, 4)))
    new = tuple(int(n) for n in draw.integers(0, most + 1, count))
    if chunks:
        count = min(count, 3)
        new = (int(draw.integers(48, 131)), *(int(pick((0, 1, 15, 16, 17, 63, 64, 65))) for _ in range(count - 1)))
    if not any(new):
        new = (1, *new[1:])
    lengths = tuple(n + int(pick((0, 1, 6, 64) if chunks else (0, 1, 6))) if n else int(draw.integers(9)) for n in new)
    slots, to, free = [], [], list(draw.permutation(SLOTS))
    written: set[int] = set()
    for _ in range(count):  # a row may read and write what earlier rows have read, and not what they have written
        known = [slot for slot in slots if slot not in written]
        slots.append(int(pick(known)) if known and draw.random() < 0.5 else int(free.pop()))
        known = [slot for slot in slots if slot not in written]
        to.append(int(pick(known)) if known and draw.random() < 0.6 else int(free.pop()))
        written.add(to[-1])
    every = int(pick((64, 128) if chunks else (2, 3))) if draw.random() < 0.4 else None
    snapshots = None
    if every is not None:
        snapshots = tuple((int(free.pop()) if free and draw.random() < 0.7 else -1,) for _ in range(count))
    mixer, heads = pick(("delta", "channels", "space")), ((1, 1), (2, 1), (2, 2))[draw.integers(3)]
    sizes = ((32, 16), (64, 32), (32, 80)) if mixer == "space" else ((8, 64), (40, 64), (16, 128))
    sizes, dtypes = sizes[draw.integers(3)], (str(pick(("float32", "bfloat16"))), str(pick(STORED)))
    if chunks:
        mixer = ("space", "delta", "channels")[seed % 3]
        sizes, dtypes = (int(pick((64, 128))) if mixer != "channels" else 128, 64), ("bfloat16", dtypes[1])
    return Trial(
        str(mixer), lengths, new, tuple(slots), tuple(to), snapshots, every, int(draw.integers(2)) if packed else None,
        heads, sizes, *dtypes, int(draw.integers(3)), 5e-5 if chunks else 1e-5,
    )  # fmt: skip
