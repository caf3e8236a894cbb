"A tiny random model with a byte-level tokenizer and a chat template, and a server over it in a thread: for tests of the server."
import asyncio
import json
import logging
import socket
import threading
import time
from http.client import HTTPConnection

import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pagedlm.async_engine import AsyncEngine
from pagedlm.server import PatientProtocol, address, create_app, listen

TEMPLATE = ("{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
            "{{ raise_exception('unknown role') }}{% endif %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}<s>")


def save_tiny(folder, seed=0):
    "Write the model: a token for each byte, so any text can be a prompt, and answers have broken characters in them."
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", "</s>", *letters])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=272, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
                         num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=0,
                         eos_token_id=1, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class TinyServer:
    "The server in a thread of this process; a context manager. `records`: what was logged as a warning or worse."
    def __init__(self, folder, names=("tiny",), api_key=None, **kwargs):
        self.engine = AsyncEngine(folder, **{"num_blocks": 64, "max_waiting": 32, **kwargs})
        self.app = create_app(self.engine, list(names), api_key)
        self.socket, self.records = listen("127.0.0.1", 0), []
        self.port, self.url = self.socket.getsockname()[1], address(self.socket)
        self.server = uvicorn.Server(uvicorn.Config(self.app, lifespan="off", log_config=None, access_log=False, http=PatientProtocol,
                                                    timeout_graceful_shutdown=5))
        self.handler = logging.Handler(logging.WARNING)
        self.handler.emit = self.records.append
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.socket])), daemon=True)

    def __enter__(self):
        logging.getLogger().addHandler(self.handler)
        self.thread.start()
        wait_for(lambda: self.server.started)
        return self

    def __exit__(self, *exc):
        self.server.should_exit = True
        self.thread.join(60)
        self.engine.close()
        logging.getLogger().removeHandler(self.handler)

    def ask(self, method="GET", path="/health", body=None, headers=None, timeout=60):
        "One request on a connection of its own: (status, headers, body)."
        c = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            c.request(method, path, body, headers or {})
            r = c.getresponse()
            return r.status, r.headers, r.read()
        finally: c.close()

    def post(self, path, body, **headers):
        "A body, as bytes or to become JSON, sent to an endpoint: (status, headers, what came back)."
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, body, {"Content-Type": "application/json", **headers})

    def raw(self, data: bytes, timeout=60, half_close=False) -> bytes:
        "Bytes on a connection, and all that comes back until the server closes it."
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as s:
            try: s.sendall(data)
            except ConnectionError: pass
            parts = []
            try:
                if half_close: s.shutdown(socket.SHUT_WR)
                while part := s.recv(65536): parts.append(part)
            except OSError: pass                   # it closed before all was sent
            return b"".join(parts)

    def idle(self) -> bool:
        "Nothing runs, waits or holds a block, says /metrics."
        text = self.ask(path="/metrics")[2].decode()
        value = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line and line[0] != "#" and "{" not in line}
        zero = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "num_blocks_used")
        return (not any(value[f"pagedlm:{name}"] for name in zero) and value["pagedlm:num_blocks_free"] == value["pagedlm:num_blocks"]
                and value["pagedlm:num_host_blocks_free"] == value["pagedlm:num_host_blocks"])


def wait_for(condition, seconds=60.0):
    "Until it holds; fails after `seconds`."
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
