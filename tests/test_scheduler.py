"""The scheduler against a fake model whose answers betray any wrong token, block or position."""
import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, event, given, settings, strategies as st

from pagedlm.scheduler import Scheduler, Sequence, Status
from pagedlm.sharing import BlockManager

VECTORS = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text())


def next_token(history):
    h = 17
    for token in history: h = (h * 1_000_003 + token + 1) % (2**31 - 1)
    return h % 50_000


def solo(prompt, max_tokens):
    "What a request answers when it is alone."
    tokens = list(prompt)
    for _ in range(max_tokens): tokens.append(next_token(tokens))
    return tokens[len(prompt):]


class FakeRunner:
    """Its K/V cache holds (token, position, salt) in each slot. A row writes its own tokens, then
    reads its whole context back through its table; what it read is all that the "model" knows."""

    def __init__(self, scheduler):
        self.scheduler, self.block_size, self.tables = scheduler, scheduler.blocks.block_size, {}
        self.cache = [[None] * self.block_size for _ in range(scheduler.blocks.num_blocks)]
        self.entered = self.left = self.computed = self.copied = 0

    def execute(self, plan):
        "The histories that the rows that sample have read, by seq_id."
        for seq_id in plan.released: del self.tables[seq_id]    # KeyError: released twice
        self.left += len(plan.released)
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets)
        for target, block in [(b, list(self.cache[a])) for a, b in plan.copies]:
            self.cache[target] = block
        self.copied += len(targets)
        for row in plan.rows: self.write(row)
        read = {row.seq_id: self.read(row) for row in plan.rows}
        return {row.seq_id: read[row.seq_id] for row in plan.rows if row.samples}

    def write(self, row):
        blocks, salt = self.scheduler.blocks, self.scheduler.sequences[row.seq_id].salt
        if row.seq_id not in self.tables:
            assert row.first_block == 0 and row.blocks, "it enters with its whole table"
            self.entered += 1
        table = self.tables.setdefault(row.seq_id, [])
        assert row.first_block <= len(table)
        table[row.first_block:] = row.blocks
        assert table == blocks.table(row.seq_id).blocks
        for position, token in enumerate(row.tokens, row.position):
            block = table[position // self.block_size]
            assert blocks.allocator.refs[block] == 1, "others would see this write"
            self.cache[block][position % self.block_size] = token, position, salt
        self.computed += len(row.tokens)

    def read(self, row):
        seq, end, table = self.scheduler.sequences[row.seq_id], row.position + len(row.tokens), \
            self.tables[row.seq_id]
        cells = [self.cache[table[i // self.block_size]][i % self.block_size] for i in range(end)]
        assert all(cell and cell[1] == i for i, cell in enumerate(cells)), "a stale or foreign slot"
        assert all(cell[2] == seq.salt for cell in cells), "what another salt has computed"
        return [token for token, _, _ in cells]


class Greedy:
    "What stands above a scheduler: one token for each row that samples, until `max_tokens`."

    def sample(self, read): return {seq_id: [next_token(history)] for seq_id, history in read.items()}

    def take(self, scheduler, grown):
        for seq in grown:
            assert seq.remaining == 1
            if len(seq.output) == seq.max_tokens: scheduler.finish(seq.seq_id)


def prompt_of(i, n): return [(i * 7919 + j * 31) % 50_000 for j in range(n)]


def make(num_blocks=6, block_size=4, cls=Scheduler, watermark=0, **kwargs):
    return cls(BlockManager(num_blocks, block_size), watermark=watermark, **kwargs)


def add(scheduler, *lengths, max_tokens=4):
    "Requests A, B, C… with these prompt lengths."
    start = scheduler.num_arrived
    seqs = [Sequence(i, "ABCDEFGHIJ"[i], prompt_of(i, n), max_tokens)
            for i, n in enumerate(lengths, start)]
    for seq in seqs: scheduler.add(seq)
    return seqs


def check(scheduler, plan, known, was_running):
    "What holds after every `schedule`; `known` is what the runner knew before."
    blocks, budget = scheduler.blocks, scheduler.max_num_batched_tokens
    blocks.check()
    ids = [row.seq_id for row in plan.rows]
    running = {seq.seq_id: seq for group in scheduler.running for seq in group.seqs}
    assert len(set(ids)) == len(ids) and plan.num_tokens <= budget
    assert all(row.tokens for row in plan.rows)
    assert sum(group.places for group in scheduler.running) <= scheduler.max_num_seqs
    assert all(len(group.seqs) <= group.places for group in scheduler.groups.values())
    assert not set(plan.preempted) & set(ids), "a victim has no row"
    assert set(plan.preempted) & known <= set(plan.released) <= known
    assert len(set(plan.released)) == len(plan.released)
    assert scheduler.known == (known - set(plan.released)) | set(ids)
    assert set(ids) <= set(running) and set(blocks.tables) <= set(running) | set(scheduler.pins)
    if plan.preempted: assert set(scheduler.running) <= was_running, "nobody comes in then"
    check_queues(scheduler)
    for row in plan.rows:
        seq = running[row.seq_id]
        end = row.position + len(row.tokens)
        assert row.position == seq.num_computed and row.tokens == seq.tokens_from(row.position, end - row.position)
        assert row.samples == (end == seq.num_tokens)
        assert blocks.table(row.seq_id).num_tokens == end
        if row.seq_id not in known - set(plan.released):
            assert row.first_block == 0 and row.blocks == blocks.table(row.seq_id).blocks
    samples = {row.seq_id for row in plan.rows if row.samples}
    for group in scheduler.running:
        gang = {seq.seq_id for seq in group.seqs}
        assert not gang & samples or gang <= samples, "all of a gang sample, or none"
        assert len({seq.num_tokens for seq in group.seqs}) == 1


def check_queues(scheduler):
    queues = [scheduler.running, scheduler.preempted, scheduler.waiting]
    for queue, status in zip(queues, [Status.RUNNING, Status.PREEMPTED, Status.WAITING]):
        assert all(group.status is status for group in queue)
        assert sorted(queue, key=lambda group: group.arrival) == list(queue)
    groups = [group for queue in queues for group in queue]
    assert len(groups) == len(scheduler.groups) and set(groups) == set(scheduler.groups.values())
    seqs = [seq for group in groups for seq in group.seqs]
    assert {seq.seq_id: seq for seq in seqs} == scheduler.sequences and len(seqs) == len(scheduler.sequences)
    assert all(seq.group is group for group in groups for seq in group.seqs)


def step(scheduler, runner, between=(), caller=Greedy()):
    "One step; the ids in `between` are aborted while the plan runs. Returns the plan."
    known, was_running = set(runner.tables), set(scheduler.running)
    oldest = [seq.seq_id for group in scheduler.running[:1] for seq in group.seqs]
    plan = scheduler.schedule()
    if type(scheduler) is Scheduler and oldest:
        assert {row.seq_id for row in plan.rows} & set(oldest), "the oldest goes on in every step"
    check(scheduler, plan, known, was_running)
    assert plan.rows or not scheduler.has_unfinished
    read = runner.execute(plan)
    assert set(runner.tables) == scheduler.known
    sampled = caller.sample(read)
    for request_id in between: scheduler.abort(request_id)
    scheduler.blocks.check()
    grown = scheduler.update(plan, sampled)
    assert all(seq.group.status is Status.RUNNING for seq in grown)
    caller.take(scheduler, grown)
    for seq_id in scheduler.known:
        assert runner.tables[seq_id] == scheduler.blocks.table(seq_id).blocks
    scheduler.blocks.check()
    check_queues(scheduler)
    return plan


def run(scheduler, runner=None, steps=1000):
    "All to their ends; returns the plans."
    runner, plans = runner or FakeRunner(scheduler), []
    while scheduler.has_unfinished:
        plans.append(step(scheduler, runner))
        assert len(plans) <= steps
    idle(scheduler, runner)
    return plans


def idle(scheduler, runner):
    "Nothing is held when nothing is left to do."
    runner.execute(scheduler.schedule())
    assert scheduler.blocks.num_used == 0 and not scheduler.blocks.tables and not runner.tables
    assert runner.entered == runner.left
    assert not (scheduler.running or scheduler.waiting or scheduler.preempted or scheduler.groups)


def rows(plan): return [(row.seq_id, len(row.tokens)) for row in plan.rows]
def ids(queue): return "".join(group.request_id for group in queue)


# ---- the fake model sees what it should --------------------------------------------------

def test_fake_model_sees_a_wrong_block():
    scheduler = make()
    a, = add(scheduler, 6)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    runner.cache[0][0] = (runner.cache[0][0][0] + 1, 0, None)
    step(scheduler, runner)
    assert a.output[0] == solo(a.prompt, 1)[0] and a.output != solo(a.prompt, 2)
    row, = scheduler.schedule().rows
    runner.tables[0][:] = reversed(runner.tables[0])
    with pytest.raises(AssertionError, match="stale or foreign"): runner.read(row)


# ---- hypothesis: anything may arrive -----------------------------------------------------

@st.composite
def workloads(draw):
    block_size, num_blocks = draw(st.integers(1, 5)), draw(st.integers(2, 12))
    slots, requests = block_size * num_blocks, []
    for _ in range(draw(st.integers(2, 9))):
        n = draw(st.integers(1, draw(st.sampled_from([slots, block_size, 2 * block_size]))))
        most = slots + 1 - n
        max_tokens = draw(st.one_of(st.just(min(most, 25)), st.integers(1, min(most, 12))))
        abort = draw(st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 8), st.booleans())))
        requests.append((draw(st.sampled_from([0, 0, 0, 1, 3])), n, max_tokens, abort))
    limits = dict(max_num_seqs=draw(st.sampled_from([2, 3, 9, 1])),
                  watermark=draw(st.sampled_from([0, .01, .3])),
                  max_num_batched_tokens=draw(st.sampled_from(
                      [16, 512, 1, 2, max(1, block_size - 1), block_size, block_size + 1])))
    return block_size, num_blocks, requests, limits


def serve(scheduler, requests, bound, after_step=lambda: None):
    """Requests (steps after the one before, prompt length, max_tokens, abort or None), served to
    the end. An abort is (steps after arrival, whether it comes while a plan runs)."""
    runner, seqs, doomed, now, arrive = FakeRunner(scheduler), [], {}, 0, 0
    arrivals = {}
    for i, (gap, n, max_tokens, abort) in enumerate(requests):
        arrive += gap
        arrivals.setdefault(arrive, []).append(Sequence(i, f"r{i}", prompt_of(i, n), max_tokens))
        if abort: doomed.setdefault((arrive + abort[0], abort[1]), []).append(f"r{i}")
    while arrivals or scheduler.has_unfinished:
        for seq in arrivals.pop(now, []): scheduler.add(seq); seqs.append(seq)
        for request_id in doomed.get((now, False), []): scheduler.abort(request_id)
        if scheduler.has_unfinished: step(scheduler, runner, doomed.get((now, True), []))
        after_step()
        now += 1
        assert now <= arrive + bound, "too many steps"
    idle(scheduler, runner)
    for seq in seqs:
        want = solo(seq.prompt, seq.max_tokens)
        assert seq.group.status is Status.FINISHED and seq.output == want[:len(seq.output)]
        if not requests[seq.seq_id][3]: assert seq.output == want, seq
    event(f"steps: {'over 50' if now > 50 else 'up to 50'}")
    event(f"preempted: {scheduler.num_preemptions > 0}")
    return runner


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_anything_equals_solo(workload):
    block_size, num_blocks, requests, limits = workload
    scheduler = Scheduler(BlockManager(num_blocks, block_size), **limits)

    def in_line():
        line = [*scheduler.running, *scheduler.preempted, *scheduler.waiting]
        assert line == sorted(line, key=lambda group: group.arrival), "nobody passes anybody"
        assert all(group.decodes for group in scheduler.running[:-1]), "one chunk at most, the last"
    # While a request is the oldest it computes a token in every step, and is never preempted.
    serve(scheduler, requests, sum(n + m for _, n, m, _ in requests), in_line)


class AnyVictim(Scheduler):
    "Another policy: any but the oldest gives way, in an order that looks random."
    turn = 0

    def victim(self):
        self.turn += 1
        others = self.running[1:] or self.running
        return others[self.turn * 7919 % 13 % len(others)]


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_any_victim_equals_solo(workload):
    block_size, num_blocks, requests, limits = workload
    scheduler = AnyVictim(BlockManager(num_blocks, block_size), **limits)
    serve(scheduler, requests, 20 * sum(n + m for _, n, m, _ in requests))


# ---- hypothesis: requests that branch, share, and pin ------------------------------------

@dataclass(frozen=True)
class Ask:
    """A request that may branch. "samples": n answers from the first token on, each of which ends
    at a length of its own. "beam": any lists of continuations. "pin": a prefix that stays."""
    prompt: tuple
    max_tokens: int
    width: int = 1
    kind: str = "samples"
    salt: str | None = None
    ends: tuple = (99,) * 4           # the lengths of the samples, at most max_tokens
    together: int = 0                 # so many tokens are the same for all samples

    def most(self, size):
        "The blocks that it can ever hold."
        full, slots = len(self.prompt) // size, len(self.prompt) + self.max_tokens - 1
        return full + self.width * (-(-slots // size) - full)

    def advance(self, live, room):
        "For each live (tag, history): its continuations, (token, tag, whether it ends there)."
        length = len(live[0][1]) - len(self.prompt)
        if self.kind == "beam": return self.beams(live, room, length + 1 == self.max_tokens)
        tags = [range(self.width) if length == 0 else [tag] for tag, _ in live]
        return [[(next_token([*history, tag] if length >= self.together else history), tag,
                  length + 1 >= min(self.max_tokens, self.ends[tag])) for tag in mine]
                for (_, history), mine in zip(live, tags)]

    def beams(self, live, room, last):
        draw, lists = Random(next_token([token for _, history in live for token in history])), []
        for _, history in live:
            n = min(room, draw.choice([0, 1, 1, 2, 3] if len(live) > 1 or draw.random() < .05 else [1, 2, 3]))
            lists.append([(next_token([*history, i % 3]), 0, last or draw.random() < .04) for i in range(n)])
            room -= n
        draw.shuffle(lists)           # or the first ones would get the most
        return lists

    def alone(self):
        "Its (tag, output)s in the order in which they end, without any scheduler."
        live, room, done = [(0, list(self.prompt))], self.width, []
        while live:
            lists = self.advance(live, room)
            new = [(tag, [*history, token], end) for (_, history), mine in zip(live, lists)
                   for token, tag, end in mine]
            done += [(tag, history[len(self.prompt):]) for tag, history, end in new if end]
            room -= sum(end for _, _, end in new)
            live = [(tag, history) for tag, history, end in new if not end]
        return done


class Branching(Greedy):
    "What stands above a scheduler with `Ask`s: lists of continuations in, ends and pins out."

    def __init__(self, scheduler):
        self.scheduler, self.tags, self.asks, self.done, self.first = scheduler, {}, {}, {}, {}
        self.cached = {}

    def add(self, request_id, ask):
        "False if it was refused."
        blocks, seq = self.scheduler.blocks, Sequence(
            self.scheduler.new_id(), request_id, list(ask.prompt), ask.max_tokens, ask.width, ask.salt)
        pinned = {b for pin in self.scheduler.pins for b in blocks.table(pin).blocks}
        to_come = [a for i, a in self.asks.items() if i in self.scheduler.groups and a.kind == "pin"]
        others = [a for i, a in self.asks.items() if i in self.scheduler.groups and a.kind != "pin"]
        held = len(pinned) + sum(a.most(blocks.block_size) for a in to_come)
        room, need = blocks.num_blocks - held, ask.most(blocks.block_size)
        crowded = ask.kind == "pin" and any(a.most(blocks.block_size) > room - need for a in others)
        assert self.scheduler.num_pinned == held
        if need > room or crowded:
            with pytest.raises(ValueError, match=rf"{len(ask.prompt)} tokens cannot be pinned|{request_id}.*{room} besides {held} pin"):
                self.scheduler.add(seq, pin=ask.kind == "pin")
            event("refused beside pins")
            return False
        self.scheduler.add(seq, pin=ask.kind == "pin")
        self.tags[seq.seq_id], self.asks[request_id], self.done[request_id] = 0, ask, []
        self.first[request_id] = seq
        return True

    def sample(self, read):
        "The lists for each gang, from the histories of all its sequences, as the cache has them."
        sampled, self.plan = {}, {}
        for group in dict.fromkeys(self.scheduler.sequences[i].group for i in read):
            ask, ids = self.asks[group.request_id], [seq.seq_id for seq in group.seqs]
            assert [i for i in read if i in ids] == ids, "in order, and none is missing"
            for seq in group.seqs: assert read[seq.seq_id] == seq.tokens_from(0, seq.num_tokens)
            assert group.places == ask.width - len(self.done[group.request_id])
            lists = ask.advance([(self.tags[i], read[i]) for i in ids], group.places)
            sampled |= {i: [token for token, _, _ in mine] for i, mine in zip(ids, lists)}
            self.plan[group.request_id] = [entry for mine in lists for entry in mine]
        return sampled

    def take(self, scheduler, grown):
        for request_id, group in [(i, self.first[i].group) for i in self.plan]:
            mine = [seq for seq in grown if seq.group is group]
            assert len(mine) in (0, len(self.plan[request_id]))          # 0: aborted
            for seq, (token, tag, ends) in zip(mine, self.plan[request_id]):
                assert seq.output[-1] == token and seq.remaining == 1
                self.tags[seq.seq_id] = tag
                if not ends: continue
                self.done[request_id].append((tag, seq.output))
                if self.asks[request_id].kind == "pin": scheduler.keep(seq.seq_id)
                else: scheduler.finish(seq.seq_id)


@st.composite
def asks(draw):
    "Block size, number of blocks, limits, and `Ask`s with (gap, abort, steps until a pin is dropped)."
    size, seed, made = draw(st.integers(1, 5)), draw(st.integers(0, 10**6)), []
    limits = dict(max_num_batched_tokens=draw(st.sampled_from([16, 512, 4, 8, 5])),
                  max_num_seqs=draw(st.sampled_from([16, 8, 4])), watermark=draw(st.sampled_from([0, .01, .3])))
    for i in range(draw(st.sampled_from([9, 6, 4, 3]))):
        pick = Random(f"{seed} {i}")
        kind = pick.choice(["samples", "beam"] * 3 + ["pin"])
        abort = pick.choice([None] * 5 + [pick.randrange(15)])
        made.append((any_ask(pick, kind, size, made, seed), pick.choice([0, 0, 0, 1, 3]),
                     None if abort is None else (abort, pick.random() < .5), pick.randrange(30)))
    pins = sum(ask.most(size) for ask, *_ in made if ask.kind == "pin")
    slack = draw(st.sampled_from([0, 1])) + draw(st.sampled_from([0, pins // 2, pins]))
    return size, max(ask.most(size) for ask, *_ in made) + slack, made, limits


def any_ask(pick, kind, size, made, shape):
    start, told = prompt_of(pick.randrange(2), 20), [ask for ask, *_ in made if ask.salt is None]
    if told and pick.random() < .3:                 # a conversation that goes on
        before = pick.choice(told)
        start = [*before.prompt, *next((out for _, out in before.alone()), [])]
    prompt = (*start[:pick.randint(1, min(len(start), pick.choice([size * 3, 3, 30])))],
              *[pick.randrange(9) for _ in range(pick.choice([0, 0, 1, 3]))])
    if kind == "pin": return Ask(prompt, 1, kind=kind)
    usual = Random(shape)                     # most are of one shape, so that several fill the pool
    width, max_tokens = usual.choice([1, 2, 2, 3, 4]), usual.choice([14, 10, 7])
    if pick.random() < .3: width, max_tokens = pick.choice([1, 2, 3, 4]), pick.choice([10, 7, 14, 4, 1])
    return Ask(prompt, max_tokens, width, kind, pick.choice([None, None, None, "a", "b"]),
               tuple(pick.choice([99, 99, 99, 99, 1, 2, 5, 9]) for _ in range(4)), pick.choice([0, 2, 5, 8]))


def serve_asks(scheduler, made, bound, after_step=lambda: None):
    "All to the end; then nothing but the pins is left, and without them nothing at all."
    runner, above, now, at = FakeRunner(scheduler), Branching(scheduler), 0, 0
    arrivals, doomed, unpins, aborted = {}, {}, {}, set()
    for i, (ask, gap, abort, hold) in enumerate(made):
        at += gap
        arrivals.setdefault(at, []).append((f"r{i}", ask))
        if abort: doomed.setdefault((at + abort[0], abort[1]), []).append(f"r{i}")
        if abort: aborted.add(f"r{i}")
        if ask.kind == "pin": unpins.setdefault(at + hold, []).append(f"r{i}")
    while arrivals or scheduler.has_unfinished:
        for request_id, ask in arrivals.pop(now, []): above.add(request_id, ask)
        for request_id in doomed.get((now, False), []): scheduler.abort(request_id)
        for request_id in unpins.get(now, []):
            if request_id in above.first and above.first[request_id].seq_id in scheduler.pins:
                scheduler.unpin(above.first[request_id].seq_id)
        if scheduler.has_unfinished: step(scheduler, runner, doomed.get((now, True), []), above)
        after_step()
        now += 1
        assert now <= at + bound, "too many steps"
    pinned = {b for pin in scheduler.pins for b in scheduler.blocks.table(pin).blocks}
    assert scheduler.blocks.num_used == len(pinned) == scheduler.num_pinned
    for pin in list(scheduler.pins): scheduler.unpin(pin)
    idle(scheduler, runner)
    for request_id, done in above.done.items():
        want = above.asks[request_id].alone()
        assert done == want[:len(done)] and (len(done) == len(want) or request_id in aborted), request_id
    event(f"preempted: {scheduler.num_preemptions > 0}")
    event(f"copied: {runner.copied > 0}")
    event(f"a gang preempted: {any(first.group.num_preemptions and len(above.done[i]) > 1 for i, first in above.first.items())}")
    event(f"shared with others: {any(first.group.num_cached for first in above.first.values())}")
    return runner


def scheduler_of(cls, size, num_blocks, caching, limits):
    return cls(BlockManager(num_blocks, size, enable_prefix_caching=caching), **limits)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(asks(), st.booleans())
def test_anything_that_branches_equals_solo(drawn, caching):
    size, num_blocks, made, limits = drawn
    scheduler = scheduler_of(Scheduler, size, num_blocks, caching, limits)

    def in_line():
        line = [*scheduler.running, *scheduler.preempted, *scheduler.waiting]
        assert line == sorted(line, key=lambda group: group.arrival), "nobody passes anybody"
        assert all(group.decodes for group in scheduler.running[:-1]), "one comes in at a time"
    serve_asks(scheduler, made, sum(a.width * (len(a.prompt) + a.max_tokens) for a, *_ in made), in_line)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(asks(), st.booleans())
def test_any_victim_that_branches_equals_solo(drawn, caching):
    size, num_blocks, made, limits = drawn
    scheduler = scheduler_of(AnyVictim, size, num_blocks, caching, limits)
    serve_asks(scheduler, made, 20 * sum(a.width * (len(a.prompt) + a.max_tokens) for a, *_ in made))


# ---- who gives way, and in which order they return ---------------------------------------

def test_preempt_vector():
    v = VECTORS["preempt_fcfs"]
    assert "6 GPU blocks" in v["desc"] and "R3, frees 1 block" in v["expected"]
    scheduler = make(6, 4)
    r1, r2, r3 = add(scheduler, 8, 8, 4)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    assert scheduler.blocks.num_used == 5
    lost, = scheduler.blocks.table(2).blocks
    add(scheduler, 1)    # there would be budget and a place for it
    plan = step(scheduler, runner)
    assert [(row.seq_id, row.blocks) for row in plan.rows] == [(0, [5]), (1, [lost])]
    assert plan.preempted == plan.released == [2] and scheduler.num_preemptions == 1
    assert scheduler.running == [r1.group, r2.group] and list(scheduler.preempted) == [r3.group]
    assert r3.num_computed == 0 and r3.group.num_preemptions == 1 and len(r3.output) == 1
    run(scheduler, runner)
    assert [seq.output for seq in (r1, r2, r3)] == [solo(seq.prompt, 4) for seq in (r1, r2, r3)]


def test_order_after_preemption():
    scheduler = make(5, 4)
    seqs = add(scheduler, 8, 4, 4, max_tokens=9)
    runner, entries = FakeRunner(scheduler), []
    step(scheduler, runner)
    assert step(scheduler, runner).preempted == [2]
    while not (plan := step(scheduler, runner)).preempted: assert rows(plan) == [(0, 1), (1, 1)]
    assert plan.preempted == [1] and ids(scheduler.preempted) == "BC"
    seqs += add(scheduler, 1, max_tokens=2)
    assert [seq.group.num_preemptions for seq in seqs] == [0, 1, 1, 0]
    while scheduler.has_unfinished:
        plan = step(scheduler, runner)
        entries += [row.seq_id for row in plan.rows if row.position == 0]
        if 0 in scheduler.sequences: assert rows(plan) == [(0, 1)], "A decodes in every step"
    assert list(dict.fromkeys(entries)) == [1, 2, 3]
    assert [seq.output for seq in seqs] == [solo(seq.prompt, seq.max_tokens) for seq in seqs]


def test_preempts_itself():
    scheduler = make(3, 4)
    a, b = add(scheduler, 6, 4)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    plan = step(scheduler, runner)
    assert rows(plan) == [(0, 1)] and plan.preempted == plan.released == [1]
    assert b.group.status is Status.PREEMPTED and ids(scheduler.preempted) == "B"
    assert scheduler.blocks.num_free == 1 and not scheduler.waiting
    run(scheduler, runner)
    assert b.output == solo(b.prompt, 4)


def test_resumed_row_carries_everything():
    scheduler = make(6, 4)
    *_, c = add(scheduler, 8, 8, 4)
    plans = run(scheduler)
    entries = [row for plan in plans for row in plan.rows if row.position == 0]
    first, again = [row for row in entries if row.seq_id == 2]
    assert first.tokens == c.prompt and len(first.blocks) == 1
    assert again.tokens == c.prompt + c.output[:1] and len(again.blocks) == 2 and again.samples
    assert sum(plan.released.count(2) for plan in plans) == 1    # the second time is in the next plan


def test_victim_with_a_row_loses_it():
    class OldestGoes(Scheduler):
        def victim(self): return self.running[0]
    scheduler = make(4, 4, OldestGoes)
    a, b, c = add(scheduler, 4, 4, 2)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    scheduler.max_num_batched_tokens = 2    # A and B take all of it, until A has to go
    plan = step(scheduler, runner)
    assert rows(plan) == [(1, 1), (2, 1)] and plan.preempted == [0]
    assert scheduler.blocks.num_used == 3 and 0 not in scheduler.blocks.tables


@pytest.mark.parametrize("n, added, preempted", [(3, [], []), (4, [1], [1])])
def test_block_boundary(n, added, preempted):
    "3 -> 4 tokens needs no block and preempts nobody; 4 -> 5 needs exactly one."
    scheduler = make(2, 4)
    add(scheduler, n, 2)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    assert scheduler.blocks.num_free == 0
    plan = step(scheduler, runner)
    assert plan.rows[0].blocks == added and plan.preempted == preempted


def test_no_new_request_while_one_is_preempted():
    scheduler = make(3, 4)
    add(scheduler, 6, 4, max_tokens=6)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    step(scheduler, runner)
    add(scheduler, 1, max_tokens=1)         # one block is free, but B needs two
    assert scheduler.blocks.num_free == 1
    assert rows(step(scheduler, runner)) == [(0, 1)] and ids(scheduler.waiting) == "C"
    run(scheduler, runner)


# ---- admission ---------------------------------------------------------------------------

@pytest.mark.parametrize("n, max_tokens", [(64, 2), (65, 1), (80, 5), (1, 65), (1000, 1)])
def test_never_fits(n, max_tokens):
    scheduler = make(16, 4)
    need = -(-(n + max_tokens - 1) // 4)
    with pytest.raises(ValueError, match=rf"'A'.* {need} blocks of 4.* has 16$"):
        add(scheduler, n, max_tokens=max_tokens)
    small, = add(scheduler, 5)
    run(scheduler)
    assert small.output == solo(small.prompt, 4)


@pytest.mark.parametrize("n, max_tokens", [(64, 1), (60, 5), (1, 64), (61, 4)])
@pytest.mark.parametrize("watermark", [0, 0.01, 0.5])
def test_exactly_the_pool(n, max_tokens, watermark):
    scheduler = make(16, 4, watermark=watermark)
    seqs = add(scheduler, n, n, max_tokens=max_tokens)
    run(scheduler)
    for seq in seqs: assert seq.output == solo(seq.prompt, max_tokens)


def test_watermark_counts_only_beside_others():
    scheduler = make(10, 4, watermark=0.2)
    add(scheduler, 28, 4, max_tokens=2)     # 7 and 1 blocks: two stay free
    plan = scheduler.schedule()
    assert rows(plan) == [(0, 28), (1, 4)]
    scheduler = make(10, 4, watermark=0.2)
    add(scheduler, 28, 5, max_tokens=2)     # 7 and 2 blocks: only one would
    assert rows(scheduler.schedule()) == [(0, 28)]


def test_admission_is_in_order():
    scheduler = make(4, 4)
    add(scheduler, 8, 12, 1)                # C would fit beside A, but B is before it
    assert rows(scheduler.schedule()) == [(0, 8)] and ids(scheduler.waiting) == "BC"


def test_max_num_seqs():
    scheduler = make(10, 4, max_num_seqs=2)
    seqs = add(scheduler, 1, 1, 1)
    assert max(len(plan.rows) for plan in run(scheduler)) == 2
    assert all(seq.output == solo(seq.prompt, 4) for seq in seqs)


@pytest.mark.parametrize("n, max_tokens, total", [(10, 7, 17), (16, 1, 17), (20, 4, 24)])
def test_max_model_len(n, max_tokens, total):
    scheduler = make(10, 4, max_model_len=16)
    message = rf"{n} \+ {max_tokens} = {total} tokens.*max_model_len is 16"
    with pytest.raises(ValueError, match=message):
        add(scheduler, n, max_tokens=max_tokens)
    add(scheduler, 10, max_tokens=6)
    run(scheduler)


@pytest.mark.parametrize("limits", [
    dict(max_num_seqs=0), dict(max_num_batched_tokens=0), dict(watermark=-.1), dict(watermark=1),
    dict(max_model_len=1), dict(max_model_len=26)])
def test_limits_are_checked(limits):
    (name, value), = limits.items()
    with pytest.raises(ValueError, match=f"{name} is {value}"): make(6, 4, **limits)
    make(6, 4, max_model_len=25)            # the last token needs no slot


def test_bad_requests():
    scheduler = make()
    with pytest.raises(ValueError, match="'A' has an empty prompt"): add(scheduler, 0)
    with pytest.raises(ValueError, match="max_tokens=0"): add(scheduler, 3, max_tokens=0)
    add(scheduler, 3)
    for seq_id, request_id in [(0, "new"), (9, "A")]:
        with pytest.raises(ValueError, match=f"'{request_id}', sequence {seq_id}"):
            scheduler.add(Sequence(seq_id, request_id, [1], 1))
    with pytest.raises(ValueError, match="sequence 9 is not live"): scheduler.finish(9)
    run(scheduler)


# ---- budgets and chunks ------------------------------------------------------------------

@pytest.mark.parametrize("budget", [1, 3, 4, 5, 8, 512])
@pytest.mark.parametrize("lengths", [(3, 40), (40, 3), (1, 1, 1, 1, 17)])
def test_budgets(budget, lengths):
    scheduler = make(20, 4, max_num_batched_tokens=budget, max_num_seqs=4)
    seqs = add(scheduler, *lengths, max_tokens=6)
    plans = run(scheduler)
    assert max(plan.num_tokens for plan in plans) <= budget
    for seq in seqs: assert seq.output == solo(seq.prompt, 6)
    for seq in seqs:    # chunks follow each other, and only the one that ends the prompt samples
        mine = [row for plan in plans for row in plan.rows if row.seq_id == seq.seq_id]
        assert sum(len(row.tokens) for row in mine) == len(seq.prompt) + 5
        assert [row.samples for row in mine].count(True) == 6
        ends = [row.position + len(row.tokens) for row in mine]
        assert [row.samples for row in mine] == [end >= len(seq.prompt) for end in ends]


def test_decodes_go_first_and_the_chunk_gets_the_rest():
    scheduler = make(20, 4, max_num_batched_tokens=8)
    add(scheduler, 3, 40, max_tokens=10)
    plans = run(scheduler)
    assert rows(plans[0]) == [(0, 3), (1, 5)]
    assert rows(plans[1]) == rows(plans[2]) == [(0, 1), (1, 7)]
    first = [row.blocks for row in plans[0].rows]
    assert [len(blocks) for blocks in first] == [1, 10], "blocks for the whole prompt at once"
    assert [row.blocks for row in plans[1].rows] == [[], []]


def test_row_costs_what_is_new():
    scheduler = make(200, 4)
    add(scheduler, 500, max_tokens=40)
    for plan in run(scheduler)[1:]:
        row, = plan.rows
        assert len(row.tokens) == 1 and len(row.blocks) == (row.position % 4 == 0)


@pytest.mark.parametrize("p, start, n", [
    (5, 0, 3), (5, 3, 2), (5, 3, 4), (5, 5, 2), (5, 7, 1), (5, 0, 8)])
def test_tokens_from(p, start, n):
    seq = Sequence(0, "A", list(range(p)), 9, output=list(range(p, 8)))
    assert seq.tokens_from(start, n) == list(range(start, start + n))


# ---- aborts ------------------------------------------------------------------------------

def test_abort_in_every_state():
    scheduler = make(6, 4, max_num_seqs=3)
    a, b, c, d = add(scheduler, 8, 8, 4, 2, max_tokens=8)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    step(scheduler, runner)
    queues = scheduler.running, scheduler.preempted, scheduler.waiting
    assert [ids(queue) for queue in queues] == ["AB", "C", "D"]
    assert not scheduler.abort("nobody")
    for seq in (d, c, b):                   # waiting, preempted, running
        assert scheduler.abort(seq.request_id) and not scheduler.abort(seq.request_id)
        assert seq.group.status is Status.FINISHED
        scheduler.blocks.check()
    assert scheduler.blocks.num_used == 3 and ids(scheduler.running) == "A"
    assert step(scheduler, runner).released == [1], "C was released before, D never entered"
    run(scheduler, runner)
    assert a.output == solo(a.prompt, 8) and not scheduler.abort("A")


def test_abort_while_the_plan_runs():
    scheduler = make(6, 4)
    a, b = add(scheduler, 8, 8)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    plan = step(scheduler, runner, between=["A"])
    assert rows(plan) == [(0, 1), (1, 1)]
    assert len(a.output) == 1 and len(b.output) == 2 and scheduler.blocks.num_used == 3
    plan = step(scheduler, runner)
    assert plan.released == [0] and rows(plan) == [(1, 1)]
    run(scheduler, runner)
    assert b.output == solo(b.prompt, 4)


def test_ids_come_again():
    "An abort and a new request with the same ids: the old plan does not touch the new one."
    scheduler = make(6, 4)
    add(scheduler, 6)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    plan = scheduler.schedule()
    sampled = Greedy().sample(runner.execute(plan))
    assert scheduler.abort("A")
    new = Sequence(0, "A", prompt_of(5, 9), 4)
    scheduler.add(new)
    assert scheduler.update(plan, sampled) == [] and new.output == [] and new.num_computed == 0
    plan = step(scheduler, runner)
    assert plan.released == [0] and rows(plan) == [(0, 9)]
    run(scheduler, runner)
    assert new.output == solo(new.prompt, 4)


def test_a_row_that_failed_to_sample():
    "Its sequence gets no token, and the caller ends it; the others go on."
    scheduler = make(6, 4)
    a, b = add(scheduler, 5, 5)
    runner = FakeRunner(scheduler)
    plan = scheduler.schedule()
    sampled = Greedy().sample(runner.execute(plan))
    del sampled[0]
    assert scheduler.update(plan, sampled) == [b] and a.output == []
    scheduler.finish(0)
    run(scheduler, runner)
    assert b.output == solo(b.prompt, 4)


def test_an_idle_scheduler_plans_nothing():
    plan = make().schedule()
    assert plan.num_tokens == 0
    assert not (plan.rows or plan.preempted or plan.released or plan.copies)
