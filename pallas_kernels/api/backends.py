"""Which backend runs an op: what each takes, what is asked for, and why nothing faster does.

A backend is a module with some of the functions `paged_attention`, `write_kv` and `write_and_attend`, and
`unsupported(op, arguments) -> str | None`: why it cannot run `op` on arguments of these shapes, and the way out.
"""

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import jax

# Implementation -> the platform that it runs on; None: any.
IMPLEMENTATIONS = {"xla": None, "reference": None, "gpu": "cuda", "tpu": "tpu"}
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Options that decide who sees whom, which not every backend knows.
VARIANTS = ("alibi", "spans", "tree", "causal", "chunk", "blocks", "deterministic", "sink_tokens", "stripe")
USUAL = {"causal": True, "deterministic": False}  # the others: None


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


def choose(op: str, implementation: str | None, platform: str | None, arguments: dict[str, Any]) -> Choice:
    """What `explain` says of arguments that are known to be an op's."""
    if implementation is not None:
        if why_not := unsupported(implementation, op, arguments):
            raise NotImplementedError(why_not)
        return Choice(implementation, "It was asked for by name.")
    platform = platform or platform_now()
    for name, home in IMPLEMENTATIONS.items():
        if home == platform:
            if why_not := unsupported(name, op, arguments):
                return Choice("xla", why_not)
            return Choice(name, f"The {name} kernel supports these shapes and options.")
    return Choice("xla", f"There are no kernels for the platform {platform!r}; XLA runs on all of them.")


def unusual(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the variants that ask for anything."""
    given = {name: options[name] for name in VARIANTS if options.get(name) is not None}
    return {name: x for name, x in given.items() if not (name in USUAL and bool(x) == USUAL[name])}


def backend_of(implementation: str) -> ModuleType:
    """Its module. Raises ValueError for a name that there is not."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, not {implementation!r}.")
    return importlib.import_module(f"pallas_kernels.{implementation}")  # when needed: a kernel's imports are not cheap


def unsupported(implementation: str, op: str, arguments: dict[str, Any]) -> str | None:
    """Why it cannot run an op on these arguments, and the way out; None: it can."""
    backend = backend_of(implementation)
    if not hasattr(backend, op):
        return (
            f"The {implementation} backend has no kernel of its own for {op}; leave implementation=None to use XLA's."
        )
    if arguments.get("rank") is not None and not getattr(backend, "LATENT", False):
        return f"The {implementation} kernels read no latent rows yet; leave implementation=None to use XLA's."
    for name in unusual(arguments):
        if name not in getattr(backend, "VARIANTS", ()):
            return f"The {implementation} kernels take no {name} yet; leave implementation=None to use XLA's."
    kind = arguments.get("kind")
    if kind is not None and kind not in getattr(backend, "KINDS", ()):
        return f"The {implementation} kernels read no {kind} pools yet; leave implementation=None to use XLA's."
    check = getattr(backend, "unsupported", None)
    return check(op, arguments) if check else None


def read_platform(platform: Any) -> str:
    """A platform by any of its names. Raises ValueError for what is none."""
    if platform == "gpu":  # JAX's own other name for it
        return "cuda"
    if platform not in PLATFORMS and platform != platform_now():
        raise ValueError(f"platform must be None or one of {', '.join(PLATFORMS)}, not {platform!r}.")
    return platform


def platform_now() -> str:
    """What a program traced now is lowered for, if it does not say: the mesh's platform, else the default backend's."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = device.platform if device is not None else jax.default_backend()
    return "cuda" if platform == "gpu" else platform
