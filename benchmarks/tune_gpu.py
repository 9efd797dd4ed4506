"""Find the best tile, stages and number of thread blocks on the chip at hand, and print them as entries of `tuning`.

    python benchmarks/tune_gpu.py                 all head dims and groups, in at most 9 minutes
    python benchmarks/tune_gpu.py --head-dim 128  one of them
    python benchmarks/tune_gpu.py --most 8        so many plans of each, those nearest to today's first
    python benchmarks/tune_gpu.py --dry-run       what would be tried, without a GPU

Every measurement goes to `results/tune_gpu.json` as it is made. Copy the printed entries into
`pallas_kernels/gpu/tuning.py`.
"""

import argparse
import contextlib
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from _harness import save
from gpu_book import compile_tasks, run_tasks, run_worker, share_programs, watchdog
from gpu_contenders import calls_of, compile_ahead, ours
from gpu_plans import FORMS
from gpu_work import Point, inputs

from pallas_kernels.gpu import chips, tuning
from pallas_kernels.gpu.tiles import Tile

# One long row, many short ones, and the usual: a plan must do well on all of them.
DECODE_STEPS = ((1, 131_072), (128, 1024), (32, 8192))
PREFILL_STEPS = ((1, 4096), (8, 1024))
LONGEST_PLAN = 15  # seconds for all steps with one plan, if they have to be compiled


# What is tuned: a function of `tuning`, its arguments, the plans to try, and the steps to try them on.
type Job = tuple[str, tuple[int, int], list[Any], list[Point]]


def decode_plans() -> Iterator[tuning.DecodePlan]:
    for tokens, stages, blocks, part_tiles in itertools.product((64, 128), (2, 3, 4), (1, 2, 3), (0, 1, 2, 4)):
        yield tuning.DecodePlan(
            Tile(tokens, stages), num_blocks=chips.find_chip().num_cores * blocks, part_tiles=part_tiles
        )


def prefill_plans() -> Iterator[tuning.PrefillPlan]:
    for tokens, stages, form in itertools.product((64, 128), (2, 3, 4), ({}, *FORMS.values())):
        yield tuning.PrefillPlan(Tile(tokens, stages), **form)


def jobs(head_dims: tuple[int, ...]) -> Iterator[Job]:
    for head_dim in head_dims:
        for columns in (8, 16):
            heads = (4 * columns, 4)
            points = [Point(heads, batch, context, 16, head_dim=head_dim) for batch, context in DECODE_STEPS]
            yield "decode_plan", (head_dim, columns), list(decode_plans()), points
        points = [Point((32, 8), batch, new, 16, new, head_dim) for batch, new in PREFILL_STEPS]
        yield "prefill_plan", (head_dim, 16), list(prefill_plans()), points


def candidates(job: Job, most: int | None) -> list[Any]:
    """Returns the plans of a job, today's first and what is nearest to it next, the others in random order: whatever
    the time allows is a fair sample."""
    name, arguments, plans, _ = job
    today = getattr(tuning, name)(*arguments)
    random.Random(0).shuffle(plans)
    plans.sort(
        key=lambda plan: (plan.tile != today.tile, getattr(plan, "num_blocks", 0) != getattr(today, "num_blocks", 0))
    )
    return [today, *(plan for plan in plans if plan != today)][:most]


def use_plan(job: Job, plan: Any) -> contextlib.AbstractContextManager:
    """What `tuning` answers for the job is this plan, for 16-bit pools."""
    name, arguments, _, _ = job
    planned = getattr(tuning, name)

    def answer(first: int, second: int, itemsize: float = 2, *more: Any) -> Any:
        mine = first == arguments[0] and (second == arguments[1] or name == "prefill_plan") and itemsize == 2
        return plan if mine else planned(first, second, itemsize, *more)

    return mock.patch.object(tuning, name, answer)


def tune(job: Job, most: int | None, end: float, rows: list[dict[str, Any]]) -> Any:
    """The fastest plan by the sum over its steps, each in units of what its K and V or its products should take; None
    if none ran. What was measured is added to `rows`."""
    name, arguments, plans, points = job
    times: dict[Any, float] = {}
    try:
        steps = [(point, inputs(point, point.pools)) for point in points]
    except Exception as e:  # no memory for them: another tenant of the chip, say
        print(f"  # {name}{arguments}: {e!r:.200}", flush=True)
        return None
    for plan in candidates(job, most):
        if time.time() > end:
            print(f"  # The time is up after {len(times)} of {len(plans)} plans.")
            break
        row: dict[str, Any] = {"what": name, "arguments": arguments, "plan": repr(plan)}
        try:
            with watchdog(f"{name}{arguments}: {plan}", 2 * LONGEST_PLAN), use_plan(job, plan):
                row["seconds"] = [
                    calls_of(ours(point), *arrays.values(), expected=point.expected).seconds()
                    for point, arrays in steps
                ]
            floors = [max(point.kv_bytes / 4e12, point.flops / 6e14) for point in points]
            times[plan] = sum(took / floor for took, floor in zip(row["seconds"], floors, strict=True))
            row["times_the_floor"] = times[plan] / len(steps)
        except Exception as e:  # too much shared memory, say
            row["error"] = repr(e)[:200]
        print("  #", *row.values(), flush=True)
        rows.append(row)
        save("tune_gpu", rows)
    return min(times, key=times.__getitem__, default=None)


def compile_some(todo: list[Job], most: int | None, nth: int, count: int, end: float) -> None:
    """Compiles each `count`th of all programs, for the cache that `tune` will find them in."""
    programs = [(job, plan, point) for job in todo for plan in candidates(job, most) for point in job[3]]
    for job, plan, point in programs[nth::count]:
        if time.time() < end:
            with use_plan(job, plan):
                compile_ahead(point, "none", lambda by: True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, choices=(64, 128, 256))
    parser.add_argument("--most", type=int, help="plans of each head_dim and group")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seconds", type=float, default=540, help="time for all of it")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    until = options.until or time.time() + options.seconds
    todo = list(jobs((options.head_dim,) if options.head_dim else (128, 64, 256)))
    if options.dry_run:
        for name, arguments, plans, points in todo:
            print(f"{name}{arguments}: {len(plans)} plans on {len(points)} steps")
    elif options.worker is None:
        with tempfile.TemporaryDirectory() as folder:
            cache = share_programs(folder)
            run_tasks(compile_tasks(sys.argv[1:]), until, cache)
            raise SystemExit(run_worker(sys.argv[1:], until, cache))
    elif options.compile:
        compile_some(todo, options.most, *options.compile, until)
    else:
        rows: list[dict[str, Any]] = []
        for i, job in enumerate(todo):
            now, end = time.time(), until - LONGEST_PLAN
            share = (end - now) / (len(todo) - i)  # what a job leaves is for the others
            best = tune(job, options.most, now + share, rows)
            key = (chips.find_chip(), *(job[1] if job[0] == "decode_plan" else job[1][:1]))
            entry = f"TUNED_{job[0].removesuffix('_plan').upper()}[{key}]"
            print(f"{entry} = {best}" if best else f"# {entry}: no plan ran", flush=True)


if __name__ == "__main__":
    main()
