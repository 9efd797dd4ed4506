"""What a thread that serves costs: its loop against `run`, the way of a token to whoever waits, an idle server.

    python benchmarks/serving_loop.py

The model attends to nothing, so what is measured is the engine's own work. `run` and `serve` take turns.
"""

import statistics
import threading
import time
from typing import Any

from _harness import save, table
from serving_order import Next

import jaxkv

ROWS, TOKENS, ROUNDS = 32, 200, 15


def make_engine() -> jaxkv.Engine:
    return jaxkv.Engine(Next(), max_seqs=ROWS, max_seq_len=256)


def submit(engine: jaxkv.Engine, **options: Any) -> list[Any]:
    return [engine.submit([i], TOKENS, **options) for i in range(ROWS)]


def time_run(engine: jaxkv.Engine) -> float:
    """Returns seconds of CPU, which other processes change less than those of a clock."""
    submit(engine)
    began = time.process_time()
    for _ in engine.run():
        pass
    return time.process_time() - began


def time_serve(engine: jaxkv.Engine) -> float:
    submit(engine)
    began = time.process_time()
    with engine.serve():
        engine.wait()
    return time.process_time() - began


def measure_loop() -> dict[str, Any]:
    with make_engine() as engine:
        time_run(engine)
        times = [(time_run(engine), time_serve(engine)) for _ in range(ROUNDS)]
        run, serve = (statistics.median(column) for column in zip(*times, strict=True))
        return {"what": "a step of 32 rows", "run ms": run / TOKENS * 1e3, "serve ms": serve / TOKENS * 1e3,
                "serve / run": serve / run}  # fmt: skip


def measure_way() -> dict[str, Any]:
    """Seconds from when a token was read from the device to when an iterator in another thread has it."""
    ways: list[float] = []

    def follow(request: Any) -> None:
        for i, _ in enumerate(request):
            ways.append(time.monotonic() - request.times.tokens[i])

    with make_engine() as engine:
        time_run(engine)
        with engine.serve():
            for requests in (submit(engine)[:1] for _ in range(ROUNDS)):
                threads = [threading.Thread(target=follow, args=(request,)) for request in requests]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                engine.wait()
    return {"what": "a token's way to an iterator", "median ms": statistics.median(ways) * 1e3,
            "p90 ms": statistics.quantiles(ways, n=10)[-1] * 1e3}  # fmt: skip


def measure_idle(seconds: float = 5.0) -> dict[str, Any]:
    with make_engine() as engine, engine.serve():
        engine.submit([1], 3).result()
        engine.wait()
        before = time.process_time()
        time.sleep(seconds)
        return {"what": "an idle server", "share of a core": (time.process_time() - before) / seconds}


def main() -> None:
    rows = [measure_loop(), measure_way(), measure_idle()]
    for row in rows:
        table([row])
    save("serving_loop", rows)


if __name__ == "__main__":
    main()
