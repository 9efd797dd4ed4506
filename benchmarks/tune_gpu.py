"""Find the best tile, stages and number of thread blocks on the chip at hand, and print them as entries of `_tuning`.

    python benchmarks/tune_gpu.py                 all head dims and groups; about 10 minutes
    python benchmarks/tune_gpu.py --head-dim 128  one of them
    python benchmarks/tune_gpu.py --dry-run       what would be tried, without a GPU

Copy the printed entries into `pallas_kernels/gpu/_tuning.py`.
"""

import argparse
import itertools
from collections.abc import Iterator
from unittest import mock

import gpu as benchmark
import jax

from pallas_kernels.gpu import _tuning
from pallas_kernels.gpu._tiles import Tile

# One long row, many short ones, and the usual: a plan must do well on all of them.
DECODE_STEPS = ((1, 32768), (128, 1024), (32, 8192))
PREFILL_STEPS = ((1, 4096), (8, 1024))


def decode_plans() -> Iterator[_tuning.DecodePlan]:
    for tokens, stages, blocks in itertools.product((64, 128), (2, 3, 4), (1, 2, 3, 4)):
        yield _tuning.DecodePlan(Tile(tokens, stages), num_blocks=132 * blocks)


def prefill_plans() -> Iterator[_tuning.PrefillPlan]:
    for tokens, stages in itertools.product((64, 128), (2, 3, 4)):
        yield _tuning.PrefillPlan(Tile(tokens, stages))


def seconds(name: str, plan, points: list[benchmark.Point]) -> float:
    """Time of all steps with one plan, each in units of what its K and V or its products should take."""
    total = 0.0
    with mock.patch.object(_tuning, name, lambda *_: plan):
        for point in points:
            arrays = benchmark.inputs(point, copies=point.copies)
            floor = max(point.kv_bytes / 4e12, point.flops / 6e14)
            total += benchmark.seconds_per_call(benchmark.ours(None), *arrays.values(), count=point.count) / floor
    return total


def best(name: str, plans: list, points: list[benchmark.Point]):
    """The fastest plan. One that does not compile (too much shared memory) is out."""
    times = {}
    for plan in plans:
        try:
            times[plan] = seconds(name, plan, points)
        except Exception as e:
            print(f"  # {plan}: {repr(e)[:80]}")
    return min(times, key=times.get)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, choices=(64, 128, 256))
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    chip = jax.devices()[0].device_kind
    for head_dim in [options.head_dim] if options.head_dim else (128, 64, 256):
        for columns in (8, 16):
            heads = (4 * columns, 4)
            points = [benchmark.Point(heads, batch, context, 16, head_dim=head_dim) for batch, context in DECODE_STEPS]
            plans = list(decode_plans())
            found = f"any of {len(plans)} plans" if options.dry_run else best("decode_plan", plans, points)
            print(f"TUNED_DECODE[{chip!r}, {head_dim}, {columns}] = {found}")
        points = [benchmark.Point((32, 8), batch, new, 16, new, head_dim) for batch, new in PREFILL_STEPS]
        plans = list(prefill_plans())
        found = f"any of {len(plans)} plans" if options.dry_run else best("prefill_plan", plans, points)
        print(f"TUNED_PREFILL[{chip!r}, {head_dim}] = {found}")


if __name__ == "__main__":
    main()
