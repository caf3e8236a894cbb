"""Replayed tables are the scheduler's own, cells say what happened, and no text is clipped."""
import json
import random
import struct
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from pagedlm import drawing as d
from pagedlm.scheduler import Plan, Row, Scheduler, Sequence
from pagedlm.sharing import BlockManager

VECTORS = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text())
Frame = d.Frame


class LoggedBlocks(BlockManager):
    "Notes which blocks leave the free queue."
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.came = set()

    def fresh(self):
        self.came.add(block := super().fresh())
        return block


def next_tokens(group, rng, beams):
    "For each sequence of a group its next tokens: a fork at first, then beams or one each."
    seqs = group.seqs
    if len(seqs) == 1 and not seqs[0].output: return [[rng.randrange(50) for _ in range(seqs[0].width)]]
    if not beams: return [[rng.randrange(50)] for _ in seqs]
    parents = [rng.randrange(len(seqs)) for _ in seqs]
    return [[rng.randrange(50) for p in parents if p == i] for i in range(len(seqs))]


def run(seed, aborts=False, caching=False, beams=False):
    "A random run: (plans, owners, waiting, log of the truth after each `schedule`, blocks)."
    rng = random.Random(seed)
    blocks = LoggedBlocks(rng.randint(6, 16), rng.randint(1, 5), enable_prefix_caching=caching)
    budget = rng.choice([4, 7, 12, 64])
    scheduler = Scheduler(blocks, max_num_batched_tokens=budget, max_num_seqs=rng.randint(4, 8), watermark=0)
    arrivals = sorted(rng.randint(0, 25) for _ in range(rng.randint(3, 8)))
    plans, owners, waiting, log, known = [], {}, [], [], set()
    while (arrivals or scheduler.has_unfinished) and len(plans) < 400:
        while arrivals and arrivals[0] <= len(plans):
            seq_id, at = scheduler.new_id(), arrivals.pop(0)
            prompt = [rng.randrange(2)] * rng.randint(1, 3 * blocks.block_size)
            seq = Sequence(seq_id, f"r{seq_id}", prompt, rng.randint(1, 14), width=rng.choice([1, 1, 2, 3]))
            try: scheduler.add(seq)
            except ValueError: continue
            owners[seq_id] = seq.request_id
        blocks.came = set()
        plans.append(plan := scheduler.schedule())
        known = known - set(plan.released) | {row.seq_id for row in plan.rows}     # what a worker can know
        owners |= {i: seq.request_id for i, seq in scheduler.sequences.items()}
        waiting.append([group.request_id for group in scheduler.waiting])
        log.append(dict(tables={i: t.entries() for i, t in blocks.tables.items()}, known=known,
                        came=blocks.came, refs=list(blocks.allocator.refs), used=blocks.num_used,
                        filled=blocks.num_filled_slots, out={g.request_id for g in scheduler.preempted},
                        copies=list(plan.copies)))
        if aborts and scheduler.groups and rng.random() < .08:
            scheduler.abort(rng.choice(list(scheduler.groups)))
        sampling = {row.seq_id for row in plan.rows if row.samples}
        sampled = {}
        for group in scheduler.running:
            if all(seq.seq_id in sampling for seq in group.seqs):
                sampled |= {s.seq_id: t for s, t in zip(group.seqs, next_tokens(group, rng, beams))}
        for seq in scheduler.update(plan, sampled):
            if len(seq.output) >= seq.max_tokens or rng.random() < .02: scheduler.finish(seq.seq_id)
        blocks.check()
    return plans, owners, waiting, log, blocks


def frames_of(result):
    plans, owners, waiting, _, blocks = result
    return d.replay(plans, owners, blocks.num_blocks, blocks.block_size, waiting)


KWARGS = [dict(), dict(aborts=True), dict(caching=True), dict(beams=True), dict(aborts=True, caching=True, beams=True)]


@pytest.mark.parametrize("kwargs", KWARGS, ids=lambda k: "-".join(k) or "plain")
def test_replayed_tables_are_the_block_managers(kwargs):
    seen = dict(preempted=0, released=0, copies=0, frames=0)
    for seed in range(30):
        result = run(seed, **kwargs)
        for frame, now, plan in zip(frames_of(result), result[3], result[0], strict=True):
            assert frame.tables == {i: t for i, t in now["tables"].items() if i in now["known"]}, seed
            assert frame.computed == {row.seq_id: len(row.tokens) for row in plan.rows}
            for what in ("preempted", "copies"): seen[what] += len(getattr(frame, what))
            seen["released"] += len(plan.released)
            seen["frames"] += 1
    assert seen["preempted"] > 8 and seen["released"] > 100 and seen["copies"] > 20, seen


def all_known(now): return set(now["tables"]) == now["known"]


@pytest.mark.parametrize("kwargs", KWARGS[:2] + KWARGS[3:4], ids=["plain", "aborts", "beams"])
def test_cells_say_what_the_allocator_did(kwargs):
    checked = taken = hatched = 0
    for seed in range(30):
        result, previous = run(seed, **kwargs), None
        for frame, now in zip(frames_of(result), result[3]):
            known = all_known(now) and (previous is None or all_known(before))
            cells = d.pool_cells(frame, previous)
            if all_known(now):
                assert [cell.count if cell.parts else 0 for cell in cells] == now["refs"]
            if previous is not None and known:
                held = d.holders(frame.tables)
                assert {c.number for c in cells if c.taken} == now["came"] & held.keys(), (seed, frame.step)
                free = {c.number for c in cells if c.hatch in ("////", "xxxx")}
                assert free == d.holders(previous.tables).keys() - held.keys()
                for cell in cells:
                    if cell.hatch == "xxxx":
                        assert any(i in frame.preempted for i, _ in d.holders(previous.tables)[cell.number])
                checked, taken, hatched = checked + 1, taken + len(now["came"]), hatched + len(free)
            previous, before = frame, now
    assert checked > 250 and taken > 250 and hatched > 100, (checked, taken, hatched)


@pytest.mark.parametrize("kwargs", KWARGS[:4], ids=["plain", "aborts", "caching", "beams"])
def test_fill_levels_are_the_pools(kwargs):
    shared = 0
    for seed in range(20):
        result = run(seed, **kwargs)
        for frame, now in zip(frames_of(result), result[3]):
            if not all_known(now): continue
            level = d.fill_levels(frame)
            assert level["used"] == now["used"] <= frame.num_blocks
            assert level["filled"] * frame.block_size == pytest.approx(now["filled"])
            assert level["logical"] == sum(map(len, now["tables"].values()))
            shared += level["logical"] > level["used"]
    assert shared > 20


def test_lanes_of_random_runs():
    preempted = 0
    for seed in range(50):
        result = run(seed)
        plans, owners, waiting, log, _ = result
        lanes = d.lanes(frames := frames_of(result))
        for t, (plan, now) in enumerate(zip(plans, log)):
            assert set(frames[t].waiting) == set(waiting[t]) | now["out"]
            at = {label: lane[t] for label, lane in lanes.items() if lane[t]}
            assert {x for x, (kind, _) in at.items() if kind == "waiting"} == set(waiting[t])
            assert {x for x, (kind, _) in at.items() if kind == "preempted"} == now["out"]
            tokens = {}
            for row in plan.rows: tokens[owners[row.seq_id]] = tokens.get(owners[row.seq_id], 0) + len(row.tokens)
            assert {x: n for x, (_, n) in at.items() if n} == tokens
            preempted += len(now["out"])
        assert set(lanes) == set(owners.values())
    assert preempted > 50


class BareRow:
    def __init__(self, seq_id, tokens, position, blocks, samples):
        self.seq_id, self.tokens, self.position, self.blocks, self.samples = seq_id, tokens, position, blocks, samples


def test_lane_kinds():
    "Pieces of a prompt, a last piece of one token, decodes, out, and the same again."
    plans = [Plan([Row(0, [0] * 4, 0, [0, 1], False)]), Plan([Row(0, [0], 4, [], True)]),
             Plan([Row(0, [0], 5, [], True, 2)]), Plan([], [0], [0]), Plan([], [], []),
             Plan([Row(0, [0] * 7, 0, [1, 0], True)]), Plan([Row(0, [0], 7, [], True, 2)])]
    frames = d.replay(plans, {0: "A"}, 2, 4)
    assert d.lanes(frames)["A"] == [("prompt", 4), ("prompt", 1), ("decode", 1), ("preempted", 0), ("preempted", 0),
                                    ("computed again", 7), ("decode", 1)]
    assert frames[5].tables == {0: [(1, 4), (0, 3)]} and frames[3].tables == {}


def test_a_fork_does_not_begin_with_a_prompt():
    plans = [Plan([Row(0, [0] * 4, 0, [0], True)]), Plan([Row(0, [0], 4, [1], True, 1), Row(9, [1], 4, [0, 2], True)])]
    frames = d.replay(plans, {0: "A", 9: "A"}, 3, 4)
    assert d.lanes(frames) == {"A": [("prompt", 4), ("decode", 2)]}
    assert d.pool_cells(frames[1], frames[0])[0].count == 2


def test_rows_without_first_block_append():
    plans = [Plan([BareRow(0, [1] * 4, 0, [3], True)]), Plan([BareRow(0, [1], 4, [1], True)]),
             Plan([BareRow(0, [1], 5, [], True)])]
    assert [f.tables[0] for f in d.replay(plans, {}, 4, 4)] == [[(3, 4)], [(3, 4), (1, 1)], [(3, 4), (1, 2)]]


def test_a_replaced_block():
    plans = [Plan([Row(0, [1] * 7, 0, [7, 1], True)]), Plan([Row(0, [1], 7, [3], True, 1)], copies=[(1, 3)])]
    assert d.replay(plans, {}, 8, 4)[1].tables == {0: [(7, 4), (3, 4)]}


def test_replay_follows_swaps():
    out = Plan([Row(0, [0], 8, [2], True, 2)], [1], [1])
    out.swapped_out = [(2, 5), (3, 0)]
    back = Plan([Row(1, [0], 8, [0, 1, 2], True)], [], [0])
    back.swapped_in = [(5, 0), (0, 1)]
    plans = [Plan([Row(0, [0] * 8, 0, [0, 1], True), Row(1, [0] * 8, 0, [2, 3], True)]), out, Plan([]), back]
    frames = d.replay(plans, {0: "A", 1: "B"}, 5, 4)
    assert [f.host for f in frames] == [{}, {1: [(5, 4), (0, 4)]}, {1: [(5, 4), (0, 4)]}, {}]
    assert frames[3].tables == {1: [(0, 4), (1, 4), (2, 1)]}
    assert d.lanes(frames)["B"] == [("prompt", 8), ("swapped out", 0), ("swapped out", 0), ("decode", 1)]


def test_a_victims_empty_block_does_not_hide_it():
    "B had a block for its next tokens; nothing is in it, so it does not move, and B is on the host."
    out = Plan([Row(0, [0], 4, [4], True, 1)], preempted=[1], released=[1], swapped_out=[(1, 3), (2, 0)])
    plans = [Plan([Row(0, [0] * 4, 0, [0], True), Row(1, [0] * 6, 0, [1, 2, 3, 4], True)]), out]
    frames = d.replay(plans, {0: "A", 1: "B"}, 5, 4)
    assert frames[0].tables[1] == [(1, 4), (2, 2), (3, 0), (4, 0)]
    assert frames[1].host == {1: [(3, 4), (0, 2)]} and d.lanes(frames)["B"][1] == ("swapped out", 0)
    out.swapped_out = [(1, 3)]                      # half of it: then it is not there
    assert d.replay(plans, {0: "A", 1: "B"}, 5, 4)[1].host == {}


def test_a_record_without_its_start_is_refused():
    with pytest.raises(ValueError, match="sequence 0 has 10 tokens, but 1 blocks of 4"):
        d.replay([Plan([Row(0, [0], 9, [2], True, 2)])], {}, 4, 4)


# What the cells say, on the paper's figures

def vector_frame(name, moment, step=0, **kwargs):
    tables = {who: list(map(tuple, table)) for who, table in VECTORS[name][moment]["tables"].items()}
    return Frame(step, 8, 4, tables, {who: who for who in tables}, **kwargs)


FIG6 = [vector_frame("fig6", "after_prompt", 0, computed={"A": 7}), vector_frame("fig6", "after_decode1", 1, computed={"A": 1}),
        vector_frame("fig6", "after_decode2", 2, computed={"A": 1})]
FIG8 = [vector_frame("fig8", "after_prompt_fork"),
        vector_frame("fig8", "after_a1", 1, computed={"A1": 1}, copies=[tuple(VECTORS["fig8"]["a1_append_cow"])]),
        vector_frame("fig8", "after_a2", 2, computed={"A2": 1})]


def beams(moment, step, first, **kwargs):
    tables = {i: [(b, 4) for b in t] for i, t in enumerate(VECTORS["fig9"][moment]["tables"].values(), first)}
    return Frame(step, 13, 4, tables, dict(enumerate("c0 c1 c2 c3 n0 n1 n2 n3".split())), **kwargs)


FIG9 = [beams("before", 0, 0), beams("after", 1, 4, computed={i: 4 for i in range(4, 8)})]


def prefix_frames():
    def table(blocks, n): return [(b, min(16, n - i * 16)) for i, b in enumerate(blocks)]
    full, owners = list(range(21)), {0: "prefix", 1: "A", 2: "B"}
    pin = table(full + [21], 341)
    return [Frame(0, 28, 16, {0: pin}, owners),
            Frame(1, 28, 16, {0: pin, 1: table(full + [22], 349), 2: table(full + [23, 24], 355)}, owners,
                  copies=[(21, 22), (21, 23)], computed={1: 8, 2: 14})]


FIG10 = prefix_frames()
SWAP = [Frame(0, 5, 4, {0: [(0, 4), (1, 4)], 1: [(2, 4), (3, 4)]}, {0: "A", 1: "B"}, num_host_blocks=4),
        Frame(1, 5, 4, {0: [(0, 4), (1, 4), (2, 1)]}, {0: "A", 1: "B"}, preempted=[1], computed={0: 1},
              host={1: [(0, 4), (1, 4)]}, swapped_out=[(2, 0), (3, 1)], num_host_blocks=4)]
FIGURES = {"fig6": FIG6, "fig8": FIG8, "fig9": FIG9, "fig10": FIG10, "swap": SWAP}


@pytest.mark.parametrize("name, frame, ref", [
    ("fig6", FIG6[2], VECTORS["fig6"]["after_decode2"]["ref"]), ("fig8", FIG8[0], VECTORS["fig8"]["after_prompt_fork"]["ref"]),
    ("fig8", FIG8[2], VECTORS["fig8"]["after_a2"]["ref"]), ("fig9", FIG9[0], VECTORS["fig9"]["before"]["ref"]),
    ("fig9", FIG9[1], VECTORS["fig9"]["after"]["ref"])])
def test_counts_of_the_figures(name, frame, ref):
    cells = d.pool_cells(frame)
    assert {str(cell.number): cell.count for cell in cells if cell.parts} == ref


def test_figure_8_copies_once():
    first, second = d.pool_cells(FIG8[1], FIG8[0]), d.pool_cells(FIG8[2], FIG8[1])
    assert [c.number for c in first if c.taken] == [3] and [c.number for c in first if c.written] == [3]
    assert not [c for c in second if c.taken] and [c.number for c in second if c.written] == [1]
    assert first[3].parts == [(d.owner_colors(FIG8[1].owners)["A1"], 1.0)]
    assert first[7].count == 2 and len(first[7].parts) == 2


def test_figure_9_frees_what_the_vectors_say():
    cells = d.pool_cells(FIG9[1], FIG9[0])
    assert [c.number for c in cells if c.hatch == "////"] == VECTORS["fig9"]["freed"]
    assert [c.number for c in cells if c.taken] == [9, 10, 11, 12] == [c.number for c in cells if c.written]
    level = d.fill_levels(FIG9[1])
    assert (level["used"], level["logical"]) == (9, 20)


def test_figure_10():
    cells = d.pool_cells(FIG10[1], FIG10[0])
    assert [c.count for c in cells if c.parts] == [3] * VECTORS["prefix341_B16"]["full_shared_blocks"] + [1] * 4
    assert cells[21].parts[0][1] == VECTORS["prefix341_B16"]["tail_tokens"] / 16
    assert [c.number for c in cells if c.taken] == [22, 23, 24]


def test_table_rows():
    rows = dict(d.table_rows(SWAP[1], SWAP[0]))
    assert [(c.number, c.note, c.taken, c.written) for c in rows["A"]] == [
        (0, "4/4", False, False), (1, "4/4", False, False), (2, "1/4", True, True)]
    assert [(c.number, c.hatch) for c in rows["B"]] == [(2, "xxxx"), (3, "xxxx")]
    assert [c.note for c in d.host_cells(SWAP[1])] == ["B", "B", "", ""]
    several = Frame(0, 4, 4, {0: [(0, 1)], 1: [(1, 1)], 5: [(0, 1)]}, {0: "A", 1: "B", 5: "A"})
    assert [name for name, _ in d.table_rows(several)] == ["A.0", "A.1", "B"]


def test_words():
    assert d.describe(FIG8[1], FIG8[0]) == ("step 1  ·  block 1 is copied to 3  ·  tokens: A1 1  ·  "
                                            "3 of 8 blocks in use for 4 in tables")
    assert d.describe(SWAP[1], SWAP[0]) == ("step 1  ·  B gives way  ·  2 blocks to the host  ·  tokens: A 1  ·  "
                                            "3 of 5 blocks in use")
    left = d.describe(Frame(3, 8, 4, {}, {0: "A"}), Frame(2, 8, 4, {0: [(1, 4)]}, {0: "A"}))
    assert left == "step 3  ·  A leaves  ·  0 of 8 blocks in use"
    crowd = Frame(0, 16, 4, {i: [(i, 1)] for i in range(12)}, computed={i: 1 for i in range(12)})
    assert "12 sequences come in" in d.describe(crowd, Frame(0, 16, 4, {}))
    assert "12 tokens of 12 sequences" in d.describe(crowd)


# Colors

def linear(color):
    parts = (int(color[i:i + 2], 16) / 255 for i in (1, 3, 5))
    return [p / 12.92 if p <= .04045 else ((p + .055) / 1.055) ** 2.4 for p in parts]


def contrast(a, b):
    low, high = sorted(sum(w * p for w, p in zip((.2126, .7152, .0722), linear(c))) for c in (a, b))
    return (high + .05) / (low + .05)


def test_dark_text_is_readable_on_every_color():
    for color in d.PALETTE:
        for amount in (.22, *(amount for amount, _ in d.KINDS.values()), 1):
            assert contrast(d.mix(color, amount), d.INK) >= 4.5
    assert contrast("#ffffff", d.GREY) >= 4.5


SIGHT = {"normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],        # Machado et al. 2009, severity 1, linear RGB
         "protan": [[.152286, 1.052583, -.204868], [.114503, .786281, .099216], [-.003882, -.048116, 1.051998]],
         "deutan": [[.367322, .860646, -.227968], [.280085, .672501, .047413], [-.011820, .042940, .968881]]}


def lab(color, sight):
    rgb = [min(1, max(0, sum(m * p for m, p in zip(line, linear(color))))) for line in SIGHT[sight]]
    xyz = [sum(m * p for m, p in zip(line, rgb)) for line in
           ([.4124 / .9505, .3576 / .9505, .1805 / .9505], [.2126, .7152, .0722], [.0193 / 1.089, .1192 / 1.089, .9505 / 1.089])]
    x, y, z = (v ** (1 / 3) if v > .008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight, least", [("normal", 13), ("protan", 13), ("deutan", 10)])
def test_owner_colors_are_distinct(sight, least):
    colors = list(d.owner_colors({i: f"r{i}" for i in range(8)}).values())
    assert len(set(colors)) == 8
    for a, b in combinations(colors, 2):
        assert sum((x - y) ** 2 for x, y in zip(lab(a, sight), lab(b, sight))) ** .5 > least, (a, b)


# Pictures

def boxes(fig):
    "(text, its box in pixels) for all that is drawn; a tick label out of view is not."
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    unseen = set()
    for axis in (axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)):
        shown = axis._update_ticks() if axis.axes.axison else []
        unseen |= {t.label1 for t in [*axis.get_major_ticks(), *axis.get_minor_ticks()] if t not in shown}
        unseen |= set() if axis.axes.axison else {axis.label}
    texts = [t for t in fig.findobj(Text) if t.get_text().strip() and t.get_visible() and t not in unseen]
    renderer = canvas.get_renderer()
    return [(t.get_text(), t.get_window_extent(renderer), t.get_bbox_patch()) for t in texts], renderer


def check_texts(fig):
    "All texts inside the canvas; no two on top of each other. Returns how many."
    width, height = fig.bbox.width, fig.bbox.height
    assert width <= 801
    found, renderer = boxes(fig)
    outer = [(t, plate.get_window_extent(renderer) if plate else box) for t, box, plate in found]
    for text, box in outer:                                     # a plate is larger than its text
        assert box.x0 >= -.5 and box.y0 >= -.5 and box.x1 <= width + .5 and box.y1 <= height + .5, (text, box, width, height)
    for (a, x, _), (b, y, _) in combinations(found, 2):
        across = min(x.x1, y.x1) - max(x.x0, y.x0)
        along = min(x.y1, y.y1) - max(x.y0, y.y0)
        assert across <= 2 or along <= 3, (a, b, x, y)
    return len(found)


@pytest.mark.parametrize("name", FIGURES)
def test_texts_of_the_figures_stay_inside(name):
    frames = FIGURES[name]
    for i, (previous, frame) in enumerate(zip([None, *frames], frames)):
        assert check_texts(d.draw_step(frame, previous)) >= frame.num_blocks
        if name == "fig8": check_texts(d.draw_step(frame, previous, like=frames))
        if i % 3: continue        # the same pool and tables, each on its own
        assert check_texts(d.draw_pool(frame, previous=previous)) > frame.num_blocks
        check_texts(d.draw_tables(frame, previous=previous))
    check_texts(d.draw_timeline(frames))
    check_texts(d.draw_fill(frames))


@pytest.fixture(scope="module")
def recorded():
    result = next(r for r in (run(seed) for seed in range(100))
                  if r[4].num_cow_copies and any(p.preempted for p in r[0]) and len(r[0]) > 20)
    return frames_of(result)


def test_texts_of_a_run_stay_inside(recorded):
    assert check_texts(d.static_picture(recorded)) > 20
    for at in (None, 3):
        check_texts(d.draw_timeline(recorded, at=at))
        check_texts(d.draw_fill(recorded, at=at))
    for previous, frame in list(zip(recorded, recorded[1:]))[:3]: check_texts(d.draw_step(frame, previous, like=recorded))


@pytest.mark.parametrize("num_blocks, block_size, seqs, length", [
    (100, 16, 9, 90), (1000, 16, 20, 700), (2500, 16, 4, 500), (16, 1, 2, 8), (1, 4, 1, 3)])
def test_pools_of_any_size(num_blocks, block_size, seqs, length):
    each = -(-length // block_size)
    tables = {i: [(i * each + j, min(block_size, length - j * block_size)) for j in range(each)] for i in range(seqs)}
    owners = {i: f"a request with a long name {i}" for i in tables}
    frame = Frame(0, num_blocks, block_size, tables, owners, computed={i: 1 for i in tables})
    check_texts(d.draw_pool(frame))
    if seqs < 20: check_texts(d.draw_step(frame, Frame(0, num_blocks, block_size, {})))


def test_many_lanes_and_many_steps():
    for seqs, steps in ((40, 20), (3, 300), (150, 5)):
        owners = {i: f"request-{i}" for i in range(seqs)}
        frames = [Frame(t, 400, 4, {i: [(i, 1)] for i in range(seqs)}, owners, computed={i: 2 for i in range(seqs)})
                  for t in range(steps)]
        check_texts(d.draw_timeline(frames))
        check_texts(d.draw_fill(frames))


def test_all_that_a_pool_can_show():
    frame = Frame(4, 20, 4, {0: [(0, 4), (17, 2)]}, {0: "A"}, cached=[3, 4], host={1: [(2, 4)]}, copies=[(0, 17)],
                  swapped_in=[(1, 0)])
    cells = d.pool_cells(frame)
    assert [c.number for c in cells if c.hatch == "...."] == [3, 4] and [c.number for c in cells if c.taken] == [0, 17]
    check_texts(d.draw_step(frame))
    check_texts(d.draw_fill([frame]))
    assert d.fill_levels(frame)["cached"] == 2


def test_into_axes_of_ones_own():
    fig = d.new_figure(7, 6, layout="constrained")
    axes = fig.subplots(4, 1)
    assert d.draw_pool(FIG8[1], axes[0], FIG8[0]) is axes[0]
    assert d.draw_tables(FIG8[1], axes[1], FIG8[0]) is axes[1]
    assert d.draw_timeline(FIG8, axes[2]) is axes[2] and d.draw_fill(FIG8, axes[3]) is axes[3]
    check_texts(fig)


def test_a_copy_is_an_arrow_from_source_to_destination():
    from matplotlib.patches import FancyArrowPatch
    def arrows(frame, previous=None):
        ax = d.draw_pool(frame, previous=previous).axes[0]
        return [tuple(round(x - .5) for x in (p._posA_posB[0][0], p._posA_posB[1][0]))
                for p in ax.patches if isinstance(p, FancyArrowPatch)]
    assert arrows(FIG8[1], FIG8[0]) == [(1, 3)] and arrows(FIG8[2], FIG8[1]) == []
    assert arrows(SWAP[1], SWAP[0]) == [(2, 0), (3, 1)]


# The player

def size_of(picture):
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", picture[16:24])


def test_player_steps_and_falls_back_to_a_picture(recorded):
    frames = recorded[:6]
    player = d.Player(frames)
    bundle = player._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == "Player of 6 frames" and size_of(bundle["image/png"])[0] == 800
    view = bundle["application/vnd.jupyter.widget-view+json"]
    assert view["model_id"] == player.widget.model_id
    assert player._repr_mimebundle_()["application/vnd.jupyter.widget-view+json"] == view
    controls, image = player.widget.children
    play, back, slider, forward = controls.children
    shown = [image.value]
    for _ in range(5):
        forward.click()
        shown.append(image.value)
    assert shown == [player.picture(i) for i in range(6)] and len(set(shown)) == 6
    assert len({size_of(picture) for picture in shown}) == 1, "the picture must not jump"
    forward.click()
    assert slider.value == play.value == 5 and image.value == shown[5]
    play.value = 2
    assert slider.value == 2 and image.value == shown[2]
    for _ in range(4): back.click()
    assert slider.value == 0 and image.value == shown[0]


def test_the_static_picture_shows_the_most_eventful_step():
    quiet = Frame(0, 8, 4, {0: [(0, 1)]})
    frames = [quiet, Frame(1, 8, 4, {0: [(0, 1)]}, preempted=[1, 2, 3]), Frame(2, 8, 4, {0: [(1, 1)]}, preempted=[1], copies=[(0, 1)])]
    assert d.eventful(frames) == 2 and d.eventful([quiet, quiet]) == 0


def test_figures_show_themselves_and_stay_out_of_pyplot():
    import matplotlib.pyplot as plt
    fig = d.draw_step(FIG6[0])
    assert size_of(fig._repr_png_())[0] <= 800 and plt.get_fignums() == []
    assert fig._repr_png_() == d.draw_step(FIG6[0])._repr_png_(), "the same picture, the same bytes"


# Errors

@pytest.mark.parametrize("function", [d.draw_timeline, d.draw_fill, d.static_picture, d.Player])
def test_no_frames(function):
    with pytest.raises(ValueError, match="no frames to draw: record a run"): function([])
    assert d.replay([], {}, 4, 4) == []


def test_impossible_frames():
    with pytest.raises(ValueError, match="sequence 7 holds block 4: blocks are 0 to 3"): Frame(0, 4, 4, {7: [(4, 1)]})
    with pytest.raises(ValueError, match="block -1"): Frame(0, 4, 4, {7: [(-1, 1)]})
    with pytest.raises(ValueError, match="#filled is 5, it must be 0 to 4"): Frame(0, 4, 4, {7: [(1, 5)]})


def test_missing_libraries_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="drawing needs matplotlib: pip install"): d.draw_step(FIG6[0])
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match="the player needs ipywidgets: pip install"): d.Player(FIG6).widget


def test_import_is_light():
    code = "import sys, pagedlm.drawing; print([m for m in ('matplotlib', 'ipywidgets', 'anywidget', 'PIL') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
