"""Files that appear whole or not at all."""

import contextlib
import errno
import itertools
import os
import pathlib
import re
import secrets
import socket
from collections.abc import Iterator
from typing import BinaryIO

_FIRST = secrets.randbits(62)  # differs from that of an earlier process with the same id
_counter = itertools.count(_FIRST)


@contextlib.contextmanager
def replacing(path: str | os.PathLike, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yields a file to write that replaces `path` when the block ends, and never before.

    The file is written beside `path`, in the same file system, flushed to the disk, and renamed. If the block or the
    process ends earlier, `path` is unchanged. An exception removes the unfinished file. The next call for the same path
    on the same machine removes what a killed process left.

    Args:
      durable: flush the file to the disk first. Without this, a power failure may leave a damaged file of that name,
        and files left by killed processes stay until `remove_leftovers`.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "x"
    >>> with replacing(path) as file:
    ...     _ = file.write(b"new"), path.exists()
    >>> path.read_bytes()
    b'new'
    """
    path = pathlib.Path(os.path.realpath(path))  # a link stays a link
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"There is no folder {path.parent} to write a file into", str(path))
    if durable:
        remove_leftovers(path.parent, path.name)
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{next(_counter)}.tmp")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def remove_leftovers(folder: pathlib.Path, name: str | None = None) -> None:
    """Removes unfinished files, of one name or of all, whose process has ended. Files of another machine stay: its
    processes cannot be seen here."""
    if os.name != "posix":  # elsewhere there is no way to ask for a process without touching it
        return
    of_whom = r"\..+\." if name is None else re.escape(f".{name}.")
    pattern = re.compile(of_whom + re.escape(socket.gethostname()) + r"\.(\d+)\.(\d+)\.tmp")
    for file in folder.glob(".*.tmp"):
        found = pattern.fullmatch(file.name)
        if found and not _is_running(int(found[1]), int(found[2])):
            with contextlib.suppress(OSError):  # another user's
                file.unlink(missing_ok=True)


def _is_running(process: int, number: int) -> bool:
    """Tells whether the process that writes file `number` runs. An ended process may have had our process id."""
    if process == os.getpid():
        return _FIRST <= number < _FIRST + 2**32
    try:
        os.kill(process, 0)  # signal 0 only asks
    except (ProcessLookupError, OverflowError):  # no process has such a number
        return False
    except PermissionError:
        pass  # the process runs, and belongs to another user
    return True


def _sync_folder(folder: pathlib.Path) -> None:
    """Flushes the new name itself to the disk, where folders can be synced."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
