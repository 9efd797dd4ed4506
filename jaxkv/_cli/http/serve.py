"""`python -m jaxkv serve`: a model behind OpenAI's chat completions and completions, over HTTP.

It stands on public names alone: `Engine.serve` takes the steps in a thread, and each HTTP request iterates over one
`Request`. docs/serving.md walks through it, for a server of your own.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import time
from typing import Any

import jaxkv
from jaxkv._cli.compiling import keep_compiled
from jaxkv._cli.http.app import make_app
from jaxkv._cli.http.openai_format import MOST_LOGPROBS
from jaxkv._cli.text import open_model, penalty_options, prefix_options

MOST_GRACE = 24 * 3600
SECONDS_TO_TELL = 5  # that clients are left, to hear of it


@keep_compiled()
def serve(arguments: argparse.Namespace) -> int:
    """Serves a model until Ctrl-C."""
    try:
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError('serve needs a web server: pip install "jaxkv[serve]".') from error
    if not 0 <= arguments.grace <= MOST_GRACE:
        raise ValueError(f"--grace must be from 0 to {MOST_GRACE} seconds, not {arguments.grace}.")
    check_address(arguments.host, arguments.port)  # now, and not once all is compiled
    opened = open_model(arguments)
    text = opened.chat  # raises, and not once all is compiled
    penalties = opened.penalties
    if penalties is None and not _goes_on_beyond(opened.model):
        penalties = {}
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
        residual_length=arguments.residual_length,
        **penalty_options(penalties),
        **{"prefix_cache": True} | prefix_options(arguments),
    )
    if arguments.warmup:
        began = time.monotonic()
        print("jaxkv: compiling, so that no request waits for it ...", file=sys.stderr, flush=True)
        engine.warmup(kinds=("greedy", "sampled", "filtered"), logprobs=(MOST_LOGPROBS,))
        print(f"jaxkv: compiled in {time.monotonic() - began:.1f} s.", file=sys.stderr, flush=True)
    names = arguments.served_model_name or [arguments.model.name or str(arguments.model)]
    app = make_app(
        engine,
        text,
        names,
        opened.eos,
        opened.sampling,
        arguments.max_new_tokens,
        penalties=penalties,
        allowed_origins=arguments.allowed_origins,
    )
    with engine, engine.serve():
        _listen(app, arguments)
        if arguments.prefix_disk is not None and engine.drain(arguments.grace):
            engine.prefix.flush(engine.cache)
    return 0


def _goes_on_beyond(model: Any) -> bool:
    """Tells whether answers may go on beyond `--max-seq-len`, which a hook, that remembers all their tokens, ends."""
    return jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=model.max_seq_len).is_endless


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
