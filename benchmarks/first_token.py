"""Seconds until a real model is loaded, and until its first token is there, each in a process of its own.

    python benchmarks/first_token.py

SmolLM2-135M-Instruct from its GGUF file, a tokenizer, an engine of 8 rows, and a question by the chat template. "cold":
nothing compiled is kept from before; "warm": the compile cache has what an earlier process compiled. The first process
of all is not counted: it reads the file, and Python compiles what it imports.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time


def measure(path: str) -> dict[str, float]:
    begin = time.perf_counter()
    import jax

    import jaxkv.models
    import jaxkv.text

    model = jaxkv.models.load(path)
    jax.block_until_ready(jax.tree.leaves(model))
    loaded = time.perf_counter() - begin
    prompt = jaxkv.text.Tokenizer(path).chat([{"role": "user", "content": "What is the capital of France?"}])
    engine = jaxkv.Engine(model, max_seqs=8, max_seq_len=512)
    next(iter(engine.stream([prompt], 8)))
    return {"loaded": loaded, "first token": time.perf_counter() - begin}


def run_alone(path: str, folder: str) -> dict[str, float]:
    settings = {"PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    environment = os.environ | {f"JAX_{name}": value for name, value in settings.items()}
    environment |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    command = [sys.executable, __file__, "--job", path]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind; medians are shown")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(measure(arguments.job)))
        return

    from _harness import save, table

    from jaxkv._files.packaged_model import smollm2

    path = str(smollm2())
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        run_alone(path, folder)
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for kind in found:
                found[kind].append(run_alone(path, folder))
    rows = [
        {"compile cache": kind}
        | {f"{name} s": round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
        for kind, runs in found.items()
    ]
    table(rows)
    save("first_token", rows, repeats=arguments.repeats, cores=os.cpu_count())


if __name__ == "__main__":
    main()
