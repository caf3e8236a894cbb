"""OpenAI's API over HTTP: the real model in a process of its own, and a tiny random one in this process, both on real sockets. What
they answer is what the engine answers offline; every answer, chunk and error has the shape that the `openai` package declares."""
import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
import uvicorn
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pagedlm import LLM, SamplingParams
from pagedlm import async_engine as engine_module
from pagedlm import server as server_module
from pagedlm.async_engine import AsyncEngine
from pagedlm.cli import main
from pagedlm.models import load_model, load_tokenizer
from pagedlm.server import MAX_BODY, MAX_DEPTH, BODY_TIMEOUT, address, create_app, listen

PATIENCE = 60.0       # seconds that a condition may take on a machine that is busy
CHATML = ("{% for m in messages %}{% if 'forbidden' in m['content'] %}{{ raise_exception('this word is not for me') }}{% endif %}"
          "{% if m['role'] not in ('system', 'user', 'assistant') %}{{ raise_exception('who is ' + m['role']) }}{% endif %}"
          "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}{{ '<|start|>assistant\n' }}")
CORPUS = ["An owl is a wise bird. Where does it live? user assistant system\n\n", "the 日本語 naïve 🦉"] * 4
BOTH = "completions", "chat"
LONG = 3000           # tokens that take the tiny model many seconds


# --- two servers

def until(condition, what="a condition"):
    "Ask again and again until it holds; its value."
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come true in {PATIENCE:.0f} s"
        time.sleep(0.01)
    return found


class Client(httpx.Client):
    "Raw HTTP to one server."
    def __init__(self, base_url, **kw): super().__init__(base_url=base_url, timeout=PATIENCE, trust_env=False, **kw)

    def ask(self, kind, status=200, **body):
        "The JSON of an answer to one of the two endpoints."
        answer = self.post(path(kind), json=asked(kind, body))
        assert answer.status_code == status, answer.text
        return answer.json()

    def stream_of(self, kind, **body):
        "The chunks of a streamed answer, all of them; it has to end with [DONE]."
        with self.stream("POST", path(kind), json=asked(kind, body) | {"stream": True}) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.read()
            *chunks, done = events_of(answer)
        assert done == "[DONE]"
        return chunks

    def metrics(self) -> dict:
        "Every sample by name, and by (name, label value) where it has a label."
        found = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for s in family.samples: found[(s.name, *s.labels.values()) if s.labels else s.name] = s.value
        return {(k[0].removeprefix("pagedlm:"), *k[1:]) if isinstance(k, tuple) else k.removeprefix("pagedlm:"): v for k, v in found.items()}

    def idle(self):
        "Wait until nothing runs or waits and every block is free."
        def now():
            m = self.metrics()
            return m if m["num_requests_running"] == m["num_requests_waiting"] == m["num_requests_swapped"] == m["num_blocks_used"] == 0 else None
        m = until(now, "an idle engine")
        assert m["num_blocks_free"] == m["num_blocks"] and m["num_host_blocks_free"] == m["num_host_blocks"]
        return m

    def reaches(self, name, value):
        "Wait until a metric has a value."
        until(lambda: self.metrics()[name] == value, f"{name} = {value}")


def path(kind): return "/v1/completions" if kind == "completions" else "/v1/chat/completions"

def asked(kind, body):
    "A body with something to answer, if it says nothing itself."
    said = {"prompt": "An owl"} if kind == "completions" else {"messages": [{"role": "user", "content": "An owl?"}]}
    return body if body.keys() & {"prompt", "messages"} else said | body

def events_of(answer):
    "The data of server-sent events, as they come."
    for line in answer.iter_lines():
        if not line: continue
        assert line.startswith("data: "), line
        yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])

def started(*args, env=None, model=None):
    "A process that serves, and its address."
    command = [sys.executable, "-m", "pagedlm", "serve", *([str(model)] if model else []), "--port", "0", *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}))
    process.said, ready = [], threading.Event()
    def read(pipe):
        for line in pipe:
            process.said.append(line)
            if "pagedlm serves" in line: ready.set()
        ready.set()
    process.readers = [threading.Thread(target=read, args=[pipe], daemon=True) for pipe in (process.stdout, process.stderr)]
    for reader in process.readers: reader.start()
    process.ready = ready
    return process

def address_of(process):
    assert process.ready.wait(2 * PATIENCE) and process.poll() is None, process.said
    process.address = re.search(r"http://[\d.]+:\d+", "".join(process.said))[0]
    return process.address

def ended(process, code=0):
    "It ends by itself, and says nothing bad."
    assert process.wait(PATIENCE) == code, process.said
    for reader in process.readers: reader.join(PATIENCE)
    assert "Traceback" not in "".join(process.said), process.said

@pytest.fixture(scope="module")
def process():
    "`pagedlm serve`, as it comes; SIGTERM ends it with 0."
    process = started("--num-blocks", 512)
    try:
        address_of(process)
        yield process
        process.send_signal(signal.SIGTERM)
        ended(process)
    finally: process.kill()

@pytest.fixture(scope="module")
def real(process):
    with Client(process.address) as client: yield client

@pytest.fixture(scope="module")
def client(process):
    "The real `openai` client on the real model."
    with openai.OpenAI(base_url=process.address + "/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client: yield client

@pytest.fixture(scope="module")
def offline():
    "The same model without a server."
    with LLM("smollm2", num_blocks=512) as llm: yield llm


def save(folder, template=CHATML):
    "A random model that ends only by luck, and a byte-level tokenizer: its texts are full of parts of characters."
    torch.manual_seed(0)
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2,
                         bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[tokenizer.eos_token_id] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

@pytest.fixture(scope="module")
def folder(tmp_path_factory): return save(tmp_path_factory.mktemp("tiny"))

@pytest.fixture(scope="module")
def model(folder): return load_model(folder)

@pytest.fixture(scope="module")
def tokenizer(folder): return load_tokenizer(folder)

@contextlib.contextmanager
def serving(model, tokenizer, names=("tiny",), api_key=None, prepare=lambda engine: None, **kw):
    "A server of this process on a thread of its own; `prepare` may break its engine. At the end all blocks are free."
    kw = {"num_blocks": 1024, "num_host_blocks": 64, "block_size": 4, **kw}
    engine = AsyncEngine(model, tokenizer=tokenizer, **kw)
    prepare(engine.engine)
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, list(names), api_key), log_level="error", lifespan="off", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
    thread.start()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with Client(address(sock), headers=headers) as client:
            client.engine = engine
            yield client
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        engine.close(1)
        sock.close()
    assert not thread.is_alive()

@pytest.fixture(scope="module")
def tiny(model, tokenizer):
    with serving(model, tokenizer) as client: yield client

@pytest.fixture(scope="module")
def alone(model, tokenizer):
    "The tiny model offline."
    with LLM(model, tokenizer=tokenizer, num_blocks=1024, block_size=4) as llm: yield llm


# --- shapes

EXTRAS = {"stop_reason", "prompt_logprobs", "max_model_len"}      # vLLM's, which the package does not declare

def undeclared(x, at=""):
    "Names in a parsed answer that the package's types do not have."
    if isinstance(x, list): return [f for i, part in enumerate(x) for f in undeclared(part, f"{at}[{i}]")]
    if not isinstance(x, openai.BaseModel): return []
    return [f"{at}.{k}" for k in (x.model_extra or {}) if k not in EXTRAS] + [f for k in type(x).model_fields for f in undeclared(getattr(x, k), f"{at}.{k}")]

def parsed(kind, data):
    "A raw answer or chunk as the openai package's type, strictly; nothing in it is unknown."
    of = {"text_completion": Completion, "chat.completion": ChatCompletion, "chat.completion.chunk": ChatCompletionChunk, "model": Model}[kind]
    data = json.loads(json.dumps(data))
    for c in data["choices"] if kind == "text_completion" else ():
        if c["finish_reason"] is None: c["finish_reason"] = "stop"         # the type has no null, which all chunks but the last have
        if c["logprobs"] and c["logprobs"]["token_logprobs"][:1] == [None]:      # nor for the first token of a prompt
            assert c["logprobs"]["top_logprobs"][0] is None
            c["logprobs"]["token_logprobs"][0], c["logprobs"]["top_logprobs"][0] = 0.0, {}
    found = of.model_validate_json(json.dumps(data), strict=True)
    assert undeclared(found) == [] and found.object == kind
    return found

def joined(kind, chunks, n=1):
    "What a stream amounts to, choice by choice: (text, finish reason). It checks the shape of every chunk on the way."
    texts, reasons, begun = {}, {}, set()
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert type(chunks[0]["created"]) is int and abs(chunks[0]["created"] - time.time()) < 600
    assert chunks[0]["id"].startswith("cmpl-" if kind == "completions" else "chatcmpl-")
    for chunk in chunks:
        parsed("text_completion" if kind == "completions" else "chat.completion.chunk", chunk)
        for c in chunk["choices"]:
            i = c["index"]
            assert i not in reasons and "finish_reason" in c and 0 <= i < n
            if kind == "chat":
                assert ("role" in c["delta"]) == (i not in begun) and c["delta"].get("role", "assistant") == "assistant"
                begun.add(i)
            texts[i] = texts.get(i, "") + (c["text"] if kind == "completions" else c["delta"].get("content", ""))
            if c["finish_reason"] is not None: reasons[i] = c["finish_reason"]
    assert sorted(texts) == sorted(reasons) == list(range(n))
    return [(texts[i], reasons[i]) for i in range(n)]

def whole(kind, answer, n=1):
    "The same of a whole answer."
    found = parsed("text_completion" if kind == "completions" else "chat.completion", answer)
    assert [c.index for c in found.choices] == list(range(n)) and type(answer["created"]) is int
    if kind == "chat": assert {c.message.role for c in found.choices} == {"assistant"}
    return [(c.text if kind == "completions" else c.message.content, c.finish_reason) for c in found.choices]

def of_engine(outputs): return [(c.text, c.finish_reason) for o in outputs for c in o.outputs]

def error_of(answer, status, param=..., code=...):
    "The message of an answer that is OpenAI's error object and nothing else."
    assert answer.status_code == status, (answer.status_code, answer.text)
    body = answer.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    if param is not ...: assert error["param"] == param, error
    if code is not ...: assert error["code"] == code, error
    return error["message"]


# --- the real model: whole, streamed, and offline

CHAT = [{"role": "system", "content": "You answer in one short sentence."}, {"role": "user", "content": "What do owls eat?"},
        {"role": "assistant", "content": "Mice, mostly."}, {"role": "user", "content": "And where do they sleep?"}]
GREEDY = dict(temperature=0, max_tokens=12)
CASES = {      # name: (endpoint, prompt or messages, what the body asks for)
    "greedy": ("completions", "The owl is a bird that", GREEDY),
    "long": ("completions", "The owl is a bird that flies at night. " * 8, GREEDY),
    "turns": ("chat", CHAT, GREEDY),
    "seeds": ("completions", "Once upon a time there was", dict(n=3, seed=7, temperature=1.2, max_tokens=8)),
    "chat seeds": ("chat", CHAT[3:], dict(n=3, seed=-3, temperature=0.9, top_p=0.9, max_tokens=8)),
    "best_of": ("completions", "My favourite animal is", dict(n=2, best_of=4, seed=1, max_tokens=6)),
    "beams": ("completions", "The capital of France is", dict(n=3, use_beam_search=True, temperature=0, max_tokens=6, length_penalty=0.5)),
    "chat beams": ("chat", CHAT[3:], dict(n=1, best_of=2, use_beam_search=True, temperature=0, max_tokens=4, early_stopping=True)),
    "filters": ("completions", "Owls and foxes are", dict(seed=5, top_k=5, min_p=0.02, repetition_penalty=1.3, max_tokens=10)),
    "penalties": ("chat", CHAT[3:], dict(seed=5, frequency_penalty=1.5, presence_penalty=-0.5, max_tokens=10)),
    "no end": ("chat", [{"role": "user", "content": "Say: OK"}], dict(temperature=0, ignore_eos=True, skip_special_tokens=False, max_tokens=14)),
    "least": ("chat", [{"role": "user", "content": "Say: OK"}], dict(temperature=0, min_tokens=11, max_tokens=12)),
    "stop": ("completions", "One, two, three,", dict(temperature=0, max_tokens=16, stop=[" seven", "e, s"])),
    "stop kept": ("completions", "One, two, three,", dict(temperature=0, max_tokens=16, stop="ix, se", include_stop_str_in_output=True)),
    "stop id": ("completions", "One, two, three,", dict(temperature=0, max_tokens=16, stop_token_ids=[28])),
    "bias": ("completions", "The owl", dict(temperature=0, max_tokens=6, logit_bias={"2042": 100, "28": -100})),
}
STREAMED = [name for name, (_, _, body) in CASES.items() if body.get("best_of", 1) <= body.get("n", 1)]

@pytest.fixture(scope="module")
def answers(offline):
    "What each case gives offline."
    params = [SamplingParams(**body | ({"logit_bias": {int(i): b for i, b in body["logit_bias"].items()}} if "logit_bias" in body else {}))
              for _, _, body in CASES.values()]
    prompts = [offline.engine.prompts.encode_chat(said) if kind == "chat" else said for kind, said, _ in CASES.values()]
    return dict(zip(CASES, offline.generate(prompts, params)))

@pytest.fixture(scope="module")
def served_answers(client):
    "The same of the server: all whole and all streamed ones at once, through the openai client."
    known = set("temperature max_tokens n seed best_of top_p frequency_penalty presence_penalty stop logit_bias".split())
    def ask(name, stream):
        kind, said, body = CASES[name]
        do = client.completions.create if kind == "completions" else client.chat.completions.create
        given = {k: v for k, v in body.items() if k in known and not (k == "best_of" and kind == "chat")}
        more = {k: v for k, v in body.items() if k not in given}
        found = do(model="smollm2", **{"prompt" if kind == "completions" else "messages": said}, **given, extra_body=more, stream=stream)
        return [c.to_dict() for c in found] if stream else found.to_dict()
    with ThreadPoolExecutor(32) as pool:
        jobs = {(name, stream): pool.submit(ask, name, stream) for stream in (False, True) for name in (STREAMED if stream else CASES)}
        return {key: job.result() for key, job in jobs.items()}

@pytest.mark.parametrize("name", CASES)
def test_the_real_model_answers_whole_and_streamed_as_offline(name, answers, served_answers):
    kind, said, body = CASES[name]
    offline, n = answers[name], body.get("n", 1)
    assert whole(kind, served_answers[name, False], n) == of_engine([offline])
    usage = served_answers[name, False]["usage"]
    assert usage["prompt_tokens"] == len(offline.prompt_token_ids)
    assert usage["completion_tokens"] == offline.num_generated_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [c["stop_reason"] for c in served_answers[name, False]["choices"]] == [c.stop_reason for c in offline.outputs]
    if name in STREAMED:
        chunks = served_answers[name, True]
        assert joined(kind, chunks, n) == of_engine([offline])
        if not body.get("use_beam_search"): assert len(chunks) > n, "it came all at once"

def test_what_the_cases_are_meant_to_show(answers):
    texts = {name: [c.text for c in o.outputs] for name, o in answers.items()}
    for name in "seeds", "chat seeds", "beams": assert len(set(texts[name])) == 3
    assert answers["best_of"].num_generated_tokens > sum(len(c.token_ids) for c in answers["best_of"].outputs)
    assert "<|im_end|>" in texts["no end"][0] and len(answers["no end"].outputs[0].token_ids) == 14
    assert len(answers["least"].outputs[0].token_ids) in (11, 12)
    for name in "stop", "stop kept", "stop id": assert answers[name].outputs[0].finish_reason == "stop"
    assert texts["stop"][0] == " four, fiv" and texts["stop kept"][0] == " four, five, six, se"
    assert answers["stop id"].outputs[0].token_ids[-1] == answers["stop id"].outputs[0].stop_reason == 28
    assert set(answers["bias"].outputs[0].token_ids) == {2042}


# --- the tiny model: log-probabilities, echo, prompts, usage

def near(x):
    "The same with room for rounding: how many rows a step has may change the last bits."
    if isinstance(x, dict): return {k: near(v) for k, v in x.items()}
    if isinstance(x, list): return [near(v) for v in x]
    return pytest.approx(x, abs=1e-4) if isinstance(x, float) else x

def entries_of(offline): return [(t, e) for t, e in zip(offline.token_ids, offline.logprobs)]

@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_log_probabilities_of_completions(tiny, alone, tokenizer, top):
    asked = dict(max_tokens=20, temperature=1.5, seed=3, logprobs=top)
    offline, = alone.generate("日本", SamplingParams(**asked))
    offline = offline.outputs[0]
    found, = tiny.ask("completions", prompt="日本", **asked)["choices"]
    streamed = [c["choices"][0] for c in tiny.stream_of("completions", prompt="日本", **asked)]
    merged = {k: [x for c in streamed for x in c["logprobs"][k]] for k in found["logprobs"]}
    assert near(merged) == found["logprobs"]
    assert found["logprobs"]["tokens"] == [tokenizer.decode([t]) for t in offline.token_ids]
    assert "\ufffd" in found["logprobs"]["tokens"] and len(offline.token_ids) == 20
    assert found["logprobs"]["token_logprobs"] == pytest.approx([e[t].logprob for t, e in entries_of(offline)], abs=1e-4)
    for (token, entry), shown in zip(entries_of(offline), found["logprobs"]["top_logprobs"]):
        best = {}
        for i, p in entry.items(): best[tokenizer.decode([i])] = max(p.logprob, best.get(tokenizer.decode([i]), -1e9))
        assert shown.keys() == best.keys() and top <= len(entry) <= top + 1
        for text in best.keys() - {tokenizer.decode([token])}: assert shown[text] == pytest.approx(best[text], abs=1e-4)

@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["the 日本語 owl", "naïve <|end|> 🦉"])
def test_text_offsets_point_into_the_text(tiny, tokenizer, prompt, echo):
    asked = dict(prompt=prompt, max_tokens=40, temperature=1.5, seed=8, logprobs=0, echo=echo, ignore_eos=True)
    found, = tiny.ask("completions", **asked)["choices"]
    offsets, tokens, text = found["logprobs"]["text_offset"], found["logprobs"]["tokens"], found["text"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)
    split = 0
    for at, token in zip(offsets, tokens):
        if token.strip("\ufffd") == token and token not in ("<|end|>", "<|start|>"): assert text.startswith(token, at), (at, token)
        else: split += 1
    assert split and len(tokens) > 40 * echo
    streamed = [c["choices"][0] for c in tiny.stream_of("completions", **asked)]
    assert [x for c in streamed for x in c["logprobs"]["text_offset"]] == offsets
    assert "".join(c["text"] for c in streamed) == text

@pytest.mark.parametrize("top", [None, 0, 1, 5])
def test_log_probabilities_of_chats(tiny, alone, tokenizer, top):
    messages = [{"role": "user", "content": "日本?"}]
    asked = dict(max_tokens=24, temperature=1.5, seed=3)
    more = {"logprobs": True} | ({} if top is None else {"top_logprobs": top})
    offline, = alone.chat(messages, SamplingParams(logprobs=top or 0, **asked))
    found, = tiny.ask("chat", messages=messages, **asked, **more)["choices"]
    streamed = [c["choices"][0] for c in tiny.stream_of("chat", messages=messages, **asked, **more)]
    content = found["logprobs"]["content"]
    assert near([x for c in streamed if c["logprobs"] for x in c["logprobs"]["content"]]) == content and len(content) == 24
    raw = b"".join(bytes(x["bytes"]) for x, t in zip(content, offline.outputs[0].token_ids) if t not in tokenizer.all_special_ids)
    assert raw.decode(errors="replace") == found["message"]["content"] and "\ufffd" in {x["token"] for x in content}
    for (token, entry), shown in zip(entries_of(offline.outputs[0]), content):
        assert shown["token"] == tokenizer.decode([token]) and shown["logprob"] == pytest.approx(entry[token].logprob, abs=1e-4)
        ranks = sorted(entry.values(), key=lambda p: p.rank)[:top or 0]
        assert [x["logprob"] for x in shown["top_logprobs"]] == pytest.approx([p.logprob for p in ranks], abs=1e-4)

def test_the_bytes_of_a_character_in_parts(tiny, tokenizer):
    "The parts of an owl, forced one by one; each part has its bytes and no text of its own."
    owl = tokenizer("\u20ac", add_special_tokens=False)["input_ids"]          # not in the corpus: three tokens of a byte
    assert len(owl) == 3
    found, = tiny.ask("chat", max_tokens=3, temperature=0, logit_bias={str(owl[0]): 100}, logprobs=True)["choices"]
    assert [x["bytes"] for x in found["logprobs"]["content"]] == [[0xe2]] * 3 and found["message"]["content"] == "\ufffd" * 3
    ids = [tokenizer.convert_tokens_to_ids(c) for c in (server_module.OTHER and "\u0120", "!")]
    for i, raw in zip(ids, (b" ", b"!")):
        found, = tiny.ask("chat", max_tokens=1, temperature=0, logit_bias={str(i): 100}, logprobs=True)["choices"]
        assert bytes(found["logprobs"]["content"][0]["bytes"]) == raw == found["message"]["content"].encode()

@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_echo(tiny, alone, tokenizer, logprobs, max_tokens, stream):
    asked = dict(max_tokens=max_tokens, temperature=0, echo=True, n=2) | ({} if logprobs is None else {"logprobs": logprobs})
    prompts = ["An owl is wise", "日本語"]
    if stream:
        chunks = tiny.stream_of("completions", prompt=prompts, stream_options={"include_usage": True}, **asked)
        usage, found = chunks[-1]["usage"], [[], [], [], []]
        for c in (c for chunk in chunks for c in chunk["choices"]): found[c["index"]].append(c)
        texts = ["".join(c["text"] for c in parts) for parts in found]
        assert [r for r, in ([c["finish_reason"] for c in parts if c["finish_reason"]] for parts in found)] == ["length"] * 4
    else:
        answer = tiny.ask("completions", prompt=prompts, **asked)
        parsed("text_completion", answer)
        usage, found = answer["usage"], [[c] for c in answer["choices"]]
        texts = [c["text"] for c in answer["choices"]]
        assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=logprobs, prompt_logprobs=logprobs)
    offline = [o for o in alone.generate(prompts, params) for _ in range(2)]
    assert texts == [o.prompt + o.outputs[0].text for o in offline] and usage["completion_tokens"] == 4 * max_tokens
    assert usage["prompt_tokens"] == sum(len(tokenizer(p)["input_ids"]) for p in prompts)
    for parts, o in zip(found, offline):
        if logprobs is None: assert [c["logprobs"] for c in parts] == [None] * len(parts); continue
        values = [v for c in parts for v in c["logprobs"]["token_logprobs"]]
        entries = o.prompt_logprobs[1:] + o.outputs[0].logprobs
        assert values[0] is None and len(values) == len(o.prompt_token_ids) + max_tokens
        assert values[1:] == pytest.approx([e[t].logprob for e, t in zip(entries, o.prompt_token_ids[1:] + o.outputs[0].token_ids)], abs=1e-4)

def test_a_prompt_of_ids_is_echoed_as_its_text(tiny, tokenizer):
    ids = tokenizer("the owl <|end|>日本")["input_ids"]
    found, = tiny.ask("completions", prompt=ids, echo=True, max_tokens=0)["choices"]
    assert found["text"] == tokenizer.decode(ids) == "the owl <|end|>日本"

def test_prompt_logprobs(tiny, alone):
    "vLLM's: for each token of the prompt a dict by id, the first of them null."
    offline, = alone.generate("An owl", SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2))
    for kind in BOTH:
        body = {"prompt": "An owl"} if kind == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
        found, = tiny.ask(kind, max_tokens=2, temperature=0, prompt_logprobs=2, **body)["choices"]
        assert found["prompt_logprobs"][0] is None and len(found["prompt_logprobs"]) > 1
        for entry in found["prompt_logprobs"][1:]:
            assert 2 <= len(entry) <= 3 and all(p.keys() == {"logprob", "rank", "decoded_token"} for p in entry.values())
        if kind == "completions":
            assert [{int(i): (p["rank"], p["decoded_token"]) for i, p in e.items()} for e in found["prompt_logprobs"][1:]] == [
                {i: (p.rank, p.decoded_token) for i, p in e.items()} for e in offline.prompt_logprobs[1:]]
            assert found["logprobs"] is None
    assert "prompt_logprobs" not in tiny.ask("chat", max_tokens=1)["choices"][0]


OWLS = ["An owl", "the the the bird. Where does it live?" * 3, "日本"]

@pytest.mark.parametrize("as_ids", [False, True])
def test_forms_of_prompts_and_the_order_of_choices(tiny, alone, tokenizer, as_ids):
    prompts = [tokenizer(p)["input_ids"] for p in OWLS] if as_ids else OWLS
    asked = dict(temperature=1.2, seed=4, max_tokens=9, n=2)
    offline = alone.generate(prompts, SamplingParams(**asked))
    answer = tiny.ask("completions", prompt=prompts, echo=True, **asked)
    assert whole("completions", answer, 6) == [(OWLS[i] + t, r) for i, o in enumerate(offline) for t, r in of_engine([o])]
    assert answer["usage"] == {"prompt_tokens": sum(len(o.prompt_token_ids) for o in offline), "completion_tokens": 54,
                               "total_tokens": sum(len(o.prompt_token_ids) for o in offline) + 54,
                               "prompt_tokens_details": answer["usage"]["prompt_tokens_details"]}
    assert joined("completions", tiny.stream_of("completions", prompt=prompts, echo=True, **asked), 6) == whole("completions", answer, 6)
    for p, o in zip(prompts, offline): assert whole("completions", tiny.ask("completions", prompt=p, **asked), 2) == of_engine([o])
    assert whole("completions", tiny.ask("completions", prompt=prompts[:1], **asked), 2) == of_engine(offline[:1])

def test_choices_that_end_out_of_order_stay_in_order(tiny, alone):
    "Stop strings end some of them early; each has its own text until its own end."
    asked = dict(temperature=1.5, seed=21, max_tokens=60, n=3, stop=["a", "ow"])
    offline = alone.generate(OWLS, SamplingParams(**asked))
    lengths = [len(c.token_ids) for o in offline for c in o.outputs]
    assert len(set(lengths)) > 4 and {c.finish_reason for o in offline for c in o.outputs} == {"stop", "length"} or len(set(lengths)) > 4
    chunks = tiny.stream_of("completions", prompt=OWLS, **asked)
    assert joined("completions", chunks, 9) == of_engine(offline) == whole("completions", tiny.ask("completions", prompt=OWLS, **asked), 9)
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert ends != sorted(ends) and sorted(ends) == list(range(9))

@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("n", [1, 3])
def test_usage_in_streams(tiny, kind, n):
    asked = dict(max_tokens=5, n=n, seed=1, ignore_eos=True)
    usage = tiny.ask(kind, **asked)["usage"]
    tiny.ask(kind, **asked)
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert all("usage" not in c and c["choices"] for c in tiny.stream_of(kind, **asked, **options))
    *chunks, last = tiny.stream_of(kind, **asked, stream_options={"include_usage": True})
    assert {"usage": None}.items() <= chunks[0].items() and all(c["usage"] is None and len(c["choices"]) == 1 for c in chunks)
    assert last["choices"] == [] and {k: v for k, v in last["usage"].items() if k.endswith("tokens")} == {
        "prompt_tokens": usage["prompt_tokens"], "completion_tokens": 5 * n, "total_tokens": usage["prompt_tokens"] + 5 * n}
    joined(kind, [*chunks, last], n)

def test_cached_tokens_are_in_the_usage(tiny):
    prompt = "a prompt that nobody else has, long enough to be found again: " * 2
    first, second = (tiny.ask("completions", prompt=prompt, max_tokens=1)["usage"] for _ in range(2))
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] < cached and first["prompt_tokens"] - cached in range(1, 5)
    salted = tiny.ask("completions", prompt=prompt, max_tokens=1, cache_salt="mine")["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0
