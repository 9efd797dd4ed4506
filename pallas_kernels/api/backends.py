"""Which backend runs an op, and why nothing faster does: see `backend` for what one provides."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax

from pallas_kernels.api.backend import Backend
from pallas_kernels.api.show import show
from pallas_kernels.common.batch import Call
from pallas_kernels.common.platforms import current_platform, read_name

# Implementation -> the platform that it runs on; None: any. `register_backend` adds to it.
IMPLEMENTATIONS: dict[str, str | None] = {"xla": None, "reference": None, "gpu": "cuda", "tpu": "tpu"}
BUILT_IN = tuple(IMPLEMENTATIONS)
REGISTERED: dict[str, Backend] = {}  # those that are no modules of this package
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Choice(NamedTuple):
    """What runs, and why nothing faster does.

    >>> from pallas_kernels import explain, testing
    >>> q, kv, *tables = testing.make_inputs(testing.Case(lengths=(5, 17), new=(1, 1)))
    >>> names = dict(zip(("tables", "lengths", "new"), tables))
    >>> explain(q=q, kv=kv, **names, implementation="xla").implementation
    'xla'
    """

    implementation: str
    reason: str


def choose(op: str, implementation: str | None, platform: str | None, call: Call) -> Choice:
    """Returns what `explain` says of a call of an op."""
    return choose_among(lambda name: unsupported(name, op, call), implementation, platform)


def run_chosen(bind: Callable[[str], Callable[..., Any]], choice: str, insists: bool, *arrays: Any) -> Any:
    """Returns what `bind(choice)` makes of arrays. Unless the caller `insists`, the program may still be lowered for
    another platform than the one guessed: XLA runs there."""
    platform = IMPLEMENTATIONS[choice]
    if insists or platform is None:
        return bind(choice)(*arrays)
    return jax.lax.platform_dependent(*arrays, default=bind("xla"), **{platform: bind(choice)})


def choose_among(find_refusal: Callable[[str], str | None], implementation: str | None, platform: str | None) -> Choice:
    """Returns the choice where `find_refusal` says why a backend cannot run what is asked for; None: it can."""
    if implementation is not None:
        if why_not := find_refusal(implementation):
            raise NotImplementedError(why_not)
        return Choice(implementation, "It was asked for by name.")
    platform = platform or current_platform()
    reasons = []
    for name in list_kernels(platform):
        if not (why_not := find_refusal(name)):
            return Choice(name, f"The {name} kernel supports these shapes and options.")
        reasons.append(why_not)
    no_kernels = f"There are no kernels for the platform {platform!r}; XLA runs on all of them."
    return Choice("xla", " ".join(reasons) or no_kernels)


def list_kernels(platform: str) -> list[str]:
    """Returns the implementations for a platform, in the order in which they are tried: what was registered first."""
    return [name for name, home in reversed(IMPLEMENTATIONS.items()) if home == platform]


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError for a name that no backend has."""
    if implementation is not None:
        find_backend(implementation)


def find_backend(implementation: str) -> Backend:
    """Returns the backend of this name. Raises ValueError for a name that there is not."""
    if not isinstance(implementation, str) or implementation not in IMPLEMENTATIONS:
        given = repr(implementation) if isinstance(implementation, str) else type(implementation).__name__
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, not {given}.")
    if implementation in REGISTERED:
        return REGISTERED[implementation]
    # Imported when needed: a kernel's imports are not cheap.
    name = "api.reference_backend" if implementation == "reference" else implementation
    return cast(Backend, importlib.import_module(f"pallas_kernels.{name}"))


def unsupported(implementation: str, op: str, call: Call) -> str | None:
    """Returns why a backend cannot run a call of an op, and the way out; None: it can."""
    backend = find_backend(implementation)
    if (op == "write_kv" and backend.write_kv is None) or (op == "write_and_attend" and not backend.write_and_attend):
        return (
            f"The {implementation} backend has no kernel of its own for {op}; leave implementation=None to use XLA's."
        )
    if call.stored.latent_rank is not None and not backend.READS_LATENT_ROWS:
        return f"The {implementation} kernels read no latent rows yet; leave implementation=None to use XLA's."
    for name in call.given_options():
        if name not in backend.OPTIONS:
            return f"The {implementation} kernels take no {name} yet; leave implementation=None to use XLA's."
    format = call.stored.format
    if format.is_quantized and format.name not in backend.FORMATS:
        return f"The {implementation} kernels read no {format.name} pools yet; leave implementation=None to use XLA's."
    return backend.unsupported(op, call)


def read_platform(platform: Any) -> str:
    """Returns a platform by any of its names. Raises ValueError for what is none."""
    platform = read_name(platform) if isinstance(platform, str) else platform
    if not isinstance(platform, str) or platform not in (*PLATFORMS, current_platform()):
        raise ValueError(f"platform must be None or one of {', '.join(PLATFORMS)}, not {show(platform)}.")
    return platform


def find_platform(*arrays: Any) -> str | None:
    """Returns the platform of the devices that arrays, or descriptions of arrays, say that they lie on; None: none."""
    for x in arrays:
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and not _is_abstract(sharding):
            device: Any = next(iter(sharding.device_set))
            return read_name(device.platform)
    return None


def _is_abstract(sharding: jax.sharding.Sharding) -> bool:
    return isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
