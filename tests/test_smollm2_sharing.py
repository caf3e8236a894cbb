"The real model in float32: samples proven by a plain forward, beams equal to transformers', prefixes that change nothing."
import json
from pathlib import Path

import pytest
import torch

from pagedlm import LLM, Engine, SamplingParams
from pagedlm.models import load_tokenizer
from reference import search

PROMPTS = {len(r["prompt"]): r["prompt"] for r in json.loads((Path(__file__).parent / "data" / "reference.json").read_text())}
LENGTHS = [32, 33, 47]      # L mod 16 is 0, 1, 15


def prompt(length): return PROMPTS[length] if length in PROMPTS else PROMPTS[100][:length]


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


def test_samples_are_proven_by_teacher_forcing(smollm2, smollm2_of_transformers):
    "And a second time, with hits."
    engine = Engine(smollm2, num_blocks=64)
    requests = {str(n): (prompt(n), samples(max_tokens=8, seed=n)) for n in LENGTHS}
    done = serve(engine, requests)
    assert engine.stats().cow_copies == 0 + 3 + 3
    for name, (tokens, _) in requests.items():
        assert len({*map(tuple, ids(done[name]))}) == 4
        proven(smollm2_of_transformers, tokens, done[name])
    for name, out in serve(engine, requests).items():
        assert ids(out) == ids(done[name]) and out.num_cached_tokens == (int(name) - 1) // 16 * 16


def test_samples_are_proven_after_preemptions(smollm2, smollm2_of_transformers):
    engine = Engine(smollm2, num_blocks=8, max_num_batched_tokens=24, preemption="recompute", enable_prefix_caching=False)
    done = serve(engine, {str(n): (prompt(n), samples(3, max_tokens=17, seed=n)) for n in LENGTHS})
    assert engine.stats().preemptions >= 2
    for name, out in done.items(): proven(smollm2_of_transformers, prompt(int(name)), out)


SEARCHES = {f"{r['params']['n']} of {len(r['prompt'])}": (r["prompt"], beams(r["params"].pop("n"), **r["params"]), r["answers"])
            for r in json.loads((Path(__file__).parent / "data" / "beams.json").read_text())}


def test_the_searches_are_what_transformers_says(smollm2_of_transformers):
    "One that ends early, here again."
    tokens, params, answers = SEARCHES["2 of 17"]
    again = search(smollm2_of_transformers, tokens, params.n, list(params.stop_token_ids))
    assert [i for i, _ in again] == [i for i, _ in answers]
    assert [s for _, s in again] == pytest.approx([s for _, s in answers], abs=1e-3)


@pytest.mark.parametrize("kw", [{"num_blocks": 128}, {"num_blocks": 20, "max_num_batched_tokens": 40}], ids=str)
def test_beams_equal_transformers(smollm2, kw):
    "All searches in one batch, beside samples and a greedy request; the small pool preempts."
    engine = Engine(smollm2, **kw)
    others = {"s": (prompt(33), samples(3)), "g": (prompt(128), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))}
    done = serve(engine, others | {k: (tokens, params) for k, (tokens, params, _) in SEARCHES.items()})
    reasons = set()
    for name, (_, params, want) in SEARCHES.items():
        assert ids(done[name]) == [i for i, _ in want], name
        for choice, (_, score) in zip(done[name].outputs, want):
            assert choice.cumulative_logprob / len(choice.token_ids) ** params.length_penalty == pytest.approx(score, abs=1e-3)
            reasons.add(choice.finish_reason)
    assert reasons == {"stop", "length"}
    assert (engine.stats().preemptions >= 3) == (kw["num_blocks"] == 20)
    assert len({*map(tuple, ids(done["s"]))}) == 3


def test_a_pinned_text_changes_no_answer(smollm2, smollm2_of_transformers):
    tokenizer, prefix = load_tokenizer("smollm2"), "The following are questions and short answers about the capitals of Europe.\n"
    texts = [prefix + f"Question: What is the capital of {c}?\nAnswer:" for c in ("France", "Italy", "Spain")]
    with LLM(smollm2, tokenizer=tokenizer, num_blocks=64, enable_prefix_caching=False) as llm:
        params = [SamplingParams(temperature=0, max_tokens=6, logprobs=0), beams(3, 6, logprobs=0), samples(3, 6)]
        want = llm.generate(texts, params)
        pin = llm.pin_prefix(prefix)
        assert llm.stats().used_blocks == -(-pin.num_tokens // 16) and pin.num_tokens % 16
        for a, b in zip(llm.generate(texts, params), want):
            assert ids(a) == ids(b) and [c.text for c in a.outputs] == [c.text for c in b.outputs]
            assert (a.num_cached_tokens, b.num_cached_tokens) == (pin.num_tokens, 0)
            proven(smollm2_of_transformers, a.prompt_token_ids, a)
        llm.unpin_prefix(pin)
        assert "Paris" in want[0].outputs[0].text and llm.stats().used_blocks == 0
