"""An engine over a model of random weights, and what `gpu_generate.py` measures with it."""

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from gpu_models import bytes_of, kv_bytes
from gpu_timing import record_kernels, seconds_by_name

import jaxkv

PROFILED = 16  # calls of the step


class Sizes:
    """Tokens of prompts and outputs."""

    def __init__(self, dry: bool):
        self.prompt, self.new, self.long, self.max_seq_len = (24, 16, 90, 128) if dry else (512, 128, 2048, 4096)
        self.block_size = 16  # as by default

    def step_tokens(self, rows: int) -> int:
        """So that prompts take few steps, all of one program: a quarter of them at once, or four, and at most 16."""
        at_once = min(rows, max(4, rows // 4), 16)
        return at_once * (self.prompt + 16)

    def num_blocks(self, rows: int) -> int:
        """What all rows take; a long prompt alone does, too."""
        row, long = (1 + -(-n // self.block_size) for n in (self.prompt + self.new, self.long + 2))
        return max(rows * row, long)


class Runs:
    """An engine and what is measured with it. The first run compiles."""

    def __init__(self, model: Any, rows: int, sizes: Sizes, steps: int = 1):
        self.model, self.rows, self.sizes, self.steps = model, rows, sizes, steps
        self.engine = jaxkv.Engine(
            model, max_seqs=rows, max_seq_len=sizes.max_seq_len, step_tokens=sizes.step_tokens(rows),
            num_blocks=sizes.num_blocks(rows), steps_per_dispatch=steps,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(0, model.vocab_size, (rows, sizes.prompt)).tolist()
        self.long = rng.integers(0, model.vocab_size, sizes.long).tolist()

    def fill(self) -> list[jaxkv.Request]:
        return [self.engine.submit(prompt, self.sizes.new, eos=()) for prompt in self.prompts]

    def run(self) -> tuple[list[list[int]], list[float], list[float]]:
        """Returns each row's tokens, and of each call of the engine's step in which all rows decode the seconds, and
        those in which its thread waited for the device."""
        waited = [0.0]
        read = self.engine._runner.read

        def timed() -> Any:
            began = time.perf_counter()
            jax.block_until_ready(self.engine._runner.flights[0].result.numbers)
            waited[0] += time.perf_counter() - began
            return read()

        self.engine._runner.read = timed  # type: ignore[method-assign]
        requests, calls = self.fill(), []
        try:
            while not self.engine.is_idle:
                began, waited[0] = time.perf_counter(), 0.0
                count = sum(token is not None for _, token in self.engine.step())
                calls.append((count, time.perf_counter() - began, waited[0]))
        finally:
            self.engine._runner.read = read  # type: ignore[method-assign]
        steady = [call[1:] for call in calls if call[0] == self.rows * self.steps][2:-1]
        if not steady:
            raise RuntimeError(f"No two calls decode {self.rows} rows: {[count for count, _, _ in calls]}.")
        return [request.tokens for request in requests], *map(list, zip(*steady, strict=True))

    def decode(self, read_rate: float | None) -> dict[str, Any]:
        """The figures of the faster of two runs behind the one that compiles, or of one where that takes longer; and
        whether all give the same tokens."""
        began = time.perf_counter()
        first, *_ = self.run()
        compiled = time.perf_counter() - began
        runs = [self.run() for _ in range(2 if self.rows < 64 else 1)]
        self.tokens, seconds, waits = min(runs, key=lambda run: sum(run[1]))
        step = sum(seconds) / len(seconds) / self.steps
        held = self.sizes.prompt + self.sizes.new // 2
        num_bytes = bytes_of(self.model) + self.rows * held * kv_bytes(self.model.config)
        self.step_seconds = step
        return {
            "tokens_per_second": self.rows / step, "step_ms": 1e3 * step, "bytes": num_bytes,
            "bytes_per_second": num_bytes / step, **({"share": num_bytes / step / read_rate} if read_rate else {}),
            "host_ms": 1e3 * (sum(seconds) - sum(waits)) / len(seconds) / self.steps,
            "slowest_ms": 1e3 * max(seconds) / self.steps, "calls": len(seconds),
            "first_run_s": compiled, "programs": len(self.engine._runner._shapes),
            "same_tokens": all(tokens == first for tokens, _, _ in runs), **self.chosen(),
        }  # fmt: skip

    def chosen(self) -> dict[str, Any]:
        """What `explain` says of a decode step and of prompts, which are packed."""
        config, cache = self.model.config, self.engine.cache
        heads = config.num_heads, config.head_dim
        shapes = {"decode": (self.rows, 1, *heads), "prefill": (self.sizes.step_tokens(self.rows), *heads)}
        said = {
            name: jaxkv.explain(jax.ShapeDtypeStruct(shape, self.model.dtype), cache, layer=0)
            for name, shape in shapes.items()
        }
        chosen = {f"default_of_{name}": choice.implementation for name, choice in said.items()}
        why = " ".join(dict.fromkeys(choice.reason for choice in said.values()))
        return chosen | {"why": why, "block_size": self.engine.config.block_size}

    def first_token(self) -> dict[str, Any]:
        """A long prompt alone, from when it is submitted until its first token is there."""
        times = []
        for _ in range(6):
            began = time.perf_counter()
            request = self.engine.submit(self.long, 2, eos=())
            while not request.tokens:
                self.engine.step()
            times.append(time.perf_counter() - began)
            for _ in self.engine.run():
                pass
        seconds = statistics.median(times[1:])
        weights = sum(x.size for x in jax.tree.leaves(self.model.layers))
        return {
            "tokens": self.sizes.long, "first_token_ms": 1e3 * seconds, "first_run_s": times[0],
            "tflops": 2 * weights * self.sizes.long / seconds / 1e12,  # attention's and the head's are not counted
            "programs": len(self.engine._runner._shapes),
        }  # fmt: skip

    def decode_kernels(self) -> dict[str, Any]:
        """What the device does in some decode steps of all rows."""
        requests, calls = self.fill(), 0
        while calls < 2:
            calls += sum(token is not None for _, token in self.engine.step()) == self.rows * self.steps
        count = min(PROFILED, (self.sizes.new // self.steps - 6) // 2)
        found = self.profile(lambda: [self.engine.step() for _ in range(count)], count * self.steps)
        for request in requests:
            self.engine.cancel(request)
        for _ in self.engine.run():
            pass
        if hasattr(self, "step_seconds"):  # of the run that nobody watched
            found["busy"] = found["device_ms"] / 1e3 / self.step_seconds
        return found

    def prefill_kernels(self) -> dict[str, Any]:
        """What the device does for a long prompt's first token."""

        def prefill() -> None:
            request = self.engine.submit(self.long, 1, eos=())
            while not request.done:
                self.engine.step()

        prefill()
        return self.profile(prefill, 1)

    def profile(self, run: Callable[[], Any], steps: int) -> dict[str, Any]:
        """Milliseconds of a step in which the device ran kernels, the share of the time, and the ten that took most."""

        def wait() -> None:
            jax.block_until_ready(jax.tree.leaves(self.engine.cache))

        wait()
        with record_kernels() as events:
            began = time.perf_counter()
            run()
            wait()
            wall = time.perf_counter() - began
        # Without the number that XLA gives to each of one kind.
        spent = seconds_by_name([x._replace(name=re.sub(r"([._]\d+)+$", "", x.name)[:100]) for x in events])
        device = sum(sum(times) for times in spent.values())
        most = sorted(spent, key=lambda name: -sum(spent[name]))
        return {
            "device_ms": 1e3 * device / steps, "busy_while_profiled": device / wall,
            "launches": sum(map(len, spent.values())) / steps,
            "ours_ms": {name: 1e3 * sum(spent[name]) / steps for name in most if "paged_" in name},
            "most_ms": {name: [len(spent[name]) / steps, 1e3 * sum(spent[name]) / steps] for name in most[:10]},
        }  # fmt: skip

    def close(self) -> None:
        self.engine.close()


def generate_once(model: Any, rows: int, sizes: Sizes) -> dict[str, Any]:
    """`jaxkv.generate` as it comes, with all its defaults: the call that compiles, and the second."""
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (rows, sizes.prompt)).tolist()
    times = []
    for _ in range(2):
        began = time.perf_counter()
        outputs = jaxkv.generate(model, prompts, max_new_tokens=sizes.new, eos=())
        times.append(time.perf_counter() - began)
    count = sum(map(len, outputs))
    return {"first_seconds": times[0], "seconds": times[1], "tokens_per_second": count / times[1]}
