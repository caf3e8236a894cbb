"The engine on a tiny random model (fp32): nothing that happens around a request changes its ids."
import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedlm import LLM, Engine, SamplingParams
from pagedlm.engine import tokens_at_most
from pagedlm.models import load_model, load_tokenizer
from pagedlm.scheduler import Sequence, blocks_at_most
from pagedlm.text import Detokenizer

VOCAB = 128
PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(n)] for i, n in enumerate([1, 3, 15, 16, 17, 40, 9, 64])]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256,
                         initializer_range=0.2, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return load_model(folder)


def greedy(n=24, **kw):
    return SamplingParams(temperature=0, max_tokens=n, **{"ignore_eos": True, **kw})


def run(engine, prompts, params):
    "Serve all together, checking the block tables after every step; ids by request."
    params = params if isinstance(params, list) else [params] * len(prompts)
    for i, (p, s) in enumerate(zip(prompts, params)): engine.add_request(str(i), p, s)
    return drain(engine)


def drain(engine):
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        engine.blocks.check()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not (engine.requests or engine.books.begun or engine.scheduler.has_unfinished)
    return done


def ids(done):
    return [done[k].outputs[0].token_ids for k in sorted(done, key=int)]


@pytest.fixture(scope="module")
def solo(model):
    "Each prompt alone in a large pool."
    return [ids(run(Engine(model, num_blocks=64), [p], greedy()))[0] for p in PROMPTS]


def test_the_fixture_sees_the_cache(model, solo):
    engine = Engine(model, num_blocks=64)
    engine.add_request("0", PROMPTS[4], greedy())
    engine.step()
    engine.runner.kv.data[:, :, engine.blocks.tables[0].blocks[0]] = 0
    assert ids(drain(engine)) != [solo[4]]


@pytest.mark.parametrize("slots, block_size, budget", [      # each pair of values
    (96, 3, 1), (1024, 16, 1), (96, 16, 15), (1024, 3, 15), (96, 3, 17), (1024, 16, 17), (96, 16, 512), (1024, 3, 512)])
def test_ids_equal_the_solo_run(model, solo, block_size, budget, slots):
    engine = Engine(model, block_size=block_size, num_blocks=-(-slots // block_size), max_num_batched_tokens=budget,
                    preemption="swap" if block_size == 3 else "recompute")
    assert ids(run(engine, PROMPTS, greedy())) == solo
    if slots == 96 and budget > 16: assert engine.stats().preemptions >= 3


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_seeded_samples_depend_on_the_seed_alone(model, preemption):
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=24, ignore_eos=True)
    other = SamplingParams(temperature=1.0, top_k=5, max_tokens=30, ignore_eos=True)
    alone = ids(run(Engine(model, num_blocks=64), [PROMPTS[4]], params))[0]
    tight = Engine(model, num_blocks=8, max_num_batched_tokens=16, preemption=preemption)   # 128 slots: preempts
    crowd = ids(run(tight, PROMPTS[5:7] + [PROMPTS[4]], [other, other, params]))
    assert tight.stats().preemptions > 0
    assert crowd[2] == alone


def test_unseeded_samples_differ_in_a_batch_and_repeat_in_a_rerun(model):
    params = SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True)
    twice = [ids(run(Engine(model, num_blocks=64, seed=s), [PROMPTS[3]] * 2, params)) for s in (3, 3, 4)]
    assert twice[0][0] != twice[0][1]
    assert twice[0] == twice[1] != twice[2]


def test_what_cannot_fit_is_refused_and_the_next_is_served(model, solo):
    engine = Engine(model, num_blocks=4)   # 64 slots: 65 tokens in all
    with pytest.raises(ValueError, match=r"60 prompt tokens and max_tokens = 24 make 84, and max_model_len is 65"):
        engine.add_request("big", [5] * 60, greedy())
    with pytest.raises(ValueError, match="70 tokens.*max_model_len = 65"): engine.add_request("longer", [5] * 70, greedy(1))
    assert not engine.has_unfinished()
    assert ids(run(engine, [PROMPTS[1]], greedy())) == [solo[1]]


def test_exactly_the_pool_is_served(model):
    engine = Engine(model, num_blocks=4)
    assert len(ids(run(engine, [[5] * 41], greedy(24)))[0]) == 24   # 41 + 24 - 1 = 64 slots
    assert engine.stats().peak_used_blocks == 4


def test_limits_at_construction(model):
    for kw in ({"block_size": 0}, {"block_size": -4}, {"num_blocks": 0}, {"max_num_seqs": True}, {"block_size": 1.5},
               {"max_num_batched_tokens": 0}, {"max_model_len": 0}):
        with pytest.raises(ValueError, match=next(iter(kw))): Engine(model, **{"num_blocks": 8, **kw})
    with pytest.raises(ValueError, match="257 exceeds the model's own limit of 256"): Engine(model, max_model_len=257)
    with pytest.raises(ValueError, match="needs 199 slots, and the pool has 128"):
        Engine(model, num_blocks=8, max_model_len=200)
    assert Engine(model, num_blocks=4, max_model_len=50).max_model_len == 50


def test_a_length_that_is_no_multiple_of_the_block(model):
    engine = Engine(model, num_blocks=8, max_model_len=50)
    assert len(ids(run(engine, [[5] * 49], greedy(1)))[0]) == 1


@pytest.mark.parametrize("prompt, message", [
    ("text", "no tokenizer"), ([], "empty"), ([VOCAB], "128"), ([-1], "-1"), ([1.5], "1.5"), ([True], "True"), (3, "int")])
def test_bad_prompts(model, prompt, message):
    engine = Engine(model, num_blocks=8)
    with pytest.raises(ValueError, match=message): engine.add_request("0", prompt, greedy())
    assert not engine.has_unfinished()


def test_numpy_ids_are_ids(model, solo):
    assert ids(run(Engine(model, num_blocks=64), [list(np.array(PROMPTS[2]))], greedy())) == [solo[2]]


def test_a_pool_that_memory_cannot_hold(model):
    with pytest.raises(ValueError, match="num_blocks = 1,000,000,000 blocks of 4,096 bytes"): Engine(model, num_blocks=10**9)


def test_max_tokens_none_and_zero(model):
    engine = Engine(model, num_blocks=64, max_model_len=40)
    done = run(engine, [PROMPTS[1], PROMPTS[2]], [greedy(None), greedy(0)])
    assert len(done["0"].outputs[0].token_ids) == 37 and done["0"].outputs[0].finish_reason == "length"
    assert done["1"].outputs[0].token_ids == [] and done["1"].outputs[0].finish_reason == "length"


def test_how_requests_stop(model, solo):
    third, first = solo[5][2], solo[5].index(solo[5][2])
    done = run(Engine(model, num_blocks=64), [PROMPTS[5]], greedy(stop_token_ids=[third]))
    out = done["0"].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (solo[5][:first + 1], "stop", third)
    with pytest.raises(ValueError, match="stop_token_ids"):
        Engine(model, num_blocks=64).add_request("0", PROMPTS[5], greedy(stop_token_ids=[VOCAB]))


def test_eos_stops_unless_ignored(model, solo, monkeypatch):
    token = solo[5][3]
    import dataclasses
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, eos_token_ids=(token, 9)))
    out = run(Engine(model, num_blocks=64), [PROMPTS[5]], greedy(ignore_eos=False))["0"].outputs[0]
    assert out.finish_reason == "stop" and out.stop_reason is None and out.token_ids[-1] == token
    assert ids(run(Engine(model, num_blocks=64), [PROMPTS[5]], greedy())) == [solo[5]]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_abort_in_every_state(model, solo, preemption):
    engine = Engine(model, num_blocks=6, max_num_batched_tokens=32, max_num_seqs=4, preemption=preemption)   # 96 slots
    for i, p in enumerate(PROMPTS): engine.add_request(str(i), p, greedy())
    seen, aborted = set(), set()
    while engine.has_unfinished():
        engine.step()
        for state in ("running", "waiting", "preempted"):
            queue = getattr(engine.scheduler, state)
            if queue and state not in seen:
                seen.add(state)
                aborted.add(rid := queue[-1].request_id)
                engine.abort(rid)
                engine.abort(rid)
        engine.abort("never was")
        engine.blocks.check()
        if len(seen) == 3: break
    done = drain(engine)
    engine.abort("0")
    assert seen == {"running", "waiting", "preempted"}
    for rid, out in done.items():
        if rid in aborted: assert out.outputs[0].finish_reason == "abort"
        else: assert out.outputs[0].token_ids == solo[int(rid)]


def test_an_id_in_use_is_refused_and_free_again_afterwards(model, solo):
    engine = Engine(model, num_blocks=64)
    engine.add_request("0", PROMPTS[1], greedy())
    with pytest.raises(ValueError, match="'0' is in use"): engine.add_request("0", PROMPTS[2], greedy())
    engine.step()
    engine.abort("0")
    engine.step()
    assert ids(run(engine, [PROMPTS[2]], greedy())) == [solo[2]]


class Broken:
    "A model that fails, or poisons logits, at one call."
    def __init__(self, model, at, spoil):
        self.model, self.calls, self.at, self.spoil = model, 0, at, spoil
        self.config, self.dtype, self.device = model.config, model.dtype, model.device

    def __call__(self, *args):
        self.calls += 1
        logits = self.model(*args)
        return self.spoil(logits) if self.calls == self.at else logits


def broken(model, at, spoil, **kw):
    engine = Engine(model, **kw)
    engine.runner.model = Broken(model, at, spoil)
    return engine


def test_a_row_of_nan_ends_that_request_alone(model, solo):
    def poison(logits):
        logits[1] = torch.nan
        return logits
    done = run(broken(model, 5, poison, num_blocks=64), PROMPTS[:3], greedy())
    assert "nan" in done["1"].error and done["1"].outputs[0].finish_reason == "error"
    assert [done[k].outputs[0].token_ids for k in "02"] == [solo[0], solo[2]]


def test_a_failing_model_ends_its_batch_visibly_and_no_more(model, solo):
    def fail(logits): raise RuntimeError("out of memory")
    engine = broken(model, 3, fail, num_blocks=64, max_num_seqs=2)
    done = run(engine, PROMPTS[:3], greedy())
    assert all("out of memory" in done[k].error for k in "01")
    assert done["2"].outputs[0].token_ids == solo[2]


def test_generate_takes_one_or_many(model, solo):
    with LLM(model, num_blocks=64) as llm:
        assert llm.generate(PROMPTS[3], greedy())[0].outputs[0].token_ids == solo[3]
        outs = llm.generate(PROMPTS, [greedy(n + 1) for n in range(len(PROMPTS))])
        assert [o.outputs[0].token_ids for o in outs] == [s[:n + 1] for n, s in enumerate(solo)]
        assert llm.generate([]) == []
        assert llm.stats().generation_tokens == 24 + sum(range(1, 9))
        assert llm.stats().prompt_tokens == 16 + sum(map(len, PROMPTS))


def test_generate_refuses_before_it_starts(model):
    with LLM(model, num_blocks=8) as llm:
        for prompts, params in [([PROMPTS[1], [VOCAB]], greedy()), ([PROMPTS[1]], [greedy(), greedy()]),
                                ([PROMPTS[1], []], greedy()), ([PROMPTS[1]], [{"temperature": 0}])]:
            with pytest.raises(ValueError): llm.generate(prompts, params)
            assert llm.stats().steps == 0 and not llm.engine.has_unfinished()


def test_an_output_is_a_copy(model, solo):
    engine = Engine(model, num_blocks=64)
    engine.add_request("0", PROMPTS[5], greedy())
    for _ in range(3):
        out = engine.step()[0]
        out.prompt_token_ids.clear()
        out.outputs[0].token_ids.clear()
    assert ids(drain(engine)) == [solo[5]]


def test_generate_leaves_the_requests_of_others_alone(model, solo):
    with LLM(model, num_blocks=64) as llm:
        llm.engine.add_request("mine", PROMPTS[1], greedy())
        with pytest.raises(RuntimeError, match="still has requests"): llm.generate(PROMPTS[2], greedy())
        assert drain(llm.engine)["mine"].outputs[0].token_ids == solo[1]
        assert llm.generate(PROMPTS[2], greedy())[0].outputs[0].token_ids == solo[2]


@pytest.mark.parametrize("messages", [None, "hi", ["hi"], {"role": "user", "content": "hi"}, [{"role": "user"}], [],
                                      [{"role": "user", "content": None}], [{"role": "user", "content": "hi", "tool_calls": []}]])
def test_bad_messages(model, tokenizer, messages):
    with LLM(model, tokenizer=tokenizer, num_blocks=8) as llm:
        if messages == []: assert llm.chat([]) == []   # an empty batch
        else:
            with pytest.raises(ValueError): llm.chat(messages)


@pytest.mark.parametrize("prompts", [None, 5, 1.5, object(), {"a": 1}, [None], [[1.5]]])
def test_bad_batches(model, prompts):
    with LLM(model, num_blocks=8) as llm:
        with pytest.raises(ValueError): llm.generate(prompts, greedy())
        with pytest.raises(ValueError, match="None"): llm.generate([PROMPTS[1]] * 2, [greedy(), None])


def test_arguments_that_are_not_what_they_should_be(model):
    for name in (None, 5, [], ""):
        with pytest.raises(ValueError, match="a model is"): Engine(name)
    with pytest.raises(ValueError, match="request id"): Engine(model, num_blocks=8).add_request(5, [1], greedy())
    with pytest.raises(ValueError, match="seed"): Engine(model, num_blocks=8, seed="x")
    with pytest.raises(ValueError, match="int8"): Engine(model, num_blocks=8, dtype="int8")


def test_more_places_than_blocks(model, solo):
    assert ids(run(Engine(model, num_blocks=4, max_num_seqs=10**9), [PROMPTS[1]], greedy())) == [solo[1]]


def test_an_interrupted_generate_leaves_nothing(model, solo):
    def interrupt(logits): raise KeyboardInterrupt
    with LLM(model, num_blocks=64) as llm:
        llm.engine.runner.model = Broken(model, 3, interrupt)
        with pytest.raises(KeyboardInterrupt): llm.generate(PROMPTS[:3], greedy())
        assert not llm.engine.has_unfinished() and llm.stats().used_blocks == 0
        assert llm.generate(PROMPTS[3], greedy())[0].outputs[0].token_ids == solo[3]


def test_close_gives_the_memory_back(model):
    llm = LLM(model, num_blocks=64)
    llm.generate(PROMPTS[1], greedy(2))
    pool = weakref.ref(llm.engine.runner.kv)
    llm.close()
    llm.close()
    gc.collect()
    assert pool() is None
    with pytest.raises(RuntimeError, match="closed"): llm.generate(PROMPTS[1])


def test_close_with_requests_in_every_state(model):
    engine = Engine(model, num_blocks=64, max_num_seqs=1)
    for i in range(3): engine.add_request(str(i), PROMPTS[i], greedy())
    engine.step()
    engine.abort("0")
    engine.close()
    assert not engine.has_unfinished() and engine.stats().used_blocks == 0


def test_an_interrupted_step_leaves_the_engine_whole(model, solo):
    def interrupt(logits): raise KeyboardInterrupt
    engine = broken(model, 3, interrupt, num_blocks=64, max_num_seqs=2)
    for i in range(3): engine.add_request(str(i), PROMPTS[i], greedy())
    with pytest.raises(KeyboardInterrupt):
        while True: engine.step()
    done = drain(engine)
    assert done["0"].error and done["1"].error and done["2"].outputs[0].token_ids == solo[2]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2")


def test_text_that_is_no_text(model, tokenizer):
    engine = Engine(model, tokenizer=tokenizer, num_blocks=8)
    with pytest.raises(ValueError, match="not valid Unicode"): engine.add_request("0", "bad \udce9", greedy())


def test_a_template_that_refuses(model, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system role here') }}")
    with pytest.raises(ValueError, match="template refuses these messages: no system role here"):
        Engine(model, tokenizer=tokenizer, num_blocks=8).prompts.encode_chat([{"role": "system", "content": "hi"}])


def test_threads_that_share_an_llm(model, solo):
    with LLM(model, num_blocks=64) as llm, ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda p: llm.generate(p, greedy())[0].outputs[0].token_ids, PROMPTS))
        assert outs == solo and llm.stats().used_blocks == 0


@pytest.mark.parametrize("text", ["plain words", " leading and trailing ", "naïve café", "日本語のテキスト", "สวัสดีครับ",
                                  "👩‍👩‍👧‍👦 and 🏳️‍🌈", "e\u0301a\u0308", "tabs\tand\n\nlines", "\ufffd real \ufffd", "𝔘𝔫𝔦"])
def test_text_comes_whole(tokenizer, text):
    ids, d = tokenizer(text)["input_ids"], Detokenizer(tokenizer)
    pieces = [d.add(t) for t in ids]
    assert "".join(pieces) + d.finish() == tokenizer.decode(ids)
    if "\ufffd" not in text: assert not any("\ufffd" in p for p in pieces)


def test_text_of_any_ids(tokenizer):
    g = torch.Generator().manual_seed(0)
    for n in range(1, 60):
        ids, d = torch.randint(len(tokenizer), (n,), generator=g).tolist(), Detokenizer(tokenizer)
        assert "".join(map(d.add, ids)) + d.finish() == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_unfinished_character_shows_at_the_end(tokenizer):
    ids, d = tokenizer("🦉")["input_ids"][:-1], Detokenizer(tokenizer)
    assert "".join(map(d.add, ids)) == "" and set(d.finish()) == {"\ufffd"}


def test_a_failing_tokenizer_ends_that_request_alone(model, solo):
    class Tokenizer:
        def __len__(self): return VOCAB
        def decode(self, ids, skip_special_tokens):
            if ids[-1] == solo[1][4]: raise UnicodeError("no such piece")
            return "x" * len(ids)
    done = run(Engine(model, tokenizer=Tokenizer(), num_blocks=64), PROMPTS[:3], greedy())
    assert "no such piece" in done["1"].error
    others = [k for k in "02" if solo[1][4] not in solo[int(k)]]
    assert others and all(done[k].outputs[0].token_ids == solo[int(k)] for k in others)


def test_ids_without_a_token_are_never_sampled(model):
    class Short:
        def __len__(self): return 100
        def decode(self, ids, skip_special_tokens): return "x" * len(ids)
    done = run(Engine(model, tokenizer=Short(), num_blocks=64), [[5, 6, 7]], SamplingParams(
        temperature=2.0, max_tokens=100, ignore_eos=True))
    assert max(done["0"].outputs[0].token_ids) < 100


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_tokens_at_most_is_what_just_fits(size):
    "`max_tokens=None` with several sequences: the most that the scheduler would accept, if that is more than one."
    for num_blocks, n, width in itertools.product(range(1, 30, 2), range(1, 50), (1, 2, 3)):
        most = tokens_at_most(n, width, num_blocks, size)
        need = [blocks_at_most(Sequence(0, "A", [0] * n, m, width), size) for m in (most, most + 1)]
        assert need[1] > num_blocks and (need[0] <= num_blocks or most == 1)



@pytest.mark.parametrize("max_tokens", [0, 8])
@pytest.mark.parametrize("kind", [dict(n=10**9), dict(best_of=10**9), dict(n=10**9, use_beam_search=True)])
def test_a_billion_samples_are_refused_at_once(model, kind, max_tokens):
    with LLM(model, num_blocks=64) as llm:
        with pytest.raises(ValueError, match="1000000000 sequences.*max_num_seqs is 64"):
            llm.generate(PROMPTS[3], SamplingParams(max_tokens=max_tokens, **kind))
        assert llm.stats().free_blocks == 64 and not llm.engine.requests
