"""Three decoders with dense caches against the same with paged ones: `tests/adopted`, in larger sizes.

    python benchmarks/adoption.py

Each is written in the style of codebases that there are; `tests/test_adoption.py` counts the lines that differ and
compares the tokens. Here one decode step is timed, side by side in one run, every row half full, and compiled.
"""

import argparse
import dataclasses
import functools
import importlib
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
from _harness import save, table, time_side_by_side
from flax import nnx

import jaxkv

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
SIZES = dict(vocab_size=256, width=256, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64)


class Contender:
    """A decoder whose rows hold so many tokens, and its jitted decode step."""

    def __init__(self, style: str, kind: str, rows: int, places: int, length: int):
        module = importlib.import_module(f"adopted.{style}_{kind}")
        config = dataclasses.replace(module.Config(), **SIZES, **({"window": 256} if style == "linen" else {}))
        self.model = module.make(config)
        token, ones = jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32)
        fill = functools.partial(self.fill, length)
        if style == "nnx":
            self.cache = fill(module.init_cache(config, rows, places))
            self.jitted = nnx.jit(module.step, donate_argnums=1)
            self.arguments = (self.model, self.cache, token, ones[:, None])
        elif style == "linen":
            model, params = self.model
            self.cache = fill(module.init_cache(config, rows, places))
            self.jitted = jax.jit(functools.partial(module.step, model), donate_argnums=1)
            self.arguments = (params, self.cache, token, ones)
        else:
            self.model.init_cache(rows, places)
            fill(self.model)
            self.jitted = nnx.jit(module.step, donate_argnums=0)
            self.arguments = (self.model, token)

    @staticmethod
    def fill(length: int, holder):
        """Say that every row holds `length` tokens, whatever stands there: time does not depend on it."""
        if isinstance(holder, jaxkv.Cache):
            return jaxkv.extend(holder, jnp.full(holder.lengths.shape, length, jnp.int32))
        if isinstance(holder, dict):
            return {name: layer | {"end": jnp.full_like(layer["end"], length)} for name, layer in holder.items()}
        if isinstance(holder, jaxkv.nnx.CacheVariable):
            holder.extend(jnp.full(holder.lengths.shape, length, jnp.int32))
            return holder
        for path, variable in nnx.to_flat_state(nnx.state(holder, nnx.Cache)):
            if isinstance(variable, jaxkv.nnx.CacheVariable):
                Contender.fill(length, holder.cache)
            elif path[-1] in ("index", "cache_index", "position"):
                nnx.update(holder, nnx.from_flat_state([(path, variable.replace(jnp.full((), length, jnp.int32)))]))
        return holder

    def compile_seconds(self) -> float:
        """CPU seconds to trace and compile the step."""
        jax.clear_caches()
        start = time.process_time()
        self.jitted.lower(*self.arguments).compile()
        return time.process_time() - start

    def run(self):
        out = self.jitted(*self.arguments)
        if isinstance(out, tuple):  # of Linen: the cache comes back
            out, cache = out
            self.arguments = (self.arguments[0], cache, *self.arguments[2:])
        return out


def measure(style: str, arguments) -> dict:
    length = arguments.places // 2
    contenders = {kind: Contender(style, kind, arguments.rows, arguments.places, length) for kind in ("dense", "paged")}
    compiling = {kind: min(c.compile_seconds() for _ in range(2)) for kind, c in contenders.items()}
    seconds = time_side_by_side({kind: c.run for kind, c in contenders.items()}, arguments.repeats)
    row = {"style": style} | {f"{kind} ms": seconds[kind] * 1e3 for kind in contenders}
    row["dense / paged"] = seconds["dense"] / seconds["paged"]
    row |= {f"{kind} compile s": compiling[kind] for kind in contenders}
    row["compile, paged / dense"] = compiling["paged"] / compiling["dense"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--styles", nargs="+", default=["nnx", "linen", "flax"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--places", type=int, default=2048, help="room for each row")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    results = [measure(style, arguments) for style in arguments.styles]
    table(results)
    save("adoption", results, max_seqs=arguments.rows, places=arguments.places, length=arguments.places // 2, **SIZES)


if __name__ == "__main__":
    main()
