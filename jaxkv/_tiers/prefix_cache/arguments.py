"""What a `PrefixCache` is asked about, read in one place."""

from typing import Any

import numpy as np


def read_tokens(tokens: Any) -> list[int]:
    """Raises ValueError."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not (np.issubdtype(tokens.dtype, np.integer) or not tokens.size):
        raise ValueError(f"tokens must be a list of integers, not {tokens.dtype}{list(tokens.shape)}.")
    return tokens.tolist()


def read_identity(salt: Any, adapter: Any) -> tuple[type, str | bytes | None, str | None]:
    """Whose tokens they are: no two that are different have anything in common. Raises ValueError."""
    if not isinstance(salt, str | bytes | None):
        raise ValueError(f"salt must be a str, bytes or None, not {type(salt).__name__}.")
    if not isinstance(adapter, str | None):
        raise ValueError(f"adapter must be a str or None, not {type(adapter).__name__}.")
    salt, adapter = _plain(salt), _plain(adapter)
    return type(salt), salt, adapter


def _plain(x: Any) -> Any:
    """What may be of a class of its own, with a `repr` that hides it, as Python's."""
    return str.__str__(x) if isinstance(x, str) else memoryview(x).tobytes() if isinstance(x, bytes) else x
