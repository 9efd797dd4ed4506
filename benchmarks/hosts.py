"""Milliseconds of a host for a decode step of an engine, in one process and in several that share it.

    python benchmarks/hosts.py [--processes 2] [--rows 8 64 256]

The model computes next to nothing, and its processes exchange nothing but messages: what is left is the engine's work.
"host": the time for which a processor ran the thread that takes the steps, in the first process. "wall": time that
passed; here all processes share one machine's processors, so that is more than a host of their own would need. "all":
processor time of all threads of the first process. Each number is a median over processes started in turn.
"""

import argparse
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

STEPS, BEFORE = 200, 100


def measure(process: int, count: int, port: str, rows: int) -> None:
    """What one process does; the first one prints."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import jaxkv
    import jaxkv.distributed

    if count > 1:
        jaxkv.distributed.initialize(f"127.0.0.1:{port}", count, process)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Next:
        """Says token + 1, and attends to nothing."""

        nothing: jax.Array
        dtype = "float32"

        @property
        def layer_configs(self) -> Any:
            return (jaxkv.LayerConfig(num_kv_heads=jax.device_count(), head_dim=2),)

        def __call__(self, tokens: Any, cache: Any, logits_at: Any) -> Any:
            shape = (*tokens.shape, jax.device_count(), 2)
            kv = jnp.broadcast_to(tokens.astype(jnp.float32)[..., None, None], shape)
            cache = jaxkv.write(cache, kv, kv, layer=0)
            logits = jax.nn.one_hot((tokens + 1) % 97, 97) + self.nothing
            return (logits[:, 0] if tokens.ndim == 2 else logits[logits_at]), cache

    place = NamedSharding(Mesh(np.array(jax.devices()), ["model"]), PartitionSpec())
    model = Next(jax.make_array_from_callback((), place, lambda _: np.zeros((), np.float32)))
    engine = jaxkv.Engine(
        model, max_seqs=rows, max_seq_len=1024, block_size=16, num_blocks=64 * rows, step_tokens=max(256, rows)
    )
    if process:
        engine.follow()
        return
    requests = [engine.submit([i % 97, 2, 3], 1000) for i in range(rows)]
    while not all(request.tokens for request in requests):
        engine.step()
    for _ in range(BEFORE):  # those that follow have compiled, too
        engine.step()
    channel = getattr(engine._core, "channel", None)
    sent = channel and (channel.num_messages, channel.num_bytes)
    clocks = {"host": time.thread_time, "wall": time.perf_counter, "all": time.process_time}
    began = {name: clock() for name, clock in clocks.items()}
    for _ in range(STEPS):
        engine.step()
    found = {f"{name} ms": 1e3 * (clock() - began[name]) / STEPS for name, clock in clocks.items()}
    if sent:
        found["bytes"] = (channel.num_bytes - sent[1]) / STEPS
    print(json.dumps(found))
    engine.close()


def run_together(count: int, devices: int, rows: int) -> dict[str, float]:
    """Runs so many processes with so many devices in all; returns what the first one has found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = f"--xla_force_host_platform_device_count={devices // count}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--job", json.dumps([process, count, port, rows])],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for process in range(count)
    ]  # fmt: skip
    texts = [process.communicate()[0] for process in started]
    return json.loads(texts[0].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        measure(*json.loads(arguments.job))
        return

    from _harness import save, table

    found = []
    for rows in arguments.rows:
        seen: dict[int, list[dict[str, float]]] = {1: [], arguments.processes: []}
        for _ in range(arguments.repeats):
            for count, own in seen.items():
                own.append(run_together(count, arguments.processes, rows))
        for count, own in seen.items():
            medians = {name: statistics.median(x[name] for x in own) for name in own[0]}
            found.append({"rows": rows, "processes": count} | {name: round(x, 3) for name, x in medians.items()})
    table(found)
    save("hosts", found)


if __name__ == "__main__":
    main()
