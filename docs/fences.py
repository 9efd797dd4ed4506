"""Puts fences around doctests, which the Google style of docstrings takes for text."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class FenceDoctests(griffe.Extension):
    """Of every docstring, before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
