"""Files that appear whole or not at all."""

import contextlib
import itertools
import os
import pathlib
import re
import socket
from collections.abc import Iterator
from typing import BinaryIO

_counter = itertools.count()


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends, and never before.

    It is written beside `path`, in the same file system, brought to the disk, and renamed. Whatever ends the block or
    the process before that, `path` is what it was. An exception removes the unfinished file; what a killed process
    left is removed by the next call for the same path on the same machine.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "x"
    >>> with replacing(path) as file:
    ...     _ = file.write(b"new"), path.exists()
    >>> path.read_bytes()
    b'new'
    """
    path = pathlib.Path(os.path.realpath(path))  # a link stays a link
    _remove_leftovers(path)
    unfinished = path.with_name(f"{_prefix(path)}{os.getpid()}.{next(_counter)}.tmp")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _prefix(path: pathlib.Path) -> str:
    return f".{path.name}.{socket.gethostname()}."


def _remove_leftovers(path: pathlib.Path) -> None:
    """Unfinished files whose process has ended. Another machine's are left alone: its processes cannot be seen here."""
    if os.name != "posix":  # elsewhere there is no way to ask for a process without touching it
        return
    name = re.compile(re.escape(_prefix(path)) + r"(\d+)\.\d+\.tmp")
    for file in path.parent.glob(".*.tmp"):
        found = name.fullmatch(file.name)
        if found and not _is_running(int(found[1])):
            file.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, and is another user's
    return True


def _sync_folder(folder: pathlib.Path) -> None:
    """Bring the new name itself to the disk, where folders can be synced."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
