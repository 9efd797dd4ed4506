"""Reads the arguments of `PrefixCache` methods."""

from typing import Any

import numpy as np


def read_tokens(tokens: Any) -> list[int]:
    """Returns a list of tokens. Raises ValueError."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not (np.issubdtype(tokens.dtype, np.integer) or not tokens.size):
        raise ValueError(f"tokens must be a list of integers, not {tokens.dtype}{list(tokens.shape)}.")
    return tokens.tolist()


def read_identity(salt: Any, adapter: Any) -> tuple[type, str | bytes | None, str | None]:
    """Returns the key of a salt and an adapter: different keys share nothing. Raises ValueError."""
    if not isinstance(salt, str | bytes | None):
        raise ValueError(f"salt must be a str, bytes or None, not {type(salt).__name__}.")
    if not isinstance(adapter, str | None):
        raise ValueError(f"adapter must be a str or None, not {type(adapter).__name__}.")
    salt, adapter = _plain(salt), _plain(adapter)
    return type(salt), salt, adapter


def _plain(x: Any) -> Any:
    """Returns an instance of a subclass of str or bytes as the plain type."""
    return str.__str__(x) if isinstance(x, str) else memoryview(x).tobytes() if isinstance(x, bytes) else x
