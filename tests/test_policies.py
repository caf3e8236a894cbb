"""Policies: each admits and evicts as it says, none changes an answer, and work goes on under any."""
from collections import deque
from random import Random

import pytest
from hypothesis import HealthCheck, event, given, settings, strategies as st

from pagedlm.policies import FCFS, LEAST_PREEMPTED, POLICIES, SHORTEST_REMAINING, pick_policy
from pagedlm.scheduler import Draft, Policy, QueueFull, Scheduler, Sequence, Status
from pagedlm.sharing import BlockManager
from pagedlm.swapping import HostPool, SwapCosts

EACH = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
RECOVERIES = ("recompute", "swap", "auto")
COSTS = SwapCosts(block_bytes=1, token_flops=1, link_bytes_s=2 / 3, flops_s=1)     # 3 tokens a block


# ---- a model that reads everything back --------------------------------------------------

def next_token(history, member=0):
    h = 31 + member
    for token in history: h = (h * 69_069 + token + 1) % (2**31 - 1)
    return h % 9973


def solo(seq, member=0):
    "What sample `member` of a request answers when it is alone."
    tokens = list(seq.prompt)
    for i in range(seq.max_tokens): tokens.append(next_token(tokens, member if i == 0 else 0))
    return tokens[len(seq.prompt):]


class Model:
    "A cache of (token, position) on the device and on the host; a row's history is read from it."

    def __init__(self, scheduler):
        self.scheduler, self.size, self.tables = scheduler, scheduler.blocks.block_size, {}
        self.device = [[None] * self.size for _ in range(scheduler.blocks.num_blocks)]
        self.host = [[None] * self.size for _ in range(scheduler.host.num_blocks)]

    def execute(self, plan):
        for seq_id in plan.released: del self.tables[seq_id]
        for source, target in plan.swapped_out: self.host[target] = list(self.device[source])
        for source, target in plan.swapped_in: self.device[target] = list(self.host[source])
        copies = [(target, list(self.device[source])) for source, target in plan.copies]
        for target, block in copies: self.device[target] = block
        for row in plan.rows:
            table = self.tables.setdefault(row.seq_id, [])
            table[row.first_block:] = row.blocks
            for i, token in enumerate(row.tokens, row.position):
                self.device[table[i // self.size]][i % self.size] = token, i
        return {row.seq_id: self.read(row) for row in plan.rows if row.samples}

    def read(self, row):
        table, n = self.tables[row.seq_id], row.position + len(row.tokens)
        cells = [self.device[table[i // self.size]][i % self.size] for i in range(n)]
        assert all(cell and cell[1] == i for i, cell in enumerate(cells)), "a stale or foreign slot"
        return [token for token, _ in cells]


class Bench:
    "A scheduler, its model, and what they did: answers, victims and entries in their order."

    def __init__(self, policy=FCFS, num_blocks=6, block_size=4, preemption="recompute", cache=False,
                 host=12, watermark=0, **limits):
        blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=cache)
        self.scheduler = Scheduler(blocks, policy=policy, preemption=preemption, costs=COSTS,
                                   host=HostPool(host, block_size), watermark=watermark, **limits)
        self.model, self.answers = Model(self.scheduler), {}
        self.victims, self.entered, self.steps = [], [], 0

    def add(self, name, prompt, max_tokens, width=1):
        "A request; its prompt is a list of tokens, or a length."
        if isinstance(prompt, int): prompt = [sum(map(ord, name)) + i % 5 for i in range(prompt)]
        seq = Sequence(self.scheduler.last_id + 1, name, prompt, max_tokens, width)
        self.scheduler.add(seq)
        return seq

    def step(self):
        scheduler, ran = self.scheduler, {g.request_id for g in self.scheduler.running}
        counts = {g: g.num_preemptions for g in scheduler.groups.values()}
        plan = scheduler.schedule()
        self.entered += [g.request_id for g in scheduler.running if g.request_id not in ran]
        self.victims += [g.request_id for g, n in counts.items() if g.num_preemptions > n]
        assert plan.rows or not scheduler.has_unfinished
        read = self.model.execute(plan)
        sampled = {}
        for seq_id, history in read.items():
            seq = scheduler.sequences[seq_id]
            members = range(1 if seq.output else seq.width)
            sampled[seq_id] = [next_token(history, i) for i in members]
        for seq in scheduler.update(plan, sampled):
            if len(seq.output) == seq.max_tokens:
                self.answers.setdefault(seq.request_id, []).append(seq.output)
                scheduler.finish(seq.seq_id)
        scheduler.blocks.check(), scheduler.host.check()
        self.steps += 1
        assert self.steps <= 3000, "it does not come to an end"
        return plan

    def run(self):
        while self.scheduler.has_unfinished: self.step()
        self.idle()

    def idle(self):
        scheduler = self.scheduler
        self.model.execute(scheduler.schedule())
        assert scheduler.blocks.num_used == scheduler.host.num_used == 0 and not self.model.tables
        assert not (scheduler.running or scheduler.waiting or scheduler.preempted or scheduler.groups)

    def order(self): return "".join(g.request_id for g in self.scheduler.waiting)
    def out(self): return "".join(g.request_id for g in self.scheduler.preempted)
    def running(self): return "".join(g.request_id for g in self.scheduler.running)


# ---- no policy changes an answer ---------------------------------------------------------

@st.composite
def loads(draw):
    "(block size, blocks, [(gap, prompt, max_tokens, width)], limits); prompts begin alike."
    size, num = draw(st.integers(1, 4)), draw(st.integers(6, 12))
    slots, requests = size * num, []
    for _ in range(draw(st.integers(3, 8))):
        width = draw(st.sampled_from([1, 1, 1, 2, 3]))
        n = draw(st.integers(1, max(1, slots // (2 * width))))
        most = max(1, (num // width - 1) * size - n)
        requests.append((draw(st.sampled_from([0, 0, 1, 3])), n, draw(st.integers(1, min(most, 20))), width))
    limits = dict(max_num_batched_tokens=draw(st.sampled_from([64, 5, 3])), max_num_seqs=draw(st.sampled_from([9, 3])),
                  watermark=draw(st.sampled_from([0, .01, .3])), host=draw(st.sampled_from([12, 40, 3, 0])))
    return size, num, requests, limits


def serve(load, policy, preemption, cache):
    "The bench after this load; every answer has been compared with its solo run."
    size, num, requests, limits = load
    bench, todo, seqs, at = Bench(policy, num, size, preemption, cache, **limits), deque(), [], 0
    for i, (gap, n, max_tokens, width) in enumerate(requests):
        at += gap
        prompt = [min(j, 5) if j < n - 1 else i for j in range(n)]
        todo.append((at, f"r{i}", prompt, max_tokens, width))
    while todo or bench.scheduler.has_unfinished:
        while todo and todo[0][0] <= bench.steps:
            seqs.append(bench.add(*todo.popleft()[1:]))
        bench.step()
    bench.idle()
    for seq in seqs:
        assert sorted(bench.answers[seq.request_id]) == sorted(solo(seq, i) for i in range(seq.width))
    return bench


quick = settings(max_examples=40, deadline=None, derandomize=True,
                 suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@EACH
@pytest.mark.parametrize("preemption", RECOVERIES)
@pytest.mark.parametrize("cache", [False, True], ids=["", "cache"])
@quick
@given(load=loads())
def test_every_policy_answers_as_solo(policy, preemption, cache, load):
    bench = serve(load, policy, preemption, cache)
    event(f"preempted: {bench.scheduler.num_preemptions > 0}, swapped: {bench.scheduler.num_swaps > 0}")
    if preemption == "recompute": assert bench.scheduler.num_swaps == 0


@settings(parent=quick, max_examples=150)
@given(load=loads(), seed=st.integers(0, 10**6), preemption=st.sampled_from(RECOVERIES), cache=st.booleans())
def test_any_victim_and_any_order_come_to_an_end(load, seed, preemption, cache):
    random, ranks = Random(seed), {}
    policy = Policy("die", order=lambda group: ranks.setdefault(group.request_id, random.random()),
                    victim=random.choice)
    bench = serve(load, policy, preemption, cache)
    event(f"preempted: {bench.scheduler.num_preemptions > 0}")


@pytest.mark.parametrize("victim", [lambda running: running[0], lambda running: running[-1],
                                    lambda running: running[len(running) // 2]], ids=["first", "last", "middle"])
@pytest.mark.parametrize("preemption", RECOVERIES)
def test_whoever_gives_way_each_step_of_decodes_emits(victim, preemption):
    bench = Bench(Policy("rude", victim=victim), 13, 2, preemption, max_num_batched_tokens=5)
    seqs = [bench.add("ABCDEFGH"[i], 2 + i, 14) for i in range(8)]
    total, silent = 0, 0
    while bench.scheduler.has_unfinished:
        plan = bench.step()
        now = sum(len(seq.output) for seq in seqs)
        assert now - total == sum(row.samples for row in plan.rows)
        silent = 0 if now > total else silent + 1
        assert silent <= 6, "only the chunks of one prompt and its answer pass without a token"
        total = now
    assert bench.scheduler.num_preemptions >= 3


# ---- who comes in, and who gives way -----------------------------------------------------

SHAPES = [("A", 3, 9), ("B", 2, 4), ("C", 4, 7), ("D", 1, 4), ("E", 3, 2)]       # name, prompt, max_tokens


@pytest.mark.parametrize("policy, line", [(FCFS, "ABCDE"), (LEAST_PREEMPTED, "ABCDE"),
                                          (SHORTEST_REMAINING, "EBDCA")], ids=list(POLICIES)[:1] + ["least", "short"])
def test_the_line_is_in_the_order_of_the_policy(policy, line):
    bench = Bench(policy, num_blocks=12, max_num_seqs=1)
    for shape in SHAPES: bench.add(*shape)
    assert bench.order() == line
    bench.run()
    assert "".join(bench.entered) == line and bench.victims == []


def test_shortest_by_what_is_left_and_not_by_the_prompt_or_the_total():
    bench = Bench(SHORTEST_REMAINING, num_blocks=20, max_num_seqs=1)
    for shape in [("A", 2, 5), ("B", 40, 4), ("C", 1, 5), ("D", 9, 3)]: bench.add(*shape)
    assert bench.order() == "DBAC"


def full(policy, shapes, num_blocks, block_size=4, decoded=None, **kwargs):
    "A bench whose pool is full, all of them running, `num_preemptions` as given."
    bench = Bench(policy, num_blocks, block_size, **kwargs)
    seqs = [bench.add(*shape) for shape in shapes]
    for seq, n in zip(seqs, decoded or [0] * len(seqs)): seq.group.num_preemptions = n
    while bench.running() != "".join(name for name, *_ in shapes): bench.step()
    while not bench.victims: bench.step()
    return bench, seqs


@pytest.mark.parametrize("policy, counts, victim", [
    (FCFS, (0, 0, 0), "C"), (FCFS, (5, 0, 3), "C"),
    (LEAST_PREEMPTED, (0, 0, 0), "C"), (LEAST_PREEMPTED, (0, 0, 1), "B"), (LEAST_PREEMPTED, (0, 1, 1), "A"),
    (LEAST_PREEMPTED, (2, 2, 2), "C"), (LEAST_PREEMPTED, (1, 2, 3), "A"), (LEAST_PREEMPTED, (3, 1, 2), "B"),
    (SHORTEST_REMAINING, (0, 0, 0), "A"), (SHORTEST_REMAINING, (9, 0, 0), "A")])
def test_victim(policy, counts, victim):
    "A has 20 tokens to generate, B 10, C 14; in the first full step one of them gives way."
    bench, seqs = full(policy, [("A", 8, 20), ("B", 8, 10), ("C", 8, 14)], 8, decoded=counts)
    assert bench.victims[0] == victim
    gone = next(seq for seq in seqs if seq.request_id == victim)
    assert gone.group.num_preemptions == counts["ABC".index(victim)] + 1
    bench.run()
    assert all(bench.answers[seq.request_id] == [solo(seq)] for seq in seqs)


def test_shortest_remaining_counts_what_was_generated():
    "A asked for more than B, but has less left by now: B gives way. And of equals the latest."
    bench = Bench(SHORTEST_REMAINING, num_blocks=8)
    a = bench.add("A", 4, 16)
    for _ in range(6): bench.step()
    b = bench.add("B", 8, 14)
    assert a.max_tokens > b.max_tokens and a.group.left < b.max_tokens
    while not bench.victims: bench.step()
    assert bench.victims == ["B"] and a.group.left < b.group.left
    bench, _ = full(SHORTEST_REMAINING, [("A", 8, 9), ("B", 8, 9), ("C", 8, 9)], 8)
    assert bench.victims[0] == "C"


def test_left_and_preemptions_stand_still_while_a_request_is_out():
    for policy in POLICIES.values():
        bench, _ = full(policy, [("A", 8, 20), ("B", 8, 10), ("C", 8, 14)], 8)
        keys = {g: policy.order(g) for g in bench.scheduler.preempted}
        assert keys
        while bench.scheduler.has_unfinished:
            bench.step()
            line = bench.scheduler.preempted
            assert all(policy.order(g) == keys.setdefault(g, policy.order(g)) for g in line)
            assert line == sorted(line, key=policy.order)
            keys = {g: key for g, key in keys.items() if g in line}


@EACH
@pytest.mark.parametrize("preemption", RECOVERIES)
def test_who_gave_way_returns_before_anybody_new(policy, preemption):
    bench, _ = full(policy, [("A", 8, 20), ("B", 8, 12), ("C", 8, 14)], 8, preemption=preemption)
    bench.add("Z", 1, 1)                    # shorter and smaller than all
    while bench.out():
        bench.step()
        assert "Z" not in bench.running() or not bench.out()
    bench.run()
    assert "Z" in bench.answers


def test_those_who_gave_way_return_in_the_order_of_the_policy():
    returned = {}
    for policy in (FCFS, SHORTEST_REMAINING):
        bench = Bench(policy, num_blocks=12)
        for shape in [("A", 12, 9), ("B", 4, 20), ("C", 4, 16), ("D", 4, 12)]: bench.add(*shape)
        bench.step()
        for name in "DBC":                  # in an order that is neither's
            group = next(g for g in bench.scheduler.running if g.request_id == name)
            bench.scheduler.preempt(group, Draft(0))
        returned[policy.name] = bench.out()
        bench.run()
    assert returned == {"fcfs": "BCD", "shortest-remaining": "DCB"}


# ---- what the policies promise -----------------------------------------------------------

def oldest_rests(policy, seed):
    "Steps in which the oldest request present has no row, and preemptions, on a random load."
    random = Random(seed)
    bench, rests = Bench(policy, num_blocks=16), 0
    todo = deque((random.randint(0, 40), random.randint(1, 20), random.randint(1, 30)) for _ in range(16))
    todo = deque(sorted(todo))
    while todo or bench.scheduler.has_unfinished:
        while todo and todo[0][0] <= bench.steps: bench.add(f"r{len(todo)}", *todo.popleft()[1:])
        oldest = min(bench.scheduler.sequences, default=None)
        rows = {row.seq_id for row in bench.step().rows}
        rests += oldest is not None and oldest not in rows
    return rests, bench.scheduler.num_preemptions


def test_under_fcfs_the_oldest_goes_on_in_every_step_and_only_there():
    runs = {policy.name: [oldest_rests(policy, seed) for seed in range(12)] for policy in POLICIES.values()}
    assert all(preemptions > 0 for of in runs.values() for _, preemptions in of)
    assert [rests for rests, _ in runs["fcfs"]] == [0] * 12
    assert all(sum(rests for rests, _ in runs[name]) > 20 for name in ("shortest-remaining", "least-preempted"))


def ageing(per_arrival):
    key = lambda group: (group.left + per_arrival * group.arrival, group.arrival)
    return Policy("ageing", key, lambda running: max(running, key=key))


@pytest.mark.parametrize("policy, served", [(FCFS, True), (LEAST_PREEMPTED, True), (SHORTEST_REMAINING, False),
                                            (ageing(1), True), (ageing(0), False)],
                         ids=["fcfs", "least", "short", "ageing", "not ageing"])
def test_a_long_request_in_a_stream_of_short_ones(policy, served):
    bench = Bench(policy, num_blocks=12)
    for t in range(300):
        if t % 2 == 0: bench.add(f"s{t}", 8, 8)
        if t == 20: long = bench.add("long", 8, 24)
        bench.step()
    assert ("long" in bench.answers) == served
    if served: return
    assert long.group.status is Status.WAITING and long.output == []
    bench.run()                             # the stream ends, and it is served at last
    assert bench.answers["long"] == [solo(long)]


def test_with_one_guess_for_all_shortest_remaining_is_fcfs():
    def victims(policy, max_tokens):
        random, bench = Random(5), Bench(policy, num_blocks=20)
        ends = {f"r{i}": random.randint(1, 25) for i in range(14)}
        for i, (name, end) in enumerate(ends.items()): bench.add(name, 1 + 5 * i % 17, max_tokens or end)
        while bench.scheduler.has_unfinished:
            bench.step()
            for name, end in ends.items():   # a stop string, as it were
                group = bench.scheduler.groups.get(name)
                if group and len(group.seqs[0].output) == end: bench.scheduler.abort(name)
        return bench.victims, bench.entered
    assert victims(SHORTEST_REMAINING, 60) == victims(FCFS, 60)
    assert victims(FCFS, 60)[0], "nobody gave way: nothing was compared"
    assert victims(SHORTEST_REMAINING, None) != victims(FCFS, None)


def test_least_preempted_spreads_what_the_oldest_bears_alone():
    def worst(policy, seed):
        random, bench = Random(seed), Bench(policy, num_blocks=16)
        seqs = [bench.add(f"r{i}", random.randint(1, 16), random.randint(10, 40)) for i in range(14)]
        groups = [seq.group for seq in seqs]
        bench.run()
        return max(group.num_preemptions for group in groups)
    oldest = Policy("oldest goes", victim=lambda running: running[0])
    runs = [[worst(policy, seed) for policy in (LEAST_PREEMPTED, FCFS, oldest)] for seed in range(8)]
    least, fcfs, old = map(sum, zip(*runs))
    assert least < fcfs < old, runs


# ---- names -------------------------------------------------------------------------------

def test_pick_policy():
    assert list(POLICIES) == ["fcfs", "shortest-remaining", "least-preempted"]
    for name, policy in POLICIES.items(): assert policy.name == name and pick_policy(name) is policy
    mine = Policy("mine")
    assert pick_policy(mine) is mine and pick_policy("fcfs") is FCFS


@pytest.mark.parametrize("wrong", ["lifo", "", "FCFS", None, 3, ["fcfs"], {"fcfs": 1}, Policy])
def test_pick_policy_names_what_there_is(wrong):
    with pytest.raises(ValueError) as error: pick_policy(wrong)
    assert all(name in str(error.value) for name in POLICIES) and repr(wrong) in str(error.value)


# ---- max_waiting -------------------------------------------------------------------------

def state(scheduler):
    "All that a refused request could leave behind."
    return (list(scheduler.waiting), list(scheduler.preempted), list(scheduler.running),
            dict(scheduler.groups), dict(scheduler.sequences), scheduler.num_arrived, scheduler.last_id,
            list(scheduler.blocks.allocator.refs), list(scheduler.blocks.allocator.queue), set(scheduler.known))


@EACH
def test_a_refusal_leaves_no_trace(policy):
    bench = Bench(policy, num_blocks=6, max_waiting=2, max_num_seqs=1, cache=True)
    bench.add("A", 8, 4)
    bench.step()
    bench.add("B", 4, 4), bench.add("C", 4, 4)
    before = state(bench.scheduler)
    refused = Sequence(77, "D", [1] * 4, 1)
    for _ in range(3):
        with pytest.raises(QueueFull, match="'D'.*2 requests wait.*max_waiting is 2"): bench.scheduler.add(refused)
        assert state(bench.scheduler) == before and refused.group is None
    while len(bench.scheduler.waiting) == 2: bench.step()
    bench.scheduler.add(refused)            # the same object, both its ids
    assert len(bench.scheduler.waiting) == 2
    with pytest.raises(QueueFull): bench.add("E", 1, 1)
    bench.run()
    assert sorted(bench.answers) == list("ABCD") and bench.answers["D"] == [solo(refused)]


def test_what_is_invalid_is_named_so_though_the_line_is_full():
    bench = Bench(num_blocks=6, max_waiting=1)
    bench.add("A", 4, 4)
    with pytest.raises(ValueError, match="can never be served"): bench.add("B", 40, 4)
    with pytest.raises(ValueError, match="in use"): bench.add("A", 4, 4)
    with pytest.raises(QueueFull): bench.add("B", 4, 4)
    assert not issubclass(QueueFull, ValueError)


def test_abort_makes_room_in_the_line():
    bench = Bench(max_waiting=1)
    bench.add("A", 4, 4)
    with pytest.raises(QueueFull): bench.add("B", 4, 4)
    bench.scheduler.abort("A")
    bench.add("B", 4, 4)
    bench.run()
    assert list(bench.answers) == ["B"]


@EACH
@pytest.mark.parametrize("preemption, status", [("recompute", Status.PREEMPTED), ("swap", Status.SWAPPED)])
def test_those_who_gave_way_do_not_count(policy, preemption, status):
    bench = Bench(policy, num_blocks=8, preemption=preemption, max_waiting=2)
    bench.add("A", 8, 20), bench.add("B", 8, 10)
    bench.step()
    bench.add("C", 8, 14)
    while not bench.out(): bench.step()
    out, = bench.scheduler.preempted
    assert out.status is status and bench.scheduler.waiting == []
    bench.add("D", 1, 1), bench.add("E", 1, 1)
    with pytest.raises(QueueFull): bench.add("F", 1, 1)
    bench.run()
    assert sorted(bench.answers) == list("ABCDE")


@pytest.mark.parametrize("wrong", [0, -1])
def test_max_waiting_is_at_least_one(wrong):
    with pytest.raises(ValueError, match="max_waiting"): Bench(max_waiting=wrong)


@EACH
def test_the_line_is_bounded_and_all_who_were_accepted_are_answered(policy):
    random, bench, accepted, refused = Random(1), Bench(policy, num_blocks=10, max_waiting=3), {}, 0
    for i in range(60):
        try: seq = bench.add(f"r{i}", random.randint(1, 12), random.randint(1, 20)); accepted[f"r{i}"] = seq
        except QueueFull: refused += 1
        bench.step()
        assert len(bench.scheduler.waiting) <= 3
    bench.run()
    assert refused > 10 and bench.answers.keys() == accepted.keys() and len(accepted) + refused == 60
    assert all(bench.answers[name] == [solo(seq)] for name, seq in accepted.items())


# ---- watermark ---------------------------------------------------------------------------

@EACH
def test_the_watermark_counts_only_beside_others(policy):
    bench = Bench(policy, num_blocks=10, watermark=.3)
    bench.add("A", 40, 1)                   # all ten blocks
    bench.step()
    assert list(bench.answers) == ["A"]
    bench.add("B", 20, 9), bench.add("C", 12, 3)
    bench.step()
    assert bench.running() == ("C" if policy is SHORTEST_REMAINING else "B")    # 5 + 3, and 3 spare
    bench.run()
    assert sorted(bench.answers) == ["A", "B", "C"]


@pytest.mark.parametrize("watermark, running", [(0, "ABC"), (.19, "ABC"), (.2, "AB"), (.5, "AB"), (.6, "A")])
def test_watermark_is_a_share_of_the_pool_rounded_down(watermark, running):
    "10 blocks; A, B and C take 3, 2 and 4 of them; 5 and then 1 would be left."
    bench = Bench(num_blocks=10, watermark=watermark)
    for name, n in (("A", 12), ("B", 8), ("C", 16)): bench.add(name, n, 1)
    bench.scheduler.schedule()
    assert bench.running() == running


@EACH
@pytest.mark.parametrize("preemption", RECOVERIES)
def test_who_returns_alone_needs_no_spare_blocks(policy, preemption):
    bench = Bench(policy, num_blocks=8, preemption=preemption, watermark=.5)
    seqs = [bench.add("A", 8, 24), bench.add("B", 4, 24)]
    bench.run()
    assert bench.victims and all(bench.answers[seq.request_id] == [solo(seq)] for seq in seqs)
