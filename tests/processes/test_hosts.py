"""One engine over two and four processes: requests come and leave, processes are killed, and no token differs."""

import json
import pathlib
import random
import signal
import time

import host_worker
import models_worker
import pytest
from nightly import NIGHTLY
from started import ended, last_words, said, start

FILE = pathlib.Path(host_worker.__file__)
OPTIONS = {"prefix_cache": True, "spill_bytes": 10**6, "num_blocks": 9}
pytestmark = [pytest.mark.timeout(3600), pytest.mark.skipif(not NIGHTLY, reason="many processes, and many steps")]


def run(folder, count, devices=1, **told):
    return start(FILE, folder, json.dumps({"count": count} | told), count=count, devices=devices)


def results(text):
    return [json.loads(line) for line in said(text, "result")]


def assert_all(found, requests, has_hook=False):
    """Every request has ended, and has the tokens of its prompt alone, or the first of them if it was cancelled."""
    assert {number for number, _, _ in found} == set(range(requests))
    for number, why, tokens in found:
        expected = host_worker.wanted(number, has_hook)
        assert why == "length" or (why == "cancelled" and host_worker.leaves(number)), (number, why)
        assert tokens == expected[: len(tokens)] and (why == "cancelled" or len(tokens) == len(expected)), number


@pytest.mark.parametrize("count", [2, 4])
def test_a_thousand_steps(tmp_path, count):
    """Tokens, programs and, on a quiet machine, the host's time are those of one process with as many devices."""
    told = {"requests": 190, "options": OPTIONS, "moves": True}
    texts = ended(run(tmp_path, count, **told), 1800)
    (alone,) = ended(run(tmp_path, 1, devices=count, **told), 1800)
    for text in (texts[0], alone):
        assert_all(results(text), told["requests"])
    assert [said(text, "ended") for text in texts] == [[""]] * count
    assert int(said(texts[0], "steps")[0]) > 1000
    assert said(texts[0], "stats") == said(alone, "stats") and '"blocks_restored": 0' not in said(alone, "stats")[0]
    assert float(said(texts[0], "bytes")[0]) < 256
    assert {said(text, "moves")[0] for text in texts} == set(said(alone, "moves"))
    print({name: (said(texts[0], name), said(alone, name)) for name in ("steps", "milliseconds", "bytes", "moves")})


@pytest.mark.parametrize(
    "told",
    [
        {"mesh": [[2, 2], ["context", "model"]], "options": OPTIONS},
        {"mesh": [[2, 2], ["model", "data"]], "options": {"prefix_cache": True, "max_seqs": 8, "num_blocks": 24}},
        {"options": {"swap": "always", "num_blocks": 7}},
        {"options": {"draft": "ngram", "draft_tokens": 3}},
        {"options": {"draft": "model"}},
        {"options": {"steps_per_dispatch": 4, "deterministic": False}},
        {"options": {"has_hook": True, "steps_per_dispatch": 2, "num_blocks": 9}},
    ],
    ids=["contexts", "rows", "swaps", "guesses", "drafts", "dispatches", "hooks"],
)
def test_ways_to_serve(tmp_path, told):
    """Two processes of two devices each."""
    texts = ended(run(tmp_path, 2, devices=2, requests=40, **told), 1800)
    assert [said(text, "ended") for text in texts] == [[""]] * 2, texts
    assert_all(results(texts[0]), 40, "has_hook" in told["options"])


@pytest.mark.parametrize("count", [2, 4])
def test_kills_lose_no_request(tmp_path, count):
    """One of them is killed, twenty times: before the first step, in steps, between them, in `save`. The others end
    with a sentence in good time, and all go on with what was saved; at last in one process."""
    draw, kills, found, longest = random.Random(count), 0, [], 0.0
    told = {"requests": 400, "options": OPTIONS, "saved_every": 5}
    while kills < 20:
        processes = run(tmp_path, count, **told)
        first = "known" if kills % 4 == 0 else "saved"
        while not said(processes[0].text, first):
            assert all(process.poll() is None for process in processes), "\n\n".join(ended(processes))
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 2 if first == "known" else 4))
        victim = kills % count
        processes[victim].send_signal(signal.SIGKILL)
        began, kills = time.monotonic(), kills + 1
        texts = ended(processes)
        longest = max(longest, time.monotonic() - began)
        found += results(texts[0])
        for survivor, text in enumerate(texts):
            if survivor != victim:
                assert processes[survivor].returncode == 1
                why = f"jaxkv: process {survivor} ends, because process {victim}"
                assert last_words(text).startswith(why), text
    (text,) = ended(run(tmp_path, 1, devices=count, **told), 1800)
    print(kills, "kills, the longest wait", round(longest, 1), "s;", len(found), "results before the last start")
    assert said(text, "ended") == [""]
    assert_all([*found, *results(text)], told["requests"])
    assert longest < host_worker.PATIENCE + 2


MODELS = [
    ["qwen3_next", {"prefix_cache": True, "num_blocks": 24, "spill_bytes": 10**6}],
    ["qwen3_next", {"draft": "ngram", "draft_tokens": 3, "num_blocks": 26}],
    ["falcon_h1", {"swap": "always", "num_blocks": 22, "steps_per_dispatch": 3}],
    ["kimi_linear", {"prefix_cache": True, "num_blocks": 26}],
    ["lfm2", {"swap": "never", "num_blocks": 22}],
    ["deepseek_v32", {"prefix_cache": True, "num_blocks": 30}],
    ["qwen3", {"cache_dtype": "int8", "prefix_cache": True, "num_blocks": 24}],
    ["qwen3", {"evict": ["keydiff", 0.3, "uniform", ["every", 1]], "num_blocks": 16}],
    ["llama", {"evict": ["snapkv", 0.5, "ada", ["every", 4]], "num_blocks": 20}],
    ["gemma3", {"evict": ["snapkv", 0.6, "uniform"], "swap": "always", "num_blocks": 20}],
]


def test_real_models(tmp_path):
    """Layers that keep states, an index, eviction: tokens and counts of what was done are those of one process, which
    goes on with what two have saved."""
    file, told = pathlib.Path(models_worker.__file__), {"resumed": 2, "cases": MODELS}
    texts = ended(start(file, tmp_path, json.dumps({"count": 2} | told), count=2, devices=1), 3000)
    (alone,) = ended(start(file, tmp_path, json.dumps({"count": 1} | told), count=1), 3000)
    assert [said(text, "ended") for text in (alone, *texts)] == [[""]] * 3, (alone, *texts)
    assert said(texts[0], "tokens") == said(alone, "tokens") and len(said(alone, "tokens")) == len(MODELS)
    assert said(texts[0], "stats") == said(alone, "stats")
