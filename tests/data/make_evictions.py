"""Makes evictions.npz: what kvpress keeps of a prompt, and which tokens transformers' model goes on with.

    python3.11 -m venv VENV && VENV/bin/pip install torch==2.13.0 kvpress==0.5.5    # a CPU build is enough
    VENV/bin/python tests/data/make_evictions.py

The model is the checkpoint `llama3` in this folder. Which tokens are kept is read from where their keys come from; of
`ada`, which masks and keeps everything, from what it masks.
"""

import pathlib

import kvpress
import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
PROMPT_LENGTH, NEW_TOKENS, RATIOS = 90, 16, (0.25, 0.5, 0.75)
WINDOW = dict(window_size=8)  # of 64, kvpress's own, a ratio of 0.75 would leave less than the window
PRESSES = {
    "streaming_llm": kvpress.StreamingLLMPress,
    "knorm": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "snapkv": lambda **ratio: kvpress.SnapKVPress(**ratio, **WINDOW),
    "tova": kvpress.TOVAPress,
    "expected_attention": kvpress.ExpectedAttentionPress,
    "ada": lambda **ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(**ratio, **WINDOW)),
}


def prefill(model, prompt: torch.Tensor) -> tuple[transformers.DynamicCache, torch.Tensor]:
    cache = transformers.DynamicCache()
    return cache, model(prompt, past_key_values=cache).logits[0, -1]


def kept_of(model, cache, everything: list[torch.Tensor]) -> np.ndarray:
    """`bool[layers, K, PROMPT_LENGTH]`."""
    kept = np.zeros((len(everything), *everything[0].shape[:2]), bool)
    for i, keys in enumerate(everything):
        masked = getattr(model.model.layers[i].self_attn, "masked_key_indices", None)
        if masked is not None:
            kept[i] = True
            kept[i, masked[1].numpy(), masked[2].numpy()] = False
            continue
        for head in range(len(keys)):
            same = (cache.layers[i].keys[0, head][:, None] == keys[head][None]).all(dim=-1)
            assert same.any(dim=1).all()
            kept[i, head] = same.any(dim=0).numpy()
        assert (kept[i].sum(axis=1) == cache.layers[i].keys.shape[2]).all()
    return kept


def certain(scores: torch.Tensor, kept: np.ndarray, *, together: bool) -> bool:
    """Whether the least that is kept is clearly worth more than what is not, by heads or `together`."""
    worth = scores[0].numpy().reshape(1 if together else len(kept), -1)
    pairs = [(w[keep].min(), w[~keep].max()) for w, keep in zip(worth, kept.reshape(worth.shape), strict=True)]
    return all(least > most + 1e-4 * abs(most) for least, most in pairs)


def evict_and_go_on(model, prompt: torch.Tensor, name: str, ratio: float) -> dict[str, np.ndarray] | None:
    """What is kept, and the tokens that follow; None where rounding could make it another."""
    everything = [layer.keys[0] for layer in prefill(model, prompt)[0].layers]
    press, scores = PRESSES[name](compression_ratio=ratio), []
    scorer = press.press if name == "ada" else press
    score = scorer.score

    def noted(*args):
        scores.append(score(*args))  # ada then marks in it what heads keep for certain
        return scores[-1]

    scorer.score = noted
    with press(model):
        cache, logits = prefill(model, prompt)
    kept = kept_of(model, cache, everything)
    sure = all(certain(*of_layer, together=name == "ada") for of_layer in zip(scores, kept, strict=True))
    tokens: list[int] = []
    for step in range(NEW_TOKENS):
        first, second = logits.topk(2).values
        sure &= float(first - second) > 1e-3
        tokens.append(int(logits.argmax()))
        position = torch.tensor([[PROMPT_LENGTH + step]])
        logits = model(torch.tensor([[tokens[-1]]]), past_key_values=cache, position_ids=position).logits[0, -1]
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return {"kept": np.packbits(kept, axis=-1), "tokens": np.array(tokens, np.int32)} if sure else None


def everything_of(model, prompt: np.ndarray) -> dict[str, np.ndarray] | None:
    found = {"prompt": prompt.astype(np.int32)}
    for name in PRESSES:
        for ratio in RATIOS:
            one = evict_and_go_on(model, torch.tensor(prompt[None]), name, ratio)
            if one is None:
                return None
            found |= {f"{name}_{ratio}_{what}": x for what, x in one.items()}
    return found


def main() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(HERE / "llama3", attn_implementation="sdpa").eval()
    for seed in range(1000):
        prompt = np.random.default_rng(seed).integers(2, model.config.vocab_size, PROMPT_LENGTH)
        with torch.no_grad():
            if (found := everything_of(model, prompt)) is not None:
                np.savez_compressed(HERE / "evictions.npz", **found)
                return
    raise SystemExit("No prompt found of which everything is certain.")


if __name__ == "__main__":
    main()
