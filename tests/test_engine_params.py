"""Sampling parameters through the engine, on a tiny random model (fp32): each equals its definition, applied token by token to
the logits of a `transformers` model that sees the whole context; and texts equal a cut of the whole text."""
import functools
import json
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import pagedlm.engine
from pagedlm import LLM, Engine, SamplingParams
from pagedlm.engine import cgroup_memory, pool_size
from pagedlm.models import load_model
from pagedlm.sampling import MIN_TEMPERATURE, make_stream

VOCAB, EOS = 64, (11, 23, 52)      # the config's, generation_config.json's, and the tokenizer's
SIZE = 4                         # tokens in a block
PIECES = [*"d ", *(a + " " for a in "abc"), *(a + b for a in "abc" for b in ("", *"abc")),
          *(a + b + c for a in "abc" for b in "ab" for c in "abc"), "é", "日本", "\n", "ab\nc", "zz", ". ", "C", "Ca", "ac ba",
          " a", " cc", "<0xE6>", "<0x97>", "<0xA5>"]
BYTES, SPECIAL = {46, 47, 48}, {51, 52, 53}


@pytest.fixture(scope="module")
def tokenizer():
    "Pieces of up to 5 letters, the bytes of a character, special tokens: 54 ids, 10 fewer than the model has logits."
    t = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(PIECES)}, merges=[], unk_token="d"))
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    t.add_tokens(["plain", "plainer"])
    t.add_special_tokens([AddedToken(s, special=True) for s in ("<s>", "</s>", "<|tool|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)
    assert len(tokenizer) == 54 and tokenizer.eos_token_id == EOS[2] and tokenizer.decode([46, 47, 48]) == "日"
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256,
                         initializer_range=0.2, bos_token_id=0, eos_token_id=EOS[0], tie_word_embeddings=False)
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS[0], EOS[1]]}))
    return path


@pytest.fixture(scope="module")
def model(folder): return load_model(folder)


@pytest.fixture(scope="module")
def hf(folder):
    "The logits `[tokens, VOCAB]` of a sequence, all computed at once."
    hf = LlamaForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    return functools.lru_cache(None)(lambda ids: hf(torch.tensor([ids])).logits[0].double())


@pytest.fixture
def make(model, tokenizer):
    "An engine whose pools hold NaN until they are written."
    def make(num_blocks=256, text=True, **kw):
        engine = Engine(model, tokenizer=tokenizer if text else None, num_blocks=num_blocks, block_size=SIZE, **kw)
        engine.runner.kv.data.fill_(torch.nan)
        return engine
    return make


def prompt(length, k=0): return [(7 * k + 5 * j + j * j) % VOCAB for j in range(length)]


def greedy(max_tokens=16, **kw): return SamplingParams(temperature=0, max_tokens=max_tokens, **kw)


def add(engine, requests):
    for name, (ids, params) in requests.items(): engine.add_request(name, ids, params)


def drain(engine, watch=lambda out: None, pinned=0):
    "Step to the end: the last outputs by request; `watch` sees all. Nothing is left of any request."
    done = {}
    while engine.has_unfinished():
        for out in engine.step():
            watch(out)
            if out.finished: done[out.request_id] = out
        engine.blocks.check()
        engine.scheduler.host.check()
    nothing_left(engine, pinned)
    return done


def nothing_left(engine, pinned=0):
    s = engine.stats()
    assert (s.used_blocks, s.free_host_blocks) == (pinned, s.host_blocks)
    assert not (engine.requests or engine.ended or engine.books.begun or engine.scheduler.groups or engine.scheduler.sequences)


def serve(engine, requests, watch=lambda out: None, pinned=0):
    add(engine, requests)
    return drain(engine, watch, pinned)


# The definition

def adjusted(line, prompt, output, p):
    "Penalties, biases and forbidden ends, one token at a time. line `[VOCAB]` float64."
    x, counts = line.tolist(), Counter(output)
    for t in {*prompt, *output}: x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
    for t, n in counts.items(): x[t] -= n * p.frequency_penalty + p.presence_penalty
    for t, bias in (p.logit_bias or {}).items(): x[t] += bias
    ends = {*p.stop_token_ids, *(() if p.ignore_eos else EOS)}
    return [-torch.inf if t >= 54 or (t in ends and len(output) < p.min_tokens) else v for t, v in enumerate(x)]


def drawn(x, p, u):
    "min-p, top-k, top-p, then the token at the fraction u of what is left, by id."
    w = (torch.tensor(x) / max(p.temperature, MIN_TEMPERATURE)).softmax(-1)
    w = torch.where(w >= p.min_p * w.max(), w, 0).tolist()
    order = sorted(range(VOCAB), key=lambda t: (-w[t], t))
    order, total, kept = order[:p.top_k if p.top_k > 0 else VOCAB], 0.0, []
    mass = sum(w[t] for t in order)
    for t in order:
        if total >= p.top_p * mass - 1e-9 and kept: break
        kept, total = [*kept, t], total + w[t]
    at = u * total
    for t in sorted(kept):
        at -= w[t]
        if at < 0: return t
    return max(kept)


def full_text(tokenizer, ids, p): return tokenizer.decode(ids, skip_special_tokens=p.skip_special_tokens) if ids else ""


def certain(tokenizer, ids, p):
    "The text that no further token can change: all but the bytes at the end."
    n = len(ids)
    while n and ids[n - 1] in BYTES: n -= 1
    return full_text(tokenizer, ids[:n], p)


def find(text, p, known):
    "The stop that starts first, then the longest, of those that end behind `known` characters."
    found = [(i, -len(s), s) for s in p.stop for i in range(len(text)) if text.startswith(s, i) and i + len(s) > known]
    return min(found, default=None)


def cut(tokenizer, ids, p, known):
    "(text, stop) if the newest token of `ids` completes a stop string, and how much text is certain now."
    text = certain(tokenizer, ids, p)
    found = find(text, p, known) if len(ids) > p.min_tokens else None
    return found and (text[:found[0]] + (found[2] if p.include_stop_str_in_output else ""), found[2]), len(text)


@pytest.fixture(scope="module")
def defined(hf, tokenizer):
    "What the definition answers: [(ids, text, finish_reason, stop_reason)] of each choice."
    def answer(ids, p, index):
        stream, output, known = make_stream(p, 0, 0, index), [], 0
        while True:
            x = adjusted(hf((*ids, *output))[-1], ids, output, p)
            if p.greedy: token = max(range(VOCAB), key=lambda t: (x[t], -t))
            else: token = drawn(x, p, torch.rand((), generator=stream, dtype=torch.float64).item())
            output.append(token)
            mine = token in p.stop_token_ids
            if token in EOS and not p.ignore_eos and not mine: return output, full_text(tokenizer, output[:-1], p), "stop", None
            found, known = cut(tokenizer, output, p, known)
            if found: return output, found[0], "stop", token if mine else found[1]
            if mine: return output, full_text(tokenizer, output, p), "stop", token
            if len(output) == p.max_tokens: return output, full_text(tokenizer, output, p), "length", None
    @functools.lru_cache(None)
    def all_of(ids, p): return [answer(ids, p, i) for i in range(p.n)]
    return lambda ids, p: all_of(tuple(ids), p)


def told(out): return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in out.outputs]


def test_the_model_ends_at_all_ids_that_its_files_name(model): assert model.config.eos_token_ids == EOS


# Penalties, biases, filters

NUDGE = {11: 3.0, 12: 4.0, 30: -100, 60: 100, 17: 2.5, 52: 1.0}
ADJUSTED = {
    "plain": greedy(24), "ignore": greedy(24, ignore_eos=True), "repetition": greedy(24, repetition_penalty=1.3, ignore_eos=True),
    "repeats": greedy(24, repetition_penalty=0.6, ignore_eos=True), "frequency": greedy(24, frequency_penalty=1.7, ignore_eos=True),
    "frequent": greedy(24, frequency_penalty=-0.6, ignore_eos=True), "presence": greedy(24, presence_penalty=1.9, ignore_eos=True),
    "present": greedy(24, presence_penalty=-2, ignore_eos=True), "all three": greedy(24, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.4, ignore_eos=True),
    "bias": greedy(24, logit_bias=NUDGE, ignore_eos=True), "force": greedy(6, logit_bias={33: 1000}),
    "min": greedy(24, min_tokens=9, logit_bias={11: 100, 33: 50}), "min and mine": greedy(24, min_tokens=5, stop_token_ids=[21, 33], logit_bias={33: 100, 23: 50}),
    "min and ignored": greedy(24, min_tokens=5, ignore_eos=True, logit_bias={11: 100}), "min is max": greedy(7, min_tokens=7, logit_bias={52: 100}),
    "everything": greedy(24, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.2, logit_bias=NUDGE, min_tokens=6, stop_token_ids=range(20, 30))}
FILTERED = {
    "warm": dict(temperature=1.3), "hot": dict(temperature=2, ignore_eos=True), "tiny": dict(temperature=1e-6), "k": dict(top_k=5), "p": dict(top_p=0.6),
    "m": dict(min_p=0.2), "all": dict(min_p=0.05, top_k=9, top_p=0.8, temperature=1.7), "one": dict(top_k=1), "beyond": dict(top_k=10**6, top_p=0.3),
    "penalized": dict(temperature=1.5, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=-0.5, top_p=0.9, ignore_eos=True),
    "biased": dict(logit_bias=NUDGE, min_tokens=12, top_k=12), "min": dict(min_tokens=14, logit_bias={23: 100}, temperature=0.7)}
REQUESTS = {f"{k}/{i}": (prompt(length, i), p) for k, p in ADJUSTED.items() for i, length in enumerate((13, 6))}
REQUESTS |= {f"{k} sampled": (prompt(9 + i, i), SamplingParams(n=1 + i % 3, seed=i, max_tokens=16, **kw)) for i, (k, kw) in enumerate(FILTERED.items())}
PRESSURE = {"roomy": {}, "chunks": dict(max_num_batched_tokens=5), "few": dict(max_num_seqs=6, enable_prefix_caching=False),
            "recompute": dict(num_blocks=22, preemption="recompute", max_num_batched_tokens=40), "swap": dict(num_blocks=22, preemption="swap")}


@pytest.mark.parametrize("kw", PRESSURE.values(), ids=PRESSURE)
def test_a_batch_of_all_kinds_equals_the_definition(make, defined, kw):
    "SA-4 and more: whatever the neighbours, the slot, the chunks and the preemptions."
    engine = make(**kw)
    done = serve(engine, REQUESTS)
    for name, request in REQUESTS.items(): assert (name, told(done[name])) == (name, defined(*request))
    assert (engine.stats().preemptions >= 10) == ("num_blocks" in kw)


def test_the_definitions_differ(defined):
    "Each kind changes something, and both ways to end are met."
    texts = {name: tuple(tuple(ids) for ids, *_ in defined(*request)) for name, request in REQUESTS.items() if name.endswith("/0")}
    assert len(set(texts.values())) >= len(texts) - 2
    assert {reason for request in REQUESTS.values() for *_, reason, _ in defined(*request)} == {"stop", "length"}


@pytest.mark.parametrize("late", [0, 1, 5])
def test_a_seeded_request_that_joins_late_answers_as_alone(make, defined, late):
    p = SamplingParams(n=2, seed=11, temperature=1.5, max_tokens=12, frequency_penalty=0.5)
    engine, done = make(max_num_batched_tokens=7), {}
    add(engine, {"unseeded": (prompt(9), SamplingParams(max_tokens=40, ignore_eos=True)), "other": (prompt(5), replace(p, seed=12, max_tokens=30))})
    for _ in range(late): done |= {o.request_id: o for o in engine.step() if o.finished}
    done |= serve(engine, {"late": (prompt(9), p)})
    assert told(done["late"]) == defined(prompt(9), p)
    assert len({tuple(c.token_ids) for c in done["late"].outputs}) == 2


def test_unseeded_requests_with_penalties_differ(make):
    p = SamplingParams(n=3, temperature=1.5, max_tokens=12, ignore_eos=True, presence_penalty=1.0)
    done = serve(make(), {k: (prompt(9), p) for k in "ab"})
    assert len({tuple(c.token_ids) for out in done.values() for c in out.outputs}) == 6


def test_children_count_their_own_tokens(make, hf):
    "With a strong penalty no choice repeats a token, though its siblings have had it."
    p = SamplingParams(n=4, temperature=0.5, seed=3, max_tokens=30, ignore_eos=True, presence_penalty=2, frequency_penalty=2,
                       logit_bias={t: 30 for t in range(40)})
    for c in serve(make(), {"0": (prompt(9), p)})["0"].outputs: assert Counter(c.token_ids).most_common(1)[0][1] == 1

@pytest.mark.parametrize("kw", PRESSURE.values(), ids=PRESSURE)
def test_logprobs_are_raw(make, hf, kw):
    "SA-9: whatever was adjusted, they are log-softmax of what the model said, over all its logits."
    requests = {k: (ids, replace(p, logprobs=4)) for k, (ids, p) in REQUESTS.items() if "/0" in k or "sampled" in k}
    for name, out in serve(make(**kw), requests).items():
        for c in out.outputs:
            lines = hf((*requests[name][0], *c.token_ids))[-len(c.token_ids) - 1:-1].log_softmax(-1)
            proven(lines, c.token_ids, c.logprobs, 4)
            assert c.cumulative_logprob == pytest.approx(sum(line[t].item() for line, t in zip(lines, c.token_ids)), abs=1e-3)


def proven(lines, ids, entries, k):
    "Each token's entry, first, and then the k best, with their ranks. lines `[tokens, VOCAB]`."
    assert len(lines) == len(ids) == len(entries)
    for line, token, entry in zip(lines.tolist(), ids, entries):
        best = [t for t in sorted(range(VOCAB), key=lambda t: -line[t])[:k]]
        assert list(entry) == list(dict.fromkeys([token, *best]))
        for t, p in entry.items():
            assert p.logprob == pytest.approx(line[t], abs=1e-4) and p.rank == 1 + sum(x > line[t] for x in line)


# Log-probabilities of prompts

def read(hf, ids, found, k):
    assert found[0] is None
    proven(hf(tuple(ids)).log_softmax(-1)[:len(found) - 1], ids[1:len(found)], found[1:], k)


@pytest.mark.parametrize("budget, caching", [(1, False), (2, True), (3, False), (4, True), (5, False), (5, True), (64, False), (64, True)])
def test_prompt_logprobs_in_chunks(make, hf, defined, budget, caching):
    "As far as the prompt is computed, at each step; with hits for others, pins, samples, beams and nothing to generate."
    ids = prompt(18)
    requests = {"reads": (ids, greedy(0, prompt_logprobs=3)), "one": (ids, greedy(5, prompt_logprobs=0)),
                "samples": (ids, SamplingParams(n=3, seed=3, max_tokens=6, prompt_logprobs=20)), "short": ([7], greedy(3, prompt_logprobs=2)),
                "beams": (ids, SamplingParams(n=2, use_beam_search=True, max_tokens=5, prompt_logprobs=1)),
                "many read": (prompt(11, 2), SamplingParams(n=3, max_tokens=0, prompt_logprobs=2)), "best": (ids, SamplingParams(n=1, best_of=3, seed=1, prompt_logprobs=2)),
                "plain": (ids, greedy(6)), "others": (prompt(9, 3), SamplingParams(n=2, seed=5, max_tokens=6))}
    def watch(out):
        k = requests[out.request_id][1].prompt_logprobs
        if k is None: assert out.prompt_logprobs is None
        elif out.outputs[0].token_ids or out.finished:
            assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
            if out.finished: read(hf, out.prompt_token_ids, out.prompt_logprobs, k)
    requests = {k: (i, p) for k, (i, p) in requests.items() if p.max_tokens == 0 or max(p.width, 2 * p.use_beam_search) <= budget}
    engine = make(max_num_batched_tokens=budget, enable_prefix_caching=caching)
    pin = engine.pin_prefix(prompt(10))
    serve(engine, {"before": (ids, greedy(3))}, lambda out: None, 3)
    done = serve(engine, requests, watch, 3)
    for name in done.keys() & {"one", "samples", "plain", "others", "short"}: assert told(done[name]) == defined(*requests[name]), name
    for name, n in (("reads", 1), ("many read", 3)): assert told(done[name]) == [([], "", "length", None)] * n
    assert done["plain"].num_cached_tokens >= 8
    engine.unpin_prefix(pin)
    nothing_left(engine)


def test_prompt_logprobs_change_no_answer(make):
    "Nor what others answer, nor the counts of tokens."
    plain, engine = make(), make()
    requests = {k: (ids, p) for k, (ids, p) in REQUESTS.items() if "0" in k or "sampled" in k}
    a = serve(plain, requests)
    b = serve(engine, {k: (ids, replace(p, prompt_logprobs=2)) for k, (ids, p) in requests.items()})
    assert {k: told(o) for k, o in a.items()} == {k: told(o) for k, o in b.items()}
    for count in ("prompt_tokens", "generation_tokens"): assert getattr(plain.stats(), count) == getattr(engine.stats(), count)


@pytest.mark.parametrize("mode, budget, caching", [("recompute", 3, True), ("recompute", 7, False), ("recompute", 64, True),
                                                   ("swap", 3, False), ("swap", 7, True), ("swap", 64, False)])
def test_prompt_logprobs_survive_preemptions(make, hf, defined, mode, budget, caching):
    "SC-7: prompts that gave way, some of them half computed, have their whole array, once."
    requests = {str(i): (prompt(14 + i, i % 4), SamplingParams(n=1 + i % 2, seed=i, max_tokens=16, ignore_eos=True, prompt_logprobs=i % 4)) for i in range(8)}
    requests["beams"] = (prompt(15, 5), SamplingParams(n=2, use_beam_search=True, ignore_eos=True, prompt_logprobs=2))
    requests["reads"] = (prompt(30, 1), greedy(0, prompt_logprobs=2))
    engine = make(18, preemption=mode, max_num_batched_tokens=budget, enable_prefix_caching=caching, watermark=0.0)
    half, schedule = [], engine.scheduler.schedule
    def watched():
        before = {g.request_id: g.seqs[0] for g in engine.scheduler.running}
        plan = schedule()
        gone = {engine.scheduler.sequences[i].request_id for i in plan.preempted if i in engine.scheduler.sequences}
        half.extend(n for n in gone if n in before and not before[n].output)
        return plan
    engine.scheduler.schedule = watched
    done = serve(engine, requests)
    for name, (ids, p) in requests.items():
        assert len(done[name].prompt_logprobs) == len(ids)
        read(hf, ids, done[name].prompt_logprobs, p.prompt_logprobs)
        if name.isdigit(): assert told(done[name]) == defined(ids, p)
    assert engine.stats().preemptions >= (1 if budget == 3 else 3) and (budget > 7 or half)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 6, 12])
def test_bad_logits_in_a_prompt_end_that_request_alone(make, defined, bad, at):
    "SA-8: in the middle of a prompt, where only the log-probabilities are wanted."
    engine = make(max_num_batched_tokens=16)
    execute = engine.runner.execute
    def spoil(plan):
        logits, first = execute(plan).clone(), 0
        for row in plan.rows:
            where = first + at - (row.position + len(row.tokens) - row.num_logits)
            if engine.scheduler.sequences[row.seq_id].request_id == "bad" and first <= where < first + row.num_logits: logits[where, 3] = bad
            first += row.num_logits
        return logits
    engine.runner.execute = spoil
    requests = {"a": (prompt(9), greedy(8)), "bad": (prompt(13, 1), SamplingParams(n=2, seed=1, prompt_logprobs=1, max_tokens=8)),
                "b": (prompt(13, 1), SamplingParams(n=2, seed=1, prompt_logprobs=1, max_tokens=8))}
    done = serve(engine, requests)
    assert "not finite" in done["bad"].error or "largest logit is" in done["bad"].error
    assert {c.finish_reason for c in done["bad"].outputs} == {"error"}
    for name in "ab": assert told(done[name]) == defined(*requests[name])


# Stop strings

def long_answers(length=32):
    "Requests whose texts are long: {number: (prompt, params)}."
    return {i: (prompt(5 + i, i), SamplingParams(seed=i, temperature=1.6, max_tokens=length, ignore_eos=True, logit_bias={t: 1.5 for t in BYTES})) for i in range(16)}


@pytest.fixture(scope="module")
def stopping(defined, tokenizer):
    "128 requests, with 1 to 4 stops that are cut from their own texts, or look as if."
    r, out = Random(0), {}
    for i in range(128):
        ids, p = long_answers()[i % 16]
        text = defined(ids, p)[0][1].replace("\ufffd", "~")
        stops = []
        for _ in range(1 + i % 4):
            at = r.randrange(len(text))
            s = text[at:at + r.choice((1, 2, 3, 4, 6, 9, 14))]
            stops.append(s if r.random() < 0.6 else s + "X" if r.random() < 0.5 else s[:-1] + "q")
        stops = [s for s in stops if s and "~" not in s] or [" qq"]
        out[str(i)] = ids, replace(p, stop=stops, include_stop_str_in_output=i % 3 == 0, min_tokens=(0, 0, 12, 24)[i // 7 % 4], skip_special_tokens=i % 5 > 0)
    return out


@pytest.mark.parametrize("kw", [{}, dict(num_blocks=60, preemption="recompute", max_num_batched_tokens=20), dict(num_blocks=60, preemption="swap")], ids=str)
def test_stop_strings_cut_as_in_the_whole_text(make, defined, stopping, kw):
    "TX-1: at each step nothing is shown that is taken back, or that stands at or behind a stop; the end equals the definition."
    shown = {name: [""] for name in stopping}
    def watch(out): shown[out.request_id].append(out.outputs[0].text)
    engine = make(max_num_seqs=24, **kw)
    done, kinds = serve(engine, stopping, watch), Counter()
    for name, request in stopping.items():
        want = defined(*request)
        assert (name, told(done[name])) == (name, want)
        for a, b in zip(shown[name], shown[name][1:]): assert b.startswith(a)
        kinds[want[0][2], len(request[1].stop) > 1, request[1].include_stop_str_in_output] += 1
        if want[0][2] == "stop" and not request[1].min_tokens and not request[1].include_stop_str_in_output:
            assert not any(s in want[0][1] for s in request[1].stop)
    assert len(kinds) == 8 and min(kinds.values()) >= 2, kinds
    if kw: assert engine.stats().preemptions >= 10


@pytest.fixture
def write(make, model, tokenizer):
    "An engine whose model says these ids and nothing else."
    def run(ids, params, watch=lambda out: None):
        engine = make()
        class Writer:
            config, dtype, device = model.config, model.dtype, model.device
            def __call__(self, tokens, batch, kv, wanted):
                written = engine.requests["0"].choices[0].seq.output
                logits = torch.zeros(len(wanted), VOCAB)
                logits[:, ids[min(len(written), len(ids) - 1)]] = 1000
                return logits
        engine.runner.model = Writer()
        return serve(engine, {"0": ([3], params)}, watch)["0"].outputs[0]
    return run


def id_of(piece): return PIECES.index(piece)


A, B, C, AB, ABC, CA = (id_of(p) for p in ("a", "b", "c", "ab", "abc", "ca"))


@pytest.mark.parametrize("pieces, kw, tokens, text, stop", [
    (["ab", "ca", "bb"], dict(stop="bc"), 2, "a", "bc"), (["ab", "ca", "bb"], dict(stop=["bc"], include_stop_str_in_output=True), 2, "abc", "bc"),
    (["a", "b", "c", "a"], dict(stop=["bca", "abca"]), 4, "", "abca"), (["a", "b", "c", "a"], dict(stop=["b", "abca"]), 2, "a", "b"),
    (["a", "b", "c", "d"], dict(stop=["cdx", "abcX"]), None, "abcd", None), (["ab", "ab", "ac"], dict(stop="abac"), 3, "ab", "abac"),
    (["a", "a", "a", "b"], dict(stop="aab"), 4, "a", "aab"), (["é", "日本", "C"], dict(stop="本C"), 3, "é日", "本C"),
    (["b", "<0xE6>", "<0x97>", "<0xA5>", "a"], dict(stop="日"), 5, "b", "日"), (["b", "<0xE6>", "<0x97>", "a"], dict(stop="zz"), None, "b\ufffd\ufffda", None),
    (["ab", "c", "ab", "c"], dict(stop="bc", min_tokens=2), 4, "abca", "bc"), (["ab", "c", "ab", "c"], dict(stop="bc", min_tokens=1), 2, "a", "bc"),
    (["ab", "c", "ab", "c"], dict(stop="bc", min_tokens=4), None, "abcabc", None), (["ab", "c"], dict(stop="cd"), None, "abc", None),
    (["ab\nc", "a"], dict(stop="\n"), 1, "ab", "\n"), (["zz", "zz"], dict(stop=["z", "zz"]), 1, "", "zz"), (["a"], dict(stop="a"), 1, "", "a"),
    (["a", "b"], dict(stop=["a"], stop_token_ids=[B]), 1, "", "a"), (["a", "b"], dict(stop=["b"], stop_token_ids=[B]), 2, "a", B),
    (["a", "b"], dict(stop=["q"], stop_token_ids=[B]), 2, "ab", B)], ids=str)
def test_stops_by_hand(write, pieces, kw, tokens, text, stop):
    "Split over tokens, in a character, one inside another, one that only begins, one beside a stop token."
    ids = [id_of(p) for p in pieces]
    seen = [""]
    out = write(ids, greedy(len(ids), **kw), lambda out: seen.append(out.outputs[0].text))
    assert (out.token_ids, out.text, out.stop_reason) == (ids[:tokens], text, stop)
    assert out.finish_reason == ("length" if stop is None else "stop")
    assert all(b.startswith(a) for a, b in zip(seen, seen[1:]))


def test_what_is_held_back_is_shown_step_by_step(write):
    "A stop that only seems to begin; each step shows all that is certain."
    seen = []
    out = write([A, B, C, A, A, B], greedy(6, stop="abcd"), lambda out: seen.append(out.outputs[0].text))
    assert seen == ["", "", "", "abc", "abca", "abcaab"] and out.finish_reason == "length"


def test_a_stop_that_the_last_character_completes(write):
    "A character of bytes is certain only when the text has ended: the stop is found there, too."
    out = write([id_of(p) for p in ("b", "<0xE6>", "<0x97>", "<0xA5>")], greedy(4, stop="日"))
    assert (out.text, out.finish_reason, out.stop_reason) == ("b", "stop", "日")


def test_an_answer_that_ends_inside_a_character(write):
    out = write([id_of(p) for p in ("b", "<0xE6>", "<0x97>")], greedy(3, stop="zz"))
    assert out.text == "b\ufffd\ufffd" and out.finish_reason == "length"


def test_an_eos_ends_before_the_stop_is_looked_at(write):
    "Its text is hidden, and what was held back belongs to the answer."
    out = write([A, B, EOS[0]], greedy(8, stop="bX"))
    assert (out.text, out.finish_reason, out.stop_reason, out.token_ids) == ("ab", "stop", None, [A, B, EOS[0]])


def test_an_abort_shows_what_was_held_back(make):
    engine = make()
    p = SamplingParams(seed=3, temperature=1.6, max_tokens=40, ignore_eos=True)
    text = serve(engine, {"0": (prompt(9), p)})["0"].outputs[0].text
    engine.add_request("0", prompt(9), replace(p, stop=text[:6] + "X"))
    out, = engine.step()
    assert out.outputs[0].text == "" and not out.finished
    engine.abort("0")
    out = drain(engine)["0"].outputs[0]
    assert out.finish_reason == "abort" and out.text and text.startswith(out.text)


def test_choices_stop_each_where_it_does(make, defined):
    "n = 5: their texts stop at different places, for different reasons; with best_of the best are chosen of what is left."
    p = SamplingParams(n=5, seed=5, temperature=1.5, max_tokens=30, stop=["bbc", "C", "zz", "日本", "plain"], stop_token_ids=[20, 33], logprobs=0)
    done = serve(make(), {"0": (prompt(9), p), "best": (prompt(9), replace(p, n=2, best_of=5)), "all": (prompt(9), replace(p, stop=None))})
    assert told(done["0"]) == defined(prompt(9), p)
    assert len({c.stop_reason for c in done["0"].outputs}) >= 3 and len({len(c.token_ids) for c in done["0"].outputs}) >= 3
    for c in done["0"].outputs: assert len(c.logprobs) == len(c.token_ids)
    mean = sorted(done["0"].outputs, key=lambda c: -c.cumulative_logprob / len(c.token_ids))
    assert [c.text for c in done["best"].outputs] == [c.text for c in mean[:2]]
    for a, b in zip(done["0"].outputs, done["all"].outputs): assert b.text.startswith(a.text) and a.token_ids == b.token_ids[:len(a.token_ids)]


# Ends

@pytest.mark.parametrize("token", EOS)
def test_any_of_several_eos_ids_ends_the_text(make, token):
    "SA-7: its text is hidden; ignored, none of them ends, but a stop of one's own does, and is shown if it is no special token."
    bias, engine = {token: 100}, make()
    done = serve(engine, {"eos": (prompt(9), greedy(8, logit_bias=bias)), "ignored": (prompt(9), greedy(4, logit_bias=bias, ignore_eos=True)),
                          "mine": (prompt(9), greedy(8, logit_bias=bias, ignore_eos=True, stop_token_ids=[token])),
                          "both": (prompt(9), greedy(8, logit_bias=bias, stop_token_ids=[token]))})
    shown = "" if token in SPECIAL else PIECES[token]
    assert told(done["eos"]) == [([token], "", "stop", None)]
    assert told(done["ignored"]) == [([token] * 4, shown * 4, "length", None)]
    assert told(done["mine"]) == told(done["both"]) == [([token], shown, "stop", token)]


def test_min_tokens_forbids_every_end(make):
    ends = {t: 100 for t in (*EOS, 20)}
    p = greedy(12, min_tokens=8, logit_bias=ends | {33: 50}, stop_token_ids=[20])
    out = serve(make(), {"0": (prompt(9), p)})["0"].outputs[0]
    assert out.token_ids[:8] == [33] * 8 and out.token_ids[8] in ends and len(out.token_ids) == 9 and out.finish_reason == "stop"


def test_a_special_token_among_the_stops(make):
    "TX-6: left out of the text, or not, as special tokens are."
    for skip, text in ((True, ""), (False, "<|tool|>")):
        p = greedy(8, logit_bias={53: 100}, stop_token_ids=[53], skip_special_tokens=skip)
        assert told(serve(make(), {"0": (prompt(9), p)})["0"]) == [([53], text, "stop", 53)]


# A head that is wider than the tokenizer

def test_ids_without_a_token_are_never_chosen(make):
    "SA-6: not by a bias, not where all others are unlikely; beside others; and they have an empty text where they are reported."
    bias = {t: 100 for t in range(54, VOCAB)} | {t: -100 for t in range(10, 54)}
    kinds = {"greedy": greedy(8, logit_bias=bias, logprobs=20, prompt_logprobs=20), "beams": SamplingParams(n=3, use_beam_search=True, ignore_eos=True, logprobs=20),
             "samples": SamplingParams(n=4, seed=1, temperature=2, ignore_eos=True, logit_bias=bias, logprobs=20), "top": SamplingParams(top_k=3, logit_bias=bias)}
    done = serve(make(), {k: (prompt(9), p) for k, p in kinds.items()})
    assert max(t for o in done.values() for c in o.outputs for t in c.token_ids) < 54
    entries = [e for k in ("greedy", "beams", "samples") for c in done[k].outputs for e in c.logprobs] + done["greedy"].prompt_logprobs[1:]
    strange = [p for e in entries for t, p in e.items() if t >= 54]
    assert strange and {p.decoded_token for p in strange} == {""}
    wide = make(text=False)
    out = serve(wide, {"0": (prompt(9), greedy(4, logit_bias={60: 100}))})["0"].outputs[0]
    assert (out.token_ids, out.text) == ([60] * 4, "")


# What is refused, and leaves nothing

@pytest.mark.parametrize("kw, said", [
    *((dict(logit_bias={i: 1.0}), rf"logit_bias: {i} is not an integer from 0 to 63") for i in (64, 10**9)),
    *((dict(stop_token_ids=[3, i]), rf"stop_token_ids: {i} is not an integer from 0 to 63") for i in (64, 10**9)),
    (dict(min_tokens=248, max_tokens=None), r"min_tokens = 248 exceeds the 247 tokens"), (dict(max_tokens=248), "max_tokens = 248")])
def test_what_the_model_cannot_do_is_named(make, defined, kw, said):
    engine = make()
    engine.add_request("first", prompt(9), greedy(6))
    engine.step()
    before = engine.num_requests, set(engine.requests), set(engine.scheduler.groups), engine.stats()
    for _ in range(2):
        with pytest.raises(ValueError, match=said): engine.add_request("0", prompt(9), SamplingParams(**kw))
    assert before == (engine.num_requests, set(engine.requests), set(engine.scheduler.groups), engine.stats())
    done = serve(engine, {"0": (prompt(9), greedy(6))})
    assert told(done["first"]) == told(done["0"]) == defined(prompt(9), greedy(6))


@pytest.mark.parametrize("kw", [dict(stop="a"), dict(stop=["a", "b"], n=3), dict(stop="a", max_tokens=0), dict(stop="a", max_tokens=0, prompt_logprobs=1)])
def test_stops_need_a_tokenizer(make, kw):
    engine = make(text=False)
    before = engine.num_requests
    with pytest.raises(ValueError, match="stop strings need a tokenizer"): engine.add_request("0", prompt(9), SamplingParams(**kw))
    assert before == engine.num_requests and not engine.has_unfinished()
    nothing_left(engine)
    assert serve(engine, {"0": (prompt(9), greedy(6))})["0"].outputs[0].token_ids


def test_generate_refuses_all_or_none(model):
    with LLM(model, num_blocks=32) as llm:
        with pytest.raises(ValueError, match="stop strings need a tokenizer"): llm.generate([prompt(9)] * 3, [greedy(3), greedy(3), greedy(3, stop="a")])
        assert llm.stats().steps == 0 and not llm.engine.has_unfinished()
        nothing_left(llm.engine)
        assert len(llm.generate([prompt(9)] * 2, greedy(3))) == 2


def test_a_bias_that_is_too_large_is_clamped(make):
    "SA-5: what it is asked with, 1000, is 100; and neighbours do not notice."
    assert SamplingParams(logit_bias={33: 1000, 3: -1e9}).logit_bias == {33: 100, 3: -100}
    done = serve(make(), {"a": (prompt(9), greedy(6)), "b": (prompt(9), greedy(6, logit_bias={33: 1000})), "c": (prompt(9), greedy(6, logit_bias={33: 100}))})
    assert done["b"].outputs[0].token_ids == done["c"].outputs[0].token_ids == [33] * 6 != done["a"].outputs[0].token_ids


# Memory of a control group

def group(folder, limit, used, inactive=None, names=("memory.max", "memory.current")):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used)): (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text("anon 1\nfile 900\n" + (f"inactive_file {inactive}\n" if inactive is not None else "") + "active_file 5\n")


@pytest.fixture
def tree(tmp_path):
    (own := tmp_path / "own").write_text("0::/a/b/c\n")
    return tmp_path / "cgroup", own


@pytest.mark.parametrize("limits, free", [
    ({"a/b/c": (1000, 300, 50)}, 750), ({"a/b/c": (1000, 300, None)}, 700), ({"a/b/c": ("max", 300, 0)}, float("inf")),
    ({"a/b/c": ("max", 300, 0), "a": (5000, 4000, 100)}, 1100), ({"a/b/c": (1000, 300, 0), "a/b": (900, 400, 0), "a": (5000, 100, 0)}, 500),
    ({"a/b/c": (1000, 300, 0), "": (640, 40, 0)}, 600), ({"a/b/c": (1000, 1300, 0)}, 0), ({"a/b/c": (1000, 1300, 400)}, 100),
    ({"a/x": (1, 1, 0), "a/b/c/d": (1, 1, 0)}, float("inf")), ({}, float("inf"))], ids=str)
def test_memory_of_a_control_group(tree, limits, free):
    "The tightest of its own limit and those above, not of its neighbours or children; cached files can be dropped."
    root, own = tree
    for name, numbers in limits.items(): group(root / name, *numbers)
    assert cgroup_memory(root, own) == free


def test_memory_of_a_control_group_of_version_1(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("12:cpuset:/\n4:memory:/docker/abc\n")
    assert cgroup_memory(root, own) == float("inf")
    group(root / "memory", 2000, 500, 100, ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    assert cgroup_memory(root, own) == 1600
    own.unlink()
    assert cgroup_memory(root, own) == 1600


def test_files_that_say_nothing(tree):
    root, own = tree
    group(root / "a/b/c", "", "x")
    group(root / "a/b", 900, 100)
    assert cgroup_memory(root, own) == 800
    (root / "a/b/memory.current").unlink()
    assert cgroup_memory(root, own) == float("inf")


def test_the_pool_respects_the_control_group(model, tree, monkeypatch):
    root, own = tree
    group(root / "a", 4_000_000, 1_000_000, 200_000)
    free = functools.partial(cgroup_memory, root, own)
    monkeypatch.setattr(pagedlm.engine, "cgroup_memory", free)
    cpu = torch.device("cpu")
    assert pagedlm.engine.available_memory(cpu) == free() == 3_200_000
    assert pool_size(None, 1000, 10**9, cpu) == 1280 and pool_size(None, 1000, 100, cpu) == 100 and pool_size(3200, 1000, 1, cpu) == 3200
    with pytest.raises(ValueError, match="num_blocks = 3,201 blocks of 1,000 bytes do not fit into the 3,200,000 bytes"): pool_size(3201, 1000, 1, cpu)
    block_bytes = Engine(model, num_blocks=8, num_host_blocks=0).runner.kv.bytes_per_block
    engine = Engine(model, max_model_len=8, max_num_seqs=10**6, preemption="recompute")
    assert engine.blocks.num_blocks == 1_280_000 // block_bytes
    with pytest.raises(ValueError, match="num_host_blocks"): Engine(model, num_blocks=8, num_host_blocks=3_200_000 // block_bytes + 1)
