"""Builds a tokenizer from the metadata of a GGUF file.

Three kinds of vocabulary are known by their names there: "gpt2", byte-level BPE with merges; "llama", SentencePiece's
BPE, whose merges follow from the tokens' scores; and "t5", SentencePiece's unigram model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv._core.config.validation import show
from jaxkv._files.gguf import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

SPACE = "\u2581"  # SentencePiece writes it for a space
# How a text is cut into words before merges, by tokenizer.ggml.pre. {} stands for how many digits stay together.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# GPT-4o's: words of one case or with a capital first, each with its own ending.
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}*{SMALL}+{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}+{SMALL}*{ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BY_CASE = {"gpt-4o", "llama4"}
BY_THREE = {"llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx", "pixtral"}
BY_DIGIT = {"qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"}
GPT2 = {"gpt-2", "default", "phi-2", "olmo", "jais", "mpt", "trillion"}
GPT2_BY_DIGIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
NORMALIZED = {"qwen2", "deepseek-r1-qwen", "megrez"}  # to composed characters, as in Qwen's own tokenizer.json
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "sep": "sep_token",
           "mask": "mask_token"}  # fmt: skip


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> Any:
    """Returns a `tokenizers.Tokenizer` that a GGUF file describes.

    Args:
      where: name of the file in errors.

    Raises:
      ValueError: a kind of vocabulary that is not known, or one that is not whole.
    """
    import tokenizers

    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama", "t5"):
        raise ValueError(f"{where} has a tokenizer of the kind {show(kind)}, but gpt2, llama and t5 are known.")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{where} has no list of tokens, tokenizer.ggml.tokens.")
    types = [int(t) for t in metadata.get("tokenizer.ggml.token_type", ())] or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{where} has {len(tokens)} tokens, but the types of {len(types)}.")
    try:
        built = (
            _byte_level(metadata, tokens, where) if kind == "gpt2" else _pieces(metadata, kind, tokens, types, where)
        )
        _add_marked(built, tokens, types)
        _add_ends(built, metadata, kind, tokens, where)
    except ValueError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{where} has a tokenizer that the tokenizers library refuses: {error}") from None
    assert isinstance(built, tokenizers.Tokenizer)
    return built


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the text of special tokens under the names that chat templates use."""
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in SPECIAL.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], where: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    if not all(len(pair) == 2 for pair in pairs):
        raise ValueError(f"{where} has a merge that is no pair of tokens.")
    qwen = str(metadata.get("general.architecture", "")).startswith("qwen")
    pre = metadata.get("tokenizer.ggml.pre", "qwen2" if qwen else "default")
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=pre in BY_THREE, byte_fallback=False
    )
    built = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in GPT2 | GPT2_BY_DIGIT)
    if pre in BY_THREE | BY_DIGIT | BY_CASE:
        words = Regex(WORDS_BY_CASE if pre in BY_CASE else WORDS.format("{1,3}" if pre in BY_THREE else ""))
        built.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), byte_level])
    elif pre in GPT2_BY_DIGIT:
        built.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in GPT2:
        built.pre_tokenizer = byte_level
    else:
        known = ", ".join(sorted(GPT2 | GPT2_BY_DIGIT | BY_THREE | BY_DIGIT | BY_CASE))
        raise ValueError(f"{where} cuts texts into words as {show(pre)} (tokenizer.ggml.pre), but known are {known}.")
    if pre in NORMALIZED:
        built.normalizer = normalizers.NFC()
    built.decoder = decoders.ByteLevel()
    return built


def _pieces(metadata: Mapping[str, Any], kind: str, tokens: list[str], types: list[int], where: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = [float(x) for x in metadata.get("tokenizer.ggml.scores", ())]
    if len(scores) != len(tokens):
        raise ValueError(f"{where} has {len(tokens)} tokens, but the scores (tokenizer.ggml.scores) of {len(scores)}.")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise ValueError(f"{where} has {len(tokens)} tokens, and {unknown} as the unknown one.")
    has_bytes = BYTE in types
    if kind == "t5":
        built = Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unknown, has_bytes))
    else:
        built = Tokenizer(
            models.BPE(
                {token: i for i, token in enumerate(tokens)},
                _merges(tokens, scores, types),
                unk_token=tokens[unknown],
                fuse_unk=True,
                byte_fallback=has_bytes,
            )
        )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if kind == "t5":
        squeezed = metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)
        built.normalizer = normalizers.Replace(_regex(" {2,}"), " ") if squeezed else None
        scheme = "always" if prefix else "never"
        built.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    else:
        before = [normalizers.Prepend(SPACE)] if prefix else []
        built.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    built.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    return built


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    return Regex(pattern)


def _merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that make a token, the token of the highest score first."""
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED)}
    found = []
    for token, i in ids.items():
        pairs = [
            (ids[a], ids[b]) for cut in range(1, len(token)) if (a := token[:cut]) in ids and (b := token[cut:]) in ids
        ]
        found += [(-scores[i], i, pair) for pair in sorted(pairs)]
    found.sort()
    return [(tokens[a], tokens[b]) for _, _, (a, b) in found]


def _add_marked(built: Any, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Marks the tokens that are found in a text as they are, before all else."""
    from tokenizers import AddedToken

    special = [tokens[i] for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN) and tokens[i]]
    plain = [tokens[i] for i, kind in enumerate(types) if kind == USER_DEFINED and tokens[i]]
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    built.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _add_ends(built: Any, metadata: Mapping[str, Any], kind: str, tokens: Sequence[str], where: str) -> None:
    """Lets a text begin and end with the tokens that the model expects there."""
    from tokenizers import processors

    def token(name: str, default: bool) -> list[tuple[str, int]]:
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if i is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            return []
        if not 0 <= i < len(tokens):
            raise ValueError(f"{where} has {len(tokens)} tokens, and {i} as {name}.")
        return [(tokens[i], i)]

    first = token("bos", kind == "llama" or metadata.get("tokenizer.ggml.pre") in ("llama3", "llama-v3", "llama-bpe"))
    last = token("eos", kind == "t5")
    if first or last:
        single = [text for text, _ in first] + ["$A"] + [text for text, _ in last]
        built.post_processor = processors.TemplateProcessing(single, special_tokens=list(dict.fromkeys(first + last)))
