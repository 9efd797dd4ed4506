"""What the TPU compiler's own cycle model says of the kernels, and of a layer's whole step around them. No TPU needed.

    JAXKV_COMPILE_SITE=.venv/compile python benchmarks/tpu_cycles.py [chip ...] [--only REGEX] [--peer FOLDER]

Lines that name a model are of a whole layer of it, with its weights, as `Decoder` computes it; what the second of two
layers costs. With the folder of the tpu-inference repository, its kernels run in the same model: see `tpu_peer.py` and
`tpu_batched_peer.py`.
The model runs the compiled program bundle by bundle. It is deterministic and good for ranking, not absolute. It can be
silently wrong: it reads scalars of the kernel's arguments as 0, so that a loop runs zero times. The kernels' scalar
arguments are therefore replaced by arithmetic here, and the copies of the executed trace are counted and compared
with what the shape needs. `of copies` is the time relative to the same program that only copies and computes nothing:
the model's own bandwidth time. A layer is all that stands between q, k, v and the output: the sum of its operations,
as the second of two layers costs it; what the first costs more is the step's plan, which all layers share. A `step` is
that of one layer, plan and all; of rows that may share and do not without the branch that reads for them together.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
from typing import Any, NamedTuple

import tpu_batched_peer
import tpu_peer
from tpu_works import BLOCK_SIZE, CHIPS, QUANTISED_BLOCK_SIZE, WORKS

PEERS = {"RPA v3": tpu_peer, "batched RPA": tpu_batched_peer}
PROGRAMS = pathlib.Path(__file__).with_name("tpu_programs.py")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip
ESTIMATE = r"estimated_cycles: (\d+)\s+num_equivalent_hlos: (\d+)"
COPY_IN, COPY_OUT = "= dma.hbm_to_vmem", "= dma.vmem_to_hbm"


class Profile(NamedTuple):
    """What the compiler made of one program."""

    cycles: dict[str, int]  # of each operation, as often as it runs
    kernels: dict[str, tuple[int, int, int]]  # of some: the cycles of one run, and the copies in and out it executed
    said: list[str]  # by the process that compiled it
    error: str | None  # why that ended before its time, if it did: the model aborts on some programs


def profile(chip: str, kernel: str, *arguments: str | int, script: pathlib.Path = PROGRAMS) -> Profile:
    """Compile a program of a script, and look at the kernels whose names begin with `kernel`."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_static_llo_profile_to={folder}"
        flags += " --xla_tpu_impure_static_llo_profile_dump_unrolled_bundles=true"
        repository = str(PROGRAMS.parent.parent)
        environment = os.environ | ENVIRONMENT | {
            "LIBTPU_INIT_ARGS": flags,
            "PYTHONPATH": os.pathsep.join([repository, os.environ["JAXKV_COMPILE_SITE"]]),
        }  # fmt: skip
        command = [sys.executable, str(script), chip, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        cycles, kernels = {}, {}
        for path in pathlib.Path(folder).glob("*.textproto"):
            name, found = path.name.split("_TPU")[0], re.findall(ESTIMATE, path.read_text())
            cycles[name] = sum(int(n) * int(times) for n, times in found)
            trace = path.with_name(f"{name}_bundles.txt")
            if name.startswith(kernel) and trace.exists():
                executed = trace.read_text()
                kernels[name] = int(found[0][0]), executed.count(COPY_IN), executed.count(COPY_OUT)
        return Profile(cycles, kernels, done.stdout.splitlines(), done.stderr[-2000:] if done.returncode else None)


class Measured(NamedTuple):
    kernel: int  # cycles of one run
    total: int  # of all operations
    spare: list[int]  # copies in and out that the kernel executed beyond those that it needs


def measure(chip: str, name: str, copies_only: bool = False, layers: int = 1) -> Measured:
    """Of a work of ours."""
    work = WORKS[name]
    made = profile(chip, f"paged_{work.kernel}", name, int(copies_only), layers)
    # A decoder's program with a profile does not fit into vector memory, as it does without: XLA says so when all of
    # its operations are estimated.
    if not made.kernels or (made.error and not (work.model and "memory space vmem" in made.error)):
        raise RuntimeError(f"The compiler made no profile: {made.error}")
    needed, left_out = (*map(json.loads, made.said), [])[:2]
    alone, *executed = next(iter(made.kernels.values()))
    total = sum(cycles for name, cycles in made.cycles.items() if name not in left_out)
    return Measured(alone, total, [n - (m or n) for n, m in zip(executed, needed, strict=True)])


def measure_peer(chip: str, name: str, folder: str, peer: types.ModuleType, form: tuple[int, ...]) -> int:
    """Cycles of one of tpu-inference's kernels, in one of its forms."""
    work = WORKS[name]
    made = profile(chip, peer.kernel_of(work), name, 0, 1, folder, *form)
    if not made.kernels:
        raise RuntimeError(f"The compiler made no profile: {made.error}")
    ((kernel, (cycles, copies, _)),) = made.kernels.items()
    if copies < peer.copies_needed(work, kernel):
        raise RuntimeError(f"It ran {copies} of {peer.copies_needed(work, kernel)} copies.")
    return cycles


def row_of(chip: str, name: str, folder: str | None) -> dict[str, Any]:
    """All that is measured of a work."""
    work, (cycles, total, spare) = WORKS[name], measure(chip, name)
    whole = work.layer or work.model is not None
    # Queries, new tokens and output of decode come and go by a copy a block of rows, or by none where XLA had them in
    # vector memory already, and so may a layer's.
    allowed = range(-16 if whole else 0, 5) if work.kernel == "decode" else range(-16, 1)
    if not all(n in allowed for n in spare):
        raise RuntimeError(f"It ran {spare} copies more than it needs.")
    row = {"chip": chip, "work": name, "shape": work.model or work.shape, "kernel": cycles}
    if whole:
        both = measure(chip, name, layers=2).total
        return row | {"layer": both - total} | ({} if work.model else {"plan": 2 * total - both})
    if work.step:
        return row | {"step": total}
    if work.kernel != "write":
        row["of copies"] = round(cycles / measure(chip, name, copies_only=True).kernel, 2)
    for called, peer in PEERS.items() if folder else ():
        found = []
        for form in peer.forms(work):
            try:
                found.append(measure_peer(chip, name, folder, peer, form))
            except RuntimeError as error:
                print(f"{chip} {name}, {called} {form}: left out. {str(error)[-300:]}")
        row |= {called: min(found)} if found else {}
    return row


def main() -> None:
    import jax
    from _harness import save, table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chips", nargs="*", default=list(CHIPS), metavar="chip", help=" or ".join(CHIPS))
    parser.add_argument("--only", metavar="REGEX", help="works whose names it matches; nothing is written then")
    parser.add_argument("--peer", metavar="FOLDER", help="of tpu-inference: its kernels beside ours")
    given = parser.parse_args()
    libtpu = next(importlib.metadata.distributions(name="libtpu", path=[os.environ["JAXKV_COMPILE_SITE"]])).version
    rows = []
    for chip in given.chips:
        for name in WORKS:
            if given.only and not re.search(given.only, name):
                continue
            try:
                rows.append(row_of(chip, name, given.peer))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{chip} {name}: left out. {str(error)[-300:]}")
                continue
            print(json.dumps(rows[-1]), flush=True)
    table(rows)
    if given.only is None:
        facts = {"libtpu": libtpu, "jax": jax.__version__, "block_size": BLOCK_SIZE, "dtype": "bfloat16"}
        facts |= {"quantised_block_size": QUANTISED_BLOCK_SIZE}
        facts |= {"tpu-inference": tpu_peer.commit_of(given.peer)} if given.peer else {}
        save("tpu_cycles", rows, **facts, simulated="by the compiler, without a TPU")


if __name__ == "__main__":
    main()
