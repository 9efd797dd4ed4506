"""Trains the second small model that ships with jaxkv: it recalls pairs that stand anywhere in 1,024 tokens.

    python benchmarks/train_recall_model.py            # four minutes of CPU; writes jaxkv/data/recall

A context begins with token 0. In it stand pairs, a key and its value right behind it, anywhere among tokens that mean
nothing; behind it stand questions, each token 1 and a key, and after each key the model is to say its value. Every
context asks for all of its pairs, and short contexts come first.

Recalling takes two layers: one in which a token looks at the one before it, and one that looks for what stood behind
the same key (induction heads, https://arxiv.org/abs/2209.11895). Training finds neither while it lacks the other, and
from a random start five minutes were not enough. So it starts from a rough draft of both, `wire`.

What each part of training cost and reached goes to `results/train_recall_model.json`.
"""

import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from _harness import save, table
from flax import nnx
from train_small_model import adamw

from jaxkv import models
from jaxkv.models import Decoder, DecoderConfig, Rope

FIRST, ASK = 0, 1
KEYS, VALUES, FILLERS = np.arange(2, 66), np.arange(66, 130), np.arange(130, 192)
CONTEXT, PAIRS = 1024, 32
WIDTH, HEADS, HEAD_DIM = 64, 4, 32
CONFIG = DecoderConfig(
    vocab_size=192, embed_dim=WIDTH, mlp_dim=64, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM,
    max_seq_len=CONTEXT + 2 * len(KEYS), windows=(None,) * 2, ropes=(Rope(theta=1e6),) * 2,
    attention_scale=HEAD_DIM**-0.5, qkv_bias=True, out_bias=True, bos_id=FIRST,
)  # fmt: skip
# Tokens of a context, its pairs, contexts in a batch, steps.
CURRICULUM = [(64, 16, 32, 120), (256, 32, 8, 200), (CONTEXT, PAIRS, 4, 140)]
PEAK_RATE, LAST_RATE, WARM_UP_STEPS = 3e-3, 3e-4, 20


def sample(random: np.random.Generator, rows: int, context: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Contexts with questions about all of their pairs, `i32[rows, context + 2 * pairs]`, and what is to be said after
    the keys of the questions, `i32[rows, pairs]`."""
    tokens = random.choice(FILLERS, (rows, context + 2 * pairs))
    answers = np.empty((rows, pairs), np.int32)
    tokens[:, 0], tokens[:, context::2] = FIRST, ASK
    for row, answer in zip(tokens, answers, strict=True):
        keys, values = random.permutation(KEYS)[:pairs], random.choice(VALUES, pairs)
        place = 1 + np.sort(random.choice(context - 1 - pairs, pairs, replace=False)) + np.arange(pairs)
        row[place], row[place + 1] = keys, values
        order = random.permutation(pairs)
        row[context + 1 :: 2], answer[:] = keys[order], values[order]
    return tokens.astype(np.int32), answers


def wire(model: Decoder, random: np.random.Generator, sharpness: float = 5.0, gain: float = 1.5) -> None:
    """A rough draft of what is to be learnt: two heads of the first layer look one token back and add what they see,
    turned by a rotation; keys of the second layer see that as queries see a token itself; what its heads see they say.
    """
    first, second = (layer.attention for layer in model.layers)
    model.head[...] = model.embed[...] + 0.0
    model.embed[...] *= WIDTH**0.5

    angle, back = CONFIG.ropes[0].frequencies(HEAD_DIM), np.zeros((HEADS, 1), np.float32)
    back[:2] = sharpness
    first.key_bias[...] = jnp.asarray(np.concatenate([back + 0 * angle, 0 * back + 0 * angle], axis=1))
    first.query_bias[...] = jnp.asarray(np.concatenate([back * np.cos(angle), -back * np.sin(angle)], axis=1))
    for kernel in (first.query, first.key):
        kernel[...] = kernel[...].at[:2].multiply(0.1)

    basis, turn = (np.linalg.qr(random.normal(size=(WIDTH, WIDTH)))[0].astype(np.float32) for _ in range(2))
    for layer, heads, target in ((first, (0, 1), turn), (second, (0, 1, 2, 3), np.eye(WIDTH, dtype=np.float32))):
        for head in heads:
            part = basis[:, HEAD_DIM * (head % 2) :][:, :HEAD_DIM]
            layer.value[...] = layer.value[...].at[head].set(part.T)
            layer.out[...] = layer.out[...].at[head].set(part.T @ target)
    second.query[...] *= gain
    second.key[...] = jnp.einsum("ef,hde->hdf", turn, second.query[...])


def logits_of(model: Decoder, tokens: jax.Array, pairs: int) -> jax.Array:
    """`f32[rows, pairs, V]`: after each question."""
    return model(tokens)[0][:, tokens.shape[1] - 2 * pairs + 1 :: 2]


def train() -> tuple[Decoder, list[dict]]:
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    wire(model, np.random.default_rng(0))
    graph, params = nnx.split(model)
    moments = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, moments, tokens, answers, step, rate):
        def loss_of(params):
            logits = logits_of(nnx.merge(graph, params), tokens, answers.shape[1])
            right = jnp.take_along_axis(jax.nn.log_softmax(logits), answers[..., None], axis=-1)
            return -jnp.mean(right), jnp.mean(jnp.argmax(logits, axis=-1) == answers)

        (loss, recall), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return *adamw(params, grads, moments, step, rate, decay=0.01), loss, recall

    random, step, rows = np.random.default_rng(1), 0, []
    total = sum(steps for *_, steps in CURRICULUM)
    for context, pairs, batch, steps in CURRICULUM:
        began, seen = time.process_time(), []
        for _ in range(steps):
            step += 1
            rate = min(1.0, step / WARM_UP_STEPS) * (PEAK_RATE + (LAST_RATE - PEAK_RATE) * step / total)
            batch_of = sample(random, batch, context, pairs)
            params, moments, *found = train_step(params, moments, *batch_of, jnp.float32(step), jnp.float32(rate))
            seen.append(found)
        loss, recall = np.mean(np.asarray(seen[-20:], np.float64), axis=0).tolist()
        rows.append(dict(context=context, pairs=pairs, batch=batch, steps=steps, loss=loss, recall=recall,
                         cpu_seconds=round(time.process_time() - began, 1)))  # fmt: skip
        print(rows[-1], flush=True)
    return nnx.merge(graph, params), rows


def recall_of(model: Decoder, batches: int = 8, rows: int = 4) -> float:
    """The share of questions about contexts never seen that are answered rightly."""
    random = np.random.default_rng(2)
    guess = jax.jit(lambda model, tokens: jnp.argmax(logits_of(model, tokens, PAIRS), axis=-1))
    drawn = [sample(random, rows, CONTEXT, PAIRS) for _ in range(batches)]
    return float(np.mean([np.asarray(guess(model, tokens)) == answers for tokens, answers in drawn]))


def main() -> None:
    model, rows = train()
    folder = pathlib.Path(models.__file__).parent.parent / "data" / "recall"
    graph, params = nnx.split(model)
    models.save(nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)), folder)
    recall = recall_of(models.load(folder, dtype="float32"))
    table(rows)
    print(f"Recalled of {CONTEXT} tokens, as shipped: {recall:.2%}")
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    save("train_recall_model", rows, parameters=size, recall_of_new_contexts=recall)


if __name__ == "__main__":
    main()
