"""Sends rows to a cache of another process, by JAX's transfer server: `send` to an address, and `receive`."""

import bisect
import collections
import concurrent.futures
import datetime
import hashlib
import json
import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.config.validation import flag, real, show
from jaxkv._files.format import parse_saved, render_header
from jaxkv._files.load_rows import put_saved
from jaxkv._files.save_rows import read_rows

logger = logging.getLogger("jaxkv.transfer")

_servers: list[Any] = []  # the server of this process, once there is one
_sent: collections.Counter[str] = collections.Counter()  # how often rows were sent to each address
_received: collections.Counter[str] = collections.Counter()


Messages = list[list[np.ndarray]]
Fetched = tuple[dict[str, Any], dict[str, np.ndarray]]
# A number, by which both sides count what one sends to the other, and what will have come.
Fetch = tuple[int, concurrent.futures.Future[Fetched]]

# From each address, in their order: what will come, or has come, and no call of `receive` has.
_fetches: collections.defaultdict[str, list[Fetch]] = collections.defaultdict(list)
_counting = threading.Lock()  # of what was sent and received, and of these

SECONDS_TO_CONNECT = 5
SECONDS_TO_FETCH = 600  # what was asked for is kept no longer
ASKED = 3  # behind the numbers of a transfer's three messages, that of the one by which it is asked for
LOOPBACK = ("127.", "localhost", "::1")


def transfer_address(host: str | None = None) -> str:
    """Returns the address at which other processes get rows from this one, and starts JAX's transfer server.

    Both sides of `send` and `receive` need one; processes tell each other theirs in their own way. They need not be of
    one JAX program, nor have called `initialize`.

    Args:
      host: the name or number of this host under which the others reach it, in the first call. Default: this machine
        alone.

    Raises:
      ImportError: this JAX has no transfer server. ValueError: it was started for this machine alone, and now others
      are to reach it.

    >>> import jaxkv
    >>> jaxkv.distributed.transfer_address() == jaxkv.distributed.transfer_address()
    True
    """
    if not _servers:
        try:
            from jax.experimental.transfer import start_transfer_server
        except ImportError as error:
            raise ImportError("This JAX has no jax.experimental.transfer: install a newer one.") from error
        own = host or "127.0.0.1"
        _servers.append(start_transfer_server(jax.local_devices()[0].client, f"{own}:0", [f"{own}:0"]))
    address: str = _servers[0].address()
    if host is not None and address.startswith(LOOPBACK) and not host.startswith(LOOPBACK):
        raise ValueError(
            f"This process sends and gets rows at {address}, for this machine alone, and is now to be reached at "
            f"{host}: call jaxkv.distributed.transfer_address({host!r}) before anything else moves rows."
        )
    return address


def offer(cache: Cache, rows: np.ndarray, to: str) -> None:
    """Offers rows to the process at an address, which gets them by `receive`. They are copied: the cache may change.

    JAX would keep what it offers for ever, so it gets the rows only once that process asks for them. Until then a
    thread keeps them, and forgets them if that process goes.
    """
    host_and_port = _read_address("to", to)
    own = transfer_address()
    connection = _servers[0].connect(to)
    _refuse_gone(to, host_and_port)  # once it is connected, JAX notices that a process goes
    messages = _render_rows(cache, rows)
    key = f"{own} {to} {_count(_sent, to)}"
    threading.Thread(target=_hand_over, args=(messages, key, connection), name="jaxkv send", daemon=True).start()


def _count(counter: collections.Counter[str], address: str) -> int:
    """Returns how often something was counted, and counts it; threads get different numbers."""
    with _counting:
        counter[address] += 1
        return counter[address] - 1


def _hand_over(messages: Messages, key: str, connection: Any) -> None:
    """Offers messages once the process at the other end of a connection asks for them."""
    try:
        _pull(connection, _name(key) + ASKED, ((1,), np.int32))
    except jax.errors.JaxRuntimeError as error:
        logger.info("rows that were sent are forgotten, for the process that was to receive them is gone: %s", error)
    else:
        _await_pulls(messages, key, SECONDS_TO_FETCH)


def offer_rows(cache: Cache, rows: np.ndarray, key: str, *, timeout: float) -> None:
    """Offers rows to whoever asks for `key` first, by `pull_rows`, for so many seconds."""
    transfer_address()
    _await_pulls(_render_rows(cache, rows), key, timeout)


def _render_rows(cache: Cache, rows: np.ndarray) -> Messages:
    """Returns rows as three messages: the next is asked for once what was before says its shape."""
    saved, tensors = read_rows(cache, rows)
    told = {"fields": render_header(saved), "tensors": [[n, x.dtype.name, list(x.shape)] for n, x in tensors.items()]}
    header = np.frombuffer(json.dumps(told).encode(), np.uint8)
    return [[np.array([len(header)], np.int32)], [header], [x for x in tensors.values() if x.size]]


def _await_pulls(messages: Messages, key: str, timeout: float) -> None:
    """Leaves messages to JAX, for so many seconds."""
    for number, arrays in enumerate(messages, _name(key)):
        _servers[0].await_pull(number, _put(arrays), timeout=_end_of(timeout))


def receive(
    cache: Cache, rows: Sequence[int] | None, source: str, *, timeout: float = 60, partial_windows: bool = False
) -> tuple[Cache, list[int]]:
    """Puts rows that another process sends into empty rows of a cache, equal to the bit.

    Each call gets what the next `send(cache, rows, to=address)` there sends to this process's `transfer_address`, or
    waits for it. The caches may differ as for `send`, in their meshes and block sizes too.

    Args:
      rows: the rows to put them into, one for each that was sent; None: their own numbers in the order in which they
        were sent, if all of these are empty, else the first empty rows.
      source: the `transfer_address` of the other process.
      timeout: seconds.
      partial_windows: as for `load`, for rows with windows in larger blocks.

    Returns:
      `(cache, rows)`.

    Raises:
      TimeoutError: nothing has come in time. ConnectionError: the other process is gone. CacheFileError, a ValueError:
      layers, dtypes or lengths that the cache cannot hold, too few blocks; ValueError: rows that are none, or not
      empty. What was sent stays for another call then.

    >>> import jax.numpy as jnp, jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache, kv = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), jnp.ones((1, 2, 20, 2, 8))
    >>> address = jaxkv.distributed.transfer_address()  # here, of one process in both roles
    >>> jaxkv.send(jaxkv.append(cache, kv, kv, [20, 5]), [1], to=address)
    >>> cache, rows = jaxkv.receive(cache, None, address)
    >>> rows, cache.lengths.tolist()
    ([0], [5, 0])
    """
    check_cache(cache)
    host_and_port = _read_address("source", source)
    timeout = real("timeout", timeout, least=0)
    partial_windows = flag("partial_windows", partial_windows)
    fetch, is_over = _take_fetch(source, host_and_port), False
    try:
        try:
            told, tensors = fetch[1].result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"The process at {source} has sent nothing for {timeout:g} s.") from None
        except jax.errors.JaxRuntimeError as error:
            is_over = True
            raise ConnectionError(
                f"The process at {source} is gone, or was before it had sent all: compute these rows here, or receive "
                "them from another."
            ) from error
        saved = parse_saved(source, told["fields"], tensors)  # errors name a file there
        result = put_saved(source, saved, tensors, None, cache, rows, partial_windows)
        is_over = True
        return result
    finally:
        if not is_over:  # it stays for another call
            with _counting:
                bisect.insort(_fetches[source], fetch, key=lambda own: own[0])


def _read_address(name: str, address: Any) -> tuple[str, int]:
    """Returns host and port of an address. Raises ValueError."""
    host, found, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and found and port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"{name} must be the transfer_address of another process, host:port, not {show(address)}.")
    return host.strip("[]"), int(port)


def _refuse_gone(address: str, host_and_port: tuple[str, int]) -> None:
    """Raises ConnectionError if nobody listens at an address: JAX waits for ever, and keeps for ever what is sent."""
    try:
        socket.create_connection(host_and_port, timeout=SECONDS_TO_CONNECT).close()
    except ConnectionRefusedError as error:
        raise ConnectionError(
            f"The process at {address} is gone: compute these rows here, or send them to another or receive them from "
            "it."
        ) from error
    except OSError:  # slow, perhaps
        pass


def _put(arrays: list[np.ndarray]) -> Any:
    """Returns arrays on the device by which they leave."""
    return jax.device_put(arrays, jax.local_devices()[0])


def _name(key: str) -> int:
    """Returns the first of the numbers by which both sides know the arrays of a transfer."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest()) * 4


def _take_fetch(source: str, host_and_port: tuple[str, int]) -> Fetch:
    """Returns what will have been sent next and no other call has. A thread waits for it: JAX waits for ever for what
    is not offered, and for a process that is not there; and what has come once does not come again, so it stays until
    it is used. Raises ConnectionError if nobody listens there."""
    with _counting:
        if waiting := _fetches[source]:
            return waiting.pop(0)
    _refuse_gone(source, host_and_port)
    number, found = _count(_received, source), concurrent.futures.Future[Fetched]()

    def fetch() -> None:
        try:
            key = f"{source} {transfer_address()} {number}"
            _servers[0].await_pull(_name(key) + ASKED, _put([np.ones(1, np.int32)]))
            found.set_result(pull_rows(source, key))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=fetch, name="jaxkv receive", daemon=True).start()
    return number, found


def _end_of(seconds: float | None) -> datetime.datetime | None:
    return None if seconds is None else datetime.datetime.now() + datetime.timedelta(seconds=seconds)


def pull_rows(source: str, key: str, *, timeout: float | None = None) -> Fetched:
    """Returns what a process offers by a key: the header of a saved cache, and its tensors.

    Waits for so many seconds; None: for ever. Raises JaxRuntimeError if that process goes, or has not offered it then.
    """
    transfer_address()
    end = _end_of(timeout)
    name, connection = _name(key), _servers[0].connect(source)
    (size,) = _pull(connection, name, ((1,), np.int32), end=end)
    (header,) = _pull(connection, name + 1, ((int(size[0]),), np.uint8), end=end)
    told = json.loads(header.tobytes())
    shapes = {n: (tuple(shape), jnp.dtype(dtype)) for n, dtype, shape in told["tensors"]}
    arrays = iter(_pull(connection, name + 2, *(own for own in shapes.values() if all(own[0])), end=end))
    return told, {n: next(arrays) if all(x[0]) else np.zeros(*x) for n, x in shapes.items()}


def _pull(
    connection: Any, number: int, *specs: tuple[tuple[int, ...], Any], end: datetime.datetime | None = None
) -> list[np.ndarray]:
    """Waits for a message from another process."""
    place = SingleDeviceSharding(jax.local_devices()[0])
    wanted = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in specs]
    return [np.asarray(x) for x in connection.pull(number, wanted, timeout=end)]
