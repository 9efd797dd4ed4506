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

_FIRST = secrets.randbits(62)  # unlike another process's, which may have had the same number
_counter = itertools.count(_FIRST)


@contextlib.contextmanager
def replacing(path: str | os.PathLike, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends, and never before.

    It is written beside `path`, in the same file system, brought to the disk, and renamed. Whatever ends the block or
    the process before that, `path` is what it was. An exception removes the unfinished file; what a killed process
    left is removed by the next call for the same path on the same machine.

    Args:
      durable: bring it to the disk first. Without, a power failure may leave a file of that name that is damaged, and
        what killed processes left stays until `remove_leftovers`.

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
    """Remove unfinished files, of one name or of all, whose process has ended. Another machine's are left alone: its
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
    """Whether the process is there that writes file `number`. One that ended may have had the number that is ours."""
    if process == os.getpid():
        return _FIRST <= number < _FIRST + 2**32
    try:
        os.kill(process, 0)  # signal 0 only asks
    except (ProcessLookupError, OverflowError):  # no process has such a number
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
