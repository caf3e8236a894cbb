"Sampling: exact kept sets, distributions, independence from neighbours, extreme logits, validation."
import dataclasses
import itertools
import math
import pickle
import random
import sys
import types
from fractions import Fraction

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as T

from pagedlm import sampling
from pagedlm.sampling import SamplingParams, Seen, adjust, best_samples, make_stream, sample, token_logprobs

P, inf, nan = SamplingParams, math.inf, math.nan


def weights(logits, params):
    "What the rows are drawn from: [R, V], up to a factor for each row."
    logits = torch.as_tensor(logits).float()
    t = torch.tensor([p.temperature for p in params])
    return sampling._filter(logits, sampling._weights(logits, logits.amax(-1), t), params)

def kept(probs, **kw):
    "The ids that can be drawn from these probabilities."
    return weights([[math.log(p) if p else -inf for p in probs]], [P(**kw)])[0].nonzero()[:, 0].tolist()

def oracle(logits, p):
    "The kept ids of one row and their probabilities, in plain Python and float64."
    z = [float(x) / max(p.temperature, 0.01) for x in logits]
    w = [math.exp(x - max(z)) for x in z]
    order = sorted(range(len(z)), key=lambda i: (-float(logits[i]), i))
    order = [i for i in order if w[i] >= p.min_p * max(w)]
    if p.top_k > 0: order = order[:p.top_k]
    mass, total, keep = 0.0, sum(w[i] for i in order), []
    for i in order:
        if p.top_p < 1 and keep and mass >= (p.top_p - sampling.SLACK) * total: break
        keep.append(i); mass += w[i]
    total = sum(w[i] for i in keep)
    return {i: w[i] / total for i in keep}

def streams(params, engine_seed=0): return [make_stream(p, engine_seed, i) for i, p in enumerate(params)]

def randn(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale

def run(rows, steps=6):
    """Decode `rows` = [(number, params)] together for some steps: {number: ids}. The logits of a
    request depend on its number and its own tokens only, as a perfect model's would."""
    gens, params = {n: make_stream(p, 7, n) for n, p in rows}, [p for _, p in rows]
    out, seen = {n: [] for n, _ in rows}, {n: Seen(range(n, 101, 2)) if p.penalizes else None for n, p in rows}
    for step in range(steps):
        x = torch.cat([randn(1, 101, seed=1000 * n + step) for n, _ in rows])
        x = adjust(x, params, [seen[n] for n, _ in rows], [(int(row.argmax()),) for row in x], [step] * len(rows))
        got = sample(x, params, [gens[n] for n, _ in rows])
        for (n, p), t in zip(rows, got.token_ids):
            out[n].append(t)
            if p.penalizes: seen[n].add(t)
    return out


# What stays

@pytest.mark.parametrize('probs, kw, want', [
    ([.5, .35, .10, .05], dict(top_p=.9), [0, 1, 2]),        # .85 does not reach .9
    ([.1, .2, .3, .4], dict(top_p=.6), [2, 3]),
    ([.1, .2, .3, .4], dict(top_p=.7), [2, 3]),              # reached exactly
    ([.5, .3, .2], dict(top_p=.8), [0, 1]),
    ([.5, .3, .2], dict(top_p=.81), [0, 1, 2]),
    ([.5, .3, .2], dict(top_p=.5), [0]),
    ([.1, .2, .3, .4], dict(top_p=1e-8), [3]),
    ([.1, .2, .3, .4], dict(top_p=1.0), [0, 1, 2, 3]),
    ([.1, .2, .3, .4], dict(top_k=1), [3]),
    ([.1, .2, .3, .4], dict(top_k=1, top_p=.8), [3]),
    ([.1, .2, .3, .4], dict(top_k=2, top_p=.5), [3]),        # .4 / .7 reaches .5
    ([.1, .2, .3, .4], dict(top_k=2, top_p=.6), [2, 3]),
    ([.1, .2, .3, .4], dict(top_k=4), [0, 1, 2, 3]),
    ([.1, .2, .3, .4], dict(top_k=5), [0, 1, 2, 3]),
    ([.1, .2, .3, .4], dict(top_k=10**30), [0, 1, 2, 3]),
    ([.1, .2, .3, .4], dict(top_k=0), [0, 1, 2, 3]),
    ([.1, .2, .3, .4], dict(top_k=-1), [0, 1, 2, 3]),
    ([.1, .2, .3, .4], dict(min_p=.5), [1, 2, 3]),           # exactly half of the best stays
    ([.1, .2, .3, .4], dict(min_p=.51), [2, 3]),
    ([.1, .2, .3, .4], dict(min_p=1.0), [3]),
    ([.1, .2, .3, .4], dict(top_k=3, top_p=.9, min_p=.6), [2, 3]),
    ([.1, .2, .3, .4], dict(top_p=.55, min_p=.6), [3]),                # .4 / .7: min-p first, else [2, 3]
    ([.1, .2, .3, .4], dict(top_k=3, top_p=.5, min_p=.6), [3]),
    ([.1, .2, .3, .4], dict(top_k=2, top_p=.6, min_p=.3), [2, 3]),
    ([.1, .2, .3, .4], dict(top_k=1, min_p=.1), [3]),
    ([.1, .2, .3, .4], dict(top_k=4, min_p=.6), [2, 3]),             # k counts only what is left
    ([.3, .05, .3, .05, .3], dict(min_p=.5, top_k=2), [0, 2]),
    ([.3, .05, .3, .05, .3], dict(min_p=.5, top_p=.66), [0, 2]),     # two thirds reach it
    ([.3, .05, .3, .05, .3], dict(min_p=.5, top_p=.67), [0, 2, 4]),
    ([.25] * 4, dict(top_p=.5), [0, 1]),                     # ties: lowest ids
    ([.25] * 4, dict(top_p=.51), [0, 1, 2]),
    ([.25] * 4, dict(top_p=1e-9), [0]),
    ([.25] * 4, dict(top_k=3), [0, 1, 2]),
    ([.1, .3, .3, .3], dict(top_k=2), [1, 2]),
    ([.3, .1, .3, .3], dict(top_k=2, top_p=.4), [0]),
    ([.25] * 4, dict(min_p=1.0), [0, 1, 2, 3]),
    ([.5, 0, .5, 0], dict(), [0, 2]),
    ([.5, 0, .5, 0], dict(top_k=3), [0, 2]),                 # a masked token never comes back
    ([.5, 0, .5, 0], dict(top_p=.9999), [0, 2]),
    ([0, 1, 0], dict(top_p=.5, top_k=2, min_p=.1), [1]),
    ([1.0], dict(top_p=.5, top_k=1, min_p=.1), [0]),
])
def test_kept(probs, kw, want): assert kept(probs, **kw) == want

def test_a_boundary_reached_exactly_is_reached():
    "Odds of n : n-1 : ... : 1; the first k make up p, whichever way float32 rounds them."
    for n in range(2, 40):
        odds = list(range(n, 0, -1))
        params = [P(top_p=sum(odds[:k]) / sum(odds)) for k in range(1, n + 1)]
        got = weights(torch.tensor(odds).float().log().expand(n, n), params)
        assert (got > 0).sum(-1).tolist() == list(range(1, n + 1))

@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
def test_tiny_top_p_keeps_the_argmax(dtype):
    x = randn(5, 300).to(dtype)
    params = [P(top_p=1e-8, seed=i) for i in range(5)]
    assert sample(x, params, streams(params)).token_ids == x.float().argmax(-1).tolist()

def mixed_params(n):
    return [P(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in zip(
        *(torch.tensor(a)[torch.randint(len(a), (n,), generator=torch.Generator().manual_seed(s))].tolist()
          for s, a in enumerate([[.005, .3, 1., 2.], [-1, 0, 1, 2, 7, 40, 97, 500],
                                 [1e-9, .1, .5, .9, .99, 1.], [0., 0., .01, .3, 1.]])))]

@pytest.mark.parametrize('scale', [.3, 3., 30.])
@pytest.mark.parametrize('levels', [None, 1, 5])     # levels: round the logits, so that many tie
def test_kept_and_weights_equal_an_oracle(scale, levels):
    x, params = randn(300, 97, scale=scale), mixed_params(300)
    if levels: x = (x / scale * levels).round() / levels * scale
    w = weights(x, params)
    w /= w.sum(-1, keepdim=True)
    for row, got, p in zip(x.tolist(), w.tolist(), params):
        want = oracle(row, p)
        positive = {i for i, g in enumerate(got) if g > 0}
        assert positive <= set(want)
        assert positive >= {i for i, q in want.items() if q > 1e-37}      # float32 can hold it
        assert all(abs(got[i] - q) < 1e-5 for i, q in want.items())

@pytest.mark.parametrize('first', [1, 2, 13, 96, 97, 1000])
def test_the_first_ranking_does_not_matter(first):
    x = torch.cat([randn(40, 97, scale=s) for s in (.1, 1., 10.)])
    x = torch.cat([x, x.round()])
    w = torch.softmax(x, -1)
    k = torch.full((len(x),), 97)
    p = torch.tensor([.1, .5, .9, .999999] * 60, dtype=torch.float64)
    want = sampling._keep_top(x, w.clone(), k, p, 97)
    assert torch.equal(sampling._keep_top(x, w.clone(), k, p, first), want)

def test_a_wide_nucleus_in_a_real_vocabulary():
    x = torch.stack([torch.zeros(49152), randn(49152)])
    w = weights(x, [P(top_p=.9), P(top_p=.9)])
    assert (w[0] > 0).sum() == math.ceil((.9 - 1e-6) * 49152) and w[0, 0] > 0 and w[0, -1] == 0
    wide = w[1] > 0
    probs = torch.softmax(x[1].double(), -1)
    assert sampling.FIRST_RANKED < wide.sum() and probs[wide].sum() >= .9 - 2e-6
    assert probs[wide].sum() - probs[wide].min() < .9


# Greedy

def test_greedy_is_the_first_argmax_whatever_else_is_set():
    x = torch.tensor([[1., 5., 5., 2.], [0., 0., 0., 0.], [-3., -inf, -2., -9.]])
    for kw in ({}, dict(top_k=2), dict(top_p=.01), dict(min_p=1.0), dict(seed=3)):
        assert sample(x, [P(temperature=0, **kw)] * 3, [None] * 3).token_ids == [1, 0, 2]

def test_greedy_rows_ignore_the_others():
    x = randn(6, 200)
    params = [P(temperature=0), P(), P(temperature=0, top_k=3), P(top_p=.5), P(top_k=1), P(temperature=0)]
    got = sample(x, params, streams(params)).token_ids
    best = x.argmax(-1).tolist()
    assert [got[i] for i in (0, 2, 4, 5)] == [best[i] for i in (0, 2, 4, 5)]

def test_top_k_1_is_greedy_even_where_float32_weights_tie():
    x = torch.tensor([[0., 1e-9, 5e-10], [1., 1., 0.]])       # exp(-1e-9) is 1 in float32
    params = [P(top_k=1, seed=s) for s in range(2)]
    assert sample(x, params, streams(params)).token_ids == [1, 0]


# Extremes

@pytest.mark.parametrize('temperature', [0, 1e-300, 1e-10, 1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('top', [1e4, -1e4, 0.])
def test_tiny_temperatures_are_argmax(temperature, dtype, top):
    x = torch.full((3, 1000), top).to(dtype)
    for i, t in enumerate((0, 500, 999)): x[i, t] = top + 128      # a gap in bfloat16 too
    x[:, 7] = -1e4
    params = [P(temperature=temperature, top_p=p, seed=1) for p in (1., .9, 1e-8)]
    got = sample(x, params, streams(params))
    assert got.token_ids == [0, 500, 999] and not got.errors

def test_a_gap_of_one_is_enough_for_tiny_temperatures():
    x = torch.zeros(200, 49152)
    x[torch.arange(200), torch.arange(200) * 7] = 1.
    params = [P(temperature=1e-6, seed=i) for i in range(200)]
    assert sample(x, params, streams(params)).token_ids == [7 * i for i in range(200)]

def test_tiny_temperatures_act_as_a_hundredth():
    x = torch.tensor([[0., .01, .02, -1.]])
    assert torch.equal(weights(x, [P(temperature=1e-9)]), weights(x, [P(temperature=.01)]))
    w = weights(x, [P(temperature=.01)])[0]
    torch.testing.assert_close(w[:3], torch.softmax(torch.tensor([0., 1., 2.]), 0))

@pytest.mark.parametrize('big', [6.0e4, 1e4, 3.3e38])
def test_large_finite_logits(big):
    x = torch.tensor([[big, -big, big, 0.]] * 64)
    params = [P(temperature=2., top_p=.99, seed=i) for i in range(64)]
    got = sample(x, params, streams(params))
    assert not got.errors and set(got.token_ids) == {0, 2}

def test_half_precision_logits():
    x = torch.tensor([[65504., -65504., 65504., 0.]] * 64, dtype=torch.float16)
    params = [P(seed=i) for i in range(64)]
    assert set(sample(x, params, streams(params)).token_ids) == {0, 2}
    y = randn(500, 400, scale=.1)
    params = [P(seed=i, top_p=.95) for i in range(500)]
    assert (sample(y.half(), params, streams(params)).token_ids
            == sample(y.half().float(), params, streams(params)).token_ids)

@pytest.mark.parametrize('bad', ['one nan', 'all nan', 'all -inf', 'one +inf', 'nan and +inf'])
@pytest.mark.parametrize('kw', [dict(temperature=0), dict(), dict(top_k=5), dict(top_p=.9), dict(min_p=.1)])
def test_a_bad_row_fails_alone(bad, kw):
    x = randn(4, 50)
    params = [P(seed=3), P(seed=4, **kw), P(temperature=0), P(seed=5, top_p=.8)]
    want = sample(x, params, streams(params)).token_ids
    match bad:
        case 'one nan': x[1, 20] = nan
        case 'all nan': x[1] = nan
        case 'all -inf': x[1] = -inf
        case 'one +inf': x[1, 20] = inf
        case _: x[1, 20], x[1, 21] = nan, inf
    got = sample(x, params, streams(params))
    assert got.token_ids == [want[0], None, *want[2:]]
    assert list(got.errors) == [1] and ('nan' in got.errors[1] or 'inf' in got.errors[1])

def test_all_rows_bad_and_no_rows():
    got = sample(torch.full((2, 5), nan), [P(seed=0), P(temperature=0)], streams([P(seed=0), P(temperature=0)]))
    assert got.token_ids == [None, None] and list(got.errors) == [0, 1]
    assert sample(torch.zeros(0, 5), [], []).token_ids == []

def test_masked_tokens_are_never_drawn():
    x = torch.full((500, 64), -inf)
    x[:, 5], x[:, 60] = 0., 0.
    params = [P(temperature=2., seed=i) for i in range(500)]
    assert set(sample(x, params, streams(params)).token_ids) == {5, 60}

def test_logits_are_not_modified():
    x = randn(5, 300)
    before = x.clone()
    for kw in ({}, dict(temperature=0), dict(top_k=4), dict(top_p=.4), dict(min_p=.2, temperature=.5)):
        params = [P(seed=1, **kw)] * 5
        sample(x, params, streams(params))
        assert torch.equal(x, before)

def test_logits_of_any_layout_and_with_gradients():
    x = randn(40, 6).T.requires_grad_()
    params = [P(seed=i, top_p=.9) for i in range(6)]
    assert (sample(x, params, streams(params)).token_ids
            == sample(x.detach().contiguous(), params, streams(params)).token_ids)


# Drawing

@pytest.mark.parametrize('u, want', [(0., 1), (.2499, 1), (.25, 3), (.5, 3), (.9999, 3), (1 - 2**-53, 3)])
def test_pick(u, want):
    w = torch.tensor([[0., 1., 0., 3., 0.]])
    assert sampling._pick(w, torch.tensor([u], dtype=torch.float64)).item() == want

def test_pick_never_leaves_the_row():
    u = torch.full((2000,), 1 - 2**-53, dtype=torch.float64)
    w = torch.rand(2000, 37, generator=torch.Generator().manual_seed(0))
    w[:, 30:] = 0
    assert (sampling._pick(w, u) == 29).all()
    assert (sampling._pick(w, u * 0) == 0).all()

LOGITS = [1.0, 2.5, -1.0, 0.0, 2.0, 2.0, -4.0, 0.5]

def draws(logits, p, n=20_000):
    "n tokens of one request at these logits: counts by id."
    g, x = make_stream(p), torch.as_tensor(logits).expand(n // 10, -1)
    ids = [t for _ in range(10) for t in sample(x, [p] * len(x), [g] * len(x)).token_ids]
    return torch.bincount(torch.tensor(ids), minlength=len(logits)).tolist()

def chi2(counts, want):
    "How far counts are from what these probabilities lead one to expect, in standard deviations above the mean."
    n, free = sum(counts), len(want) - 1
    assert all(counts[i] == 0 for i in range(len(counts)) if i not in want)
    if not free: return 0
    return (sum((counts[i] - n * q)**2 / (n * q) for i, q in want.items()) - free) / math.sqrt(2 * free)

FILTERS = dict(temperature=1.5, top_k=5, top_p=.8, min_p=.12)

@pytest.mark.parametrize('kw', [{}, dict(temperature=.5), dict(temperature=2.), dict(temperature=1.5, top_k=5, top_p=.9, min_p=.05)] + [
    {name: FILTERS[name] for name in names} for r in (1, 2, 3, 4) for names in itertools.combinations(FILTERS, r)])
def test_frequencies_follow_the_distribution(kw):
    p = P(seed=11, **kw)
    assert chi2(draws(LOGITS, p), oracle(torch.tensor(LOGITS), p)) < 4

@pytest.mark.parametrize('kw', [
    dict(repetition_penalty=1.5), dict(repetition_penalty=.7, temperature=.8), dict(frequency_penalty=.5), dict(presence_penalty=-1.5),
    dict(logit_bias={6: 4, 1: -1}), dict(min_tokens=9, stop_token_ids=[1, 4]), dict(logit_bias={1: -100}),
    dict(repetition_penalty=1.2, frequency_penalty=.3, presence_penalty=.4, logit_bias={3: 2}, min_tokens=9, stop_token_ids=[7]),
    dict(repetition_penalty=1.2, frequency_penalty=.3, presence_penalty=.4, logit_bias={3: 2}, min_tokens=9, **FILTERS)])
def test_frequencies_follow_the_adjusted_distribution(kw):
    p, prompt, output, ends = P(seed=12, **kw), [0, 0, 2], [4, 4, 5, 2], (7,)
    x = adjust(torch.tensor([LOGITS]), [p], [seen_of(prompt, output)], [ends], [4])[0]
    want = {i: q for i, q in oracle(adjusted(LOGITS, p, prompt, output, ends), p).items() if q > 1e-9}
    counts = draws(x, p)
    assert chi2(counts, want) < 4 and chi2(counts, {i: q for i, q in oracle(LOGITS, P()).items()}) > 20      # and not the raw one

def test_a_biased_draw_would_be_seen():
    "The bound above has teeth: a temperature off by a twentieth breaks it."
    assert chi2(draws(LOGITS, P(seed=11)), oracle(LOGITS, P(temperature=1.05))) > 4


# Streams

SEEDED = [(0, P(seed=5)), (1, P(seed=6, top_p=.7)), (2, P()), (3, P(temperature=.6, top_k=9)),
          (4, P(temperature=0)), (5, P(seed=5, min_p=.1, temperature=1.7))]
ADJUSTED = [(6, P(seed=6, repetition_penalty=1.4)), (7, P(temperature=0, frequency_penalty=1, min_tokens=3)),
            (8, P(presence_penalty=2, logit_bias={3: 2, 50: -100}, top_k=30)), (9, P(seed=5, min_tokens=16, top_p=.9, min_p=.05))]

def test_same_tokens_alone_in_any_slot_and_beside_anyone():
    solo = {n: run([(n, p)])[n] for n, p in SEEDED}
    assert run(SEEDED) == solo and run(SEEDED[::-1]) == solo
    for i in range(6):
        some = SEEDED[i:] + SEEDED[:i // 2]
        assert run(some) == {n: solo[n] for n, _ in some}

def test_adjusted_requests_too_and_they_disturb_nobody():
    rows = [row for pair in itertools.zip_longest(SEEDED, ADJUSTED) for row in pair if row]
    solo = {n: run([(n, p)])[n] for n, p in rows}
    assert run(rows) == solo and run(rows[::-1]) == solo and run(ADJUSTED) == {n: solo[n] for n, _ in ADJUSTED}
    plain = run([(n, P(seed=p.seed, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)) for n, p in ADJUSTED])
    assert all(plain[n] != solo[n] for n, _ in ADJUSTED)              # each was changed by what it asked for

def test_same_tokens_in_a_real_vocabulary():
    x, params = randn(6, 49152), [p for _, p in SEEDED]
    together = sample(x, params, streams(params)).token_ids
    alone = [sample(x[i:i + 1], [p], [make_stream(p, 0, i)]).token_ids[0] for i, p in enumerate(params)]
    assert together == alone

def test_waiting_between_tokens_changes_nothing():
    "A request that skips steps (preempted, say) goes on where its stream stood."
    p, x = P(seed=9), [randn(1, 64, seed=s) for s in range(8)]
    g = make_stream(p)
    straight = [sample(row, [p], [g]).token_ids[0] for row in x]
    g, other, broken = make_stream(p), make_stream(P(seed=10)), []
    for row in x:
        for _ in range(3): sample(row, [P(seed=10)], [other])
        torch.rand(5)                                    # the global generator plays no part
        broken += sample(row, [p], [g]).token_ids
    assert broken == straight

def test_one_number_for_each_token():
    for kw in ({}, dict(top_k=3), dict(top_p=.9, min_p=.1)):
        g, h = make_stream(P(seed=1)), make_stream(P(seed=1))
        sample(randn(1, 500), [P(seed=1, **kw)], [g])
        torch.rand((), generator=h, dtype=torch.float64)
        assert torch.equal(g.get_state(), h.get_state())

def ids(stream, n=30):
    return sample(torch.zeros(n, 1000), [P()] * n, [stream] * n).token_ids

def test_streams_of_different_requests_differ_and_repeat():
    made = {f'{e} {r} {i}': ids(make_stream(P(), e, r, i)) for e in (0, 1) for r in range(4) for i in range(3)}
    assert len({tuple(v) for v in made.values()}) == len(made)
    assert ids(make_stream(P(), 1, 3, 2)) == made['1 3 2']

def test_a_seed_fixes_the_stream_whoever_serves_it():
    want = ids(make_stream(P(seed=0), 0, 0))
    assert want == ids(make_stream(P(seed=0), 99, 1234))
    assert want == ids(make_stream(P(seed=np.int64(0)), 99, 1234))
    assert want != ids(make_stream(P(), 0, 0))
    assert len({tuple(ids(make_stream(P(seed=s)))) for s in (0, 1, -1, 2**32, 2**64 + 1, -10**30)}) == 6
    assert len({tuple(ids(make_stream(P(seed=7), index=i))) for i in range(8)}) == 8

def test_neighbouring_seeds_are_unrelated():
    u = torch.stack([torch.rand(200, generator=make_stream(P(seed=s)), dtype=torch.float64) for s in range(50)])
    c = torch.corrcoef(u) - torch.eye(50)
    assert c.abs().max() < .35 and abs(u[:, 0].mean() - .5) < .15

def test_greedy_needs_no_stream():
    assert make_stream(P(temperature=0, seed=1)) is None
    with pytest.raises(ValueError, match='row 1 .*generator'):
        sample(torch.zeros(2, 4), [P(temperature=0), P()], [None, None])

@pytest.mark.parametrize('args', [(torch.zeros(4), [P()], [None]), (torch.zeros(2, 4), [P()], [None]),
                                  (torch.zeros(2, 4), [P(temperature=0)] * 2, [None])])
def test_lengths_must_agree(args):
    with pytest.raises(ValueError, match='logits must be'): sample(*args)


# Parameters

@pytest.mark.parametrize('name, allowed, values', [
    ('temperature', r'\[0, 2\]', [-.1, -1e-9, 2.01, nan, inf, -inf, True, False, None, '1', [1], 1j, 10**400]),
    ('top_p', r'\(0, 1\]', [0, 0., -.1, 1.0001, nan, inf, True, None, '0.5', 2]),
    ('top_k', 'at least -1', [-2, 1.0, 2.5, nan, inf, True, None, '3']),
    ('min_p', r'\[0, 1\]', [-.1, 1.1, nan, inf, True, None, '0']),
    ('seed', 'integer or None', [1.0, nan, True, '7', [1]]),
    ('max_tokens', 'at least 0', [-1, 1.0, nan, True, '16', [1]]),
    ('stop_token_ids', 'token ids', [[-1], [1, 2.0], [True], ['abc'], 'abc', 5, [None], [[1]], True]),
    ('ignore_eos', 'True or False', [1, 0, None, 'yes']),
    ('use_beam_search', 'True or False', [1, 0, None, 'yes']),
    ('n', 'at least 1', [0, -1, 1.0, nan, True, None, '2']),
    ('best_of', 'at least n = 1', [0, -1, 1.0, nan, True, '2']),
    ('logprobs', r'\[0, 20\]', [-1, 21, 1.0, nan, True, False, '5']),
    ('length_penalty', r'\[-10, 10\]', [-10.1, 10.1, nan, inf, True, None, '1']),
    ('early_stopping', "False, True or 'never'", ['always', 0, 1, None, nan, 0.0, 'False', ['never']]),
    ('skip_special_tokens', 'True or False', [1, 0, None, 'no']),
    ('include_stop_str_in_output', 'True or False', [1, 0, None, 'no']),
    ('presence_penalty', r'\[-2, 2\]', [-2.01, 2.01, nan, inf, -inf, True, None, '1', [1]]),
    ('frequency_penalty', r'\[-2, 2\]', [-2.01, 2.01, nan, inf, -inf, True, None, '1', 1j]),
    ('repetition_penalty', 'finite number above 0', [0, 0.0, -1, nan, inf, np.float32(inf), Fraction(1, 10**400), True, None, '1', 10**400]),
    ('min_tokens', 'at least 0 and at most max_tokens = 16', [-1, 17, 1.0, nan, True, None, '2']),
    ('prompt_logprobs', r'\[0, 20\]', [-1, 21, 1.0, nan, True, False, '5']),
    ('stop', 'none of them empty', ['', ['a', ''], [''], 5, True, [5], [None], [['a']], b'a', [b'a']]),
    ('logit_bias', 'finite number', [5, 'a', True, [1], [(1, 2)], {-1: 1}, {'5': 1}, {1.0: 1}, {True: 1}, {None: 1}, {1: nan},
                                     {1: inf}, {1: -inf}, {1: '5'}, {1: None}, {1: True}, {1: 2, 'abc': 1}]),
])
def test_refused(name, allowed, values):
    for v in values:
        with pytest.raises(ValueError, match=f'{name} must be .*{allowed}.*not') as e: P(**{name: v})
        if name not in ('stop_token_ids', 'stop', 'logit_bias'): assert repr(v) in str(e.value)      # there: the part at fault

@pytest.mark.parametrize('name, values', [
    ('temperature', [0, 0.0, 2, 2.0, 1e-300, np.float32(.5), np.float64(.5), 1]),
    ('top_p', [1, 1.0, 1e-300, np.float32(.5)]),
    ('top_k', [-1, 0, 1, 10**30, np.int32(5)]),
    ('min_p', [0, 0.0, 1, 1.0]),
    ('seed', [None, 0, -1, 2**64, -2**70, np.int64(3)]),
    ('max_tokens', [None, 0, 1, 10**9]),
    ('stop_token_ids', [None, [], [0, 5], (7,), {3}, range(3), np.array([1, 2])]),
    ('n', [1, 2, 64, np.int64(3)]), ('best_of', [None, 1, 5]), ('logprobs', [None, 0, 20]),
    ('use_beam_search', [False]), ('length_penalty', [1, 1.0]), ('early_stopping', [False]),
    ('ignore_eos', [True, False]), ('skip_special_tokens', [True, False]), ('include_stop_str_in_output', [True, False]),
    ('presence_penalty', [-2, -2.0, 0, 2, np.float32(.5)]), ('frequency_penalty', [-2, 0, 0.0, 2.0, np.float32(.5)]),
    ('repetition_penalty', [5e-324, .5, 1, 2, 1.7e308, np.float32(1.5), 10**300]),
    ('min_tokens', [0, 1, 16, np.int64(3)]), ('prompt_logprobs', [None, 0, 20, np.int64(3)]),
    ('stop', [None, [], (), 'a', ' ', ['a', 'bc'], ('a',), {'a'}, iter(['a', 'b']), 'x' * 10**5, ['\n\n', '\ud83d']]),
    ('logit_bias', [None, {}, {0: 0}, {9: -100, 3: 100.0}, {np.int64(4): np.float32(2)}, {5: 10**400}, types.MappingProxyType({1: 2})]),
])
def test_accepted(name, values):
    x = randn(1, 10)
    for v in values:
        p = P(**{name: v})
        y = adjust(x, [p], [Seen([1, 2])], [(9,)], [0])
        assert sample(y, [p], [make_stream(p)]).token_ids[0] in range(10)

def test_one_object_can_serve_many():
    stops = [1, 2]
    p = P(stop_token_ids=stops)
    stops.append(3)
    assert p.stop_token_ids == (1, 2) and P().stop_token_ids == ()
    with pytest.raises(dataclasses.FrozenInstanceError): p.temperature = 0
    with pytest.raises(ValueError, match='temperature'): dataclasses.replace(p, temperature=3)
    assert dataclasses.replace(p, seed=4).stop_token_ids == (1, 2) and len({p, P(stop_token_ids=[1, 2])}) == 1

def test_stops_and_biases_are_kept_as_own_copies():
    bias, stops = {5: 1000, 3: -7, np.int64(2): np.float32(.5), 1: -10**400}, ['a']
    p = P(logit_bias=bias, stop=stops)
    bias[9] = 1; stops.append('b')
    assert p.logit_bias == {5: 100.0, 3: -7.0, 2: 0.5, 1: -100.0} and p.stop == ('a',)
    assert all(type(i) is int and type(b) is float for i, b in p.logit_bias.items())
    assert P().stop == P(stop=[]).stop == () and P(stop='abc').stop == ('abc',) and P().logit_bias is P(logit_bias={}).logit_bias is None
    q = dataclasses.replace(p, seed=4)
    assert q.logit_bias == p.logit_bias and q.stop == ('a',) and q != p and p == P(logit_bias=dict(p.logit_bias), stop='a')
    assert hash(p) == hash(P(logit_bias=dict(p.logit_bias), stop='a')) and p != P(stop='a') and pickle.loads(pickle.dumps(p)) == p

def test_a_refused_bias_shows_the_pair_at_fault():
    with pytest.raises(ValueError, match=r"logit_bias must be .*, not \{'7': 1\}"): P(logit_bias={5: 1, '7': 1})
    with pytest.raises(ValueError, match=r"stop must be .*, not ''"): P(stop=['a', ''])

@pytest.mark.parametrize('most', [0, 1, 5, None])
def test_min_tokens_is_at_most_max_tokens(most):
    for least in (0, 1, 5, 6, 10**9):
        if most is None or least <= most: assert P(min_tokens=least, max_tokens=most).min_tokens == least
        else:
            with pytest.raises(ValueError, match=f'min_tokens must be .* at most max_tokens = {most}, not {least}'):
                P(min_tokens=least, max_tokens=most)

@pytest.mark.parametrize('kw, penalizes, adjusts', [
    ({}, False, False), (dict(repetition_penalty=1, frequency_penalty=0, presence_penalty=0, logit_bias={}), False, False),
    (dict(repetition_penalty=.9), True, True), (dict(frequency_penalty=-1), True, True), (dict(presence_penalty=.1), True, True),
    (dict(logit_bias={5: 0}), False, True), (dict(min_tokens=3), False, True), (dict(min_tokens=2), False, False),
    (dict(stop='a', stop_token_ids=[1], temperature=.5, top_p=.5, logprobs=1), False, False)])
def test_who_asks_for_a_change(kw, penalizes, adjusts):
    assert P(**kw).penalizes == penalizes and P(**kw).adjusts(2) == adjusts

@pytest.mark.parametrize('name', ['stops', 'guided_json', 'temprature'])
def test_what_is_not_built_is_not_accepted(name):
    with pytest.raises(TypeError, match=name): P(**{name: 1})

def test_best_of_is_at_least_n_and_gives_the_width():
    assert [P(n=3, best_of=b).width for b in (None, 3, 7)] == [3, 3, 7] and P().width == 1
    with pytest.raises(ValueError, match='best_of must be an integer of at least n = 3, or None, not 2'): P(n=3, best_of=2)

@pytest.mark.parametrize('kw', [dict(), dict(temperature=0), dict(temperature=1), dict(top_k=0), dict(n=4, best_of=6, logprobs=2), dict(prompt_logprobs=3, logprobs=0),
                                dict(repetition_penalty=1, presence_penalty=0, frequency_penalty=0, logit_bias={}, stop=[], min_tokens=0, stop_token_ids=[3]),
                                dict(length_penalty=-2), dict(length_penalty=0.0, early_stopping=True), dict(early_stopping='never')])
def test_beams_accept(kw): assert P(use_beam_search=True, **kw).use_beam_search

@pytest.mark.parametrize('name, values', [('temperature', [.7, 1.1, 1e-9, 2]), ('top_p', [.9]), ('top_k', [1, 5]), ('min_p', [.1]), ('seed', [0, 7]),
    ('repetition_penalty', [.9, 1.1]), ('frequency_penalty', [-1, .1]), ('presence_penalty', [-1, .1]), ('logit_bias', [{5: 1}, {5: 0}]),
    ('min_tokens', [1]), ('stop', ['a', ['a', 'b']]), ('include_stop_str_in_output', [True])])
def test_beams_draw_nothing(name, values):
    for v in values:
        with pytest.raises(ValueError, match=f'{name} must be .* with use_beam_search, not'): P(use_beam_search=True, **{name: v})

@pytest.mark.parametrize('name, values', [('length_penalty', [0, 0.0, -1, 1.5, 2]), ('early_stopping', [True, 'never'])])
def test_only_beams_have_these(name, values):
    for v in values:
        with pytest.raises(ValueError, match=f'{name} must be .* without use_beam_search, not'): P(**{name: v})


# Log-probabilities

def exact(logits):
    "Natural log-probabilities in float64."
    x = logits.double()
    x = x - x.amax(-1, keepdim=True)
    return x - x.exp().sum(-1, keepdim=True).log()

@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('scale, shift', [(1., 0.), (30., 0.), (3., 1e4), (3., -1e4)])
def test_logprobs_ranks_and_order(dtype, scale, shift):
    x = (randn(24, 97, scale=scale) + shift).to(dtype)          # in half precision many tie
    tokens, tops = [(7 * r) % 97 for r in range(24)], [r % 8 for r in range(24)]
    got, want = token_logprobs(x, tokens, tops), exact(x)
    for row, lp, t, k, entry in zip(x.tolist(), want.tolist(), tokens, tops, got):
        order = sorted(range(97), key=lambda i: (-row[i], i))[:k]
        assert list(entry) == [t] + [i for i in order if i != t]
        for i, e in entry.items():
            assert abs(e.logprob - lp[i]) < 1e-5 and e.rank == 1 + sum(v > row[i] for v in row) and e.decoded_token is None

def test_logprobs_in_a_real_vocabulary():
    x = torch.cat([randn(3, 49152), torch.zeros(1, 49152)])
    got = token_logprobs(x, [5, 49151, 0, 20], [20, 0, 5, 3])
    want = exact(x)
    top = x.sort(descending=True, stable=True).indices.tolist()
    assert [list(e) for e in got] == [[t] + [i for i in row[:k] if i != t] for t, k, row in zip([5, 49151, 0, 20], [20, 0, 5, 3], top)]
    assert all(abs(e.logprob - want[r, i]) < 2e-6 for r, entry in enumerate(got) for i, e in entry.items())
    assert list(got[3]) == [20, 0, 1, 2] and {e.rank for e in got[3].values()} == {1}
    assert got[3][20].logprob == pytest.approx(-math.log(49152), abs=1e-6)

def test_logprobs_do_not_depend_on_the_neighbours():
    x, tops = randn(12, 301).round(), [0, 3, 20, 1, 7, 300, 2, 5, 0, 20, 4, 9]        # rounded: many ties
    together = token_logprobs(x, list(range(12)), tops)
    assert together == [token_logprobs(x[r:r + 1], [r], [tops[r]])[0] for r in range(12)]

def test_logprobs_of_masked_tokens():
    x = torch.tensor([[0., -inf, 0., -inf]])
    entry, = token_logprobs(x, [2], [4])
    assert list(entry) == [2, 0] and entry[0].logprob == pytest.approx(-math.log(2)) and entry[2].rank == 1
    entry, = token_logprobs(x, [1], [1])
    assert list(entry) == [1, 0] and entry[1].logprob == -inf and entry[1].rank == 3

def test_logprobs_of_nothing_and_of_wrong_lengths():
    assert token_logprobs(torch.zeros(0, 5), [], []) == []
    assert list(token_logprobs(torch.zeros(1, 5), [3], [20])[0]) == [3, 0, 1, 2, 4]
    for args in [([0], [0, 0]), ([0, 0], [0]), ([0, 0, 0], [0, 0, 0])]:
        with pytest.raises(ValueError, match='2 rows of logits'): token_logprobs(torch.zeros(2, 5), *args)

def test_logprobs_leave_the_logits_alone():
    x = randn(3, 50, seed=2)
    before = x.clone()
    token_logprobs(x, [0, 1, 2], [3, 0, 5])
    assert torch.equal(x, before)


# Adjusting the logits

def seen_of(prompt, output):
    s = Seen(prompt)
    for t in output: s.add(t)
    return s

def adjusted(row, p, prompt, output, ends=()):
    "One row as the definitions have it, token by token, in Python's float64."
    out = [float(v) for v in row]
    for t in range(len(out)):
        if t in prompt or t in output:
            out[t] = out[t] / p.repetition_penalty if out[t] > 0 else out[t] * p.repetition_penalty
        out[t] -= p.frequency_penalty * output.count(t)
        if t in output: out[t] -= p.presence_penalty
        out[t] += (p.logit_bias or {}).get(t, 0)
        if len(output) < p.min_tokens and t in (*ends, *p.stop_token_ids): out[t] = -inf
    return out

def batch(rows, V=40, seed=0):
    "Arguments of `adjust` for rows of (params, prompt, output, ends), at random logits."
    params, prompts, outputs, ends = zip(*rows)
    seen = [seen_of(a, o) if p.penalizes else None for p, a, o in zip(params, prompts, outputs)]
    return randn(len(rows), V, seed=seed), list(params), seen, list(ends), [len(o) for o in outputs]

def mixed_rows(n, V=40, seed=0):
    "Rows that ask for anything from nothing to everything, and texts that repeat themselves."
    r = random.Random(seed)
    def some(of): return r.choices(range(V), k=r.randint(0, of))
    def row():
        p = P(repetition_penalty=r.choice([1, 1, 1.0, .5, 1.3, 2.0]), frequency_penalty=r.choice([0, 0, -2, .4, 2]),
              presence_penalty=r.choice([0, 0, -2, .7, 2]), min_tokens=r.choice([0, 0, 1, 5, 50]), max_tokens=None,
              logit_bias=r.choice([None, {}, {t: r.uniform(-9, 9) for t in some(6)}, {3: -100, 4: 100}]),
              stop_token_ids=some(3), temperature=r.choice([0, 1]))
        return p, some(30), some(30), tuple(some(3))
    return [row() for _ in range(n)]

def test_adjust_equals_the_definitions_in_any_mixture():
    rows = mixed_rows(300)
    x, *args = batch(rows)
    got = adjust(x, *args)
    for i, (old, new, (p, prompt, output, ends)) in enumerate(zip(x.tolist(), got.tolist(), rows)):
        assert new == pytest.approx(adjusted(old, p, prompt, output, ends), rel=1e-6, abs=1e-6), i
    asks = [p.adjusts(len(output)) for p, _, output, _ in rows]
    assert 10 < asks.count(False) and all(torch.equal(got[i], x[i]) for i, a in enumerate(asks) if not a)

def test_each_adjusted_row_equals_itself_alone():
    rows = mixed_rows(120, seed=1)
    x, *args = batch(rows)
    got = adjust(x, *args)
    for i in range(120): assert torch.equal(adjust(x[i:i + 1], *(a[i:i + 1] for a in args))[0], got[i])
    back = adjust(x.flip(0), *(a[::-1] for a in args))
    assert torch.equal(back.flip(0), got)

def test_adjust_returns_the_same_tensor_when_nobody_asks():
    x = randn(3, 10).to(torch.bfloat16)
    assert adjust(x, [P(), P(temperature=0), P(min_tokens=4)], [None] * 3, [(5,)] * 3, [0, 9, 4]) is x
    assert adjust(x[:0], [], [], [], []).shape == (0, 10)

def test_adjust_leaves_its_input_alone():
    x, *args = batch(mixed_rows(50, seed=2))
    before, was = x.clone(), [(s.ids[:], s.counts[:]) if s else None for s in args[1]]
    got = adjust(x, *args)
    assert torch.equal(x, before) and not torch.equal(got, before) and got.data_ptr() != x.data_ptr()
    assert was == [(s.ids, s.counts) if s else None for s in args[1]]

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_adjust_in_other_dtypes_and_layouts(dtype):
    x, *args = batch(mixed_rows(30, seed=3))
    x = x.to(dtype)
    want = adjust(x.float(), *args)
    assert torch.equal(adjust(x.T.contiguous().T.requires_grad_(), *args), want) and want.dtype == torch.float32

def test_repetition_divides_the_positive_and_multiplies_the_negative():
    x = torch.tensor([[4., -4., 0., 4., -4., 4.]])
    got = adjust(x, [P(repetition_penalty=2)], [seen_of([0, 0, 1, 2], [3, 3, 3])], [()], [3])
    assert got.tolist() == [[2, -8, 0, 2, -4, 4]]              # once each, prompt and output alike

def test_frequency_counts_and_presence_does_not():
    x, s = torch.zeros(1, 5), seen_of([0, 0, 1], [1, 2, 2, 2])
    assert adjust(x, [P(frequency_penalty=.5)], [s], [()], [4]).tolist() == [[0, -.5, -1.5, 0, 0]]
    assert adjust(x, [P(presence_penalty=.5)], [s], [()], [4]).tolist() == [[0, -.5, -.5, 0, 0]]
    assert adjust(x, [P(presence_penalty=-2, frequency_penalty=-1)], [s], [()], [4]).tolist() == [[0, 3, 5, 0, 0]]

def test_the_order_is_penalties_bias_ends():
    p = P(repetition_penalty=2, frequency_penalty=1, logit_bias={0: 10, 1: 100}, min_tokens=9, stop_token_ids=[1])
    got = adjust(torch.tensor([[8., 8., 8.]]), [p], [seen_of([], [0, 0])], [(2,)], [2])
    assert got.tolist() == [[8 / 2 - 2 + 10, -inf, -inf]]

@pytest.mark.parametrize('bias, want', [(100, 2), (1000, 2), (10**30, 2), (-5, 0), (7.9, 0), (8.1, 2)])
def test_bias_forces(bias, want):
    x = torch.tensor([[8., 1., 0., -3.]])
    got = adjust(x, [P(logit_bias={2: bias})], [None], [()], [0])
    assert sample(got, [P(temperature=0)], [None]).token_ids == [want]
    assert got[0, 2] == pytest.approx(min(max(bias, -100), 100)) and torch.equal(got[0, [0, 1, 3]], x[0, [0, 1, 3]])

def test_bias_forbids():
    x = torch.tensor([[8., 7., 0., -3.]])
    p = P(logit_bias={0: -100}, temperature=2.0, seed=0)
    got = sample(adjust(x, [p], [None], [()], [0]).expand(2000, -1), [p] * 2000, [make_stream(p)] * 2000)
    assert 0 not in got.token_ids and 1 in got.token_ids

@pytest.mark.parametrize('generated, ended', [(0, False), (1, False), (2, False), (3, True), (4, True)])
def test_min_tokens_forbids_every_end_until_then(generated, ended):
    x = torch.tensor([[0., 9., 8., 7., 6.]])
    p = P(min_tokens=3, stop_token_ids=[2, 2, 1], temperature=0)
    got = adjust(x, [p], [None], [(3, 1)], [generated])
    assert got.tolist() == (x.tolist() if ended else [[0, -inf, -inf, -inf, 6]])

def test_min_tokens_with_nothing_but_ends_is_an_error_of_that_row():
    params = [P(min_tokens=1, temperature=0), P(temperature=0)]
    got = sample(adjust(randn(2, 3), params, [None] * 2, [(0, 1, 2)] * 2, [0, 0]), params, [None] * 2)
    assert got.token_ids[0] is None and list(got.errors) == [0] and got.token_ids[1] is not None

def test_ids_without_a_logit_touch_nobody():
    x = randn(3, 8)
    p = P(repetition_penalty=2, frequency_penalty=1, presence_penalty=1, min_tokens=5,
          logit_bias={8: 50, 9: -50, 15: 3, 10**30: 1}, stop_token_ids=[8, 16, 10**30])
    args = [p, P(), p], [seen_of([8, 100, 17], [8, 16, 10**12])] * 3, [(8, 23, 24, 10**9)] * 3, [0] * 3
    assert torch.equal(adjust(x, *args), x)
    args[0][1] = P(logit_bias={0: 5})
    assert torch.equal(adjust(x, *args)[[0, 2]], x[[0, 2]]) and (adjust(x, *args) != x).nonzero().tolist() == [[1, 0]]

ALL = dict(repetition_penalty=1.5, frequency_penalty=1, presence_penalty=1, logit_bias={1: 5, 2: -5}, min_tokens=9)

@pytest.mark.parametrize('bad', [nan, inf])
@pytest.mark.parametrize('where', [0, 1, 2, 3, 4])          # seen, biased, both, an end, none of these
def test_no_adjustment_hides_a_broken_row(bad, where):
    p, x = P(**ALL, temperature=0), randn(3, 6)
    def run(x):
        params, seen = [p, p, P(temperature=0)], [seen_of([0], [0, 2])] * 2 + [None]
        return sample(adjust(x, params, seen, [(3,)] * 3, [2] * 3), params, [None] * 3)
    want = run(x)
    x[1, where] = bad
    got = run(x)
    assert list(got.errors) == [1] and got.token_ids == [want.token_ids[0], None, want.token_ids[2]]

def test_a_masked_token_stays_masked_and_an_empty_row_empty():
    x = torch.tensor([[-inf, 1., -inf, 2.], [-inf] * 4])
    p = P(repetition_penalty=.5, presence_penalty=-2, logit_bias={0: 100, 2: 100})
    got = adjust(x, [p, p], [seen_of([0], [2])] * 2, [()] * 2, [1] * 2)
    assert torch.equal(got, x)

@pytest.mark.parametrize('r', [5e-324, 1e-300, 1e-40, 1e40, 1e300, 1.7e308])
def test_extreme_penalties_stay_finite(r):
    x = torch.tensor([[5., 0., -5., 1e38, -1e38, 1.]])
    p = P(repetition_penalty=r, temperature=1.0, seed=0)
    got = adjust(x, [p], [seen_of(range(5), [])], [()], [0])
    most = torch.finfo(torch.float32).max
    assert got.isfinite().all() and got[0, 1] == 0 and got[0, 5] == 1
    assert got[0, [0, 2]].tolist() == pytest.approx([min(5 / r, most), max(-5 * r, -most)], rel=1e-6)
    assert not sample(got, [p], [make_stream(p)]).errors

def test_seen_grows_and_forks():
    s = Seen([5, 5, 7, 9])
    for t in (7, 2, 7): s.add(t)
    twin = s.copy()
    twin.add(2); twin.add(0); s.add(5)
    assert dict(zip(s.ids, s.counts)) == {5: 1, 7: 2, 9: 0, 2: 1}
    assert dict(zip(twin.ids, twin.counts)) == {5: 0, 7: 2, 9: 0, 2: 2, 0: 1}
    assert list(Seen([]).ids) == [] and list(Seen().counts) == []

def test_seen_equals_counting_again():
    r = random.Random(0)
    prompt, output, s = r.choices(range(50), k=40), [], None
    s = Seen(prompt)
    for _ in range(300):
        output.append(r.randrange(90))
        s.add(output[-1])
        if len(output) % 50 == 0: s = s.copy()
    assert dict(zip(s.ids, s.counts)) == {t: output.count(t) for t in {*prompt, *output}}

@pytest.mark.parametrize('kw', [dict(repetition_penalty=2), dict(frequency_penalty=1), dict(presence_penalty=-1)])
def test_penalties_need_what_was_seen(kw):
    with pytest.raises(ValueError, match='row 1 has a penalty: it needs a Seen'):
        adjust(torch.zeros(2, 4), [P(), P(**kw)], [None] * 2, [()] * 2, [0] * 2)

@pytest.mark.parametrize('cut', range(4))
def test_adjust_wants_one_of_each(cut):
    args = [[P(logit_bias={0: 1})] * 2, [None] * 2, [()] * 2, [0] * 2]
    args[cut] = args[cut][:1]
    with pytest.raises(ValueError, match='2 rows of logits'): adjust(torch.zeros(2, 4), *args)

def test_no_work_for_each_token_of_the_vocabulary():
    "Python's own work is that of the rows' wishes, whatever the vocabulary's size."
    def lines(V):
        x, *args = batch(mixed_rows(20, V=30, seed=4), V=V)
        n = 0
        def count(frame, event, arg):
            nonlocal n
            n += frame.f_code.co_filename == sampling.__file__
            return count
        sys.settrace(count)
        try: adjust(x, *args)
        finally: sys.settrace(None)
        return n
    assert lines(40) == lines(40_000)


# The same as transformers, where it defines the same

def hf(processor, ids, x): return processor(torch.tensor([ids]), x.clone())

@pytest.mark.parametrize('r', [.3, 1.1, 2.0, 10.0])
def test_repetition_penalty_is_that_of_transformers(r):
    for seed in range(20):
        ids = random.Random(seed).choices(range(60), k=30)
        x = randn(1, 60, seed=seed)
        got = adjust(x, [P(repetition_penalty=r)], [seen_of(ids[:10], ids[10:])], [()], [20])
        torch.testing.assert_close(got, hf(T.RepetitionPenaltyLogitsProcessor(r), ids, x))

def test_logit_bias_is_a_sequence_bias_of_single_tokens():
    x, bias = randn(1, 60), {3: 2.5, 7: -9.0, 59: 100.0, 0: -100.0}
    got = adjust(x, [P(logit_bias=bias)], [None], [()], [1])
    torch.testing.assert_close(got, hf(T.SequenceBiasLogitsProcessor({(i,): b for i, b in bias.items()}), [1, 2], x))

@pytest.mark.parametrize('generated', range(6))
def test_min_tokens_is_min_new_tokens(generated):
    x, prompt = randn(1, 60), [1, 2, 3]
    theirs = T.MinNewTokensLengthLogitsProcessor(len(prompt), 4, [5, 9], device='cpu')
    got = adjust(x, [P(min_tokens=4, stop_token_ids=[9])], [None], [(5,)], [generated])
    assert torch.equal(got, hf(theirs, prompt + [0] * generated, x))

def nucleus(p): return T.TopPLogitsWarper(p - sampling.SLACK)      # what is so close has reached p

@pytest.mark.parametrize('name, values, make', [
    ('temperature', [.1, .7, 1.0, 2.0], lambda v: [T.TemperatureLogitsWarper(v)]),
    ('top_k', [1, 2, 10, 59, 60, 100], lambda v: [T.TopKLogitsWarper(v)]),
    ('top_p', [1e-5, .1, .5, .9, .999], lambda v: [nucleus(v)]),
    ('min_p', [.001, .05, .3, .9, 1.0], lambda v: [T.MinPLogitsWarper(v)]),
])
def test_filters_are_those_of_transformers(name, values, make):
    for v in values:
        x = randn(20, 60, seed=int(1e6 * v) % 97)
        same_as_transformers(x, P(**{name: v}), make(v))

def same_as_transformers(x, p, processors):
    theirs = T.LogitsProcessorList(processors)(torch.zeros(len(x), 1, dtype=torch.long), x.clone())
    w, want = weights(x, [p] * len(x)), torch.softmax(theirs, -1)
    assert torch.equal(w > 0, want > 0)
    torch.testing.assert_close(w / w.sum(-1, keepdim=True), want, rtol=1e-4, atol=1e-7)

def test_all_filters_in_our_order_are_those_of_transformers():
    for seed, (t, m, k, q) in enumerate(itertools.product((.5, 1., 1.7), (.01, .1, .4), (2, 5, 30), (.3, .6, .95))):
        chain = [T.TemperatureLogitsWarper(t), T.MinPLogitsWarper(m), T.TopKLogitsWarper(k), nucleus(q)]
        same_as_transformers(randn(10, 60, seed=seed), P(temperature=t, min_p=m, top_k=k, top_p=q), chain)


# Several samples

def answers(params, engine_seed=0, number=0, steps=20):
    "The `width` samples of one request, from logits that depend on each sample's own last token."
    table, streams = randn(64, 64, seed=5, scale=1.), [make_stream(params, engine_seed, number, i) for i in range(params.width)]
    out = [[0] for _ in streams]
    for _ in range(steps):
        got = sample(table[[o[-1] for o in out]], [params] * len(out), streams).token_ids
        for o, t in zip(out, got): o.append(t)
    return [o[1:] for o in out]

def test_the_samples_of_a_seed_differ_and_the_list_repeats():
    p = P(n=8, temperature=1.5, seed=7)
    one = answers(p)
    assert len({tuple(a) for a in one}) == 8 and one == answers(p, engine_seed=3, number=9)
    assert answers(P(n=3, temperature=1.5, seed=7)) == one[:3]             # a larger n adds samples, changes none
    assert answers(P(n=3, best_of=8, temperature=1.5, seed=7)) == one

def test_unseeded_equal_requests_differ():
    p = P(n=4, temperature=1.5)
    both = answers(p, number=0) + answers(p, number=1)
    assert len({tuple(a) for a in both}) == 8 and answers(p, number=1) == both[4:]

def test_best_samples():
    totals, lengths = [-4.0, -9.0, -1.0, -2.0], [4, 10, 1, 1]              # means -1, -0.9, -1, -2
    assert best_samples(totals, lengths, 4) == [1, 0, 2, 3] and best_samples(totals, lengths, 2) == [1, 0]
    assert best_samples([-1.0, 0.0], [1, 0], 2) == [1, 0]                  # an empty one has lost nothing
    with pytest.raises(ValueError): best_samples([-1.0], [1, 2], 1)
