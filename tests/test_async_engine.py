"""`AsyncEngine` on a tiny random model: who goes away is forgotten, who stays gets what he would get alone, and nobody waits in vain.

`Paced` holds the engine's steps until the test lets them go, so that things happen in the step in which they should."""
import asyncio
import functools
import gc
import threading
import time
from random import Random

import pytest
import torch

from pagedlm import SamplingParams, async_engine
from pagedlm.async_engine import AsyncEngine, EngineClosing, EngineDead
from pagedlm.engine import Engine
from pagedlm.scheduler import QueueFull, Status
from test_engine_pressure import TEXT
from test_engine_sharing import VOCAB, beams, check, folder, greedy, ids, model, prompt, samples  # noqa: F401

KINDS = {"one": greedy(24), "four": samples(4, 24, logprobs=None), "beams": beams(3, max_tokens=24)}


def go(main, limit=60):
    "Run a coroutine function in a new loop, for a bounded time."
    async def bounded(): return await asyncio.wait_for(main(), limit)
    return asyncio.run(bounded())


async def until(condition, limit=60):
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(.001)


def make(model, **kw):
    return AsyncEngine(model, **{"tokenizer": TEXT, "num_blocks": 64, "block_size": 4, "preemption": "swap", **kw})


class Paced:
    "Lets the steps of an engine go one at a time."
    def __init__(self, engine):
        self.engine, self.gate, self.at_gate, self.made, self.step = engine, threading.Semaphore(0), False, 0, engine.engine.step
        engine.engine.step = self.held

    def held(self):
        self.at_gate = True
        assert self.gate.acquire(timeout=60), "the test forgot the engine"
        self.at_gate, out = False, self.step()
        self.made += 1
        return out

    def settled(self): return self.at_gate or not self.engine.engine.has_unfinished()

    async def one(self):
        "One step, if there is anything to do; after it the engine stands still."
        await until(self.settled)
        if not self.at_gate: return
        want = self.made + 1
        self.gate.release()
        await until(lambda: self.made == want and self.settled())

    async def to(self, condition):
        "Steps until a condition holds."
        for _ in range(300):
            await until(self.settled)
            if condition(): return
            assert self.engine.engine.has_unfinished(), "it never came"
            await self.one()
        raise AssertionError("it never came")

    async def till(self, condition):
        "Steps until something holds that the thread does between them."
        while not condition(): await asyncio.gather(self.one(), asyncio.sleep(.005))

    def free(self):
        "No more of this."
        self.engine.engine.step = self.step
        self.gate.release(10_000)


def audit(engine):
    "Nothing is left of any request, in the pools, the queues, the runner or among the streams."
    inner, s = engine.engine, engine.engine.stats()
    check(inner)
    assert (s.used_blocks, s.free_blocks, s.free_host_blocks) == (0, s.num_blocks, s.host_blocks)
    assert not (inner.requests or inner.ended or inner.held or inner.scheduler.groups or inner.scheduler.sequences or engine.streams)


async def idle(engine):
    await until(lambda: not engine.engine.has_unfinished() and not engine.streams)
    await engine.call(lambda inner: None)                # the thread has come back from the last step
    audit(engine)


async def read(outputs):
    "All outputs of an iterator, of which each has what those before it had."
    seen = [o async for o in outputs]
    for a, b in zip(seen, seen[1:]):
        assert all(y.token_ids[:len(x.token_ids)] == x.token_ids for x, y in zip(a.outputs, b.outputs))
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
    return seen


@pytest.fixture(scope="module")
def alone(model):
    "What a request answers alone, in a large pool, without caching."
    @functools.cache
    def answer(tokens, params):
        engine = Engine(model, tokenizer=TEXT, num_blocks=256, block_size=4, enable_prefix_caching=False)
        engine.add_request("it", list(tokens), params)
        while engine.has_unfinished(): out = engine.step()
        return ids(out[0])
    return lambda tokens, params: answer(tuple(tokens), params)


# --- who goes away

async def to_stage(stage, engine, pace, status, seq):
    "Let steps go until a request is where the test wants it."
    if stage == "waiting": await pace.to(lambda: status() is Status.WAITING)
    elif stage == "prefill": await pace.to(lambda: 0 < seq().num_computed < 47)
    elif stage == "decoding": await pace.to(lambda: status() is Status.RUNNING and seq().num_computed > 50)
    elif stage == "swapped": await pace.to(lambda: status() is Status.SWAPPED)
    else: await pace.to(lambda: "it" not in engine.streams)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["waiting", "prefill", "decoding", "swapped", "finished"])
def test_who_is_cancelled_is_forgotten_in_two_steps_and_others_do_not_notice(model, alone, stage, kind):
    params, other = KINDS[kind], (prompt(40, 3), greedy(70))
    sizes = {"waiting": dict(max_num_seqs=params.width), "swapped": dict(num_blocks={"one": 29, "four": 40, "beams": 33}[kind], num_host_blocks=60)}.get(stage, {})

    async def main():
        async with make(model, max_num_batched_tokens=16, **sizes) as engine:
            pace, inner, leave = Paced(engine), engine.engine, asyncio.Event()
            first = asyncio.create_task(read(engine.generate(*other)))
            await until(lambda: engine.streams)
            async def it():
                async for _ in engine.generate(prompt(47, 5), params, request_id="it"):
                    if stage == "finished": await leave.wait()               # the last output lies unread
            task = asyncio.create_task(it())
            await pace.till(lambda: "it" in engine.streams or stage == "finished" and task.done())
            def group(): return inner.requests["it"].seq.group
            await to_stage(stage, engine, pace, lambda: group().status, lambda: group().seqs[0])
            if stage != "finished": assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await pace.one()                       # it was planned before anybody knew
            await pace.one()
            assert "it" not in inner.requests and "it" not in engine.streams
            assert all(s.request_id != "it" for s in inner.scheduler.sequences.values())
            assert not inner.scheduler.host.tables
            check(inner)
            pace.free()
            assert ids((await first)[-1]) == alone(*other)
            await idle(engine)
    go(main)


def test_an_iterator_that_is_left_or_dropped_ends_its_request(model, alone):
    async def main():
        async with make(model) as engine:
            async for output in engine.generate(prompt(9), greedy(200)):
                if len(output.outputs[0].token_ids) >= 3: break                # and the iterator is garbage
            del output
            gc.collect()
            await idle(engine)
            assert engine.engine.stats().generation_tokens < 150
            started = engine.generate(prompt(9, 1), greedy(200))
            await anext(started)
            del started
            gc.collect()
            await idle(engine)
            unused = engine.generate(prompt(9), greedy(200))                   # never begun: never a request
            del unused
            closed = engine.generate(prompt(9), greedy(200))
            await anext(closed)
            await closed.aclose()
            await idle(engine)
            assert ids((await read(engine.generate(prompt(9), greedy(5))))[-1]) == alone(prompt(9), greedy(5))
    go(main)


def test_a_submit_that_is_cancelled_leaves_nothing(model):
    async def main():
        async with make(model) as engine:
            pace, inner = Paced(engine), engine.engine
            keep = await engine.submit([prompt(20)], greedy(8))
            await until(lambda: pace.at_gate)                                # the thread is in a step and reads no mail
            task = asyncio.create_task(engine.submit([prompt(9), prompt(10)], samples(4), request_ids=["a", "b"]))
            await until(lambda: not engine.inbox.empty())
            task.cancel()
            with pytest.raises(asyncio.CancelledError): await task
            await pace.one()
            await pace.one()
            assert len(inner.requests) == 1 and not {"a", "b"} & engine.streams.keys()
            pace.free()
            assert (await read(keep[0]))[-1].outputs[0].finish_reason == "length"
            await idle(engine)
    go(main)


def test_aborts_from_threads_race_with_the_end(model):
    "Whatever comes first, each stream has one last output, and the request ended as one of the two says."
    rng = Random(1)

    async def main():
        async with make(model) as engine:
            reasons = []
            for round in range(6):
                streams = await engine.submit([prompt(5 + i, i) for i in range(8)], greedy(6))
                threads = [threading.Timer(rng.random() * .02, s.abort) for s in streams]
                for t in threads: t.start()
                await asyncio.gather(*(read_all(s) for s in streams))
                for t in threads: t.join()
                await idle(engine)
                for s in streams:
                    assert s.newest.finished and s.ended is not None
                    reasons.append(s.newest.outputs[0].finish_reason)
            assert set(reasons) <= {"abort", "length"}

    async def read_all(stream):
        async for _ in stream: pass
        await until(lambda: stream.ended is not None)
    go(main)


def test_a_late_abort_does_not_hit_the_next_request_of_that_name(model, alone):
    async def main():
        async with make(model) as engine:
            pace = Paced(engine)
            old, = await engine.submit([prompt(9)], greedy(2), request_ids=["x"])
            with pytest.raises(ValueError, match="in use"): await refused(engine.submit([prompt(8)], greedy(2), request_ids=["x"]), pace)
            await pace.to(lambda: "x" not in engine.engine.requests)
            new, = await engine.submit([prompt(12)], greedy(6), request_ids=["x"])
            old.ended = None                           # as if its last output were still on its way
            old.abort()
            pace.free()
            assert ids((await read(new))[-1]) == alone(prompt(12), greedy(6))
            await idle(engine)

    async def refused(submit, pace):
        task = asyncio.create_task(submit)
        while not task.done(): await asyncio.gather(pace.one(), asyncio.sleep(.01))
        return await task
    go(main)


# --- who comes in

def test_submit_takes_all_or_none(model):
    good, salt = prompt(9), dict(params=greedy(4))
    bad = [[prompt(9), [], prompt(8)], [good, [VOCAB]], [good, prompt(250) * 2], [good, None], [good, 7], [good, "\ud800"]]

    async def main():
        async with make(model, max_waiting=3, max_num_seqs=2) as engine:
            for prompts in bad:
                with pytest.raises(ValueError): await engine.submit(prompts, **salt)
                await idle(engine)
            for kw in (dict(request_ids=["a", "a"]), dict(request_ids=["a"]), dict(request_ids=["a", 5]), dict(cache_salt=3)):
                with pytest.raises(ValueError): await engine.submit([good, good], greedy(4), **kw)
                await idle(engine)
            with pytest.raises(ValueError): await engine.submit([good, good], "hot")
            with pytest.raises(ValueError, match="list of prompts"): await engine.submit("text", greedy(4))
            assert await engine.submit([], greedy(4)) == []
            with pytest.raises(QueueFull): await engine.submit([good] * 4, greedy(4))
            await idle(engine)
            streams = await engine.submit([good] * 3, greedy(4))
            assert [len((await read(s))[-1].outputs[0].token_ids) for s in streams] == [4, 4, 4]
            await idle(engine)
            assert engine.engine.stats().generation_tokens == 12                # and of the refused none
    go(main)


def test_a_name_that_the_engine_makes_is_free(model):
    async def main():
        async with make(model) as engine:
            pace = Paced(engine)
            theirs = await engine.submit([prompt(5)], greedy(3), request_ids=["async-0"])
            pace.free()
            ours = await engine.submit([prompt(6), prompt(7)], greedy(3))
            assert "async-0" not in {s.request_id for s in ours} or theirs[0].ended
            for s in [*theirs, *ours]: await read(s)
    go(main)


class Slow:
    "A tokenizer that takes a second: asleep, or busy in Python."
    def __init__(self, spins): self.spins = spins
    def __call__(self, text):
        end = time.monotonic() + 1
        while time.monotonic() < end: time.sleep(0 if self.spins else 1)
        return TEXT(text[:9])
    def __len__(self): return VOCAB
    def decode(self, *a, **kw): return TEXT.decode(*a, **kw)


async def largest_gap(what):
    "The longest time for which the loop did not come round while `what` was awaited."
    gaps, last, task = [0.], time.monotonic(), asyncio.ensure_future(what)
    while not task.done():
        await asyncio.sleep(.002)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    await task
    return max(gaps)


@pytest.mark.parametrize("spins", [False, True])
def test_a_text_that_takes_a_second_stops_neither_the_loop_nor_the_others(model, spins):
    async def main():
        async with make(model, tokenizer=Slow(spins)) as engine:
            async def in_the_loop(): return engine.engine.prompts.encode(chr(0x4e05) * 9)
            assert await largest_gap(in_the_loop()) >= 1
            steps = engine.engine.books.steps
            task = asyncio.create_task(read(engine.generate(prompt(9), greedy(30))))
            assert await largest_gap(engine.submit([chr(0x4e05) * 9], greedy(2))) < .5
            assert engine.engine.books.steps > steps + 3
            await task
            await idle(engine)
    go(main)


# --- how the engine dies

@pytest.fixture
def quick(monkeypatch): monkeypatch.setattr(async_engine, "POLL_S", .02)


class Boom(BaseException): pass


def test_a_step_that_raises_is_told_to_all(model, quick, caplog):
    async def main():
        engine = make(model, num_blocks=512)
        readers = [asyncio.create_task(read(engine.generate(prompt(9 + i), params)))
                   for i, params in enumerate((greedy(240), samples(4, 240, logprobs=None), beams(3, max_tokens=240)))]
        watching = asyncio.create_task(read(engine.watch()))
        await until(lambda: len(engine.streams) == 3 and engine.watchers)
        pace = Paced(engine)
        await until(lambda: pace.at_gate)
        calling = asyncio.create_task(engine.call(lambda inner: 1))
        await asyncio.sleep(0)
        def fails(): raise Boom("no more")
        pace.step = fails
        pace.gate.release()
        for task in [*readers, watching]:
            with pytest.raises(EngineDead, match="Boom: no more"): await task
        with pytest.raises(EngineDead): await calling
        with pytest.raises(EngineDead): await engine.submit([prompt(5)], greedy(2))
        with pytest.raises(EngineDead): await anext(engine.generate(prompt(5), greedy(2)))
        with pytest.raises(EngineDead): await anext(engine.watch())
        assert "Boom" in engine.problem()
        await engine.drain()                              # returns: there is nothing to wait for
        engine.close()
        engine.close()
        assert not engine.thread.is_alive() and engine.engine.runner is None        # the memory is given back all the same
    go(main)
    assert "the engine has stopped" in caplog.text


def test_a_step_that_hangs_is_told_to_all_and_may_come_back(model, alone, quick):
    async def main():
        async with make(model, step_timeout=.3) as engine:
            pace = Paced(engine)
            task = asyncio.create_task(read(engine.generate(prompt(9), greedy(9))))
            late = asyncio.create_task(engine.watch().__anext__())
            await until(lambda: pace.at_gate)
            submitting = asyncio.create_task(engine.submit([prompt(10)] * 3, greedy(9)))
            for waiting in (task, submitting):
                with pytest.raises(EngineDead, match="not come back"): await waiting
            await asyncio.gather(late, return_exceptions=True)
            assert "not come back" in engine.problem()
            with pytest.raises(EngineDead): await engine.submit([prompt(5)], greedy(2))
            began = time.monotonic()
            engine.close, close = (lambda: None), engine.close
            assert not engine.closing and time.monotonic() - began < 1
            engine.step_timeout = 60                       # the machine was only slow
            pace.free()
            await idle(engine)                            # those who were told are not served behind their backs
            assert engine.engine.stats().generation_tokens <= 1
            assert engine.problem() is None
            assert ids((await read(engine.generate(prompt(9), greedy(9))))[-1]) == alone(prompt(9), greedy(9))
            engine.close = close
        assert not engine.thread.is_alive()
    go(main)


def test_a_drain_ends_although_the_step_does_not(model):
    async def main():
        async with make(model) as engine:
            pace = Paced(engine)
            stream, = await engine.submit([prompt(9)], greedy(9))
            await until(lambda: pace.at_gate)
            began = time.monotonic()
            await engine.drain(.05, grace=.1)
            assert time.monotonic() - began < 10 and engine.streams
            pace.free()
            assert (await read(stream))[-1].outputs[0].finish_reason == "abort"
    go(main)


def test_what_a_call_raises_is_its_callers(model):
    async def main():
        async with make(model) as engine:
            for error in (KeyError("k"), StopIteration(), Boom()):
                def raises(inner): raise error
                with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)):
                    try: await asyncio.wait_for(asyncio.shield(told(engine.call(raises))), 20)
                    except Wrapped as e: raise e.error from None
            assert await engine.call(lambda inner: inner.blocks.num_blocks) == 64
            assert await engine.call(lambda inner: (_ for _ in ()).throw) is not None

    class Wrapped(Exception):
        def __init__(self, error): self.error = error

    async def told(call):
        "A task that ends with SystemExit ends the loop; this one does not."
        try: return await call
        except BaseException as e: raise Wrapped(e)
    go(main)


# --- loops

def test_several_loops_use_one_engine_at_once_and_one_after_the_other(model, alone):
    engine, wrong = make(model), []

    def one(k):
        async def main():
            wants = [(prompt(9 + i, k), params) for i, params in enumerate(KINDS.values())]
            outs = await asyncio.gather(*(read(engine.generate(*w)) for w in wants))
            if [ids(o[-1]) for o in outs] != [alone(*w) for w in wants]: wrong.append(k)
        go(main)
    for k in range(3): 
        for i, params in enumerate(KINDS.values()): alone(prompt(9 + i, k), params)
    threads = [threading.Thread(target=one, args=(k,)) for k in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    one(0), one(1)
    assert not wrong
    go(lambda: idle(engine))
    engine.close()


def test_a_request_whose_loop_is_closed_is_dropped(model):
    with_loop, engine = asyncio.new_event_loop(), make(model)
    pace = Paced(engine)
    async def leaves():
        await engine.submit([prompt(9)] * 2, greedy(200))
        watcher = async_engine.Watcher()                       # a reader of events who never says good-bye
        engine.watchers.append(watcher)
    with_loop.run_until_complete(leaves())
    with_loop.close()
    async def main():
        for _ in range(3): await pace.one()
        assert not engine.engine.requests and not engine.watchers
        pace.free()
        await idle(engine)
    go(main)
    engine.close()


def test_a_stream_belongs_to_its_loop(model):
    with make_closing(model) as engine:
        async def submit(): return await engine.submit([prompt(9)], greedy(3))
        stream, = go(submit)
        with pytest.raises(RuntimeError, match="loop"): go(stream.__anext__)


class make_closing:
    def __init__(self, model): self.engine = make(model)
    def __enter__(self): return self.engine
    def __exit__(self, *exc): self.engine.close()


# --- readers

def test_a_slow_reader_gets_the_newest_and_nothing_piles_up(model, alone):
    async def main():
        async with make(model) as engine:
            pace = Paced(engine)
            stream, = await engine.submit([prompt(9)], greedy(30))
            for _ in range(11): await pace.one()
            await asyncio.sleep(.01)
            first = await anext(stream)
            assert len(first.outputs[0].token_ids) == 11                       # ten others were never seen
            assert not [v for v in vars(stream).values() if isinstance(v, list | dict | asyncio.Queue)]
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(.01)
            assert not waiting.done()                                          # the same one is not given twice
            pace.free()
            await waiting
            await until(lambda: stream.ended)
            rest = [o async for o in stream]
            assert ids(rest[-1]) == alone(prompt(9), greedy(30)) and len(rest) == 1
            assert [o async for o in stream] == []                             # and is at its end for good
            assert stream.arrived <= stream.first_token < stream.ended
    go(main)


def test_the_last_output_is_read_after_the_engine_is_gone(model, alone, quick):
    async def main():
        engine = make(model)
        task = asyncio.create_task(read(engine.generate(prompt(9), greedy(5))))
        await until(lambda: engine.streams)
        end = time.monotonic() + 60
        while engine.streams and time.monotonic() < end: time.sleep(.01)        # the loop is blocked, and the request ends,
        engine.close()                                                         # and the engine does
        assert ids((await task)[-1]) == alone(prompt(9), greedy(5))
    go(main)


def test_two_hundred_at_once(model, alone):
    wants = [(prompt(3 + k % 9, k % 7), [greedy(4 + k % 5), samples(2, 6, logprobs=None)][k % 10 == 0]) for k in range(200)]

    async def main():
        async with make(model, num_blocks=128) as engine:
            outs = await asyncio.gather(*(read(engine.generate(*w)) for w in wants))
            await idle(engine)
        return [ids(o[-1]) for o in outs]
    assert go(main) == [alone(*w) for w in wants]


@pytest.mark.parametrize("seed", range(2))
def test_any_adds_and_cancels_leave_a_free_pool(model, alone, seed):
    rng, params = Random(seed), list(KINDS.values())

    async def one(engine, tally):
        want = (prompt(rng.randrange(1, 40), rng.randrange(4)), rng.choice(params))
        await asyncio.sleep(rng.random() * .1)
        task, leaves = asyncio.create_task(read(engine.generate(*want))), rng.random() < .5
        if leaves:
            await asyncio.sleep(rng.random() * .1)
            task.cancel()
        try: tally.append(ids((await task)[-1]) == alone(*want))
        except asyncio.CancelledError: assert leaves
        except QueueFull: pass

    async def main():
        async with make(model, num_blocks=36, num_host_blocks=rng.choice([8, 60]), max_num_batched_tokens=24, max_waiting=20) as engine:
            tally = []
            await asyncio.gather(*(one(engine, tally) for _ in range(16)))
            await idle(engine)
        return tally
    tally = go(main)
    assert tally and all(tally)


# --- those who watch

class Mirror:
    "The tables, as the events tell of them."
    def __init__(self): self.tables, self.kinds = {}, []

    def take(self, event):
        self.kinds.append(event["event"])
        if event["event"] == "snapshot": self.tables = {i: (n, blocks) for i, (_, n, blocks) in event["tables"].items()}
        else:
            for i, _, n, first, blocks in event["rows"]: self.tables[i] = (n, self.tables.get(i, (0, []))[1][:first] + blocks)
            self.tables = {i: t for i, t in self.tables.items() if i in event["live"]}


def tables(engine): return {i: (t.num_tokens, list(t.blocks)) for i, t in engine.engine.blocks.tables.items()}


def test_who_watches_knows_the_tables_after_each_step(model):
    "One from the beginning, one who comes in the middle; with samples, beams, swaps, a pin and an abort."
    async def main():
        async with make(model, num_blocks=32, num_host_blocks=60) as engine:
            pace, mirrors, loops = Paced(engine), [], []
            async def watch(mirror):
                async for event in engine.watch(): mirror.take(event)
            def enter():
                mirrors.append(Mirror())
                loops.append(asyncio.create_task(watch(mirrors[-1])))
            async def heard():
                counts = [len(m.kinds) for m in mirrors]
                await pace.one()
                await until(lambda: all(len(m.kinds) > n for m, n in zip(mirrors, counts)))
                for m in mirrors: assert m.tables == tables(engine)
            enter()
            await until(lambda: mirrors[0].kinds == ["snapshot"])
            streams = []
            for k, params in enumerate(KINDS.values()):
                task = asyncio.create_task(engine.submit([prompt(20 + k, k)], params))
                while streams and not task.done(): await asyncio.gather(heard(), asyncio.sleep(.01))
                streams += await task
            for _ in range(8): await heard()
            enter()
            await pace.till(lambda: mirrors[1].kinds)
            await heard()
            streams[1].abort()
            await pace.one()                       # it ends after this step's event, and before the next one's
            while engine.engine.has_unfinished(): await heard()
            assert engine.engine.stats().preemptions_swap and engine.engine.stats().cow_copies
            pace.free()
            pin = await engine.call(lambda inner: inner.pin_prefix(prompt(90)))   # several steps that nobody saw
            await read(engine.generate(prompt(9), greedy(2)))
            await until(lambda: all(m.tables == tables(engine) and pin.pin_id in m.tables for m in mirrors))
            await engine.drain()
            await asyncio.gather(*loops)                                          # and the watching is over
            assert all(m.kinds[0] == "snapshot" for m in mirrors) and not engine.watchers
            assert [e["event"] async for e in engine.watch()] == ["snapshot"]     # for those who come later at once
    go(main)


def test_a_slow_watcher_begins_again_with_a_snapshot(model):
    async def main():
        async with make(model, num_blocks=256) as engine:
            mirror, watching = Mirror(), engine.watch()
            mirror.take(await anext(watching))
            for _ in range(3): await read(engine.generate(prompt(9), greedy(120)))          # and nobody reads the events
            watcher, = engine.watchers
            assert watcher.stale and watcher.events.qsize() <= 257
            task = asyncio.create_task(read(engine.generate(prompt(30), samples(4, 60))))
            while not (task.done() and engine.problem() is None and mirror.tables == {} and mirror.kinds.count("snapshot") == 2):
                mirror.take(await asyncio.wait_for(anext(watching), 30))
            await watching.aclose()
            await until(lambda: not engine.watchers)
    go(main)


def test_what_nobody_watches_costs_nothing(model, monkeypatch):
    async def main():
        async with make(model) as engine:
            watching = engine.watch()
            await anext(watching)
            await watching.aclose()
            await until(lambda: not engine.watchers)
            def never(*a): raise AssertionError("nobody watches")
            for name in ("snapshot", "step_event", "common", "tables_of"): monkeypatch.setattr(async_engine, name, never)
            assert len((await read(engine.generate(prompt(9), greedy(9))))[-1].outputs[0].token_ids) == 9
            assert engine.problem() is None
    go(main)


# --- how it is closed

def test_drain_lets_those_finish_who_are_in_and_nobody_else_come(model, alone):
    async def main():
        engine = make(model, max_num_seqs=2)
        pace = Paced(engine)
        streams = await engine.submit([prompt(9 + k) for k in range(5)], greedy(6))
        await pace.one()
        assert engine.engine.stats().waiting == 3
        draining = asyncio.create_task(engine.drain(60))
        await until(lambda: engine.closing)
        with pytest.raises(EngineClosing): await engine.submit([prompt(5)], greedy(2))
        pace.free()
        await draining
        for k, s in enumerate(streams): assert ids((await read(s))[-1]) == alone(prompt(9 + k), greedy(6))
        await idle(engine)
        await asyncio.gather(engine.drain(), engine.drain())
        await engine.__aexit__()
        await engine.__aexit__()
        with pytest.raises(EngineClosing): await engine.submit([prompt(5)], greedy(2))
        with pytest.raises(EngineDead): await engine.call(lambda inner: 1)
        assert not engine.thread.is_alive() and engine.engine.runner is None
    go(main)


def test_drain_aborts_those_who_take_too_long(model):
    async def main():
        async with make(model, max_num_seqs=2) as engine:
            pace = Paced(engine)
            streams = await engine.submit([prompt(9 + k) for k in range(4)], greedy(200))
            for _ in range(3): await pace.one()
            draining = asyncio.create_task(engine.drain(0))
            while not draining.done(): await asyncio.gather(pace.one(), asyncio.sleep(.01))
            pace.free()
            for n, s in zip((3, 3, 0, 0), streams):
                out = (await read(s))[-1].outputs[0]
                assert out.finish_reason == "abort" and n <= len(out.token_ids) <= n + 2 * (n > 0) and s.ended
            await idle(engine)
    go(main)


def test_close_in_the_middle_tells_those_who_wait(model, quick):
    async def main():
        async with make(model, max_num_seqs=4) as engine:
            tasks = [asyncio.create_task(read(engine.generate(prompt(9 + k), params))) for k, params in enumerate([greedy(200)] * 3 + list(KINDS.values()))]
            await until(lambda: len(engine.streams) == 6)
            watching = asyncio.create_task(read_events(engine))
            await until(lambda: engine.watchers)
            queued = asyncio.create_task(asyncio.sleep(0))
        for out in await asyncio.gather(*tasks):
            assert out[-1].finished and {c.finish_reason for c in out[-1].outputs} <= {"abort", "length"}
        assert (await watching)[0] == "snapshot"
        await queued
        assert not engine.thread.is_alive()

    async def read_events(engine): return [e["event"] async for e in engine.watch()]
    go(main)


def test_no_thread_is_left(model):
    before = set(threading.enumerate())
    engines = [make(model) for _ in range(3)]
    for e in engines: e.close()
    assert not {t for t in set(threading.enumerate()) - before if t.name == "pagedlm-engine"}
    for kw in (dict(step_timeout=0), dict(step_timeout=-1), dict(num_blocks=0), dict(preemption="never")):
        with pytest.raises(ValueError): make(model, **kw)
    assert not {t for t in set(threading.enumerate()) - before if t.name == "pagedlm-engine"}
