"The command line: conversations and what they hit, Ctrl-C, pipes, refusals, and no traceback for a user's mistake."
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pagedlm import cli
from pagedlm.cli import Chat, Conversation, ctrl_c, main, stream
from pagedlm.engine import Engine
from pagedlm.models import load_model, load_tokenizer
from pagedlm.sampling import SamplingParams

CHATML = ("{% for m in messages %}{% if 'forbidden' in m['content'] %}{{ raise_exception('this word is not for me') }}{% endif %}"
          "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}{{ '<|start|>assistant\n' }}")
TRIMS = ("{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
         "<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}{{ '<|start|>assistant\n' }}")
PLAIN = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}assistant:"
FORGETS = ("{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% else %}..."
           "{% endif %}<|end|>\n{% endfor %}{{ '<|start|>assistant\n' }}")      # edits what was answered
TEMPLATES = dict(chatml=CHATML, trims=TRIMS, plain=PLAIN, forgets=FORGETS)
CORPUS = ["An owl is a wise bird. Where does it live? user assistant system\n\n", "the 日本語 naïve 🦉"] * 4
SIZE = 4       # slots in a block
TINY = ["--device", "cpu", "--dtype", "float32", "--block-size", str(SIZE), "--temperature", "0"]


def wrapped(t):
    t.add_special_tokens([AddedToken(s, special=True) for s in ("<|start|>", "<|end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|end|>", clean_up_tokenization_spaces=False)

def byte_level():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return wrapped(t)

def sentence_piece():
    "As Llama's: every piece of text that is encoded gets a space in front."
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁▁", *"etaoinshrwlu", "▁o", "▁ow", "▁owl", "owl"]
    merges = [("▁", "▁"), ("▁", "o"), ("▁o", "w"), ("▁ow", "l")]
    t = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, byte_fallback=True, unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return wrapped(t)

def save(folder, template=CHATML):
    "A random model that never ends by itself, and its tokenizer."
    torch.manual_seed(0)
    tokenizer = byte_level()
    tokenizer.chat_template = template
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2,
                         bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[tokenizer.eos_token_id] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return save(tmp_path_factory.mktemp("model"))

@pytest.fixture(scope="module")
def model(folder): return load_model(folder)

@pytest.fixture(scope="module")
def tokenizer(folder): return load_tokenizer(folder)

@pytest.fixture
def said(monkeypatch, capsys):
    "Runs a command with these lines as its input: (status, stdout, stderr without progress bars)."
    def run(argv, text=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text) if isinstance(text, str) else io.TextIOWrapper(io.BytesIO(text), "utf-8"))
        capsys.readouterr()
        status = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return status, out, err.rpartition("\r")[2]
    return run

def engine_of(model, tokenizer, **kw):
    return Engine(model, tokenizer=tokenizer, max_num_seqs=1, **{"block_size": SIZE, "num_blocks": 256, **kw})

def hits(err):
    return [tuple(map(int, m)) for m in re.findall(r"\((\d+) of (\d+) prompt tokens were cached; (\d+) tokens, [\d.]+ tokens/s", err)]

def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# --- the history and the cache

QUESTIONS = ["Where does an owl live?", "And why?", "  日本語 🦉?", "Name one.", "An\n\nowl", "the"]

@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_hits_what_was_said_and_answers_as_without_a_cache(model, tokenizer, template, monkeypatch, capsys):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[template])
    chats = []
    for caching in (True, False):
        chat = Chat(engine_of(model, tokenizer, enable_prefix_caching=caching), lambda max_tokens: SamplingParams(
            temperature=0, max_tokens=max_tokens), 13)
        for q in QUESTIONS: chat.ask(q)
        chats.append((chat.talk.turns, *capsys.readouterr()))
    (turns, out, err), (alone, plain_out, plain_err) = chats
    assert out == plain_out and [t.ids for t in turns] == [t.ids for t in alone] and len(turns) == len(QUESTIONS)
    assert [t.prompt_ids for t in turns] == [t.prompt_ids for t in alone]
    assert [h for h, *_ in hits(plain_err)] == [0] * len(turns)
    seen = []                  # what the pool has K/V of: all but the last token of each answer
    for turn, (hit, prompt, n) in zip(turns, hits(err), strict=True):
        assert (prompt, n) == (len(turn.prompt_ids), len(turn.ids)) and n == 13
        best = max((common(turn.prompt_ids[:-1], known) for known in seen), default=0)
        assert hit == best // SIZE * SIZE
        seen.append(turn.prompt_ids + turn.ids[:-1])
    if template == "chatml":   # all of the former turn, and not a token more to compute than this
        for a, b, (hit, _, _) in zip(turns, turns[1:], hits(err)[1:]):
            assert b.prompt_ids[:len(a.prompt_ids + a.ids)] == a.prompt_ids + a.ids
            assert hit == (len(a.prompt_ids + a.ids) - 1) // SIZE * SIZE


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_spliced_ids_say_what_the_template_says(model, make, template):
    tokenizer = make()
    tokenizer.chat_template = TEMPLATES[template]
    g, engine, longer = torch.Generator().manual_seed(0), engine_of(model, tokenizer), 0
    letters = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).strip().isalpha()]
    for i in range(60):
        talk = Conversation(engine)
        for q in ("Where does an owl live?", "And   why?"):
            turn, n = talk.ask(q), int(torch.randint(1, 9, (1,), generator=g))
            ids = torch.randint(len(tokenizer), (n,), generator=g).tolist() if i % 2 else [
                letters[j] for j in torch.randint(len(letters), (n,), generator=g)]
            talk.answered(turn, tokenizer.decode(ids, skip_special_tokens=True), ids + [tokenizer.eos_token_id] * (i % 3 == 0))
        turn = talk.ask("the end")
        plain, text = engine.prompts.encode_chat(talk.messages("the end")), tokenizer.decode
        assert text(turn.prompt_ids) == text(plain) and turn.prompt_ids[-1] == plain[-1]
        known = talk.turns[-1].prompt_ids + talk.turns[-1].ids
        longer += common(known, turn.prompt_ids) > common(known, plain)
        if template == "chatml" and make is byte_level and i % 2 == 0: assert turn.prompt_ids[:len(known)] == known
    if template == "forgets": assert longer == 0      # there is nothing to keep
    elif make is byte_level: assert longer > 10


def test_another_spelling_would_lose_the_hit(model, tokenizer):
    talk = Conversation(engine_of(model, tokenizer))
    ids = [tokenizer(c)["input_ids"][0] for c in " owl is wise"]          # letter by letter
    talk.answered(talk.ask("Who?"), " owl is wise", ids)
    known, turn = talk.turns[0].prompt_ids + ids, talk.ask("Why?")
    plain = talk.prompts.encode_chat(talk.messages("Why?"))
    assert common(known, turn.prompt_ids) == len(known) and common(known, plain) < len(known) - 8


def test_what_a_stop_string_cut_is_not_in_the_history(model, tokenizer):
    talk = Conversation(engine_of(model, tokenizer))
    ids = [t for word in ("An", " owl", "STOP") for t in tokenizer(word)["input_ids"]]
    talk.answered(talk.ask("Who?"), "An owl", ids)
    kept = talk.turns[0].prompt_ids + ids[:-len(tokenizer("STOP")["input_ids"])]
    turn = talk.ask("Why?")
    assert turn.prompt_ids[:len(kept)] == kept and "STOP" not in tokenizer.decode(turn.prompt_ids)


# --- what is typed

def test_a_conversation_from_a_pipe(folder):
    run = subprocess.run([sys.executable, "-m", "pagedlm", "chat", "--model", folder, *TINY, "--max-tokens", "9"],
                         input="Where?\n\n   \nAnd why?\r\n/help\nthe", text=True, capture_output=True, timeout=120)
    assert run.returncode == 0 and "Traceback" not in run.stderr and "> " not in run.stdout
    (h0, p0, n0), (h1, p1, n1), (h2, p2, n2) = hits(run.stderr)
    assert h0 == 0 and h1 == (p0 + 8) // SIZE * SIZE and h2 == (p1 + 8) // SIZE * SIZE and n0 == n1 == n2 == 9
    assert run.stderr.count("(cut at --max-tokens 9)") == 3 and "/reset" not in run.stdout and "/reset" in run.stderr
    assert run.stdout.strip()


def test_undo_and_reset_and_quit(folder, said):
    argv = ["chat", "--model", folder, *TINY, "--max-tokens", "5"]
    status, out, err = said(argv, "Where?\nAnd why?\n/undo\nAnd why?\n/undo\n/undo\n/undo\nWhere?\n/reset\nWhere?\n/quit\nnever")
    a, b, c, d, e = hits(err)
    assert status == 0 and b[1:] == c[1:] and c[0] == (b[1] - 1) // SIZE * SIZE       # asked again: all but the last token
    assert a[1:] == d[1:] == e[1:] and d[0] == e[0] == (a[1] - 1) // SIZE * SIZE
    assert err.count("taken back: And why?") == 2 and err.count("taken back: Where?") == 1 and err.count("nothing to take back") == 1
    first = said(argv, "Where?")[1]
    assert out.startswith(first) and out.endswith(first)


def test_commands_are_single_words(folder, said):
    status, out, err = said(["chat", "--model", folder, *TINY, "--max-tokens", "3"], "/rest\n/etc/passwd is what?\n/a b\n")
    assert status == 1 and "no command /rest; /help" in err and len(hits(err)) == 2


def test_system_and_stop_and_options(folder, said):
    argv = ["chat", "--model", folder, *TINY, "--max-tokens", "12"]
    (_, out, err), (_, other, longer) = said(argv, "Where?"), said([*argv, "--system", "An owl."], "Where?")
    assert out != other and hits(longer)[0][1] > hits(err)[0][1]
    stop = next(c for c in out[3:-1] if c.isalnum() and out.index(c) >= 3)
    assert said([*argv, "--stop", "not in there", "--stop", stop], "Where?")[1] == out[:out.index(stop)] + "\n"
    assert said(["generate", "Where?", *argv[1:], "--stop", stop])[1] == out[:out.index(stop)] + "\n"
    status, text, _ = said(["generate", "Where?", *argv[1:], "--stop", stop, "--json"])
    assert status == 0 and json.loads(text)["text"] == out[:out.index(stop)] and json.loads(text)["finish_reason"] == "stop"
    cold = said([*argv, "--temperature", "2", "--top-p", "1e-9", "--seed", "3"], "Where?")[1]
    assert cold == out and said(["generate", "Where?", *argv[1:], "--temperature", "2", "--top-p", "1e-9"])[1] == out


def test_a_seed_repeats_the_conversation_and_not_the_turn(folder, said):
    def talk(*seed): return said(["chat", "--model", folder, *TINY, "--temperature", "1", "--max-tokens", "8", *seed], "Hi\n/reset\nHi\n")[1]
    a, b, c, d = talk("--seed", "1"), talk("--seed", "1"), talk("--seed", "2"), talk()
    assert a == b and len({a, c, d, talk()}) == 4       # without a seed, each run is another
    half = len(a) // 2
    assert a[:half] != a[half:]


def test_a_full_conversation_says_so_and_goes_on_after_reset(folder, said):
    status, out, err = said(["chat", "--model", folder, *TINY, "--num-blocks", "12", "--max-tokens", "40"],
                            "Hi\nHi\n/reset\nHi\n" + "Where? " * 30 + "\n")
    (_, p0, n0), (h1, p1, n1) = hits(err)
    assert status == 1 and p0 + n0 == 49 and (p1, n1) == (p0, n0) and h1 == (p0 - 1) // SIZE * SIZE
    cut = "(cut: the conversation is full, 49 tokens: /reset begins a new one, /undo takes the last turn back)"
    assert err.count(cut) == 2
    refused = re.findall(r"the conversation has (\d+) tokens, and at most 49 fit, the answer included: /reset", err)
    assert len(refused) == 2 and all(int(n) >= 49 for n in refused)
    assert "Traceback" not in err


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(model, tokenizer, capsys):
    n = len(Conversation(engine_of(model, tokenizer)).ask("Where?").prompt_ids)
    for limit, turns in ((n, 0), (n + 1, 1)):
        chat = Chat(engine_of(model, tokenizer, max_model_len=limit), lambda max_tokens: SamplingParams(max_tokens=max_tokens), 9)
        chat.ask("Where?")
        assert len(chat.talk.turns) == turns and chat.refused == 1 - turns
        assert (f"has {n} tokens, and at most {n} fit" in capsys.readouterr().err) == (turns == 0)


def test_a_template_refuses(folder, said, tmp_path):
    argv = ["--model", folder, *TINY, "--max-tokens", "4"]
    status, out, err = said(["chat", *argv], "Hi\nthe forbidden word\nHo\n")
    assert status == 1 and "pagedlm: the chat template refuses these messages: this word is not for me\n" in err
    (_, _, _), (h, p, _) = hits(err)
    assert h > 0 and out == said(["chat", *argv], "Hi\nHo\n")[1]        # it left nothing behind
    status, out, err = said(["chat", *argv, "--system", "forbidden"], "Hi\n")
    assert (status, out) == (2, "") and "this word is not for me" in err
    status, _, err = said(["generate", "forbidden", *argv])
    assert status == 2 and "this word is not for me" in err


def test_no_chat_template(said, tmp_path):
    bare = save(tmp_path / "bare", template=None)
    status, out, err = said(["chat", "--model", bare, *TINY], "Hi\n")
    assert (status, out) == (2, "") and "no chat template" in err and "pagedlm generate" in err and bare in err


def test_input_that_is_no_text(folder, said, monkeypatch):
    status, out, err = said(["chat", "--model", folder, *TINY, "--max-tokens", "3"], b"Hi\n\xff\xfe\n")
    assert status == 2 and "not UTF-8" in err
    status, out, err = said(["chat", "--model", folder, *TINY, "--max-tokens", "3"], "Hi\n\udcff\nHo\n")   # as a C locale reads it
    assert status == 1 and "not valid Unicode" in err and len(hits(err)) == 2
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "--model", folder]) == 2


def test_a_model_that_fails_is_said_and_the_conversation_goes_on(model, tokenizer, capsys, monkeypatch):
    chat = Chat(engine_of(model, tokenizer), lambda max_tokens: SamplingParams(temperature=0, max_tokens=max_tokens), 4)
    run = chat.engine.runner.execute
    monkeypatch.setattr(chat.engine.runner, "execute", lambda plan: 1 / 0)
    chat.ask("Hi")
    assert chat.talk.turns == [] and chat.refused == 1 and "the model failed: ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.setattr(chat.engine.runner, "execute", run)
    chat.ask("Hi")
    assert len(chat.talk.turns) == 1 and chat.engine.blocks.num_used == 0


# --- Ctrl-C

def interrupting(at, times=1):
    "A `show` during whose call number `at` somebody presses Ctrl-C."
    pieces = []
    def show(piece):
        pieces.append(piece)
        if len(pieces) == at: [signal.raise_signal(signal.SIGINT) for _ in range(times)]
    return show, pieces

def test_ctrl_c_keeps_what_is_there(model, tokenizer, monkeypatch, capsys):
    chat = Chat(engine_of(model, tokenizer), lambda max_tokens: SamplingParams(temperature=0, max_tokens=max_tokens), 30)
    show, pieces = interrupting(at=6)
    monkeypatch.setattr(cli, "write", show)
    chat.ask("Where?")
    turn, = chat.talk.turns
    assert len(turn.ids) == 6 and turn.answer == "".join(pieces[:-1]) and "; stopped)" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and chat.engine.blocks.num_used == 0
    known = turn.prompt_ids + turn.ids
    chat.ask("And?")
    assert chat.talk.turns[1].prompt_ids[:len(known)] == known
    assert hits(capsys.readouterr().err)[0][0] == (len(known) - 1) // SIZE * SIZE and len(chat.talk.turns[1].ids) == 30

def test_ctrl_c_before_the_first_token_leaves_no_turn(model, tokenizer, monkeypatch, capsys):
    chat = Chat(engine_of(model, tokenizer, max_num_batched_tokens=8), lambda max_tokens: SamplingParams(max_tokens=max_tokens), 30)
    step = chat.engine.step
    monkeypatch.setattr(chat.engine, "step", lambda: signal.raise_signal(signal.SIGINT) or step())
    with pytest.raises(KeyboardInterrupt): chat.ask("Where? " * 20)      # the second, before the prompt was through
    monkeypatch.setattr(chat.engine, "step", step)
    chat.engine.drop(["stream"])
    count = iter(range(99))
    monkeypatch.setattr(chat.engine, "step", lambda: (next(count) or signal.raise_signal(signal.SIGINT)) and None or step())
    chat.ask("Where? " * 20)
    assert chat.talk.turns == [] and "0 tokens, 0.0 tokens/s; stopped)" in capsys.readouterr().err

def test_a_second_ctrl_c_leaves_politely(folder, said, monkeypatch):
    show, _ = interrupting(at=4, times=2)
    monkeypatch.setattr(cli, "write", show)
    assert said(["chat", "--model", folder, *TINY], "Where?\nAnd?\n")[0] == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

def test_ctrl_c_ends_generate_with_its_line(folder, said, monkeypatch):
    show, _ = interrupting(at=4)
    monkeypatch.setattr(cli, "write", show)
    status, _, err = said(["generate", "Where?", "--model", folder, *TINY])
    assert status == 130 and "4 generated tokens" in err

def test_other_threads_and_other_handlers_are_left_alone(model, tokenizer):
    engine, found = engine_of(model, tokenizer), []
    def work(): found.append(stream(engine, [1, 2, 3], SamplingParams(temperature=0, max_tokens=4), lambda piece: None))
    thread = threading.Thread(target=work)
    thread.start(); thread.join()
    assert len(found[0].outputs[0].token_ids) == 4
    mine = lambda *a: None                                          # noqa: E731
    before = signal.signal(signal.SIGINT, mine)
    try:
        with ctrl_c() as asked:
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is mine and not asked.is_set()
    finally: signal.signal(signal.SIGINT, before)


def lead():
    "In a child: make the terminal at its input its own, so that the key Ctrl-C becomes a signal."
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

class Terminal:
    "A process at a pseudo-terminal."
    def __init__(self, argv):
        ours, theirs = pty.openpty()
        self.process = subprocess.Popen([sys.executable, "-m", "pagedlm", *argv], stdin=theirs, stdout=theirs, stderr=theirs,
                                        env={**os.environ, "TERM": "dumb"}, preexec_fn=lead)
        os.close(theirs)
        self.ours, self.text = ours, ""

    def wait(self, pattern, seconds=90):
        "What came until `pattern`, which is taken away."
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end and select.select([self.ours], [], [], seconds)[0], self.text
            try: piece = os.read(self.ours, 4096)
            except OSError: piece = b""       # it has ended
            assert piece, f"{pattern} is not in {self.text!r}"
            self.text += piece.decode(errors="replace")
        before, self.text = self.text[:found.end()], self.text[found.end():]
        return before

    def type(self, text): os.write(self.ours, text.encode())

    def ends(self):
        try: return self.process.wait(20)
        finally:
            self.process.kill()
            os.close(self.ours)

def test_at_a_terminal(folder):
    t = Terminal(["chat", "--model", folder, *TINY, "--max-tokens", "4000", "--num-blocks", "1024"])
    try:
        assert "/help" in t.wait(r"(?m)^> ")
        t.type("Where does it live?\n")
        t.wait(r"live\?\r\n")
        t.wait(r"(?s).{40}")                              # some of the answer
        os.kill(t.process.pid, signal.SIGINT)
        seen = t.wait(r"(?m)^> ", 30)
        (hit, prompt, n), = hits(seen)
        assert hit == 0 and 0 < n < 4000 and "; stopped)" in seen and "Traceback" not in seen
        t.type("And?\n")
        t.wait(r"And\?\r\n")
        t.wait(r"(?s).{40}")
        t.type("\x03")                                    # as the key does
        (hit, _, _), = hits(t.wait(r"(?m)^> ", 30))
        assert hit >= (prompt + n - 1) // SIZE * SIZE - SIZE
        t.type("a line that is not sent")
        t.wait("not sent")                                # readline shows it, so it listens
        for _ in range(20):                               # a signal just before readline's select waits for the next key
            t.type("\x03")
            if select.select([t.ours], [], [], 2)[0]: break
        t.wait("\r\n", 20)
    finally: status = t.ends()
    assert status == 0 and "Traceback" not in t.text


# --- mistakes

BAD = [["chat", "--temperature", "9"], ["chat", "--temperature", "nan"], ["chat", "--top-p", "0"], ["chat", "--top-p", "1.5"],
       ["chat", "--stop", ""], ["chat", "--model", "no/such-model"], ["chat", "--device", "abacus"], ["chat", "--device", "cuda:99"],
       ["chat", "--num-blocks", "9" * 30], ["chat", "--block-size", "9" * 30], ["chat", "--model", "/dev/null"],
       ["generate", " "], ["generate", "Hi", "--top-p", "-1"], ["generate", "Hi", "--stop", "a", "--stop", ""],
       ["generate", "Hi", "--max-tokens", "9" * 30], ["generate", "\udcff"],
       ["bench", "throughput", "--workload", "/"], ["bench", "throughput", "--workload", "/dev/null"],
       ["bench", "sharing", "--workload", "no-such.json"], ["bench", "scheduler", "--contexts", "5"],
       ["bench", "kernels", "--out", "/no-such/x"]]

@pytest.mark.parametrize("argv", BAD, ids=lambda a: " ".join(a)[:40])
def test_a_mistake_is_a_line_and_status_2(folder, said, argv):
    if "--model" not in argv and argv[0] != "bench": argv = [*argv, "--model", folder]
    if "sharing" in argv: argv = [*argv, "--model", folder]
    status, out, err = said(argv, "Hi\n")
    assert (status, out) == (2, "") and re.fullmatch(r"pagedlm: error: [^\n]+\n", err)

@pytest.mark.parametrize("argv", [
    [], ["chat", "--max-tokens", "0"], ["chat", "--seed", "x"], ["chat", "--block-size", "-1"], ["chat", "--colour"], ["generate", "Hi", "--max-tokens", "many"], ["bench", "kernels", "--repeat", "0"], ["chat", "hello"], ["generate"],
    ["generate", "Hi", "--temperature", "warm"], ["bench"], ["bench", "throughput"], ["bench", "scheduler", "--seqs", "1.5"],
    ["chat", "--dtype", "int8"]], ids=lambda a: " ".join(a) or "none")
def test_a_mistake_in_the_words_is_found_by_the_parser(argv, capsys):
    with pytest.raises(SystemExit) as e: main(argv)
    assert e.value.code == 2 and "error: " in capsys.readouterr().err.splitlines()[-1]

@pytest.mark.parametrize("argv", [["chat", "--top-p", "7"], ["generate", "Hi", "--max-tokens", "many"]], ids=lambda a: a[0] + a[1])
def test_no_traceback_from_a_process(argv):
    run = subprocess.run([sys.executable, "-m", "pagedlm", *argv], stdin=subprocess.DEVNULL, text=True, capture_output=True, timeout=120)
    assert run.returncode == 2 and run.stdout == "" and "Traceback" not in run.stderr and "error: " in run.stderr.splitlines()[-1]

def test_a_reader_that_has_enough(folder, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nHo\n"))
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["chat", "--model", folder, *TINY, "--max-tokens", "40"]) == 1
    assert "error" not in capsys.readouterr().err

def test_a_reader_that_has_had_enough_of_a_process(folder):
    words = f"'{sys.executable}' -m pagedlm generate Hi --model '{folder}' {' '.join(TINY)} --max-tokens 40"
    run = subprocess.run(f"{words} | head -c 1", shell=True, capture_output=True, text=True, timeout=300)
    assert len(run.stdout) == 1 and "error" not in run.stderr and "Traceback" not in run.stderr

def test_help_names_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit) as e: main(["chat", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert e.value.code == 0 and "/help" in text and "default: 0.7" in text and "default: 0.9" in text and "default: 512" in text
    for option in "model dtype device system max-tokens temperature top-p seed block-size num-blocks stop".split():
        assert f"--{option}" in text
