"""CPU seconds of jaxkv beside those of llama.cpp: SmolLM2-135M with equal weights, one process after the other.

    python benchmarks/llama_cpp.py --xllamacpp ~/venv-with-xllamacpp/bin/python

Eight rows of 32 tokens and 96 more; one token after 32 and after 2,048; a prompt of 2,048. llama.cpp reads the GGUF
file as it is, four bits a weight, and its numbers written in float32, which is how jaxkv computes on a CPU. Each way
has processes of its own on one core; every request has run once before it is measured, and CPU seconds are the whole
process's, so that what else the machine does counts little.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

ROWS, SHORT, LONG, MANY, FURTHER = 8, 32, 2048, 96, 64
# From prompts and a number of new tokens to their texts, and the CPU seconds at each token.
Run = Callable[[list[list[int]], int], tuple[list[str], list[float]]]


# What runs in processes of its own.


def run_jaxkv(path: str, rows: int, longest: int) -> Run:
    import jaxkv
    import jaxkv.text

    model, text = jaxkv.models.load(path, dtype="float32"), jaxkv.text.Tokenizer(path)
    engine = jaxkv.Engine(model, max_seqs=rows, longest=longest)

    def run(prompts: list[list[int]], new: int) -> tuple[list[str], list[float]]:
        requests = [engine.submit(prompt, new, eos=()) for prompt in prompts]
        times = [time.process_time() for _, token in engine.run() if token is not None]
        return [text.decode(request.tokens) for request in requests], times

    return run


def run_llama_cpp(path: str, rows: int, longest: int) -> Run:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, rows * longest, rows
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity = -1
    server = xllamacpp.Server(params)

    def run(prompts: list[list[int]], new: int) -> tuple[list[str], list[float]]:
        said, times = [""] * len(prompts), []

        def ask(i: int) -> None:
            def take(chunk: dict[str, Any]) -> bool:
                choice = chunk["choices"][0]
                said[i] += choice["text"]
                if choice["finish_reason"] is None:
                    times.append(time.process_time())
                return False  # go on

            body = {"prompt": prompts[i], "n_predict": new, "temperature": 0, "ignore_eos": True, "stream": True}
            server.handle_completions(body | {"cache_prompt": False}, take)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said, times

    return run


def measure(way: str, path: str, rows: int, longest: int, requests: dict[str, tuple]) -> dict[str, Any]:
    """CPU seconds of loading, and of each request, once it has run before, up to its first and last tokens."""
    run = (run_jaxkv if way == "jaxkv" else run_llama_cpp)(path, rows, longest)
    seconds, said = {"load": time.process_time()}, {}
    for name, (prompts, new) in requests.items():
        run(prompts, new)
        began = time.process_time()
        said[name], times = run(prompts, new)
        seconds[name] = time.process_time() - began
        if len(prompts) == 1:  # of llama.cpp some tokens show with the next one, where a character is not whole
            seconds[f"{name}: first"], seconds[f"{name}: each"] = times[0] - began, (times[-1] - times[0]) / (new - 1)
    return {"seconds": seconds, "said": said}


# What starts them.


def write_float32(path: pathlib.Path, target: pathlib.Path) -> None:
    """Writes a GGUF file with the numbers of another in float32."""
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=of)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_alone(python: str, job: dict[str, Any]) -> dict[str, Any]:
    """What this script says to a job in a new process on one core."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "JOB": "1"}
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [python, __file__], input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True, env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def summarise(way: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The way's row: medians of CPU seconds, in the units that people compare."""
    seconds = {name: statistics.median(run["seconds"][name] for run in runs) for name in runs[0]["seconds"]}
    return {
        "way": way,
        f"{ROWS} rows x {MANY}, tokens/s": ROWS * MANY / seconds["rows"],
        f"a token after {SHORT}, ms": 1e3 * seconds["short: each"],
        f"a token after {LONG}, ms": 1e3 * seconds["long: each"],
        f"prompt of {LONG}, s": seconds["long: first"],
        "load s": seconds["load"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xllamacpp", metavar="PYTHON", default=sys.executable, help="interpreter that has xllamacpp")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each way; medians are shown")
    arguments = parser.parse_args()

    from _harness import save, table

    import jaxkv.text
    from jaxkv._files.packaged_model import smollm2

    path = smollm2()
    text = pathlib.Path(__file__).with_name("NOTES.md").read_text()
    tokens = jaxkv.text.Tokenizer(path).encode(text, special=False)
    prompts = [tokens[i * SHORT : (i + 1) * SHORT] for i in range(ROWS)]
    single_rows = {name: ([tokens[:length]], FURTHER) for name, length in (("short", SHORT), ("long", LONG))}
    jobs = [
        {"rows": ROWS, "longest": 2 * (SHORT + MANY), "requests": {"rows": (prompts, MANY)}},
        {"rows": 1, "longest": LONG + 2 * FURTHER, "requests": single_rows},
    ]
    with tempfile.TemporaryDirectory() as folder:
        whole = pathlib.Path(folder) / "float32.gguf"
        write_float32(path, whole)
        ways = {
            "llama.cpp, the file's Q4_1": (arguments.xllamacpp, path),
            "llama.cpp, float32": (arguments.xllamacpp, whole),
            "jaxkv, float32": (sys.executable, path),
        }
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for _ in range(arguments.repeats):
            for way, (python, file) in ways.items():
                found = [run_alone(python, job | {"way": way.split(",")[0], "path": str(file)}) for job in jobs]
                merged = {key: found[0][key] | found[1][key] for key in ("seconds", "said")}
                runs[way].append(merged)
                print(way, {name: round(x, 2) for name, x in merged["seconds"].items()}, flush=True)
    rows = [summarise(way, found) for way, found in runs.items()]
    last = runs["jaxkv, float32"][0]["said"]
    for row in rows:
        said = runs[row["way"]][0]["said"]
        row["equal texts"] = sum(a == b for name in said for a, b in zip(said[name], last[name], strict=True))
    table(rows)
    version = subprocess.run(
        [arguments.xllamacpp, "-c", "import xllamacpp; print(xllamacpp.__version__)"], capture_output=True, text=True
    ).stdout.strip()
    save("llama_cpp", rows, xllamacpp=version, repeats=arguments.repeats, cores=1, load=os.getloadavg()[1])


if __name__ == "__main__":
    if os.environ.get("JOB"):
        print(json.dumps(measure(**json.load(sys.stdin))))
    else:
        main()
