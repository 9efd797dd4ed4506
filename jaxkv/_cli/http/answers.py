"""Waiting for an engine's requests on behalf of a client: whole answers, and streams of server-sent events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxkv._cli.http.body import write_json
from jaxkv._cli.http.openai_format import ChatCompletion, Completion, count_usage, describe_end, describe_usage

CLOSING = "The server is closing, before the answer has ended."


async def finish(requests: Sequence[Any], http: Any) -> bool:
    """Waits for all samples; returns False, and cancels them, if the client goes away before."""
    samples = [sample for _, sample in list_samples(requests)]
    waits: asyncio.Future[Any] = asyncio.ensure_future(asyncio.gather(*map(_exhaust, samples)))
    gone: asyncio.Future[Any] = asyncio.ensure_future(_until_gone(http))
    try:
        await asyncio.wait({waits, gone}, return_when=asyncio.FIRST_COMPLETED)
        return waits.done()
    finally:
        for task in (waits, gone):
            task.cancel()
        cancel(requests)  # does nothing to those that have ended
        await asyncio.gather(waits, gone, return_exceptions=True)  # or the event loop would log that they were cut


def write_answer(requests: Sequence[Any], form: ChatCompletion | Completion, head: dict[str, Any]) -> str:
    """Returns a whole answer as JSON. It may run in a thread of its own."""
    choices = (
        write_json({"index": i, **form.choice(request, sample), **describe_end(sample)})
        for i, (request, sample) in enumerate(list_samples(requests))
    )
    return f'{write_json(head | form.answer(requests))[:-1]},"choices":[{",".join(choices)}]}}'


async def stream_answer(
    requests: Sequence[Any], form: ChatCompletion | Completion, head: dict[str, Any], options: dict[str, Any]
) -> AsyncIterator[str]:
    """Yields server-sent events: the text of each sample as it becomes certain, then why it ended.

    Args:
      options: OpenAI's `stream_options`: with `include_usage` the last event counts tokens, and with vLLM's
        `continuous_usage_stats` each one those of its own choice so far.
    """
    events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    with_usage, is_continuous = options.get("include_usage"), options.get("continuous_usage_stats")

    async def follow(index: int, request: Any, sample: Any) -> None:
        shown = told = 0

        def put(choice: dict[str, Any]) -> None:
            usage = describe_usage(len(request.prompt), len(sample.output)) if is_continuous else None
            chunk = head | {"choices": [{"index": index, "finish_reason": None, **choice}]}
            events.put_nowait(chunk | ({"usage": usage} if with_usage else {}))

        if (first := form.first_chunk(request.prompt)) is not None:
            put(first)
        with contextlib.suppress(Exception):  # said below
            async for _ in sample:
                if len(sample.text) > shown:
                    piece, shown = sample.text[shown:], len(sample.text)
                    put(form.chunk(piece, sample, told, told := len(sample.tokens)))
        if error := sample.error or (CLOSING if sample.ended == "cancelled" else None):
            events.put_nowait({"error": {"message": error, "type": "server_error"}})
        else:
            put(form.chunk(sample.text[shown:], sample, told, None) | describe_end(sample))
        events.put_nowait(None)

    pairs = list_samples(requests)
    tasks = [asyncio.ensure_future(follow(i, *pair)) for i, pair in enumerate(pairs)]
    try:
        left = len(tasks)
        while left:
            if (event := await events.get()) is None:
                left -= 1
            else:
                yield _event(event)
        if with_usage:
            yield _event(head | {"choices": [], "usage": count_usage(requests)})
        yield "data: [DONE]\n\n"
    finally:  # also when the client goes away
        for task in tasks:
            task.cancel()
        cancel(requests)


def list_samples(requests: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Returns the pairs of a request and each of its samples, in the order of OpenAI's choices."""
    return [(request, sample) for request in requests for sample in request.samples]


def cancel(requests: Sequence[Any]) -> None:
    for request in requests:
        request.cancel()


async def _exhaust(sample: Any) -> None:
    with contextlib.suppress(Exception):  # its error is told with the others
        async for _ in sample:
            pass


async def _until_gone(http: Any) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
