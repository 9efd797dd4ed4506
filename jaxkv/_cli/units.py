"""Numbers of bytes and of tokens as people write them, and text in columns."""

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


def parse_count(text: str) -> int:
    """Parses a number of tokens or of sequences, for argparse: `8k` is 8,000 and `8K` is 8,192, as vLLM reads them.

    >>> parse_count("8k"), parse_count("8K"), parse_count("1.5M"), parse_count("10")
    (8000, 8192, 1572864, 10)
    """
    found = re.fullmatch(r"(-?\d+|\d*\.?\d+) *([KMGT]?)", text.strip(), re.IGNORECASE)
    count = float(found[1]) * (1000 if found[2].islower() else 1024) ** PREFIXES[found[2].upper()] if found else 0.5
    if found is not None and not found[2] and "." not in found[1]:
        return int(found[1])
    if count % 1:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is not a whole number: write it out, or with a unit such as 8k (8,000) or 8K (8,192)"
        )
    return int(count)


def parse_share(text: str) -> float:
    """Parses a number of tokens, or a share of them, for argparse.

    >>> parse_share("100"), parse_share("0.25")
    (100, 0.25)
    """
    try:
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is neither a share, such as 0.5, nor a number of tokens, such as 100"
        ) from None


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
