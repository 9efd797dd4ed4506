"""Makes the tiny random checkpoints in this folder, with what transformers computes from them.

    python3.11 -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers    # a CPU build is enough
    VENV/bin/python tests/data/make_fixtures.py

Every parameter is random, norms and biases too, so that a term that is missing shows.
"""

import json
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
VOCAB, NEW_TOKENS = 96, 10
PROMPT_LENGTHS = (1, 5, 12, 23, 8)
LLAMA3_SCALING = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
TINY = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=1, eos_token_id=None,
            pad_token_id=None)  # fmt: skip
SLIDING_FIRST = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

FIXTURES = {
    "llama": transformers.LlamaConfig(**TINY | dict(num_key_value_heads=1), attention_bias=True, mlp_bias=True),
    "llama3": transformers.LlamaConfig(
        **TINY, tie_word_embeddings=True, rope_parameters=dict(rope_type="llama3", rope_theta=500.0, **LLAMA3_SCALING)
    ),
    "llama_linear": transformers.LlamaConfig(
        **TINY, rope_parameters=dict(rope_type="linear", rope_theta=1000.0, factor=2.0)
    ),
    "mistral": transformers.MistralConfig(**TINY, sliding_window=6),
    "qwen2": transformers.Qwen2Config(
        **{k: v for k, v in TINY.items() if k != "head_dim"} | dict(num_hidden_layers=3),
        use_sliding_window=True, sliding_window=7, max_window_layers=1, tie_word_embeddings=True,
    ),
    "qwen3": transformers.Qwen3Config(**TINY),
    "gemma2": transformers.Gemma2Config(
        **TINY | dict(num_hidden_layers=4, hidden_size=20), sliding_window=6, query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0, final_logit_softcapping=8.0,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **TINY | dict(num_hidden_layers=4, hidden_size=20), sliding_window=6, query_pre_attn_scalar=20,
        layer_types=SLIDING_FIRST,
        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=4.0),
                             sliding_attention=dict(rope_type="default", rope_theta=100.0)),
    ),
}  # fmt: skip
SHARDED = "qwen3"
# The same checkpoints as transformers before version 5 described them: fields left out, fields put in.
OLD_FORMS = {
    "llama": (
        ["rope_parameters", "dtype"],
        dict(rope_theta=10_000.0, rope_scaling=None, torch_dtype="float32", pretraining_tp=1),
    ),
    "llama3": (["rope_parameters"], dict(rope_theta=500.0, rope_scaling=dict(rope_type="llama3", **LLAMA3_SCALING))),
    "llama_linear": (["rope_parameters"], dict(rope_theta=1000.0, rope_scaling=dict(type="linear", factor=2.0))),
    "mistral": (["rope_parameters"], dict(rope_theta=10_000.0)),
    "qwen2": (["rope_parameters", "layer_types"], dict(rope_theta=10_000.0)),
    "qwen3": (["rope_parameters", "layer_types"], dict(rope_theta=10_000.0, rope_scaling=None)),
    "gemma2": (
        ["rope_parameters", "layer_types"],
        dict(rope_theta=10_000.0, hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid"),
    ),
    "gemma3": (
        ["rope_parameters", "layer_types", "_sliding_window_pattern"],
        dict(rope_theta=5000.0, rope_local_base_freq=100.0, rope_scaling=dict(rope_type="linear", factor=4.0),
             sliding_window_pattern=2),
    ),
}  # fmt: skip


def make(name: str, config: transformers.PreTrainedConfig) -> None:
    seed = sorted(FIXTURES).index(name)
    torch.manual_seed(seed)
    config._attn_implementation = "eager"  # the others leave the soft cap out
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter_name, parameter in model.named_parameters():
        is_norm = "norm" in parameter_name
        spread = 0.4 if is_norm or parameter.ndim == 1 else 1.3 * parameter.shape[1] ** -0.5
        center = 1.0 if is_norm and "gemma" not in config.model_type else 0.0
        torch.nn.init.normal_(parameter, mean=center, std=spread)
    folder = HERE / name
    model.save_pretrained(folder, max_shard_size="30KB" if name == SHARDED else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)

    random = np.random.default_rng(seed)
    prompts = [random.integers(2, VOCAB, length).tolist() for length in PROMPT_LENGTHS]
    expected = {}
    with torch.no_grad():
        for i, prompt in enumerate(prompts):
            tokens = list(prompt)
            for _ in range(NEW_TOKENS):  # without a cache: nothing to share a mistake with
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
                tokens.append(int(logits[-1].argmax()))
            top = logits.topk(2).values  # a near tie would make "the same token" a matter of rounding
            assert float((top[:, 0] - top[:, 1])[len(prompt) - 1 :].min()) > 1e-3, (name, i)
            expected[f"prompt_{i}"] = np.array(prompt, np.int32)
            expected[f"tokens_{i}"] = np.array(tokens[len(prompt) :], np.int32)
            expected[f"logits_{i}"] = logits.numpy()  # of all tokens but the last
    np.savez_compressed(folder / "expected.npz", **expected)

    left_out, put_in = OLD_FORMS[name]
    fields = json.loads((folder / "config.json").read_text())
    old = {key: value for key, value in fields.items() if key not in left_out} | put_in
    (folder / "config_old.json").write_text(json.dumps(old, indent=2) + "\n")


if __name__ == "__main__":
    for fixture, fixture_config in FIXTURES.items():
        make(fixture, fixture_config)
