"""Parses human-readable sizes."""

import argparse
import re

PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str) -> int:
    """Parses bytes, for argparse: `80GB` is 80e9, `80GiB` is 80 * 2**30; a letter alone, `80G`, is binary too.

    >>> parse_bytes("80GB"), parse_bytes("1.5 KiB"), parse_bytes("2M"), parse_bytes("10")
    (80000000000, 1536, 2097152, 10)
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) *([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found or ((found[3] or "").lower() == "ib" and not found[2]):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is not a size: write a number and a unit, such as 512MiB, 80GB (80e9 bytes) or 80GiB"
        )
    decimal = (found[3] or "").lower() == "b"
    size = float(found[1]) * (1000 if decimal else 1024) ** PREFIXES[found[2].upper()]
    if size >= 2**63:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is more memory than there can be")
    return int(size)
