"""Bodies of HTTP: of a request the bytes, up to a limit, and the JSON object that they are; of an answer the JSON."""

import json
from collections.abc import Sequence
from typing import Any

AT_ONCE = 256  # items of a list that are written as JSON while no other thread runs


class Refused(ValueError):
    """A request that is answered by a sentence, and by another status than 400."""

    def __init__(self, status: int, kind: str, message: str):
        super().__init__(message)
        self.status, self.kind = status, kind


async def receive(http: Any, most: int, names: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Returns what a body says, and how many bytes it has.

    Args:
      most: the limit of its bytes. names: the models that it may ask for.

    Raises:
      ValueError: the sentence that it is answered by.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in http.headers and kind != "application/json":  # a browser would send it without asking before
        message = "A page's request must have the header Content-Type: application/json."
        raise Refused(415, "invalid_request_error", message)
    if (given := await read_body(http, most)) is None:
        message = f"The body has more than {most:,} bytes: send less, or several requests."
        raise Refused(413, "invalid_request_error", message)
    body = read_json(given)
    if not isinstance(body, dict):
        raise ValueError("The body must be a JSON object.")
    if (wanted := body.get("model")) not in (None, "", *names):
        raise Refused(
            404,
            "not_found_error",
            f"There is no model {show(wanted)} here, but {' and '.join(names)}: give that as model, leave it "
            "out, or start the server with --served-model-name.",
        )
    return body, len(given)


async def read_body(http: Any, most: int) -> bytes | None:
    """Returns a body, or None if it has more than `most` bytes, which are then read but not kept."""
    body = bytearray()
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size > most:
            body.clear()
        else:
            body += chunk
    return bytes(body) if size <= most else None


def read_json(given: bytes) -> Any:
    """Returns what a body says. Raises ValueError."""
    try:
        return json.loads(given)
    except RecursionError:
        raise ValueError("The body is nested too deeply: send fewer brackets.") from None
    except ValueError as error:
        raise ValueError(f"The body is no JSON: {error}.") from None


def show(value: Any) -> str:
    """Returns what a body says as it fits into a sentence."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:80]}… ({len(text)} characters)"


def write_json(value: Any) -> str:
    """Returns a value as JSON. Lists are written in pieces, between which other threads run: of what is told of a long
    prompt's tokens there are megabytes, and the event loop, and an engine's steps, must not wait for all of it."""
    if isinstance(value, dict):
        fields = (f"{_write(str(key))}:{write_json(item)}" for key, item in value.items())
        return f"{{{','.join(fields)}}}"
    if isinstance(value, list):
        pieces = (_write(value[i : i + AT_ONCE])[1:-1] for i in range(0, len(value), AT_ONCE))
        return f"[{','.join(pieces)}]"
    return _write(value)


def _write(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
