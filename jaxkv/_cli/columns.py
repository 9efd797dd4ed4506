"""Formats text in columns."""

from collections.abc import Collection, Sequence


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
