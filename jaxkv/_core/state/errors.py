"""Exceptions. `check` turns failures, which inside `jit` are data (`cache.failed`), into exceptions on the host; `load`
raises those about files."""

from typing import Any


class CacheError(RuntimeError):
    """A row's request could not be met. The row is unchanged.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> cache = jaxkv.extend(cache, [3, 65])
    >>> try:
    ...     jaxkv.check(cache)
    ... except jaxkv.CacheError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    The limit of max_seq_len = 64 tokens would be exceeded by row 1 (it holds 0). ...
    """


class OutOfBlocks(CacheError):
    """The pool had too few free blocks for a row's request.

    Attributes:
      request: the request that ended with this as its `error`, if an engine's `step` raised it.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> cache = jaxkv.extend(cache, [40, 40])
    >>> try:
    ...     jaxkv.check(cache)
    ... except jaxkv.OutOfBlocks as error:
    ...     print(error)  # doctest: +ELLIPSIS
    Row 1 ...
    """

    request: Any = None


class SequenceTooLong(CacheError):
    """A row's request went past `max_seq_len`.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> cache = jaxkv.extend(cache, [65, 3])
    >>> try:
    ...     jaxkv.check(cache)
    ... except jaxkv.SequenceTooLong as error:
    ...     print(error)  # doctest: +ELLIPSIS
    The limit of max_seq_len = 64 tokens would be exceeded by row 0 (it holds 0). ...
    """


class OutOfWindow(CacheError):
    """A row should roll back to tokens that layers with a sliding window have freed.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=1, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, windows=8, block_size=8))
    >>> cache = jaxkv.extend(jaxkv.extend(cache, [40]), [1])
    >>> try:
    ...     jaxkv.check(jaxkv.truncate(cache, [3]))
    ... except jaxkv.OutOfWindow as error:
    ...     print(error)  # doctest: +ELLIPSIS
    Truncating row 0 (41 tokens) to 3 tokens goes back to tokens that layers that keep a window of 8 tokens ...
    """


class CacheFileError(ValueError):
    """A saved cache cannot be used here: another model, other layers, a newer version, or too few rows or blocks.

    >>> import jaxkv, tempfile
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> path = f"{tempfile.mkdtemp()}/chat.safetensors"
    >>> jaxkv.save(path, cache, model="llama")
    >>> try:
    ...     jaxkv.load(path, model="gemma")
    ... except jaxkv.CacheFileError as error:
    ...     print("gemma" in str(error))
    True
    """


class DamagedFile(CacheFileError):
    """A file was truncated or changed after it was written.

    >>> import jaxkv, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "chat.safetensors"
    >>> _ = path.write_bytes(b"half a file")
    >>> try:
    ...     jaxkv.load(path)
    ... except jaxkv.DamagedFile as error:
    ...     print(type(error).__name__)
    DamagedFile
    """


for _error in (CacheError, OutOfBlocks, OutOfWindow, SequenceTooLong, CacheFileError, DamagedFile):
    _error.__module__ = "jaxkv"  # the public name, in tracebacks too
