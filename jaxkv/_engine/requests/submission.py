"""Validation of what `Engine.submit` and its kin are given: each function returns a valid value, or what is wrong."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import MOST_INDEX, MOST_TOKENS, flag, integer, read_list, show
from jaxkv._engine.requests.block_accounting import Holdings
from jaxkv._engine.requests.request import STOPS, KeepPrefix, Stop


def read_prompts(prompts: Any) -> list[Any]:
    """Returns prompts as a list. Raises ValueError for what is none, a single prompt's tokens too."""
    found = read_list("prompts", prompts)
    if found and all(isinstance(prompt, int | np.integer) for prompt in found):
        raise ValueError(
            f"prompts must be a list of prompts, each a list of token ids, not one of {len(found)} tokens: write "
            "[prompt]."
        )
    return found


def read_prompt(prompt: Any) -> list[int] | str:
    """Returns the prompt's tokens, or why it has none."""
    if isinstance(prompt, str):
        return f"it must be a list of token ids, not {show(prompt)}: encode it first, say by jaxkv.text.Tokenizer"
    try:
        tokens = np.asarray(prompt)
    except (ValueError, OverflowError):  # of unequal lists, or numbers beyond any integer type
        return f"it must be a list of token ids, integers, not {show(prompt)}"
    if tokens.shape == (0,):
        return "it is empty: give at least one token, for example the model's beginning-of-sequence token"
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        return f"it must be a list of token ids, integers, not {show(prompt)}"
    return tokens.tolist()


def count_most_tokens(config: CacheConfig, *, keeps_tokens: bool) -> int:
    """Returns the most tokens of a sequence: in a cache whose rows are endless they may outgrow `max_seq_len`, unless
    something beside the cache keeps all of them."""
    return MOST_TOKENS if config.is_endless and not keeps_tokens else config.max_seq_len


def find_problem(
    prompt: Any, max_new_tokens: Any, most_tokens: int, vocab_size: int | None, holdings: Holdings
) -> str | None:
    """Returns why a prompt cannot be continued in a cache with rows of at most `most_tokens`, or None."""
    tokens = read_prompt(prompt)
    if isinstance(tokens, str):
        return tokens
    if len(tokens) >= most_tokens:
        return f"it has {len(tokens)} tokens, and max_seq_len = {most_tokens} must hold one more: raise max_seq_len"
    length = min(len(tokens) + integer("max_new_tokens", max_new_tokens, least=1), most_tokens)
    for group, blocks in zip(holdings.groups, holdings.most(len(tokens), 0, length), strict=True):
        if blocks > (num_blocks := holdings.config.group_blocks[group]):
            return (
                f"its {length} tokens take {blocks} blocks, but the cache has {num_blocks}: raise "
                f"{holdings.config.size_argument}, or lower max_new_tokens"
            )
    return find_foreign(tokens, vocab_size)


def find_foreign(tokens: list[int], vocab_size: int | None) -> str | None:
    """Returns what is wrong with tokens that are not of the model's vocabulary, or None."""
    end = vocab_size or MOST_INDEX
    is_known = min(tokens) >= 0 and max(tokens) < end
    return None if is_known else f"it has a token outside of the model's vocabulary, 0 to {end - 1}"


def read_model_eos(config: Any) -> tuple[int, ...]:
    """Returns the tokens that end a text by a model's own config: its `eos_ids`, where it has such."""
    ids = getattr(config, "eos_ids", None)
    if not isinstance(ids, tuple | list | set | frozenset):
        return ()
    return tuple(token for token in ids if isinstance(token, int) and not isinstance(token, bool) and token >= 0)


def read_eos(eos: Any, own: Collection[int] = ()) -> frozenset[int]:
    """Returns the stop tokens of a request; with None the model's `own`. Raises ValueError."""
    if eos is None:
        return frozenset(own)
    if isinstance(eos, str | bytes):
        raise ValueError(f"eos must be a token id, several, or None, not {show(eos)}.")
    several = [eos] if getattr(eos, "shape", None) == () or not isinstance(eos, Collection) else eos
    return frozenset(integer("eos", token, least=0) for token in several)


def read_keep_prefix(keep_prefix: Any) -> KeepPrefix:
    """Returns a valid `keep_prefix`. Raises ValueError."""
    is_prompt = isinstance(keep_prefix, str) and keep_prefix == "prompt"
    return "prompt" if is_prompt else flag("keep_prefix", keep_prefix, or_else="prompt")


def read_salt(salt: Any) -> str | bytes | None:
    """Returns a valid salt. Raises ValueError."""
    if not isinstance(salt, str | bytes | None):
        raise ValueError(f"salt must be a str, bytes or None, not {show(salt)}.")
    return salt


def read_stop(stop: Any) -> Stop | None:
    """Returns what ended a saved request; older files say True or False. Raises ValueError."""
    if stop in STOPS or stop is None:
        return stop
    return "eos" if flag("stopped", stop) else None


def read_callback(on_token: Any) -> Any:
    """Returns a valid `on_token`. Raises ValueError."""
    if on_token is not None and not callable(on_token):
        raise ValueError(f"on_token must be a function of a request and a token, or None, not {show(on_token)}.")
    return on_token


def read_limits(max_new_tokens: Any, count: int) -> list[int]:
    """Returns the limits of `count` prompts, from one number or one for each. Raises ValueError."""
    is_one = not isinstance(max_new_tokens, Sequence) and not getattr(max_new_tokens, "ndim", 0)
    limits = [max_new_tokens] * count if is_one or isinstance(max_new_tokens, str | bytes) else list(max_new_tokens)
    if len(limits) != count:
        raise ValueError(
            f"max_new_tokens must be one number or one for each of the {count} prompts, not {len(limits)}."
        )
    return [integer("max_new_tokens", limit, least=1) for limit in limits]
