"The engine under pressure, on a tiny random model (fp32): whoever gives way, and however it comes back, answers as it does in peace."
import functools
from dataclasses import asdict, replace

import pytest
import torch

from pagedlm import LLM, Engine, SamplingParams
from pagedlm.blocks import KVCache
from pagedlm.policies import POLICIES
from pagedlm.scheduler import QueueFull, Status
from pagedlm.swapping import SwapCosts
from test_engine_sharing import (EVERY_EIGHTH, VOCAB, Broken, add, beams, check, folder, greedy, ids, model,  # noqa: F401
                                 prompt, samples)

MODES = ("recompute", "swap", "auto")


class Letters:
    "A tokenizer: a character for each id, and back."
    def __len__(self): return VOCAB
    def __call__(self, text): return {"input_ids": [ord(c) - 0x4e00 for c in text]}
    def decode(self, ids, skip_special_tokens=True): return "".join(chr(0x4e00 + i) for i in ids)


TEXT = Letters()


def make(model, slots, block_size=16, preemption="swap", host_slots=None, costs=None, num_blocks=None, **kw):
    "An engine whose pools hold NaN until they are written. `costs`: the tokens that are computed again while a block moves."
    host = None if host_slots is None or preemption == "recompute" else -(-host_slots // block_size)
    engine = Engine(model, tokenizer=TEXT, num_blocks=num_blocks or -(-slots // block_size), block_size=block_size,
                    preemption=preemption, num_host_blocks=host, **kw)
    if costs: engine.scheduler.costs = SwapCosts(1, 1, 1, costs / 2)
    for pool in pools(engine): pool.fill_(torch.nan)
    return engine


def pools(engine):
    runner = engine.runner
    return [runner.kv.data] + ([runner.swapper.host] if runner.swapper else [])


def poison(engine):
    "What is free and cannot be found is worth nothing: reading it shows."
    kept = {b: 0 for b in engine.blocks.cache.of_block}
    for data, pool, but in zip(pools(engine), (engine.blocks, engine.scheduler.host), (kept, {})):
        if free := [b for b in pool.allocator.free_blocks() if b not in but]: data[:, :, free] = torch.nan


def audit(engine):
    "Both pools, the queues and the counts tell one story."
    check(engine)
    scheduler, host, s = engine.scheduler, engine.scheduler.host, engine.stats()
    host.check()
    out = [g for g in scheduler.preempted if g.status is Status.SWAPPED]
    assert host.tables.keys() == {seq.seq_id for g in out for seq in g.seqs}
    assert not host.tables.keys() & engine.blocks.tables.keys()
    assert {g.status for g in scheduler.preempted} <= {Status.PREEMPTED, Status.SWAPPED}
    held = {b for t in host.tables.values() for b in t.blocks}
    assert (s.host_blocks, s.free_host_blocks, s.swapped) == (host.num_blocks, host.num_blocks - len(held), len(out))
    assert s.preempted == len(scheduler.preempted) - len(out) and s.preemptions == scheduler.num_preemptions
    assert s.running + s.waiting + s.preempted + s.swapped == len(scheduler.groups)


def whole(engine, pinned=0):
    "Nothing is left of any request: not in a pool, not in a queue, not in the runner; and the next one is served."
    s = engine.stats()
    assert (s.used_blocks, s.free_host_blocks, s.swapped) == (pinned, s.host_blocks, 0)
    assert not (engine.requests or engine.ended or engine.books.begun or engine.scheduler.groups or engine.scheduler.sequences)
    engine.add_request("trivial", [5], greedy(2))
    while engine.has_unfinished(): out = engine.step()
    assert len(out[0].outputs[0].token_ids) == 2 and engine.stats().used_blocks == pinned
    tables = engine.runner.tables
    assert len(tables.row_of) == 1 and len(tables.free_rows) == len(tables.data) - 1


def drain(engine, pinned=0):
    "Step to the end, with an audit after each; the last outputs by request. Each step does something."
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        audit(engine)
        poison(engine)
    whole(engine, pinned)
    return done


def until(engine, done):
    "Step until `done()`, which must come before the end."
    while not done():
        assert engine.has_unfinished(), "it never came"
        engine.step()
        poison(engine)


def serve(engine, requests, pinned=0):
    add(engine, requests)
    return drain(engine, pinned)


def same(out, want, tolerance=1e-4):
    "Everything that a caller sees, but the tokens that were found in the pool."
    assert out.error is None and out.finished
    assert (out.prompt, out.prompt_token_ids) == (want.prompt, want.prompt_token_ids)
    assert [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in out.outputs] == [
        (c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in want.outputs]
    for a, b in zip(out.outputs, want.outputs, strict=True):
        if b.cumulative_logprob is None: assert a.cumulative_logprob is None
        else: assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=tolerance)
        if b.logprobs is None: assert a.logprobs is None
        else:
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert [(t, p.rank, p.decoded_token) for t, p in x.items()] == [(t, p.rank, p.decoded_token) for t, p in y.items()]
                assert [p.logprob for p in x.values()] == pytest.approx([p.logprob for p in y.values()], abs=tolerance)


@pytest.fixture(scope="module")
def calm(model):
    "What a request answers alone, in a large pool, without caching."
    @functools.lru_cache(None)
    def run(ids, params):
        engine = Engine(model, tokenizer=TEXT, num_blocks=128, enable_prefix_caching=False)
        engine.add_request("0", ids if isinstance(ids, str) else list(ids), params)
        while engine.has_unfinished(): out = engine.step()
        return out[0]
    return lambda ids, params, salt=None: run(ids if isinstance(ids, str) else tuple(ids), params)


LOAD = {"greedy": (prompt(20), greedy(24, logprobs=2)), "text": (TEXT.decode(prompt(17, 1)), greedy(16, n=2)),
        "samples": (prompt(20) + prompt(4, 2), samples(4, max_tokens=14, logprobs=3)), "salted": (prompt(33, 4), samples(2, max_tokens=18), "a"),
        "again": (prompt(33, 4), samples(2, max_tokens=18, seed=8), "b"), "best": (prompt(31, 3), samples(2, best_of=3, max_tokens=17)),
        "beams": (prompt(20), beams(3, max_tokens=14, logprobs=1)), "stops": (prompt(16, 6), samples(3, seed=3, stop_token_ids=EVERY_EIGHTH)),
        "two": (prompt(32), beams(2, 1, max_tokens=12, ignore_eos=False)), "one": (prompt(1, 5), samples(1, max_tokens=30, temperature=1.5)),
        "ends": (prompt(18, 5), beams(2, stop_token_ids=EVERY_EIGHTH, early_stopping=True, length_penalty=0.5)),
        "last": (prompt(20) + prompt(15, 7), samples(2, max_tokens=16, top_k=20, logprobs=None))}
HOSTS = {"none": 0, "one": 1, "few": 64, "many": 640}      # slots


MATRIX = [("recompute", "none", 1, True), ("recompute", "none", 3, False), ("recompute", "none", 16, False),
          ("swap", "none", 16, True), ("swap", "one", 1, False), ("swap", "one", 4, True), ("swap", "few", 4, False), ("swap", "few", 1, True),
          ("swap", "many", 16, False), ("swap", "many", 4, True), ("auto", "few", 3, True), ("auto", "few", 16, False), ("auto", "many", 16, True)]


@pytest.mark.parametrize("mode, host, size, caching", MATRIX)
def test_every_kind_in_one_batch_equals_its_run_in_peace(model, calm, mode, host, size, caching):
    "SC-3 with a host pool of no, one, few and many blocks: ids, text, log-probabilities, reasons, and where the bytes went."
    engine = make(model, 176, size, mode, min(HOSTS[host], 1 if host == "one" else 10**9) * (size if host == "one" else 1),
                  costs=0.85 * size, max_num_batched_tokens=30, max_num_seqs=20, enable_prefix_caching=caching)
    assert engine.stats().host_blocks == (1 if host == "one" else -(-HOSTS[host] // size))
    engine.pin_prefix(prompt(20))
    pinned, block_bytes, swapped = -(-20 // size), engine.runner.kv.bytes_per_block, 0
    with engine.record() as recording:
        add(engine, LOAD)
        done = {}
        while engine.has_unfinished():
            done |= {o.request_id: o for o in engine.step() if o.finished}
            swapped = max(swapped, engine.stats().swapped)
            audit(engine)
            poison(engine)
    s, plans, swapper = engine.stats(), recording.plans, engine.runner.swapper
    for name, request in LOAD.items(): same(done[name], calm(*request))
    assert done.keys() == LOAD.keys() and s.preemptions_recompute + s.preemptions_swap == s.preemptions >= 3
    assert s.prompt_tokens == 20 + sum(len(tokens) for tokens, *_ in LOAD.values())
    moved_out, moved_in = (sum(map(len, moves)) for moves in ([p.swapped_out for p in plans], [p.swapped_in for p in plans]))
    if swapper is None: assert host == "none" and not moved_out and not moved_in
    else:
        assert swapper.bytes_out == moved_out * block_bytes and swapper.bytes_in == moved_in * block_bytes
        assert swapper.transfers == sum(bool(p.swapped_out) + bool(p.swapped_in) for p in plans)
        assert moved_in <= moved_out and (caching or moved_in == moved_out)
    assert (s.preemptions_swap > 0) == (moved_out > 0) == (swapped > 0)
    if host == "none": assert s.preemptions_swap == 0
    if (mode, host) == ("swap", "many"): assert s.preemptions_swap >= 3
    if (mode, host) == ("swap", "few"): assert s.preemptions_recompute and s.preemptions_swap
    whole(engine, pinned)


def test_the_fixture_sees_what_waits_on_the_host(model, calm):
    "Wiping one block of the host pool while a request waits there changes its answer."
    engine = make(model, 112)
    add(engine, {"a": (prompt(33, 1), greedy(60)), "b": (prompt(33), greedy(40))})
    until(engine, lambda: engine.stats().swapped)
    engine.runner.swapper.settle()
    table, = engine.scheduler.host.tables.values()
    pools(engine)[1][:, :, table.blocks[-1]] = 0        # a full one might be found on the device
    assert ids(drain(engine)["b"]) != ids(calm(prompt(33), greedy(40)))


@pytest.mark.parametrize("policy, mode", [(p, m) for p in POLICIES if p != "fcfs" for m in ("recompute", "swap")])
def test_every_policy_gives_the_same_answers(model, calm, policy, mode):
    engine = make(model, 176, 4, mode, costs=3.4, policy=policy, max_num_batched_tokens=30)
    assert engine.scheduler.policy is POLICIES[policy]
    done = serve(engine, LOAD)
    for name, request in LOAD.items(): same(done[name], calm(*request))
    assert engine.stats().preemptions >= 3


def test_a_policy_may_be_ones_own(model, calm):
    "The shortest prompt first, and the widest gives way: the engine asks it."
    asked = []
    def victim(running):
        asked.append(len(running))
        return max(running, key=lambda g: (len(g.seqs), g.arrival))
    own = replace(POLICIES["fcfs"], name="own", order=lambda g: (len(g.seqs[0].prompt), g.arrival), victim=victim)
    engine = make(model, 176, 4, policy=own)
    done = serve(engine, LOAD)
    for name, request in LOAD.items(): same(done[name], calm(*request))
    assert len(asked) == engine.stats().preemptions >= 3


@pytest.mark.parametrize("mode, size", [*(("swap", b) for b in (1, 3, 48)), ("recompute", 3), ("auto", 12)])
def test_a_length_that_is_no_multiple_of_the_block(model, calm, mode, size):
    "BA-7: every block size that is accepted, with a longest request of 50 tokens, under pressure."
    engine = make(model, 150, size, mode, costs=0.8 * size, max_model_len=50, enable_prefix_caching=size != 3)
    requests = {"edge": (prompt(49), greedy(1)), "full": (prompt(10, 1), greedy(40)), "none": (prompt(20, 2), greedy(None)),
                "wide": (prompt(30, 3), samples(2, max_tokens=20)), "beams": (prompt(26, 4), beams(2, max_tokens=24))}
    done = serve(engine, requests)
    for name in requests.keys() - {"none"}: same(done[name], calm(*requests[name]))
    same(done["none"], calm(prompt(20, 2), greedy(30)))
    assert engine.stats().preemptions >= 1


@pytest.mark.parametrize("host, n", [(0, 2), (0, 4), (1, 4), (100, 1), (100, 4)])
def test_a_gang_that_gives_way_to_itself_or_others_always_returns(model, calm, host, n):
    "SC-3: n = 4 and host pools of 0, 1 and 100 blocks; a step never does nothing while there is work."
    engine = make(model, 0, 4, num_blocks=24, host_slots=4 * host)
    requests = {str(k): (prompt(13, k), samples(n, max_tokens=18, seed=k)) for k in range(5)}
    done = serve(engine, requests)
    for name, request in requests.items(): same(done[name], calm(*request))
    if n == 4: assert (engine.stats().preemptions_swap > 0) == (host == 100)


def test_stats_while_requests_wait_on_the_host(model):
    engine = make(model, 176, host_slots=160)
    add(engine, LOAD)
    until(engine, lambda: engine.stats().swapped)
    s = engine.stats()
    held = {b for t in engine.scheduler.host.tables.values() for b in t.blocks}
    assert s.swapped > 0 and (s.host_blocks, s.free_host_blocks) == (10, 10 - len(held)) and held
    assert s.preemptions_swap >= s.swapped and {"swapped", "host_blocks", "preemptions_swap"} <= asdict(s).keys()
    drain(engine)
    assert engine.stats().free_host_blocks == 10


# Aborts

ABORTED = {"greedy": greedy(40), "samples": samples(3, max_tokens=22), "beams": beams(3, max_tokens=22), "best": samples(1, best_of=3, max_tokens=22)}


@pytest.mark.parametrize("status, kind", [*(("swapped", k) for k in ABORTED), ("running", "samples"), ("running", "beams"),
    ("preempted", "beams"), ("waiting", "beams"), ("finished", "samples")])
def test_abort_in_every_state(model, calm, status, kind):
    "BA-1: twice, of an unknown one, of one that has ended; BA-6: its name is free again at the next report."
    params, host = ABORTED[kind], 0 if status == "preempted" else 640
    engine = make(model, 192, 4, host_slots=host, max_num_seqs=12)
    others = {"a": (prompt(33, 1), greedy(50)), "b": (prompt(20, 2), samples(2, max_tokens=30)), "c": (prompt(24, 4), beams(2, max_tokens=24))}
    mine = {str(k): (prompt(21, k), params) for k in range(3)}
    add(engine, others | mine)
    done, hit = {}, []
    while engine.has_unfinished():
        for name in mine if len(hit) < 2 else ():
            group, r = engine.scheduler.groups.get(name), engine.requests.get(name)
            if status == "finished" and name in done and not hit: hit.append(name)
            elif group and group.status.value == status and (status != "running" or r.seq.output) and name not in hit: hit.append(name)
            else: continue
            for i in (name, name, "never was"): engine.abort(i)
            audit(engine)
            if status == "finished": continue
            assert name not in engine.scheduler.groups and r.ended
            with pytest.raises(ValueError, match="in use"): engine.add_request(name, *mine[name])
        done |= {o.request_id: o for o in engine.step() if o.finished}
        audit(engine)
        poison(engine)
        for name in hit:
            if status != "finished" and name in done and name not in engine.requests and f"{name} again" not in done:
                assert {c.finish_reason for c in done[name].outputs} == {"abort"} and done[name].error is None
                done[f"{name} again"] = None
                engine.add_request(name, *mine[name])
    assert hit and done.keys() >= others.keys() | mine.keys()
    for name, request in (others | mine).items(): same(done[name], calm(*request))
    for name in done: engine.abort(name)
    whole(engine)


def test_an_abort_meets_the_choices_that_are_left(model, calm):
    "One answer of a gang on the host has ended already: the abort keeps it, and ends the others."
    answers = ids(calm(prompt(33), samples(3, max_tokens=40)))
    token = next(t for t in answers[1][4:] if t not in answers[0] + answers[2])
    engine = make(model, 208)
    add(engine, {"a": (prompt(47, 1), greedy(100)), "b": (prompt(33), samples(3, max_tokens=40, stop_token_ids=[token]))})
    until(engine, lambda: engine.stats().swapped and any(c.finish_reason for c in engine.requests["b"].choices))
    left = [c.finish_reason for c in engine.requests["b"].choices]
    assert 0 < left.count(None) < 3
    engine.abort("b")
    audit(engine)
    done = drain(engine)
    assert [c.finish_reason for c in done["b"].outputs] == [r or "abort" for r in left]
    same(done["a"], calm(prompt(47, 1), greedy(100)))


@pytest.mark.parametrize("kind", ["samples", "beams"])
def test_all_on_the_host_are_aborted_at_once(model, calm, kind):
    engine = make(model, 176, 4)
    add(engine, {"a": (prompt(40, 1), greedy(90))} | {str(k): (prompt(17, k), ABORTED[kind]) for k in range(5)})
    until(engine, lambda: engine.stats().swapped >= 2)
    for name in [g.request_id for g in engine.scheduler.preempted]: engine.abort(name)
    audit(engine)
    assert engine.stats().free_host_blocks == engine.stats().host_blocks
    same(drain(engine)["a"], calm(prompt(40, 1), greedy(90)))


# Failures

def fail_at(engine, where, when, error, nth=1):
    """The nth plan for which `when` holds fails: before or behind everything, in the model, or in a transfer,
    which then has moved nothing, or everything. Returns the list that the plan will be in."""
    runner, hit, seen = engine.runner, [], []
    execute, forward = runner.execute, runner.model
    def failing(plan):
        if when(plan): seen.append(plan)
        now = when(plan) and len(seen) == nth
        if now: hit.append(plan)
        if now and where == "before": raise error
        runner.armed = now
        try: logits = execute(plan)
        finally: runner.armed = False
        if now and where == "behind": raise error
        return logits
    class Model:
        config, dtype, device = forward.config, forward.dtype, forward.device
        def __call__(self, *args):
            if runner.armed and where == "model": raise error
            return forward(*args)
    def spoilt(name):
        move = getattr(runner.swapper, name)
        def run(pairs):
            if runner.armed and where == name: raise error
            move(pairs)
            if runner.armed and where == f"after {name}": raise error
        return run
    runner.armed, runner.execute, runner.model = False, failing, Model()
    for name in ("swap_out", "swap_in"): setattr(runner.swapper, name, spoilt(name))
    return hit


ERRORS = [RuntimeError("out of memory"), KeyboardInterrupt()]
WAYS = [("out", w) for w in ("before", "swap_out", "after swap_out", "model", "behind")] + [
    ("in", w) for w in ("before", "swap_in", "after swap_in", "model", "behind")]


@pytest.mark.parametrize("direction, where, caching", [(*way, i % 2 == 0) for i, way in enumerate(WAYS)])
def test_a_step_that_swaps_fails(model, calm, direction, where, caching):
    "SC-8: its rows end visibly; whom it swapped out, and everybody else, answers as in peace. An error, then Ctrl-C."
    def when(plan): return bool(plan.swapped_out if direction == "out" else plan.swapped_in)
    engine, victims, survivors = make(model, 176, 4, host_slots=160, max_num_seqs=12, enable_prefix_caching=caching), 0, 0
    pin, healthy = engine.pin_prefix(prompt(20)), (engine.runner.execute, engine.runner.model)
    for nth, error in zip((1, 3), ERRORS):
        engine.runner.execute, engine.runner.model = healthy
        for name in ("swap_out", "swap_in"): vars(engine.runner.swapper).pop(name, None)
        hit, done, owner = fail_at(engine, where, when, error, nth), {}, {}
        add(engine, LOAD)
        while engine.has_unfinished():
            owner |= {i: s.request_id for i, s in engine.scheduler.sequences.items()}
            try: done |= {o.request_id: o for o in engine.step() if o.finished}
            except KeyboardInterrupt as e: assert e is error
            audit(engine)
            poison(engine)
        plan, = hit
        lost, gave_way = {owner[row.seq_id] for row in plan.rows}, {owner[i] for i in plan.preempted}
        assert lost and not lost & gave_way and done.keys() == LOAD.keys()
        victims, survivors = victims + len(gave_way), survivors + len(LOAD.keys() - lost)
        for name, request in LOAD.items():
            if name not in lost: same(done[name], calm(*request))
            else:
                assert type(error).__name__ in done[name].error
                assert "error" in {c.finish_reason for c in done[name].outputs} <= {"error", "stop", "length"}
        whole(engine, 5)
    engine.unpin_prefix(pin)
    whole(engine)
    assert survivors >= 8 and (direction == "in" or victims >= 2)


@pytest.mark.parametrize("error", ERRORS, ids=["error", "Ctrl-C"])
def test_a_generate_that_fails_while_it_swaps_leaves_nothing(model, calm, error):
    with LLM(model, tokenizer=TEXT, num_blocks=44, block_size=4, preemption="swap", enable_prefix_caching=False) as llm:
        fail_at(llm.engine, "swap_out", lambda plan: plan.swapped_out, error, 2)
        requests = [r[:2] for r in LOAD.values()]
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt): llm.generate(*map(list, zip(*requests)))
        else: assert {bool(o.error) for o in llm.generate(*map(list, zip(*requests)))} == {True, False}
        whole(llm.engine)
        for out, request in zip(llm.generate(*map(list, zip(*requests))), requests): same(out, calm(*request))
        assert llm.stats().preemptions_swap >= 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_right_after_the_return_ends_that_request_alone(model, calm, bad):
    engine = make(model, 176, 4)
    hit, execute = [], engine.runner.execute
    def spoil(plan):
        logits = execute(plan).clone()
        if plan.swapped_in and not hit:
            row = [r for r in plan.rows if r.samples][-1]        # the last to come in
            hit.append(engine.scheduler.sequences[row.seq_id].request_id)
            logits[-1, 5] = bad
        return logits
    engine.runner.execute = spoil
    done = serve(engine, LOAD)
    for name, request in LOAD.items():
        if name in hit: assert "largest logit is" in done[name].error
        else: same(done[name], calm(*request))
    assert len(hit) == 1


# Closing

@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_close_with_requests_on_the_host(model, mode):
    engine = make(model, 176, 4, mode, enable_prefix_caching=False)
    engine.pin_prefix(prompt(20))
    add(engine, LOAD)
    until(engine, lambda: engine.stats().swapped >= 2)
    engine.abort(engine.scheduler.preempted[0].request_id)
    engine.close()
    engine.close()
    s = engine.stats()
    assert (s.used_blocks, s.swapped, s.running, s.waiting, s.preempted) == (0, 0, 0, 0, 0) and s.free_host_blocks == s.host_blocks > 0
    assert not engine.has_unfinished() and engine.runner is None
    engine.scheduler.host.check()
    with pytest.raises(RuntimeError, match="closed"): engine.step()


# A bounded queue

def test_a_full_queue_refuses_and_the_engine_goes_on(model, calm):
    engine = make(model, 176, 4, max_waiting=3, max_num_seqs=4)
    waiting = [*LOAD.items()][:3]
    add(engine, dict(waiting))
    before = (engine.num_requests, dict(engine.requests), dict(engine.scheduler.groups), list(engine.scheduler.waiting))
    for _ in range(2):
        with pytest.raises(QueueFull, match=r"'more' is refused: 3 requests wait, and max_waiting is 3"):
            engine.add_request("more", prompt(9), samples(2))
        with pytest.raises(QueueFull): engine.pin_prefix(prompt(20))
        assert before == (engine.num_requests, engine.requests, engine.scheduler.groups, engine.scheduler.waiting)
    with pytest.raises(ValueError): engine.add_request("more", [VOCAB], greedy())      # what is invalid stays invalid
    engine.add_request("nothing", prompt(9), greedy(0))      # needs no place in line
    done = {}
    engine.step()
    refused = 0
    while engine.has_unfinished():
        for name, request in LOAD.items():
            if name in done or name in engine.requests: continue
            try: add(engine, {name: request})
            except QueueFull:
                refused += 1
                assert len(engine.scheduler.waiting) == 3 and name not in engine.requests
                break
        done |= {o.request_id: o for o in engine.step() if o.finished}
        audit(engine)
        poison(engine)
    for name, request in LOAD.items(): same(done[name], calm(*request))
    assert refused > 10 and done.keys() == LOAD.keys()
    whole(engine)


def test_those_who_gave_way_are_not_counted_in_line(model):
    "They have a place in the engine: only new ones are refused."
    engine = make(model, 112, 4, max_waiting=1)
    for name, tokens in {"a": 33, "b": 32, "c": 30}.items():
        engine.add_request(name, prompt(tokens), greedy(40))
        engine.step()
    until(engine, lambda: engine.stats().swapped)
    engine.add_request("d", prompt(5, 1), greedy(4))
    with pytest.raises(QueueFull): engine.add_request("e", prompt(5, 1), greedy(4))
    assert drain(engine).keys() >= {"a", "b", "c", "d"} - {"a"}


def test_more_prompts_than_may_wait(model, calm):
    "Refused before anything runs; what fits is served afterwards."
    with LLM(model, tokenizer=TEXT, num_blocks=64, max_waiting=4) as llm:
        for _ in range(2):
            with pytest.raises(QueueFull, match="max_waiting is 4"): llm.generate([prompt(9, k) for k in range(5)], greedy(4))
            assert llm.stats().steps == 0 and not llm.engine.has_unfinished() and not llm.engine.requests
        for k, out in enumerate(llm.generate([prompt(9, k) for k in range(4)], greedy(4))): same(out, calm(prompt(9, k), greedy(4)))
        llm.pin_prefix(prompt(20))
        whole(llm.engine, 2)


# What is refused

@pytest.mark.parametrize("kw, said", [
    ({"num_host_blocks": -1}, "num_host_blocks must be a whole number, 0 or more, not -1"),
    ({"num_host_blocks": 1.5}, "num_host_blocks must be .*not 1.5"), ({"num_host_blocks": True}, "num_host_blocks must be .*not True"),
    ({"num_host_blocks": "8"}, "num_host_blocks must be .*not '8'"),
    ({"num_host_blocks": 10**12}, "num_host_blocks = 1,000,000,000,000 blocks of .* bytes do not fit"),
    ({"num_host_blocks": 4, "preemption": "recompute"}, "num_host_blocks = 4, and preemption = 'recompute' uses none"),
    *[({"preemption": p}, "preemption is .*: it must be one of .*'recompute', 'swap', 'auto'") for p in ("drop", "", None, 1, True, "SWAP")],
    *[({"policy": p}, "policy is .*: it must be one of fcfs, shortest-remaining, least-preempted, or a Policy") for p in ("lifo", "", None, 3, [])],
    *[({"watermark": w}, "watermark") for w in (-0.1, 1, 1.5, float("nan"), "0.1", None, True)],
    *[({"max_waiting": w}, "max_waiting must be a whole number, 1 or more, not") for w in (0, -1, 1.5, True, "4")]], ids=str)
def test_limits_that_are_none(model, kw, said):
    with pytest.raises(ValueError, match=said): Engine(model, num_blocks=8, **kw)
    with pytest.raises(ValueError, match=said): LLM(model, num_blocks=8, **kw)


def test_limits_that_are_fine(model, calm):
    for kw, host in [({"num_host_blocks": 0, "preemption": "recompute"}, 0), ({"preemption": "recompute"}, 0), ({}, 8),
                     ({"num_host_blocks": 0}, 0), ({"num_host_blocks": 3, "preemption": "swap"}, 3), ({"num_host_blocks": 20}, 20),
                     ({"watermark": 0.0, "max_waiting": 1, "policy": POLICIES["fcfs"]}, 8), ({"watermark": 0.99}, 8)]:
        engine = Engine(model, tokenizer=TEXT, num_blocks=8, **kw)
        assert engine.stats().host_blocks == engine.stats().free_host_blocks == host and bool(engine.runner.swapper) == bool(host)
        engine.add_request("0", prompt(33), greedy(8))
        same(drain(engine)["0"], calm(prompt(33), greedy(8)))


def test_a_watermark_keeps_room_for_those_who_run(model):
    "With it newcomers wait a little longer, and fewer have to give way."
    counts = []
    for watermark in (0.0, 0.3):
        engine = make(model, 176, 4, watermark=watermark)
        serve(engine, {str(k): (prompt(17, k), greedy(30)) for k in range(8)})
        counts.append(engine.stats().preemptions)
    assert counts[0] > counts[1]


# Costs

def test_auto_compares_what_the_engine_knows(model):
    "Bytes of a block over the link, two operations a weight; with a slow link it computes again, with a fast one it moves."
    engine = make(model, 176, 4, "auto")
    costs, c = engine.scheduler.costs, model.config
    assert costs.block_bytes == KVCache.block_bytes(c.num_layers, 4, c.num_kv_heads, c.head_dim, torch.float32)
    assert costs.token_flops == 2 * model.num_bytes / 4
    for speed, ways in [(1e-3, (0, 1)), (1e18, (1, 0))]:
        engine = make(model, 176, 4, "auto", enable_prefix_caching=False)
        engine.scheduler.costs = replace(costs, link_bytes_s=speed)
        serve(engine, {str(k): (prompt(17, k), greedy(30)) for k in range(8)})
        s = engine.stats()
        assert (s.preemptions_swap > 0, s.preemptions_recompute > 0) == ways


# Recordings

@pytest.mark.parametrize("mode, size, caching", [("swap", 3, False), ("swap", 16, True), ("auto", 4, True), ("swap", 4, False)])
def test_a_replay_has_the_tables_of_both_pools(model, mode, size, caching):
    "Step by step those of the block manager and of the host pool, for every sequence that the runner had met."
    engine = make(model, 176, size, mode, costs=0.85 * size, enable_prefix_caching=caching, max_num_batched_tokens=30)
    engine.pin_prefix(prompt(20))
    schedule, seen, ran = engine.scheduler.schedule, [], set()
    def watched():
        plan = schedule()
        scheduler = engine.scheduler
        device = {s: t.blocks[:] for s, t in engine.blocks.tables.items() if s in scheduler.known}
        seen.append((device, {s: t.entries() for s, t in scheduler.host.tables.items() if s in ran}))
        ran.update(scheduler.known)
        return plan
    engine.scheduler.schedule = watched
    with engine.record() as recording:
        add(engine, LOAD)
        for _ in range(40): engine.step()
        for name in ("again", "beams"): engine.abort(name)
        drain(engine, -(-20 // size))
    frames = recording.frames()
    pin, = engine.scheduler.pins
    held = [entries for frame in frames for entries in frame.host.values()]
    assert held and {f.num_host_blocks for f in frames} == {engine.stats().host_blocks}
    for frame, plan, (device, host) in zip(frames, recording.plans, seen):
        assert {s: [b for b, _ in t] for s, t in frame.tables.items() if s != pin} == device
        assert {s: t for s, t in frame.host.items() if s in host} == host and (caching or frame.host == host)
        assert (frame.swapped_out, frame.swapped_in, frame.preempted) == (plan.swapped_out, plan.swapped_in, plan.preempted)
    assert any(f.swapped_in for f in frames) and {frames[-1].owners[s] for f in frames for s in f.host} <= LOAD.keys()


def test_an_llm_under_pressure(model, calm):
    with LLM(model, tokenizer=TEXT, num_blocks=44, block_size=4, num_host_blocks=60, preemption="swap", policy="shortest-remaining",
             watermark=0.05, max_waiting=12) as llm:
        requests = [r[:2] for r in LOAD.values()]
        with llm.record() as recording: outs = llm.generate(*map(list, zip(*requests)))
        for out, request in zip(outs, requests): same(out, calm(*request))
        assert llm.stats().preemptions_swap >= 3 and any(f.host for f in recording.frames())
        whole(llm.engine)


def test_unseeded_streams_go_on_where_they_stood(model):
    "Without a seed of its own a request draws from the engine's: pressure changes nothing there either."
    params = SamplingParams(n=3, temperature=1.5, max_tokens=20, ignore_eos=True)
    requests = {str(k): (prompt(15, k), params) for k in range(5)}
    want = serve(make(model, 2048, seed=3), requests)
    for mode in MODES[:2]:
        engine = make(model, 176, 4, mode, costs=3.4, seed=3)
        done = serve(engine, requests)
        assert engine.stats().preemptions >= 3
        for name in requests: assert ids(done[name]) == ids(want[name])
