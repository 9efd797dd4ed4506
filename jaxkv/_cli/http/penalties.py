"""What a request's body says of penalties, biases and a least number of tokens, as `jaxkv.hooks.penalties` takes it."""

from collections.abc import Iterable
from typing import Any

import jaxkv.hooks
from jaxkv._cli.http.body import show
from jaxkv._cli.text import PENALTIES, check_penalty
from jaxkv._core.config.validation import integer, real

# By OpenAI's and vLLM's names, with what changes nothing.
PENALTY_FIELDS: dict[str, Any] = PENALTIES | {"logit_bias": {}, "min_tokens": 0}
MOST_BIAS = 100  # as OpenAI's


def read_penalties(
    body: dict[str, Any], defaults: dict[str, Any] | None, options: dict[str, Any], eos: Iterable[int], vocab_size: int
) -> dict[str, Any]:
    """Returns the `hook_args` of a request as an option of `Engine.submit`, or none if they are the engine's.

    Args:
      defaults: what holds where the body says nothing; None: the engine cannot do it.
      options: what else the request asks for.
      eos: the tokens that end an answer.

    Raises:
      ValueError: a value that is none, or what this server cannot do.
    """
    given = {name: body[name] for name in PENALTY_FIELDS if body.get(name) is not None}
    if defaults is None:
        for name, value in given.items():
            if value != PENALTY_FIELDS[name]:
                raise ValueError(
                    f"{name} is not supported by this server, which keeps no tokens of answers, since they may go on "
                    "beyond --max-seq-len: leave it out, or start the server with --repetition-penalty 1."
                )
        return {}
    for name in PENALTIES:
        if name in given:
            check_penalty(name, name, given[name])
    if "logit_bias" in given:
        given["logit_bias"] = _read_biases(given["logit_bias"], vocab_size)
    if given.get("min_tokens"):
        given["stop_tokens"] = _read_stop_tokens(given["min_tokens"], options, eos)
    usual = PENALTY_FIELDS | defaults
    wanted = {name: value for name, value in given.items() if value != usual.get(name)}
    return {"hook_args": jaxkv.hooks.penalties(**defaults | wanted)} if wanted else {}


def _read_biases(biases: Any, vocab_size: int) -> dict[int, float]:
    if not isinstance(biases, dict):
        raise ValueError(f"logit_bias must be an object of numbers by token, not {show(biases)}.")
    jaxkv.hooks.check_count("logit_bias", len(biases), jaxkv.hooks.MOST_BIASES)  # before each is looked at
    found = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal()) or len(token) > 9 or int(token) >= vocab_size:
            raise ValueError(f"The names in logit_bias must be tokens from 0 to {vocab_size - 1}, not {show(token)}.")
        found[int(token)] = real(f"The logit_bias of {token}", bias, least=-MOST_BIAS, most=MOST_BIAS)
    return found


def _read_stop_tokens(count: Any, options: dict[str, Any], eos: Iterable[int]) -> list[int]:
    """Returns the tokens that may not end an answer before it has `min_tokens`."""
    integer("min_tokens", count, least=0)
    if count > options["max_new_tokens"]:
        raise ValueError(
            f"min_tokens must be at most max_tokens, {options['max_new_tokens']}, not {count}: ask for fewer, or allow "
            "more."
        )
    stops = options.get("stop") or []
    if any(isinstance(stop, str) for stop in ([stops] if isinstance(stops, str) else stops)):
        raise ValueError(
            "min_tokens is for answers that end by tokens, and a stop string could be there before: leave one out."
        )
    return list(dict.fromkeys([*options.get("eos", eos), *(token for (token,) in stops)]))
