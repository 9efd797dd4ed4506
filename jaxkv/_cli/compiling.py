"""Compiled programs are kept between calls, and a terminal says while it waits for one."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

import jax

from jaxkv._files.packaged_model import cache_folder

NOTICE = " compiling ..."


@contextlib.contextmanager
def keep_compiled() -> Iterator[None]:
    """Keeps what is compiled inside in the user's cache folder, for the next call; unless JAX is told of another one,
    as by JAX_COMPILATION_CACHE_DIR."""
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def announce[T](items: Iterable[T], stream: TextIO | None = None) -> Iterator[T]:
    """Yields the items; a terminal shows that programs are compiled until the first one comes.

    Args:
      stream: what shows it; default: stderr. The line that stdout has begun goes on where it was.
    """
    stream = sys.stderr if stream is None else stream
    is_shown = stream.isatty()
    if is_shown:
        sys.stdout.flush()
        stream.write(NOTICE)
        stream.flush()
    try:
        for item in items:
            if is_shown:
                is_shown = _erase(stream)
            yield item
    finally:
        if is_shown:
            _erase(stream)


def _erase(stream: TextIO) -> bool:
    """Takes the notice back; returns that it is not shown any more."""
    stream.write("\b" * len(NOTICE) + "\x1b[K")
    stream.flush()
    return False
