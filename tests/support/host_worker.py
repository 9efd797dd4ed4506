"""One of the processes of an engine over all of them; what it finds out, it prints. Run by test_hosts.py.

Requests come and leave by their numbers, so whoever starts the processes again can go on with what was saved.
"""

import json
import pathlib
import re
import sys
import time

import jax
import numpy as np
from checksum_model import LONGEST, Divided, Placed, Several, continuation
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
import jaxkv.distributed
import jaxkv.hooks
from jaxkv._core.state.multihost import put_replicated
from jaxkv._engine.programs.step_rows import StepVariant

WINDOWS, PATIENCE = (None, 7), 6
MOVES = r" = .*? ((?:all|reduce|collective)-(?:gather|reduce|to-all|scatter|permute))(?:-start)?\("


def say(name, value=""):
    print(f"{name}: {value}", flush=True)


def ask(number):
    """The prompt of a request, and how many tokens it wants."""
    draw = np.random.default_rng(number)
    common = [7] * int(draw.integers(0, 20)) if draw.random() < 0.5 else []
    prompt = [*common, *draw.integers(0, 97, int(draw.integers(1, 12))).tolist()]
    return prompt, int(draw.integers(1, LONGEST - len(prompt)))


def leaves(number):
    """Tells whether a request is cancelled before its end."""
    return number % 7 == 3


def is_forced(number):
    """Tells whether a request of an engine with a hook asks for one token alone."""
    return number % 3 == 1


def wanted(number, has_hook=False):
    """The tokens of a request."""
    prompt, count = ask(number)
    return [number % 97] * count if has_hook and is_forced(number) else continuation(WINDOWS, prompt, count, None)


def args_of(number):
    """What a request of an engine with a hook gives it, if anything."""
    return jaxkv.hooks.penalties(logit_bias={number % 97: 100}) if is_forced(number) else None


def make_engine(mesh, *, draft=None, has_hook=False, **options):
    """An engine whose model has a head for each of four devices; of one that takes drafts, each device has all."""
    if has_hook:
        options |= {"logits_hook": jaxkv.hooks.penalize, "hook_args": jaxkv.hooks.penalties()}

    def place(model):
        return Placed(put_replicated(np.zeros((), np.float32), NamedSharding(mesh, PartitionSpec())), model)

    model = place(Divided(WINDOWS) if draft is None else Several(WINDOWS))
    if draft is not None:
        options["draft"] = draft if draft == "ngram" else place(Several(WINDOWS, wrong=3))
    sizes = {"max_seqs": 4, "max_seq_len": LONGEST, "block_size": 8, "num_blocks": 12, "step_tokens": 16}
    return jaxkv.Engine(model, **sizes | options)


def lead(engine, path, requests, saved_every, has_hook):
    """Submits requests until there were so many, and works until all have ended; saves between steps."""
    running = {}
    if path.exists():
        running = {request.number: request for request in engine.load(path)}
    say("begins", json.dumps(sorted(running)))
    number, steps, began, seconds = engine._reader.numbers.next, 0, time.monotonic(), 0.0
    while number < requests or not engine.is_idle:
        draw = np.random.default_rng([number, steps])
        while number < requests and len(running) < 8 and draw.random() < 0.5:
            prompt, count = ask(number)
            running[number] = engine.submit(prompt, count, hook_args=args_of(number) if has_hook else None)
            assert running[number].number == number
            number += 1
        for left in [n for n, request in running.items() if leaves(n) and len(request.tokens) > 1]:
            running[left].cancel()
        began = time.perf_counter()
        pairs = engine.step()
        seconds, steps = seconds + time.perf_counter() - began, steps + 1
        for request, token in pairs:
            if token is None:
                running.pop(request.number, None)
                say("result", json.dumps([request.number, request.ended, request.tokens]))
        if saved_every and steps % saved_every == 0:
            engine.save(path)
            say("saved", steps)
    say("steps", steps)
    say("milliseconds", 1e3 * seconds / max(steps, 1))
    if hasattr(engine._core, "channel"):
        say("bytes", engine._core.channel.num_bytes / engine._core.channel.num_messages)
    say("stats", json.dumps({k: v for k, v in engine.stats().items() if isinstance(v, int)}))
    engine.close()
    say("ended")


def list_moves(engine):
    """The collectives of a decode step of an engine, as XLA compiles it."""
    runner, cache_manager = engine._cores[0].runner, engine._cores[0].cache_manager
    rows = runner._rows()
    program = runner._program.lower(
        cache_manager.device.leaves, runner.leaves, runner._memory, rows, None, None, variant=StepVariant("greedy", 0)
    )
    return sorted(re.findall(MOVES, program.compile().as_text()))


if __name__ == "__main__":
    process, port, folder, told = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), json.loads(sys.argv[4])
    if told["count"] > 1:
        jaxkv.distributed.initialize(f"127.0.0.1:{port}", told["count"], process, patience=PATIENCE)
    say("known")
    shape, axes = told.get("mesh", [[jax.device_count()], ["model"]])
    engine = make_engine(Mesh(np.array(jax.devices()).reshape(shape), axes), **told["options"])
    if told.get("moves"):
        say("moves", list_moves(engine))
    if process == 0:
        lead(engine, folder / "engine", told["requests"], told.get("saved_every", 0), "has_hook" in told["options"])
    else:
        engine.follow()
        say("ended")
