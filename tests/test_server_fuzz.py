"Whatever is sent to the server: an answer or an error of OpenAI's shape, no 5xx, no traceback, no block lost, and the next one is served."
import gzip
import json
import socket

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from pagedlm import server as server_module
from tiny_server import TinyServer, save_tiny, wait_for

GOOD = {"prompt": "The good request.", "max_tokens": 8, "temperature": 0, "logprobs": 0}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with TinyServer(save_tiny(tmp_path_factory.mktemp("tiny"))) as s:
        s.good = answer(s)
        yield s


def answer(s):
    status, _, body = s.post("/v1/completions", GOOD)
    assert status == 200
    return told(body)


def told(body):
    "What was generated; the last digits of log-probabilities depend on what else is in a step, and on what is cached."
    return [(c["text"], c["logprobs"]["tokens"]) for c in json.loads(body)["choices"]]


@pytest.fixture(autouse=True)
def unhurt(server):
    "After each test the server is what it was."
    yield
    wait_for(server.idle)
    assert answer(server) == server.good and server.ask()[0] == 200
    assert not [r for r in server.records if r.exc_info or r.levelname == "ERROR"]


def refused(reply, statuses=(400,)):
    status, headers, body = reply
    error = json.loads(body)["error"]
    assert status in statuses and error.keys() == {"message", "type", "param", "code"} and error["message"], (status, body)
    assert headers["Content-Type"] == "application/json"
    return error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/health"])
def test_schemathesis(server, path):
    document = json.loads(json.dumps(server.app.openapi()))
    operation = next(iter(schemathesis.openapi.from_dict(document).include(path=path).get_all_operations())).ok()
    operation.schema.config.update(base_url=server.url)
    counts = {}

    @hypothesis.settings(max_examples=40 if "complet" in path else 4, deadline=None, database=None, derandomize=True,
                         suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @hypothesis.given(case=operation.as_strategy())
    def run(case):
        if isinstance(case.body, dict) and (case.body.get("max_tokens") or 0) > 64: case.body["max_tokens"] = 64
        reply = case.call(base_url=server.url, timeout=60)
        case.validate_response(reply, checks=CHECKS)
        counts[reply.status_code] = counts.get(reply.status_code, 0) + 1
    run()
    assert counts.keys() <= {200, 400, 404, 413, 429} and sum(counts.values()) >= 1


HUGE = 10 ** 400
NUMBERS = ["max_tokens", "min_tokens", "n", "best_of", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
           "presence_penalty", "repetition_penalty", "seed", "length_penalty", "prompt_logprobs", "logprobs"]
TEXTS = ["model", "user", "cache_salt", "stop", "early_stopping"]
HARMLESS = {"seed": ["-1", str(HUGE), "1" * 4000], "top_k": ["-1", str(HUGE), "1" * 4000], "user": ['"\\ud800"', '""'],
            "cache_salt": ['"\\ud800"', '""'], "stop": ['"\\ud800"'], "min_p": []}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_none(server, name):
    for value in ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", str(HUGE), "1" * 4000, "1" * 5000, "true", '"1"', "[]", "{}", "-1", "0.5e"]:
        if value in HARMLESS.get(name, ()) or (value, name) in [("-1", "frequency_penalty"), ("-1", "presence_penalty")]: continue
        if (value, name) == ("-1", "length_penalty"): continue
        refused(server.post("/v1/completions", f'{{"prompt": "a", "max_tokens": 2, "{name}": {value}}}'.encode()))
    status, _, body = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, name: None})
    assert status == 200, body


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_none(server, name):
    for value in ['"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '""', "1", "true", "{}", "[1]", '[["a"]]']:
        reply = server.post("/v1/completions", f'{{"prompt": "a", "max_tokens": 2, "{name}": {value}}}'.encode())
        text = name in ("user", "cache_salt") and value[0] == '"'
        fine = text or (name == "stop" and value[0] == '"' and value != '""')
        if fine: assert reply[0] == 200, (value, reply)
        else: refused(reply, (400, 404))


def one(prompt, **more): return {"prompt": prompt, "max_tokens": 2, **more}


BAD = {"empty": {}, "list": [], "null": None, "number": 3, "text": "x", "no prompt": {"max_tokens": 3},
       "empty text": one(""), "empty list": one([]), "empty in list": one(["hi", ""]), "empty ids": one([[]]), "mixed": one(["a", 1]),
       "bool ids": one([True]), "out of vocabulary": one([272]), "negative id": one([-1]), "huge id": one([HUGE]), "float id": one([1.5]),
       "surrogate": one("\ud800"), "surrogate in list": one(["a", "\udc80"]), "more prompts than may wait": one(["a"] * 33),
       "thousands of prompts": one(["a"] * 50_000), "too long": one("a" * 513), "too long ids": one([5] * 100_000),
       "n": one("a", n=HUGE), "n that is wide": one("a", n=1000), "best_of": one("a", n=3, best_of=2), "top": one("a", logprobs=21),
       "stops": one("a", stop=["b"] * 1000), "stop ids": one("a", stop_token_ids=[5] * 5000), "stop id": one("a", stop_token_ids=[-1]),
       "empty stop": one("a", stop=[""]), "bias": one("a", logit_bias={str(i): 1 for i in range(100_000)}),
       "bias of nobody": one("a", logit_bias={"272": 1}), "bias of text": one("a", logit_bias={"x": 1}),
       "bias of a long key": one("a", logit_bias={"0" * 30: 1}), "bias of a huge key": one("a", logit_bias={"9" * 5000: 1}),
       "bias null": one("a", logit_bias={"5": None}), "unknown": one("a", x=1), "tools": one("a", tools=[{}]),
       "many fields": one("a", **{f"x{i}": 1 for i in range(5000)}), "deep": one([[[[[["a"]]]]]]), "stream_options": one("a", stream_options={"include_usage": True})}
CHATS = {"no messages": {"messages": []}, "text": {"messages": "hi"}, "unknown role": {"messages": [{"role": "robot", "content": "x"}]},
         "surrogate role": {"messages": [{"role": "\ud800", "content": "x"}]}, "surrogate": {"messages": [{"role": "user", "content": "\ud800"}]},
         "null": {"messages": [None]}, "empty": {"messages": [{}]}, "image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "parts of nothing": {"messages": [{"role": "user", "content": [{}]}]}, "no content": {"messages": [{"role": "user", "content": None}]},
         "thousands": {"messages": [{"role": "user", "content": ""}] * 20_000},
         "top": {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21},
         "top alone": {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 1}}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies(server, name): refused(server.post("/v1/completions", BAD[name]), (400, 413))


@pytest.mark.parametrize("name", CHATS)
def test_bad_chats(server, name): refused(server.post("/v1/chat/completions", CHATS[name]), (400, 413))


@pytest.mark.parametrize("body", [b"", b"{", b"nul", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}', b"[" * 100_000,
                                  b"[" * 300_000, b'{"a":' * 1000, gzip.compress(b'{"prompt": "a"}'), b'{"prompt": "a"} x', b"\x00" * 100,
                                  b'{"prompt": [' + b"1," * 300_000 + b"1]}", b'{"prompt": "a", "n": ' + b"9" * 100_000 + b"}",
                                  b'{"prompt": "' + b"a " * 2_500_000 + b'"}'], ids=lambda b: f"{len(b)}-{b[:6]!r}")
def test_bodies_that_are_no_json(server, body):
    for path in ("/v1/completions", "/v1/chat/completions"): refused(server.post(path, body), (400, 413))


def test_bodies_that_are_odd_and_fine(server):
    body = json.dumps(GOOD)
    for odd in (b"\xef\xbb\xbf" + body.encode(), body.encode("utf-16"), body.encode("utf-32"),
                b'{"prompt": "no", "prompt": ' + json.dumps(GOOD["prompt"]).encode() + b", " + body.encode()[1:]):
        status, _, got = server.post("/v1/completions", odd)
        assert status == 200 and told(got) == server.good
    for path, kind in (("/v1/completions", "text/plain"), ("/v1/completions", "multipart/form-data"), ("/v1/chat/completions", "")):
        refused(server.ask("POST", path, body, {"Content-Type": kind}))


@pytest.mark.parametrize("field", [{"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300}, {"temperature": 1e-300}, {"top_p": 1e-300},
                                   {"logit_bias": {"5": 1e300}}, {"logit_bias": {str(i): -100 for i in range(258)}}, {"min_p": 1e-300}])
def test_numbers_at_the_edge(server, field):
    status, _, body = server.post("/v1/completions", one("abc", **field))
    assert status in (200, 400), body


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("data", [
    b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200 + b"\r\n\r\n",
    b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
    HEAD + b"Content-Length: -5\r\n\r\n", HEAD + b"Content-Length: 5x\r\n\r\n12345", HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n12",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost : b\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n"], ids=range(13))
def test_what_is_no_http(server, data):
    assert server.raw(data, half_close=True)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 501", b"HTTP/1.1 404")


def test_bodies_that_stop(server):
    body = json.dumps(GOOD).encode()
    for data in (HEAD + b"Content-Length: 1000\r\n\r\n" + body, HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"pro\r\n",
                 HEAD + b"Content-Length: 5\r\n\r\n" + body, HEAD, HEAD + b"Content-Length: 100\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as s: s.sendall(data)
    lie = server.raw(HEAD + b"Connection: close\r\nContent-Length: 99999999\r\n\r\n" + body)
    assert lie.startswith(b"HTTP/1.1 413") and b'"code":"body_too_large"' in lie
    parts = b"".join(b"100000\r\n" + b" " * (1 << 20) + b"\r\n" for _ in range(9))
    assert server.raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n")[:12] in (b"HTTP/1.1 413", b"")


def test_a_slow_body(server, monkeypatch):
    monkeypatch.setattr(server_module, "BODY_TIMEOUT", 0.2)
    answer = server.raw(HEAD + b"Connection: close\r\nContent-Length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408") and b'"error":{' in answer


def test_gone_at_any_moment(server):
    "Clients that close at once, in a stream or a whole answer, in every number: nothing stays."
    for stream in (True, False):
        body = json.dumps(one("abc", max_tokens=400, n=3, stream=stream, ignore_eos=True) | {"max_tokens": 400}).encode()
        for read in (0, 0, 0, 1, 200):
            with socket.create_connection(("127.0.0.1", server.port)) as s:
                s.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                if read and stream: s.recv(read)
    wait_for(server.idle)
    assert server.engine.engine.books.generation_tokens < 10 * 3 * 400      # they were not all served to the end


@pytest.mark.parametrize("path", ["/x", "//", "/v1", "/v1/models/", "/v1/completions/", "/openapi.json", "/docs", "/%00", "/..", "/v1/completions"])
def test_places_that_there_are_not(server, path): refused(server.ask(path=path), (404, 405))


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"])
def test_methods_that_there_are_not(server, method): refused(server.ask(method, "/v1/completions"), (405,))
