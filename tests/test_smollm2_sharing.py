"The real model in float32: samples proven by a plain forward, beams equal to transformers', prefixes that change nothing."
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedlm import LLM, Engine, SamplingParams
from pagedlm.models import load_model, load_tokenizer, resolve_model

PROMPTS = {len(r["prompt"]): r["prompt"] for r in json.loads((Path(__file__).parent / "data" / "reference.json").read_text())}
LENGTHS = [32, 33, 47]      # L mod 16 is 0, 1, 15


def prompt(length): return PROMPTS[length] if length in PROMPTS else PROMPTS[100][:length]


@pytest.fixture(scope="module")
def model(): return load_model("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def hf(): return AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.float32).eval()


def samples(n=4, max_tokens=12, **kw):
    return SamplingParams(n=n, max_tokens=max_tokens, **{"seed": 7, "ignore_eos": True, "logprobs": 0, **kw})


def beams(width, max_tokens=16, **kw):
    return SamplingParams(n=width, max_tokens=max_tokens, use_beam_search=True, **{"ignore_eos": True, **kw})


def serve(engine, requests):
    done = {}
    for name, (tokens, params) in requests.items(): engine.add_request(name, tokens, params)
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        engine.blocks.check()
    assert engine.stats().used_blocks == len({b for pin in engine.scheduler.pins for b in engine.blocks.tables[pin].blocks})
    return done


def ids(out): return [c.token_ids for c in out.outputs]


@torch.no_grad()
def proven(hf, tokens, out):
    "Each choice's log-probabilities, ranks and total are those of one plain forward over prompt and answer."
    logits = hf(torch.tensor([tokens + c.token_ids for c in out.outputs])).logits[:, len(tokens) - 1:-1]
    for choice, lines in zip(out.outputs, logits.double().log_softmax(-1), strict=True):
        for line, token, entry in zip(lines, choice.token_ids, choice.logprobs, strict=True):
            p = entry[token]
            assert p.logprob == pytest.approx(line[token].item(), abs=1e-3)
            assert 1 + int((line > line[token] + 1e-3).sum()) <= p.rank <= int((line >= line[token] - 1e-3).sum())
        assert choice.cumulative_logprob == pytest.approx(sum(e[t].logprob for e, t in zip(choice.logprobs, choice.token_ids)), abs=1e-3)


@pytest.mark.parametrize("caching", [True, False])
def test_samples_are_proven_by_teacher_forcing(model, hf, caching):
    "Where they are cached, a second time with hits."
    engine = Engine(model, num_blocks=64, enable_prefix_caching=caching)
    requests = {str(n): (prompt(n), samples(max_tokens=8, seed=n)) for n in LENGTHS}
    done = serve(engine, requests)
    assert engine.stats().cow_copies == 0 + 3 + 3
    for name, (tokens, _) in requests.items():
        assert len({*map(tuple, ids(done[name]))}) == 4
        proven(hf, tokens, done[name])
    if not caching: return
    for name, out in serve(engine, requests).items():
        assert ids(out) == ids(done[name]) and out.num_cached_tokens == (int(name) - 1) // 16 * 16
        proven(hf, prompt(int(name)), out)


def test_samples_are_proven_after_preemptions(model, hf):
    engine = Engine(model, num_blocks=10, max_num_batched_tokens=24, preemption="recompute")
    done = serve(engine, {str(n): (prompt(n), samples(max_tokens=18, seed=n)) for n in LENGTHS})
    assert engine.stats().preemptions >= 2
    for name, out in done.items(): proven(hf, prompt(int(name)), out)


def theirs(hf, tokens, params):
    "transformers' hypotheses, best first: [(ids, score)]."
    out = hf.generate(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), do_sample=False, num_beams=params.width,
                      num_return_sequences=params.n, length_penalty=params.length_penalty, early_stopping=params.early_stopping,
                      eos_token_id=list(params.stop_token_ids) or None, pad_token_id=0, max_new_tokens=params.max_tokens,
                      return_dict_in_generate=True, output_scores=True)
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    return [(i[len(tokens):len(tokens) + k], s) for i, k, s in zip(out.sequences.tolist(), lengths, out.sequences_scores.tolist())]


@pytest.fixture(scope="module")
def searches(hf):
    "Searches of widths 2, 4 and 6, with ends (a comma, a full stop, a line break) and without: {name: (prompt, params, theirs)}."
    hf.generation_config.eos_token_id = hf.config.eos_token_id = None
    marks = [load_tokenizer("smollm2")(t)["input_ids"][0] for t in (",", ".", "\n")]
    out = {}
    for width, plain, ended, early, penalty in [(2, 33, 17, False, 1.0), (4, 47, 31, "never", 2.0), (6, 32, 64, True, 0.5)]:
        for n, params in [(plain, beams(width)), (ended, beams(width, stop_token_ids=marks, early_stopping=early, length_penalty=penalty))]:
            out[f"{width} of {n}"] = (prompt(n), params, theirs(hf, prompt(n), params))
    return out


@pytest.mark.parametrize("kw", [{"num_blocks": 128}, {"num_blocks": 20, "max_num_batched_tokens": 40}], ids=str)
def test_beams_equal_transformers(model, searches, kw):
    "All searches in one batch, beside samples and a greedy request; the small pool preempts."
    engine = Engine(model, **kw)
    others = {"s": (prompt(33), samples(3)), "g": (prompt(128), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))}
    done = serve(engine, others | {k: (tokens, params) for k, (tokens, params, _) in searches.items()})
    reasons = set()
    for name, (_, params, want) in searches.items():
        assert ids(done[name]) == [i for i, _ in want], name
        for choice, (_, score) in zip(done[name].outputs, want):
            assert choice.cumulative_logprob / len(choice.token_ids) ** params.length_penalty == pytest.approx(score, abs=1e-3)
            reasons.add(choice.finish_reason)
    assert reasons == {"stop", "length"}
    assert (engine.stats().preemptions >= 3) == (kw["num_blocks"] == 20)
    assert len({*map(tuple, ids(done["s"]))}) == 3


def test_a_pinned_text_changes_no_answer(model, hf):
    tokenizer, prefix = load_tokenizer("smollm2"), "The following are questions and short answers about the capitals of Europe.\n"
    texts = [prefix + f"Question: What is the capital of {c}?\nAnswer:" for c in ("France", "Italy", "Spain")]
    with LLM(model, tokenizer=tokenizer, num_blocks=64, enable_prefix_caching=False) as llm:
        params = [SamplingParams(temperature=0, max_tokens=6, logprobs=0), beams(3, 6, logprobs=0), samples(3, 6)]
        want = llm.generate(texts, params)
        pin = llm.pin_prefix(prefix)
        assert llm.stats().used_blocks == -(-pin.num_tokens // 16) and pin.num_tokens % 16
        for a, b in zip(llm.generate(texts, params), want):
            assert ids(a) == ids(b) and [c.text for c in a.outputs] == [c.text for c in b.outputs]
            assert (a.num_cached_tokens, b.num_cached_tokens) == (pin.num_tokens, 0)
            proven(hf, a.prompt_token_ids, a)
        llm.unpin_prefix(pin)
        assert "Paris" in want[0].outputs[0].text and llm.stats().used_blocks == 0
