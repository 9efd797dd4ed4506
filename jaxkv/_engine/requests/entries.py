"""Requests as JSON: entries of a saved engine's file, and of the messages between an engine's processes."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from jaxkv._core.config.validation import MOST_INDEX, flag, integer
from jaxkv._engine.requests.hook_args import HookArgs, from_json
from jaxkv._engine.requests.prompt_scores import PromptScores
from jaxkv._engine.requests.request import Request, RequestParams
from jaxkv._engine.requests.sampling import SamplingParams
from jaxkv._engine.requests.stops import IdStops, TokenizerLike, read_stops
from jaxkv._engine.requests.submission import read_eos, read_keep_prefix, read_salt, read_stop

CHOSEN = {None: 0, 0: -1}  # what entries say where no number of likeliest tokens is kept: nothing, or the chosen ones


def render_request(request: Request, hook_args: HookArgs) -> dict[str, Any]:
    """Returns the entry of a request, without stop strings. Raises ValueError for hook arguments that are no JSON."""
    params, scores = request.params, request.shared_scores
    return {
        "number": request.number, "prompt": request.prompt, "limit": request.limit,
        "tokens": request.tokens if request.done else request.output,
        "choice": dataclasses.asdict(params.choice), "eos": sorted(params.eos),
        "salt": render_salt(params.salt),
        "num_logprobs": CHOSEN.get(params.num_logprobs, params.num_logprobs), "given": request.given,
        "stopped": request.stopped, "refusal": request.refusal, "stop_token": request.stop_token,
        "stop_logprob": repr(request.stop_logprob),
        "priority": params.priority, "hook_args": hook_args.to_json(params.hook_args),
        "keep_prefix": params.keep_prefix, "adapter": params.adapter, "include_stop": request.search.is_included,
        "stop": [list(stop) for stops in request.search.stops if isinstance(stops, IdStops) for stop in stops.stops],
        "logprobs": _render_logprobs(request.output_logprobs),
        **({} if scores is None else _render_scores(scores, request.prompt)),
    }  # fmt: skip


def read_request(
    entry: dict[str, Any],
    hook_args: HookArgs,
    *,
    read_adapter: Callable[[Any], int],
    tokenizer: TokenizerLike | None = None,
    make: type[Request] = Request,
    **options: Any,
) -> Request:
    """Returns the request of an entry, made by `make` with further `options`.

    Args:
      tokenizer: of the request, if it was submitted with one and goes on.

    Raises:
      ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError: it is no entry of a request.
    """
    choice, prompt = entry["choice"], _read_tokens(entry["prompt"])
    params = RequestParams(
        choice=SamplingParams.read(
            choice["temperature"],
            choice["top_k"],
            choice["top_p"],
            choice.get("min_p", 0.0),
            choice["seed"],
            choice.get("draws"),
        ),
        eos=read_eos(entry["eos"]),
        salt=parse_salt(*entry["salt"]),
        num_logprobs=_read_num_logprobs(entry["num_logprobs"]),
        priority=integer("priority", entry.get("priority", 0), least=None, most=None),
        hook_args=hook_args.read(from_json(entry.get("hook_args"))),
        keep_prefix=read_keep_prefix(entry.get("keep_prefix", True)),
        adapter=read_adapter(entry.get("adapter", 0)),
        stops=read_stops([*entry.get("stop", []), *entry.get("stop_strings", [])], tokenizer, prompt),
        include_stop=flag("include_stop", entry.get("include_stop", False)),
        num_prompt_logprobs=integer("prompt_logprobs", entry.get("num_prompt_logprobs", 0), least=0)
        if "scores" in entry
        else None,
    )
    request = make(
        params,
        number=integer("number", entry["number"], least=0),
        prompt=prompt,
        limit=integer("limit", entry["limit"], least=0),
        **options,
    )
    if request.scores is not None:
        _read_scores(request.scores, entry)
    request.output = _read_tokens(entry["tokens"])
    request.times.tokens = [request.times.submitted] * len(request.output)
    request.output_logprobs = [dict(pairs) for pairs in _read_logprobs(entry["logprobs"])]
    request.given = integer("given", entry["given"], least=0, most=len(request.output))
    request.stopped, request.refusal = read_stop(entry["stopped"]), entry.get("refusal")
    if (token := entry.get("stop_token")) is not None:
        logprob, [token] = entry["stop_logprob"], _read_tokens([token])
        request.stop = token, None if logprob == "None" else {token: float(logprob)}
    if request.search.stops and not request.done:
        request.look_for_stops()
    if not request.prompt or len(request.output) > request.limit:
        raise ValueError("a request has no prompt, or more tokens than its limit")
    return request


def render_salt(salt: str | bytes | None) -> list[str | None]:
    """Returns a salt as JSON."""
    return ["bytes", salt.hex()] if isinstance(salt, bytes) else ["str", salt]


def parse_salt(kind: str, salt: Any) -> str | bytes | None:
    """Returns what `render_salt` wrote. Raises ValueError for anything else."""
    return read_salt(bytes.fromhex(salt) if kind == "bytes" else salt)


# Fields of most entries: messages leave them out.
USUAL: dict[str, Any] = {
    "tokens": [], "eos": [], "salt": ["str", None], "num_logprobs": 0, "given": 0, "stopped": None, "refusal": None,
    "stop_token": None, "stop_logprob": "None", "priority": 0, "hook_args": None, "keep_prefix": True, "adapter": 0,
    "include_stop": False, "stop": [], "logprobs": [],
}  # fmt: skip
USUAL_CHOICE = dataclasses.asdict(SamplingParams.read(0.0, 0, 1.0, 0.0, 0))


def shorten(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry without its usual fields."""
    choice = {name: value for name, value in entry["choice"].items() if value != USUAL_CHOICE[name]}
    return {n: x for n, x in (entry | {"choice": choice}).items() if n not in USUAL or x != USUAL[n]}


def lengthen(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry that was shortened, with all its fields."""
    return USUAL | entry | {"choice": USUAL_CHOICE | entry["choice"]}


def _render_scores(scores: PromptScores, prompt: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"scores": list(map(repr, scores.values.tolist()))}
    if count := scores.num_likeliest:
        likeliest = _render_logprobs(scores.list_likeliest(prompt))
        found |= {"num_prompt_logprobs": count, "prompt_top_logprobs": likeliest}
    return found


def _read_scores(scores: PromptScores, entry: dict[str, Any]) -> None:
    """Records what `_render_scores` wrote."""
    own = list(map(float, entry["scores"]))
    rows = _read_logprobs(entry.get("prompt_top_logprobs", [[]] * len(own)))
    width = 1 + scores.num_likeliest
    logprobs, tokens = np.full((len(own), width), np.nan, np.float32), np.full((len(own), width), -1, np.int32)
    for i, pairs in enumerate(rows):
        best = pairs[: width - 1]
        logprobs[i, : 1 + len(best)] = own[i], *(p for _, p in best)
        tokens[i, 1 : 1 + len(best)] = [token for token, _ in best]
    scores.note(0, logprobs, tokens)


def _render_logprobs(several: list[dict[int, float]]) -> list[list[Any]]:
    """Returns log-probabilities as JSON. As text, since JSON has neither keys that are numbers nor infinities."""
    return [[[token, repr(p)] for token, p in pairs.items()] for pairs in several]


def _read_logprobs(said: list[list[Any]]) -> list[list[tuple[int, float]]]:
    return [[(int(token), float(p)) for token, p in pairs] for pairs in said]


def _read_num_logprobs(said: Any) -> int | None:
    number = integer("logprobs", said, least=-1)
    return next((wanted for wanted, name in CHOSEN.items() if name == number), number)


def _read_tokens(several: Collection[Any]) -> list[int]:
    return [integer("a token", token, least=0, most=MOST_INDEX) for token in several]
