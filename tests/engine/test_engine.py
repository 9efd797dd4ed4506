"""The engine under random work, with a model that can be checked by hand: it says what its rows hold.

Each next token is a checksum of everything that the row stores, so one stale, missing or foreign token shows, at once
and without a tolerance. An engine serves many streams one after another, and some of them are left early.
"""

import random

import numpy as np
import pytest
from checksum_model import LONGEST, VOCAB, WINDOW, Checksum, assert_streams, continuation
from nightly import NIGHTLY

import jaxkv

TIGHT = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 3, "num_blocks": 18, "step_tokens": 7}
ENGINES = {
    "computed again": TIGHT | {"swap": "never"},
    "swapped": TIGHT | {"swap": "always"},
    "chosen by cost": TIGHT | {"max_seqs": 4, "step_tokens": 4},
    "contiguous": {"max_seqs": 3, "max_seq_len": LONGEST, "layout": "contiguous", "step_tokens": 4},
    "prefix cache": TIGHT | {"prefix_cache": True},
    "spilled": TIGHT | {"prefix_cache": True, "spill_bytes": 1000, "step_tokens": 3},
    "one row": TIGHT | {"max_seqs": 1, "prefix_cache": True, "step_tokens": 2},
    "block_size 1": TIGHT | {"block_size": 1, "num_blocks": 60, "prefix_cache": True, "step_tokens": 3},
}


MIXED, LOCAL, GLOBAL, FIRST = (None, WINDOW), (WINDOW, 2), (None,), ((WINDOW, 4), None)
CASES = [("swapped", MIXED), ("contiguous", MIXED), ("spilled", LOCAL)]
if NIGHTLY:
    CASES = [(name, MIXED) for name in ENGINES]
    CASES += [(name, windows) for name in ("spilled", "swapped") for windows in (LOCAL, GLOBAL, FIRST)]


@pytest.mark.parametrize(("name", "windows"), CASES)
def test_every_sequence_gets_what_it_would_alone(name, windows):
    draw = random.Random(f"{name} {windows}")
    engine = jaxkv.Engine(Checksum(windows), **ENGINES[name])
    known = [[draw.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    for _ in range(25):
        prompts = []
        for _ in range(draw.randint(1, 9)):
            begin = draw.choice(known)[: draw.randint(0, 36)]
            prompts.append(begin + [draw.randrange(VOCAB) for _ in range(draw.randint(not begin, 8))])
        # Rows of windows alone go on beyond max_seq_len; the model, and what is expected, do not.
        counts = [min(draw.randint(1, 14), LONGEST - len(prompt)) for prompt in prompts]
        eos, salt = draw.choice([None, draw.randrange(VOCAB)]), draw.choice([None, "tenant"])
        expected = [continuation(windows, *one, eos) for one in zip(prompts, counts, strict=True)]
        leave_after = draw.choice([None, None, draw.randint(1, 20)])
        assert_streams(engine, prompts, counts, expected, leave_after, eos=eos, salt=salt)
        if engine.prefix:
            engine.prefix.check_invariants(engine.cache)
        else:
            assert engine.cache.config.contiguous or engine.cache.blocks_in_use == 0
    stats = engine.stats()
    if engine.prefix:
        assert stats["hits"] > 0
    if name == "computed again":
        assert stats["set_back"] > 0
    if name == "swapped" and windows == MIXED:
        assert stats["swapped_out"] > 0
    np.testing.assert_array_equal(engine.cache.failed, False)
