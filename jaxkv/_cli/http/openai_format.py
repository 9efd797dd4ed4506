"""The form of OpenAI's chat completions: what `Engine.submit` takes of a request, and what an answer says."""

from typing import Any

# What would change an answer, and is not done here: refused unless it is off. Other unknown fields say nothing of it.
REFUSED = ("tools", "functions", "logit_bias", "frequency_penalty", "presence_penalty", "audio", "prediction")


def read_options(body: dict[str, Any], defaults: dict[str, Any], most: int) -> tuple[dict[str, Any], int | None]:
    """Returns what `Engine.submit` takes of a request's body, and how many log-probabilities are asked for."""
    for field in REFUSED:
        if body.get(field):
            raise ValueError(f"{field} is not supported by this server: leave it out.")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise ValueError("response_format other than text is not supported by this server: leave it out.")
    given = {field: value for field, value in body.items() if value is not None}
    for field, kind in (("logprobs", bool), ("top_logprobs", int), ("stop", str | list)):
        if field in given and not isinstance(given[field], kind):
            raise ValueError(f"{field} has a value of the wrong type: {given[field]!r}.")
    stops = given.get("stop", [])
    if isinstance(stops, list) and not all(isinstance(stop, str) for stop in stops):
        raise ValueError("stop must be a string or a list of strings.")
    options = defaults | {
        field: given[field] for field in ("temperature", "top_p", "n", "seed", "stop") if field in given
    }
    options["max_new_tokens"] = given.get("max_completion_tokens", given.get("max_tokens", most))
    count = given.get("top_logprobs", 0) if given.get("logprobs") else None
    return options | ({} if count is None else {"logprobs": max(count, 1)}), count


def finish_reason(sample: Any) -> str:
    """Returns why a sample ended, in OpenAI's words."""
    return {"eos": "stop", "stop": "stop"}.get(sample.ended, "length")


def count_usage(request: Any) -> dict[str, int]:
    """Counts the tokens of the prompt and of all samples, those of stop sequences too."""
    prompt, output = len(request.prompt), sum(len(sample.output) for sample in request.samples)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def list_logprobs(sample: Any, text: Any, count: int | None, begin: int, end: int | None) -> dict[str, Any] | None:
    """Returns the log-probabilities of a sample's tokens from `begin` to `end`, if they were asked for."""
    if count is None:
        return None
    pairs = zip(sample.tokens[begin:end], sample.logprobs[begin:end], strict=False)

    def render(token: int, logprob: float) -> dict[str, Any]:
        written = text.decode([token], special=True)
        return {"token": written, "logprob": logprob, "bytes": list(written.encode())}

    def likeliest(found: dict[int, float]) -> list[tuple[int, float]]:
        return sorted(found.items(), key=lambda item: -item[1])[:count]

    return {"content": [
        render(token, found[token]) | {"top_logprobs": [render(*item) for item in likeliest(found)]}
        for token, found in pairs
    ]}  # fmt: skip
