"""The scheduler under pressure: whatever happens to it, in any order, nothing is lost and nothing hangs."""
from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (RuleBasedStateMachine, initialize, precondition, rule,
                                 run_state_machine_as_test)

from pagedlm.policies import POLICIES
from pagedlm.scheduler import FCFS, PREEMPTION, Policy, Scheduler, Status
from test_scheduler import (AnyVictim, Ask, Branching, FakeRunner, check_queues, idle, make,
                            prompt_of, step)

SEEN = Counter()        # what the runs below have come across
UPSIDE_DOWN = Policy("upside down", lambda group: -group.arrival, lambda running: running[0])


class Remembers(Scheduler):
    "Says what a scheduler without a memory would answer to `has_room`."
    delayed = 0

    def has_room(self, group, spare):
        missing, swapped = self.missing, group.status is Status.SWAPPED
        fits = (self.need_of_swapped if swapped else self.need)(group) + spare <= self.blocks.num_free
        self.missing = missing
        said = super().has_room(group, spare)
        assert fits or not said, "there is no room"
        self.delayed = self.delayed + 1 if fits and not said else 0
        SEEN["a refusal that stood too long"] += self.delayed > 0
        assert said or self.running or not fits, "a request is refused for ever"
        return said


class Failing(FakeRunner):
    """While `fails` is set, it stops at a plan of that kind, as badly as could be: there is noise in
    all that the plan writes, and nothing is computed."""
    fails = None

    def execute(self, plan):
        self.plan = plan
        kinds = {"any": True, "out": plan.swapped_out, "in": plan.swapped_in, "copy": plan.copies}
        if not kinds.get(self.fails): return super().execute(plan)
        for seq_id in plan.released: del self.tables[seq_id]
        self.left += len(plan.released)
        noise = [(-1, i, None) for i in range(self.block_size)]
        for _, to in plan.swapped_out: self.host[to] = list(noise)
        for block, to in plan.swapped_in: self.host[block], self.cache[to] = list(noise), list(noise)
        for _, to in plan.copies: self.cache[to] = list(noise)
        for row in plan.rows: self.write(replace(row, tokens=[-1] * len(row.tokens)))
        raise RuntimeError("the model failed")


STATES = st.sampled_from(["swapped", "preempted", "running", "waiting", "ended", "unknown"])


def has_work(machine): return machine.scheduler.has_unfinished


class Pressure(RuleBasedStateMachine):
    """Requests that branch, share and pin come, end and are ended; steps run or fail. Each finished one
    equals its solo run, no step is empty while work is pending, and at the end all is free."""

    @initialize(size=st.sampled_from([2, 4, 1, 3]), num_blocks=st.integers(4, 14), seed=st.integers(0, 10**6),
                share=st.sampled_from([1, 2, 1.5, .3, 0]), preemption=st.sampled_from(["swap", "auto", *PREEMPTION]),
                caching=st.booleans(), budget=st.sampled_from([16, 64, 8, 32, 5, 3, 1]),
                max_num_seqs=st.sampled_from([8, 16, 32, 4, 2]), watermark=st.sampled_from([0, 0, .01, .2]),
                max_waiting=st.sampled_from([None, None, None, 3, 1]), link=st.sampled_from([4, 1, 20]),
                policy=st.sampled_from([FCFS, *POLICIES.values(), None, UPSIDE_DOWN]))
    def begin(self, size, num_blocks, seed, share, preemption, caching, budget, max_num_seqs, watermark,
              max_waiting, link, policy):
        self.scheduler = make(
            num_blocks, size, Remembers, watermark, caching, int(share * num_blocks), link,
            max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_waiting=max_waiting,
            preemption=preemption, policy=policy or Policy("any", victim=AnyVictim()))
        self.runner, self.above, self.seed, self.work = Failing(self.scheduler), Branching(self.scheduler), seed, 0
        self.usual = Random(seed)
        self.shape = self.usual.choice([1, 2, 2, 3, 4]), self.usual.choice([6, 14, 10, 3])

    # ---- what comes --------------------------------------------------------------------------

    @rule(seed=st.integers(0, 10**6), n=st.integers(1, 4))
    def add(self, seed, n):
        for i in range(n):
            request_id = f"r{len(self.above.asks)}"
            pick = Random(f"{self.seed} {seed} {i} {request_id}")
            ask = self.ask(pick)
            if not self.above.add(request_id, ask): SEEN["refused"] += 1
            else: self.work += ask.width * (len(ask.prompt) + ask.max_tokens)

    def ask(self, pick):
        "Most are of one shape, with a prompt that others begin with too; most fit into the pool."
        blocks, told = self.scheduler.blocks, [ask for ask in self.above.asks.values() if ask.salt is None]
        start = prompt_of(pick.randrange(2), 16)
        if told and pick.random() < .3:             # a conversation that goes on
            before = pick.choice(told)
            start = [*before.prompt, *next((out for _, out in before.alone()), [])]
        prompt = (*start[:pick.choice([pick.randint(1, 5 * blocks.block_size), 2 * blocks.block_size, 1, 7])],
                  *[pick.randrange(9) for _ in range(pick.choice([0, 0, 1, 3]))])
        if pick.random() < .08: return Ask(prompt[:2 * blocks.block_size], 1, kind="pin")
        width, max_tokens = self.shape
        if pick.random() < .3: width, max_tokens = pick.choice([1, 2, 3, 4]), pick.randint(1, 14)
        ask = Ask(prompt, max_tokens, min(width, self.scheduler.max_places), pick.choice(["samples", "beam"]),
                  pick.choice([None, None, None, None, "a", "b"]),
                  tuple(pick.choice([99, 99, 99, 99, 1, 2, 5, 9]) for _ in range(4)), pick.choice([0, 2, 5, 8]))
        room = blocks.num_blocks - self.scheduler.num_pinned + (pick.random() < .05)
        while ask.most(blocks.block_size) > room and (ask.max_tokens, ask.width) != (1, 1):
            if ask.width > 1 and pick.random() < .3: ask = replace(ask, width=ask.width - 1)
            else: ask = replace(ask, max_tokens=max(1, ask.max_tokens - 1), prompt=ask.prompt[:max(1, len(ask.prompt) - 1)])
        return ask

    # ---- what goes ---------------------------------------------------------------------------

    def pick_live(self, seed, state):
        "A request in this state, or one that is no more, or never was; (its id, its state)."
        groups, asks = self.scheduler.groups, self.above.asks
        found = [i for i in asks if (groups[i].status.value if i in groups else "ended") == state]
        return (Random(seed).choice(found), state) if found else ("nobody", "unknown")

    @precondition(has_work)
    @rule(seed=st.integers(0, 10**6), one=st.booleans(), state=STATES)
    def abort(self, seed, one, state):
        "It is waited for a request in this state; the whole of it ends, or one of its samples."
        for _ in range(12):
            request_id, found = self.pick_live(seed, state)
            if found == state: break
            self.step()
        group, on_host = self.scheduler.groups.get(request_id), self.scheduler.host.num_used
        SEEN[f"abort: {found}" + " in part" * bool(one and group and len(group.seqs) > 1)] += 1
        self.above.end(self.scheduler, (request_id, one))
        if found == "swapped" and not one: assert self.scheduler.host.num_used < on_host, "free at once"
        if not one: assert not self.scheduler.abort(request_id), "once is enough"
        self.holds()

    @precondition(lambda self: self.scheduler.pins)
    @rule(seed=st.integers(0, 10**6))
    def unpin(self, seed):
        self.scheduler.unpin(Random(seed).choice(list(self.scheduler.pins)))
        SEEN["unpin"] += 1
        self.holds()

    # ---- steps -------------------------------------------------------------------------------

    @precondition(has_work)
    @rule(n=st.integers(1, 12))
    def steps(self, n):
        for _ in range(n): self.step()

    @precondition(has_work)
    @rule(seed=st.integers(0, 10**6), n=st.integers(1, 6), one=st.booleans(), state=STATES)
    def abort_while_plans_run(self, seed, n, one, state):
        "The first is waited for, as above."
        for _ in range(12):
            if self.pick_live(seed, state)[1] == state: break
            self.step()
        for i in range(n):
            request_id, found = self.pick_live(seed + i, state)
            SEEN[f"abort while a plan runs: {found}"] += 1
            self.step([(request_id, one)])

    @precondition(has_work)
    @rule(n=st.integers(1, 12), kind=st.sampled_from(["out", "in", "copy", "any"]))
    def fail(self, n, kind):
        "The first plan of this kind fails."
        self.runner.fails = kind
        for _ in range(n):
            if self.step() is None: break
        self.runner.fails = None

    def step(self, between=()):
        "None if nothing is left to do, or the plan failed."
        scheduler, runner = self.scheduler, self.runner
        if not scheduler.has_unfinished: return None
        runner.plan = None
        try: plan = step(scheduler, runner, between, self.above)
        except RuntimeError: return self.failed(runner.plan)
        self.count(plan)
        return plan

    def count(self, plan):
        SEEN["swapped out"] += bool(plan.swapped_out)
        SEEN["recomputed"] += bool(plan.preempted) and not plan.swapped_out
        SEEN["swapped in"] += bool(plan.swapped_in)
        SEEN["swapped out beside a copy"] += bool(plan.swapped_out and plan.copies)

    def failed(self, plan):
        "As an engine does it: all that have rows end; who gave way just now has nothing on the host."
        scheduler = self.scheduler
        scheduler.failed(plan)
        for i in plan.preempted:
            group = scheduler.sequences[i].group
            assert group.status is Status.PREEMPTED and group.seqs[0].num_computed == 0
        for request_id in dict.fromkeys(scheduler.sequences[row.seq_id].request_id for row in plan.rows):
            self.above.end(scheduler, (request_id, False))
        SEEN[f"failed: out {bool(plan.swapped_out)}, in {bool(plan.swapped_in)}"] += 1
        self.holds()

    def holds(self):
        self.scheduler.blocks.check()
        check_queues(self.scheduler)

    # ---- the end -----------------------------------------------------------------------------

    def teardown(self):
        if not hasattr(self, "scheduler"): return
        scheduler, above = self.scheduler, self.above
        left = bound = self.work * (1 if scheduler.policy is FCFS else 20)
        while scheduler.has_unfinished:
            self.step()
            left -= 1
            assert left >= 0, f"not done after {bound} steps"
        pinned = {b for pin in scheduler.pins for b in scheduler.blocks.table(pin).blocks}
        assert scheduler.blocks.num_used == len(pinned) == scheduler.num_pinned
        for pin in list(scheduler.pins): scheduler.unpin(pin)
        idle(scheduler, self.runner)
        for request_id, done in above.done.items():
            want = [end for end in above.asks[request_id].alone() if end[0] not in above.lost[request_id]]
            assert done == want[:len(done)] and (len(done) == len(want) or request_id in above.aborted), request_id
        SEEN["finished"] += sum(i not in above.aborted for i in above.done)
        SEEN["a gang finished after a swap"] += any(first.group.num_preemptions and above.asks[i].width > 1
            and i not in above.aborted for i, first in above.first.items()) and scheduler.num_swaps > 0


def test_under_pressure(max_examples=350, **more):
    SEEN.clear()
    run_state_machine_as_test(Pressure, settings=settings(
        max_examples=max_examples, stateful_step_count=30, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck), **more))
    for what in ["abort: swapped", "abort: preempted", "abort: running", "abort: waiting", "abort: ended",
                 "abort: unknown", "abort: running in part", "abort while a plan runs: swapped",
                 "abort while a plan runs: running", "failed: out True, in False", "failed: out False, in True",
                 "swapped out", "swapped in", "recomputed", "swapped out beside a copy", "refused", "unpin",
                 "a gang finished after a swap"]:
        assert SEEN[what] >= 5, f"too seldom to show anything: {what}"
