"""What `check` raises. Inside `jit` a failure is data (`cache.failed`); these turn it into an exception on the host."""


class CacheError(RuntimeError):
    """A row's request could not be met. The row is as it was before the request."""


class OutOfBlocks(CacheError):
    """The pool had too few free blocks for a row's request."""


class SequenceTooLong(CacheError):
    """A row's request went past `max_seq_len`."""


class OutOfWindow(CacheError):
    """A row was to go back to tokens that layers with a sliding window have given back."""


for _error in (CacheError, OutOfBlocks, OutOfWindow, SequenceTooLong):
    _error.__module__ = "jaxkv"  # the name that users know, in tracebacks too
