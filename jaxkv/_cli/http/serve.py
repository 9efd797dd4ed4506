"""`python -m jaxkv serve`: a model behind OpenAI's chat completions and completions, over HTTP.

It stands on public names alone: `Engine.serve` takes the steps in a thread, and each HTTP request iterates over one
`Request`. docs/serving.md walks through it, for a server of your own.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import os
import socket
import sys
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import jaxkv
from jaxkv._cli.compiling import keep_compiled
from jaxkv._cli.http.openai_format import (
    MOST_LOGPROBS,
    ChatCompletion,
    Completion,
    check_count,
    count_usage,
    finish_reason,
    read_options,
)
from jaxkv._cli.text import open_model, prefix_options

logger = logging.getLogger("jaxkv.serve")

# The limit of a body's bytes: so many, and so many more for each token of max_seq_len. A tokenizer holds up all other
# requests while it reads a text.
LEAST_LIMIT, MOST_PER_TOKEN = 1 << 20, 64

CLOSING = "The server is closing, before the answer has ended."
SECONDS_TO_TELL = 5  # that clients are left, to hear of it


@keep_compiled()
def serve(arguments: argparse.Namespace) -> int:
    """Serves a model until Ctrl-C."""
    try:
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError('serve needs a web server: pip install "jaxkv[serve]".') from error
    check_address(arguments.host, arguments.port)  # now, and not once all is compiled
    opened = open_model(arguments)
    engine = jaxkv.Engine(
        opened.model,
        max_seqs=arguments.max_seqs,
        max_seq_len=arguments.max_seq_len,
        memory_bytes=arguments.memory,
        block_size=arguments.block_size,
        seed=arguments.seed,
        longest=min(opened.model.max_seq_len, 8192),
        max_waiting=arguments.max_waiting,
        cache_dtype=arguments.cache_dtype,
        **{"prefix_cache": True} | prefix_options(arguments),
    )
    if arguments.warmup:
        began = time.monotonic()
        print("jaxkv: compiling, so that no request waits for it ...", file=sys.stderr, flush=True)
        engine.warmup(kinds=("greedy", "sampled", "filtered"), logprobs=(MOST_LOGPROBS,))
        print(f"jaxkv: compiled in {time.monotonic() - began:.1f} s.", file=sys.stderr, flush=True)
    names = arguments.served_model_name or [arguments.model.name or str(arguments.model)]
    app = make_app(engine, opened.chat, names, opened.eos, opened.sampling, arguments.max_new_tokens)
    with engine, engine.serve():
        _listen(app, arguments)
        if arguments.prefix_disk is not None and engine.drain(arguments.grace):
            engine.prefix.flush(engine.cache)
    return 0


def check_address(host: str, port: int) -> None:
    """Raises OSError where a server cannot listen, and ValueError for a number that is no port."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, not {port}.")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"--host {host} is no address of this machine ({error.strerror}): give one that is.") from error
    for family, kind, protocol, _, address in found:  # all of them, as asyncio does
        try:
            tried = socket.socket(family, kind, protocol)
        except OSError:
            continue  # a family that this machine does not have
        with tried:
            if os.name == "posix":
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what closed a moment ago is no hindrance
            if family == socket.AF_INET6:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                tried.bind(address)
            except OSError as error:
                raise OSError(
                    f"The server cannot listen on port {port} of {host} ({error.strerror}): give another --port or "
                    "--host, or end the server that listens there."
                ) from error


def _listen(app: Any, arguments: argparse.Namespace) -> None:
    """Runs the app until Ctrl-C, and then for as long as `--grace` says while answers are under way."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            cut = asyncio.get_running_loop().call_later(arguments.grace, app.state.cut)
            await super().shutdown(sockets)
            cut.cancel()

    config = uvicorn.Config(
        app,
        host=arguments.host,
        port=arguments.port,
        timeout_graceful_shutdown=arguments.grace + SECONDS_TO_TELL,
        log_level="info",
        access_log=False,
    )
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when all is closed
        Server(config).run()


def make_app(
    engine: Any,
    text: Any,
    names: Sequence[str],
    eos: Any = None,
    sampling: dict[str, Any] | None = None,
    max_new_tokens: int | None = None,
) -> Any:
    """Makes the ASGI app of an engine that is served, its `jaxkv.text.Tokenizer` and the model's names.

    Args:
      sampling, max_new_tokens: what holds where a request says nothing; None: all tokens that there is room for.
    """
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    defaults = {key: value for key, value in (sampling or {}).items() if key != "seed"}
    template = asyncio.Lock()  # one conversation at a time is rendered
    most_tokens = max_new_tokens or engine.config.max_seq_len
    most = LEAST_LIMIT + MOST_PER_TOKEN * engine.config.max_seq_len
    most_answers = None if engine.max_waiting is None else engine.max_waiting + engine.config.max_seqs
    running: weakref.WeakSet[Any] = weakref.WeakSet()

    async def complete(kind: Any, http: Any) -> Any:
        requests: list[Any] = []
        try:
            if (given := await read_body(http, most)) is None:
                message = f"The body has more than {most:,} bytes: send less, or several requests."
                return _refusal(JSONResponse, 413, "invalid_request_error", message)
            body = _read_json(given)
            if not isinstance(body, dict):
                raise ValueError("The body must be a JSON object.")
            if (wanted := body.get("model")) not in (None, *names):
                return _refusal(JSONResponse, 404, "not_found_error", _describe_names(wanted, names))
            form = kind(body, text)
            options = read_options(body, defaults, form.default_tokens or most_tokens) | form.options()
            async with template:
                prompts = await asyncio.to_thread(form.prompts)
            check_count(prompts, options, most_answers)
            for prompt in prompts:
                requests.append(engine.submit(prompt, tokenizer=text, **{"eos": eos} | options))
                running.add(requests[-1])
        except ValueError as error:
            _cancel(requests)
            return _refusal(JSONResponse, 400, "invalid_request_error", str(error))
        except jaxkv.EngineFull as error:
            _cancel(requests)
            return _refusal(JSONResponse, 429, "rate_limit_error", str(error))
        except ClientDisconnect:  # in the middle of its body
            return PlainTextResponse("The client has gone.", 499)
        except BaseException:  # the client has gone meanwhile, say
            _cancel(requests)
            raise
        head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": wanted or names[0]}
        if body.get("stream"):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            events = stream_answer(requests, form, head | {"object": form.chunk_object}, with_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        if not await finish(requests, http):
            return PlainTextResponse("The client has gone.", 499)
        pairs = _list_samples(requests)
        if failed := [sample.error for _, sample in pairs if sample.error]:
            return _refusal(JSONResponse, 500, "server_error", failed[0])
        if any(sample.ended == "cancelled" for _, sample in pairs):
            return _refusal(JSONResponse, 503, "server_error", CLOSING)
        choices = [
            {"index": i, **form.choice(request, sample), "finish_reason": finish_reason(sample)}
            for i, (request, sample) in enumerate(pairs)
        ]
        return JSONResponse(head | {"object": form.object, "choices": choices, "usage": count_usage(requests)})

    async def fail(http: Any, error: Exception) -> Any:
        logger.error("a request has failed", exc_info=error)
        return _refusal(JSONResponse, 500, "server_error", "The server has failed; its log says why.")

    def respond(make: Any) -> Any:
        async def endpoint(http: Any) -> Any:
            return make()

        return endpoint

    models = [{"id": name, "object": "model", "owned_by": "jaxkv"} for name in names]
    routes = [
        Route("/v1/chat/completions", functools.partial(complete, ChatCompletion), methods=["POST"]),
        Route("/v1/completions", functools.partial(complete, Completion), methods=["POST"]),
        Route("/v1/models", respond(lambda: JSONResponse({"object": "list", "data": models}))),
        Route("/metrics", respond(lambda: PlainTextResponse(engine.metrics_text()))),
        Route(
            "/health",
            respond(lambda: PlainTextResponse("ok" if engine.is_served else "", 200 if engine.is_served else 503)),
        ),
    ]
    paths = ", ".join(route.path for route in routes)

    async def miss(http: Any, error: Any) -> Any:
        message = f"{http.method} {http.url.path[:100]} is not served here, but {paths}."
        return _refusal(JSONResponse, error.status_code, "not_found_error", message)

    app = Starlette(routes=routes, exception_handlers={Exception: fail, 404: miss, 405: miss})
    app.state.cut = lambda: _cancel(list(running))
    return app


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


def _read_json(given: bytes) -> Any:
    """Returns what a body says. Raises ValueError."""
    try:
        return json.loads(given)
    except RecursionError:
        raise ValueError("The body is nested too deeply: send fewer brackets.") from None
    except ValueError as error:
        raise ValueError(f"The body is no JSON: {error}.") from None


async def finish(requests: Sequence[Any], http: Any) -> bool:
    """Waits for all samples; returns False, and cancels them, if the client goes away before."""
    samples = [sample for _, sample in _list_samples(requests)]
    waits: asyncio.Future[Any] = asyncio.ensure_future(asyncio.gather(*map(_exhaust, samples)))
    gone: asyncio.Future[Any] = asyncio.ensure_future(_until_gone(http))
    try:
        await asyncio.wait({waits, gone}, return_when=asyncio.FIRST_COMPLETED)
        return waits.done()
    finally:
        for task in (waits, gone):
            task.cancel()
        _cancel(requests)  # does nothing to those that have ended
        await asyncio.gather(waits, gone, return_exceptions=True)  # or the event loop would log that they were cut


async def stream_answer(
    requests: Sequence[Any], form: ChatCompletion | Completion, head: dict[str, Any], with_usage: bool
) -> AsyncIterator[str]:
    """Yields server-sent events: the text of each sample as it becomes certain, then why it ended."""
    events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def follow(index: int, request: Any, sample: Any) -> None:
        shown = told = 0

        def put(choice: dict[str, Any], reason: str | None = None, **more: Any) -> None:
            events.put_nowait({"index": index, **choice, "finish_reason": reason, **more})

        if (first := form.first_chunk(request.prompt)) is not None:
            put(first)
        with contextlib.suppress(Exception):  # said below
            async for _ in sample:
                if len(sample.text) > shown:
                    piece, shown = sample.text[shown:], len(sample.text)
                    put(form.chunk(piece, sample, told, told := len(sample.tokens)))
        error = sample.error or (CLOSING if sample.ended == "cancelled" else None)
        put(form.chunk(sample.text[shown:], sample, told, None), finish_reason(sample), error=error)
        events.put_nowait(None)

    pairs = _list_samples(requests)
    tasks = [asyncio.ensure_future(follow(i, *pair)) for i, pair in enumerate(pairs)]
    try:
        left = len(tasks)
        while left:
            choice = await events.get()
            if choice is None:
                left -= 1
            elif error := choice.pop("error", None):
                yield _event({"error": {"message": error, "type": "server_error"}})
            else:
                yield _event(head | {"choices": [choice]})
        if with_usage:
            yield _event(head | {"choices": [], "usage": count_usage(requests)})
        yield "data: [DONE]\n\n"
    finally:  # also when the client goes away
        for task in tasks:
            task.cancel()
        _cancel(requests)


def _list_samples(requests: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Returns the pairs of a request and each of its samples, in the order of OpenAI's choices."""
    return [(request, sample) for request in requests for sample in request.samples]


def _cancel(requests: Sequence[Any]) -> None:
    for request in requests:
        request.cancel()


async def _exhaust(sample: Any) -> None:
    with contextlib.suppress(Exception):  # its error is told with the others
        async for _ in sample:
            pass


async def _until_gone(http: Any) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _describe_names(wanted: Any, names: Sequence[str]) -> str:
    return (
        f"There is no model {str(wanted)[:100]!r} here, but {' and '.join(names)}: give that as model, leave it out, "
        "or start the server with --served-model-name."
    )


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _refusal(response: Any, status: int, kind: str, message: str) -> Any:
    return response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)
