"""Find the best tile, stages and number of thread blocks on the chip at hand, and print them as entries of `tuning`.

    python benchmarks/tune_gpu.py                 all head dims and groups, in at most 9 minutes
    python benchmarks/tune_gpu.py --head-dim 128  one of them
    python benchmarks/tune_gpu.py --dry-run       what would be tried, without a GPU

Every measurement goes to `results/tune_gpu.json` as it is made. Copy the printed entries into
`pallas_kernels/gpu/tuning.py`.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from _harness import save
from gpu_book import watchdog
from gpu_contenders import calls_of, ours
from gpu_plans import FORMS
from gpu_work import Point, inputs

from pallas_kernels.gpu import tuning
from pallas_kernels.gpu.tiles import Tile

# One long row, many short ones, and the usual: a plan must do well on all of them.
DECODE_STEPS = ((1, 32768), (128, 1024), (32, 8192))
PREFILL_STEPS = ((1, 4096), (8, 1024))
LONGEST_PLAN = 30  # seconds for all steps with one plan, their compilation included


# What is tuned: a function of `tuning`, its arguments, the plans to try, and the steps to try them on.
type Job = tuple[str, tuple[int, int], list[Any], list[Point]]


def decode_plans() -> Iterator[tuning.DecodePlan]:
    for tokens, stages, blocks in itertools.product((64, 128), (2, 3, 4), (1, 2, 3, 4)):
        yield tuning.DecodePlan(Tile(tokens, stages), num_blocks=tuning.chip()[1] * blocks)


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


def seconds(name: str, arguments: tuple[int, int], plan: Any, steps: list[tuple[Point, dict]]) -> float:
    """Time of all steps with one plan, each in units of what its K and V or its products should take."""
    planned = getattr(tuning, name)

    def patched(*asked: int) -> Any:
        return plan if asked == arguments else planned(*asked)

    total = 0.0
    with mock.patch.object(tuning, name, patched):
        for point, arrays in steps:
            floor = max(point.kv_bytes / 4e12, point.flops / 6e14)
            contender = calls_of(ours(point), *arrays.values(), expected=point.expected)
            total += contender.seconds() / floor
    return total


def tune(job: Job, end: float, rows: list[dict[str, Any]]) -> Any:
    """The fastest plan, or None if none ran. What was measured is added to `rows`."""
    name, arguments, plans, points = job
    random.Random(0).shuffle(plans)  # so that whatever the time allows is a fair sample
    today = getattr(tuning, name)(*arguments)
    plans.sort(key=lambda plan: plan.tile != today.tile)  # the other forms of today's plan, before other tiles
    times: dict[Any, float] = {}
    try:
        steps = [(point, inputs(point, point.pools)) for point in points]
    except Exception as e:  # no memory for them: another tenant of the chip, say
        print(f"  # {name}{arguments}: {e!r:.200}", flush=True)
        return None
    for plan in [today, *(plan for plan in plans if plan != today)]:
        if time.perf_counter() > end:
            print(f"  # The time is up after {len(times)} of {len(plans)} plans.")
            break
        row = {"what": name, "arguments": arguments, "plan": repr(plan)}
        try:
            with watchdog(f"{name}{arguments}: {plan}", 2 * LONGEST_PLAN):
                times[plan] = seconds(name, arguments, plan, steps)
            row["times_the_floor"] = times[plan] / len(steps)
        except Exception as e:  # too much shared memory, say
            row["error"] = repr(e)[:200]
        print("  #", *row.values(), flush=True)
        rows.append(row)
        save("tune_gpu", rows)
    return min(times, key=times.__getitem__, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, choices=(64, 128, 256))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seconds", type=float, default=540, help="time for all of it")
    options = parser.parse_args()
    todo = list(jobs((options.head_dim,) if options.head_dim else (128, 64, 256)))
    end = time.perf_counter() + options.seconds - LONGEST_PLAN
    rows: list[dict[str, Any]] = []
    for i, job in enumerate(todo):
        name, arguments, plans, points = job
        if options.dry_run:
            print(f"{name}{arguments}: {len(plans)} plans on {len(points)} steps")
            continue
        now = time.perf_counter()
        best = tune(job, now + (end - now) / (len(todo) - i), rows)  # what one does not use is for the others
        key = (tuning.chip(), *(arguments if name == "decode_plan" else arguments[:1]))
        entry = f"TUNED_{name.removesuffix('_plan').upper()}[{key}]"
        print(f"{entry} = {best}" if best else f"# {entry}: no plan ran", flush=True)


if __name__ == "__main__":
    main()
