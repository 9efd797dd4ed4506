"""Rollouts for GRPO: tunix's own sampler against `jaxkv.tunix.Rollout`, 64 prompts x 8 samples of many lengths.

    pip install -e .[tunix]; python benchmarks/rollouts.py

One tiny Qwen 3 with random weights; each token ends a row with one chance in some twenty, so few rows are long, and a
dense sampler goes on until the longest has ended. Both draw from the same distribution, in turns; tokens are counted
without padding.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import numpy as np
from _harness import save, table
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.qwen3 import model as qwen3
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

import jaxkv.tunix

VOCAB, PROMPTS, SAMPLES = 512, 64, 8
ENDS = list(range(3, 3 + VOCAB // 20))


class Numbers:
    """A tokenizer of numbers in words of digits, as tunix calls one."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


def make_model(layers: int, width: int) -> Any:
    config = qwen3.ModelConfig(
        num_layers=layers, vocab_size=VOCAB, embed_dim=width, hidden_dim=3 * width, num_heads=width // 32, head_dim=32,
        num_kv_heads=max(width // 64, 1), rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True,
    )  # fmt: skip
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(state))))
    nnx.update(model, jax.tree.map(lambda x: x + 0.02 * jax.random.normal(next(keys), x.shape), state))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model, tokenizer = make_model(given.layers, given.width), TokenizerAdapter(Numbers())
    places = given.tokens + 64
    config = RolloutConfig(
        max_tokens_to_generate=given.tokens, max_prompt_length=64, kv_cache_size=places, temperature=1.0, top_p=1.0,
        eos_tokens=ENDS, return_logprobs=True,
    )  # fmt: skip
    own = model.config
    sizes = CacheConfig(
        cache_size=places, num_layers=own.num_layers, num_kv_heads=own.num_kv_heads, head_dim=own.head_dim
    )
    samplers = {
        "tunix": VanillaRollout(model, tokenizer, sizes),
        "jaxkv": jaxkv.tunix.Rollout(
            rollout_actor=model, tokenizer=tokenizer, mesh=None, rollout_config=config, max_seqs=PROMPTS
        ),
    }
    draw = np.random.default_rng(0)
    texts = [" ".join(map(str, draw.integers(100, VOCAB, draw.integers(8, 48)))) for _ in range(PROMPTS)]
    prompts = [text for text in texts for _ in range(SAMPLES)]
    rates: dict[str, list[float]] = {name: [] for name in samplers}
    longest, mean = [], []
    for _ in range(1 + given.rounds):  # the first compiles
        for name, sampler in samplers.items():
            began = time.perf_counter()
            out = sampler.generate(prompts, config)
            seconds = time.perf_counter() - began
            lengths = [len(tokens) for tokens in out.tokens]
            rates[name].append(sum(lengths) / seconds)
            longest.append(max(lengths))
            mean.append(statistics.mean(lengths))
            print(f"{name}: {sum(lengths)} tokens, {min(lengths)} to {max(lengths)} a row, {seconds:.1f} s", flush=True)
    found = {name: statistics.median(each[1:]) for name, each in rates.items()}
    row = {"prompts x samples": f"{PROMPTS} x {SAMPLES}", "mean tokens": statistics.mean(mean), "longest": max(longest),
           "tunix tokens/s": found["tunix"], "jaxkv tokens/s": found["jaxkv"],
           "jaxkv / tunix": found["jaxkv"] / found["tunix"]}  # fmt: skip
    table([row])
    save("rollouts", {"model": vars(given), "rows": [row]})


if __name__ == "__main__":
    main()
