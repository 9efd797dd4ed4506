"""The form of OpenAI's chat completions and completions: what `Engine.submit` takes of a request, and what an answer
says."""

import codecs
import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxkv._cli.http.body import show
from jaxkv._cli.http.penalties import PENALTY_FIELDS

MOST_CHOICES = 128  # samples of a request, as OpenAI's: each is built from its prompt in the server's one thread
# Stop sequences, and characters of one: the thread that takes the steps looks for each in the text of every token.
MOST_STOPS, LONGEST_STOP = 128, 1024
# Log-probabilities of a token, as OpenAI's. All requests that want some are computed with so many, by the programs that
# the server compiled before it listened: another number would be a program of its own, for which all others wait.
MOST_LOGPROBS = 20
LEAST_LOGPROB = -9999.0  # for -inf, which is no JSON, as vLLM's
# Log-probabilities of prompts in an answer to several samples or prompts: about 150 MB of JSON.
MOST_TOLD = 2**21
MOST_TOKENS = 2**31 - 1  # more than there is room for

MOST_COMPARED = 32  # unknown fields of a body, and characters of one, in which a slip of the pen is looked for

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "priority")
RENAMED = {"cache_salt": "salt", "include_stop_str_in_output": "include_stop"}  # what `Engine.submit` calls them
IN_PYTHON = "leave it out, or serve from Python, where"
BY_GRAMMAR = f"{IN_PYTHON} a logits_hook follows a grammar (docs/recipes.md)"
LEAVE, AS_TEXT = "leave it out", "leave it out, or render the text yourself and send it to /v1/completions"
# What a chat template is given, or is, elsewhere.
TEMPLATE_FIELDS = ("tools", "functions", "chat_template", "continue_final_message", "documents")
# What would change an answer and is not done here, by OpenAI's, vLLM's and SGLang's names, with the way out. Other
# unknown fields say nothing of an answer.
REFUSED = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
        "structural_tag", "grammar", "regex", "ebnf", "json_schema", "allowed_token_ids", "bad_words",
        "logits_processors"), BY_GRAMMAR),
    **dict.fromkeys((*TEMPLATE_FIELDS, "tool_choice", "function_call"), AS_TEXT),
    **dict.fromkeys(("audio", "modalities", "prediction", "suffix", "web_search_options", "prompt_embeds",
        "truncate_prompt_tokens", "use_beam_search", "length_penalty", "skip_special_tokens",
        "return_token_ids", "return_tokens_as_token_ids", "thinking_token_budget", "lora_path"), LEAVE),
}  # fmt: skip
# What switches a field off, where that is not None, False, 0 or nothing.
OFF: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,), "tool_choice": ("none", "auto"), "modalities": (["text"],),
    "function_call": ("none", "auto"), "skip_special_tokens": (True,),
}  # fmt: skip
# Fields that are on where they are given, whatever their value.
ON = ("skip_special_tokens", "web_search_options", "json_schema", "audio")
TYPE_NAMES = {bool: "true or false", int: "a whole number", str: "a text", list: "a list", dict: "an object",
              str | list: "a text or a list"}  # fmt: skip
OTHER_TYPES = {"cache_salt": str, "include_stop_str_in_output": bool, "ignore_eos": bool, "stop_token_ids": list}
CHAT_TYPES = {
    "logprobs": bool, "top_logprobs": int, "chat_template_kwargs": dict, "add_generation_prompt": bool,
    "reasoning_effort": str,
}  # fmt: skip
# What changes an answer and is done here, so that a slip of the pen must not pass for an unknown field.
TAKEN = (
    *SAMPLING, *PENALTY_FIELDS, *RENAMED, *OTHER_TYPES, *CHAT_TYPES, "max_tokens", "max_completion_tokens",
    "prompt_logprobs", "stream", "stream_options", "echo", "add_special_tokens", "response_format",
)  # fmt: skip
KNOWN = frozenset((*TAKEN, *REFUSED))
Described = tuple[int, float | None, dict[str, float] | None]  # a token, its log-probability, and the likeliest ones'


class PromptLogprobs:
    """vLLM's `prompt_logprobs` of a request: of each token of its prompt, and of so many likeliest ones there."""

    def __init__(self, body: dict[str, Any], text: Any):
        check_types(body, prompt_logprobs=int)
        _check_count(body, "prompt_logprobs")
        self.text, self.count = text, body.get("prompt_logprobs")
        if self.count is not None and body.get("stream"):
            raise ValueError("prompt_logprobs cannot be streamed: leave it out, or stream.")
        self._decode = functools.cache(lambda token: text.decode([token], special=True))
        self._described: dict[int, list[Any]] = {}  # of each request

    def options(self) -> dict[str, Any]:
        return {} if self.count is None else {"prompt_logprobs": MOST_LOGPROBS}

    def answer(self, request: Any) -> dict[str, Any]:
        """Returns the field of an answer, if it is asked for."""
        if self.count is None:
            return {}
        if id(request) not in self._described:
            self._described[id(request)] = self.describe(request)
        return {"prompt_logprobs": self._described[id(request)]}

    def describe(self, request: Any) -> list[dict[int, dict[str, Any]] | None]:
        """Returns what is told of each token of a prompt: nothing of the first, before which there is nothing."""
        pairs = zip(request.prompt[1:], request.prompt_top_logprobs, strict=True)
        return [None, *(self._describe(token, found) for token, found in pairs)]

    def _describe(self, token: int, found: dict[int, float]) -> dict[int, dict[str, Any]]:
        """Returns by their ids the token itself and the likeliest ones. A rank beyond those computed is not known."""
        best = _likeliest(found, MOST_LOGPROBS)
        told = {
            other: {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": self._decode(other)}
            for rank, (other, logprob) in enumerate(best, 1)
            if rank <= (self.count or 0) or other == token
        }
        own = {"logprob": max(found[token], LEAST_LOGPROB), "rank": None, "decoded_token": self._decode(token)}
        return {token: own} | told


class ChatCompletion:
    """One request to `/v1/chat/completions`: messages, which the model's chat template writes."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    default_tokens: int | None = None  # as many as there is room for
    told_per_token = 0  # log-probabilities in each choice, of each token of the prompt

    def __init__(self, body: dict[str, Any], text: Any):
        self.body, self.text, self.prompt_logprobs = body, text, PromptLogprobs(body, text)
        check_types(body, **CHAT_TYPES)
        _check_count(body, "top_logprobs")
        for field, instead in (("echo", "continue a text by /v1/completions"), ("add_special_tokens", LEAVE)):
            if body.get(field):
                raise ValueError(f"{field} is not supported for chats: {instead}.")
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise ValueError("top_logprobs is for a request with logprobs: give logprobs=true, too, or leave it out.")
        self.num_logprobs = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        self._write = functools.cache(lambda token: (text.decode([token], special=True), [*text.token_bytes(token)]))

    def prompts(self) -> list[list[int]]:
        messages = self.body.get("messages")
        if isinstance(messages, list):
            messages = [_read_message(message, number) for number, message in enumerate(messages)]
        variables = dict(self.body.get("chat_template_kwargs") or {})
        if reserved := {"self", "messages"} & variables.keys():
            raise ValueError(f"chat_template_kwargs cannot have {min(reserved)!r}: leave it out.")
        for field in ("add_generation_prompt", "reasoning_effort"):
            if self.body.get(field) is not None:
                variables[field] = self.body[field]
        return [self.text.chat(messages, **variables)]

    def options(self) -> dict[str, Any]:
        wanted = {} if self.num_logprobs is None else {"logprobs": MOST_LOGPROBS}
        return wanted | self.prompt_logprobs.options()

    def answer(self, requests: Sequence[Any]) -> dict[str, Any]:
        """Returns what the whole answer has beside its choices."""
        (request,) = requests
        return self.prompt_logprobs.answer(request)

    def choice(self, request: Any, sample: Any) -> dict[str, Any]:
        """Returns the whole answer of one of the request's samples."""
        message = {"role": "assistant", "content": sample.text}
        return {"message": message, "logprobs": self._list_logprobs(sample, 0, None)}

    def first_chunk(self, prompt: list[int]) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def chunk(self, piece: str, sample: Any, begin: int, end: int | None) -> dict[str, Any]:
        """Returns a piece of a sample's text, with its tokens from `begin` to `end`."""
        return {"delta": {"content": piece} if piece else {}, "logprobs": self._list_logprobs(sample, begin, end)}

    def _list_logprobs(self, sample: Any, begin: int, end: int | None) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None

        def render(token: int, logprob: float) -> dict[str, Any]:
            written, own = self._write(token)
            return {"token": written, "logprob": max(logprob, LEAST_LOGPROB), "bytes": own}

        pairs = zip(sample.tokens[begin:end], sample.logprobs[begin:end], strict=False)
        return {"content": [
            render(token, found[token])
            | {"top_logprobs": [render(*item) for item in _likeliest(found, self.num_logprobs)]}
            for token, found in pairs
        ]}  # fmt: skip


class Completion:
    """One request to `/v1/completions`: texts, or lists of tokens, that are continued as they are.

    With `echo` an answer begins with its prompt. With `logprobs` it then has log-probabilities of the prompt's tokens,
    but for the first, and of the stop token that ended it: as vLLM's, so that with `max_tokens` of 1 there is always
    one token behind the prompt's, unless a stop sequence ended it.
    """

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    default_tokens: int | None = 16  # as OpenAI's

    def __init__(self, body: dict[str, Any], text: Any):
        self.body, self.text, self.prompt_logprobs = body, text, PromptLogprobs(body, text)
        self._lengths: dict[int, _TextLength] = {}  # of the text that has been said of each sample
        self._prompts: dict[int, list[Described]] = {}  # of each request
        self._write = functools.cache(lambda token: _write_bytes(text.token_bytes(token)))
        check_types(body, logprobs=int, echo=bool, add_special_tokens=bool)
        _check_count(body, "logprobs")
        self.num_logprobs, self.echo = body.get("logprobs"), bool(body.get("echo"))
        told = (self.num_logprobs if self.echo else None, self.prompt_logprobs.count)
        self.told_per_token = sum(count + 1 for count in told if count is not None)
        if self.echo and self.num_logprobs is not None and body.get("stream"):
            raise ValueError("echo with logprobs cannot be streamed: leave one of the three out.")

    def prompts(self) -> list[list[int]]:
        given = self.body.get("prompt")
        if isinstance(given, str) or (isinstance(given, list) and given and is_integer(given[0])):
            given = [given]
        if not isinstance(given, list) or not given:
            raise ValueError("prompt must be a text, a list of tokens, or a list of those.")
        return [self._read_prompt(prompt) for prompt in given]

    def _read_prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.text.encode(prompt, special=self.body.get("add_special_tokens") is not False)
        if not isinstance(prompt, list) or not all(map(is_integer, prompt)):
            raise ValueError("prompt must be a text, a list of tokens, or a list of those.")
        return prompt

    def options(self) -> dict[str, Any]:
        wanted = [] if self.num_logprobs is None else ["logprobs", *(["prompt_logprobs"] if self.echo else [])]
        return dict.fromkeys(wanted, MOST_LOGPROBS) | self.prompt_logprobs.options()

    def answer(self, requests: Sequence[Any]) -> dict[str, Any]:
        """Returns what the whole answer has beside its choices."""
        return {}

    def choice(self, request: Any, sample: Any) -> dict[str, Any]:
        """Returns the whole answer of one of the request's samples."""
        before = self.text.decode(request.prompt) if self.echo else ""
        logprobs = self._list_logprobs(sample, 0, None, request)
        return {"text": before + sample.text, "logprobs": logprobs} | self.prompt_logprobs.answer(request)

    def first_chunk(self, prompt: list[int]) -> dict[str, Any] | None:
        return {"text": self.text.decode(prompt), "logprobs": None} if self.echo else None

    def chunk(self, piece: str, sample: Any, begin: int, end: int | None) -> dict[str, Any]:
        """Returns a piece of a sample's text, with its tokens from `begin` to `end`."""
        return {"text": piece, "logprobs": self._list_logprobs(sample, begin, end)}

    def _list_logprobs(self, sample: Any, begin: int, end: int | None, request: Any = None) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        pairs = list(zip(sample.tokens[begin:end], sample.logprobs[begin:end], strict=False))
        before = []
        if self.echo and request is not None:
            before = self._describe_prompt(request)
            pairs += [sample.stop] if sample.stop else []
        rows = [*before, *(self._describe(token, found) for token, found in pairs)]
        length, offsets = self._lengths.setdefault(id(sample), _TextLength()), []
        for token, _, _ in rows:
            offsets.append(length.count)
            if self.text.decode([token]):  # else it is a special one, which is not in the text
                length.add(self.text.token_bytes(token))
        return {
            "tokens": [self._write(token) for token, _, _ in rows], "token_logprobs": [own for _, own, _ in rows],
            "top_logprobs": [best for _, _, best in rows], "text_offset": offsets,
        }  # fmt: skip

    def _describe_prompt(self, request: Any) -> list[Described]:
        """Returns what is said of the tokens of a prompt: once for all its samples."""
        if id(request) not in self._prompts:
            known = zip(request.prompt[1:], request.prompt_top_logprobs, strict=True)
            first = (request.prompt[0], None, None)  # nothing stands before it
            self._prompts[id(request)] = [first, *(self._describe(token, found) for token, found in known)]
        return self._prompts[id(request)]

    def _describe(self, token: int, found: dict[int, float]) -> Described:
        """Returns a token, its log-probability, and by their texts those of the likeliest ones there and its own."""
        best: dict[str, float] = {}
        for other, logprob in (*_likeliest(found, self.num_logprobs or 0), (token, found[token])):
            best.setdefault(self._write(other), max(logprob, LEAST_LOGPROB))  # of several of one text the likeliest
        return token, max(found[token], LEAST_LOGPROB), best


def _write_bytes(own: bytes) -> str:
    """Returns a token's text, or, where that is half a character, its bytes as OpenAI writes them."""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


class _TextLength:
    """Counts the characters of a text of which bytes come."""

    def __init__(self) -> None:
        self.count = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, given: bytes) -> None:
        self.count += len(self._decoder.decode(given))


def read_options(body: dict[str, Any], defaults: dict[str, Any], most: int) -> dict[str, Any]:
    """Returns what `Engine.submit` takes of a request's body, whichever of the two it is.

    Args:
      defaults: what holds where the body says nothing.
      most: how many tokens an answer has by default.
    """
    refuse_fields(body)
    refuse_misspelt(body)
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise ValueError(f"response_format other than text is not supported by this server: {BY_GRAMMAR}.")
    if body.get("best_of") not in (None, body.get("n") or 1):
        raise ValueError("best_of must be n on this server, which gives all that it samples: leave it out.")
    given = {field: value for field, value in body.items() if value is not None}
    check_types(given, stop=str | list, stream=bool, stream_options=dict, **OTHER_TYPES)
    if given.get("cache_salt") == "":
        raise ValueError("cache_salt must not be empty: leave it out, or give a tenant's name.")
    stops = given.get("stop", [])
    if isinstance(stops, list) and not all(isinstance(stop, str) for stop in stops):
        raise ValueError("stop must be a string or a list of strings.")
    if max(len(stops) if isinstance(stops, list) else 1, len(given.get("stop_token_ids", ()))) > MOST_STOPS:
        raise ValueError(f"stop and stop_token_ids must have at most {MOST_STOPS} each: leave some out.")
    if any(len(stop) > LONGEST_STOP for stop in ([stops] if isinstance(stops, str) else stops)):
        raise ValueError(f"A stop must have at most {LONGEST_STOP} characters: give its beginning.")
    if ids := given.get("stop_token_ids"):
        if not all(is_integer(token) and token >= 0 for token in ids):
            raise ValueError("stop_token_ids must be a list of tokens.")
        given["stop"] = [*([stops] if isinstance(stops, str) else stops), *([token] for token in ids)]
    if given.get("top_k") == -1:
        given["top_k"] = 0  # all, as vLLM says it
    if isinstance(given.get("n"), int) and given["n"] > MOST_CHOICES:
        raise ValueError(f"n must be at most {MOST_CHOICES}, not {show(given['n'])}: send several requests.")
    options = defaults | {field: given[field] for field in SAMPLING if field in given}
    options |= {own: given[field] for field, own in RENAMED.items() if field in given}
    options |= {"eos": ()} if given.get("ignore_eos") else {}
    if is_integer(options.get("seed")):
        options["seed"] %= 2**32  # OpenAI's has 64 bits
    field, count = find_limit(body)
    count = most if count is None else count
    if not is_integer(count) or count < 0:
        raise ValueError(f"{field} must be a whole number of tokens, not {show(count)}.")
    is_scored = "prompt_logprobs" in given or (given.get("echo") and "logprobs" in given)
    if count == 0 and not is_scored:
        raise ValueError(
            f"{field} must be at least 1, or 0 to score the prompt alone, with prompt_logprobs, or echo and logprobs."
        )
    return options | {"max_new_tokens": min(count, MOST_TOKENS)}


def find_limit(body: dict[str, Any]) -> tuple[str, Any]:
    """Returns the field that limits an answer's tokens, by OpenAI's newer name or its older one, and its value."""
    field = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return field, body.get(field)


def check_context(prompts: Sequence[list[int]], body: dict[str, Any], max_model_len: int) -> None:
    """Raises ValueError if a prompt and the answer that the body asks for are longer than the context."""
    field, count = find_limit(body)
    for i, prompt in enumerate(prompts):
        name, room = "The prompt" if len(prompts) == 1 else f"prompt[{i}]", max_model_len - len(prompt)
        if room < 1:
            raise ValueError(
                f"{name} has {len(prompt)} tokens, and the context of {max_model_len} (--max-seq-len) must hold one "
                "more: send less."
            )
        if count is not None and count > room:
            raise ValueError(
                f"{name} has {len(prompt)} tokens and {field} is {str(count)[:20]}, but the context holds "
                f"{max_model_len} (--max-seq-len): ask for at most {room}, or send less."
            )


def refuse_fields(body: dict[str, Any], fields: Iterable[str] = REFUSED) -> None:
    """Raises ValueError for the first of these fields that is on, and not done here."""
    for field in fields:
        value = body.get(field)
        if value is not None and (value or field in ON) and value not in OFF.get(field, ()):
            raise ValueError(f"{field} is not supported by this server: {REFUSED[field]}.")


def refuse_misspelt(body: dict[str, Any]) -> None:
    """Raises ValueError for an unknown field whose name is nearly that of one that is done here. Names are compared in
    the event loop, so of a body of nothing but unknown fields only a few are."""
    unknown = [field for field in body if len(field) <= MOST_COMPARED and field not in KNOWN]
    for field in unknown[:MOST_COMPARED]:
        close = ["max_tokens"] if field == "max_new_tokens" else difflib.get_close_matches(field, TAKEN, 1, cutoff=0.85)
        if close:
            raise ValueError(f"{field} is no field of this server: did you mean {close[0]}?")


def check_count(prompts: Sequence[Any], options: dict[str, Any], most: int | None) -> None:
    """Raises ValueError if a request of several prompts asks for more than `most` samples: it never could begin."""
    count = len(prompts) * (options["n"] if is_integer(options.get("n")) else 1)
    if most is not None and len(prompts) > 1 and count > most:
        raise ValueError(
            f"The request asks for {count} answers, but at most {most} can have a row or wait: send several requests."
        )


def check_told(prompts: Sequence[Any], options: dict[str, Any], told_per_token: int) -> None:
    """Raises ValueError if several choices have so many log-probabilities of their prompts that memory is in danger."""
    n = options["n"] if is_integer(options.get("n")) else 1
    told = n * told_per_token * sum(map(len, prompts))
    if told > MOST_TOLD and n * len(prompts) > 1:
        raise ValueError(
            f"The choices would have {told:,} log-probabilities of their prompts, but a request has at most "
            f"{MOST_TOLD:,}: send several requests, or score the prompt with n=1 and sample by another request."
        )


def describe_end(sample: Any) -> dict[str, Any]:
    """Returns why a sample ended, in OpenAI's words, and the stop string or token, as vLLM does."""
    match = sample.stop_sequence
    reason = {"eos": "stop", "stop": "stop"}.get(sample.ended, "length")
    return {"finish_reason": reason, "stop_reason": match[0] if isinstance(match, tuple) else match}


def count_usage(requests: Sequence[Any]) -> dict[str, int]:
    """Counts the tokens of the prompts and of all samples, those of stop sequences too."""
    prompt = sum(len(request.prompt) for request in requests)
    output = sum(len(sample.output) for request in requests for sample in request.samples)
    return describe_usage(prompt, output)


def describe_usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _read_message(message: Any, number: int) -> Any:
    """Returns a message whose content is one text, where it was a list of parts: templates take no lists."""
    if not isinstance(message, dict) or isinstance(content := message.get("content"), str):
        return message
    if not isinstance(content, list):
        raise ValueError(
            f"messages[{number}].content must be a text, or a list of parts that are texts, not {show(content)}."
        )
    for item in content:
        if not isinstance(item, dict) or item.get("type") != "text" or not isinstance(item.get("text"), str):
            raise ValueError(
                'The parts of a content must be texts on this server, {"type": "text", "text": "..."}, not '
                f"{show(item)}."
            )
    return message | {"content": "\n".join(item["text"] for item in content)}


def check_types(body: dict[str, Any], **kinds: Any) -> None:
    for field, kind in kinds.items():
        value = body.get(field)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ValueError(f"{field} must be {TYPE_NAMES[kind]}, not {show(value)}.")


def _check_count(body: dict[str, Any], field: str) -> None:
    if not 0 <= (body.get(field) or 0) <= MOST_LOGPROBS:
        raise ValueError(f"{field} must be from 0 to {MOST_LOGPROBS}, not {show(body[field])}.")


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _likeliest(found: dict[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(found.items(), key=lambda item: -item[1])[:count]
