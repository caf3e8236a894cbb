"The page in a real browser, before a real server; and the events that it draws, replayed against the pool itself."
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter

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


# --- the page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browsing = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

class Server:
    "`pagedlm serve` in a process of its own, on a port that is free the first time and the same one after that."
    def __init__(self, folder): self.folder, self.port, self.key, self.process = folder, 0, "", None

    def start(self, key=""):
        self.key = key
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagedlm", "serve", self.folder, "--device", "cpu", "--port", str(self.port), "--num-blocks", "64",
             "--preemption", "swap"], stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | ({"PAGEDLM_API_KEY": key} if key else {}))
        said = ""
        while not (found := re.search(r"at http://127\.0\.0\.1:(\d+)", said)):
            line = self.process.stderr.readline()
            assert line, f"it ended: {said}"
            said += line
        self.port = int(found[1])
        threading.Thread(target=self.process.stderr.read, daemon=True).start()     # what it says further may not fill the pipe

    def kill(self):
        self.process.kill()
        self.process.wait()

    @property
    def url(self): return f"http://127.0.0.1:{self.port}/"


@pytest.fixture(scope="module")
def one_server(folder):
    server = Server(folder)
    yield server
    if server.process: server.kill()

@pytest.fixture
def server(one_server):
    "The one server of this module, running and without a key."
    if one_server.process is None or one_server.process.poll() is not None or one_server.key:
        if one_server.process: one_server.kill()
        one_server.start()
    return one_server

@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()

@pytest.fixture
def visit(browser):
    "Opens the page of a server; `page.faults` are console errors, exceptions, and requests to anywhere else."
    contexts = []
    def visit(server, live=True, width=1400, height=900, **options):
        contexts.append(context := browser.new_context(viewport={"width": width, "height": height}, **options))
        page = context.new_page()
        page.faults = []
        page.on("console", lambda m: page.faults.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: page.faults.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith((server.url, "data:")) else page.faults.append(r.url))
        page.goto(server.url)
        if live: until(page, "$('state').textContent === 'live' && pool.stats")
        return page
    yield visit
    for context in contexts: context.close()

def until(page, condition, seconds=60.0):
    "Until this JavaScript is true; its value. (Playwright's own wait would need eval, which the page forbids.)"
    end = time.monotonic() + seconds
    while not (value := page.evaluate(condition)):
        assert time.monotonic() < end, f"not in time: {condition}\n{page.inner_text('body')}"
        time.sleep(.02)
    return value

def colours(page, grid="device"):
    "How many cells of a pool have which colour at their lower left, off their edge."
    return Counter(page.evaluate(f"""Array.from({{length: {grid}.n}}, (_, b) => {{
        const [x, y] = {grid}.corner(b), s = {grid}.size - {grid}.gap;
        return [...{grid}.ctx.getImageData(x + 3, y + s - 4, 1, 1).data.slice(0, 3)].map(v => v.toString(16).padStart(2, "0")).join("");
    }})"""))

WATCH = """window.seen = {moves: 0, swapped: 0, running: 0};
    const moving = drawMove, listing = showRequests;
    drawMove = (...args) => { seen.moves += 1; moving(...args); };
    showRequests = () => { listing(); for (const q of ["swapped", "running"]) seen[q] = Math.max(seen[q], $(q).children.length); }; 0"""


@browsing
def test_a_conversation_streams_while_its_blocks_change_colour(server, visit):
    page = visit(server)
    bodies = []
    page.on("request", lambda r: bodies.append(json.loads(r.post_data)) if r.post_data else None)
    assert set(colours(page)) == {"edf0f4"}                              # an empty pool in light colours
    page.fill("#question", STORY * 3 + "<img src=nowhere onerror=alert(1)>")
    page.fill("#n", "3")
    page.fill("#max-tokens", "250")
    page.focus("#question")
    page.keyboard.press("Enter")
    until(page, "[...device.held.values()].some(cell => cell.refs === 3) && talk.length === 0")
    shared = page.evaluate("[...device.held].find(([, cell]) => cell.refs === 3)[0]")
    until(page, f"device.drawn[{shared}].startsWith('3 ')")
    assert colours(page)["77aadd"] > 3                                   # the first request's colour
    chars = until(page, "document.querySelector('.answer p').textContent.length")
    until(page, f"document.querySelector('.answer p').textContent.length > {chars}")
    assert page.evaluate("document.querySelectorAll('.answer').length") == 3
    x, y = page.evaluate(f"device.corner({shared})")
    page.locator("#device").hover(position={"x": x + 5, "y": y + 5})
    until(page, f"$('table').innerText.startsWith('Block {shared}: 16 of 16 slots filled, in 3 tables of #1')")
    assert page.locator("#table li.here").count() == 3                   # in each of the three tables
    page.locator("#running .chip").focus()
    until(page, "look?.request && looked().length > 6 && $('table').children.length >= 3")
    page.keyboard.press("Escape")                                        # stops the answer; what there is of it stays
    until(page, "!answering && pool.stats.used_blocks === 0 && pool.stats.cow_copies === 2")
    until(page, "[...$('log').children].some(e => /copy on write: \\d+ → \\d+/.test(e.textContent))")
    assert "Stopped." in page.inner_text(".turn") and page.locator("#turns img").count() == 0
    page.get_by_label("sample 2").check()
    page.fill("#n", "1")
    page.fill("#max-tokens", "8")
    page.fill("#question", "And why?")
    page.click("#send")
    until(page, "!answering && talk.length === 2")
    first, second = bodies
    assert (first["n"], first["max_tokens"], first["temperature"], first["stream"]) == (3, 250, .7, True)
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"] and second["n"] == 1
    assert second["messages"][1]["content"] == page.evaluate("talk[0].answers[1]") != page.evaluate("talk[0].answers[0]")
    assert re.search(r"8 tokens.*; [1-9]\d* of \d+ prompt tokens were cached", page.inner_text(".turn:last-child"))
    until(page, "pool.cached.size && $('first').textContent.endsWith(' s')")
    page.fill("#max-tokens", "5000")                                     # the server refuses: said in its words, nothing is lost
    page.fill("#question", "Too long?")
    page.click("#send")
    until(page, "!answering && document.querySelector('.turn:last-child .bad')")
    assert "5000" in page.inner_text(".turn:last-child .bad") and page.input_value("#question") == "Too long?"
    assert page.evaluate("talk.length") == 2 and [f for f in page.faults if "400" not in f] == []
    page.click("#new")
    assert page.locator(".turn").count() == 0 and page.evaluate("talk.length") == 0 and page.is_visible("#ideas")


@browsing
def test_one_click_shows_preemption_and_another_stops_it(server, visit):
    page = visit(server)
    page.evaluate(WATCH)
    before = page.evaluate("pool.stats.preemptions_swap")
    assert page.is_hidden("#load-hint") and page.inner_text("#load-button") == "Send 8 requests"
    page.click("#load-button")
    until(page, f"pool.stats.preemptions_swap > {before} && seen.moves && seen.swapped && seen.running > 4")
    until(page, "[...$('log').children].some(e => /#\\d+ swapped out: \\d+ blocks to the host/.test(e.textContent))")
    until(page, "!loading")
    assert re.fullmatch(r"[\d,]+ tokens in [\d.]+ s", page.inner_text("#load-state")) and page.inner_text("#load-error") == ""
    until(page, "[...$('log').children].some(e => e.textContent.endsWith('swapped in again')) && pool.host.size === 0")
    assert int(page.inner_text("#preemptions")) == page.evaluate("pool.stats.preemptions_swap + pool.stats.preemptions_recompute")
    page.select_option("#load-size", "4")
    page.click("#load-button")
    until(page, "pool.queues.running.length === 4 && $('running').children.length === 4 && pool.stats.used_blocks > 8")
    assert page.inner_text("#load-button") == "Stop the load"
    page.click("#load-button")
    until(page, "!loading && pool.stats.used_blocks === 0 && pool.queues.running.length === 0 && $('running').children.length === 0")
    assert page.inner_text("#load-state") == "stopped" and page.faults == []


@browsing
def test_dark_on_a_phone_by_keyboard_without_motion_and_a_large_pool(server, visit):
    page = visit(server, width=360, height=740, color_scheme="dark", reduced_motion="reduce")
    until(page, "device.n === 64")
    assert page.evaluate("[document.documentElement.scrollWidth, calm.matches]") == [360, True]
    assert colours(page)["252d39"] > 20 and "edf0f4" not in colours(page)       # empty cells in dark colours
    page.focus("#load-button")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "device"
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft"): page.keyboard.press(key)
    at = page.evaluate("device.columns") - 1
    until(page, f"look?.block === {at} && $('say').textContent.startsWith('Block {at}: free') && $('table').innerText.startsWith('Block {at}: free')")
    page.keyboard.press("End")
    until(page, "look.block === 63")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "host"
    page.keyboard.press("Home")
    until(page, "$('say').textContent === 'Host block 0: free'")
    page.evaluate("""window.paints = 0; const painting = paint; paint = now => { paints += 1; painting(now); };
        const tables = Object.fromEntries(Array.from({length: 50}, (_, i) => [i, [`r${i}`, 1590, Array.from({length: 100}, (_, k) => i * 100 + k)]]));
        const common = {stats: {...pool.stats, num_blocks: 6000}, host: {}};
        take({event: "snapshot", block_size: 16, num_blocks: 6000, num_host_blocks: 0, cached: [5500], tables,
              queues: {...pool.queues, running: Object.values(tables).map(t => t[0])}, ...common});
        for (let i = 0; i < 100; i++) take({event: "step", rows: [[0, "r0", 1590 + i % 10, 100, []]], live: Object.keys(tables).map(Number), copies: [],
              preempted: [], swapped_out: [], swapped_in: [], cached: [], forgotten: [], queues: pool.queues, ...common}); 0""")
    until(page, "device.n === 6000 && device.drawn.length === 6000")
    assert page.evaluate("paints") <= 3 and page.is_hidden("#host-figure")             # a hundred steps, a frame or two
    assert page.evaluate("[document.documentElement.scrollWidth, device.size >= 3, device.drawn[5500].endsWith('true')]") == [360, True, True]
    assert page.is_visible("#load-hint") and "pagedlm serve --num-blocks 48" in page.inner_text("#load-hint")
    seen = colours(page)
    assert sum(seen[c] for c in ("77aadd", "ee8866", "eedd88", "ffaabb", "44bb99", "bbcc33", "99ddff", "aaaa00")) > 4900
    assert page.faults == []


@browsing
def test_a_dead_server_is_shown_and_found_again_and_then_it_wants_a_key(server, visit):
    page = visit(server)
    assert page.is_hidden("#key") and page.faults == []
    page.fill("#max-tokens", "900")
    page.fill("#question", "Where does an owl live?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.answer p')?.textContent")
    server.kill()
    until(page, "$('state').className.includes('broken') && /next try in/.test($('state').textContent)")
    until(page, "!answering && /broke|cannot be reached/.test(document.querySelector('.turn .bad').textContent)")
    page.fill("#question", "Are you there?")
    page.click("#send")
    until(page, "document.querySelector('.turn:last-child .bad')?.textContent === 'The server cannot be reached.'")
    page.faults.clear()                                                  # Chromium itself reports what it cannot load
    server.start("sesame")
    until(page, "!$('key').hidden && $('state').textContent === 'waits for the API key'")
    for key, words in (("guess", "The server does not take this key."), ("sesame", "")):
        page.fill("#key-value", key)
        page.locator("#key-value").press("Enter")
        until(page, f"$('key-error').textContent === '{words}' && ('{words}' || $('key').hidden)")
    until(page, "$('state').textContent === 'live' && pool.numBlocks === 64 && pool.stats.used_blocks === 0")
    page.fill("#max-tokens", "5")
    page.click("#new")                                                   # the question that came back stays, and goes now
    page.click("#send")
    until(page, "!answering && talk.at(-1).question === 'Are you there?'")
    assert [f for f in page.faults if "401" not in f and "ERR_CONNECTION" not in f] == []
