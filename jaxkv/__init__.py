"""A paged KV cache for JAX: immutable, functional, with kernels for TPU and NVIDIA GPU."""

from jaxkv._attention import attend as attend
from jaxkv._attention import attention as attention
from jaxkv._attention import explain as explain
from jaxkv._checks import check as check
from jaxkv._checks import check_invariants as check_invariants
from jaxkv._checks import stats as stats
from jaxkv._config import CacheConfig as CacheConfig
from jaxkv._config import LayerConfig as LayerConfig
from jaxkv._errors import CacheError as CacheError
from jaxkv._errors import CacheFileError as CacheFileError
from jaxkv._errors import DamagedFile as DamagedFile
from jaxkv._errors import OutOfBlocks as OutOfBlocks
from jaxkv._errors import OutOfWindow as OutOfWindow
from jaxkv._errors import SequenceTooLong as SequenceTooLong
from jaxkv._files import describe as describe
from jaxkv._files import load as load
from jaxkv._files import save as save
from jaxkv._generate import Engine as Engine
from jaxkv._generate import generate as generate
from jaxkv._host import HostBlocks as HostBlocks
from jaxkv._host import swap_in as swap_in
from jaxkv._host import swap_out as swap_out
from jaxkv._pools import append as append
from jaxkv._pools import write as write
from jaxkv._prefix import Match as Match
from jaxkv._prefix import PrefixCache as PrefixCache
from jaxkv._sharing import fork as fork
from jaxkv._sharing import reorder as reorder
from jaxkv._sharing import truncate as truncate
from jaxkv._state import Cache as Cache
from jaxkv._state import init as init
from jaxkv._tables import extend as extend
from jaxkv._tables import free as free
from jaxkv._tables import positions as positions
from jaxkv._tables import reserve as reserve
from jaxkv._views import gather as gather

__version__ = "0.1.0"

__all__ = [
    "Cache", "CacheConfig", "CacheError", "CacheFileError", "DamagedFile", "Engine", "HostBlocks", "LayerConfig",
    "Match", "OutOfBlocks", "OutOfWindow", "PrefixCache", "SequenceTooLong", "append", "attend", "attention",
    "check", "check_invariants", "describe", "explain", "extend", "fork", "free", "gather", "generate", "init",
    "load", "positions", "reorder", "reserve", "save", "stats", "swap_in", "swap_out", "truncate", "write",
]  # fmt: skip


def __getattr__(name: str):  # what needs Flax, or is for tests, is imported when it is asked for
    if name in ("convert", "linen", "models", "nnx", "testing"):
        import importlib

        return importlib.import_module(f"jaxkv.{name}")
    raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
