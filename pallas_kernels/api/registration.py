"""Kernels of one's own beside those of this package."""

from types import ModuleType
from typing import Any

from pallas_kernels.api.attention_dispatch import forget_choices
from pallas_kernels.api.backend import Backend
from pallas_kernels.api.backends import BUILT_IN, IMPLEMENTATIONS, REGISTERED, read_platform
from pallas_kernels.api.show import show

WANTED = tuple(Backend.__annotations__)


def register_backend(name: str, module: Backend | ModuleType, platform: str | None = None) -> None:
    """Adds a backend of one's own: `implementation=name` runs it, in `jaxkv.attention` too.

    Call it before the first step: programs that are compiled already go on with what they chose.

    Args:
      name: its name. A name that was registered before is replaced.
      module: a module, or any object, with the names of `pallas_kernels.Backend`: `FORMATS`, `OPTIONS`,
        `READS_LATENT_ROWS`, `READS_SHARED_ONCE`, `unsupported`, `paged_attention`, `write_kv` and `write_and_attend`,
        the last two None if it has none. Its attribute `mixers`, if there is one, computes what layers with states do:
        `pallas_kernels/api/mixer_dispatch.py` says how.
      platform: "cpu", "cuda" or "tpu": what is not told otherwise tries this backend first there, then the package's
        kernels, then XLA. None: it runs only where it is named.

    Raises:
      ValueError: the name is one of this package's, the module lacks a name, or there is no such platform.

    >>> import types
    >>> from pallas_kernels import paged_attention, reference, register_backend, testing
    >>> mine = types.SimpleNamespace(
    ...     FORMATS=(), OPTIONS=(), READS_LATENT_ROWS=False, READS_SHARED_ONCE=False, write_kv=None,
    ...     write_and_attend=None, unsupported=lambda op, call: None, paged_attention=reference.attend,
    ... )
    >>> register_backend("mine", mine)
    >>> case = testing.Case(lengths=(5, 17), new=(1, 1))
    >>> inputs = testing.make_inputs(case)
    >>> out = paged_attention(*inputs, implementation="mine")
    >>> testing.assert_close(out, testing.expected(case, inputs))
    """
    if not isinstance(name, str) or not name.isidentifier() or name in BUILT_IN:
        raise ValueError(f"name must be a name of its own, none of {', '.join(BUILT_IN)}, not {show(name)}.")
    if missing := [wanted for wanted in WANTED if not hasattr(module, wanted)]:
        raise ValueError(
            f"A backend must have {', '.join(WANTED)}, but {getattr(module, '__name__', module)!r} has no "
            f"{' and no '.join(missing)}: see pallas_kernels.Backend, and docs/kernels.md."
        )
    home = None if platform is None else read_platform(platform)
    backend: Any = module
    IMPLEMENTATIONS[name], REGISTERED[name] = home, backend
    forget_choices()
