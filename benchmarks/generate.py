"""Throughput of `generate`: continuous batching over a paged cache against static batches padded to the longest.

    python benchmarks/generate.py

Both run the built-in model over the same prompts, which differ 1:50 in length and in the tokens asked for, with equal
memory for keys and values: the static batches have a few rows of the longest sequence's room, the paged cache as many
blocks as fill the same bytes. The static batches read nothing back until a batch ends; compilation is not timed.

Then the time of the host: what a decode step of 28 tiny layers takes of the thread that runs the engine, beside a slow
device, which is imitated by computation in the step; and how much of the time the device is at work.
"""

import argparse
import functools
import gzip
import json
import pathlib
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import save, table
from flax import nnx

import jaxkv
from jaxkv.models import Decoder, DecoderConfig, Rope

MAX_SEQ_LEN = 512


def trace(count: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Prompts of Python source and the numbers of tokens to add, each spread log-uniformly from 5 to 250."""
    rng = np.random.default_rng(seed)
    source = pathlib.Path(argparse.__file__).read_bytes()
    lengths = np.exp(rng.uniform(np.log(5), np.log(250), (count, 2))).round().astype(int)
    starts = rng.integers(0, len(source) - 250, count)
    return [(list(source[s : s + prompt]), int(new)) for s, (prompt, new) in zip(starts, lengths, strict=True)]


@jax.jit(donate_argnames="cache")
def prefill(model, tokens, num_tokens, cache):
    cache = jaxkv.extend(cache, num_tokens)
    logits, cache = model(tokens, cache=cache, logits_at=num_tokens - 1)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="steps")
def decode(model, tokens, cache, steps):
    def step(carry, _):
        tokens, cache = carry
        cache = jaxkv.extend(cache, jnp.ones_like(tokens))
        logits, cache = model(tokens[:, None], cache=cache)
        tokens = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        return (tokens, cache), tokens

    (tokens, cache), outputs = jax.lax.scan(step, (tokens, cache), length=steps)
    return tokens, outputs, cache


def static(model, requests, rows: int) -> list[list[int]]:
    """Batches in the order of arrival; each prefills and decodes as long as its longest sequence needs."""
    config = jaxkv.CacheConfig.from_model(model, max_seqs=rows, max_seq_len=MAX_SEQ_LEN, layout="contiguous")
    cache = jaxkv.init(config)
    results = []
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        batch += [([0], 1)] * (rows - len(batch))
        longest = max(len(prompt) for prompt, _ in batch)
        padded = np.zeros((rows, 1 << (longest - 1).bit_length()), np.int32)  # few shapes to compile
        for row, (prompt, _) in enumerate(batch):
            padded[row, : len(prompt)] = prompt
        tokens, cache = prefill(model, padded, np.array([len(prompt) for prompt, _ in batch], np.int32), cache)
        columns = [tokens[None]]
        for _ in range(-(-(max(new for _, new in batch) - 1) // 8)):
            tokens, column, cache = decode(model, tokens, cache, steps=8)
            columns.append(column)
        outputs = np.concatenate(jax.device_get(columns))
        results += [outputs[:new, row].tolist() for row, (_, new) in enumerate(batch)]
        cache = jaxkv.free(cache, np.ones(rows, bool))
    return results[: len(requests)]


def continuous(engine: jaxkv.Engine, requests) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in requests]
    prompts, limits = zip(*requests, strict=True)
    for index, token in engine.stream(prompts, list(limits)):
        outputs[index].append(token)
    return outputs


class Slow(Decoder):
    """A decoder that keeps the device busy for a while in every step, with few numbers on one core: a device of its own
    would leave the host its caches and its cores."""

    def __call__(self, tokens, cache=None, *, logits_at=None):
        logits, cache = super().__call__(tokens, cache, logits_at=logits_at)
        x = jnp.ones((16, 16)) + 1e-3 * logits.ravel()[0]
        x = jax.lax.fori_loop(0, 4000, lambda _, x: jnp.tanh(x @ x), x)  # of no tiny numbers, which take longer
        return logits + 0 * x[0, 0], cache


def host_time(scan: Any, steps_per_dispatch: int, rows: int = 8, steps: int = 32) -> dict[str, Any]:
    """A decode step of 28 layers: what it takes, what its thread does of that, and for how much of it the device is at
    work."""
    config = DecoderConfig(
        vocab_size=64, embed_dim=8, mlp_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, max_seq_len=1024,
        windows=(None,) * 28, ropes=(Rope(),) * 28, attention_scale=0.5,
    )  # fmt: skip
    model = Slow(config, scan=scan, rngs=nnx.Rngs(0))
    engine = jaxkv.Engine(model, max_seqs=rows, max_seq_len=1024, step_tokens=32, steps_per_dispatch=steps_per_dispatch)
    for _ in range(rows):
        engine.submit([1], 1000)
    for _ in range(8):  # compile
        engine.step()

    call, calls = engine._cache_manager.call, [0.0]

    def timed(*arguments, **options):
        start = time.thread_time()
        out = call(*arguments, **options)
        calls[0] += time.thread_time() - start
        return out

    engine._cache_manager.call = timed  # type: ignore[method-assign]

    def step() -> tuple[float, float, float]:
        start, thread, calls[0] = time.perf_counter(), time.thread_time(), 0.0
        for _ in range(steps // steps_per_dispatch):
            engine.step()
        return (time.perf_counter() - start) / steps, (time.thread_time() - thread) / steps, calls[0] / steps

    runs = [step() for _ in range(15)]
    wall, host, of_jax = (1e3 * float(np.median(column)) for column in zip(*runs, strict=True))
    share = busy(step)
    layers, arrays = scan or "one by one", len(jax.tree.leaves((model, engine.cache)))
    return {
        "layers": layers, "arrays": arrays, "steps per dispatch": steps_per_dispatch, "step ms": wall, "host ms": host,
        "of which JAX's calls": of_jax, "device share": share,
    }  # fmt: skip


def busy(run) -> float:
    """The share of the time in which some step was under way on the device, from the first one's first operation to the
    last one's last."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=False):
            run()
        (file,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps: dict[str, tuple[float, float]] = {}
    for event in events:
        if "hlo_op" in (known := event.get("args", {})):
            start, stop = event["ts"], event["ts"] + event["dur"]
            first, last = steps.get(known["run_id"], (start, stop))
            steps[known["run_id"]] = min(first, start), max(last, stop)
    spans = sorted(steps.values())
    end = begin = spans[0][0]
    total = 0.0
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / (end - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--static-rows", type=int, default=8, help="rows of the static batches; default: %(default)s")
    parser.add_argument("--rows", type=int, default=32, help="rows of the paged cache; default: %(default)s")
    arguments = parser.parse_args()
    model = jaxkv.models.small()
    requests = trace(arguments.prompts)
    num_tokens = sum(new for _, new in requests)
    blocks = arguments.static_rows * MAX_SEQ_LEN // 16
    engine = jaxkv.Engine(model, max_seqs=arguments.rows, max_seq_len=MAX_SEQ_LEN, num_blocks=blocks)
    ways = {
        "static batches": lambda: static(model, requests, arguments.static_rows),
        "continuous, paged": lambda: continuous(engine, requests),
    }
    rows, outputs = [], {}
    for way, run in ways.items():
        run()  # compile
        start = time.perf_counter()
        outputs[way] = run()
        seconds = time.perf_counter() - start
        rows.append({"way": way, "seconds": seconds, "tokens/s": num_tokens / seconds})
    for row in rows:
        row["times static"] = rows[0]["seconds"] / row["seconds"]
    same = sum(a == b for a, b in zip(*outputs.values(), strict=True))
    print(f"{len(requests)} prompts, {num_tokens} new tokens, {blocks} blocks' worth of memory; {same} outputs equal\n")
    table(rows)
    print("\n28 layers beside a slow device\n")
    host = [host_time(scan, count) for scan in (False, "apart", "stacked") for count in (1, 8)]
    table(host)
    facts = {"prompts": len(requests), "new_tokens": num_tokens, "blocks": blocks, "outputs_equal": same}
    save("generate", {"throughput": rows, "host": host}, **facts)


if __name__ == "__main__":
    main()
