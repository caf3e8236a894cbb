"Samples, beams and prefixes in the engine, on a tiny random model (fp32): nothing that is shared changes an answer."
import functools
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedlm import LLM, Engine, SamplingParams
from pagedlm.models import load_model
from pagedlm.sampling import make_stream

VOCAB, EOS = 128, 1
LENGTHS = [32, 33, 47]     # of prompts: L mod 16 is 0, 1, 15
EARLY = [False, True, "never"]
EVERY_EIGHTH = tuple(range(3, VOCAB, 8))


def prompt(length, k=0): return [(7 * k + 5 * j + j * j) % VOCAB for j in range(length)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256,
                         initializer_range=0.2, bos_token_id=0, eos_token_id=EOS, tie_word_embeddings=False)
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder): return load_model(folder)


@pytest.fixture(scope="module")
def hf(folder):
    hf = LlamaForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    hf.generation_config.eos_token_id = hf.config.eos_token_id = None
    return hf


# Driving an engine

def make(model, num_blocks=128, **kw):
    "An engine whose pool holds NaN until it is written: reading what is not computed shows."
    engine = Engine(model, num_blocks=num_blocks, **kw)
    engine.runner.kv.data.fill_(torch.nan)
    return engine


def check(engine):
    "Counts agree, only live sequences and pins have blocks, and a search has a table for each live beam and no other."
    blocks, scheduler = engine.blocks, engine.scheduler
    blocks.check()
    held = {b for table in blocks.tables.values() for b in table.blocks}
    assert blocks.num_used == len(held) and len(blocks.cache.entries) <= blocks.num_blocks
    assert scheduler.pins.keys() <= blocks.tables.keys() <= scheduler.sequences.keys() | scheduler.pins.keys()
    for r in engine.requests.values():
        if r.beams and not r.ended:
            assert [s.output for s in r.seq.group.seqs] == [h.token_ids for h in r.beams.live] if r.beams.live[0].token_ids else 1
        for c in r.choices if not r.ended else ():
            assert not (c.finish_reason and c.seq.seq_id in blocks.tables)


def add(engine, requests):
    for name, (ids, params, *salt) in requests.items():
        engine.add_request(name, ids, params, cache_salt=salt[0] if salt else None)


def drain(engine, pinned=0):
    "Step to the end, with a check after each; the last outputs, by request."
    done = {}
    while engine.has_unfinished():
        for out in engine.step():
            assert out.request_id not in done
            if out.finished: done[out.request_id] = out
        check(engine)
    assert engine.blocks.num_free + pinned == engine.blocks.num_blocks and engine.stats().used_blocks == pinned
    assert not (engine.requests or engine.books.begun or engine.scheduler.has_unfinished)
    return done


def serve(engine, requests, pinned=0):
    add(engine, requests)
    return drain(engine, pinned)


def ids(out): return [c.token_ids for c in out.outputs]


def totals(out): return [c.cumulative_logprob for c in out.outputs]


def same(out, want, tolerance=1e-4):
    "The same ids and reasons, and cumulative log-probabilities that are equal but for rounding."
    assert out.error is None and ids(out) == ids(want)
    assert [(c.index, c.finish_reason, c.stop_reason) for c in out.outputs] == [
        (c.index, c.finish_reason, c.stop_reason) for c in want.outputs]
    if totals(want)[0] is not None: assert totals(out) == pytest.approx(totals(want), abs=tolerance)


def greedy(max_tokens=24, **kw): return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **kw})


def samples(n=4, max_tokens=20, **kw):
    return SamplingParams(n=n, max_tokens=max_tokens, **{"seed": 7, "ignore_eos": True, "logprobs": 0, **kw})


def beams(width, n=None, max_tokens=12, **kw):
    return SamplingParams(n=n or width, best_of=width, max_tokens=max_tokens, use_beam_search=True, **{"ignore_eos": True, **kw})


@pytest.fixture(scope="module")
def alone(model):
    "What a request answers alone: in a large pool, without caching."
    @functools.lru_cache(None)
    def run(ids, params): return serve(make(model, enable_prefix_caching=False), {"0": (list(ids), params)})["0"]
    return lambda ids, params: run(tuple(ids), params)


@pytest.mark.parametrize("params", [samples(), beams(4)], ids=["samples", "beams"])
@pytest.mark.parametrize("own", [True, False])
def test_the_fixture_sees_the_cache(model, alone, params, own):
    "Wiping the one block that all share, or those that each has alone, changes what comes."
    engine = make(model)
    engine.add_request("0", prompt(33), params)
    for _ in range(3): engine.step()
    for table in engine.blocks.tables.values(): engine.runner.kv.data[:, :, table.blocks[-1 if own else 0]] = 0
    assert ids(drain(engine)["0"]) != ids(alone(prompt(33), params))


# Parallel sampling

def test_a_seed_gives_a_list_of_different_choices_twice(model):
    "FK-1: n = 8, temperature 1.5."
    params = samples(8, temperature=1.5)
    a, b = (serve(make(model), {"0": (prompt(17), params)})["0"] for _ in range(2))
    assert ids(a) == ids(b) and len({*map(tuple, ids(a))}) == 8
    assert [c.index for c in a.outputs] == [*range(8)]


def test_without_a_seed_equal_prompts_differ_and_a_rerun_repeats(model):
    requests = {k: (prompt(17), samples(3, seed=None)) for k in "ab"}
    first, again, other = (serve(make(model, seed=s), requests) for s in (3, 3, 4))
    assert len({tuple(i) for k in "ab" for i in ids(first[k])}) == 6
    assert [ids(first[k]) for k in "ab"] == [ids(again[k]) for k in "ab"] != [ids(other[k]) for k in "ab"]


@pytest.mark.parametrize("seed", [7, None])
def test_each_choice_equals_a_run_of_one_with_its_stream(model, seed):
    params = samples(4, seed=seed)
    out = serve(make(model, seed=5), {"0": (prompt(33), params)})["0"]
    for i, choice in enumerate(out.outputs):
        engine = make(model, seed=5, enable_prefix_caching=False)
        engine.add_request("0", prompt(33), replace(params, n=1))
        if i: engine.requests["0"].choices[0].stream = make_stream(params, 5, 0, i)
        one = drain(engine)["0"].outputs[0]
        assert one.token_ids == choice.token_ids
        assert one.cumulative_logprob == pytest.approx(choice.cumulative_logprob, abs=1e-4)


COMPANY = {"a": (prompt(15, 1), greedy(30)), "b": (prompt(40, 2), samples(3, seed=9, temperature=0.7, top_p=0.9)),
           "0": (prompt(33), samples()), "c": (prompt(64, 3), greedy(17)), "d": (prompt(3, 4), samples(2, seed=1, max_tokens=40)),
           "e": (prompt(33), samples(4, seed=8))}


@pytest.mark.parametrize("slots, block_size, budget, caching, preemption", [
    (176, 16, 17, True, "recompute"), (176, 16, 512, False, "swap"), (176, 3, 17, False, "recompute"), (176, 3, 17, False, "swap"),
    (176, 1, 512, True, "swap"), (176, 1, 512, True, "recompute"), (120, 3, 4, True, "recompute"), (120, 3, 4, True, "swap"),
    (2048, 3, 4, True, "recompute"), (2048, 16, 4, False, "swap"), (2048, 16, 512, True, "recompute")])
def test_samples_do_not_depend_on_batch_chunks_blocks_or_preemption(model, alone, slots, block_size, budget, caching, preemption):
    engine = make(model, num_blocks=slots // block_size, block_size=block_size, max_num_batched_tokens=budget,
                  enable_prefix_caching=caching, preemption=preemption)
    done = serve(engine, COMPANY)
    for name, request in COMPANY.items(): same(done[name], alone(*request))
    preemptions = engine.stats().preemptions
    assert preemptions == 0 if slots == 2048 else preemptions >= (3 if budget > 4 else 1)


@pytest.mark.parametrize("n, length, caching", [
    (n, length, (i + j) % 2 == 0) for i, n in enumerate((2, 4)) for j, length in enumerate([*LENGTHS, 16, 17, 1])])
def test_a_shared_last_block_is_copied_by_all_but_one(model, length, n, caching):
    engine = make(model, enable_prefix_caching=caching)
    out = serve(engine, {"0": (prompt(length), samples(n))})["0"]
    assert len(ids(out)) == n
    assert engine.stats().cow_copies == (n - 1 if length % 16 else 0)
    again = serve(engine, {"0": (prompt(length), samples(n))})["0"]
    same(again, out)
    assert again.num_cached_tokens == ((length - 1) // 16 * 16 if caching else 0)
    assert engine.stats().cow_copies == 2 * (n - 1 if length % 16 else 0)


def test_only_those_who_write_a_second_token_copy(model, alone):
    "Choices that end with their first token hold the block no longer."
    first = Counter(i[0] for i in ids(alone(prompt(33), samples(6))))
    token, times = first.most_common()[-1]
    engine = make(model)
    out = serve(engine, {"0": (prompt(33), samples(6, stop_token_ids=[token]))})["0"]
    assert sum(c.finish_reason == "stop" and len(c.token_ids) == 1 for c in out.outputs) == times
    assert 0 < times < 5 and engine.stats().cow_copies == 6 - times - 1


def test_the_prompt_is_computed_once(model):
    engine = make(model, enable_prefix_caching=False)
    with engine.record() as recording: serve(engine, {"0": (prompt(33), samples(4, max_tokens=5))})
    assert [p.num_tokens for p in recording.plans] == [33, 4, 4, 4, 4]
    s = engine.stats()
    assert (s.prompt_tokens, s.generation_tokens, s.peak_used_blocks) == (33, 20, 2 + 4)


def test_one_choice_stops_and_the_others_go_on(model, alone):
    whole = ids(alone(prompt(33), samples()))
    token = next(t for t in whole[1][3:] if t not in whole[0] + whole[2])
    at = whole[1].index(token)
    stop = samples(stop_token_ids=[token])
    engine = make(model)
    seen = []
    engine.add_request("0", prompt(33), stop)
    while engine.has_unfinished():
        out, = engine.step()
        check(engine)
        seen.append([len(i) for i in ids(out)])
        assert len(out.outputs) == 4
    assert out.outputs[1].token_ids == whole[1][:at + 1]
    assert (out.outputs[1].finish_reason, out.outputs[1].stop_reason) == ("stop", token)
    for k in (0, 2): assert (ids(out)[k], out.outputs[k].finish_reason) == (whole[k], "length")
    assert seen[at + 1][0] == at + 2 and seen[at + 1][1] == at + 1     # reported while the others grow
    same(serve(make(model, num_blocks=10, max_num_batched_tokens=4), {"0": (prompt(33), stop)})["0"], out)


@pytest.mark.parametrize("n, best_of", [(1, 1), (4, 4), (2, 5)])
def test_zero_and_one_token(model, alone, n, best_of):
    params = samples(n, best_of=best_of, max_tokens=1)
    engine = make(model)
    done = serve(engine, {"0": (prompt(33), params), "none": (prompt(33), replace(params, max_tokens=0))})
    assert [(c.index, c.token_ids, c.finish_reason) for c in done["none"].outputs] == [(i, [], "length") for i in range(n)]
    every = alone(prompt(33), samples(best_of, max_tokens=1))
    best = sorted(every.outputs, key=lambda c: -c.cumulative_logprob)[:n] if best_of > n else every.outputs
    assert ids(done["0"]) == [c.token_ids for c in best]
    assert {c.finish_reason for c in done["0"].outputs} == {"length"} and engine.stats().cow_copies == 0


# Log-probabilities, by teacher forcing

@torch.no_grad()
def forced(hf, prompt, ids):
    "Log-probabilities [len(ids), VOCAB] of what may stand at each place, from one plain forward over all of it."
    logits = hf(torch.tensor([prompt + ids])).logits[0]
    return logits[len(prompt) - 1:-1].double().log_softmax(-1)


def proven(hf, prompt, choice, num_top=0, tolerance=1e-4):
    "The reported log-probabilities and ranks are those of a plain forward; the total is their sum."
    want = forced(hf, prompt, choice.token_ids)
    assert len(choice.logprobs) == len(choice.token_ids) == len(want)
    for line, token, entry in zip(want.tolist(), choice.token_ids, choice.logprobs):
        assert next(iter(entry)) == token and num_top <= len(entry) <= num_top + 1
        for t, p in entry.items():
            assert p.logprob == pytest.approx(line[t], abs=tolerance)
            least = 1 + sum(x > line[t] + tolerance for x in line)
            assert least <= p.rank <= sum(x >= line[t] - tolerance for x in line)
        if num_top: assert {p.rank for p in entry.values()} >= {*range(1, num_top + 1)}
    assert choice.cumulative_logprob == pytest.approx(sum(e[t].logprob for e, t in zip(choice.logprobs, choice.token_ids)), abs=1e-5)
    assert choice.cumulative_logprob == pytest.approx(want.gather(-1, torch.tensor(choice.token_ids)[:, None]).sum().item(),
                                                      abs=tolerance * len(want))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_samples_are_proven_by_teacher_forcing(model, hf, length, caching):
    engine = make(model, enable_prefix_caching=caching)
    for _ in range(2):      # the second time with hits, where there are any
        out = serve(engine, {"0": (prompt(length), samples(logprobs=5))})["0"]
        for choice in out.outputs: proven(hf, prompt(length), choice, 5)
    assert out.num_cached_tokens == ((length - 1) // 16 * 16 if caching else 0)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_samples_are_proven_after_preemptions(model, hf, block_size, caching, preemption):
    engine = make(model, num_blocks={3: 52, 16: 14}[block_size], block_size=block_size, max_num_batched_tokens=20,
                  enable_prefix_caching=caching, preemption=preemption)
    done = serve(engine, {str(n): (prompt(n, n), samples(max_tokens=24, seed=n)) for n in LENGTHS})
    assert engine.stats().preemptions >= 3
    for n in LENGTHS:
        for choice in done[str(n)].outputs: proven(hf, prompt(n, n), choice)


def test_beams_and_greedy_are_proven_too(model, hf):
    requests = {"b": (prompt(33), beams(4, logprobs=3, ignore_eos=False)), "g": (prompt(47), greedy(20, logprobs=3, n=2))}
    done = serve(make(model), requests)
    for name, (tokens, _) in requests.items():
        for choice in done[name].outputs: proven(hf, tokens, choice, 3)


class Short:
    "A tokenizer that has no text for the last ids."
    def __len__(self): return 100
    def decode(self, ids, skip_special_tokens=True): return "x" * len(ids)


@pytest.mark.parametrize("params", [samples(temperature=1.5), greedy(12, logprobs=0), beams(3, logprobs=0)], ids=["samples", "greedy", "beams"])
def test_log_probabilities_are_raw_where_ids_have_no_text(model, hf, params):
    "Ids without a text never come; what the others are worth is what the model said."
    out = serve(make(model, tokenizer=Short()), {"0": (prompt(33), params)})["0"]
    for choice in out.outputs:
        assert max(choice.token_ids) < 100
        proven(hf, prompt(33), choice)


# best_of, and greedy

@pytest.mark.parametrize("tight", [False, True])
def test_best_of_gives_the_best_by_mean_logprob(model, alone, tight):
    stop = dict(seed=8, stop_token_ids=EVERY_EIGHTH[::4])       # different lengths
    every = alone(prompt(33), samples(6, **stop))
    assert len({len(i) for i in ids(every)}) > 2
    best = sorted(every.outputs, key=lambda c: -c.cumulative_logprob / len(c.token_ids))[:2]
    assert best != sorted(every.outputs, key=lambda c: -c.cumulative_logprob)[:2]
    engine = make(model, num_blocks=14 if tight else 128)
    add(engine, {"1": (prompt(40, 2), samples(3, max_tokens=40)), "2": (prompt(60, 3), greedy(40)), "0": (prompt(33), samples(2, best_of=6, **stop, logprobs=None))})
    told = []
    while "0" in engine.requests: told += [o for o in engine.step() if o.request_id == "0"]
    drain(engine)
    assert len(told) == 1 and told[0].finished
    assert [(c.index, c.token_ids, c.finish_reason) for c in told[0].outputs] == [
        (i, c.token_ids, c.finish_reason) for i, c in enumerate(best)]
    assert totals(told[0]) == pytest.approx([c.cumulative_logprob for c in best], abs=1e-4)
    assert all(c.logprobs is None for c in told[0].outputs)
    if tight: assert engine.stats().preemptions > 0
    else: assert engine.stats().generation_tokens == sum(map(len, ids(every))) + 4 * 40


def test_best_of_without_a_choice_is_n(alone):
    same(alone(prompt(33), samples(3, best_of=3)), alone(prompt(33), samples(3)))
    with pytest.raises(ValueError, match="best_of"): samples(3, best_of=2)


@pytest.mark.parametrize("best_of", [None, 5])
def test_greedy_choices_are_one(model, alone, best_of):
    engine = make(model)
    out = serve(engine, {"0": (prompt(33), greedy(n=3, best_of=best_of))})["0"]
    assert ids(out) == ids(alone(prompt(33), greedy())) * 3 and [c.index for c in out.outputs] == [0, 1, 2]
    s = engine.stats()
    assert s.cow_copies == 0 and s.peak_used_blocks == -(-(33 + 23) // 16) and s.memory_saved == 0


# Beams

@pytest.fixture(scope="module")
def theirs(hf):
    "(ids, total) of the hypotheses of transformers' generate, best first."
    @functools.lru_cache(None)
    def run(tokens, width, n, max_tokens, eos_ids, length_penalty, early_stopping):
        out = hf.generate(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), do_sample=False, num_beams=width,
                          num_return_sequences=n, length_penalty=length_penalty, early_stopping=early_stopping,
                          eos_token_id=list(eos_ids) or None, pad_token_id=0, max_new_tokens=max_tokens,
                          return_dict_in_generate=True, output_scores=True)
        lengths = (out.beam_indices >= 0).sum(-1).tolist()
        return [(i[len(tokens):len(tokens) + k], s) for i, k, s in zip(out.sequences.tolist(), lengths, out.sequences_scores.tolist())]
    def of(tokens, p):
        ends = {*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))}
        return run(tuple(tokens), p.width, p.n, p.max_tokens, tuple(sorted(ends)), p.length_penalty, p.early_stopping)
    return of


def like_theirs(out, params, want):
    "Ids and scores of transformers; why each ended."
    assert out.error is None and ids(out) == [i for i, _ in want]
    for choice, (tokens, score) in zip(out.outputs, want):
        assert choice.cumulative_logprob / len(tokens) ** params.length_penalty == pytest.approx(score, abs=1e-3)
        mine = tokens[-1] in params.stop_token_ids
        stopped = mine or (tokens[-1] == EOS and not params.ignore_eos)
        assert (choice.finish_reason, choice.stop_reason) == ("stop" if stopped else "length", tokens[-1] if mine else None)


def searches(width):
    "Searches of one width: no end, one ending token, many; each early stop and several penalties; n below the width."
    out = {}
    for i, (early, penalty) in enumerate((e, p) for e in EARLY for p in (-1.0, 0.0, 1.0, 2.0)):
        ends = [{}, {"ignore_eos": False}, {"stop_token_ids": EVERY_EIGHTH}, {"stop_token_ids": EVERY_EIGHTH}][i % 4]
        out[f"{early} {penalty}"] = (prompt(30 + i, i + width), beams(width, max(1, width - i % 3), early_stopping=early,
                                                                    length_penalty=penalty, **ends))
        if i % 4 < 2: out[f"{early} {penalty} ends"] = (prompt(9 + i, i), beams(
            width, stop_token_ids=EVERY_EIGHTH, early_stopping=early, length_penalty=penalty))
    return out


@pytest.mark.parametrize("width", [2, 4, 6])
def test_beams_equal_transformers(model, theirs, width):
    engine, found = make(model), []
    for name, (tokens, params) in searches(width).items():      # one after the other
        out = serve(engine, {name: (tokens, params)})[name]
        like_theirs(out, params, theirs(tokens, params))
        found += [c.finish_reason for c in out.outputs]
    assert {*found} == {"stop", "length"}


@pytest.mark.parametrize("kw", [{"num_blocks": 24, "preemption": "recompute"}, {"num_blocks": 100, "block_size": 3, "max_num_batched_tokens": 40},
                                {"num_blocks": 17, "max_num_batched_tokens": 24, "enable_prefix_caching": False},
                                {"num_blocks": 150, "block_size": 1, "max_num_seqs": 20}], ids=str)
@pytest.mark.parametrize("width", [4, 6])
def test_beams_equal_transformers_in_a_crowd(model, theirs, alone, width, kw):
    "All at once, with samples and greedy requests between them, in a pool that is too small."
    engine = make(model, **kw)
    mine, others = searches(width), {"g": (prompt(15, 1), greedy(30)), "s": (prompt(33), samples(3)), "w": (prompt(20), samples(4))}
    mixed = [*mine.items()][::2] + [*others.items()] + [*mine.items()][1::2]
    done = serve(engine, dict(mixed))
    for name, (tokens, params) in mine.items(): like_theirs(done[name], params, theirs(tokens, params))
    for name, request in others.items(): same(done[name], alone(*request))
    assert engine.stats().preemptions >= 3


def test_beams_that_n_cuts_and_the_parameters_that_they_refuse(alone):
    all_, two = alone(prompt(33), beams(4)), alone(prompt(33), beams(4, 2))
    assert ids(two) == ids(all_)[:2] and len(ids(all_)) == 4
    same(alone(prompt(33), beams(4, temperature=0)), all_)
    for kw in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"seed": 1}, {"temperature": 0.5}):
        with pytest.raises(ValueError, match=next(iter(kw))): beams(4, **kw)


@pytest.mark.parametrize("length", LENGTHS)
def test_discarded_beams_lose_their_blocks_in_the_same_step(model, length):
    "After each step the blocks in use are those of the live beams' tables, and these have grown by one slot at most."
    engine = make(model, enable_prefix_caching=False)
    engine.add_request("0", prompt(length), beams(6, max_tokens=24))
    dropped = 0
    while engine.has_unfinished():
        before = {s: t.blocks[:] for s, t in engine.blocks.tables.items()}
        engine.step()
        check(engine)
        live = engine.requests["0"].beams.live if engine.requests else []
        assert len(engine.blocks.tables) == len(live)
        dropped += len(before.keys() - engine.blocks.tables.keys())
        if live: assert {t.num_tokens for t in engine.blocks.tables.values()} == {length + len(live[0].token_ids) - 1}
    assert dropped > 6 and engine.stats().used_blocks == 0


@pytest.mark.parametrize("params", [beams(4, max_tokens=24), samples(4, max_tokens=24)], ids=["beams", "samples"])
def test_nothing_moves_but_last_blocks_that_are_shared(model, params):
    "Each copy is of a block that others hold, and to the place where its sequence writes."
    engine = make(model, num_blocks=40)
    with engine.record() as recording: serve(engine, {k: (prompt(n), params) for k, n in zip("abc", LENGTHS)})
    copied, frames = 0, recording.frames()
    for before, plan in zip([None, *frames], recording.plans):
        for source, target in plan.copies:
            owner = next(r for r in plan.rows if target in r.blocks)
            assert owner.first_block + owner.blocks.index(target) == owner.position // 16 and owner.position % 16 > 0
            assert any(source in [b for b, _ in entries] for entries in before.tables.values())
            copied += 1
    assert copied == engine.stats().cow_copies > 0


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
@pytest.mark.parametrize("params", [beams(4), samples(4), samples(2, best_of=4), greedy(n=2)], ids=["beams", "samples", "best_of", "greedy"])
def test_abort_at_every_stage(model, alone, params, steps):
    engine = make(model, max_num_batched_tokens=60)
    add(engine, {"0": (prompt(33), params), "1": (prompt(64, 2), samples(3))})
    for _ in range(steps): engine.step()
    others = sum(s.request_id == "1" for s in engine.scheduler.sequences.values())
    engine.abort("0")
    engine.abort("0")
    check(engine)
    assert len(engine.scheduler.sequences) == others and "0" not in engine.scheduler.groups
    done = drain(engine)
    assert done["0"].finished and done["0"].error is None and {c.finish_reason for c in done["0"].outputs} == {"abort"}
    if not params.use_beam_search: assert [c.index for c in done["0"].outputs] == [*range(params.n)]
    assert all(len(i) == steps for i in ids(done["0"]))
    same(done["1"], alone(prompt(64, 2), samples(3)))


@pytest.mark.parametrize("params", [beams(3), samples(4)], ids=["beams", "samples"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_abort_while_preempted(model, alone, params, preemption):
    engine = make(model, num_blocks=13, preemption=preemption)
    add(engine, {"a": (prompt(47, 1), samples(3)), "b": (prompt(33, 2), replace(params, max_tokens=12)), "c": (prompt(33, 3), greedy())})
    while not engine.scheduler.preempted: engine.step()
    victim = engine.scheduler.preempted[-1].request_id
    assert victim in "bc"
    engine.abort(victim)
    check(engine)
    done = drain(engine)
    assert done[victim].outputs[0].finish_reason == "abort"
    same(done["a"], alone(prompt(47, 1), samples(3)))


@pytest.mark.parametrize("n, width", [(2, 4), (4, 4)])
def test_beams_of_zero_and_one_token(model, theirs, n, width):
    params = beams(width, n, max_tokens=1, logprobs=0)
    done = serve(make(model), {"one": (prompt(33), params), "none": (prompt(33), replace(params, max_tokens=0))})
    like_theirs(done["one"], params, theirs(prompt(33), params))
    assert [(c.index, c.token_ids, c.finish_reason) for c in done["none"].outputs] == [(i, [], "length") for i in range(n)]


def test_beams_report_once(model):
    engine = make(model)
    engine.add_request("0", prompt(33), beams(4))
    told = []
    while engine.has_unfinished(): told.append(engine.step())
    assert [len(t) for t in told] == [0] * 11 + [1] and told[-1][0].finished


# Prefixes: what is found again

@pytest.fixture(scope="module")
def contents(model):
    "Keys and values [2, layers, tokens, heads, size] of some tokens, computed in one go in a pool of their own."
    @functools.lru_cache(None)
    def run(tokens):
        engine = make(model, num_blocks=1, block_size=len(tokens), enable_prefix_caching=False)
        engine.add_request("0", list(tokens), greedy(1))
        engine.step()
        return engine.runner.kv.data[:, :, 0].clone()
    return run


def check_contents(engine, contents):
    "Each entry of the cache is of a block that holds the keys and values of its tokens after those before them."
    for block, entry in engine.blocks.cache.of_block.items():
        tokens, at = entry.tokens, entry
        while hasattr(at := at.parent, "tokens"): tokens = at.tokens + tokens
        want = contents(tokens)[:, :, -len(entry.tokens):]
        torch.testing.assert_close(engine.runner.kv.data[:, :, block], want, atol=1e-4, rtol=1e-4)
    return len(engine.blocks.cache.of_block)


@pytest.mark.parametrize("length, max_tokens", [(33, 8), (40, 1), (48, 1), (49, 9)])
def test_a_block_that_was_recycled_is_not_found(model, alone, contents, length, max_tokens):
    "PC-1: a pool of 4 blocks."
    engine = make(model, num_blocks=4)
    for _ in range(2):
        for k in range(4):
            out = serve(engine, {"0": (prompt(length, k), greedy(max_tokens))})["0"]
            same(out, alone(prompt(length, k), greedy(max_tokens)))
            assert out.num_cached_tokens == 0
            assert 0 < check_contents(engine, contents) <= 4
    out = serve(engine, {"0": (prompt(length, 3), greedy(max_tokens))})["0"]
    assert out.num_cached_tokens == (length - 1) // 16 * 16


def test_many_requests_one_after_the_other(model, alone):
    "BA-2: what has ended holds nothing, and can be evicted."
    engine = make(model, num_blocks=3)
    for k in range(15):
        out = serve(engine, {"0": (prompt(16, k), samples(2, max_tokens=3))})["0"]
        s = engine.stats()
        assert (s.used_blocks, s.free_blocks) == (0, 3) and s.cached_blocks <= 3
        same(out, alone(prompt(16, k), samples(2, max_tokens=3)))


@pytest.mark.parametrize("params", [greedy(), samples(3), beams(3)], ids=["greedy", "samples", "beams"])
@pytest.mark.parametrize("length, hits", [(16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_a_prompt_that_is_cached_whole(model, alone, contents, length, hits, params):
    "PC-2: three times one after the other, then twice beside each other; the last token is always computed."
    engine, want = make(model), alone(prompt(length), params)
    for i in range(3):
        out = serve(engine, {"0": (prompt(length), params)})["0"]
        same(out, want)
        assert out.num_cached_tokens == (hits if i else 0)
    engine.add_request("a", prompt(length), params)
    for _ in range(5): engine.step()
    engine.add_request("b", prompt(length), params)
    done = drain(engine)
    for name in "ab":
        same(done[name], want)
        assert done[name].num_cached_tokens == hits
    check_contents(engine, contents)
    assert engine.stats().prefix_hit_tokens == 4 * hits and engine.stats().prompt_tokens == 5 * length


TAILS = {str(k): prompt(32) + [(11 * k + j) % VOCAB for j in range(1, n)] for k, n in enumerate([2, 9, 17, 33, 2])}


@pytest.mark.parametrize("budget", [20, 512])
@pytest.mark.parametrize("params", [greedy(16, logprobs=0), samples(3, max_tokens=16)], ids=["greedy", "samples"])
def test_tails_after_a_common_beginning(model, alone, contents, params, budget):
    "PC-3: one after the other, and all in one batch behind the first."
    requests = {k: (tokens, params) for k, tokens in TAILS.items()}
    one, many = (make(model, max_num_batched_tokens=budget) for _ in range(2))
    for k, request in requests.items():
        out = serve(one, {k: request})[k]
        same(out, alone(*request))
        assert out.num_cached_tokens == (32 if k != "0" else 0)
    serve(many, {"first": (prompt(33), greedy(1))})
    done = serve(many, requests)
    for k, request in requests.items():
        same(done[k], alone(*request))
        assert done[k].num_cached_tokens == 32
        for a, b in zip(done[k].outputs, alone(*request).outputs):
            assert [e[t].logprob for e, t in zip(a.logprobs, a.token_ids)] == pytest.approx(
                [e[t].logprob for e, t in zip(b.logprobs, b.token_ids)], abs=1e-4)
    check_contents(one, contents)
    check_contents(many, contents)


def test_digests_that_collide(model, alone):
    "PC-4: a digest alone finds nothing."
    for digest in (lambda before, tokens: b"x", lambda before, tokens: bytes([sum(tokens) % 4])):
        engine = make(model)
        engine.blocks.cache.digest = digest
        for k in (0, 1, 0, 2, 2):
            same(serve(engine, {"0": (prompt(40, k), greedy())})["0"], alone(prompt(40, k), greedy()))
        same(serve(engine, {"0": (prompt(16, 1) + prompt(24, 2), samples())})["0"], alone(prompt(16, 1) + prompt(24, 2), samples()))


def test_salts_never_meet(model, alone):
    "PC-5."
    engine = make(model)
    for salt, hits in [(None, 0), ("a", 0), ("b", 0), ("", 0), ("None", 0), ("a", 32), (None, 32), ("", 32), ("b", 32)]:
        out = serve(engine, {"0": (prompt(40), samples(), salt)})["0"]
        same(out, alone(prompt(40), samples()))
        assert out.num_cached_tokens == hits
    done = serve(engine, {k: (prompt(50, 1), greedy(), k or None) for k in ("a", "b", "")})
    assert all(o.num_cached_tokens == 0 for o in done.values())
    with pytest.raises(ValueError, match="cache_salt"): engine.add_request("0", prompt(3), greedy(), cache_salt=3)


def test_the_tail_is_evicted_first(model):
    "PC-6: a pool of 3."
    engine = make(model, num_blocks=3)
    serve(engine, {"0": (prompt(48), greedy(1))})
    serve(engine, {"0": (prompt(5, 1), greedy(1))})
    assert serve(engine, {"0": (prompt(48), greedy(1))})["0"].num_cached_tokens == 32


def test_hits_end_where_a_block_is_missing(model, alone):
    "PC-7: of three blocks the second has gone."
    engine = make(model)
    serve(engine, {"0": (prompt(49), greedy(1))})
    gone = engine.blocks.lookup(prompt(49))[1]
    engine.blocks.cache.forget(gone)
    engine.runner.kv.data[:, :, gone] = torch.nan
    out = serve(engine, {"0": (prompt(49), greedy())})["0"]
    same(out, alone(prompt(49), greedy()))
    assert out.num_cached_tokens == 16


@pytest.mark.parametrize("params", [greedy(), samples(3), beams(3)], ids=["greedy", "samples", "beams"])
def test_equal_prompts_in_one_step_find_nothing(model, alone, params):
    engine = make(model)
    done = serve(engine, {k: (prompt(40), params) for k in "ab"})
    for k in "ab":
        same(done[k], alone(prompt(40), params))
        assert done[k].num_cached_tokens == 0
    assert serve(engine, {"0": (prompt(40), params)})["0"].num_cached_tokens == 32


@pytest.mark.parametrize("budget", [5, 16, 24, 50])
def test_only_what_is_computed_is_found(model, alone, contents, budget):
    "The same long prompt twice at once, in chunks: the second finds what the first has done, never more."
    engine = make(model, max_num_batched_tokens=budget)
    add(engine, {k: (prompt(100), samples(2, max_tokens=8)) for k in "ab"})
    found = {}
    while engine.has_unfinished():
        for out in engine.step(): found[out.request_id] = out
        check(engine)
        check_contents(engine, contents)
    for k in "ab": same(found[k], alone(prompt(100), samples(2, max_tokens=8)))
    assert found["a"].num_cached_tokens == 0 and found["b"].num_cached_tokens <= 96


@pytest.mark.parametrize("params", [greedy(), samples(3), beams(3)], ids=["greedy", "samples", "beams"])
def test_what_was_generated_is_found_too(model, alone, contents, params):
    "A conversation: the answer is part of the next prompt."
    engine = make(model)
    answer = ids(serve(engine, {"0": (prompt(33), params)})["0"])[0]
    out = serve(engine, {"0": (prompt(33) + answer, params)})["0"]
    same(out, alone(prompt(33) + answer, params))
    assert out.num_cached_tokens >= 32 and check_contents(engine, contents) > 2
    if params.greedy: assert out.num_cached_tokens == (33 + 24 - 1) // 16 * 16


def test_a_request_that_must_wait_holds_no_hits(model, alone):
    "BA-3: a hundred attempts to enter, refused or deferred, change no count."
    engine = make(model, num_blocks=12)
    serve(engine, {"0": (prompt(33), greedy(1))})
    add(engine, {"long": (prompt(64, 2), greedy(110)), "wait": (prompt(33), samples(4, max_tokens=12))})
    engine.step()
    engine.step()
    add(engine, {"w2": (prompt(33) + prompt(90, 3), greedy(4))})
    refs, attempts = None, 0
    while engine.scheduler.waiting:
        with pytest.raises(ValueError): engine.add_request("never", prompt(33), samples(4, max_tokens=100))
        with pytest.raises(ValueError): engine.add_request("bad", prompt(33) + [VOCAB], samples())
        engine.step()
        check(engine)
        attempts += 1
    assert attempts > 20
    done = drain(engine)
    same(done["w2"], alone(prompt(33) + prompt(90, 3), greedy(4)))


# Prefixes: what is pinned

@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("params", [greedy(), samples(4), beams(3)], ids=["greedy", "samples", "beams"])
@pytest.mark.parametrize("pinned", [16, 20, 31, 32])
def test_a_pin_is_shared_and_its_last_block_is_copied(model, alone, caching, params, pinned):
    engine = make(model, enable_prefix_caching=caching)
    pin = engine.pin_prefix(prompt(32)[:pinned])
    held, table = -(-pinned // 16), list(engine.blocks.tables.values())[0].blocks[:]
    before = engine.runner.kv.data[:, :, table].clone()
    assert pin.num_tokens == pinned and engine.stats().used_blocks == held
    requests = {k: (prompt(32)[:pinned] + tail, params) for k, tail in {
        "a": prompt(17, 1), "b": prompt(3, 2), "c": prompt(1, 3), "exact": []}.items()}
    done = serve(engine, requests, held)
    for k, request in requests.items():
        same(done[k], alone(*request))
        assert done[k].num_cached_tokens == pinned - (k == "exact")
    kept = pinned - pinned // 16 * 16 or 16
    assert torch.equal(engine.runner.kv.data[:, :, table[:-1]], before[:, :, :-1])
    assert torch.equal(engine.runner.kv.data[:, :, table[-1], :kept], before[:, :, -1, :kept])
    engine.unpin_prefix(pin)
    check(engine)
    assert engine.stats().used_blocks == 0


@pytest.mark.parametrize("pinned, length, copies", [(20, 33, 1), (20, 32, 1), (32, 33, 0), (32, 47, 0), (33, 33, 1), (32, 32, 1), (17, 17, 0)])
@pytest.mark.parametrize("n", [1, 4])
def test_a_pinned_tail_is_copied_once_before_the_forks(model, alone, pinned, length, copies, n):
    engine = make(model, enable_prefix_caching=False)
    pin = engine.pin_prefix(prompt(pinned))
    copies -= pinned == length == 33        # the last token opens a block: what is shared is full
    same(serve(engine, {"0": (prompt(length), samples(n))}, -(-pinned // 16))["0"], alone(prompt(length), samples(n)))
    assert engine.stats().cow_copies == copies + (n - 1 if length % 16 else 0)
    engine.unpin_prefix(pin)


def test_a_prompt_that_is_part_of_a_pin(model, alone):
    engine = make(model, enable_prefix_caching=False)
    engine.pin_prefix(prompt(47))
    for length in (1, 2, 15, 16, 17, 32, 33, 46):
        out = serve(engine, {"0": (prompt(length), samples())}, 3)["0"]
        same(out, alone(prompt(length), samples()))
        assert out.num_cached_tokens == length - 1
    fork = prompt(20) + prompt(20, 5)       # leaves the pin in the middle of a block
    out = serve(engine, {"0": (fork, samples())}, 3)["0"]
    same(out, alone(fork, samples()))
    assert out.num_cached_tokens == next(i for i, (a, b) in enumerate(zip(fork, prompt(47))) if a != b)


@pytest.mark.parametrize("caching", [True, False])
def test_of_two_pins_the_longer_is_used(model, alone, caching):
    for lengths in [(20, 40), (40, 20)]:
        engine = make(model, enable_prefix_caching=caching)
        pins = {n: engine.pin_prefix(prompt(n)) for n in lengths}
        for n, cached in [(50, 40), (30, 29), (10, 9)]:
            out = serve(engine, {"0": (prompt(n), greedy())}, engine.stats().used_blocks)["0"]
            same(out, alone(prompt(n), greedy()))
            assert out.num_cached_tokens == cached
        engine.unpin_prefix(pins[40])
        out = serve(engine, {"0": (prompt(50, 0), greedy())}, 2)["0"]
        same(out, alone(prompt(50), greedy()))
        assert out.num_cached_tokens == (48 if caching else 20)
        engine.unpin_prefix(pins[20])


def test_pins_and_salts(model, alone):
    engine = make(model)
    engine.pin_prefix(prompt(40))
    out = serve(engine, {"0": (prompt(50), greedy(), "a")}, 3)["0"]
    same(out, alone(prompt(50), greedy()))
    assert out.num_cached_tokens == 0


@pytest.mark.parametrize("params", [greedy(), samples(4), beams(4)], ids=["greedy", "samples", "beams"])
def test_unpin_while_others_share_it(model, alone, params):
    engine = make(model, num_blocks=24)
    pin = engine.pin_prefix(prompt(40))
    add(engine, {"0": (prompt(50), params), "1": (prompt(40), params)})
    for _ in range(3): engine.step()
    engine.unpin_prefix(pin)
    check(engine)
    serve_later = {"2": (prompt(60, 4), greedy())}
    add(engine, serve_later)
    done = drain(engine)
    for k, n in [("0", 50), ("1", 40)]: same(done[k], alone(prompt(n), params))
    same(done["2"], alone(*serve_later["2"]))
    with pytest.raises(ValueError, match="pinned"): engine.unpin_prefix(pin)
    with pytest.raises(ValueError, match="unpin_prefix"): engine.unpin_prefix(3)


def state(engine):
    s = engine.stats()
    return (s, dict(engine.scheduler.pins), list(engine.scheduler.groups), {k: t.blocks[:] for k, t in engine.blocks.tables.items()})


def test_a_pin_that_does_not_fit_changes_nothing(model, alone):
    engine = make(model, num_blocks=8)      # 128 slots
    engine.pin_prefix(prompt(40))           # 3 blocks
    before = state(engine)
    for bad in (prompt(81), prompt(129), prompt(200), [], [VOCAB], "text", None):
        with pytest.raises(ValueError): engine.pin_prefix(bad)
        assert state(engine) == before and not engine.has_unfinished()
    engine.add_request("big", prompt(60, 1), greedy(21))      # 80 slots: the five blocks that are left
    before = state(engine)
    with pytest.raises(ValueError, match="cannot be pinned now|never be served"): engine.pin_prefix(prompt(1, 9))
    assert state(engine) == before
    with pytest.raises(ValueError, match="pinned"): engine.add_request("more", prompt(60, 1), greedy(22))
    same(drain(engine, 3)["big"], alone(prompt(60, 1), greedy(21)))
    engine.pin_prefix(prompt(80, 2))        # now there is room
    assert engine.stats().free_blocks == 0
    with pytest.raises(ValueError): engine.add_request("0", prompt(3), greedy(1))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_pins_survive_preemptions(model, alone, caching, preemption):
    engine = make(model, num_blocks=18, enable_prefix_caching=caching, preemption=preemption)
    engine.pin_prefix(prompt(40))
    requests = {str(k): (prompt(40) + prompt(5 * k, k + 1), p) for k, p in enumerate([greedy(40), samples(4), beams(3), samples(3, max_tokens=30), beams(2)])}
    for _ in range(2):
        done = serve(engine, requests, 3)
        for k, request in requests.items(): same(done[k], alone(*request))
    assert engine.stats().preemptions >= 3


def test_a_pin_while_others_run(model, alone):
    "It is computed between their tokens, and what they report meanwhile comes later."
    engine = make(model, max_num_batched_tokens=20)
    add(engine, {"a": (prompt(33, 1), greedy(30)), "b": (prompt(20, 2), samples(3))})
    for _ in range(4): engine.step()
    engine.pin_prefix(prompt(60))
    add(engine, {"c": (prompt(64), beams(3))})
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        check(engine)
    same(done["a"], alone(prompt(33, 1), greedy(30)))
    same(done["b"], alone(prompt(20, 2), samples(3)))
    same(done["c"], alone(prompt(64), beams(3)))
    assert done["c"].num_cached_tokens >= 60


def test_what_ends_while_a_prefix_is_pinned_is_reported(model, alone):
    engine = make(model)
    add(engine, {"a": (prompt(33, 1), greedy(2)), "b": (prompt(20, 2), beams(2, max_tokens=2))})
    engine.step()
    engine.pin_prefix(prompt(60))           # the step that computes it is their last one
    done = {}
    while engine.has_unfinished(): done |= {o.request_id: o for o in engine.step() if o.finished}
    assert done.keys() == {"a", "b"}
    same(done["a"], alone(prompt(33, 1), greedy(2)))


def test_a_pin_takes_nobodys_name(model, alone):
    engine = make(model)
    engine.add_request("pin-1", prompt(33), greedy(0))
    engine.pin_prefix(prompt(20))
    done = {}
    while engine.has_unfinished(): done |= {o.request_id: o for o in engine.step()}
    assert done["pin-1"].outputs[0].finish_reason == "length"
    check(engine)


# All in one batch

MIX = {"greedy": (prompt(40), greedy(20)), "twice": (prompt(33, 1), greedy(20, n=2)), "one": (prompt(20, 2), samples(1)),
       "four": (prompt(32), samples(4)), "best": (prompt(47, 3), samples(2, best_of=3)), "two": (prompt(33), beams(2, max_tokens=16)),
       "three": (prompt(40), beams(3, 1, max_tokens=16, ignore_eos=False)), "hot": (prompt(3, 4), samples(3, temperature=1.7, top_k=20)),
       "ends": (prompt(17, 5), beams(2, stop_token_ids=EVERY_EIGHTH, early_stopping=True, length_penalty=0.5)),
       "stops": (prompt(64, 6), samples(3, stop_token_ids=EVERY_EIGHTH))}


@pytest.mark.parametrize("kw", [
    {"num_blocks": 128}, {"num_blocks": 128, "max_num_batched_tokens": 20, "enable_prefix_caching": False}, {"num_blocks": 20, "preemption": "recompute"},
    {"num_blocks": 20, "max_num_batched_tokens": 16, "enable_prefix_caching": False, "preemption": "recompute"}, {"num_blocks": 40, "block_size": 4, "max_num_seqs": 9},
    {"num_blocks": 150, "block_size": 1, "max_num_batched_tokens": 20}], ids=str)
def test_every_kind_in_one_batch_equals_its_solo_run(model, alone, kw):
    engine = make(model, **kw)
    done = serve(engine, MIX)
    for k, request in MIX.items(): same(done[k], alone(*request))
    assert engine.stats().preemptions == 0 if kw["num_blocks"] == 128 else engine.stats().preemptions >= 3


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_that_comes_and_goes(model, alone, contents, seed):
    "Requests that arrive at any time, with pins and aborts between them, in pools of any shape."
    r = Random(seed)
    size = r.choice([1, 3, 8, 16])
    engine = make(model, num_blocks=-(-r.randint(280, 400) // size), block_size=size, max_num_batched_tokens=r.choice([6, 20, 512]),
                  max_num_seqs=r.choice([6, 20]), enable_prefix_caching=r.random() < 0.7, preemption=("recompute", "swap")[seed % 2])
    todo, want, aborted, pins, done = r.choices([*MIX.items()], k=20), {}, set(), [], {}
    while todo or engine.has_unfinished():
        if todo and r.random() < 0.4:
            name, request = todo.pop()
            want[name := f"{name} {len(todo)}"] = request
            engine.add_request(name, *request)
        if r.random() < 0.03 and engine.requests:
            aborted.add(name := r.choice([*engine.requests]))
            engine.abort(name)
        if r.random() < 0.1:
            try: pins.append(engine.pin_prefix(prompt(r.choice([10, 30, 33]))))
            except ValueError: pass
        elif pins and r.random() < 0.2: engine.unpin_prefix(pins.pop(0))
        done |= {o.request_id: o for o in engine.step() if o.finished}
        check(engine)
        if r.random() < 0.1: check_contents(engine, contents)
    done |= {o.request_id: o for o in engine.step()}     # what ended while the last prefix was pinned
    assert done.keys() == want.keys() and len(want) - len(aborted) > 10
    for name, out in done.items():
        if name not in aborted: same(out, alone(*want[name]))
    for pin in pins: engine.unpin_prefix(pin)
    assert engine.stats().used_blocks == 0


# Failures

class Broken:
    "A model that fails, or spoils logits, at one call."
    def __init__(self, engine, at, spoil):
        self.model, self.calls, self.at, self.spoil = engine.runner.model, 0, at, spoil
        self.config, self.dtype, self.device = self.model.config, self.model.dtype, self.model.device
        engine.runner.model = self

    def __call__(self, *args):
        self.calls += 1
        logits = self.model(*args)
        return self.spoil(logits) if self.calls == self.at else logits


@pytest.mark.parametrize("params", [beams(3), samples(4), samples(2, best_of=4), greedy(n=2)], ids=["beams", "samples", "best_of", "greedy"])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_row_ends_that_request_alone(model, alone, params, at, bad):
    others = {"x": (prompt(20, 2), samples(3)), "y": (prompt(33), beams(2)), "z": (prompt(40, 1), greedy())}
    engine, last = make(model), {}
    width = 1 if at == 1 or params.greedy else params.width
    def spoil(logits):
        row = {1: 0, 2: 0, 5: width - 1}[at]      # the first request's first row, or its last
        logits[row, 5] = bad
        return logits
    Broken(engine, at, spoil)
    done = serve(engine, {"0": (prompt(33), params), **others})
    assert "largest logit is" in done["0"].error and {c.finish_reason for c in done["0"].outputs} == {"error"}
    for k, request in others.items(): same(done[k], alone(*request))
    assert serve(engine, {"0": (prompt(33), params)})["0"].error is None


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_step_that_fails_ends_who_was_in_it(model, alone, at, error):
    def fail(logits): raise error
    engine = make(model, max_num_seqs=9)
    pin = engine.pin_prefix(prompt(20))
    Broken(engine, at, fail)
    requests = {"b": (prompt(33), beams(3)), "s": (prompt(47), samples(4)), "g": (prompt(40), greedy(n=2)), "w": (prompt(33), samples(4))}
    add(engine, requests)
    done = {}
    while engine.has_unfinished():
        try: done |= {o.request_id: o for o in engine.step() if o.finished}
        except KeyboardInterrupt: assert isinstance(error, KeyboardInterrupt)
        check(engine)
    for k in "bsg": assert done[k].error and {c.finish_reason for c in done[k].outputs} == {"error"}
    same(done["w"], alone(*requests["w"]))
    assert done["w"].num_cached_tokens >= 20 and engine.stats().used_blocks == 2      # the pin has survived
    engine.unpin_prefix(pin)
    assert engine.stats().used_blocks == 0


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_pin_that_fails_holds_nothing(model, alone, error):
    def fail(logits): raise error
    engine = make(model, max_num_batched_tokens=16)
    Broken(engine, 2, fail)
    with pytest.raises(type(error)): engine.pin_prefix(prompt(40))
    check(engine)
    assert engine.stats().used_blocks == 0 and not engine.has_unfinished() and not engine.scheduler.pins
    same(serve(engine, {"0": (prompt(40), samples())})["0"], alone(prompt(40), samples()))


@pytest.mark.parametrize("params", [greedy(30), samples(4), beams(3)], ids=["greedy", "samples", "beams"])
def test_a_name_in_use(model, alone, params):
    "BA-6: refused while it lives; an abort hits the one that it was meant for."
    engine = make(model)
    engine.add_request("0", prompt(33), params)
    for _ in range(3):
        with pytest.raises(ValueError, match="'0' is in use"): engine.add_request("0", prompt(20), samples())
        engine.step()
        check(engine)
    engine.abort("0")
    with pytest.raises(ValueError, match="'0' is in use"): engine.add_request("0", prompt(20), samples())
    assert engine.step()[0].outputs[0].finish_reason == "abort"
    same(serve(engine, {"0": (prompt(20), samples())})["0"], alone(prompt(20), samples()))


@pytest.mark.parametrize("params", [samples(5), beams(5)], ids=["samples", "beams"])
def test_what_is_too_wide_is_refused_at_once(model, alone, params):
    for kw, said in [({"max_num_seqs": 4}, "max_num_seqs is 4"), ({"max_num_batched_tokens": 4}, "max_num_batched_tokens is 4"),
                     ({"num_blocks": 4}, "max_num_seqs is 4|never be served")]:
        engine = make(model, **kw)
        with pytest.raises(ValueError, match=said): engine.add_request("0", prompt(20), params)
        assert not engine.has_unfinished()
        same(serve(engine, {"0": (prompt(20), greedy(8))})["0"], alone(prompt(20), greedy(8)))


@pytest.mark.parametrize("params, length", [(samples(4, max_tokens=20), 33), (samples(4, max_tokens=17), 32), (beams(4), 47), (greedy(20, n=4), 33)])
def test_exactly_the_pool_is_served(model, alone, params, length):
    "floor(P / B) + n * (ceil(S / B) - floor(P / B)) blocks suffice; one less is refused."
    width, last = 1 if params.greedy else params.width, -(-(length + params.max_tokens - 1) // 16)
    need = length // 16 + width * (last - length // 16)
    same(serve(make(model, num_blocks=need), {"0": (prompt(length), params)})["0"], alone(prompt(length), params))
    with pytest.raises(ValueError, match="never be served|max_model_len|max_num_seqs"):
        make(model, num_blocks=need - 1).add_request("0", prompt(length), params)


# Recordings

@pytest.mark.parametrize("kw", [{"num_blocks": 20, "preemption": "recompute"}, {"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 20},
                                {"num_blocks": 128, "enable_prefix_caching": False}], ids=str)
def test_a_replay_has_the_tables_of_the_run(model, kw):
    engine = make(model, **kw)
    engine.pin_prefix(prompt(20))
    plan_of, seen = engine.scheduler.schedule, []
    def schedule():
        plan = plan_of()
        tables, known = engine.blocks.tables, engine.scheduler.known
        seen.append({s: t.blocks[:] for s, t in tables.items() if s in known})
        return plan
    engine.scheduler.schedule = schedule
    with engine.record() as recording:
        add(engine, MIX)
        for _ in range(12): engine.step()
        engine.abort("four")
        drain(engine, -(-20 // engine.blocks.block_size))
    serve(engine, {"later": MIX["one"]}, -(-20 // engine.blocks.block_size))
    frames = recording.frames()
    assert len(frames) == len(recording.plans) == len(seen) - 20
    pin, held = next(iter(engine.scheduler.pins)), engine.blocks.tables
    for frame, tables in zip(frames, seen):
        assert {s: [b for b, _ in entries] for s, entries in frame.tables.items()} == tables | {pin: held[pin].blocks}
        assert frame.owners[pin] == "pin"
    assert {*recording.owners.values()} == {*MIX}
    if kw["num_blocks"] < 128: assert any(f.preempted for f in frames)


def test_a_recording_begins_with_nothing_running(model):
    engine = make(model)
    engine.add_request("0", prompt(20), samples())
    with pytest.raises(RuntimeError, match="no request is running"):
        with engine.record(): pass
    drain(engine)


# LLM

def test_an_llm_has_it_all(model, alone):
    with LLM(model, num_blocks=64) as llm:
        pin = llm.pin_prefix(prompt(33))
        with llm.record() as recording:
            outs = llm.generate([tokens for tokens, _ in MIX.values()], [p for _, p in MIX.values()])
        for out, request in zip(outs, MIX.values()): same(out, alone(*request))
        assert len(recording.frames()) == len(recording.plans) >= 16 and llm.stats().used_blocks == 3
        llm.unpin_prefix(pin)
        with pytest.raises(ValueError): llm.unpin_prefix(pin)
        assert llm.stats().used_blocks == 0


def test_another_engines_prefix_is_refused(model):
    mine, other = make(model), make(model)
    pin, foreign = mine.pin_prefix(prompt(20)), other.pin_prefix(prompt(33))
    with pytest.raises(ValueError, match="this engine"): mine.unpin_prefix(foreign)
    assert mine.stats().used_blocks > 0
    mine.unpin_prefix(pin)
    assert mine.stats().used_blocks == 0


def test_one_recording_at_a_time_and_none_of_a_closed_engine(model):
    llm = LLM(model, num_blocks=16)
    with llm.record() as outer:
        with pytest.raises(RuntimeError, match="already"):
            with llm.record(): pass
        llm.generate([[5, 6]], greedy(3))
    assert len(outer.plans) == 3
    llm.pin_prefix([5] * 20)
    llm.close()
    assert llm.stats().used_blocks == 0
    with pytest.raises(RuntimeError, match="closed"):
        with llm.record(): pass


def test_wrong_kinds_of_parameters_are_no_defaults(model):
    llm = LLM(model, num_blocks=16)
    for wrong in (0, "", {}):
        with pytest.raises(ValueError): llm.generate([5, 6], wrong)
    with pytest.raises(ValueError, match="enable_prefix_caching"): Engine(model, num_blocks=16, enable_prefix_caching="no")
