"""Pages of other origins in a browser: asked before they may, and answered where the server allows them."""

import types

import pytest
from http_server import httpx, listen

import jaxkv
from jaxkv._cli.http import serve
from jaxkv._cli.http.app import make_app
from jaxkv._cli.main import main
from jaxkv._cli.option_names import OptionParser
from jaxkv._cli.options import add_serve

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets that a client leaves

PAGE, OTHER = "https://page.example", "https://other.example:8443"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type,x-os"}
ALLOWS = "access-control-allow-origin"
CHAT = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2}


@pytest.fixture(scope="module", params=["one", "all"])
def allowing(request, served):
    """The address of a server that allows a page, or all."""
    engine, text, _ = served
    allowed = {"one": ["http://localhost:3000", PAGE], "all": ["*"]}[request.param]
    with listen(make_app(engine, text, ["tiny"], (257,), {"temperature": 0.0}, allowed_origins=allowed)) as url:
        yield url, request.param == "all"


def test_none_is_allowed_by_default(served):
    url = served[2]
    found = httpx.options(url + "/v1/chat/completions", headers={"Origin": PAGE, **ASKS})
    assert found.status_code == 405 and ALLOWS not in found.headers
    for path in ("/v1/models", "/health", "/version"):
        assert ALLOWS not in httpx.get(url + path, headers={"Origin": PAGE}).headers


def test_a_browser_that_asks_before_is_told(allowing):
    url, is_all = allowing
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        found = httpx.options(url + path, headers={"Origin": PAGE, **ASKS})
        assert found.status_code == 200 and found.headers[ALLOWS] == ("*" if is_all else PAGE)
        assert "POST" in found.headers["access-control-allow-methods"]
        assert {"authorization", "x-os"} <= set(found.headers["access-control-allow-headers"].split(","))
        # Chrome asks so for a server on the machine that it runs on.
        private = {"Origin": PAGE, "Access-Control-Request-Private-Network": "true", **ASKS}
        assert httpx.options(url + path, headers=private).status_code == 200
        other = httpx.options(url + path, headers={"Origin": OTHER, **ASKS})
        assert (other.status_code, other.headers.get(ALLOWS)) == ((200, "*") if is_all else (400, None))


def test_a_page_reads_answers_streams_and_refusals(allowing, served, monkeypatch):
    url, is_all = allowing

    def post(origin=PAGE, **body):
        found = httpx.post(url + "/v1/chat/completions", json=CHAT | body, headers={"Origin": origin}, timeout=60)
        return found.status_code, found.headers.get(ALLOWS)

    told = "*" if is_all else PAGE
    assert post() == (200, told) and post(stream=True) == (200, told)
    assert post(max_tokens=0) == (400, told) and post(model="x") == (404, told)
    assert post(OTHER) == (200, "*" if is_all else None), "what a browser keeps from the page"
    assert httpx.get(url + "/health").text == "ok"

    def broken(*_, **__):
        raise KeyError("within")

    monkeypatch.setattr(served[0], "submit", broken)
    assert post() == (500, told)


def test_a_page_that_does_not_ask_before_is_not_answered(served, monkeypatch):
    """As text a browser sends a body of any page, and keeps but the answer from it."""
    engine, _, url = served
    submitted = []
    monkeypatch.setattr(engine, "submit", lambda *a, **b: submitted.append(a))
    for path, kind in (("chat/completions", "text/plain"), ("completions", "application/x-www-form-urlencoded")):
        headers = {"Origin": PAGE, "Content-Type": kind}
        found = httpx.post(f"{url}/v1/{path}", content=b'{"prompt": "a", "messages": []}', headers=headers)
        assert found.status_code == 415 and "application/json" in found.json()["error"]["message"]
    assert httpx.post(url + "/tokenize", content=b"{}", headers={"Origin": PAGE}).status_code == 415
    assert not submitted
    monkeypatch.undo()
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "Application/JSON; charset=utf-8", "Origin": PAGE},
    ):
        assert httpx.post(url + "/tokenize", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def read_origins(*given):
    parser = OptionParser()
    add_serve(parser.add_subparsers())
    return parser.parse_args(["serve", "--model", "m", *given]).allowed_origins


def test_the_command_reads_origins_as_vllm_s_does(capsys):
    assert read_origins() == []
    assert read_origins("--allowed-origins", PAGE, "http://localhost:3000", "null") == [
        PAGE, "http://localhost:3000", "null",
    ]  # fmt: skip
    assert read_origins("--allowed-origins", f'["{PAGE}", "*"]', "--port", "1") == [PAGE, "*"]
    as_typed = ["HTTPS://Page.Example:443", "http://localhost:80", "https://localhost:80", "http://[::1]:3000"]
    as_sent = [PAGE, "http://localhost", "https://localhost:80", "http://[::1]:3000"]
    assert read_origins("--allowed-origins", *as_typed) == as_sent, "as browsers write them"
    for wrong in ("page.example", PAGE + "/", PAGE + "/chat", '["https://a.example"', "[5]", "https://", "file://x"):
        with pytest.raises(SystemExit):
            read_origins("--allowed-origins", wrong)
        assert "such as https://example.com" in capsys.readouterr().err, wrong


def test_the_command_allows_what_it_is_told(monkeypatch, tmp_path):
    told = []

    class Made(Exception):
        pass

    def make(*_, **options):
        told.append(options)
        raise Made

    opened = dict(model=types.SimpleNamespace(max_seq_len=64), chat=None, eos=(), sampling={}, penalties={})
    monkeypatch.setattr(serve, "open_model", lambda _: types.SimpleNamespace(**opened))
    monkeypatch.setattr(jaxkv, "Engine", lambda *_, **__: None)
    monkeypatch.setattr(serve, "make_app", make)
    for given in ([], ["--allowed-origins", PAGE]):
        with pytest.raises(Made):
            main(["serve", "--model", str(tmp_path), "--no-warmup", "--port", "0", *given])
    assert [options["allowed_origins"] for options in told] == [[], [PAGE]]
