"""The GPU kernels on the chip: numerics, then speed against the memory's and against other implementations.

    python benchmarks/gpu.py             everything, in at most 8 minutes; writes results/gpu.json as it goes
    python benchmarks/gpu.py --quick     what matters most, in 90 seconds
    python benchmarks/gpu.py --check     the numerics alone, in less than 3 minutes; names a kernel that hangs, and
                                         writes results/gpu_check.json
    python benchmarks/gpu.py --only X    what a row says matches a regular expression, such as "prefill.*ours"; given
                                         several times, in the order of these
    python benchmarks/gpu.py --dry-run   a little of everything, in the interpreter, and whether everything else at
                                         least lowers, without a GPU; writes nothing

Decode is bound by memory: its measure is the bytes of K and V that the rows hold, over the time, as a share of what the
best of some programs reads in the same run that do nothing but read. NOTES.md has what each row was predicted to take.
Each kind of check has a process of its own, so that one that hangs or breaks the device stops no other. Before anything
is timed, processes side by side compile it: a chip's time is dear, and most of a row's would be the compiler's.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory beside JAX

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from _harness import RESULTS, commit, table, write
from gpu_book import Book, compile_tasks, run_tasks, run_worker, share_programs, words
from gpu_check import KERNELS, check
from gpu_contenders import compile_ahead, contenders, give_back, lowered, step_of
from gpu_states import LAYERS, STEPS, Shape, measure_step, steps_of
from gpu_timing import Contender, kernel_seconds, seconds_of
from gpu_work import MAX_BYTES, Model, Piece, Point, Rivals, headlines, others, tiny

import pallas_kernels

STARTED = time.time() - time.process_time()  # importing is a part of the time
LONGEST_MEASUREMENT = 20  # seconds, its compilation included
HUNG, HUNG_MODEL = 60, 150
CARELESS = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"}  # for what runs once
DATASHEET = 4.8e12  # bytes a second of an H200's memory, as its maker has it
SHOWN = ("what", "heads", "batch", "context", "new", "block", "head_dim", "kind", "ragged", "chunk", "by", "seconds",
         "share", "tflops", "off")  # fmt: skip

type Runs = Iterator[tuple[str, Callable[[], Contender]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="what matters most")
    parser.add_argument("--check", action="store_true", help="the numerics alone")
    parser.add_argument("--unchecked", action="store_true", help="without the numerics, where they were checked before")
    parser.add_argument("--only", default=[], action="append", metavar="REGEX", help="what a row says, or a part of it")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in the interpreter; writes nothing")
    parser.add_argument("--seconds", type=float, help="time for all of it; default: 480, or 90 if quick")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="the folder that gets gpu.json")
    parser.add_argument("--commit", help="of the sources, where they were copied without their history")
    parser.add_argument("--kind", help=argparse.SUPPRESS)  # of checks
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)  # each nth piece of so many
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    until = options.until or STARTED + (options.seconds or (90 if options.quick else 480))
    if options.dry_run:
        # The interpreter's kernels hold threads, of which XLA has as many as devices and cores.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
        with tempfile.TemporaryDirectory() as folder:
            options.results = pathlib.Path(folder)
            raise SystemExit(run(options, until, plgpu.InterpretGPUParams()))
    raise SystemExit(run_phases(options, until) if options.worker is None else run(options, until, None))


def run_phases(options: argparse.Namespace, until: float) -> str | int:
    """Checks, compiles and measures, each in processes of its own."""
    if obstacle := why_not_here():
        return f"{obstacle} Without a Hopper GPU: --dry-run."
    wrong: str | int = 0
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        if not options.unchecked:
            kinds = [*KERNELS, "steps"]
            found = [pathlib.Path(folder, str(i)) for i in range(len(kinds))]
            tasks = [
                [*arguments, "--check", "--kind", kind, "--results", str(into)]
                for kind, into in zip(kinds, found, strict=True)
            ]
            longest = 150 if options.check else 30 if options.quick else 100
            run_tasks(tasks, min(until, time.time() + longest), CARELESS)
            wrong = gather_checks(options, found)
        if options.check:
            return wrong
        cache = share_programs(folder)
        run_tasks(compile_tasks(arguments), until, cache)
        return run_worker([*arguments, "--unchecked"], until, cache) or wrong


def compile_headlines(options: argparse.Namespace, until: float) -> None:
    """Compiles a part of what is measured first. Not models, whose products are tuned when nobody else is at the
    device."""
    nth, count = options.compile

    def compile_point(point: Point, who: Rivals) -> None:
        row = describe_row(None, point)
        said = compile_ahead(point, who, lambda by: re.search(match_any(options.only), words(row | {"by": by})))
        if said:
            print(f"compiled {words(row)}: {said}", flush=True)

    pieces = [
        (describe_row(None, point), functools.partial(compile_point, point, rivals_of(who, quick=options.quick)))
        for model, point, who in headlines()
        if model is None
    ]
    for what, _, prepare in state_pieces(dry=False, interpret=None):
        if re.search(match_any(options.only), words(what)):
            pieces.append((what, lambda prepare=prepare: prepare().run()))
    for _, run in sort_pieces(pieces, options.only)[nth::count]:
        if time.time() < until:
            run()


def match_any(only: list[str]) -> str:
    """Returns one regular expression for several of which any may match; for none, what matches everything."""
    return "|".join(f"(?:{each})" for each in only)


def sort_pieces[T](pieces: Iterable[tuple[dict[str, Any], T]], only: list[str]) -> list[tuple[dict[str, Any], T]]:
    """Returns pieces by the first of several regular expressions that what they say matches."""

    def rank(piece: tuple[dict[str, Any], T]) -> int:
        row, _ = piece
        said = words(row if "by" in row else row | {"by": "ours"})
        return next((i for i, each in enumerate(only) if re.search(each, said)), len(only))

    return sorted(pieces, key=rank)


def gather_checks(options: argparse.Namespace, folders: list[pathlib.Path]) -> str | int:
    """Writes the checks of all kinds into one file; how many are wrong, or 0."""
    files = [file for folder in folders if (file := folder / "gpu.json").exists()]
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    if files:
        options.results.mkdir(parents=True, exist_ok=True)
        facts = {key: value for key, value in json.loads(files[0].read_text()).items() if key != "rows"}
        write(options.results / "gpu_check.json", rows, **facts)
    wrong = [row for row in rows if "error" in row]
    for row in wrong:
        print(words(row), flush=True)
    print(f"{len(rows) - len(wrong)} of {len(rows)} cases agree with the reference.", flush=True)
    return f"{len(wrong)} cases differ from the reference." if wrong or not files else 0


def run(options: argparse.Namespace, until: float, interpret) -> str | int:
    """Everything in this process; the status it should end with, or what to say."""
    dry = interpret is not None
    if options.compile:
        compile_headlines(options, until)
        return 0
    book = Book(
        options.results / "gpu.json", go_on=bool(options.worker), only=match_any(options.only),
        commit=options.commit or commit(), jaxlib=importlib.metadata.version("jaxlib"), max_bytes=MAX_BYTES,
    )  # fmt: skip
    wrong = []
    if not options.unchecked:
        each, seconds = (1, 1e9) if dry else (2 if options.quick else 12, until - time.time())
        wrong = check(book, interpret, each=each, seconds=seconds, only_kind=options.kind)
    if not options.check:
        measure(book, until, interpret, quick=options.quick, only=options.only)
        rows = [row for row in book.rows if row["what"] not in ("check", "kernels", "lowers")]
        table([{key: "" if (x := row.get(key)) is None or x is False else x for key in SHOWN} for row in rows])
    return f"{len(wrong)} cases differ from the reference." if wrong else 0


def why_not_here() -> str | None:
    """Why there is nothing to measure on this machine, or None."""
    arrays = {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for name, shape, dtype in (
            ("q", (1, 1, 1, 128), jnp.bfloat16), ("kv", (2, 2, 1, 16, 128), jnp.bfloat16),
            ("tables", (1, 1), jnp.int32), ("lengths", (1,), jnp.int32), ("new", (1,), jnp.int32),
        )
    }  # fmt: skip
    try:
        choice = pallas_kernels.explain(**arrays)
    except Exception as e:  # no driver, or none that fits
        return f"JAX finds no usable device: {e!r:.300}."
    return None if choice.implementation == "gpu" else choice.reason


def yardsticks(num_bytes: float) -> Iterator[tuple[str, str, Callable[[], dict[str, float]]]]:
    """Bytes a second of programs that do nothing else: one reads and writes, as a copy does, and some only read: by
    the best of them shares are judged, for XLA may do badly at one."""
    rows = int(num_bytes) // 4 // 4096
    array = functools.cache(lambda: jax.random.normal(jax.random.key(0), (rows, 4096), jnp.float32))

    def bandwidth(f: Callable, passes: int) -> dict[str, float]:
        x, program = array(), jax.jit(f)
        found = passes * x.nbytes / seconds_of(lambda: program(x), passes * x.nbytes / 4e12)
        return {"bytes_per_second": found, "of_datasheet": found / DATASHEET}

    yield "copy", "add", functools.partial(bandwidth, lambda x: x + 1, 2)
    for by, axis in (("max of all", None), ("max of rows", 1), ("max of columns", 0)):
        yield "read", by, functools.partial(bandwidth, functools.partial(jnp.max, axis=axis), 1)


def measure(book: Book, until: float, interpret, *, quick: bool, only: list[str]) -> None:
    """One row for each piece of work and contender, until the time is up."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # JAX's Triton kernel
    dry = interpret is not None
    longest, patience = min(LONGEST_MEASUREMENT, (until - STARTED) / 6), 600 if dry else HUNG

    def time_is_up() -> bool:
        return not dry and time.time() > until - longest

    for name, by, bandwidth in yardsticks(1e6 if dry else 4e9):
        book.attempt({"what": name, "by": by}, bandwidth, patience)
    reads = [row["bytes_per_second"] for row in book.rows if row["what"] == "read" and "bytes_per_second" in row]

    best = max(reads, default=None)

    def measure_point(model: Model | None, point: Point, who: Rivals) -> None:
        row, who = describe_row(model, point), rivals_of(who, quick=quick)
        if model:
            runs: Runs = iter([("ours", functools.partial(step_of, model, point, interpret))])
        else:
            runs = contenders(point, who, interpret)
        rate = functools.partial(speed, model, point, best)
        most = HUNG_MODEL if model and not dry else patience
        side_by_side(book, row, runs, rate, most, time_is_up, closely=who == "all")

    def measure_states(what: dict[str, Any], layer: Shape, prepare: Callable[[], Contender]) -> None:
        if not book.wants(what):
            return
        prepared: list[Contender] = []

        def keep() -> Contender:
            prepared.append(prepare())
            return prepared[0]

        book.attempt(what, functools.partial(measure_step, layer, what["batch"], keep), patience)
        if prepared and what["by"] == "ours":
            profiled = functools.partial(kernel_seconds, prepared[0])
            book.attempt(what | {"what": "kernels", "of": "states"}, profiled, patience)

    def pieces_of(work: Iterable[Piece]) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        return ((describe_row(*piece[:2]), functools.partial(measure_point, *piece)) for piece in work)

    states = (
        (piece[0], functools.partial(measure_states, *piece)) for piece in state_pieces(dry=dry, interpret=interpret)
    )
    first = sort_pieces([*pieces_of(tiny() if dry else headlines()), *states], only)
    skipped = 0
    for _, run in [*first, *pieces_of(() if dry else others())]:
        if time_is_up():
            skipped += 1
        else:
            run()
    if dry:  # everything of true size, as far as it comes without the chip
        for _, point, who in headlines():
            row = {"what": "lowers", **dataclasses.asdict(point)}
            if book.wants(row):
                book.attempt(row, functools.partial(lowered, point, who), patience)
    if skipped:
        book.attempt({"what": "skipped"}, lambda: {"pieces": skipped}, patience)
    for name, by, bandwidth in yardsticks(1e6 if dry else 4e9):  # whether the chip is as fast as it was
        book.attempt({"what": f"{name} again", "by": by}, bandwidth, patience)


def state_pieces(*, dry: bool, interpret) -> Iterator[tuple[dict[str, Any], Shape, Callable[[], Contender]]]:
    """Yields steps of layers that keep a state, by everyone: what a row says of each, the layer, and its program."""
    layers = [("tiny", Shape("state_space", 2, 1, 32, 16), (1, 1))] if dry else [
        (name, LAYERS[name], new) for new in STEPS.values() for name in LAYERS
    ]  # fmt: skip
    for name, layer, new in layers:
        for by, prepare in steps_of(layer, new, interpret):
            what = {"what": "states", "heads": layer.heads, "batch": len(new), "new": max(new), "kind": name, "by": by}
            yield what | {"ragged": len(set(new)) > 1}, layer, prepare


def rivals_of(who: Rivals, *, quick: bool) -> Rivals:
    """Returns whom a piece of work is measured with: quickly, not with those on dense caches."""
    return "paged" if quick and who == "all" else who


def describe_row(model: Model | None, point: Point) -> dict[str, Any]:
    """Returns what a row of results says that it is of, but for whom."""
    return {"what": "model" if model else point.what, **dataclasses.asdict(point)}


def side_by_side(
    book: Book, row: dict[str, Any], runs: Runs, rate: Callable[[float], dict[str, float]], patience: float,
    time_is_up: Callable[[], bool], *, closely: bool,
) -> None:  # fmt: skip
    """Measure everyone at one piece of work: this library first, and again behind the others, when the chip is as warm
    as it was for them. Looked at closely, its kernels are profiled, and what others compute is compared."""
    ours: list[Contender] = []
    out: list[Any] = []
    measured = 0
    for name, prepare in runs:
        what = row | {"by": name}
        if time_is_up() or not book.wants(what):
            continue
        prepared: list[Contender] = []

        def one(prepare=prepare, prepared=prepared, name=name) -> dict[str, Any]:
            contender = prepare()
            found: dict[str, Any] = rate(contender.seconds())
            prepared.append(contender)
            if closely and contender.once is not None:
                out.append(contender.once().astype(jnp.float32))
                if len(out) > 1:
                    found["off"] = float(jnp.abs(out.pop() - out[0]).max())
            if name == "ours":
                ours.append(contender)
            return found

        book.attempt(what, one, patience)
        measured += len(prepared)
        if prepared and name == "ours" and (closely or row["what"] == "model" or row["kind"] or row["rank"]):
            profiled = functools.partial(kernel_seconds, prepared[0])
            book.attempt(what | {"what": "kernels", "of": row["what"]}, profiled, patience)
        prepared.clear()
        if name == "torch":
            give_back()
    if ours and measured > 1:
        book.attempt(row | {"by": "ours, again"}, lambda: rate(ours[0].seconds()), patience)


def speed(model: Model | None, point: Point, read: float | None, seconds: float) -> dict[str, float]:
    found = {"seconds": seconds}
    if model is None and point.what != "decode":
        found["tflops"] = point.flops / seconds / 1e12
    if read and point.what != "prefill":
        found["share"] = (model.bytes(point) if model else point.kv_bytes) / seconds / read
    return found


if __name__ == "__main__":
    main()
