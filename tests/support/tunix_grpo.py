"""A training of a tiny Qwen 3 by tunix's GRPO learner, with tunix's sampler or with ours: a sum is to be answered."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compiled import compiled
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

import jaxkv.tunix

SYMBOLS = "0123456789+=."


class Symbols:
    """A tokenizer of digits and signs, as tunix calls one."""

    def encode(self, text, **_):
        return [3 + SYMBOLS.index(c) for c in text]

    def decode(self, ids, **_):
        return "".join(SYMBOLS[int(i) - 3] for i in ids if i > 2)

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


def make_model() -> Any:
    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=16, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
    )  # fmt: skip
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


class Counted(jaxkv.tunix.Rollout):
    """Ours, which notes how many programs each `generate` compiles."""

    def __init__(self, *, compiles: list[int], **options: Any):
        super().__init__(**options)
        self._compiles = compiles

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **options: Any) -> Any:
        found: list[Any] = []
        self._compiles.append(
            compiled(lambda: found.append(super(Counted, self).generate(prompts, rollout_config, **options)))
        )
        return found[0]


def train(sampler: str, steps: int = 20) -> tuple[list[float], list[int]]:
    """Trains, and returns the mean reward of each batch of rollouts, and how many programs each of ours compiled."""
    rewards: list[float] = []
    compiles: list[int] = []

    def reward(prompts, completions, **_):
        """How many of the characters are the digit that the sum ends with."""
        wanted = [str(eval(prompt.rstrip("=")) % 10) for prompt in prompts]
        found = [c.count(digit) / max(len(c), 4) for c, digit in zip(completions, wanted, strict=True)]
        rewards.append(float(np.mean(found)))
        return found

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = rl_cluster.RLCluster(
        actor=make_model(),
        tokenizer=Symbols(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(
                (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh
            ),
            rollout_engine=functools.partial(Counted, compiles=compiles) if sampler == "jaxkv" else sampler,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2), eval_every_n_steps=1000, max_steps=steps
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=4, max_prompt_length=8, kv_cache_size=16, temperature=1.0
            ),
        ),
    )
    learner = GRPOLearner(rl_cluster=cluster, algo_config=GRPOConfig(num_generations=16, beta=0.0), reward_fns=reward)
    draw = np.random.default_rng(0)
    prompts = [[f"{a}+{b}=" for a, b in draw.integers(0, 2, size=(4, 2))] for _ in range(steps)]
    learner.train([{"prompts": np.array(batch)} for batch in prompts])
    assert jnp.isfinite(jax.tree.leaves(nnx.state(cluster.actor_trainer.model))[0]).all()
    return rewards, compiles
