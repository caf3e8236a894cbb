"""The scheduler against a fake model whose answers betray any wrong token, block or position."""
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, event, given, settings, strategies as st

from pagedlm.scheduler import FCFS, PREEMPTION, Draft, Plan, Policy, QueueFull, Scheduler, Sequence, Status
from pagedlm.sharing import BlockManager
from pagedlm.swapping import HostPool, SwapCosts

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
    """Its K/V cache holds (token, position, salt) in each slot, and so does that on the host. A row
    writes its own tokens, then reads its whole context back through its table; what it read is all
    that the "model" knows."""

    def __init__(self, scheduler):
        self.scheduler, self.block_size, self.tables = scheduler, scheduler.blocks.block_size, {}
        self.cache = [[None] * self.block_size for _ in range(scheduler.blocks.num_blocks)]
        self.host = [[None] * self.block_size for _ in range(scheduler.host.num_blocks)]
        self.entered = self.left = self.computed = self.copied = self.moved_out = self.moved_in = 0

    def execute(self, plan):
        "The histories that the rows that sample have read, by seq_id."
        for seq_id in plan.released: del self.tables[seq_id]    # KeyError: released twice
        self.left += len(plan.released)
        self.swap(plan)
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets)
        for target, block in [(b, list(self.cache[a])) for a, b in plan.copies]:
            self.cache[target] = block
        self.copied += len(targets)
        for row in plan.rows: self.write(row)
        read = {row.seq_id: self.read(row) for row in plan.rows}
        return {row.seq_id: read[row.seq_id] for row in plan.rows if row.samples}

    def swap(self, plan):
        "Out, then in; what went in is on the host no more."
        for block, to in plan.swapped_out:
            assert self.cache[block][0], "nothing was ever written there"
            self.host[to] = list(self.cache[block])
        for block, to in plan.swapped_in:
            assert self.host[block][0], "the host has nothing there"
            self.cache[to], self.host[block] = self.host[block], [None] * self.block_size
        self.moved_out += len(plan.swapped_out)
        self.moved_in += len(plan.swapped_in)

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

    def end(self, scheduler, request_id): scheduler.abort(request_id)


def prompt_of(i, n): return [(i * 7919 + j * 31) % 50_000 for j in range(n)]


def make(num_blocks=6, block_size=4, cls=Scheduler, watermark=0, caching=False, num_host=0, link=1,
         **kwargs):
    """`num_host` blocks on the host. To compute a token takes 1 s, to move a block 1/`link` s each way."""
    return cls(BlockManager(num_blocks, block_size, enable_prefix_caching=caching), watermark=watermark,
               host=HostPool(num_host, block_size), costs=SwapCosts(1, 1, link, 1), **kwargs)


def add(scheduler, *lengths, max_tokens=4):
    "Requests A, B, C… with these prompt lengths."
    start = scheduler.num_arrived
    seqs = [Sequence(i, "ABCDEFGHIJ"[i], prompt_of(i, n), max_tokens)
            for i, n in enumerate(lengths, start)]
    for seq in seqs: scheduler.add(seq)
    return seqs


def held(pool, seqs):
    "The blocks in the tables of those of these sequences that have one."
    return {b for seq in seqs if seq in pool.tables for b in pool.table(seq).blocks}


def check(scheduler, plan, known, was_running, had):
    "What holds after every `schedule`; `known` is what the runner knew before, `had` each one's blocks."
    blocks, budget = scheduler.blocks, scheduler.max_num_batched_tokens
    blocks.check()
    check_swaps(scheduler, plan, was_running, had)
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
        assert not group.decodes or gang <= set(ids), "who decodes does so in every step"
        assert not gang & samples or gang <= samples, "all of a gang sample, or none"
        assert len({seq.num_tokens for seq in group.seqs}) == 1


def check_swaps(scheduler, plan, was_running, had):
    """What moves belongs to those who leave and those who return, each block once for each request: two
    that found the same prefix in the cache take a copy each."""
    (out, to_host), (of_host, to) = (list(zip(*pairs)) or [(), ()] for pairs in (plan.swapped_out, plan.swapped_in))
    owner = {b: seq.request_id for i, seq in scheduler.sequences.items() for b in held(scheduler.host, [i])}
    out_of = [(b, owner[host]) for b, host in plan.swapped_out]
    for moved in (out_of, to_host, of_host, to): assert len(set(moved)) == len(moved), "each once"
    assert set(out) <= {b for i in plan.preempted for b in had.get(i, ())}, "what a victim had before"
    assert set(to_host) == held(scheduler.host, plan.preempted), "and each block that it has there"
    entered = [seq.seq_id for group in scheduler.running if group not in was_running for seq in group.seqs]
    tables = [table.blocks for i, table in scheduler.blocks.tables.items() if i in entered]
    assert all(0 < sum(b in table for table in tables) == scheduler.blocks.allocator.refs[b] for b in to)


def check_queues(scheduler):
    statuses = [Status.RUNNING], [Status.PREEMPTED, Status.SWAPPED], [Status.WAITING]
    queues, order = [scheduler.running, scheduler.preempted, scheduler.waiting], scheduler.policy.order
    for queue, some, key in zip(queues, statuses, [lambda group: group.arrival, order, order]):
        assert all(group.status in some for group in queue)
        assert sorted(queue, key=key) == list(queue)
    scheduler.host.check()
    swapped = [seq.seq_id for group in scheduler.preempted if group.status is Status.SWAPPED for seq in group.seqs]
    assert set(scheduler.host.tables) == set(swapped) and not set(swapped) & set(scheduler.blocks.tables)
    groups = [group for queue in queues for group in queue]
    assert len(groups) == len(scheduler.groups) and set(groups) == set(scheduler.groups.values())
    seqs = [seq for group in groups for seq in group.seqs]
    assert {seq.seq_id: seq for seq in seqs} == scheduler.sequences and len(seqs) == len(scheduler.sequences)
    assert all(seq.group is group for group in groups for seq in group.seqs)


def step(scheduler, runner, between=(), caller=Greedy()):
    "One step; the ids in `between` are aborted while the plan runs. Returns the plan."
    known, was_running = set(runner.tables), set(scheduler.running)
    had = {seq_id: list(table.blocks) for seq_id, table in scheduler.blocks.tables.items()}
    oldest = [seq.seq_id for group in scheduler.running[:1] for seq in group.seqs]
    plan = scheduler.schedule()
    if scheduler.policy is FCFS and oldest:
        assert {row.seq_id for row in plan.rows} & set(oldest), "the oldest goes on in every step"
    check(scheduler, plan, known, was_running, had)
    assert plan.rows or not scheduler.has_unfinished
    read = runner.execute(plan)
    assert set(runner.tables) == scheduler.known
    sampled = caller.sample(read)
    for request_id in between: caller.end(scheduler, request_id)
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
    assert scheduler.host.num_used == 0 and not scheduler.host.tables
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

def recoveries(draw, num_blocks):
    "One of the three, with a pool on the host of up to twice the device's."
    share, link = draw(st.sampled_from([1, 2, .5, 0, .2])), draw(st.sampled_from([1, 4, .5]))
    return dict(preemption=draw(st.sampled_from(PREEMPTION)), num_host=int(share * num_blocks), link=link)


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
    return block_size, num_blocks, requests, limits | recoveries(draw, num_blocks)


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
    event(f"preempted: {scheduler.num_preemptions > 0}, swapped: {scheduler.num_swaps > 0}")
    return runner


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_anything_equals_solo(workload):
    block_size, num_blocks, requests, limits = workload
    scheduler = make(num_blocks, block_size, **limits)

    def in_line():
        line = [*scheduler.running, *scheduler.preempted, *scheduler.waiting]
        assert line == sorted(line, key=lambda group: group.arrival), "nobody passes anybody"
        assert all(group.decodes for group in scheduler.running[:-1]), "one chunk at most, the last"
    # While a request is the oldest it computes a token in every step, and is never preempted.
    serve(scheduler, requests, sum(n + m for _, n, m, _ in requests), in_line)


class AnyVictim:
    "Another policy: any but the oldest gives way, in an order that looks random."
    turn = 0

    def __call__(self, running):
        self.turn += 1
        others = running[1:] or running
        return others[self.turn * 7919 % 13 % len(others)]


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_any_victim_equals_solo(workload):
    block_size, num_blocks, requests, limits = workload
    scheduler = make(num_blocks, block_size, policy=Policy("any", victim=AnyVictim()), **limits)
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
        self.lost, self.aborted = {}, set()     # samples and requests that were ended before their time

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
        full = (most := self.scheduler.max_waiting) is not None and len(self.scheduler.waiting) >= most
        if need > room or crowded and not full:
            with pytest.raises(ValueError, match=rf"{len(ask.prompt)} tokens cannot be pinned|{request_id}.* has {room}" + f" besides {held} pin" * (held > 0)):
                self.scheduler.add(seq, pin=ask.kind == "pin")
            event("refused beside pins")
            return False
        if full:
            with pytest.raises(QueueFull, match=f"{request_id!r} is refused: {most} requests wait"):
                self.scheduler.add(seq, pin=ask.kind == "pin")
            return False
        self.scheduler.add(seq, pin=ask.kind == "pin")
        self.tags[seq.seq_id], self.asks[request_id], self.done[request_id] = 0, ask, []
        self.first[request_id], self.lost[request_id] = seq, set()
        return True

    def end(self, scheduler, which):
        "A whole request, or the first of its samples."
        request_id, one = which
        group = scheduler.groups.get(request_id)
        if not (one and group and len(group.seqs) > 1 and self.asks[request_id].kind == "samples"):
            if scheduler.abort(request_id): self.aborted.add(request_id)
            return
        event(f"one of a gang ended: {group.status.value}, in step: {group.decodes}")
        self.lost[request_id].add(self.tags[group.seqs[0].seq_id])
        scheduler.finish(group.seqs[0].seq_id)

    def sample(self, read):
        "The lists for each gang, from the histories of all its sequences, as the cache has them."
        sampled, self.plan = {}, {}
        for group in dict.fromkeys(self.scheduler.sequences[i].group for i in read):
            ask, ids = self.asks[group.request_id], [seq.seq_id for seq in group.seqs]
            assert [i for i in read if i in ids] == ids, "in order, and none is missing"
            for seq in group.seqs: assert read[seq.seq_id] == seq.tokens_from(0, seq.num_tokens)
            assert group.places == ask.width - len(self.done[group.request_id]) - len(self.lost[group.request_id])
            lists = ask.advance([(self.tags[i], read[i]) for i in ids], group.places)
            sampled |= {i: [token for token, _, _ in mine] for i, mine in zip(ids, lists)}
            self.plan[group.request_id] = list(zip(ids, lists))
        return sampled

    def take(self, scheduler, grown):
        for request_id, lists in self.plan.items():
            mine = [seq for seq in grown if seq.group is self.first[request_id].group]
            entries = [entry for i, entries in lists if i in scheduler.sequences for entry in entries]
            assert len(mine) == len(entries)         # without those that were ended meanwhile
            for seq, (token, tag, ends) in zip(mine, entries):
                assert seq.output[-1] == token and seq.remaining == 1
                self.tags[seq.seq_id] = tag
                if not ends: continue
                self.done[request_id].append((tag, seq.output))
                if self.asks[request_id].kind == "pin": scheduler.keep(seq.seq_id)
                else: scheduler.finish(seq.seq_id)


@st.composite
def asks(draw):
    """Block size, number of blocks, limits, and `Ask`s with (gap, (steps until it is ended,
    whether while a plan runs, whether one sample only) or None, steps until a pin is dropped)."""
    size, seed, made = draw(st.integers(1, 5)), draw(st.integers(0, 10**6)), []
    limits = dict(max_num_batched_tokens=draw(st.sampled_from([16, 512, 4, 8, 5])),
                  max_num_seqs=draw(st.sampled_from([16, 8, 4])), watermark=draw(st.sampled_from([0, .01, .3])))
    for i in range(draw(st.sampled_from([9, 6, 4, 3]))):
        pick = Random(f"{seed} {i}")
        kind = pick.choice(["samples", "beam"] * 3 + ["pin"])
        abort = pick.choice([None] * 5 + [pick.randrange(15)])
        made.append((any_ask(pick, kind, size, made, seed), pick.choice([0, 0, 0, 1, 3]),
                     None if abort is None else (abort, pick.random() < .5, pick.random() < .5), pick.randrange(30)))
    pins = sum(ask.most(size) for ask, *_ in made if ask.kind == "pin")
    slack = draw(st.sampled_from([0, 1])) + draw(st.sampled_from([0, pins // 2, pins]))
    num_blocks = max(ask.most(size) for ask, *_ in made) + slack
    return size, num_blocks, made, limits | recoveries(draw, num_blocks)


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
    arrivals, doomed, unpins = {}, {}, {}
    for i, (ask, gap, abort, hold) in enumerate(made):
        at += gap
        arrivals.setdefault(at, []).append((f"r{i}", ask))
        if abort: doomed.setdefault((at + abort[0], abort[1]), []).append((f"r{i}", abort[2]))
        if ask.kind == "pin": unpins.setdefault(at + hold, []).append(f"r{i}")
    while arrivals or scheduler.has_unfinished:
        for request_id, ask in arrivals.pop(now, []): above.add(request_id, ask)
        for which in doomed.pop((now, False), []):
            group = scheduler.groups.get(which[0])
            if which[1] and group and group.decodes and now < at + 20: doomed.setdefault((now + 1, False), []).append(which)
            else: above.end(scheduler, which)       # a single sample where it can: while its gang comes back
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
        want = [end for end in above.asks[request_id].alone() if end[0] not in above.lost[request_id]]
        assert done == want[:len(done)] and (len(done) == len(want) or request_id in above.aborted), request_id
    event(f"preempted: {scheduler.num_preemptions > 0}, swapped: {scheduler.num_swaps > 0}")
    event(f"copied: {runner.copied > 0}")
    event(f"a gang preempted: {any(first.group.num_preemptions and len(above.done[i]) > 1 for i, first in above.first.items())}")
    event(f"shared with others: {any(first.group.num_cached for first in above.first.values())}")
    return runner


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(asks(), st.booleans())
def test_anything_that_branches_equals_solo(drawn, caching):
    size, num_blocks, made, limits = drawn
    scheduler = make(num_blocks, size, caching=caching, **limits)

    def in_line():
        line = [*scheduler.running, *scheduler.preempted, *scheduler.waiting]
        assert line == sorted(line, key=lambda group: group.arrival), "nobody passes anybody"
        assert all(group.decodes for group in scheduler.running[:-1]), "one comes in at a time"
    serve_asks(scheduler, made, sum(a.width * (len(a.prompt) + a.max_tokens) for a, *_ in made), in_line)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(asks(), st.booleans())
def test_any_victim_that_branches_equals_solo(drawn, caching):
    size, num_blocks, made, limits = drawn
    scheduler = make(num_blocks, size, caching=caching, policy=Policy("any", victim=AnyVictim()), **limits)
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
    scheduler = make(4, 4, policy=Policy("oldest goes", victim=lambda running: running[0]))
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


# ---- gangs: what they share, when they run, how they return ------------------------------

class Samples(Greedy):
    "Each request forks at its first token into all that it may; sample i begins with a token of its own."

    def __init__(self, scheduler): self.scheduler, self.outputs = scheduler, {}

    def sample(self, read):
        seqs = {i: self.scheduler.sequences[i] for i in read}
        return {i: [next_token(history) + j for j in range(1 if seqs[i].output else seqs[i].width)]
                for i, history in read.items()}

    def take(self, scheduler, grown):
        for seq in grown:
            self.outputs.setdefault(seq.request_id, {})[seq.seq_id] = seq.output
        super().take(scheduler, grown)


def samples_alone(prompt, max_tokens, width):
    firsts = [next_token(prompt) + j for j in range(width)]
    return [[first, *solo([*prompt, first], max_tokens - 1)] for first in firsts]


def gang(scheduler, request_id, n, max_tokens, width, start=0, salt=None):
    seq = Sequence(scheduler.new_id(), request_id, prompt_of(start, n), max_tokens, width, salt)
    scheduler.add(seq)
    return seq


def run_samples(scheduler, runner, above):
    plans = []
    while scheduler.has_unfinished: plans.append(step(scheduler, runner, caller=above))
    return plans


def test_fork_order_copies_and_places():
    scheduler = make(12, 4, max_num_seqs=5)
    a = gang(scheduler, "A", 6, 4, 3)
    b = gang(scheduler, "B", 2, 4, 3, start=1)
    runner, above = FakeRunner(scheduler), Samples(scheduler)
    plan = step(scheduler, runner, caller=above)
    assert rows(plan) == [(0, 6)] and ids(scheduler.waiting) == "B", "3 + 3 places are more than 5"
    forks = a.group.seqs
    assert [seq.output[0] - a.output[0] for seq in forks] == [0, 1, 2] and forks[0] is a
    assert [scheduler.blocks.table(seq.seq_id).blocks for seq in forks] == [[0, 1]] * 3
    plan = step(scheduler, runner, caller=above)
    assert [len(row.tokens) for row in plan.rows] == [1, 1, 1] and len(plan.copies) == 2
    assert [row.first_block for row in plan.rows] == [1, 0, 0]       # the others enter, with all they have
    assert [row.blocks[-1] for row in plan.rows] == [2, 3, 1], "two copy, the last one writes in place"
    assert scheduler.blocks.allocator.refs[0] == 3
    scheduler.finish(forks[1].seq_id)
    assert a.group.places == 2 and rows(step(scheduler, runner, caller=above))[-1] == (1, 2), "B comes in"
    run_samples(scheduler, runner, above)
    idle(scheduler, runner)
    assert above.outputs["B"] == dict(zip(above.outputs["B"], samples_alone(b.prompt, 4, 3)))


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("start, n", [(0, 8), (0, 10), (1, 3)])
def test_a_gang_returns_and_shares_again(caching, start, n):
    """Its common tokens are computed once, the tokens of each one alone as well, and no others. With the
    cache each finds its own full blocks again, and what they have in common is still there once."""
    scheduler = Scheduler(BlockManager(30, 4, enable_prefix_caching=caching), watermark=0)
    a = gang(scheduler, "A", n, 20, 3, start)
    runner, above = FakeRunner(scheduler), Samples(scheduler)
    for _ in range(7): step(scheduler, runner, caller=above)
    before, refs = runner.computed, scheduler.blocks.allocator.refs
    assert before == n + 3 * 6 and refs.count(3) == n // 4
    scheduler.preempt(a.group, Draft(512))
    assert scheduler.blocks.num_used == 0 and all(seq.num_computed == 0 for seq in a.group.seqs)
    found = (n + 6) // 4 * 4            # of each one, its own tokens too; here always more than the prompt
    plan = step(scheduler, runner, caller=above)
    if not caching: assert rows(plan) == [(0, n + 6)], "the first computes what all share"
    else: assert [row.position for row in plan.rows] == [found] * 3
    assert any(row.samples for row in plan.rows) == (caching and found == n + 6)
    while not plan.rows[0].samples: plan = step(scheduler, runner, caller=above)
    assert len(plan.rows) == 3
    assert runner.computed - before == (3 * (n + 7 - found) if caching else n + 3 * 7)
    assert refs.count(3) == n // 4 and scheduler.blocks.num_used == n // 4 + 3 * (-(-(n + 7) // 4) - n // 4)
    run_samples(scheduler, runner, above)
    idle(scheduler, runner)
    assert list(above.outputs["A"].values()) == samples_alone(a.prompt, 20, 3)
    assert a.group.num_cached == 0, "what it finds when it returns was its own"


def test_a_gang_waits_for_each_other():
    "With a small budget they catch up in pieces; no one samples until all can."
    scheduler = make(40, 4, max_num_batched_tokens=5)
    a = gang(scheduler, "A", 6, 12, 3)
    runner, above = FakeRunner(scheduler), Samples(scheduler)
    for _ in range(9): step(scheduler, runner, caller=above)
    length = len(a.output)
    scheduler.preempt(a.group, Draft(5))
    plans = [step(scheduler, runner, caller=above)]
    while not any(row.samples for row in plans[-1].rows): plans.append(step(scheduler, runner, caller=above))
    assert rows(plans[-1]) == [(seq.seq_id, 1) for seq in a.group.seqs] and len(a.output) == length + 1
    assert len(plans) > 4 and all(plan.num_tokens <= 5 for plan in plans)
    run_samples(scheduler, runner, above)
    assert list(above.outputs["A"].values()) == samples_alone(a.prompt, 12, 3)


def test_a_gang_returns_when_there_is_room_for_all_of_it():
    scheduler = make(10, 4)
    b = gang(scheduler, "B", 4, 21, 1, start=1)
    a = gang(scheduler, "A", 4, 13, 3)
    runner, above = FakeRunner(scheduler), Samples(scheduler)
    while a.group.status is not Status.PREEMPTED: step(scheduler, runner, caller=above)
    need = 1 + 3 * (-(-a.num_tokens // 4) - 1)
    waited = 0
    while a.group.status is Status.PREEMPTED:
        waited += b.group.status is Status.RUNNING
        free = scheduler.blocks.num_free
        step(scheduler, runner, caller=above)
    assert free >= need == 10 and waited == 11 and a.group.num_preemptions == 1
    run_samples(scheduler, runner, above)
    assert list(above.outputs["A"].values()) == samples_alone(a.prompt, 13, 3)


def test_the_first_of_a_gang_leaves_while_it_catches_up():
    "Nobody else has a table yet; the next one begins."
    scheduler = make(40, 2, max_num_batched_tokens=4)
    a = gang(scheduler, "A", 8, 20, 2)
    runner, above = FakeRunner(scheduler), Samples(scheduler)
    for _ in range(6): step(scheduler, runner, caller=above)
    scheduler.preempt(a.group, Draft(4))
    step(scheduler, runner, caller=above)
    _, other = a.group.seqs
    assert other.seq_id not in scheduler.blocks.tables and a.num_computed == 4
    scheduler.finish(a.seq_id)
    run_samples(scheduler, runner, above)
    idle(scheduler, runner)
    assert other.output == samples_alone(a.prompt, 20, 2)[1]


def test_nobody_comes_in_while_a_gang_catches_up():
    "Else B would take all of the budget in each step, and A, which came before it, would stand still."
    scheduler = make(60, 4, max_num_batched_tokens=8, max_num_seqs=16)
    a = gang(scheduler, "A", 5, 20, 2)
    runner, above = FakeRunner(scheduler), Samples(scheduler)
    for _ in range(4): step(scheduler, runner, caller=above)
    scheduler.preempt(a.group, Draft(8))
    b = gang(scheduler, "B", 1, 12, 8, start=1)
    while not a.group.decodes:
        plan = step(scheduler, runner, caller=above)
        assert {row.seq_id for row in plan.rows} <= {seq.seq_id for seq in a.group.seqs}
    length = len(a.output)
    step(scheduler, runner, caller=above)
    assert len(a.output) == length + 1
    run_samples(scheduler, runner, above)
    assert list(above.outputs["B"].values()) == samples_alone(b.prompt, 12, 8)


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens"])
def test_too_wide(limit):
    scheduler = make(40, 4, **{limit: 3})
    with pytest.raises(ValueError, match=f"'A' has 4 sequences.*{limit} is 3"): gang(scheduler, "A", 3, 4, 4)
    with pytest.raises(ValueError, match="'A' has width=0"): gang(scheduler, "A", 3, 4, 0)
    a, above = gang(scheduler, "B", 3, 4, 3), Samples(scheduler)
    run_samples(scheduler, FakeRunner(scheduler), above)
    assert list(above.outputs["B"].values()) == samples_alone(a.prompt, 4, 3)


@pytest.mark.parametrize("size, n, max_tokens, width", [
    (4, 8, 4, 3), (4, 8, 1, 3), (4, 7, 2, 3), (4, 7, 6, 4), (4, 1, 17, 2), (1, 5, 4, 3), (3, 6, 5, 2), (5, 4, 1, 4), (5, 14, 8, 1)])
def test_exact_capacity(size, n, max_tokens, width):
    "floor(P/B) + n * (ceil(S/B) - floor(P/B)) blocks: served with so many, refused with one less."
    full, need = n // size, n // size + width * (-(-(n + max_tokens - 1) // size) - n // size)
    with pytest.raises(ValueError, match=rf"'A'.* {width} x {n + max_tokens - 1} tokens need {need} blocks of {size}.* has {need - 1}$"):
        gang(make(need - 1, size), "A", n, max_tokens, width)
    scheduler = make(need, size)
    a, above, most = gang(scheduler, "A", n, max_tokens, width), Samples(scheduler), 0
    runner = FakeRunner(scheduler)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        most = max(most, scheduler.blocks.num_used)
        above.take(scheduler, scheduler.update(plan, above.sample(runner.execute(plan))))
    assert scheduler.num_preemptions == 0 and most == (need if max_tokens > 1 else -(-n // size))
    idle(scheduler, runner)
    assert list(above.outputs["A"].values()) == samples_alone(a.prompt, max_tokens, width)


def test_a_list_for_each_row():
    "Three beams: one goes on, one is dropped, one forks; at the end all are dropped."
    scheduler = make(12, 4, max_num_seqs=3)
    a = gang(scheduler, "A", 6, 9, 3)
    runner = FakeRunner(scheduler)
    runner.execute(plan := scheduler.schedule())
    one, two, three = scheduler.update(plan, {0: [7, 8, 9]})
    runner.execute(plan := scheduler.schedule())
    grown = scheduler.update(plan, {one.seq_id: [], two.seq_id: [4, 5], three.seq_id: [6]})
    assert [seq.output for seq in grown] == [[8, 4], [8, 5], [9, 6]] == [seq.output for seq in two.group.seqs]
    assert grown[0] is two and grown[2] is three and two.group.places == 3 and one.seq_id not in scheduler.sequences
    scheduler.blocks.check()
    runner.execute(plan := scheduler.schedule())
    assert plan.released == [one.seq_id]
    assert scheduler.update(plan, {seq.seq_id: [] for seq in grown}) == []
    assert a.group.status is Status.FINISHED and not scheduler.has_unfinished
    idle(scheduler, runner)


# ---- cached and pinned prefixes ----------------------------------------------------------

def pin(scheduler, runner, n, start=0, request_id="pin"):
    seq = Sequence(scheduler.new_id(), request_id, prompt_of(start, n), 1)
    scheduler.add(seq, pin=True)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        runner.execute(plan)
        scheduler.update(plan, {row.seq_id: [0] for row in plan.rows if row.samples})
        if seq.output: scheduler.keep(seq.seq_id)
    return seq.seq_id


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("n", [8, 10])
def test_pinned_prefix(n, caching):
    scheduler = Scheduler(BlockManager(12, 4, enable_prefix_caching=caching), watermark=0)
    runner = FakeRunner(scheduler)
    prefix = pin(scheduler, runner, n)
    held = -(-n // 4)
    assert scheduler.num_pinned == scheduler.blocks.num_used == held and list(scheduler.pins) == [prefix]
    before = runner.computed
    a, b, c = (gang(scheduler, name, k, 4, 1, salt=salt) for name, k, salt in [("A", 13, None), ("B", n, None), ("C", 12, "s")])
    step(scheduler, runner)
    assert [seq.group.num_cached for seq in (a, b)] == [n, n - 1]
    while scheduler.has_unfinished: step(scheduler, runner)
    assert c.group.num_cached == 0 and [seq.output for seq in (a, b, c)] == [solo(seq.prompt, 4) for seq in (a, b, c)]
    assert runner.computed - before == sum(len(seq.prompt) + 3 - seq.group.num_cached for seq in (a, b, c))
    with pytest.raises(ValueError, match=rf"'D'.* need {13 - held} blocks.*the pool has {12 - held} besides {held} pinned"):
        gang(scheduler, "D", 49 - 4 * held, 1, 1)
    scheduler.unpin(prefix)
    with pytest.raises(ValueError, match=f"{prefix} is not pinned"): scheduler.unpin(prefix)
    assert scheduler.num_pinned == 0 == scheduler.blocks.num_used
    gang(scheduler, "D", 49 - 4 * held, 1, 1)


def test_a_pin_is_let_go_while_it_is_shared():
    scheduler = make(8, 4)
    runner = FakeRunner(scheduler)
    prefix = pin(scheduler, runner, 10)
    a, = [gang(scheduler, "A", 14, 5, 1)]
    step(scheduler, runner)
    scheduler.unpin(prefix)
    assert scheduler.blocks.num_used == 4 and a.group.num_cached == 10
    while scheduler.has_unfinished: step(scheduler, runner)
    idle(scheduler, runner)
    assert a.output == solo(a.prompt, 5)


def test_a_pin_that_leaves_no_room():
    scheduler = make(8, 4)
    a = gang(scheduler, "A", 9, 4, 3)       # 2 + 3 blocks
    runner = FakeRunner(scheduler)
    def prefix(n, **more): return Sequence(scheduler.new_id(), "pin", prompt_of(5, n), 1, **more)
    with pytest.raises(ValueError, match="13 tokens cannot be pinned now: request 'A' may need 5 blocks, and the pool would have 4 left"):
        scheduler.add(prefix(13), pin=True)
    with pytest.raises(ValueError, match="'pin' can never be served.* 9 blocks"): scheduler.add(prefix(33), pin=True)
    for more in (dict(salt="s"), dict(width=2)):
        with pytest.raises(ValueError, match="one sequence without a salt"): scheduler.add(prefix(4, **more), pin=True)
    assert list(scheduler.groups) == ["A"] and scheduler.num_pinned == 0
    p = prefix(12)
    scheduler.add(p, pin=True)
    assert scheduler.num_pinned == 3, "promised, before it is computed"
    with pytest.raises(ValueError, match="no pin"): scheduler.keep(p.seq_id)
    with pytest.raises(ValueError, match="besides 3 pinned"): gang(scheduler, "B", 21, 1, 1)
    with pytest.raises(ValueError, match="no pin"): scheduler.keep(a.seq_id)
    scheduler.abort("pin")
    assert scheduler.num_pinned == 0
    gang(scheduler, "B", 21, 1, 1)
    run_samples(scheduler, runner, Samples(scheduler))
    idle(scheduler, runner)


@pytest.mark.parametrize("n", [4, 7, 8, 9])
def test_the_whole_prompt_is_cached(n):
    "At least its last token is computed again, and nobody sees a difference."
    scheduler = Scheduler(BlockManager(10, 4, enable_prefix_caching=True), watermark=0)
    runner, hits = FakeRunner(scheduler), (n - 1) // 4 * 4
    seqs = [gang(scheduler, "A", n, 6, 1)]
    run(scheduler, runner)
    for name in "BC":                       # together, with the same blocks
        seqs.append(gang(scheduler, name, n, 6, 1))
    assert rows(step(scheduler, runner)) == [(1, n - hits), (2, n - hits)]
    run(scheduler, runner)
    assert [seq.group.num_cached for seq in seqs] == [0, hits, hits]
    assert all(seq.output == solo(seq.prompt, 6) for seq in seqs)


def test_what_is_not_computed_yet_is_not_found():
    "Equal prompts in one step: each computes its own. A prompt in pieces: only what is there."
    scheduler = Scheduler(BlockManager(20, 4, enable_prefix_caching=True), watermark=0)
    seqs = [gang(scheduler, name, 12, 3, 1) for name in "AB"]
    run(scheduler)
    assert [seq.group.num_cached for seq in seqs] == [0, 0]
    scheduler = Scheduler(BlockManager(20, 4, enable_prefix_caching=True), watermark=0, max_num_batched_tokens=5)
    runner = FakeRunner(scheduler)
    a = gang(scheduler, "A", 14, 3, 1)
    step(scheduler, runner)
    scheduler.abort("A")                    # 5 of 14 tokens are computed, one block is full
    b = gang(scheduler, "B", 14, 3, 1)
    run(scheduler, runner)
    assert (a.group.num_cached, b.group.num_cached) == (0, 4) and b.output == solo(b.prompt, 3)


def test_a_request_that_waits_holds_nothing():
    "Its hits are counted in every step, and taken in none; many short requests leave all free."
    scheduler = Scheduler(BlockManager(6, 4, enable_prefix_caching=True), watermark=0)
    runner = FakeRunner(scheduler)
    gang(scheduler, "warm", 8, 1, 1)
    run(scheduler, runner)
    a = gang(scheduler, "A", 13, 9, 1, start=1)
    step(scheduler, runner)
    b = gang(scheduler, "B", 16, 9, 1)      # 2 of 4 blocks are found, free ones; 2 are missing
    while a.group.status is Status.RUNNING:
        refs = scheduler.blocks.allocator.refs
        used = [ref for ref in refs if ref]
        assert b.group.status is Status.WAITING and used == [1] * len(scheduler.blocks.table(a.seq_id).blocks)
        step(scheduler, runner)
    run(scheduler, runner)
    assert b.output == solo(b.prompt, 9)
    for i in range(30):
        gang(scheduler, f"r{i}", 4, 2, 1, start=i)
        run(scheduler, runner)
    assert scheduler.blocks.num_used == 0


# ---- swapping: out, back, and what is left where it is -----------------------------------

def put_out(scheduler, runner, *seqs):
    "These requests give way now, as in a step of nothing else. Returns the plan."
    draft = Draft(512)
    for seq in seqs: scheduler.preempt(seq.group, draft)
    released, scheduler.released = scheduler.released, []
    runner.execute(plan := draft.plan(released))
    scheduler.blocks.check()
    check_queues(scheduler)
    return plan


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_host", [0, 1, 2, 100])
def test_host_pools(num_host, caching):
    "Too small: computed again. Large: everything is computed once, though all of them give way."
    scheduler = make(6, 4, preemption="swap", num_host=num_host, caching=caching)
    seqs, runner = add(scheduler, 5, 6, 7, 3, max_tokens=14), FakeRunner(scheduler)
    run(scheduler, runner)
    assert [seq.output for seq in seqs] == [solo(seq.prompt, 14) for seq in seqs]
    again = runner.computed - sum(len(seq.prompt) + 13 for seq in seqs)
    if num_host == 100: assert scheduler.num_swaps == scheduler.num_preemptions >= 3 and again == 0
    else: assert scheduler.num_swaps < scheduler.num_preemptions and again > 0
    assert (scheduler.num_swaps > 0) == (runner.moved_out > 0) == (num_host > 1), "a victim has 2 blocks or more"
    if not caching: assert runner.moved_in == runner.moved_out


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks, returns", [(6, False), (7, True)])
def test_a_return_counts_the_block_of_the_next_token(num_blocks, returns, caching):
    "8 tokens in 2 full blocks: 2 free ones do not do, even where both still hold them; 3 do."
    scheduler = make(num_blocks, 4, preemption="swap", num_host=9, caching=caching)
    a, b = add(scheduler, 13, 7, max_tokens=6)
    runner = FakeRunner(scheduler)
    for _ in range(2): step(scheduler, runner)
    assert len(put_out(scheduler, runner, b).swapped_out) == 2
    assert b.num_computed == 8 and b.num_tokens == 9 and scheduler.blocks.num_free == num_blocks - 4
    assert scheduler.host.blocks_needed(scheduler.blocks, {1: 9}) == 3
    plan = step(scheduler, runner)
    assert rows(plan) == [(0, 1), (1, 1)][:1 + returns]
    assert b.group.status is (Status.RUNNING if returns else Status.SWAPPED)
    if not returns:
        scheduler.abort("A")
        plan = step(scheduler, runner)
        assert rows(plan) == [(1, 1)]
    assert len(plan.swapped_in) == (0 if caching else 2) and plan.rows[-1].position == 8
    run(scheduler, runner)
    assert b.output == solo(b.prompt, 6)


def test_what_is_cached_stays_unless_it_was_taken_meanwhile():
    scheduler = make(8, 4, preemption="swap", num_host=9, caching=True)
    a, = add(scheduler, 11, max_tokens=9)
    runner = FakeRunner(scheduler)
    for _ in range(3): step(scheduler, runner)
    plan = put_out(scheduler, runner, a)
    assert a.num_computed == 13 and len(plan.swapped_out) == 4, "3 full blocks, one that is not"
    b, = add(scheduler, 1, max_tokens=15)
    scheduler.preempted.remove(a.group)         # while B takes 4 fresh blocks, and one that A left: its last
    while b.group in (scheduler.running + scheduler.waiting):
        plan = scheduler.schedule()
        Greedy().take(scheduler, scheduler.update(plan, Greedy().sample(runner.execute(plan))))
    scheduler.preempted.append(a.group)
    plan = step(scheduler, runner)
    assert len(plan.swapped_in) == 1 and [row.position for row in plan.rows] == [13]
    run(scheduler, runner)
    assert a.output == solo(a.prompt, 9)


def test_abort_of_a_swapped_request():
    "Its blocks on the host are free at once, and whoever leaves next has them."
    scheduler = make(6, 4, preemption="swap", num_host=3)
    a, b, c = add(scheduler, 7, 7, 7, max_tokens=9)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    put_out(scheduler, runner, c)
    assert scheduler.host.num_used == 2 and ids(scheduler.preempted) == "C"
    assert scheduler.abort("C") and scheduler.host.num_used == 0 and not scheduler.abort("C")
    assert put_out(scheduler, runner, b).swapped_out and b.group.status is Status.SWAPPED
    run(scheduler, runner)
    assert [seq.output for seq in (a, b)] == [solo(seq.prompt, 9) for seq in (a, b)]


def test_abort_of_one_on_the_host_leaves_its_siblings_theirs():
    scheduler = make(12, 4, preemption="swap", num_host=12)
    a = gang(scheduler, "A", 6, 8, 3)
    runner, above = FakeRunner(scheduler), Samples(scheduler)
    for _ in range(2): step(scheduler, runner, caller=above)
    put_out(scheduler, runner, a)
    assert scheduler.host.num_used == 4 and scheduler.host.allocator.refs.count(3) == 1
    scheduler.finish(a.seq_id)
    assert scheduler.host.num_used == 3 and a.group.status is Status.SWAPPED
    run_samples(scheduler, runner, above)
    idle(scheduler, runner)
    assert list(above.outputs["A"].values())[1:] == samples_alone(a.prompt, 8, 3)[1:]


def test_a_victim_that_was_about_to_copy():
    "A has a row, and a copy for it, when B finds no block: neither is done, and the original moves, once."
    scheduler = make(4, 4, preemption="swap", num_host=4, policy=Policy("oldest goes", victim=lambda running: running[0]))
    a, b = gang(scheduler, "A", 6, 3, 2), gang(scheduler, "B", 4, 3, 1, start=1)
    runner, above = FakeRunner(scheduler), Samples(scheduler)
    step(scheduler, runner, caller=above)
    before, others = list(scheduler.blocks.table(0).blocks), [seq.seq_id for seq in a.group.seqs]
    plan = step(scheduler, runner, caller=above)
    assert [block for block, _ in plan.swapped_out] == before == [0, 1] and plan.copies == []
    assert rows(plan) == [(b.seq_id, 1)] and plan.preempted == others and plan.released == [0]
    assert scheduler.host.allocator.refs.count(2) == 2 == scheduler.host.num_used
    run_samples(scheduler, runner, above)
    idle(scheduler, runner)
    assert [list(above.outputs[i].values()) for i in "AB"] == [samples_alone(a.prompt, 3, 2), samples_alone(b.prompt, 3, 1)]


def test_a_chunk_is_not_computed_again():
    scheduler = make(6, 4, preemption="swap", num_host=6, max_num_batched_tokens=8)
    a, b = add(scheduler, 4, 20, max_tokens=4)
    runner = FakeRunner(scheduler)
    assert rows(step(scheduler, runner)) == [(0, 4), (1, 4)]
    plan = step(scheduler, runner)
    assert plan.preempted == [1] and len(plan.swapped_out) == 1, "one of its 5 blocks has something in it"
    while b.group.status is Status.SWAPPED: plan = step(scheduler, runner)
    assert [(row.position, len(row.tokens)) for row in plan.rows] == [(4, 8)] and len(plan.swapped_in) == 1
    run(scheduler, runner)
    assert runner.computed == 4 + 3 + 20 + 3 and [a.output, b.output] == [solo(seq.prompt, 4) for seq in (a, b)]


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("caching", [False, True])
def test_a_gang_shares_after_the_round_trip(caching, steps):
    "Right after the fork, its last block, which is not full, is shared; it is copied when it is back."
    scheduler = make(12, 4, preemption="swap", num_host=12, caching=caching)
    a = gang(scheduler, "A", 6, 9, 3)
    runner, above = FakeRunner(scheduler), Samples(scheduler)
    for _ in range(steps): step(scheduler, runner, caller=above)
    on_device, computed = scheduler.blocks.num_used, runner.computed
    plan = put_out(scheduler, runner, a)
    shared, own = (2, 0) if steps == 1 else (1, 6)
    assert len(plan.swapped_out) == scheduler.host.num_used == on_device == shared + own
    assert scheduler.host.allocator.refs.count(3) == shared
    plan = step(scheduler, runner, caller=above)
    assert len(plan.swapped_in) == (shared + own if not caching else {1: 1, 4: 3}[steps])
    assert len(plan.copies) == (2 if steps == 1 else 0) and rows(plan) == [(seq.seq_id, 1) for seq in a.group.seqs]
    if steps == 1: assert {a for a, _ in plan.copies} <= {b for _, b in plan.swapped_in}
    assert scheduler.blocks.allocator.refs.count(3) == 1 and runner.computed == computed + 3
    run_samples(scheduler, runner, above)
    idle(scheduler, runner)
    assert list(above.outputs["A"].values()) == samples_alone(a.prompt, 9, 3)


def test_the_host_may_hold_more_than_the_device_has():
    "Survivors grow into what victims left: 12 blocks, and 3 + 4 + 6 are on the host at once."
    scheduler = make(12, 4, preemption="swap", num_host=24)
    seqs, runner, left, most = add(scheduler, 12, 12, 12, 12, max_tokens=20), None, [], 0
    runner = FakeRunner(scheduler)
    while scheduler.has_unfinished:
        plan = step(scheduler, runner)
        if plan.swapped_out: left.append((plan.preempted, len(plan.swapped_out)))
        most = max(most, scheduler.host.num_used)
    assert left[:3] == [([3], 3), ([2], 4), ([1], 6)] and most == 13
    assert [seq.output for seq in seqs] == [solo(seq.prompt, 20) for seq in seqs]


@pytest.mark.parametrize("link, num_host, swaps", [(1, 9, True), (.51, 9, True), (.5, 9, False), (.1, 9, False), (1, 2, False), (1, 3, True)])
def test_auto_takes_what_costs_less(link, num_host, swaps):
    "12 tokens take 12 s to compute; 3 blocks out and back take 6 s over a link of 1 block a second."
    scheduler = make(12, 4, preemption="auto", num_host=num_host, link=link)
    a, = add(scheduler, 11, max_tokens=9)
    runner = FakeRunner(scheduler)
    for _ in range(2): step(scheduler, runner)
    put_out(scheduler, runner, a)
    assert a.group.status is (Status.SWAPPED if swaps else Status.PREEMPTED)
    assert a.num_computed == 12 * swaps and scheduler.num_swaps == swaps and scheduler.num_preemptions == 1
    run(scheduler, runner)
    assert a.output == solo(a.prompt, 9) and runner.computed == 19 + 12 * (not swaps)


@pytest.mark.parametrize("link, swaps", [(.6, True), (.5, False)])
def test_auto_counts_what_a_gang_shares_once(link, swaps):
    "8 common tokens in 2 blocks: 8 s, against 4 / link s."
    scheduler = make(12, 4, preemption="auto", num_host=12, link=link)
    a = gang(scheduler, "A", 8, 5, 3)
    runner, above = FakeRunner(scheduler), Samples(scheduler)
    step(scheduler, runner, caller=above)
    put_out(scheduler, runner, a)
    assert scheduler.num_swaps == swaps
    run_samples(scheduler, runner, above)
    assert list(above.outputs["A"].values()) == samples_alone(a.prompt, 5, 3)


@pytest.mark.parametrize("num_host, statuses", [(0, "PP"), (1, "PS"), (9, "SS"), (2, "PS")])
def test_order_after_mixed_preemption(num_host, statuses):
    "C gives way, then B; D arrives. B, C, D come back, whether from the host or by computing."
    scheduler = make(5, 4, preemption="swap", num_host=num_host)
    seqs = add(scheduler, 8, 4, 4, max_tokens=9)
    runner, entries = FakeRunner(scheduler), []
    step(scheduler, runner)
    assert step(scheduler, runner).preempted == [2]
    while not (plan := step(scheduler, runner)).preempted: pass
    seqs += add(scheduler, 1, max_tokens=2)
    assert plan.preempted == [1] and ids(scheduler.preempted) == "BC" and ids(scheduler.waiting) == "D"
    assert "".join(group.status.name[0] for group in scheduler.preempted) == statuses
    while scheduler.has_unfinished:
        known = set(runner.tables)
        plan = step(scheduler, runner)
        entries += [row.seq_id for row in plan.rows if row.seq_id not in known]
        if 0 in scheduler.sequences: assert rows(plan) == [(0, 1)]
    assert list(dict.fromkeys(entries)) == [1, 2, 3]
    assert [seq.output for seq in seqs] == [solo(seq.prompt, seq.max_tokens) for seq in seqs]


def test_nobody_passes_a_swapped_one():
    "C would fit into what B, on the host, cannot use."
    scheduler = make(4, 4, preemption="swap", num_host=4)
    a, b = add(scheduler, 8, 8, max_tokens=5)
    runner = FakeRunner(scheduler)
    assert step(scheduler, runner) and step(scheduler, runner).preempted == [1]
    c, = add(scheduler, 1, max_tokens=1)
    while a.group.status is Status.RUNNING:
        assert scheduler.blocks.num_free == 1 and ids(scheduler.waiting) == "C"
        step(scheduler, runner)
    assert rows(step(scheduler, runner)) == [(1, 1), (2, 1)]
    run(scheduler, runner)
    assert [seq.output for seq in (a, b, c)] == [solo(seq.prompt, seq.max_tokens) for seq in (a, b, c)]


def test_preempts_itself_to_the_host():
    "No row, no table, and its two blocks are on the host."
    scheduler = make(3, 4, preemption="swap", num_host=3)
    a, b = add(scheduler, 6, 4)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    plan = step(scheduler, runner)
    assert rows(plan) == [(0, 1)] and plan.preempted == plan.released == [1] and len(plan.swapped_out) == 1
    assert b.group.status is Status.SWAPPED and 1 not in scheduler.blocks.tables
    run(scheduler, runner)
    assert b.output == solo(b.prompt, 4) and runner.computed == 6 + 3 + 4 + 3


def test_a_plan_that_failed_moved_nothing():
    "A's step failed while B was on its way out: B computes again, and C, long on the host, does not."
    scheduler = make(4, 4, preemption="swap", num_host=9)
    a, b, c = add(scheduler, 4, 4, 4, max_tokens=5)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    put_out(scheduler, runner, c)
    blocker = scheduler.blocks.append(99, 0, reserve=4)
    plan = scheduler.schedule()                 # A takes the last block, B leaves
    assert blocker and rows(plan) == [(0, 1)] and plan.preempted == [1] and plan.swapped_out
    scheduler.failed(plan)
    scheduler.blocks.free(99)
    scheduler.abort("A")
    assert [group.status for group in scheduler.preempted] == [Status.PREEMPTED, Status.SWAPPED]
    assert b.num_computed == 0 and c.num_computed == 4 and scheduler.host.num_used == 1
    check_queues(scheduler)
    runner.execute(Plan([], released=plan.released))
    run(scheduler, runner)
    assert [seq.output for seq in (b, c)] == [solo(seq.prompt, 5) for seq in (b, c)]


# ---- a refusal stands, but not for ever --------------------------------------------------

class Counts(Scheduler):
    "How often it worked out what a group needs."
    asked = 0

    def need(self, group):
        self.asked += 1
        return super().need(group)

    def need_of_swapped(self, group):
        self.asked += 1
        return super().need_of_swapped(group)


def refused(n=12, caching=False, num_blocks=6, **kwargs):
    "A runs with 12 + 1 tokens, in 4 of 6 blocks; B, with `n` tokens, was refused."
    scheduler = make(num_blocks, 4, Counts, caching=caching, **kwargs)
    a, b = gang(scheduler, "A", 13, 9, 1, start=1), gang(scheduler, "B", n, 5, 1)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    assert ids(scheduler.running) == "A" and scheduler.asked == 2
    return scheduler, runner, a, b


def test_a_refusal_is_not_worked_out_again():
    scheduler, runner, *_ = refused(caching=True)
    for _ in range(5): step(scheduler, runner)
    assert scheduler.asked == 2 and ids(scheduler.waiting) == "B"
    scheduler.abort("A")
    assert rows(step(scheduler, runner)) == [(1, 12)] and scheduler.asked == 3


def test_a_refusal_ends_with_a_free_block():
    scheduler, runner, a, b = refused()
    scheduler.blocks.append(9, 0, reserve=4)        # one free block less, then as many as before, then more
    assert not scheduler.has_room(b.group, 0) and scheduler.asked == 2
    scheduler.blocks.free(9)
    assert not scheduler.has_room(b.group, 0) and scheduler.asked == 2
    scheduler.abort("A")
    assert scheduler.has_room(b.group, 0) and scheduler.asked == 3 and scheduler.refusal is None


def test_a_refusal_ends_with_the_block_that_was_missing():
    scheduler, runner, a, b = refused(caching=True)
    scheduler.blocks.append(9, 4)                   # somebody computes B's first block
    assert not scheduler.has_room(b.group, 0) and scheduler.asked == 2
    scheduler.blocks.commit(9, 4, lambda start, n: b.prompt[start:start + n])
    assert scheduler.has_room(b.group, 0) == (scheduler.blocks.num_free >= 2) and scheduler.asked == 3
    scheduler.blocks.free(9)


def test_a_refusal_ends_with_a_pin():
    "One that comes, and one that goes."
    scheduler = make(8, 4, Counts)
    p = Sequence(scheduler.new_id(), "pin", prompt_of(0, 8), 1)
    scheduler.add(p, pin=True)
    a, b = gang(scheduler, "A", 13, 4, 1, start=1), gang(scheduler, "B", 12, 4, 1)
    runner = FakeRunner(scheduler)
    plan = scheduler.schedule()
    assert [row.seq_id for row in plan.rows] == [p.seq_id, a.seq_id] and scheduler.refusal[0] is b.group
    scheduler.update(plan, Greedy().sample(runner.execute(plan)))
    scheduler.keep(p.seq_id)
    assert scheduler.refusal is None
    assert rows(step(scheduler, runner)) == [(a.seq_id, 1), (b.seq_id, 4)], "2 of its 3 blocks are pinned now"
    c = gang(scheduler, "C", 9, 4, 1, start=2)
    step(scheduler, runner)
    assert scheduler.refusal[0] is c.group
    scheduler.unpin(p.seq_id)
    assert scheduler.refusal is None
    run(scheduler, runner)
    assert [seq.output for seq in (a, b, c)] == [solo(seq.prompt, 4) for seq in (a, b, c)]


def test_a_refusal_ends_when_nobody_runs():
    "Alone, B need not leave the watermark free."
    scheduler, runner, a, b = refused(24 - 4, watermark=.4)
    scheduler.abort("A")
    assert rows(step(scheduler, runner)) == [(b.seq_id, 20)]


# ---- block accounting --------------------------------------------------------------------

@pytest.mark.parametrize("mode", PREEMPTION)
def test_abort_from_every_queue(mode):
    "Running, waiting, given way, unknown, finished: both pools return to where they were, the others go on."
    scheduler = make(8, 4, preemption=mode, num_host=8, link=9)
    a, b, c, d, e = add(scheduler, 8, 8, 4, 4, 30, max_tokens=3)
    runner = FakeRunner(scheduler)
    step(scheduler, runner)
    put_out(scheduler, runner, c, d)
    there = Status.PREEMPTED if mode == "recompute" else Status.SWAPPED
    assert c.group.status is d.group.status is there and scheduler.host.num_used == 2 * (mode != "recompute")
    for request_id, was in [("C", True), ("E", True), ("B", True), ("C", False), ("nobody", False)]:
        assert scheduler.abort(request_id) is was
        scheduler.blocks.check()
        check_queues(scheduler)
    assert scheduler.host.num_used == (mode != "recompute") and scheduler.blocks.num_used == 2
    run(scheduler, runner)
    assert not scheduler.abort("A") and [a.output, d.output] == [solo(seq.prompt, 3) for seq in (a, d)]


def test_a_refused_request_leaves_no_trace():
    "100 times: one that can never be served, one that waits, one on the host that cannot return yet."
    scheduler = make(6, 4, caching=True, preemption="swap", num_host=6)
    runner = FakeRunner(scheduler)
    add(scheduler, 12, max_tokens=1)
    run(scheduler, runner)
    a = gang(scheduler, "a", 12, 9, 1)
    step(scheduler, runner)
    w = gang(scheduler, "w", 13, 9, 1)
    refs = list(scheduler.blocks.allocator.refs)
    for i in range(100):
        with pytest.raises(ValueError, match="can never be served"): gang(scheduler, f"n{i}", 30, 1, 1)
        scheduler.refusal = None
        assert not scheduler.has_room(w.group, 3) and scheduler.blocks.allocator.refs == refs
    put_out(scheduler, runner, a)
    refs = list(scheduler.blocks.allocator.refs), list(scheduler.host.allocator.refs)
    for _ in range(100):
        scheduler.refusal = None
        assert not scheduler.has_room(a.group, 3)
        assert refs == (scheduler.blocks.allocator.refs, scheduler.host.allocator.refs)
    run(scheduler, runner)
    assert [a.output, w.output] == [solo(seq.prompt, 9) for seq in (a, w)]


@pytest.mark.parametrize("mode", PREEMPTION)
@pytest.mark.parametrize("size", [1, 3, 12, 48])
def test_odd_block_sizes(size, mode):
    "A limit that is no multiple of the block size; twice, so that one gives way."
    scheduler = make(-(-50 // size), size, max_model_len=50, preemption=mode, num_host=50, link=9)
    seqs = [gang(scheduler, "A", 49, 1, 1), gang(scheduler, "B", 20, 30, 1), gang(scheduler, "C", 22, 28, 1)]
    run(scheduler)
    assert [seq.output for seq in seqs] == [solo(seq.prompt, seq.max_tokens) for seq in seqs]
    with pytest.raises(ValueError, match="max_model_len is 50"): gang(scheduler, "D", 49, 2, 1)
    for bad in (0, -4):
        with pytest.raises(ValueError, match=f"block_size is {bad}"): make(4, bad)


def test_a_gang_that_returns_holds_its_common_part_once():
    "A greedy request and a gang with its prompt, both lost: who commits first has equal blocks, which are not the gang's."
    s = make(30, 4, caching=True)
    b, a = gang(s, "B", 12, 20, 1), gang(s, "A", 12, 20, 2)
    runner = FakeRunner(s)
    def go(answers):
        plan = s.schedule()
        runner.execute(plan)
        s.update(plan, {row.seq_id: answers(row.seq_id) for row in plan.rows if row.samples})
    go(lambda i: [2] if i == b.seq_id else [1, 2])
    for token in range(3, 10): go(lambda i: [token])
    put_out(s, runner, a, b)
    s.blocks.append(99, 0, reserve=120)      # all contents are overwritten
    s.blocks.free(99)
    go(lambda i: [50])
    first, second = (s.blocks.table(seq.seq_id).blocks for seq in a.group.seqs)
    assert first[:3] == second[:3]
    s.abort("B")
    assert s.blocks.num_used <= 3 + 2 * (-(-a.num_tokens // 4) - 3)


def test_auto_counts_the_blocks_that_would_move():
    "Mid-prefill the prompt's blocks are all reserved; those that are empty cost no transfer."
    s = make(6, 4, preemption="auto", num_host=6, link=1, max_num_batched_tokens=8)
    a, b = add(s, 4, 20)
    plan = s.schedule()
    s.update(plan, {row.seq_id: [1] for row in plan.rows if row.samples})
    assert b.num_computed == 4 and len(s.blocks.table(b.seq_id).blocks) == 5 and s.wants_swap(b.group)


class Flaky:
    "A victim function that fails every other time: it raises, or names nobody, or empties its list."
    def __init__(self): self.calls = 0

    def __call__(self, running):
        self.calls += 1
        if self.calls % 2: return running[-1]
        if self.calls % 3: raise RuntimeError("flaky")
        running.clear()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_planning_that_breaks_off_loses_nothing(preemption, caching):
    "After a policy that raised, everyone who ran computes again, and the answers are those of a run alone."
    flaky = Flaky()
    s = make(12, 4, caching=caching, num_host=20, preemption=preemption, policy=Policy("flaky", victim=flaky))
    seqs, runner, above, broken = add(s, 9, 8, 11, 5, 7, max_tokens=18), FakeRunner(s), Greedy(), 0
    for _ in range(2000):
        if not s.has_unfinished: break
        try: plan = s.schedule()
        except (RuntimeError, ValueError) as e:
            broken += 1
            assert "flaky" in str(e)
            s.blocks.check(), s.host.check(), check_queues(s)
            continue
        above.take(s, s.update(plan, above.sample(runner.execute(plan))))
    assert not s.has_unfinished and broken >= 2 and s.blocks.num_free == 12 and s.host.num_free == 20
    assert all(seq.output == solo(seq.prompt, 18) for seq in seqs)


def test_a_policy_that_cannot_be():
    for bad in ({"order": "arrival"}, {"victim": None}):
        with pytest.raises(ValueError, match="must be a function"): Policy("bad", **bad)


def test_an_order_that_fails_leaves_no_trace():
    s = make(6, 4, policy=Policy("bad", order=lambda group: 1 / 0))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError): s.add(Sequence(0, "A", [1], 2))
    assert not s.has_unfinished and not s.groups and not s.waiting
