"""Computes prompts for engines in other processes, and sends them their rows: what `Engine.serve_prefill` runs."""

import contextlib
import functools
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxkv._core.blocks.restore import layer_facts
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._engine.hosts.json_connection import BEAT, JsonConnection, read_address
from jaxkv._engine.requests.entries import parse_salt
from jaxkv._engine.requests.request import Request
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._engine.runner.engine_core import EngineCore
from jaxkv._tiers.remote import offer_rows, transfer_address

logger = logging.getLogger("jaxkv.engine")
VERSION = 1  # of the messages
OFFERED = 120  # seconds for which a row is kept for whoever asked for it
ANYWHERE = ("0.0.0.0", "::", "*")


class PrefillServer:
    """Listens at an address for engines that decode, each a connection with a thread of its own.

    A prompt is submitted to the engine here as a request of one token. When it is computed, its row is offered to JAX's
    transfer server, from which the other engine gets it, and is free.

    Args:
      submit: the engine's. cores: its cores. model: a fingerprint of its model.
    """

    def __init__(
        self,
        submit: Callable[..., Request],
        cores: list[EngineCore],
        config: CacheConfig,
        model: str | None,
        address: str,
    ):
        host, port = read_address("address", address)
        if host in ANYWHERE:
            raise ValueError(
                f"address must name this host as the others reach it, since they get rows from there, not {host}."
            )
        if any(core.on_computed is not None for core in cores):
            raise RuntimeError("This engine computes prompts for others already: any number of them connects to one.")
        self._submit, self._cores = submit, cores
        self._hello = {
            "version": VERSION, "model": model, "layers": describe_layers(config), "longest": config.max_seq_len,
            "rows": config.max_seqs, "transfer": transfer_address(host),
        }  # fmt: skip
        self._keys = (f"{secrets.token_hex(8)} {n}" for n in itertools.count())
        self._lock = threading.Lock()
        self._askers: dict[Request, tuple[JsonConnection, int]] = {}  # who asked for each, and by which number
        self._connections: set[JsonConnection] = set()
        self._is_closed = False
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.settimeout(BEAT)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        for core in cores:
            core.on_computed = functools.partial(self._send_row, core)
        threading.Thread(target=self._accept, name="jaxkv prefill", daemon=True).start()

    def close(self) -> None:
        """Ends all connections, and forgets what was asked for."""
        self._is_closed = True
        for core in self._cores:
            core.on_computed = None
        with contextlib.suppress(OSError):  # so that `accept` wakes
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        while True:
            self._tell_failures()
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            connection = JsonConnection(accepted)
            self._connections.add(connection)
            if self._is_closed:  # meanwhile
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), name="jaxkv prefill", daemon=True).start()

    def _serve(self, connection: JsonConnection) -> None:
        """Takes the messages of a connection until it ends; what is not computed then is cancelled."""
        try:
            connection.receive()
            connection.send(self._hello)
            while True:
                self._take(connection, connection.receive())
        except ConnectionError:
            pass
        except (KeyError, TypeError, AttributeError) as error:
            logger.warning("a process asks for prefill in other words: %r", error)
        finally:
            connection.close()
            self._connections.discard(connection)
            for request in [request for request, (other, _) in list(self._askers.items()) if other is connection]:
                request.cancel()

    def _take(self, connection: JsonConnection, message: dict[str, Any]) -> None:
        """Submits a prompt, or cancels the one of a number."""
        number = message["number"]
        if "prompt" not in message:
            for request in [request for request, asker in list(self._askers.items()) if asker == (connection, number)]:
                request.cancel()
            return
        with self._lock:  # it may be computed before it is known who asked
            try:
                request = self._submit(
                    message["prompt"],
                    1,
                    salt=parse_salt(*message["salt"]),
                    adapter=message["adapter"],
                    priority=message["priority"],
                    keep_prefix=message["keep"],
                    on_token=self._end,
                )
            except (ValueError, RuntimeError) as error:
                connection.send({"number": number, "error": str(error)})
            else:
                self._askers[request] = connection, number

    def _send_row(self, core: EngineCore, sequence: Sequence) -> None:
        """Offers the row of a prompt to whoever asked for it. It is copied, so it may be freed."""
        connection, number = self._find(sequence.request)
        if connection is None or connection.is_closed:
            return
        key = next(self._keys)
        try:
            offer_rows(core.cache_manager.cache, np.array([sequence.row]), key, timeout=OFFERED)
        except Exception as error:  # that engine computes it itself
            logger.exception("a row cannot be sent")
            connection.send({"number": number, "error": str(error)})
        else:
            connection.send({"number": number, "key": key})

    def _tell_failures(self) -> None:
        """Says of prompts that ended with a failed step that they will not be computed: no callback hears of it."""
        for request in [request for request in list(self._askers) if request.ended == "error"]:
            self._end(request, None)

    def _end(self, request: Request, token: int | None) -> None:
        """Says that a prompt will not be computed, if it has ended without."""
        if token is None:
            connection, number = self._find(request)
            if connection is not None:
                connection.send({"number": number, "error": request.error or request.ended})

    def _find(self, request: Request) -> tuple[JsonConnection | None, int]:
        """Returns who asked for a request, once."""
        with self._lock:
            return self._askers.pop(request, (None, 0))


def describe_layers(config: CacheConfig) -> list[str]:
    """Returns what each layer stores, in words that must be equal where rows come from and go to."""
    return [
        str(sorted((layer_facts(config, i) | {"revision": config.kind(i).revision}).items()))
        for i in range(len(config.layers))
    ]
