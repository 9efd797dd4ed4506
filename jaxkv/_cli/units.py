"""Numbers of bytes as people write them, and text in columns."""

import argparse
import re
from collections.abc import Collection, Sequence

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


def columns(lines: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Formats lines of cells, each column as wide as its widest cell; columns in `left` are left-aligned, others right.

    >>> print(columns([("block_size", "rows"), ("16", "1,024")]))
    block_size   rows
            16  1,024
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(x.ljust(w) if i in left else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )
