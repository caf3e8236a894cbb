"Beam search: equal to a dense brute force and to transformers, ids and scores; forks, ties, ends, odd shapes."
import functools
import itertools
import math
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedlm.sampling import BeamSearch, token_logprobs
from pagedlm.sharing import BlockManager

EARLY = [False, True, "never"]
inf, nan = math.inf, math.nan


def search(width, n=None, length_penalty=1.0, early_stopping=False, eos_ids=(0,), max_tokens=5, logprobs=None):
    return BeamSearch(width, n or width, length_penalty, early_stopping, eos_ids, max_tokens, logprobs)

def drive(beams, logits_of):
    "Run the search to its end; `logits_of(list of token lists)` recomputes every row from its tokens."
    held = [[]]                                           # what forked and freed tables would hold
    while not beams.done:
        rows = [h.token_ids for h in beams.live]
        assert held == rows and 0 < len(rows) <= beams.width
        told = beams.step(logits_of(rows))
        assert len(told) == len(rows)
        held = [[*row, t] for row, tokens in zip(rows, told) for t in tokens]
    assert held == []
    return beams.best()

def ids(found): return [h.token_ids for h in found]


# Brute force

class Toy:
    "A model whose next token depends on every token before it: logits [V] from a hash of all of them."
    def __init__(self, seed, vocab, scale=2.0): self.seed, self.vocab, self.scale, self.known = seed, vocab, scale, {}

    def row(self, tokens):
        key = tuple(tokens)
        if key not in self.known:
            g = torch.Generator().manual_seed(hash((self.seed, *key)) % 2**32)        # ints: the same in every process
            self.known[key] = torch.randn(self.vocab, generator=g) * self.scale
        return self.known[key]

    def __call__(self, rows): return torch.stack([self.row(r) for r in rows])

    def total(self, tokens):
        "The sum of log-probabilities of a whole text, in float64, from its first token on."
        return sum(float(torch.log_softmax(self.row(tokens[:i]).double(), -1)[t]) for i, t in enumerate(tokens))

def brute(toy, width, n, length_penalty, early_stopping, eos_ids, max_tokens):
    "Beam search as defined, every candidate's total recomputed from nothing: [(ids, score, reason)], and the steps taken."
    beams, ended, score = [[]], [], lambda tokens, length: toy.total(tokens) / length ** length_penalty
    for length in range(1, max_tokens + 1):
        candidates = sorted(([*b, t] for b in beams for t in range(toy.vocab)), key=lambda c: -toy.total(c))
        for c in candidates[:width]:
            if c[-1] in eos_ids: ended.append((c, score(c, length), "stop"))
            elif length == max_tokens: ended.append((c, score(c, length), "length"))
        ended = sorted(ended, key=lambda e: -e[1])[:width]
        beams = [c for c in candidates if c[-1] not in eos_ids][:width]
        if not beams or (len(ended) == width and early_stopping is True): break
        far = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        if len(ended) == width and score(beams[0], far) <= ended[-1][1]: break
    return ended[:n], length

def check_toy(toy, *how):
    beams = BeamSearch(*how)
    steps = 0
    def logits_of(rows):
        nonlocal steps
        steps += 1
        return toy(rows)
    got, (want, length) = drive(beams, logits_of), brute(toy, *how)
    assert [(h.token_ids, h.finish_reason) for h in got] == [(i, r) for i, _, r in want] and steps == length
    for h, (i, score, _) in zip(got, want):
        assert abs(h.score - score) <= 1e-4 * max(1, abs(score)) and abs(h.cumulative_logprob - toy.total(i)) < 1e-4
    return got

@pytest.mark.parametrize("early_stopping", EARLY)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_vocabulary_of_six_width_three_depth_five(early_stopping, length_penalty):
    for seed in range(6): check_toy(Toy(seed, 6), 3, 3, length_penalty, early_stopping, [seed % 6], 5)

def test_many_small_searches_equal_brute_force():
    "Any shape: vocabularies smaller than twice the width, no or several ending tokens, one token, n below the width."
    r, reasons, short = random.Random(0), set(), 0
    for seed in range(250):
        vocab, width = r.randint(2, 9), r.randint(1, 6)
        how = (width, r.randint(1, width), r.choice([-2.0, -0.5, 0, 0.5, 1.0, 2.0]), r.choice(EARLY),
               r.sample(range(vocab), r.randint(0, min(3, vocab - 1))), r.randint(1, 6))
        got = check_toy(Toy(seed, vocab, r.choice([0.5, 2.0, 5.0])), *how)
        reasons |= {h.finish_reason for h in got}
        short += len(got) < how[1]
    assert reasons == {"stop", "length"} and short > 0

@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
def test_wide_enough_it_is_exact(length_penalty):
    "With room for every text, and no early stop, the answer is that of scoring all texts."
    for seed in range(10):
        toy, end, depth = Toy(seed, 3), seed % 3, 4
        texts, open_ = [], [[]]
        for length in range(1, depth + 1):
            longer = [[*o, t] for o in open_ for t in range(3)]
            texts += [c for c in longer if c[-1] == end or length == depth]
            open_ = [c for c in longer if c[-1] != end]
        texts.sort(key=lambda c: -toy.total(c) / len(c) ** length_penalty)
        got = drive(search(len(texts), length_penalty=length_penalty, early_stopping="never", eos_ids=[end], max_tokens=depth), toy)
        assert ids(got) == texts

def test_width_one_that_stops_at_once_is_greedy():
    for seed in range(20):
        toy, want = Toy(seed, 8), []
        while len(want) < 6 and 0 not in want: want.append(int(toy.row(want).argmax()))
        got = drive(search(1, early_stopping=True, max_tokens=6), toy)
        assert ids(got) == [want] and got[0].finish_reason == ("stop" if want[-1] == 0 else "length")

def test_n_takes_the_best_of_the_width():
    for seed in range(5):
        all_, some = (drive(search(5, n, eos_ids=[1]), Toy(seed, 7)) for n in (5, 2))
        assert len(all_) == 5 and some == all_[:2] and [h.score for h in all_] == sorted((h.score for h in all_), reverse=True)


# Endings, by hand

def fixed(*steps):
    "Logits that depend on the last token only: {last token: {token: probability}}; what is not named has none."
    table = dict(steps)
    vocab = 1 + max(t for p in table.values() for t in p)
    row = {last: torch.tensor([math.log(p.get(t, 0) or 1e-30) for t in range(vocab)]) for last, p in table.items()}
    return lambda rows: torch.stack([row[r[-1] if r else None] for r in rows])

# token 0 ends a text. After 1 there is nearly always another 1; after 2, anything
LONG = fixed((None, {0: .35, 1: .60, 2: .05}), (1, {0: .04, 1: .95, 2: .01}), (2, {0: .3, 1: .3, 2: .4}))

def test_the_three_early_stops_differ():
    "Width 2: after two steps two texts have ended, [0] with log .35 = -1.05 and [1, 0] with log(.6 * .04) / 2 = -1.87."
    got = {e: drive(search(2, early_stopping=e, max_tokens=6), LONG) for e in EARLY}
    assert ids(got[True]) == [[0], [1, 0]]
    assert ids(got[False]) == ids(got["never"]) == [[1] * 6, [1] * 5 + [0]]

def test_never_looks_further_than_now():
    "Width 1: [0] has ended with -0.69, [1] stands at -0.71. It loses now; at four tokens, with no further loss, it wins."
    toy = fixed((None, {0: .5, 1: .49, 2: .01}), (1, {0: .005, 1: .99, 2: .005}))
    assert ids(drive(search(1, early_stopping=False, max_tokens=4), toy)) == [[0]]
    assert ids(drive(search(1, early_stopping="never", max_tokens=4), toy)) == [[1, 1, 1, 1]]
    for penalty in (0.0, -1.0):                          # then longer is never better, and there is no need to look
        assert ids(drive(search(1, length_penalty=penalty, early_stopping="never", max_tokens=4), toy)) == [[0]]

def test_never_with_a_negative_penalty_looks_at_the_present():
    "[0] has ended with -1.05 and [1, 0] with -3.73 * 2. [1, 3] stands at -0.56 * 2 and ends well; at forty tokens it would not."
    toy = fixed((None, {0: .35, 1: .60, 2: .05}), (1, {0: .04, 3: .95, 2: .01}), (2, {0: .3, 1: .3, 2: .4}), (3, {0: .95, 1: .05}))
    for early_stopping in (False, "never"):
        assert ids(drive(search(2, length_penalty=-1.0, early_stopping=early_stopping, max_tokens=40), toy)) == [[0], [1, 3, 0]]

def test_an_equal_score_is_no_improvement():
    beams = search(1, length_penalty=0.0)
    assert beams.step(torch.zeros(1, 2)) == [[]] and beams.done and ids(beams.best()) == [[0]]

def test_the_length_counts_the_ending_token():
    toy = fixed((None, {0: .1, 1: .9}), (1, {0: .5, 1: .5}))
    got = drive(search(1, early_stopping=True, max_tokens=9), toy)[0]
    assert got.token_ids == [1, 0] and got.finish_reason == "stop"
    assert got.score == pytest.approx(math.log(.9 * .5) / 2, abs=1e-6) and got.cumulative_logprob == pytest.approx(math.log(.45), abs=1e-6)

def test_an_ending_below_the_best_k_is_lost():
    "Width 2: the ending token is the third candidate. It does not end, and leaves no trace."
    toy = fixed((None, {0: .2, 1: .5, 2: .3}), (1, {0: .1, 1: .5, 2: .4}), (2, {0: .98, 1: .01, 2: .01}))
    beams = search(2, max_tokens=3)
    assert beams.step(toy([[]])) == [[1, 2]] and beams.finished == []
    assert beams.step(toy([[1], [2]])) == [[1, 2], []]   # [2, 0] is the best of all and ended; the two after it both grow from [1]
    assert ids(beams.finished) == [[2, 0]] and ids(beams.live) == [[1, 1], [1, 2]]

def test_at_the_last_token_the_best_k_end_whatever_they_are():
    toy = fixed((None, {0: .3, 1: .4, 2: .2, 3: .1}), (1, {}), (2, {}), (3, {}))
    got = drive(search(3, max_tokens=1), toy)
    assert [(h.token_ids, h.finish_reason) for h in got] == [([1], "length"), ([0], "stop"), ([2], "length")]
    assert [h.score for h in got] == pytest.approx([math.log(.4), math.log(.3), math.log(.2)], abs=1e-6)

@pytest.mark.parametrize("early_stopping", EARLY)
def test_no_ending_token_at_all(early_stopping):
    got = drive(search(3, eos_ids=(), early_stopping=early_stopping, max_tokens=4), Toy(1, 5))
    assert [(len(h.token_ids), h.finish_reason) for h in got] == [(4, "length")] * 3

def test_any_of_several_ending_tokens():
    "Six of eight tokens end a text: with 2k candidates for k = 2, none might go on."
    toy, eos_ids = Toy(3, 8), [0, 1, 2, 3, 4, 5]
    x = torch.tensor([5., 4.9, 4.8, 4.7, 4.6, 4.5, 1., 0.])
    beams = search(2, eos_ids=eos_ids, early_stopping="never")
    assert beams.step(x[None]) == [[6, 7]] and ids(beams.finished) == [[0], [1]]
    check_toy(toy, 2, 2, 1.0, "never", eos_ids, 5)

def test_fewer_texts_than_asked_for():
    got = drive(search(4, max_tokens=1), fixed((None, {0: .3, 1: .7})))
    assert ids(got) == [[1], [0]]
    got = drive(search(6, eos_ids=[0, 1], max_tokens=7), fixed((None, {0: .3, 1: .7})))
    assert ids(got) == [[1], [0]] and {h.finish_reason for h in got} == {"stop"}


# Ties, extremes, errors

@pytest.mark.parametrize("vocab", [7, 300, 49152])
def test_ties_go_to_the_earlier_beam_then_to_the_lower_token(vocab):
    beams = search(4, eos_ids=[vocab - 1], max_tokens=3)
    assert beams.step(torch.zeros(1, vocab)) == [[0, 1, 2, 3]]
    assert beams.step(torch.zeros(4, vocab)) == [[0, 1, 2, 3], [], [], []]
    x = torch.zeros(4, vocab)
    x[2, 5], x[1, 6], x[3, 4] = 1., 1., -1.
    beams.step(x)
    assert ids(beams.finished) == [[0, 1, 6], [0, 2, 5], [0, 3, 0], [0, 3, 1]]    # the -1 leaves a little more for its row's others

def test_a_real_vocabulary():
    torch.manual_seed(0)
    x, y = torch.randn(1, 49152) * 3, torch.randn(6, 49152) * 3
    beams = search(6, eos_ids=[2], max_tokens=2)
    first = x.double().log_softmax(-1)[0].topk(6)
    assert beams.step(x) == [first.indices.tolist()]
    total = (y.double().log_softmax(-1) + first.values[:, None]).view(-1).topk(6)
    assert beams.step(y) == [[]] * 6 and beams.done
    assert ids(beams.best()) == [[first.indices[i // 49152].item(), i % 49152] for i in total.indices.tolist()]
    assert [h.cumulative_logprob for h in beams.best()] == pytest.approx(total.values.tolist(), abs=1e-5)

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_any_layout(dtype):
    toy = Toy(4, 11)
    want = drive(search(3), lambda rows: toy(rows).to(dtype).float())
    assert drive(search(3), lambda rows: toy(rows).to(dtype)) == want
    assert drive(search(3), lambda rows: toy(rows).to(dtype).float().T.contiguous().T.requires_grad_()) == want

def test_masked_tokens_never_come():
    toy = Toy(5, 9)
    def masked(rows):
        x = toy(rows).clone()
        x[:, [2, 3, 5, 8]] = -inf
        return x
    got = drive(search(4, max_tokens=6), masked)
    assert len(got) == 4 and not {2, 3, 5, 8} & {t for h in got for t in h.token_ids} and all(math.isfinite(h.score) for h in got)

@pytest.mark.parametrize("bad, said", [(nan, "nan"), (inf, "inf"), (-inf, "-inf")])
def test_logits_without_a_distribution(bad, said):
    toy, beams = Toy(6, 9), search(3, max_tokens=4)
    beams.step(toy([[]]))
    live, ended, x = list(beams.live), list(beams.finished), toy(ids(beams.live)).clone()
    x[1] = x[1].fill_(bad) if bad == -inf else x[1].index_fill(0, torch.tensor([4]), bad)
    with pytest.raises(ValueError, match=f"beam 1: the largest logit is {said}"): beams.step(x)
    assert beams.live == live and beams.finished == ended and not beams.done
    while not beams.done: beams.step(toy(ids(beams.live)))
    assert beams.best() == drive(search(3, max_tokens=4), toy)

def test_wrong_rows_and_a_step_too_many():
    beams = search(2, max_tokens=1)
    with pytest.raises(ValueError, match="2 rows of logits for 1 live"): beams.step(torch.zeros(2, 5))
    beams.step(torch.zeros(1, 5))
    assert beams.done
    for rows in (0, 1):
        with pytest.raises(ValueError, match=f"{rows} rows of logits for 0 live"): beams.step(torch.zeros(rows, 5))

@pytest.mark.parametrize("kw, said", [(dict(width=2, n=3), "n must be"), (dict(width=0), "n must be"), (dict(width=2, max_tokens=0), "max_tokens must be")])
def test_refused(kw, said):
    with pytest.raises(ValueError, match=said): search(**kw)

def test_logits_are_left_alone():
    x = torch.randn(1, 20)
    before = x.clone()
    search(3, logprobs=2).step(x)
    assert torch.equal(x, before)


# Blocks

@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_blocks_hold_each_beams_text_and_nothing_else(block_size):
    "fork, free and append as told: every table reads its beam's text, dropped beams' blocks are free in the same step."
    for seed in range(6):
        toy, beams, prompt = Toy(seed, 7, 1.0), search(4, early_stopping="never", max_tokens=9), [50 + i for i in range(3 + seed)]
        manager, memory, seqs, names = BlockManager(60, block_size), {}, [0], itertools.count(1)
        def write(seq, position, token):
            table = manager.tables[seq].blocks
            memory[table[position // block_size], position % block_size] = token
        manager.append(0, len(prompt))
        for i, t in enumerate(prompt): write(0, i, t)
        while not beams.done:
            told, after = beams.step(toy(ids(beams.live))), []
            for seq, tokens in zip(seqs, told):
                children = [next(names) for _ in tokens[1:]]
                for child in children: manager.fork(seq, child)
                if tokens: after += [seq, *children]
                else: manager.free(seq)
            for seq, h in zip(after, beams.live, strict=True):
                growth = manager.append(seq)
                for source, to in growth.copies: memory.update({(to, i): memory[source, i] for i in range(block_size) if (source, i) in memory})
                write(seq, len(prompt) + len(h.token_ids) - 1, h.token_ids[-1])
            manager.check()
            seqs = after
            for seq, h in zip(seqs, beams.live):
                blocks, text = manager.tables[seq].blocks, prompt + h.token_ids
                assert [memory[blocks[i // block_size], i % block_size] for i in range(len(text))] == text
            assert 60 - manager.num_free == len({b for seq in seqs for b in manager.tables[seq].blocks})
        assert manager.num_free == 60


# Log-probabilities

def test_every_hypothesis_carries_its_log_probabilities():
    for seed, num_top in [(0, 0), (1, 2), (2, 20)]:
        toy = Toy(seed, 8)
        got = drive(search(3, eos_ids=[1, 2], logprobs=num_top), toy)
        for h in got:
            want = [token_logprobs(toy([h.token_ids[:i]]), [t], [num_top])[0] for i, t in enumerate(h.token_ids)]
            assert h.logprobs == want and [next(iter(e)) for e in want] == h.token_ids
            assert sum(e[t].logprob for e, t in zip(want, h.token_ids)) == pytest.approx(h.cumulative_logprob, abs=1e-5)
        bare = drive(search(3, eos_ids=[1, 2]), toy)
        assert ids(bare) == ids(got) and all(h.logprobs is None for h in bare)


# transformers

EVERY_FOURTH = tuple(range(0, 64, 4))

@functools.lru_cache
def llama(seed, vocab=64, layers=2):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False,
                         bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return LlamaForCausalLM(config).eval().requires_grad_(False)

def theirs(model, prompt, width, n, length_penalty, early_stopping, eos_ids, max_tokens):
    "(ids, score) of the n best hypotheses of transformers' generate."
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, num_beams=width,
                         num_return_sequences=n, length_penalty=length_penalty, early_stopping=early_stopping,
                         eos_token_id=list(eos_ids) or None, pad_token_id=model.config.vocab_size - 1, max_new_tokens=max_tokens,
                         return_dict_in_generate=True, output_scores=True, output_logits=True)
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    return [(ids[len(prompt):len(prompt) + k], s) for ids, k, s in zip(out.sequences.tolist(), lengths, out.sequences_scores.tolist())]

def dense(model, prompt):
    return lambda rows: model(torch.tensor([prompt + row for row in rows])).logits[:, -1]

def same(ours, want, tolerance=1e-3):
    assert [h.token_ids for h in ours] == [ids for ids, _ in want]
    for h, (_, score) in zip(ours, want): assert abs(h.score - score) <= tolerance * max(1, abs(score))

@pytest.mark.parametrize("length_penalty, early_stopping, width", [      # each penalty ends in each way, twice
    (p, e, w) for i, p in enumerate([-1.0, 0.0, 1.0, 2.0]) for j, e in enumerate(EARLY) for k, w in enumerate([2, 4, 6]) if (i + j) % 3 != k])
def test_equals_transformers(width, early_stopping, length_penalty):
    reasons = []
    for seed, eos_ids in [(0, EVERY_FOURTH), (1, (3, 11, 40)), (2, (50,))]:
        model, prompt = llama(seed), [5, 9, 3, width - 2]
        how = (width, max(1, width - seed), length_penalty, early_stopping, eos_ids, 12)
        ours = drive(BeamSearch(*how), dense(model, prompt))
        same(ours, theirs(model, prompt, *how))
        reasons += [h.finish_reason for h in ours]
    if width > 2 and length_penalty == 1.0: assert {*reasons} == {"stop", "length"}

@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_equals_transformers_where_candidates_are_few_or_nothing_ends(max_tokens):
    model = llama(4, vocab=8)                             # 8 tokens, and transformers takes 12 candidates for width 6
    for width, eos_ids in [(6, (2,)), (4, ()), (3, (2, 7))]:
        for early_stopping in EARLY:
            how = (width, width, 1.0, early_stopping, eos_ids, max_tokens)
            same(drive(BeamSearch(*how), dense(model, [1, 6, 4])), theirs(model, [1, 6, 4], *how))

def test_the_comparison_with_transformers_has_teeth():
    "Its answers change with each parameter, so that equality above says something."
    base, prompts = dict(width=4, n=2, length_penalty=1.0, early_stopping=False, eos_ids=EVERY_FOURTH, max_tokens=12), range(5)
    def answers(**change): return [[i for i, _ in theirs(llama(0), [5, 9, 3, p], **base | change)] for p in prompts]
    found = [answers(), answers(width=2), answers(length_penalty=-1.0), answers(length_penalty=2.0), answers(early_stopping=True),
             answers(early_stopping="never"), answers(eos_ids=(3,)), answers(max_tokens=2)]
    assert len({str(f) for f in found}) == len(found)
