"""A model's own tokenizer: special tokens once, chats by its template whatever the template does, whole characters."""

import concurrent.futures
import json
import pathlib
import shutil
import time
import types

import pytest
from support.fixtures import DATA

import jaxkv
import jaxkv.models
import jaxkv.text
from jaxkv._engine.requests.submission import read_eos, read_model_eos

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n{{ m.content | trim }}\n{% endfor %}"
# What the tokenizers library writes for each byte, in the order of bytes.
CHARACTERS = [chr(b) for b in range(256)]
for shift, byte in enumerate([*range(0x21), *range(0x7F, 0xA1), 0xAD]):
    CHARACTERS[byte] = chr(256 + shift)
HELLO = [{"role": "user", "content": " Hé 🙂 "}]


def write_tokenizer(folder, template=None, **config):
    """Bytes as tokens, and a few special ones; a text begins with <bos>."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", made.token_to_id("<bos>"))]
    )
    made.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"} | config
    fields |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def test_special_tokens_are_put_around_a_text_once(tmp_path):
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path))
    bos = text.encode("")
    assert text.vocab_size == 260 and bos == [256]
    assert text.encode("ab") == text.encode("<bos>ab") == bos + text.encode("ab", special=False)
    assert text.encode("<bos><bos>ab")[:3] == [256, 256, text.encode("a", special=False)[0]]
    assert text.decode(text.encode("ab 🙂")) == "ab 🙂"
    assert text.decode(text.encode("ab"), special=True) == "<bos>ab"


def test_other_threads_run_while_a_book_is_read(tmp_path):
    """One that answers clients, and one that takes an engine's steps."""
    text, ticks = jaxkv.text.Tokenizer(write_tokenizer(tmp_path)), 0
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        tokens = threads.submit(text.encode, "a b " * 50_000)
        while not tokens.done():
            time.sleep(0.001)
            ticks += 1
    assert tokens.result() == [256, *text.encode("a b ", special=False) * 50_000] and ticks > 20, ticks


def test_tokens_that_a_smaller_tokenizer_does_not_have_are_no_text(tmp_path):
    """Models pad their vocabularies, and may choose a token of the padding."""
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path))
    a, b = text.encode("ab", special=False)
    assert text.decode([a, 300, 2**31, b]) == "ab"
    stream = text.stream()
    assert [*map(stream.add, (a, 300, b)), stream.finish()] == ["a", "", "b", ""]


@pytest.mark.parametrize("place", ["config", "named", "jinja", "json"])
def test_a_chat_is_written_by_the_folder_s_own_template(tmp_path, place):
    in_config = {"config": CHATML, "named": [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]}
    write_tokenizer(tmp_path, in_config.get(place))
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    if place == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    text = jaxkv.text.Tokenizer(tmp_path)
    wanted = "<|im_start|>user\n Hé 🙂 <|im_end|>\n<|im_start|>assistant\n"
    assert text.render_chat(HELLO) == wanted
    assert text.chat(HELLO) == text.encode(wanted, special=False) and 256 not in text.chat(HELLO)
    assert text.render_chat(HELLO, add_generation_prompt=False) == wanted.removesuffix("<|im_start|>assistant\n")


def test_a_template_s_own_special_tokens_are_not_doubled(tmp_path):
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path, GEMMA))
    assert text.render_chat(HELLO) == "<bos><turn>user\nHé 🙂\n"
    assert text.chat(HELLO).count(256) == 1


def test_what_templates_use(tmp_path):
    source = (
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ tools | tojson }}"
        "{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}x{% endfor %}"
        "{% if strftime_now('%Y') | int > 2000 %}!{% endif %}{{ enable_thinking }}"
    )
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path, source))
    messages = [{"role": "user", "content": "é"}] * 2
    assert text.render_chat(messages, tools=[{"a": "é<"}], enable_thinking=False) == 'é[{"a": "é<"}]x!False'


BAD = {
    "{{ raise_exception('Roles must alternate.') }}": "Roles must alternate",
    "{% if %}": "TemplateSyntaxError",
    "{{ messages[0].content.a.b }}": "UndefinedError",
    "{{ ''.__class__ }}": "reaches for __class__",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "reaches for __class__",
    "{{ raise_exception.__globals__['sys'] }}": "reaches for __globals__",
    "{{ messages.append({}) }}": "SecurityError",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "takes too long",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "nested too deeply|RecursionError",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}": "takes too",
    "{{ 'a' * 10**10 }}": "too much memory",
    "{{ 'a'.center(10**10) }}": "too much memory",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}": "too much memory",
    "{{ 9 ** (9 ** 9) }}": "takes too long",
}


@pytest.mark.parametrize("source", BAD)
def test_a_bad_template_is_one_sentence_in_bounded_time(tmp_path, source):
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path, source))
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"The chat template of .* fails: .*({BAD[source]})") as caught:
        text.chat(HELLO)
    assert time.perf_counter() - start < 25
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500 and message.endswith(".")


def test_a_template_that_failed_renders_the_next(tmp_path):
    source = "{% for a in range(messages | length * 50000) %}{% for b in range(50000) %}{% endfor %}{% endfor %}"
    guarded = "{% if messages[0].content == 'loop' %}" + source + "{% endif %}fine"
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path, guarded))
    for _ in range(2):
        with pytest.raises(ValueError, match="takes too long"):
            text.chat([{"role": "user", "content": "loop"}])
        assert text.render_chat(HELLO) == "fine"


@pytest.mark.parametrize("messages", ["hi", [], [{"content": "x"}], ["hi"], None, [{"role": 3}]])
def test_messages_of_another_form(tmp_path, messages):
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path, CHATML))
    with pytest.raises(ValueError, match="messages must be a list of messages such as"):
        text.chat(messages)


def test_bytes_of_tokens_join_to_the_text(tmp_path):
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path))
    for said in (" Hé 🙂 東京\t\x00\x7f\xad", "\ufffd?"):
        assert b"".join(map(text.token_bytes, text.encode(said, special=False))) == said.encode()
    assert text.token_bytes(256) == b"<bos>" and text.token_bytes(300) == b""
    assert [text.token_string(token) for token in (256, *text.encode("a é", special=False))] == ["<bos>", *"aĠÃ©"]
    with pytest.raises(ValueError, match="no token 300, but 260"):
        text.token_string(300)
    for byte in range(256):
        assert text.token_bytes(text._tokenizer.token_to_id(CHARACTERS[byte])) == bytes([byte])


def test_bytes_of_tokens_of_sentencepiece(tmp_path):
    vocab = {"<unk>": 0, "\u2581a": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    made.save(str(tmp_path / "tokenizer.json"))
    text = jaxkv.text.Tokenizer(tmp_path)
    assert [text.token_bytes(2 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_half_a_character_is_no_text(tmp_path):
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path, CHATML))
    for read in (text.encode, lambda half: text.chat([{"role": "user", "content": half}])):
        with pytest.raises(ValueError, match="half a character, the lone surrogate"):
            read("\ud800")


def test_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        jaxkv.text.Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer that the tokenizers library can read"):
        jaxkv.text.Tokenizer(tmp_path)
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path))
    with pytest.raises(ValueError, match=r"has no chat template.* generate .* or /v1/completions"):
        text.chat(HELLO)
    with pytest.raises(ValueError, match="must be what JSON can say"):
        jaxkv.text.Tokenizer(write_tokenizer(tmp_path, CHATML)).chat([{"role": "user", "content": b"x"}])
    with pytest.raises(ValueError, match="text must be a string, not 3"):
        text.encode(3)


def test_a_stream_never_splits_a_character(tmp_path):
    text = jaxkv.text.Tokenizer(write_tokenizer(tmp_path))
    wanted = "aé🙂" * 40 + "e\u0301 日本語"
    tokens = text.encode(wanted)
    stream = text.stream(tokens[:3])
    parts = [stream.add(token) for token in tokens[3:]]
    assert not any("\ufffd" in part for part in parts) and set(parts) > {"", "é", "🙂", "本"}
    assert text.decode(tokens[:3]) == "a\ufffd"  # what was a part of a character before is shown when it is whole
    assert "a" + "".join(parts) + stream.finish() == wanted
    cut = text.stream()
    assert [cut.add(token) for token in text.encode("🙂", special=False)[:3]] == ["", "", ""]
    assert cut.finish() == "\ufffd" and cut.text == "\ufffd"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache folder as huggingface_hub lays it out, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository, commit = tmp_path / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(DATA / "llama", snapshot)
    write_tokenizer(snapshot, CHATML)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_name_on_the_hub_is_found_in_its_cache(hub):
    model = jaxkv.models.load("owner/name")
    assert model.config == jaxkv.models.load(DATA / "llama").config
    text = jaxkv.text.Tokenizer("owner/name")
    assert pathlib.Path(text.folder).samefile(hub) and text.chat(HELLO)


def test_a_name_that_is_not_there_is_one_sentence(hub):
    for read in (jaxkv.models.load, jaxkv.text.Tokenizer):
        with pytest.raises(FileNotFoundError, match=r"no folder owner/other, and the Hugging Face hub") as caught:
            read("owner/other")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
        with pytest.raises(FileNotFoundError, match="There is no folder"):
            read("../not a name")


def test_answers_end_at_the_model_s_own_end_tokens(tmp_path):
    for file in (DATA / "llama").iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [94, 95]}))
    prompt, limit = [3, 4, 5], 6
    with jaxkv.Engine(jaxkv.models.load(tmp_path), max_seqs=2, max_seq_len=16) as engine:
        assert engine.eos_ids == (94, 95)
        tokens = [token for _, token in engine.stream([prompt], limit, eos=())]
        assert len(tokens) == limit
        end = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
        engine.eos_ids = (tokens[end],)
        request = engine.submit(prompt, limit)
        for _ in engine.run():
            pass
        assert request.tokens == tokens[:end] and request.ended == "eos"
        assert [token for _, token in engine.stream([prompt], limit)] == tokens[:end]
        assert [token for _, token in engine.stream([prompt], limit, eos=())] == tokens


@pytest.mark.parametrize(
    ("ids", "read"), [((3, 4), (3, 4)), (None, ()), ("ab", ()), ([1, -1, True, "x"], (1,)), (5, ())]
)
def test_what_a_config_of_one_s_own_may_say(ids, read):
    assert read_model_eos(types.SimpleNamespace(eos_ids=ids)) == read == tuple(read_eos(None, read))
    assert read_eos((), read) == frozenset() and read_eos(7, read) == {7} and read_model_eos(None) == ()
