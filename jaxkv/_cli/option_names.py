"""Parsers that know by which names Python has their options, so that errors name what was typed."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any


class OptionParser(argparse.ArgumentParser):
    """A parser whose namespace has `options`: the option of each name that it has in Python.

    `add_argument` takes `names`, those of an option beside its own: "CacheConfig.dtype" stands before "dtype".
    """

    def __init__(self, **fields: Any):
        self.options: dict[str, str] = {}
        super().__init__(**fields)
        self.set_defaults(options=self.options)

    def add_argument(self, *flags: str, names: Sequence[str] = (), **fields: Any) -> argparse.Action:
        action = super().add_argument(*flags, **fields)
        if action.option_strings:
            self.options |= dict.fromkeys((action.dest, *names), action.option_strings[-1])
        return action


def name_options(sentence: str, options: Mapping[str, str]) -> str:
    """Returns an error's sentence with options for the names that they have in Python.

    A name is one where it can be nothing else: behind a class and a dot, with an underscore in it, before "=", or as
    what the sentence begins with. What stands in quotes or in a path is none.

    >>> options = {"top_k": "--top-k", "dtype": "--dtype", "keep": "--keep"}
    >>> name_options("top_k must be at least 0, not -1: of this dtype.", options)
    '--top-k must be at least 0, not -1: of this dtype.'
    >>> name_options('Eviction.keep, a share, does not go with dtype= and "top_k".', options)
    '--keep, a share, does not go with --dtype and "top_k".'
    """
    names = "|".join(re.escape(name) for name in sorted(options, key=len, reverse=True))
    before, after, bare = r"""(?<![\w"'./\\-])""", r"""(?![\w"'/\\-]|\.\w)""", r"(?P<bare>=(?=[\s.,:;]))?"

    def name_option(found: re.Match[str]) -> str:
        name, behind = found["name"], sentence[found.end() :]
        is_first = found.start() == 0 and behind.startswith(" must ")
        is_name = found["owner"] or found["bare"] or "_" in name or behind.startswith("=") or is_first
        return options.get(f"{found['owner']}{name}", options[name]) if is_name else found[0]

    return re.sub(rf"{before}(?P<owner>[A-Z]\w*\.)?(?P<name>{names}){after}{bare}", name_option, sentence)
