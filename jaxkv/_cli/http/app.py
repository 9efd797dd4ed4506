"""The ASGI app of an engine that is served: its routes, and what each answers."""

import asyncio
import collections
import functools
import inspect
import logging
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import jaxkv
from jaxkv._cli.http.answers import CLOSING, cancel, finish, list_samples, stream_answer, write_answer
from jaxkv._cli.http.body import Refused, receive, write_json
from jaxkv._cli.http.openai_format import (
    ChatCompletion,
    Completion,
    check_context,
    check_count,
    check_told,
    count_usage,
    read_options,
)
from jaxkv._cli.http.penalties import read_penalties
from jaxkv._cli.http.token_format import detokenize, tokenize
from jaxkv._engine.requests.submission import read_eos

logger = logging.getLogger("jaxkv.serve")

# The limit of a body's bytes: so many, and so many more for each token of max_seq_len. A tokenizer takes a second for
# each mebibyte of text.
LEAST_LIMIT, MOST_PER_TOKEN = 1 << 20, 64
LONG_BODY = 1 << 16


def make_app(
    engine: Any,
    text: Any,
    names: Sequence[str],
    eos: Any = None,
    sampling: dict[str, Any] | None = None,
    max_new_tokens: int | None = None,
    *,
    penalties: dict[str, Any] | None = None,
    allowed_origins: Sequence[str] = (),
) -> Any:
    """Makes the ASGI app of an engine that is served, its `jaxkv.text.Tokenizer` and the model's names.

    Args:
      sampling, max_new_tokens: what holds where a request says nothing; None: all tokens that there is room for.
      penalties: what `jaxkv.hooks.penalties` is given where a request says nothing, of an engine whose `logits_hook` is
        `jaxkv.hooks.penalize`; None: it has no such hook.
      allowed_origins: those whose pages may ask from a browser; `"*"`: all. None by default: unlike vLLM's, this server
        listens to its own machine alone, where any page that a user opens would come in.
    """
    from starlette.applications import Starlette
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    defaults = {key: value for key, value in (sampling or {}).items() if key != "seed"}
    # Of each kind of texts one is read at a time, and one long one beside it: there are few threads for them.
    turns: dict[Any, asyncio.Lock] = collections.defaultdict(asyncio.Lock)
    max_model_len = engine.config.max_seq_len
    most_tokens = max_new_tokens or max_model_len
    most = LEAST_LIMIT + MOST_PER_TOKEN * max_model_len
    most_answers = None if engine.max_waiting is None else engine.max_waiting + engine.config.max_seqs
    vocab_size = max(engine.vocab_size or 0, text.vocab_size)
    eos_ids = read_eos(eos, engine.eos_ids)
    running: weakref.WeakSet[Any] = weakref.WeakSet()

    def refuse(error: BaseException) -> Any:
        """Returns what a client is told of an error that is its own, or no error at all; None of others."""
        if isinstance(error, Refused):
            return _refusal(JSONResponse, error.status, error.kind, str(error))
        if isinstance(error, ValueError):
            return _refusal(JSONResponse, 400, "invalid_request_error", str(error))
        if isinstance(error, jaxkv.EngineFull):
            return _refusal(JSONResponse, 429, "rate_limit_error", str(error))
        if isinstance(error, ClientDisconnect):  # in the middle of its body, or before its turn
            return PlainTextResponse("The client has gone.", 499)
        return None

    async def take_turn(kind: Any, size: int, http: Any, work: Any) -> Any:
        """Returns what work does in a thread with the texts of a body, unless its client has gone before its turn."""
        await http.is_disconnected()  # uvicorn pauses behind a long body: it reads on, and hears of it by the next call
        async with turns[kind, size > LONG_BODY]:
            if await http.is_disconnected():
                raise ClientDisconnect
            return await asyncio.to_thread(work)

    async def complete(kind: Any, http: Any) -> Any:
        requests: list[Any] = []
        try:
            body, size = await receive(http, most, names)
            form = kind(body, text)
            options = read_options(body, defaults, form.default_tokens or most_tokens) | form.options()
            options |= read_penalties(body, penalties, options, eos_ids, vocab_size)
            prompts = await take_turn(kind, size, http, form.prompts)
            if not engine.config.is_endless:  # else rows of windows alone go on beyond it
                check_context(prompts, body, max_model_len)
            check_count(prompts, options, most_answers)
            check_told(prompts, options, form.told_per_token)
            for prompt in prompts:
                requests.append(engine.submit(prompt, tokenizer=text, **{"eos": eos} | options))
                running.add(requests[-1])
        except BaseException as error:  # the client has gone meanwhile, say
            cancel(requests)
            if (refusal := refuse(error)) is None:
                raise
            return refusal
        name = body.get("model") or names[0]
        head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        if body.get("stream"):
            head |= {"object": form.chunk_object}
            events = stream_answer(requests, form, head, body.get("stream_options") or {})
            return StreamingResponse(events, media_type="text/event-stream")
        if not await finish(requests, http):
            return PlainTextResponse("The client has gone.", 499)
        pairs = list_samples(requests)
        if failed := [sample.error for _, sample in pairs if sample.error]:
            return _refusal(JSONResponse, 500, "server_error", failed[0])
        if any(sample.ended == "cancelled" for _, sample in pairs):
            return _refusal(JSONResponse, 503, "server_error", CLOSING)
        head |= {"object": form.object, "usage": count_usage(requests)}
        write = functools.partial(write_answer, requests, form, head)
        if not {"logprobs", "prompt_logprobs"} & options.keys():
            return Response(write(), media_type="application/json")
        async with turns[write_answer]:  # of thousands of tokens that takes a second
            return Response(await asyncio.to_thread(write), media_type="application/json")

    async def convert(read: Any, number: int, http: Any) -> Any:
        """Answers by what a function reads of a text or of tokens, in a thread: a mebibyte takes a second."""
        try:
            body, size = await receive(http, most, names)
            answer = await take_turn(read, size, http, lambda: write_json(read(body, text, number)))
        except Exception as error:
            if (refusal := refuse(error)) is None:
                raise
            return refusal
        return Response(answer, media_type="application/json")

    async def fail(http: Any, error: Exception) -> Any:
        logger.error("a request has failed", exc_info=error)
        return _refusal(JSONResponse, 500, "server_error", "The server has failed; its log says why.")

    def respond(make: Any) -> Any:
        async def endpoint(http: Any) -> Any:
            return make()

        return endpoint

    async def measure(http: Any) -> Any:
        return PlainTextResponse(await asyncio.to_thread(engine.metrics_text))  # which waits for the step under way

    def check_health() -> Any:
        return PlainTextResponse("ok" if engine.is_served else "", 200 if engine.is_served else 503)

    facts = {"object": "model", "created": int(time.time()), "owned_by": "jaxkv"}
    models = [{"id": name, **facts, "max_model_len": max_model_len} for name in names]
    routes = [
        Route("/v1/chat/completions", functools.partial(complete, ChatCompletion), methods=["POST"]),
        Route("/v1/completions", functools.partial(complete, Completion), methods=["POST"]),
        Route("/v1/models", respond(lambda: JSONResponse({"object": "list", "data": models}))),
        Route("/tokenize", functools.partial(convert, tokenize, max_model_len), methods=["POST"]),
        Route("/detokenize", functools.partial(convert, detokenize, vocab_size), methods=["POST"]),
        Route("/version", respond(lambda: JSONResponse({"version": jaxkv.__version__}))),
        Route("/metrics", measure),
        Route("/health", respond(check_health)),
        Route("/ping", respond(check_health), methods=["GET", "POST"]),
    ]
    paths = ", ".join(route.path for route in routes)

    async def miss(http: Any, error: Any) -> Any:
        message = f"{http.method} {http.url.path[:100]} is not served here, but {paths}."
        return _refusal(JSONResponse, 404, "not_found_error", message)

    async def name_methods(http: Any, error: Any) -> Any:
        allowed = ", ".join(sorted(error.headers["Allow"].split(", ")))
        message = f"{http.method} is not for {http.url.path[:100]}, but {allowed}."
        response = _refusal(JSONResponse, 405, "invalid_request_error", message)
        response.headers["Allow"] = allowed
        return response

    app = Starlette(routes=routes, exception_handlers={Exception: fail, 404: miss, 405: name_methods})
    app.state.cut = lambda: cancel(list(running))
    if not allowed_origins:
        return app
    options: dict[str, Any] = {"allow_methods": ("GET", "POST"), "allow_headers": ("*",)}
    if "allow_private_network" in inspect.signature(CORSMiddleware).parameters:  # else older ones do not look for it
        options["allow_private_network"] = True
    # Around all else, so that a page is told of failures too.
    allowing: Any = CORSMiddleware(app, allowed_origins, **options)
    allowing.state = app.state
    return allowing


def _refusal(response: Any, status: int, kind: str, message: str) -> Any:
    return response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)
