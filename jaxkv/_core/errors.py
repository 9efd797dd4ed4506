"""What `check` raises: inside `jit` a failure is data (`cache.failed`); these turn it into an exception on the host.
And what `load` raises about files."""


class CacheError(RuntimeError):
    """A row's request could not be met. The row is as it was before the request."""


class OutOfBlocks(CacheError):
    """The pool had too few free blocks for a row's request."""


class SequenceTooLong(CacheError):
    """A row's request went past `max_seq_len`."""


class OutOfWindow(CacheError):
    """A row was to go back to tokens that layers with a sliding window have given back."""


class CacheFileError(ValueError):
    """A saved cache that cannot be used here: another model, other layers, a newer version, or too little room."""


class DamagedFile(CacheFileError):
    """A file that is not what was written: truncated, or changed afterwards."""


for _error in (CacheError, OutOfBlocks, OutOfWindow, SequenceTooLong, CacheFileError, DamagedFile):
    _error.__module__ = "jaxkv"  # the name that users know, in tracebacks too
