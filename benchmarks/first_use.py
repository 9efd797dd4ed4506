"""CPU seconds of the first and of a later call of `generate`, beside those of `transformers`.

    python benchmarks/first_use.py --transformers ~/venv-with-transformers/bin/python

A random Qwen3 of 14 layers and 121M parameters, in float32, continues ragged prompts and one long prompt greedily. Each
way has a process of its own on one core, with no compiled programs kept from before: the first call compiles, the
second has the same shapes and finds what was compiled. Imports and loading come before both. Times are CPU seconds of
the whole process. `transformers` may live in an environment of its own, and is left out where there is none.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

NUM_LAYERS, VOCAB_SIZE = 14, 28_672
# The lengths of the prompts, and how many tokens are added to each.
CASES = {"ragged": ([16, 42, 69, 95, 121, 147, 174, 200], 64), "long": ([2048], 128)}
WAYS = ("transformers", "generate", "generate, unrolled", "generate, stacked", "warm Engine", "warm Engine, unrolled")
SCANS = {"": None, "unrolled": False, "stacked": "stacked"}  # how layers are computed, by the end of the way's name


# What runs in processes of its own.


def make_model(folder: str) -> int:
    """Write a random Qwen3; the number of its parameters."""
    import jax
    from flax import nnx

    import jaxkv

    config = jaxkv.models.DecoderConfig(
        family="qwen3", vocab_size=VOCAB_SIZE, embed_dim=768, mlp_dim=2048, num_heads=16, num_kv_heads=8, head_dim=64,
        max_seq_len=4096, windows=(None,) * NUM_LAYERS, ropes=(jaxkv.models.Rope(theta=1e6),) * NUM_LAYERS,
        attention_scale=64**-0.5, qk_norm=True, tie_embeddings=True,
    )  # fmt: skip
    model = jaxkv.models.Decoder(config, rngs=nnx.Rngs(0))
    jaxkv.models.save(model, folder)
    return sum(x.size for x in jax.tree.leaves(model))


def measure(way: str, folder: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """CPU seconds of each stage, and the tokens of the last."""
    clock = Clock()
    if way == "transformers":
        call = with_transformers(folder, prompts, new)
        clock.note("load")
    else:
        import jaxkv

        model = jaxkv.models.load(folder, scan=SCANS[way.partition(", ")[2]])
        clock.note("load")
        if way.startswith("generate"):

            def call() -> list[list[int]]:
                return jaxkv.generate(model, prompts, new)
        else:
            engine = jaxkv.Engine(model, max_seqs=len(prompts), longest=max(map(len, prompts)) + new)
            engine.warmup(kinds=["greedy"], progress=False)
            clock.note("warmup")

            def call() -> list[list[int]]:
                requests = [engine.submit(prompt, new) for prompt in prompts]
                for _ in engine.run():
                    pass
                return [list(request.tokens) for request in requests]

    outputs = [call(), clock.note("first"), call(), clock.note("second")]
    if outputs[0] != outputs[2]:
        raise SystemExit(f"{way}: the second call gave other tokens than the first.")
    return {"seconds": clock.seconds, "tokens": outputs[0]}


def with_transformers(folder: str, prompts: list[list[int]], new: int) -> Any:
    """A call of its `generate`, the prompts padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def call() -> list[list[int]]:
        output = model.generate(
            tokens, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return output[:, longest:].tolist()

    return call


class Clock:
    """CPU seconds of this process, stage by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def note(self, stage: str) -> None:
        now = time.process_time()
        self.seconds[stage], self._last = now - self._last, now


# What starts them.


def run_alone(python: str, job: dict[str, Any]) -> Any:
    """What this script says to a job in a new process on one core."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [python, __file__, "--job"], input=json.dumps(job), stdout=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}), check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def find_transformers(python: str) -> str | None:
    """The version of it, or None."""
    ask = "import torch, transformers; print(transformers.__version__)"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    return done.stdout.split()[-1] if done.returncode == 0 else None


def compare(case: str, results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of the table: medians, and how they compare with `transformers`."""
    rows = []
    tokens = next(iter(results.values()))[0]["tokens"]
    stages = ("load", "warmup", "first", "second")
    medians = {
        way: {s: statistics.median(run["seconds"].get(s, 0.0) for run in runs) for s in stages}
        for way, runs in results.items()
    }
    base = medians.get("transformers")
    for way, seconds in medians.items():
        same = sum(a == b for run in results[way] for a, b in zip(run["tokens"], tokens, strict=True))
        row: dict[str, Any] = {"case": case, "way": way, **{f"{stage} s": seconds[stage] for stage in stages}}
        row["first, x"] = (seconds["warmup"] + seconds["first"]) / base["first"] if base else None
        row["faster, second"] = base["second"] / seconds["second"] if base else None
        rows.append(row | {"equal outputs": f"{same}/{len(tokens) * len(results[way])}"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", metavar="PYTHON", default=sys.executable, help="interpreter that has it")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each way; medians are shown")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job = json.load(sys.stdin)
        print(json.dumps(measure(**job) if "way" in job else make_model(**job)))
        return

    import numpy as np
    from _harness import save, table

    ways, version = list(arguments.ways), find_transformers(arguments.transformers)
    if version is None and "transformers" in ways:
        print(f"transformers is left out: {arguments.transformers} cannot import it and torch.\n")
        ways.remove("transformers")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        parameters = run_alone(sys.executable, {"folder": folder})
        for case in arguments.cases:
            lengths, new = CASES[case]
            rng = np.random.default_rng(0)
            prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]
            results: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for _ in range(arguments.repeats):
                for way in ways:
                    python = arguments.transformers if way == "transformers" else sys.executable
                    job = {"way": way, "folder": folder, "prompts": prompts, "new": new}
                    results[way].append(run_alone(python, job))
                    print(
                        case, way, {stage: round(s, 2) for stage, s in results[way][-1]["seconds"].items()}, flush=True
                    )
            rows += compare(case, results)
    print(f"{parameters / 1e6:.0f}M parameters; CPU seconds on one core; x: of the first call of transformers\n")
    table(rows)
    cases = {name: {"prompts": lengths, "new": new} for name, (lengths, new) in CASES.items()}
    save("first_use", rows, parameters=parameters, transformers=version, repeats=arguments.repeats, cases=cases)


if __name__ == "__main__":
    main()
