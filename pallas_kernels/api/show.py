"""How errors show what they were given."""

import re
from typing import Any


def show(value: Any) -> str:
    """Returns `repr` on one line, cut to fit into a sentence. Values that `repr` refuses, such as integers of thousands
    of digits, are named by type."""
    try:
        text = re.sub(r"\s*\n\s*", " ", repr(value))
    except Exception as error:
        return f"something of type {type(value).__name__} that cannot be printed ({type(error).__name__})"
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
