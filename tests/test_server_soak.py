"""Hundreds of requests of all kinds, more than a small pool holds, a third of them cancelled: who was accepted and stayed got one
final answer, and afterwards nothing is left. `SOAK_REQUESTS` makes it longer."""
import asyncio
import gc
import json
import os
import random
import socket
import threading
from collections import Counter

import psutil
import pytest

from tiny_server import TinyServer, save_tiny, wait_for

import pagedlm.server as server_module

NUMBER = int(os.environ.get("SOAK_REQUESTS", 240))
KINDS = [{"temperature": 0}, {"temperature": 0, "logprobs": 2}, {"n": 3, "seed": 7}, {"best_of": 3, "seed": 1}, {"use_beam_search": True, "best_of": 3, "temperature": 0},
         {"echo": True, "temperature": 0, "logprobs": 1}, {"presence_penalty": 1.0, "stop": ["a"], "n": 2}, {"temperature": 0, "n": 2}]


def make(i):
    "Request `i`: (path, body, when it is to be cancelled: after how many chunks or after which share of a second)."
    rnd = random.Random(i)
    text, tokens = "abcdefgh"[i % 8] * rnd.randint(1, 60), rnd.randint(1, 20)
    body = {"max_tokens": tokens, "ignore_eos": True, **KINDS[i % len(KINDS)], "stream": rnd.random() < 0.6}
    if body.get("best_of"): body["stream"] = False
    leave = rnd.choice([0, 0.01, 0.1, 1, 3, tokens]) if rnd.random() < 1 / 3 else None
    if i % 16 == 15: return "/v1/completions", {"prompt": [9999], **body}, leave
    if i % 5 == 4 and not {"echo", "best_of", "logprobs"} & body.keys():
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body}, leave
    return "/v1/completions", {"prompt": text, **body}, leave


async def send(port, path, body, leave=None):
    "(status, bytes) of one request; (None, ...) if we left before its end."
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        data = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
                     f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        if leave is None: got = await reader.read()
        else:
            if leave < 1: await asyncio.sleep(leave)
            else:
                for _ in range(leave): await reader.read(200)
            return None, b""
        head, _, rest = got.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower(): rest = joined(rest)
        return int(head.split()[1]), rest
    finally: writer.close()


def joined(rest):
    "A chunked body as one."
    parts = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16): return b"".join(parts)
        parts.append(rest[:int(size, 16)])
        rest = rest[int(size, 16) + 2:]


def final(body, data):
    "The texts of a complete answer, which says of each choice once how it ended."
    if not body["stream"]:
        choices = json.loads(data)["choices"]
        assert [c["index"] for c in choices] == list(range(body.get("n", 1))) and all(c["finish_reason"] for c in choices)
        return [c["text"] if "text" in c else c["message"]["content"] for c in choices]
    *events, done = [line[6:] for line in data.decode().split("\n\n") if line]
    assert done == "[DONE]"
    ends = Counter()
    out = [""] * body.get("n", 1)
    for choice in (c for e in events for c in json.loads(e)["choices"]):
        out[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        if choice["finish_reason"]: ends[choice["index"]] += 1
    assert ends == {i: 1 for i in range(body.get("n", 1))}, ends
    return out


async def load(server, numbers, at_once=24):
    "Send requests; {number: texts} of those that were answered, and how many had which end."
    door, answers, ends = asyncio.Semaphore(at_once), {}, Counter()
    async def one(i):
        path, body, leave = make(i)
        async with door:
            for _ in range(1000):
                status, data = await send(server.port, path, body, leave)
                ends[status] += 1
                if status != 429: break
                await asyncio.sleep(0.05)
        if status == 200: answers[i] = final(body, data)
        assert status == (400 if i % 16 == 15 else 200) or (status is None and leave is not None), (status, data)
    await asyncio.gather(*map(one, numbers))
    return answers, ends


def resources():
    "(MiB that are resident, threads, file descriptors, objects of Python)"
    gc.collect()
    me = psutil.Process()
    return me.memory_info().rss / 2 ** 20, threading.active_count(), me.num_fds(), len(gc.get_objects())


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_soak(tmp_path, preemption):
    with TinyServer(save_tiny(tmp_path), num_blocks=20, block_size=8, max_num_seqs=12, max_model_len=128, max_waiting=6,
                    preemption=preemption) as server:
        part, ends = NUMBER // 4, Counter()             # of each kind of preemption: a part to warm up, and one that counts
        def run(first):
            answers, how = asyncio.run(load(server, range(first, first + part)))
            ends.update(how)
            wait_for(server.idle)
            return answers
        run(0)                                                  # warm: products keep what they prepared for each shape
        before, answers = resources(), run(part)
        after = resources()
        for i, texts in answers.items():
            path, body, _ = make(i)
            if body.get("temperature") != 0 or body.get("use_beam_search"): continue
            alone = asyncio.run(send(server.port, path, body))
            assert final(body, alone[1]) == texts, i
        stats = server.engine.stats
        assert (stats.preemptions_swap if preemption == "swap" else stats.preemptions_recompute) > 5
        assert ends[429] > 0 and ends[None] > part / 4
        assert not server.engine.streams and not server.engine.engine.requests
        assert after[0] - before[0] < 96 and after[1] <= before[1] + 2 and after[2] <= before[2] + 4 and after[3] <= before[3] + 3000, (before, after)
        assert not [r for r in server.records if r.exc_info or r.levelname == "ERROR"]
        print(f"{preemption}: {dict(ends)}, MiB, threads, fds, objects {before} {after}, preemptions {stats.preemptions}")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with TinyServer(save_tiny(tmp_path_factory.mktemp("model"))) as s:
        yield s
        assert not [r for r in s.records if r.exc_info]


def closed(sock):
    "Whether the server closes a connection within a minute."
    sock.settimeout(60)
    try: return sock.recv(1) == b""
    except ConnectionError: return True


def test_who_begins_no_request_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(server_module, "HEAD_S", 0.3)
    for sent in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"):
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            s.sendall(sent)
            if b"\r\n\r\n" in sent:
                answer = b""
                while b"ok" not in answer: answer += s.recv(1000)
            assert closed(s)
    body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    monkeypatch.setattr(server_module, "HEAD_S", 0.02)
    assert server.post("/v1/completions", body)[0] == 200            # an answer may take longer than that
    monkeypatch.undo()
    assert server.ask()[0] == 200


def test_who_does_not_read_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(server_module, "READER_S", 0.3)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    body = json.dumps({"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "logprobs": 5, "n": 2, "stream": True}).encode()
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", server.port))
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        gate = server.app.middleware_stack
        while not isinstance(gate, server_module.Gate): gate = gate.app
        wait_for(lambda: gate.inside == 1)
        wait_for(lambda: gate.inside == 0)                          # without a byte that was read
        wait_for(server.idle)


def test_many_connections(server):
    "Hundreds that only wait do not keep others out."
    waiting = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(400)]
    try: assert server.ask()[0] == 200 and server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})[0] == 200
    finally:
        for s in waiting: s.close()
