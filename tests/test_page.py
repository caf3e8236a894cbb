"The page in a real browser, before a real server; and the events that it draws, replayed against the pool itself."
import asyncio
import json

import pytest

from pagedlm import async_engine
from pagedlm.async_engine import AsyncEngine
from pagedlm.models import load_model, load_tokenizer
from pagedlm.sampling import SamplingParams
from test_cli import save

STORY = "An owl is a wise bird. Where does it live? "


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return save(tmp_path_factory.mktemp("model"))


# --- the events, without a browser

@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_snapshot_and_the_steps_after_it_are_the_pool(folder, preemption, monkeypatch):
    def with_truth(engine, plan, step_event=async_engine.step_event):
        blocks, host = engine.blocks, engine.scheduler.host
        truth = {"tables": {i: (t.num_tokens, list(t.blocks)) for i, t in blocks.tables.items()},
                 "host": {i: (t.num_tokens, list(t.blocks)) for i, t in host.tables.items()}, "cached": set(blocks.cache.of_block)}
        return step_event(engine, plan) | {"truth": truth}
    monkeypatch.setattr(async_engine, "step_event", with_truth)

    async def watch(engine, seen):
        async for event in engine.watch():
            event = json.loads(json.dumps(event, default=list))
            if event["event"] == "snapshot":
                tables = {int(i): (n, blocks) for i, (_, n, blocks) in event["tables"].items()}
                cached = set(event["cached"])
            for i, _, n, first, blocks in event.get("rows", []): tables[i] = (n, tables.get(i, (0, []))[1][:first] + blocks)
            if event["event"] == "step":
                tables = {i: t for i, t in tables.items() if i in event["live"]}
                cached = cached - set(event["forgotten"]) | set(event["cached"])
                truth = event["truth"]
                assert tables == {int(i): (n, b) for i, (n, b) in truth["tables"].items()} and cached == set(truth["cached"])
                assert {i: [n, b] for i, (_, n, b) in event["host"].items()} == truth["host"]
            seen.append(event)

    async def main():
        engine, seen = AsyncEngine(load_model(folder), tokenizer=load_tokenizer(folder), block_size=4, num_blocks=64,
                                   max_num_batched_tokens=40, preemption=preemption), []
        async with engine:
            watching = asyncio.ensure_future(watch(engine, seen))
            while not seen: await asyncio.sleep(.01)
            streams = [await engine.submit([STORY, STORY * 2], SamplingParams(max_tokens=40, **more))
                       for more in (dict(n=3), dict(n=2, use_beam_search=True), dict(temperature=0))]
            await asyncio.sleep(.2)
            streams[0][0].abort()
            for stream in (s for pair in streams for s in pair):
                if stream is not streams[0][0]: [_ async for _ in stream]
            await engine.drain()
            await watching
        return seen
    seen = asyncio.run(main())
    stats = seen[-1]["stats"]
    assert stats["preemptions_swap" if preemption == "swap" else "preemptions_recompute"] and stats["cow_copies"]
    assert sum(len(e.get("copies", [])) for e in seen) == stats["cow_copies"] and any(e.get("forgotten") for e in seen)
    assert seen[-1]["live"] == [] and seen[-1]["host"] == {} and stats["used_blocks"] == 0
