"""The ASGI app of an engine that is served: its routes, and what each answers."""

import asyncio
import functools
import logging
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import jaxkv
from jaxkv._cli.http.answers import CLOSING, cancel, finish, list_samples, stream_answer
from jaxkv._cli.http.body import read_body, read_json
from jaxkv._cli.http.openai_format import (
    ChatCompletion,
    Completion,
    check_count,
    count_usage,
    describe_end,
    read_options,
)

logger = logging.getLogger("jaxkv.serve")

# The limit of a body's bytes: so many, and so many more for each token of max_seq_len. A tokenizer holds up all other
# requests while it reads a text.
LEAST_LIMIT, MOST_PER_TOKEN = 1 << 20, 64


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
            body = read_json(given)
            if not isinstance(body, dict):
                raise ValueError("The body must be a JSON object.")
            if (wanted := body.get("model")) not in (None, "", *names):
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
            cancel(requests)
            return _refusal(JSONResponse, 400, "invalid_request_error", str(error))
        except jaxkv.EngineFull as error:
            cancel(requests)
            return _refusal(JSONResponse, 429, "rate_limit_error", str(error))
        except ClientDisconnect:  # in the middle of its body
            return PlainTextResponse("The client has gone.", 499)
        except BaseException:  # the client has gone meanwhile, say
            cancel(requests)
            raise
        head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": wanted or names[0]}
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
        choices = []
        for i, (request, sample) in enumerate(pairs):
            choices.append({"index": i, **form.choice(request, sample), **describe_end(sample)})
            await asyncio.sleep(0)  # that of a long prompt with log-probabilities takes a while
        return JSONResponse(head | {"object": form.object, "choices": choices, "usage": count_usage(requests)})

    async def fail(http: Any, error: Exception) -> Any:
        logger.error("a request has failed", exc_info=error)
        return _refusal(JSONResponse, 500, "server_error", "The server has failed; its log says why.")

    def respond(make: Any) -> Any:
        async def endpoint(http: Any) -> Any:
            return make()

        return endpoint

    async def measure(http: Any) -> Any:
        return PlainTextResponse(await asyncio.to_thread(engine.metrics_text))  # which waits for the step under way

    facts = {"object": "model", "created": int(time.time()), "owned_by": "jaxkv"}
    models = [{"id": name, **facts, "max_model_len": engine.config.max_seq_len} for name in names]
    routes = [
        Route("/v1/chat/completions", functools.partial(complete, ChatCompletion), methods=["POST"]),
        Route("/v1/completions", functools.partial(complete, Completion), methods=["POST"]),
        Route("/v1/models", respond(lambda: JSONResponse({"object": "list", "data": models}))),
        Route("/metrics", measure),
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
    app.state.cut = lambda: cancel(list(running))
    return app


def _describe_names(wanted: Any, names: Sequence[str]) -> str:
    return (
        f"There is no model {str(wanted)[:100]!r} here, but {' and '.join(names)}: give that as model, leave it out, "
        "or start the server with --served-model-name."
    )


def _refusal(response: Any, status: int, kind: str, message: str) -> Any:
    return response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)
