"""Trains the small model that ships with jaxkv, on the sources of Python's own standard library.

    python benchmarks/train_small_model.py train --folder DIR --minutes 66   # a checkpoint every few minutes
    python benchmarks/train_small_model.py train --folder DIR --shipped      # ... and on from the model that ships
    python benchmarks/train_small_model.py export --folder DIR               # from there to jaxkv/data/small

`export` writes the loss curve beside the other results, to `results/train_small_model.json` and `.png` (it needs
matplotlib), and how the model before it and the new one go on from the demo's prompts.

A token is a byte; byte 0, which no source holds, begins and ends a file. Sources are read as `ast.unparse` writes them,
without docstrings: so little a model learns either prose or Python. The learning rate follows the clock, not the
step count, so that a slow machine gets a finished, if weaker, model in the same time.
"""

import argparse
import ast
import json
import math
import pathlib
import platform
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np
from _harness import RESULTS, save
from flax import nnx

import jaxkv
from jaxkv import models
from jaxkv._cli.generate import DEMO_PROMPTS
from jaxkv.models import Decoder, DecoderConfig, Rope

CONTEXT, BATCH = 256, 8
LAYERS, WARM_UP_STEPS, PEAK_RATE = 5, 200, 3e-3
CONFIG = DecoderConfig(
    vocab_size=256, embed_dim=160, mlp_dim=448, num_heads=4, num_kv_heads=2, head_dim=32, max_seq_len=CONTEXT,
    windows=(None,) * LAYERS, ropes=(Rope(theta=10_000.0),) * LAYERS, attention_scale=32**-0.5, tie_embeddings=True,
    bos_id=0, eos_ids=(0,), byte_tokens=True,
)  # fmt: skip
# Tables and generated text teach nothing about how Python reads; tests would be most of the corpus.
LEFT_OUT = {"site-packages", "dist-packages", "encodings", "pydoc_data", "test", "tests", "idle_test", "idlelib",
            "lib2to3", "turtledemo"}  # fmt: skip


def plainly(source: bytes) -> bytes:
    """The same program in one style, without comments and docstrings."""
    program = ast.parse(source)
    for node in ast.walk(program):
        may_have = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if may_have and ast.get_docstring(node, clean=False) is not None:
            node.body[:1] = [] if node.body[1:] or node is program else [ast.Pass()]
    return ast.unparse(program).encode() + b"\n"


def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and bytes to validate on (every 20th file)."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not LEFT_OUT & set(p.relative_to(root).parts))
    texts = [plainly(p.read_bytes()) for p in files if not p.name.startswith("_sysconfigdata")]
    texts = [text for text in texts if b"\0" not in text and max(map(len, text.split(b"\n"))) < 400]

    def join(texts: list[bytes]) -> np.ndarray:
        return np.frombuffer(b"\0" + b"\0".join(texts) + b"\0", np.uint8)

    held_out = texts[10::20]
    return join([text for i, text in enumerate(texts) if i % 20 != 10]), join(held_out)


def loss_of(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Mean nats per byte of `i32[B, CONTEXT + 1]`."""
    logits, _ = model(tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return -jnp.mean(chosen)


def adamw(params, grads, moments, step, rate, *, b1=0.9, b2=0.98, decay=0.1, clip=1.0):
    """One step of AdamW (https://arxiv.org/abs/1711.05101), gradients clipped by their global norm."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / norm), grads)
    first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, moments[1], grads)

    def update(p, m, v):
        direction = (m / (1 - b1**step)) / (jnp.sqrt(v / (1 - b2**step)) + 1e-8)
        return p - rate * (direction + (decay * p if p.ndim > 1 else 0.0))

    return jax.tree.map(update, params, first, second), (first, second)


def train(folder: pathlib.Path, minutes: float, shipped: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text, held_out = corpus()
    graph, params = nnx.split(models.small() if shipped else Decoder(CONFIG, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    size = sum(p.size for p in jax.tree.leaves(params))
    print(f"{len(text)} bytes to train on, {len(held_out)} held out, {size} parameters", flush=True)
    moments = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    @jax.jit
    def evaluate(params, tokens):
        return loss_of(nnx.merge(graph, params), tokens)

    def train_step(params, moments, tokens, step, rate):
        loss, grads = jax.value_and_grad(lambda p: loss_of(nnx.merge(graph, p), tokens))(params)
        return *adamw(params, grads, moments, step, rate), loss

    train_step = jax.jit(train_step, donate_argnums=(0, 1))
    places = np.arange(CONTEXT + 1)
    checks = [held_out[s + places].astype(np.int32) for s in
              np.random.default_rng(1).integers(0, len(held_out) - CONTEXT - 1, (8, BATCH, 1))]  # fmt: skip
    random, curve, losses = np.random.default_rng(0), [], []
    peak = PEAK_RATE / 2 if shipped else PEAK_RATE
    began = saved = time.monotonic()
    step = 0
    while (elapsed := time.monotonic() - began) < 60 * minutes:
        step += 1
        progress = elapsed / (60 * minutes)
        rate = peak * min(1.0, step / WARM_UP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        tokens = text[random.integers(0, len(text) - CONTEXT - 1, (BATCH, 1)) + places].astype(np.int32)
        params, moments, loss = train_step(params, moments, tokens, jnp.float32(step), jnp.float32(rate))
        losses.append(loss)
        if step % 100 == 0:
            validation = float(np.mean([evaluate(params, check) for check in checks]))
            curve.append(dict(step=step, seconds=round(elapsed, 1), bytes=step * BATCH * CONTEXT, rate=round(rate, 6),
                              train=round(float(np.mean(losses)), 4), validation=round(validation, 4)))  # fmt: skip
            losses = []
            print(curve[-1], flush=True)
        if time.monotonic() - saved > 180 or elapsed > 60 * minutes - 5:
            saved = time.monotonic()
            checkpoint(folder, params, curve)
    checkpoint(folder, params, curve)


def checkpoint(folder: pathlib.Path, params, curve: list[dict]) -> None:
    leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(params))}
    np.savez(folder / "new.npz", **leaves)
    (folder / "new.npz").replace(folder / "weights.npz")
    (folder / "loss.json").write_text(json.dumps(curve))


def samples(model: Decoder) -> list[dict]:
    """Its greedy continuations of the demo's prompts, and whether they are Python but for the last, unfinished line."""
    rows, prompts = [], [list(prompt.encode()) for prompt in DEMO_PROMPTS]
    for prompt, tokens in zip(DEMO_PROMPTS, jaxkv.generate(model, prompts, 96), strict=True):
        text = prompt + bytes(map(int, tokens)).partition(b"\0")[0].decode(errors="replace")
        complete = text.rpartition("\n")[0]
        try:
            ast.parse(complete)
            rows.append(dict(text=text, valid=len(complete) > len(prompt)))
        except SyntaxError as error:
            rows.append(dict(text=text, valid=False, error=error.msg))
    return rows


def loss_on(model: Decoder, text: np.ndarray) -> float:
    """Nats per byte, in pieces of a context each."""
    rows = len(text) // (CONTEXT + 1)
    pieces = text[: rows * (CONTEXT + 1)].reshape(rows, CONTEXT + 1).astype(np.int32)
    of = jax.jit(loss_of)
    return float(np.mean([of(model, pieces[i : i + BATCH]) for i in range(0, rows - BATCH + 1, BATCH)]))


def export(folder: pathlib.Path) -> None:
    text, held_out = corpus()
    before = models.small()
    facts = dict(before=dict(loss=loss_on(before, held_out), samples=samples(before)))
    graph, params = nnx.split(Decoder(CONFIG, dtype=jnp.float16, rngs=nnx.Rngs(0)))
    with np.load(folder / "weights.npz") as file:
        leaves = [jnp.asarray(file[str(i)], jnp.float16) for i in range(len(file.files))]
    model = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(params), leaves))
    models.save(model, pathlib.Path(models.__file__).parent.parent / "data" / "small")
    curve = json.loads((folder / "loss.json").read_text())
    after = models.small()
    facts |= dict(after=dict(loss=loss_on(after, held_out), samples=samples(after)))
    facts |= dict(unit="nats per byte", trained_on=len(text), held_out=len(held_out), batch=BATCH, context=CONTEXT,
                  parameters=sum(leaf.size for leaf in leaves), python=platform.python_version())  # fmt: skip
    save("train_small_model", curve, **facts)
    plot(curve)


def plot(curve: list[dict]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for name in ("train", "validation"):
        axes.plot([row["bytes"] / 1e6 for row in curve], [row[name] for row in curve], label=name)
    axes.set(xlabel="million bytes seen", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / "train_small_model.png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "export"])
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="where the checkpoint and the loss curve go")
    parser.add_argument("--minutes", type=float, default=66.0)
    parser.add_argument("--shipped", action="store_true", help="begin with the weights that ship")
    arguments = parser.parse_args()
    if arguments.command == "train":
        train(arguments.folder, arguments.minutes, arguments.shipped)
    else:
        export(arguments.folder)


if __name__ == "__main__":
    main()
