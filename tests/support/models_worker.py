"""One of the processes of engines of real models over all of them, one after another; process 0 prints what each gives.
Run by test_hosts.py."""

import functools
import json
import pathlib
import sys

import jax
import numpy as np
from fixtures import DATA, expected
from jax.sharding import Mesh

import jaxkv
import jaxkv.distributed
from jaxkv import scores

SIZES = {"max_seqs": 3, "max_seq_len": 64, "block_size": 4, "step_tokens": 16}
NEW = 12


def say(name, value=""):
    print(f"{name}: {value}", flush=True)


def read_options(options):
    """The options of an engine: an eviction is told by its score, budget and how often."""
    if "evict" in options:
        score, *rest = options["evict"]
        score = functools.partial(scores.snapkv, window_size=4, kernel_size=3) if score == "snapkv" else score
        options = options | {"evict": jaxkv.Eviction(score, *rest[:2], **dict(rest[2:]))}
    return options


def serve(engine, prompts, path, resumed):
    """Submits prompts while others are under way, one of them with samples, and cancels one; goes on with what another
    engine has saved on the way, or itself. Returns all tokens."""
    requests = [engine.submit(prompt, NEW) for prompt in prompts[:2]]
    for _ in range(3):
        engine.step()
    if resumed is not None:
        engine.save(path)
    requests += [engine.submit(prompt, NEW) for prompt in prompts[2:]]
    requests += engine.submit(prompts[1], NEW, temperature=1.0, n=2, logprobs=1).samples
    left = engine.submit(prompts[0][:5], NEW)
    for _ in range(3):
        engine.step()
    left.cancel()
    for _ in engine.run():
        pass
    requests.append(engine.submit(prompts[0], NEW))  # of which a prefix cache knows all by now
    for _ in engine.run():
        pass
    stats = engine.stats()
    if resumed is not None:
        requests += engine.load(resumed)
        for _ in engine.run():
            pass
        assert [request.tokens for request in requests[-2:]] == [request.tokens for request in requests[:2]]
    return [request.tokens for request in requests], stats


def main(process, port, folder, told):
    told = json.loads(told)
    if told["count"] > 1:
        jaxkv.distributed.initialize(f"127.0.0.1:{port}", told["count"], process)
    mesh = Mesh(np.array(jax.devices()), ["model"])
    for i, (name, options) in enumerate(told["cases"]):
        model = jaxkv.models.load(DATA / name, mesh=mesh)
        engine = jaxkv.Engine(model, **SIZES | read_options(options))
        if process:
            engine.follow()
            continue
        prompts = [(list(map(int, e.prompt)) * 3)[: 9 + 7 * i] for i, e in enumerate(expected(name))]
        resumed = None if "evict" in options else folder / f"{i} of {told['resumed']}"
        tokens, stats = serve(engine, prompts, folder / f"{i} of {told['count']}", resumed)
        say("tokens", json.dumps(tokens))
        say("stats", json.dumps({k: v for k, v in stats.items() if isinstance(v, int) and v}))
        engine.close()
    say("ended")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4])
