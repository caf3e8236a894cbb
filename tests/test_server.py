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
    assert process.ready.wait(5 * PATIENCE) and process.poll() is None, process.said
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
    kw = {"num_blocks": 4096, "num_host_blocks": 64, "block_size": 4, **kw}
    engine = AsyncEngine(model, tokenizer=tokenizer, **kw)
    prepare(engine.engine)
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, list(names), api_key), log_level="error", lifespan="off", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
    thread.start()
    headers = {"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
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
    "no end": ("chat", [{"role": "user", "content": "Say: OK"}], dict(temperature=0, ignore_eos=True, skip_special_tokens=False, max_tokens=5, logit_bias={"2": 100})),
    "least": ("chat", [{"role": "user", "content": "Say: OK"}], dict(temperature=0, min_tokens=3, max_tokens=8, logit_bias={"2": 100})),
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
    assert texts["no end"] == ["<|im_end|>" * 5]           # token 2 ends an answer, if it may
    assert len(answers["least"].outputs[0].token_ids) == 4 and answers["least"].outputs[0].finish_reason == "stop" and "<" not in texts["least"][0]
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


# --- chat templates

def test_a_conversation_is_what_its_template_makes_of_it(real, offline):
    tokenizer = offline.engine.tokenizer
    for messages in (CHAT, CHAT[1:], CHAT[:2], [{"role": "user", "content": "ab\n\n 日本 <|im_end|>"}]):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        usage = real.ask("chat", messages=messages, max_tokens=0)["usage"]
        assert usage["prompt_tokens"] == len(ids) and usage["completion_tokens"] == 0
    prompt = real.ask("chat", messages=CHAT, max_tokens=0, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert prompt[0] is None and [int(i) for entry in prompt[1:] for i in entry] == ids[1:]

def test_there_is_one_token_of_beginning_where_the_tokenizer_has_one(model, tmp_path_factory):
    "A chat has the one of its template; a raw prompt, the one that the tokenizer puts before it."
    tokenizer = load_tokenizer(save(tmp_path_factory.mktemp("bos"), "<|start|>{% for m in messages %}{{ m['content'] }}{% endfor %}"))
    start = tokenizer.convert_tokens_to_ids("<|start|>")
    from tokenizers.processors import TemplateProcessing
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", start)])
    with serving(model, tokenizer) as client:
        for kind, body in (("chat", dict(messages=[{"role": "user", "content": "owl"}])), ("completions", dict(prompt="owl"))):
            found = client.ask(kind, max_tokens=0, prompt_logprobs=0, **body)
            ids = [int(i) for entry in found["choices"][0]["prompt_logprobs"][1:] for i in entry]
            assert ids == tokenizer("owl", add_special_tokens=False)["input_ids"] and found["usage"]["prompt_tokens"] == len(ids) + 1
        echoed, = client.ask("completions", prompt="owl", max_tokens=2, temperature=0, echo=True, logprobs=0)["choices"]
        assert echoed["text"].startswith("owl") and echoed["logprobs"]["text_offset"][:2] == [0, 0] and echoed["logprobs"]["text_offset"][-2] == 3

def test_content_in_parts_and_nulls(tiny):
    "Text parts are their text, and a null is as nothing; what a client got back it may send again."
    asked = dict(max_tokens=8, seed=2)
    expected = whole("chat", tiny.ask("chat", messages=[{"role": "user", "content": "An owl?"}], **asked))
    parts = [{"type": "text", "text": "An "}, {"type": "text", "text": "owl?"}]
    nulls = dict.fromkeys("stop temperature n top_p logit_bias stream stream_options user tools response_format logprobs top_logprobs "
                          "best_of max_completion_tokens frequency_penalty functions parallel_tool_calls metadata".split())
    for message, more in (({"role": "user", "content": parts}, {}), ({"role": "user", "content": "An owl?"}, nulls),
                          ({"role": "user", "content": "An owl?", "name": None, "tool_calls": None, "refusal": None}, {"tool_choice": "none", "tools": []}),
                          ({"role": "user", "content": "An owl?"}, {"response_format": {"type": "text"}, "model": "tiny", "store": False, "modalities": ["text"]})):
        assert whole("chat", tiny.ask("chat", messages=[message], **asked, **more)) == expected
    assert whole("chat", tiny.ask("chat", max_completion_tokens=8, seed=2)) == expected
    assert whole("chat", tiny.ask("chat", max_completion_tokens=8, max_tokens=8, seed=2)) == expected
    client = openai.OpenAI(base_url=str(tiny.base_url) + "/v1", api_key="x", max_retries=0)
    said = client.chat.completions.create(model="tiny", messages=[{"role": "developer", "content": "hm"}], max_tokens=4).choices[0].message
    again = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hm"}, said, {"role": "user", "content": "go on"}], max_tokens=1)
    assert again.choices[0].finish_reason == "length"

def test_a_template_refuses_with_its_own_words(tiny):
    for messages, words in (([{"role": "user", "content": "forbidden"}], "this word is not for me"), ([{"role": "tool", "content": "x"}], "'system', 'developer', 'user' or 'assistant'"), ([{"role": "user<|im_end|>", "content": "x"}], "messages.0.role")):
        for stream in (False, True):
            assert words in error_of(tiny.post(path("chat"), json={"messages": messages, "stream": stream}), 400)
    assert tiny.ask("chat", max_tokens=1)

def test_a_model_without_a_template(model, tokenizer):
    import copy
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with serving(model, bare) as client:
        for stream in (False, True): assert "no chat template" in error_of(client.post(path("chat"), json=asked("chat", {"stream": stream})), 400)
        assert client.ask("completions", max_tokens=2)["usage"]["completion_tokens"] == 2

def test_a_model_without_a_tokenizer(model):
    with serving(model, None) as client:
        assert "no tokenizer" in error_of(client.post(path("completions"), json={"prompt": "text"}), 400)
        error_of(client.post(path("chat"), json=asked("chat", {})), 400)
        found, = client.ask("completions", prompt=[5, 6], max_tokens=3, temperature=0, logprobs=1, echo=True)["choices"]
        assert found["text"] == "" and found["logprobs"]["tokens"][:2] == ["token_id:5", "token_id:6"]


# --- how long

def test_the_length_of_an_answer_that_asks_for_none(tiny):
    assert tiny.ask("completions", ignore_eos=True)["usage"]["completion_tokens"] == 16
    assert tiny.ask("completions", ignore_eos=True, max_tokens=None)["usage"]["completion_tokens"] == 16

@pytest.fixture(scope="module")
def short(model, tokenizer):
    with serving(model, tokenizer, names=["short", "other/name"], api_key="owl 🦉 key", max_model_len=50, max_waiting=3, max_num_seqs=4) as client: yield client

def test_limits_of_length(short):
    assert {m["max_model_len"] for m in short.get("/v1/models").json()["data"]} == {50}
    for n, max_tokens, told in ((49, 1, None), (49, 2, (49, 2, 51, 50)), (50, 1, (50, 50)), (50, 0, None), (51, 0, (51, 50)), (51, 1, (51, 50)),
                                (30, 20, None), (30, 21, (30, 21, 51, 50)), (50, None, (50, 50)), (40, None, (40, 16, 56, 50))):
        for stream in (False, True):
            answer = short.post(path("completions"), json={"prompt": [7] * n, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True})
            if told is None: assert answer.status_code == 200, (n, max_tokens, answer.text)
            else: assert list(map(int, re.findall(r"\d+", error_of(answer, 400, code="context_length_exceeded")))) == list(told)
    usage = short.ask("chat", ignore_eos=True)["usage"]
    assert usage["total_tokens"] == 50 and usage["completion_tokens"] > 20       # all the room that there is
    assert "context_length_exceeded" in short.post(path("chat"), json={"messages": [{"role": "user", "content": "owl " * 60}]}).text
    short.idle()

def test_a_text_of_five_megabytes_stops_nobody(tiny):
    "It is refused; meanwhile /health answers at once, and a stream goes on."
    big, waits = json.dumps({"prompt": "the owl " * 650_000}).encode(), []
    assert 5e6 < len(big) < MAX_BODY
    with ThreadPoolExecutor(2) as pool, tiny.stream("POST", path("completions"), json=asked("completions", dict(stream=True, max_tokens=LONG, ignore_eos=True))) as stream:
        events = events_of(stream)
        next(events)
        refused = pool.submit(tiny.post, path("completions"), content=big, headers={"Content-Type": "application/json"})
        while not refused.done():
            begun = time.monotonic()
            assert tiny.get("/health").status_code == 200
            waits.append(time.monotonic() - begun)
            assert next(events)["choices"]
        error_of(refused.result(), 400, code="context_length_exceeded")
    assert waits and max(waits) < 5
    tiny.idle()


# --- what is refused

def test_a_model_that_is_not_served(short, tiny):
    assert [m["id"] for m in short.get("/v1/models").json()["data"]] == ["short", "other/name"]
    listed = short.get("/v1/models").json()
    assert listed["object"] == "list" and [parsed("model", m).owned_by for m in listed["data"]] == ["pagedlm"] * 2
    for kind in BOTH:
        for stream in (False, True):
            for name in ("gpt-4", "", "Short", "short ", "日本\n"):
                answer = short.post(path(kind), json=asked(kind, dict(model=name, stream=stream)))
                error_of(answer, 404, param="model", code="model_not_found")
                assert answer.json()["error"]["type"] == "not_found_error"
        assert short.ask(kind, model="other/name", max_tokens=1)["model"] == "other/name"
        assert short.ask(kind, max_tokens=1)["model"] == "short"
        assert {c["model"] for c in short.stream_of(kind, model="other/name", max_tokens=2)} == {"other/name"}
        with openai.OpenAI(base_url=str(tiny.base_url) + "/v1", api_key="x", max_retries=0) as client, pytest.raises(openai.NotFoundError) as e:
            client.completions.create(model="gpt-4", prompt="x")
        assert e.value.code == "model_not_found" and e.value.param == "model"

def test_the_key(short):
    "Without it, or with another one, nobody gets anything; /health and the page are open."
    keyless = httpx.Client(base_url=short.base_url, trust_env=False, timeout=PATIENCE)
    wrong = [{}, *({"Authorization": v.encode()} for v in ("", "Bearer", "Bearer no", "owl 🦉 key", "Bearer  owl 🦉 key", "Bearer owl 🦉 key ü",
                                                            "Bearer owl 🦉 ke", "Basic b3ds", "\u20ac"))]
    for headers in wrong:
        for method, where in (("POST", path("completions")), ("POST", path("chat")), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/v1/models/"),
                              ("HEAD", "/v1/models"), ("OPTIONS", path("chat")), ("GET", "/nowhere"), ("PUT", path("completions"))):
            answer = keyless.request(method, where, headers=headers, json={"prompt": "x"} if method == "POST" else None)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", (method, where, headers)
            if method != "HEAD": assert error_of(answer, 401, code="invalid_api_key")
    assert keyless.get("/", headers={"Accept": "text/event-stream"}).status_code == 401
    assert keyless.get("/health").json() == {"status": "ok"} and keyless.get("/").headers["content-type"].startswith("text/html")
    for scheme in ("Bearer", "bearer"):
        assert keyless.get("/v1/models", headers={"Authorization": f"{scheme} owl 🦉 key".encode()}).status_code == 200
    assert short.get("/v1/models").status_code == 200 and short.get("/metrics").status_code == 200
    with openai.OpenAI(base_url=str(short.base_url) + "/v1", api_key="no", max_retries=0) as client, pytest.raises(openai.AuthenticationError): client.models.list()
    with connected(short) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000000\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")          # before the gigabyte that was to come

def test_a_key_of_plain_letters_through_the_openai_client(model, tokenizer):
    with serving(model, tokenizer, api_key="sk-owl") as server, openai.OpenAI(base_url=str(server.base_url) + "/v1", api_key="sk-owl", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["tiny"]
        assert client.completions.create(model="tiny", prompt="owl", max_tokens=2).usage.completion_tokens == 2

def test_routes_and_methods(tiny):
    for where in ("/nowhere", "/v1", "/v1/completions/", "/v1/embeddings", "/docs", "/openapi.json", "/v1/models/tiny", "/health/"):
        error_of(tiny.get(where), 404)
        error_of(tiny.post(where, json={}), 404)
        assert tiny.head(where).status_code == 404
    for method, where, allowed in (("GET", path("completions"), "POST"), ("PUT", path("chat"), "POST"), ("DELETE", "/v1/models", "GET"), ("POST", "/health", "GET"),
                                   ("OPTIONS", path("chat"), "POST"), ("PATCH", "/", "GET"), ("POST", "/metrics", "GET")):
        answer = tiny.request(method, where)
        error_of(answer, 405, code="method_not_allowed")
        assert answer.headers["allow"] == allowed
    for where in ("/", "/health", "/v1/models", "/metrics"): assert tiny.head(where).status_code in (200, 405) and tiny.head(where).content == b""

UNSUPPORTED = {
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "functions": [{"name": "f"}], "function_call": "auto",
    "parallel_tool_calls": True, "response_format": {"type": "json_object"}, "audio": {"voice": "alloy", "format": "wav"}, "modalities": ["text", "audio"],
    "store": True, "metadata": {"a": "b"}, "prediction": {"type": "content", "content": "x"}, "reasoning_effort": "low", "service_tier": "flex",
    "web_search_options": {}, "suffix": "end", "guided_json": {}, "adapter": "x", "temprature": 1.0, "verbosity": "low", "best_off": 0}

@pytest.mark.parametrize("kind", BOTH)
def test_what_is_not_supported_is_refused_by_name(tiny, kind):
    for name, value in UNSUPPORTED.items():
        for stream in (False, True):
            message = error_of(tiny.post(path(kind), json=asked(kind, {name: value, "stream": stream})), 400, param=name, code="unsupported_parameter")
            assert name in message and "leave it out" in message and repr(value)[:40] in message
    assert "{'type': 'text'}" in tiny.post(path(kind), json=asked(kind, {"response_format": {"type": "json_schema"}})).json()["error"]["message"]
    with openai.OpenAI(base_url=str(tiny.base_url) + "/v1", api_key="x", max_retries=0) as client, pytest.raises(openai.BadRequestError, match="tools") as e:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], tools=UNSUPPORTED["tools"])
    assert e.value.param == "tools"

def test_messages_that_are_not_text_are_refused_by_name(tiny):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for message, name in (({"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]}, "image_url"), ({"role": "user", "content": [image]}, "image_url"),
                          ({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}, "input_audio"),
                          ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "tool_calls"), ({"role": "user", "content": "x", "name": "Ada"}, "name"),
                          ({"role": "assistant", "content": None}, "content"), ({"role": "user"}, "content"), ({"content": "x"}, "role"), ({"role": 1, "content": "x"}, "role"),
                          ("hi", "messages"), (None, "messages"), ({"role": "user", "content": 3}, "content")):
        answer = tiny.post(path("chat"), json={"messages": [{"role": "user", "content": "first"}, message]})
        assert name in error_of(answer, 400) and answer.json()["error"]["param"].startswith("messages")
    for body in ({}, {"messages": []}, {"messages": None}, {"messages": "hi"}, {"messages": {}}, {"prompt": "hi"}):
        assert "messages" in error_of(tiny.post(path("chat"), json=body), 400)

WRONG = dict(max_tokens=[-1, 1.5, "3", True], n=[0, -1, "2", 1000, 10**30], temperature=[-0.1, 2.1, "hot"], top_p=[0, 1.1, -1], top_k=[-2, 1.5], min_p=[-0.1, 2],
             frequency_penalty=[2.1], presence_penalty=[-3], repetition_penalty=[0, -1], seed=["x", 1.5], stop=[3, [""], "", ["a", 1]], stop_token_ids=[[-1], [10**9], 5],
             min_tokens=[-1, 5000], logit_bias=[{"x": 1}, {"5": "a"}, [1], {"99999": 1}, {"-1": 1}], stream=["yes", 1], stream_options=[{"include_usage": True}, "x"],
             use_beam_search=["yes"], length_penalty=[11, 0.5], early_stopping=["always", True], prompt_logprobs=[-1, 21], ignore_eos=[1], model=[3], user=[3],
             cache_salt=[1], skip_special_tokens=["no"], include_stop_str_in_output=[0], best_of=[0, -1])

@pytest.mark.parametrize("kind", BOTH)
def test_a_wrong_value_is_refused_with_its_name(tiny, kind):
    own = {"completions": dict(logprobs=[-1, 21, True, "x"], echo=["x"], prompt=["", [], [[]], [""], ["owl", ""], [[5], []], [5, "x"], ["x", 5], 3, {}, [99999], [-1], [[5], [99999]], [True], [1.5]]),
           "chat": dict(logprobs=[5, "x"], top_logprobs=[3, -1, 21], max_completion_tokens=[-1, "x"])}[kind]
    before = tiny.metrics()
    for name, values in (WRONG | own).items():
        for value in values:
            answer = tiny.post(path(kind), content=json.dumps(asked(kind, {name: value})), headers={"Content-Type": "application/json"})
            message = error_of(answer, 400)
            assert name in message, (name, value, message)
            assert answer.json()["error"]["param"] in (name, None) or answer.json()["error"]["param"].startswith(name + "."), (name, value, answer.text)
    assert tiny.idle()["generation_tokens_total"] == before["generation_tokens_total"]

@pytest.mark.parametrize("kind, body, words", [
    ("completions", dict(n=65, temperature=0), ["n", "64", "65"]), ("chat", dict(best_of=10**6, temperature=0), ["best_of", "64", "1000000"]),
    ("completions", dict(n=3, best_of=2), ["best_of", "2", "n = 3"]), ("completions", dict(best_of=2, stream=True), ["best_of", "streamed"]),
    ("chat", dict(n=1, best_of=3, use_beam_search=True, temperature=0, stream=True), ["best_of", "streamed"]),
    ("completions", dict(prompt_logprobs=1, stream=True), ["prompt_logprobs", "streamed"]), ("chat", dict(top_logprobs=2), ["top_logprobs", "logprobs to be true"]),
    ("chat", dict(top_logprobs=2, logprobs=False), ["top_logprobs"]), ("chat", dict(max_tokens=3, max_completion_tokens=4), ["max_tokens = 3", "max_completion_tokens = 4"]),
    ("completions", dict(use_beam_search=True, temperature=0.5), ["temperature", "0.5", "use_beam_search"]),
    ("completions", dict(use_beam_search=True, temperature=0, stop="x"), ["stop", "use_beam_search"]),
    ("completions", dict(stream_options={"include_usage": True, "x": 1}, stream=True), ["stream_options.x"])])
def test_what_does_not_go_together(tiny, kind, body, words):
    message = error_of(tiny.post(path(kind), json=asked(kind, body)), 400)
    assert all(w in message for w in words), message

def test_bodies_that_are_not_what_they_should_be(tiny):
    for kind in BOTH:
        post = lambda content, type="application/json", **kw: tiny.post(path(kind), content=content, headers={"Content-Type": type} if type else {}, **kw)
        good = json.dumps(asked(kind, {"max_tokens": 1})).encode()
        for content in (b"", b"{", b"nonsense", good[:-1], b"\xff\xfe{}", b'{"max_tokens": NaN}', b'{"temperature": -Infinity}', good + b"x", b"'prompt'"):
            assert "JSON" in error_of(post(content), 400) or not content
        assert "temperature" in error_of(post(good.replace(b'"max_tokens": 1', b'"temperature": 1e999')), 400)
        for content in (b"", b"[]", b"3", b'"x"', b"null", b"true", b"[{}]"): assert "body" in error_of(post(content), 400)
        for type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None):
            assert "application/json" in error_of(post(good, type), 400)
        for type in ("application/json; charset=utf-8", "Application/JSON"): assert post(good, type).status_code == 200
        for depth in (MAX_DEPTH + 2, 50_000):
            for wrap in (b"[%s]", b'{"a":%s}'):
                start, end = wrap.split(b"%s")
                content = b'{"prompt": "x", "messages": [], "user": ' + start * depth + b"1" + end * depth + b"}"
                assert str(MAX_DEPTH) in error_of(post(content), 400)

def test_a_body_that_is_too_large(tiny):
    "Refused by what it says its length is, and by what comes, before all of it came."
    with connected(tiny) as sock:
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n".encode())
        (status, said), = answers_on(sock, 1)
        assert status == 413 and json.loads(said)["error"]["code"] == "body_too_large"
    sent = []
    def parts():
        for i in range(10_000):
            sent.append(i)
            yield b" " * 65536
    with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError): error_of(tiny.post(path("chat"), content=parts(), headers={"Content-Type": "application/json"}), 413)
    assert len(sent) < 2000
    content = json.dumps({"prompt": "owl", "max_tokens": 1}).encode()
    assert tiny.post(path("completions"), content=content + b" " * (MAX_BODY - len(content)), headers={"Content-Type": "application/json"}).status_code == 200

def test_a_body_that_does_not_come(model, tokenizer, monkeypatch):
    monkeypatch.setattr(server_module, "BODY_TIMEOUT", 0.2)
    with serving(model, tokenizer) as client, connected(client) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        assert sock.recv(65536).startswith(b"HTTP/1.1 408 ")
        client.idle()

def connected(client):
    "A raw connection to the server of a client."
    sock = socket.create_connection((client.base_url.host, client.base_url.port), timeout=PATIENCE)
    return sock


# --- too many, and a sick engine

def slow(seconds):
    "Makes each step of an engine take longer."
    def prepare(engine):
        execute = engine.runner.execute
        def later(plan):
            time.sleep(seconds)
            return execute(plan)
        engine.runner.execute = later
    return prepare

def test_who_comes_when_the_line_is_full_is_told_when_to_come_back(model, tokenizer):
    with serving(model, tokenizer, prepare=slow(0.02), max_num_seqs=1, max_waiting=2) as client, contextlib.ExitStack() as stack:
        def begin(**more): return events_of(stack.enter_context(client.stream("POST", path("completions"), json=asked("completions", dict(stream=True, ignore_eos=True) | more))))
        first = begin(max_tokens=LONG)
        next(first)
        waiting = [begin(max_tokens=3), begin(max_tokens=3)]
        client.reaches("num_requests_waiting", 2)
        for kind in BOTH:
            for stream in (False, True):
                answer = client.post(path(kind), json=asked(kind, {"stream": stream, "max_tokens": 1}))
                assert "max_waiting is 2" in error_of(answer, 429, code="queue_full") and int(answer.headers["retry-after"]) >= 1
        with openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="x", max_retries=0) as other, pytest.raises(openai.RateLimitError):
            other.completions.create(model="tiny", prompt="x")
        assert "3" in error_of(client.post(path("completions"), json={"prompt": ["a", "b", "c"]}), 400, param="prompt")     # will never fit
        error_of(client.post(path("completions"), json={"prompt": ["a", "b"]}), 429)           # all or none
        assert client.metrics()["num_requests_waiting"] == 2 and client.get("/health").status_code == 200
        client.engine.post(lambda engine: engine.abort(engine.scheduler.running[0].request_id))
        for events in waiting: assert len(list(events)) >= 3
        client.idle()

def test_a_model_that_fails_is_an_error_and_the_next_request_is_served(model, tokenizer):
    broken = threading.Event()
    def prepare(engine):
        execute = engine.runner.execute
        def sometimes(plan):
            if broken.is_set(): raise RuntimeError("the chip is too hot")
            return execute(plan)
        engine.runner.execute = sometimes
    with serving(model, tokenizer, prepare=prepare) as client:
        for kind in BOTH:
            broken.clear()
            with client.stream("POST", path(kind), json=asked(kind, dict(stream=True, max_tokens=LONG, ignore_eos=True, n=2))) as answer:
                events = events_of(answer)
                next(events)
                broken.set()
                *_, last = events
            assert "too hot" in last["error"]["message"] and last["error"].keys() == {"message", "type", "param", "code"} and last["error"]["type"] == "server_error"
            assert "too hot" in error_of(client.post(path(kind), json=asked(kind, {})), 500)
            assert client.get("/health").status_code == 200
            broken.clear()
            assert client.ask(kind, max_tokens=2)["usage"]["completion_tokens"] == 2
        assert client.idle()["request_success_total", "error"] == 4

def sick(client, broken):
    "All that waits gets an error, /health says so, and nothing hangs."
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(lambda kind=kind: list(events_of(pool_stream(client, kind)))) for kind in BOTH]
        wholes = [pool.submit(client.post, path(kind), json=asked(kind, dict(max_tokens=LONG, ignore_eos=True))) for kind in BOTH]
        client.reaches("num_requests_running", 4)
        broken.set()
        for job in wholes: error_of(job.result(), 503, code="engine_unavailable")
        for job in streams: assert job.result()[-1]["error"]["code"] == "engine_unavailable"
    answer = until(lambda: (a := client.get("/health")).status_code == 503 and a, "a 503 of /health")
    error_of(answer, 503)
    assert "retry-after" in answer.headers
    for kind in BOTH:
        for stream in (False, True): error_of(client.post(path(kind), json=asked(kind, {"stream": stream})), 503)
    assert client.get("/v1/models").status_code == client.get("/metrics").status_code == client.get("/").status_code == 200

def pool_stream(client, kind):
    return client.post(path(kind), json=asked(kind, dict(max_tokens=LONG, ignore_eos=True, stream=True)))

@pytest.mark.parametrize("how", ["dead", "stuck"])
def test_an_engine_that_is_dead_or_stuck(model, tokenizer, monkeypatch, how):
    monkeypatch.setattr(engine_module, "POLL_S", 0.1)
    broken, over = threading.Event(), threading.Event()
    def prepare(engine):
        step = engine.step
        def other():
            if broken.is_set():
                if how == "dead": raise MemoryError("no memory")
                over.wait()
            return step()
        engine.step = other
    with serving(model, tokenizer, prepare=prepare, step_timeout=1.0 if how == "stuck" else 60.0) as client:
        assert client.get("/health").json() == {"status": "ok"}
        try: sick(client, broken)
        finally: over.set()

def test_an_engine_that_is_closing_takes_nothing(model, tokenizer):
    with serving(model, tokenizer) as client:
        client.engine.closing = True
        for kind in BOTH: assert "closing" in error_of(client.post(path(kind), json=asked(kind, {})), 503) and client.get("/health").status_code == 503


# --- metrics

def test_metrics_say_what_was_done(model, tokenizer):
    with serving(model, tokenizer, num_blocks=40, num_host_blocks=30, preemption="swap") as client:
        for name, value in client.metrics().items():
            if isinstance(name, str) and not name.endswith("_created") and "blocks" not in name: assert value == 0, name
        asked = [dict(prompt=[1, 2, 3], max_tokens=5, ignore_eos=True), dict(prompt=[[1, 2, 3], [4] * 8], max_tokens=4, n=2, ignore_eos=True, seed=1), dict(prompt=[4] * 9, max_tokens=1)]
        found = [client.ask("completions", **a) for a in asked]
        client.stream_of("completions", **asked[0])
        m = client.idle()
        assert m["prompt_tokens_total"] == 3 + 11 + 9 + 3 == sum(f["usage"]["prompt_tokens"] for f in found) + 3
        assert m["generation_tokens_total"] == 5 + 16 + 1 + 5 == sum(f["usage"]["completion_tokens"] for f in found) + 5
        assert m["prefix_cache_hits_total"] == sum(f["usage"]["prompt_tokens_details"]["cached_tokens"] for f in found) == 8
        assert m["prefix_cache_queries_total"] == m["prompt_tokens_total"] and m["engine_steps_total"] > 10
        assert m["request_success_total", "length"] == 5
        for name, count in (("time_to_first_token", 5), ("normalized_latency", 5), ("e2e_request_latency", 5), ("time_per_output_token", 4)):
            assert m[f"{name}_seconds_count"] == m[f"{name}_seconds_bucket", "+Inf"] == count and 0 < m[f"{name}_seconds_sum"] < 5 * PATIENCE
        assert m["num_block_copies_total"] > 0          # the samples that share a last block
        with ThreadPoolExecutor(4) as pool:            # more than the pool holds
            list(pool.map(lambda i: client.ask("completions", prompt=[i] * 30, max_tokens=60, ignore_eos=True), range(4)))
        m = client.idle()
        assert m["num_preemptions_total", "swap"] + m["num_preemptions_total", "recompute"] > 0
        types = {f.name: f.type for f in text_string_to_metric_families(client.get("/metrics").text)}
        assert types["pagedlm:num_preemptions"] == types["pagedlm:prompt_tokens"] == "counter" and types["pagedlm:num_blocks_free"] == "gauge"
        assert types["pagedlm:time_to_first_token_seconds"] == types["pagedlm:time_per_output_token_seconds"] == types["pagedlm:normalized_latency_seconds"] == "histogram"


# --- who goes away

FORGET = dict(max_tokens=LONG, ignore_eos=True)

def body_of(kind, **more): return json.dumps(asked(kind, FORGET | more)).encode()

def raw(kind, body, **headers):
    lines = [f"POST {path(kind)} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("how", ["stream", "whole", "beams", "several"])
def test_a_connection_that_is_closed_frees_its_blocks(tiny, kind, n, how):
    "Long before the request would have ended."
    more = {"stream": dict(n=n, stream=True), "whole": dict(n=n), "beams": dict(n=n, best_of=4, use_beam_search=True, temperature=0),
            "several": dict(n=n, stream=True) | (dict(prompt=["a", "b b", "c"]) if kind == "completions" else {})}[how]
    with connected(tiny) as sock:
        sock.sendall(raw(kind, body_of(kind, **more)))
        running = until(lambda: tiny.metrics()["num_requests_running"], "a running request")
        assert running == (3 if "prompt" in more else 1)
        if "stream" in more: assert b"data: " in sock.recv(65536) + sock.recv(65536)
    before = tiny.metrics()["generation_tokens_total"]
    assert tiny.idle()["generation_tokens_total"] - before < LONG / 2

def test_closed_while_it_waits_and_before_all_is_sent(model, tokenizer):
    with serving(model, tokenizer, prepare=slow(0.02), max_num_seqs=1, max_waiting=60) as client:
        with connected(client) as first:
            first.sendall(raw("completions", body_of("completions", stream=True)))
            client.reaches("num_requests_running", 1)
            socks = []
            for i in range(50):            # at once, of every kind
                socks.append(sock := connected(client))
                data = raw(BOTH[i % 2], body_of(BOTH[i % 2], stream=i % 3 == 0))
                sock.sendall(data[:len(data) // 2] if i % 5 == 0 else data)
            client.reaches("num_requests_waiting", 40)
            for sock in socks: sock.close()
            client.reaches("num_requests_waiting", 0)
            assert client.metrics()["num_requests_running"] == 1
        client.idle()

@pytest.mark.parametrize("kind", BOTH)
def test_a_stream_that_the_openai_client_closes(tiny, kind):
    with openai.OpenAI(base_url=str(tiny.base_url) + "/v1", api_key="x", max_retries=0, timeout=PATIENCE) as client:
        do = client.completions.create if kind == "completions" else client.chat.completions.create
        for taken in (1, 4):
            stream = do(model="tiny", **asked(kind, {}), max_tokens=LONG, stream=True, n=2, extra_body={"ignore_eos": True})
            for _, chunk in zip(range(taken), stream): assert chunk.choices
            stream.close()
            tiny.idle()

@pytest.mark.parametrize("after", range(4))
def test_a_client_that_is_gone_just_as_its_stream_begins(model, tokenizer, after):
    "Whatever the moment: here it is counted in calls of the server, not in time."
    async def ask():
        engine = AsyncEngine(model, tokenizer=tokenizer, num_blocks=1024, num_host_blocks=0, preemption="recompute", block_size=4)
        app, body, calls = create_app(engine, ["tiny"]), body_of("completions", stream=True), 0
        submitted = asyncio.Event()
        submit = engine.submit
        async def told(*args, **kw):
            found = await submit(*args, **kw)
            submitted.set()
            return found
        engine.submit = told
        async def receive():
            nonlocal calls
            if not calls:
                calls += 1
                return {"type": "http.request", "body": body, "more_body": False}
            await submitted.wait()
            for _ in range(after): await asyncio.sleep(0)
            return {"type": "http.disconnect"}
        async def send(message): pass
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "path": path("completions"), "raw_path": b"",
                 "query_string": b"", "root_path": "", "scheme": "http", "headers": [(b"content-type", b"application/json")], "client": None, "server": None}
        async with engine:
            await asyncio.wait_for(app(scope, receive, send), PATIENCE)
            end = time.monotonic() + PATIENCE
            while engine.stats.used_blocks or engine.streams:
                assert time.monotonic() < end
                assert engine.stats.generation_tokens < LONG / 2, "it runs on"
                await asyncio.sleep(0.01)
    asyncio.run(ask())


# --- many at once, and connections

MIXED = [(BOTH[i % 2], dict(max_tokens=6 + i, ignore_eos=i % 3 > 0) | [
    dict(temperature=0), dict(seed=i, n=2), dict(seed=i, temperature=0.7, top_p=0.8, logprobs=2 if i % 2 == 0 else True), dict(temperature=0, n=2, best_of=3, use_beam_search=True),
    dict(seed=i, top_k=7, stop=["a", "\n"]), dict(seed=i, repetition_penalty=1.2, presence_penalty=0.3), dict(temperature=0, logit_bias={"40": 3}), dict(seed=i, n=3, min_p=0.01)][i // 2]
    | (dict(prompt=["the owl " * (i + 1), "日本"]) if i % 4 == 0 else {})) for i in range(16)]

def test_sixteen_clients_at_once_get_what_each_gets_alone(tiny):
    def size(kind, body): return body.get("n", 1) * (2 if "prompt" in body else 1)
    solo = [whole(kind, tiny.ask(kind, **body), size(kind, body)) for kind, body in MIXED]
    def go(i, stream):
        kind, body = MIXED[i]
        with Client(str(tiny.base_url)) as client:
            if stream and body.get("best_of", 0) <= body.get("n", 1): return joined(kind, client.stream_of(kind, **body), size(kind, body))
            return whole(kind, client.ask(kind, **body), size(kind, body))
    with ThreadPoolExecutor(16) as pool:
        for stream in (True, False):
            assert list(pool.map(go, range(16), [stream ^ (i % 2 == 1) for i in range(16)])) == solo
    tiny.idle()

def answers_on(sock, n):
    "The statuses and bodies of `n` answers on one connection."
    reader, found = sock.makefile("rb"), []
    for _ in range(n):
        status, size, chunked = int(reader.readline().split()[1]), 0, False
        while (line := reader.readline().strip()):
            name, value = line.lower().split(b": ", 1)
            if name == b"content-length": size = int(value)
            if name == b"transfer-encoding": chunked = True
        body = b""
        while chunked and (part := int(reader.readline(), 16)) is not None:
            body += reader.read(part + 2)[:part]
            if not part: break
        found.append((status, body or reader.read(size)))
    return found

def test_one_connection_for_many_requests(tiny):
    "In turn, and several sent before the first is answered: answers come in order; a mistake does not close it."
    good, streamed = (json.dumps(dict(prompt="owl", max_tokens=2, temperature=0, stream=s)).encode() for s in (False, True))
    with connected(tiny) as sock:
        for body in (good, streamed, b"{", good):
            sock.sendall(raw("completions", body))
            (status, said), = answers_on(sock, 1)
            assert status == (400 if body == b"{" else 200) and (body != streamed or said.endswith(b"data: [DONE]\n\n"))
        sock.sendall(raw("completions", good) + raw("completions", streamed) + raw("completions", b"[]") + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + raw("chat", b"{}"))
        found = answers_on(sock, 5)
        assert [status for status, _ in found] == [200, 200, 400, 200, 400]
        assert json.loads(found[0][1])["object"] == "text_completion" and b"[DONE]" in found[1][1] and json.loads(found[3][1]) == {"status": "ok"}
        sock.sendall(raw("completions", good, Connection="close"))
        assert answers_on(sock, 1)[0][0] == 200 and sock.recv(1) == b""
    with connected(tiny) as sock:
        sock.sendall(b"this is not HTTP\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 400 ")
    tiny.idle()


# --- the process: signals, ports, options

@pytest.fixture(scope="module")
def two(folder):
    "Two processes with the tiny model, started together."
    options = "--device", "cpu", "--dtype", "float32", "--num-blocks", 2048, "--num-host-blocks", 8, "--served-model-name", "first", "--served-model-name", "second"
    env = {"PAGEDLM_API_KEY": "sk-two"}
    found = [started(*options, "--shutdown-timeout", t, model=folder, env=env) for t in (2, 500)]
    try:
        for process in found: address_of(process)
        yield found
    finally:
        for process in found: process.kill()

KEY = {"Authorization": "Bearer sk-two"}

def last_of(client, begun, taken, kind="completions", **body):
    "A stream in a thread: its events, into `taken`."
    with client.stream("POST", path(kind), json=asked(kind, FORGET | {"stream": True} | body)) as answer:
        for event in events_of(answer):
            taken.append(event)
            begun.set()

def test_sigterm_ends_what_it_can_and_refuses_the_rest(two):
    process = two[0]
    with Client(process.address, headers=KEY) as client, ThreadPoolExecutor(3) as pool:
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["first", "second"]
        assert client.ask("chat", model="second", max_tokens=1)["model"] == "second"
        assert httpx.get(process.address + "/v1/models", trust_env=False).status_code == 401
        begun, taken = threading.Event(), []
        long = pool.submit(last_of, client, begun, taken, n=8)
        idle = connected(client)
        assert begun.wait(PATIENCE)
        waiting = pool.submit(client.post, path("chat"), json=asked("chat", FORGET | {"n": 8}))
        client.reaches("num_requests_running", 2)
        process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        host, port = client.base_url.host, client.base_url.port
        def refused():
            try: socket.create_connection((host, port), timeout=PATIENCE).close()
            except ConnectionRefusedError: return True
        until(refused, "a port that is closed")
        long.result()
        assert "shutting down" in taken[-1]["error"]["message"] and taken[-1]["error"]["code"] == "engine_unavailable" and "[DONE]" not in taken
        error_of(waiting.result(), 503)
        ended(process)
        assert 1.9 < time.monotonic() - sent < PATIENCE / 2
        idle.close()
    socket.create_server((host, port)).close()

def test_a_second_signal_does_not_wait(two):
    process = two[1]
    with Client(process.address, headers=KEY) as client, ThreadPoolExecutor(3) as pool:
        begun, taken, short, end = threading.Event(), [], threading.Event(), []
        jobs = [pool.submit(last_of, client, begun, taken, n=8), pool.submit(last_of, client, short, end, max_tokens=60)]
        assert begun.wait(PATIENCE) and short.wait(PATIENCE)
        process.send_signal(signal.SIGINT)
        jobs[1].result()
        assert end[-1] == "[DONE]" and end[-2]["choices"][0]["finish_reason"] == "length"       # it had the time
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        jobs[0].result()
        assert "error" in taken[-1]
        ended(process)

def test_a_busy_port_is_said_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(engine_module, "AsyncEngine", lambda *a, **kw: pytest.fail("it loads"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--host", "256.1.1.1"]) == 2 and "256.1.1.1" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--api-key", " "]) == 2 and "API key" in capsys.readouterr().err

@pytest.mark.parametrize("options, words", [
    (["--port", "70000"], "70000"), (["--port", "-1"], "port"), (["--port", "x"], "x"), (["--max-waiting", "0"], "--max-waiting"), (["--max-model-len", "many"], "many"),
    (["--shutdown-timeout", "0"], "--shutdown-timeout"), (["--step-timeout", "nan"], "--step-timeout"), (["--preemption", "drop"], "drop"), (["--log-level", "loud"], "loud"),
    (["--block-size", "-4"], "-4"), (["--what"], "--what"), (["a", "b"], "b")])
def test_options_that_make_no_sense(options, words, capsys):
    with pytest.raises(SystemExit) as e: main(["serve", *options])
    assert e.value.code == 2 and words in capsys.readouterr().err

@pytest.mark.parametrize("options, words", [(["--max-model-len", "5000"], "max_model_len = 5000"), (["--policy", "luck"], "luck"), (["--num-blocks", "100000000"], "num_blocks"), (["--device", "abacus"], "abacus")])
def test_what_the_engine_refuses_is_one_line_and_2(folder, options, words, capsys):
    assert main(["serve", str(folder), "--port", "0", *options]) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err
