"""The body of an HTTP request: its bytes, up to a limit, and the JSON that they are."""

import json
from typing import Any


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
