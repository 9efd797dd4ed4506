"""`jaxkv.tunix` against tunix's own sampler and trainer. The tests do not install it: `pip install google-tunix`."""

import functools
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from flax import nnx
from nightly import NIGHTLY

pytest.importorskip("tunix", reason="tunix is not installed: pip install google-tunix")
pytestmark = pytest.mark.filterwarnings("ignore")  # its own, and its dependencies'

with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    warnings.simplefilter("ignore")
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    import jaxkv
    import jaxkv.tunix

VOCAB = 130
PROMPTS = ["1 + 2 =", "x", "a rather long prompt, with more tokens", "1 + 2 =", "z?"]


class Characters:
    """A tokenizer of characters, as tunix calls one."""

    def encode(self, text, **_):
        return [3 + ord(c) for c in text]

    def decode(self, ids, **_):
        return "".join(chr(int(i) - 3) for i in ids if i > 2)

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def __init__(self, pad=0):
        self.pad = pad

    def pad_id(self):
        return self.pad


@pytest.fixture(autouse=True)
def loose():
    """tunix's own code relies on what the tests of jaxkv forbid, in threads of its own too."""
    strict = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}
    for (name, _), wanted in zip(strict.items(), ("standard", "allow"), strict=True):
        jax.config.update(name, wanted)
    yield
    for name, usual in strict.items():
        jax.config.update(name, usual)


def randomise(model):
    """What starts as zeros, MLPs and norms, counts too."""
    state = nnx.state(model, nnx.Param)
    keys = iter(jax.random.split(jax.random.key(7), len(jax.tree.leaves(state))))
    nnx.update(model, jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape, x.dtype), state))
    return model


SMALL = dict(num_layers=2, vocab_size=VOCAB, embed_dim=16, hidden_dim=24, num_heads=4, head_dim=8, num_kv_heads=2)


def make_gemma3(kv=1):
    fields = {"num_embed": VOCAB} | {name: value for name, value in SMALL.items() if name != "vocab_size"}
    fields |= dict(num_layers=7, num_kv_heads=kv, sliding_window_size=6, local_base_frequency=10_000)
    fields |= dict(global_base_frequency=1_000_000, param_dtype=jnp.float32)
    return randomise(gemma3.Gemma3(gemma3.ModelConfig(**fields), rngs=nnx.Rngs(0)))


MODELS = {
    "qwen2": lambda: randomise(qwen2.Qwen2(
        qwen2.ModelConfig(**SMALL, rope_theta=10_000, norm_eps=1e-6), rngs=nnx.Rngs(0))),
    "qwen3": lambda: randomise(qwen3.Qwen3(
        qwen3.ModelConfig(**SMALL, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True), rngs=nnx.Rngs(0))),
    "qwen3 with experts": lambda: randomise(qwen3.Qwen3(
        qwen3.ModelConfig(**SMALL, rope_theta=10_000, norm_eps=1e-6, num_experts=4, num_experts_per_tok=2),
        rngs=nnx.Rngs(0))),
    "llama3": lambda: randomise(llama3.Llama3(
        llama3.ModelConfig(**SMALL, rope_theta=10_000, norm_eps=1e-5), rngs=nnx.Rngs(0))),
    "gemma3": make_gemma3, "gemma3, as many KV heads": lambda: make_gemma3(4),
}  # fmt: skip


def both(model, pad=0, **options):
    """The same model in tunix's rollout and in ours."""
    config = RolloutConfig(kv_cache_size=128, max_prompt_length=64)
    own = model.config
    sizes = CacheConfig(cache_size=128, num_layers=own.num_layers, num_kv_heads=own.num_kv_heads, head_dim=own.head_dim)
    tokenizer = TokenizerAdapter(Characters(pad))
    ours = jaxkv.tunix.Rollout(
        rollout_actor=model, tokenizer=tokenizer, mesh=None, rollout_config=config, max_seqs=4, **options
    )
    return VanillaRollout(model, tokenizer, sizes), ours


def find_unused(model):
    """A token that no rollout has: tunix's sampler does not attend to a padding token that was generated."""
    _, ours = both(model)
    used = set(np.concatenate(ours.generate(PROMPTS, greedy()).tokens).tolist())
    return next(token for token in range(3, VOCAB) if token not in used | {3 + ord(c) for c in "".join(PROMPTS)})


def greedy(**fields):
    given = dict(max_tokens_to_generate=12, max_prompt_length=64, kv_cache_size=128, top_p=None, return_logprobs=True)
    return RolloutConfig(**given | fields)


def assert_alike(a, b):
    assert a.text == b.text
    assert [x.tolist() for x in a.tokens] == [x.tolist() for x in b.tokens]
    np.testing.assert_array_equal(a.left_padded_prompt_tokens, b.left_padded_prompt_tokens)
    for x, y in zip(a.logprobs, b.logprobs, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_rollouts_are_those_of_tunix(name):
    model = MODELS[name]()
    theirs, ours = both(model, find_unused(model))
    wanted = theirs.generate(PROMPTS, greedy())
    assert len({len(x) for x in wanted.tokens}) >= 1 and len(set(wanted.text)) > 1
    assert_alike(ours.generate(PROMPTS, greedy()), wanted)
    longest = max(wanted.tokens, key=len)
    ends = [int(longest[len(longest) // 2]), int(wanted.tokens[1][-1])]
    assert_alike(ours.generate(PROMPTS, greedy(eos_tokens=ends)), theirs.generate(PROMPTS, greedy(eos_tokens=ends)))
    completion = np.full((len(PROMPTS), 4), theirs.pad_id(), np.int32)
    for row, tokens in zip(completion, wanted.tokens, strict=True):
        row[: len(tokens)] = tokens[:4]
    prompt = jnp.array(wanted.left_padded_prompt_tokens)
    found = np.asarray(ours.get_per_token_logps(prompt, jnp.array(completion)))
    np.testing.assert_allclose(found, theirs.get_per_token_logps(prompt, jnp.array(completion)), atol=1e-5)
    for row, logprobs in zip(found, wanted.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(logprobs)], logprobs[:4], atol=1e-3)
    assert (ours.pad_id(), ours.eos_id()) == (theirs.pad_id(), theirs.eos_id())


def test_drawn_rollouts_have_the_log_probabilities_of_what_they_were_drawn_from():
    _, ours = both(MODELS["qwen3"]())
    config = RolloutConfig(
        max_tokens_to_generate=8,
        temperature=0.7,
        top_k=20,
        kv_cache_size=128,
        return_logprobs=True,
        seed=jax.random.key(3),
    )
    out = ours.generate(PROMPTS, config)
    again = ours.generate(PROMPTS, config)
    assert [x.tolist() for x in out.tokens] == [x.tolist() for x in again.tokens]
    assert out.tokens[0].tolist() != out.tokens[3].tolist(), "equal prompts are drawn apart"
    model = ours.model()
    for prompt, tokens, found in zip(out.left_padded_prompt_tokens, out.tokens, out.logprobs, strict=True):
        whole = np.concatenate([prompt[prompt != 0], tokens])
        count = len(whole)
        mask = jnp.tril(jnp.ones((1, count, count), bool))
        logits, _ = model(jnp.array(whole)[None], jnp.arange(count)[None], None, mask)
        wanted = jax.nn.log_softmax(logits[0] / 0.7)[jnp.arange(count - 1), whole[1:]][-len(tokens) :]
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_parameters_are_updated_without_a_compile():
    other = randomise(randomise(MODELS["qwen3"]()))
    theirs, ours = both(MODELS["qwen3"](), find_unused(other))
    ours.generate(PROMPTS, greedy())
    ours.generate(PROMPTS, greedy(temperature=0.0, top_p=1.0))
    params = nnx.state(other, nnx.Param)
    ours.update_params(params, (nnx.Param,))
    theirs.update_params(params)
    assert_alike(ours.generate(PROMPTS, greedy()), theirs.generate(PROMPTS, greedy()))
    assert compiled(lambda: (ours.update_params(params), ours.generate(PROMPTS, greedy()))) == 0
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    ours.update_params(half)
    assert jax.tree.leaves(nnx.state(ours.model()))[0].dtype == jnp.float32


def test_a_trainers_model_is_followed_and_not_kept():
    model = MODELS["qwen3"]()
    theirs, ours = both(model, find_unused(MODELS["qwen3"]()))
    before = ours.generate(PROMPTS, greedy())
    older = [weakref.ref(x) for x in jax.tree.leaves(nnx.state(model))]
    assert ours.model() is model, "so tunix sees that weights need not be sent"
    nnx.update(model, jax.tree.map(lambda x: 0.9 * x + 0.05, nnx.state(model, nnx.Param)))
    del theirs
    assert not [ref() for ref in older if ref() is not None], "nobody keeps what was replaced"
    after = ours.generate(PROMPTS, greedy())
    assert after.text != before.text
    _, again = both(model, ours.pad_id())
    assert_alike(after, again.generate(PROMPTS, greedy()))
    device = jax.devices()[1]
    mesh = jax.sharding.Mesh(np.array([[device]]), ("fsdp", "tp"))
    config = RolloutConfig(kv_cache_size=128, max_prompt_length=64)
    there = jaxkv.tunix.Rollout(
        rollout_actor=model, tokenizer=Characters(ours.pad_id()), mesh=mesh, rollout_config=config
    )
    assert_alike(there.generate(PROMPTS, greedy()), after)
    there.update_params(jax.tree.map(lambda x: 0.5 * x, nnx.state(model, nnx.Param)), (nnx.Param,))
    assert there.generate(PROMPTS, greedy()).text != after.text
    assert {d for x in jax.tree.leaves(nnx.state(there.model())) for d in x.devices()} == {device}


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_the_model_over_a_cache_is_sound(name):
    jaxkv.testing.check_model(jaxkv.tunix.PagedModel.make(MODELS[name]()))


def test_what_is_refused():
    _, ours = both(MODELS["qwen3"]())
    with pytest.raises(ValueError, match=r"knows the models qwen2, .*, and Linear is of flax"):
        jaxkv.tunix.PagedModel.make(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    mesh = jax.make_mesh((2, 1), ("fsdp", "tp"), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="runs on one device, and the mesh for rollouts has 2"):
        jaxkv.tunix.Rollout(
            rollout_actor=MODELS["qwen3"](), tokenizer=None, mesh=mesh, rollout_config=RolloutConfig(kv_cache_size=64)
        )
    with pytest.raises(ValueError, match="max_seq_len = 128 must hold one more"):
        ours.generate(["x" * 200], greedy())
    assert ours.generate(PROMPTS[:1], greedy()).tokens
    with pytest.raises(TypeError, match="take no no_argument"):
        functools.partial(jaxkv.tunix.Rollout, no_argument=1)(
            rollout_actor=MODELS["qwen3"](), tokenizer=Characters(), mesh=None, rollout_config=RolloutConfig()
        )


@pytest.mark.skipif(not NIGHTLY, reason="two trainings of twenty steps")
@pytest.mark.timeout(3000)
def test_a_trainer_learns_with_either_sampler():
    """Twenty steps of GRPO on an arithmetic task: rewards rise alike."""
    from tunix_grpo import train

    rewards = {}
    for name in ("vanilla", "jaxkv"):
        rewards[name], compiles = train(name, steps=20)
        assert name == "vanilla" or (len(compiles) >= 20 and not any(compiles[2:]))
    for found in rewards.values():
        assert np.mean(found[-5:]) > np.mean(found[:5])
    assert abs(np.mean(rewards["vanilla"][-5:]) - np.mean(rewards["jaxkv"][-5:])) < 0.25
