"""A GGUF file's vocabulary becomes the tokenizer that it was made of."""

import itertools
import json
import random

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxkv.text import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def add(a, b):\n    return a + b  # 12 + 345 = 357\n",
    "don't you'll they're I'M WE'VE; 1234567 3.14 \t tabs\r\n\r\n  spaces   ",
    "caf\u00e9 cafe\u0301 na\u00efve \u6771\u4eac \u0439\u043e\u0433 \U0001f642",
]
TEXTS = [*CORPUS, "", " ", "  two", "x\n\n\ny", "<|im_start|>user\nhi<|im_end|>", "99 bottles of 1000 beers!?"]
MARKED = ("<|im_start|>", "<|im_end|>", "<unused>")
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
WORDS += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write(path, **entries):
    """Writes a file of nothing but a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in entries.items():
        kind = {bool: "bool", int: "uint32", str: "string", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pre_tokenizer(pre):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    if pre == "gpt-2":
        return byte_level
    first = pre_tokenizers.Digits(individual_digits=True)
    if pre != "smollm":
        words = WORDS.replace("DIGITS", "{1,3}" if pre == "llama-bpe" else "")
        first = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
    return pre_tokenizers.Sequence([first, byte_level])


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE of a few merges, as a function of how a text is cut into words."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    made.add_special_tokens(list(MARKED[:2]))
    made.add_tokens([tokenizers.AddedToken(MARKED[2], normalized=False)])
    made.decoder = decoders.ByteLevel()
    return made


def vocabulary(made):
    by_id = sorted(made.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    return [token for token, _ in by_id]


def byte_level(path, made, pre, **entries):
    tokens = vocabulary(made)
    types = [3 if token in MARKED[:2] else 4 if token in MARKED else 1 for token in tokens]
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    options = {"bos_token_id": tokens.index(MARKED[0]), "eos_token_id": tokens.index(MARKED[1])} | entries
    return write(path, model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=merges, **options)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_byte_level_vocabularies(tmp_path, trained, pre):
    text = Tokenizer(byte_level(tmp_path / "model.gguf", trained, pre, chat_template=TEMPLATE))
    trained.pre_tokenizer = pre_tokenizer(pre)
    trained.normalizer = normalizers.NFC() if pre == "qwen2" else None
    assert text.vocab_size == trained.get_vocab_size()
    for example in TEXTS:
        wanted = trained.encode(example, add_special_tokens=False).ids
        assert text.encode(example, special=False) == wanted, example
        assert text.decode(wanted, special=True) == trained.decode(wanted, skip_special_tokens=False)
    first = [trained.token_to_id(MARKED[0])] if pre == "llama-bpe" else []
    assert text.encode("the dog") == first + trained.encode("the dog").ids
    assert text.has_template
    ids = text.chat([{"role": "user", "content": "the dog"}])
    assert text.decode(ids, special=True) == "<|im_start|><|im_start|>the dog<|im_end|>"
    assert text.decode(ids) == "the dog"


def test_words_by_case(tmp_path, trained):
    """As GPT-4o's tokenizer cuts them, which GPT-OSS has."""
    text = Tokenizer(byte_level(tmp_path / "model.gguf", trained, "gpt-4o"))
    cut = text._tokenizer.pre_tokenizer.pre_tokenize_str("HelloWorld's IT'S 12345 a/b?//\n\n  x\u00e9Y don't--")
    found = [decoders.ByteLevel().decode([word]) for word, _ in cut]
    assert found == [
        "Hello", "World's", " IT'S", " ", "123", "45", " a", "/b", "?//\n\n", " ", " x\u00e9", "Y", " don't", "--",
    ]  # fmt: skip


def pieces():
    """A vocabulary of pieces with scores, of which a merge is not always the one with the longest piece."""
    rng = random.Random(1)
    words = ["\u2581", *"abcdnote", *("\u2581" + c for c in "abnt"), "an", "at", "ba", "nan", "ban", "ana", "to", "ten",
             "\u2581ban", "\u2581bana", "na", "\u2581not", "ote", "note", "no", "tt", "ttt"]  # fmt: skip
    special = ["<unk>", "<s>", "</s>"]
    of_bytes = [f"<0x{i:02X}>" for i in range(256)]
    tokens = special + of_bytes + words
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    scores = [0.0] * 259 + [-float(n) for n in rng.sample(range(100), len(words))]
    return tokens, types, scores


def merged(text, scores):
    """SentencePiece's BPE: again and again the neighbours whose piece has the highest score are joined."""
    parts = list(text)
    while True:
        best = max(
            ((scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores),
            default=None,
        )
        if best is None:
            return parts
        i = -best[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_pieces_are_merged_by_their_scores(tmp_path):
    tokens, types, scores = pieces()
    options = {"tokens": tokens, "token_type": types, "scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    text = Tokenizer(write(tmp_path / "model.gguf", model="llama", add_space_prefix=False, **options))
    rng = random.Random(0)
    known = dict(zip(tokens[259:], scores[259:], strict=True))
    for _ in range(200):
        example = "".join(rng.choices("abnote  t", k=rng.randrange(1, 12)))
        wanted = merged(example.replace(" ", "\u2581"), known)
        ids = text.encode(example)
        assert [tokens[i] for i in ids] == ["<s>", *wanted], example
        assert text.decode(ids) == example
    assert [tokens[i] for i in text.encode("\u00e9", special=False)] == ["<0xC3>", "<0xA9>"]
    assert text.decode(text.encode("ban \u6771 at")) == "ban \u6771 at"
    assert text.encode("<s>ban") == text.encode("ban")  # not twice
    prefixed = Tokenizer(write(tmp_path / "prefix.gguf", model="llama", **options))
    assert prefixed.encode("ban")[1:] == text.encode(" ban")[1:]
    assert prefixed.decode(prefixed.encode("ban at")) == "ban at"
    assert not prefixed.has_template
    with pytest.raises(ValueError, match=r"no chat template, tokenizer\.chat_template"):
        prefixed.chat([{"role": "user", "content": "x"}])


def test_unigram_vocabularies(tmp_path):
    tokens, types, scores = pieces()
    text = Tokenizer(write(
        tmp_path / "model.gguf", model="t5", tokens=tokens, token_type=types, scores=scores, eos_token_id=2,
        unknown_token_id=0,
    ))  # fmt: skip
    wanted = tokenizers.Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), 0, True))
    wanted.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="always")
    for example in ("banana not", "nan  ten", "a note to ban"):
        assert text.encode(example) == [*wanted.encode(example).ids, 2]
        assert text.decode(text.encode(example)) == example


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": "bert"}, "kind 'bert', but gpt2, llama and t5"),
    ({"pre": "tekken"}, r"'tekken' \(tokenizer\.ggml\.pre\), but known are .*qwen2"),
    ({"token_type": [1]}, "but the types of 1"),
    ({"merges": ["x"]}, "a merge that is no pair"),
    ({"merges": ["zzz yyy"]}, "tokenizers library refuses"),
    ({"bos_token_id": 10**6, "add_bos_token": True}, "and 1000000 as bos"),
    ({"model": "llama"}, "the scores .* of 0"),
])  # fmt: skip
def test_what_is_not_whole_is_refused(tmp_path, changes, message):
    tokens = ["a", "b", "ab", "<s>"]
    entries = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1, 1, 1, 3],
        "merges": ["a b"],
    } | changes
    with pytest.raises(ValueError, match=message) as raised:
        Tokenizer(write(tmp_path / "model.gguf", **entries))
    assert "\n" not in str(raised.value)
