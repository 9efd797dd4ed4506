"""A server of an app in a thread, and how tests ask it: what chats of OpenAI's client and plain HTTP share."""

import asyncio
import contextlib
import functools
import socket
import threading
import time

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")
library = pytest.importorskip("httpx2", reason="OpenAI's client is not installed")

QUESTIONS = ["What is the capital of France?", "And of 東京?", "Why?", "Tell me a story."]


class Plain:
    """httpx without the certificates that each call would read for 20 ms: these servers are asked in the clear."""

    def __getattr__(self, name):
        found = getattr(library, name)
        asks = name in ("Client", "get", "options", "post", "request", "stream")
        return functools.partial(found, verify=False) if asks else found


httpx = Plain()


class Server(uvicorn.Server):
    def install_signal_handlers(self):
        """It is not in the main thread."""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def listen(app):
    """Yields the address of a server of the app."""
    port = free_port()
    server = Server(uvicorn.Config(app, port=port, log_level="critical"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)


def ask(client, question, **options):
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": question}], **options)
