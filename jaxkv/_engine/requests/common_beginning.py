"""Finds common prefixes of sequences without comparing their tokens in every step.

Each full block of a sequence has a number for all tokens up to its end, computed once. A collision of two numbers makes
the host think that blocks are shared that are not, which costs a step or so, and never a token: what a row is given is
compared token by token in the prefix cache.
"""

import bisect

from jaxkv._engine.requests.scheduler import Sequence


def count_common_blocks(a: Sequence, b: Sequence, block_size: int) -> int:
    """Returns the number of leading blocks with equal tokens, which two sequences may share."""
    if a.salt != b.salt or a.adapter != b.adapter:
        return 0
    hashes, others = block_hashes(a, block_size), block_hashes(b, block_size)
    return bisect.bisect(range(min(len(hashes), len(others))), False, key=lambda i: hashes[i] != others[i])


def block_hashes(sequence: Sequence, block_size: int) -> list[int]:
    """Returns, for each full block, the hash of all tokens up to its end: always the same, growing list."""
    hashes, tokens = sequence.block_hashes, sequence.tokens
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        hashes.append(hash((hashes[-1] if hashes else 0, tuple(tokens[start : start + block_size]))))
    return hashes
