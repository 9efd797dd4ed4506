"""A tiny model behind HTTP, OpenAI's client of it, and what the library answers."""

import pytest

import jaxkv
import jaxkv.text
from jaxkv import models


@pytest.fixture(scope="module")
def served(folder):
    """An engine, its tokenizer, and the address of a server in a thread."""
    from http_server import listen

    from jaxkv._cli.http.app import make_app
    from jaxkv._cli.text import penalty_options

    model, text = models.load(folder), jaxkv.text.Tokenizer(folder)
    sizes = {"max_seqs": 4, "max_seq_len": 256, "max_waiting": 40, "prefix_cache": True}
    engine = jaxkv.Engine(model, **sizes, **penalty_options({}))
    app = make_app(engine, text, ["tiny"], (257,), {"temperature": 0.0}, penalties={})
    with engine, engine.serve(), listen(app) as url:
        yield engine, text, url


@pytest.fixture(scope="module")
def openai():
    """OpenAI's client, which takes two seconds to import: not where tests are only collected."""
    return pytest.importorskip("openai", reason="the extra 'test' is not installed")


@pytest.fixture(scope="module")
def client(served, openai):
    with openai.OpenAI(base_url=served[2] + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(served):
    """The text of an answer of so many tokens."""
    engine, text, _ = served
    known = {}

    def answer(question, count):
        if question not in known:
            prompt = text.chat([{"role": "user", "content": question}])
            known[question] = len(prompt), engine.submit(prompt, 40, eos=(257,)).result(60)
        stream = text.stream(text.chat([{"role": "user", "content": question}]))
        return "".join(map(stream.add, known[question][1][:count]))

    return answer
