"""Fork, append with copy-on-write, free, and cached prefixes, against a model that stores whole texts.

The pool is an array of slots that is really written and read back through the tables. What a
slot holds stands for keys and values: it depends on the token and on all that comes before it.
"""
import json
import random
from collections import Counter
from hashlib import blake2b
from itertools import permutations
from pathlib import Path

import pytest

from pagedlm.blocks import BlockTable
from pagedlm.sharing import (BlockManager, Entry, Growth, PrefixCache, Root, chain_digest,
                             filled_slots)

VECTORS = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text())
SALTS = [None, "a", "b"]
DIGESTS = {"blake2b": chain_digest, "constant": lambda before, tokens: b"",
           "two bits": lambda before, tokens: bytes([sum(tokens) + len(before) & 3])}


class World:
    "A manager, the slots of its pool, and the model: every sequence's text, whole."

    def __init__(self, num_blocks, size, digest=chain_digest, caching=True):
        self.manager = BlockManager(num_blocks, size, enable_prefix_caching=caching)
        self.manager.cache.digest = digest
        self.size, self.slots = size, [None] * (num_blocks * size)
        self.texts, self.salts, self.mirror, self.past = {}, {}, {}, [[0] * size]
        self.copied = self.next_id = self.hits = 0

    # what the verbs do, and what the model says that they did

    def state(self):
        m = self.manager
        tables = {i: (t.num_tokens, list(t.blocks)) for i, t in m.tables.items()}
        return m.allocator.free_blocks(), list(m.allocator.refs), tables, dict(m.cache.entries)

    def append(self, seq, tokens, reserve=0):
        """Append without writing: the copies and the writes that the step owes, or None."""
        m, before = self.manager, self.state()
        table = m.tables.get(seq) or BlockTable(self.size)
        old, start = list(table.blocks), table.num_tokens
        room = max(start + len(tokens), reserve)
        need = max(0, -(-room // self.size) - len(old))
        i = start // self.size
        shared = bool(tokens) and i < len(old) and sum(old[i] in t for _, t in before[2].values()) > 1
        assert m.blocks_needed(seq, len(tokens), reserve) == need + shared
        growth = m.append(seq, len(tokens), reserve)
        if need + shared > len(before[0]):
            assert growth is None and self.state() == before
            return None
        first = i if shared else len(old)
        expected = before[0][:need + shared]                # longest free first
        assert growth == Growth(first, m.table(seq).blocks[first:],
                                [(old[i], expected[0])] if shared else [])
        now = m.table(seq).blocks
        assert now == ((old[:i] + expected[:1] + old[i + 1:]) if shared else old) + expected[shared:]
        self.mirror.setdefault(seq, [])[growth.first:] = growth.blocks
        self.copied += len(growth.copies)
        self.texts.setdefault(seq, []).extend(tokens)
        return growth.copies, [(seq, p) for p in range(start, start + len(tokens))]

    def kv(self, seq, position):
        return self.salts[seq], tuple(self.texts[seq][:position + 1])

    def execute(self, owed):
        "One step's copies, all sources read first, then its writes, at slots of the mirrored tables."
        copies = [pair for c, _ in owed for pair in c]
        assert len({dst for _, dst in copies}) == len(copies)
        read = {dst: self.slots[src * self.size:(src + 1) * self.size] for src, dst in copies}
        for dst, held in read.items():
            self.slots[dst * self.size:(dst + 1) * self.size] = held
        for _, writes in owed:
            for seq, p in writes:
                slot = self.mirror[seq][p // self.size] * self.size + p % self.size
                self.slots[slot] = self.kv(seq, p)

    def start(self, text, salt=None, reserve=0, seq=None):
        "A request arrives: look up, count, and only if all fits adopt and append. Its id, or None."
        m, before = self.manager, self.state()
        hits = m.lookup(text, salt)
        assert hits == self.findable(text, salt)
        assert m.num_free_of(hits) == sum(b in before[0] for b in hits)
        seq, self.next_id = self.next_id if seq is None else seq, self.next_id + 1
        known = len(hits) * self.size
        need = -(-max(len(text), reserve) // self.size) - len(hits)
        assert self.state() == before                                       # BA-3
        if need + m.num_free_of(hits) > m.num_free: return None
        m.adopt(seq, hits, salt)
        assert m.allocator.free_blocks() == [b for b in before[0] if b not in hits]
        self.texts[seq], self.salts[seq], self.mirror[seq] = list(text[:known]), salt, list(hits)
        self.hits += len(hits)
        self.execute([self.append(seq, text[known:], reserve)])
        self.past.append(list(text))
        return seq

    def findable(self, text, salt):
        "What `lookup` should find, by a walk over all entries that asks no digest."
        if not self.manager.enable_prefix_caching: return []
        hits, parent = [], Root(salt)
        for start in range(0, len(text) - self.size, self.size):
            tokens = tuple(text[start:start + self.size])
            found = [e for e in self.manager.cache.of_block.values()
                     if e.tokens == tokens and e.parent == parent]
            if not found: break
            assert len(found) == 1
            parent = found[0]
            hits.append(parent.block)
        return hits

    def fork(self, parent, n=None):
        child, self.next_id, free = self.next_id, self.next_id + 1, self.manager.num_free
        slots, n_ = list(self.slots), len(self.texts[parent]) if n is None else n
        self.manager.fork(parent, child, n)
        assert self.manager.num_free == free and self.slots == slots        # no memory moves
        self.texts[child], self.salts[child] = self.texts[parent][:n_], self.salts[parent]
        self.mirror[child] = self.mirror[parent][:-(-n_ // self.size)]
        self.past.append(list(self.texts[child]))
        return child

    def free(self, seq):
        m, queue = self.manager, self.manager.allocator.free_blocks()
        gone = [b for b in reversed(m.table(seq).blocks) if m.allocator.refs[b] == 1]
        m.free(seq)
        assert m.allocator.free_blocks() == queue + gone                    # from the tail
        self.past.append(self.texts[seq])
        for model in (self.texts, self.salts, self.mirror): del model[seq]

    def commit(self, seq, n=None):
        text = self.texts[seq]
        self.manager.commit(seq, len(text) if n is None else n, lambda s, k: text[s:s + k])

    def grow(self, *seqs, tokens=(1,)):
        "One step in which all of these append the same tokens; the copies of each."
        owed = [self.append(seq, list(tokens)) for seq in seqs]
        self.execute(owed)
        return [copies for copies, _ in owed]

    # what must hold whenever no step is under way

    def check(self):
        m, size = self.manager, self.size
        m.check()
        assert m.tables.keys() == self.texts.keys()
        held, slots = Counter(), set()
        for seq, text in self.texts.items():
            table = m.table(seq)
            assert self.mirror[seq] == table.blocks and table.num_tokens == len(text)
            for p, slot in enumerate(table.slots()):
                assert self.slots[slot] == self.kv(seq, p), (seq, p)
            held.update(table.blocks)
            slots.update(table.slots())
        assert held == Counter({b: n for b, n in enumerate(m.allocator.refs) if n})
        assert m.num_used == len(held) and m.num_free == m.num_blocks - len(held)
        assert m.num_logical_blocks == sum(held.values())
        assert m.num_filled_slots == len(slots) == filled_slots(m.tables.values())
        assert m.num_cow_copies == self.copied
        self.check_entries()

    def check_entries(self):
        "Each entry's block really holds what the entry and its ancestors say (PC-1)."
        m, size = self.manager, self.size
        entries = m.cache.of_block
        assert len(entries) <= m.num_blocks and m.num_cached == sum(not m.allocator.refs[b] for b in entries)
        for block, entry in entries.items():
            text, e = [], entry
            while isinstance(e, Entry): text, e = [*e.tokens, *text], e.parent
            for i in range(size):
                end = len(text) - size + i + 1
                assert self.slots[block * size + i] == (e.salt, tuple(text[:end])), entry

    def finish(self):
        for seq in list(self.texts): self.free(seq)
        self.check()
        assert self.manager.num_free == self.manager.num_blocks and not self.manager.chains


@pytest.fixture
def world():
    "World(…), checked and emptied at the end of the test."
    worlds = []
    def make(*args, **kw):
        worlds.append(World(*args, **kw))
        return worlds[-1]
    yield make
    for w in worlds:
        w.check()
        w.finish()


# ---- random trees of forks, appends, frees, commits and hits

class Crowd(World):
    "A world in which a seed decides what happens."

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        digest = DIGESTS[rng.choice([*DIGESTS, "blake2b", "blake2b"])]
        super().__init__(rng.choice([6, 24, 60]), rng.choice([1, 2, 3, 4, 5]), digest, rng.random() < .8)

    def tokens(self, most=9): return [self.rng.randint(0, 1) for _ in range(self.rng.randint(0, most))]

    def pick(self): return self.rng.choice(list(self.texts))

    def arrive(self):
        "A text that begins like an earlier one, perhaps exactly that one, as after a preemption."
        text = self.rng.choice(self.past[-12:])
        if self.rng.random() < .6: text = text[:self.rng.randint(0, len(text))]
        text = text[:16] + self.tokens() or [1]
        seq = self.start(text, self.rng.choice([None, *SALTS]), self.rng.choice([0, 0, len(text) + 5]))
        if seq is not None and self.rng.random() < .8: self.commit(seq)

    def branch(self):
        parent = self.pick()
        n = len(self.texts[parent])
        if self.rng.random() < .4: n = self.rng.randint(0, n)
        self.fork(parent, n)

    def step(self):
        "Some append; one may be thrown out after that; what is left runs, and some commit."
        owed = {}
        for seq in self.rng.sample(list(self.texts), self.rng.randint(1, len(self.texts))):
            work = self.append(seq, self.tokens(self.rng.choice([2, 9])), self.rng.choice([0, 0, 12]))
            if work is not None: owed[seq] = work
        if self.rng.random() < .2:
            owed.pop(victim := self.pick(), None)
            self.free(victim)
        self.execute(owed.values())
        for seq in owed:
            if self.rng.random() < .7: self.commit(seq, self.rng.randint(0, len(self.texts[seq])))

    def leave(self): self.free(self.pick())

    def live(self, actions):
        for _ in range(actions):
            moves = {self.arrive: 3, self.branch: 4, self.step: 5, self.leave: len(self.texts)}
            self.rng.choices(list(moves), moves.values())[0]() if self.texts else self.arrive()
            self.check()
        self.finish()
        return Counter(copies=self.copied, hits=self.hits, seqs=self.next_id)


@pytest.mark.parametrize("block", range(12))
def test_random_trees(block):
    "20 random lives of 80 actions each; enough of everything happens in them."
    seen = sum((Crowd(seed).live(80) for seed in range(20 * block, 20 * block + 20)), Counter())
    assert seen["copies"] > 50 and seen["hits"] > 30 and seen["seqs"] > 600, seen


# ---- the paper's figures

def as_lists(manager): return {i: [list(e) for e in t.entries()] for i, t in manager.tables.items()}


def counts(manager): return {str(b): n for b, n in enumerate(manager.allocator.refs) if n}


def books(manager): return {"tables": as_lists(manager), "ref": counts(manager)}


def test_figure_6():
    fig = VECTORS["fig6"]
    manager = BlockManager(8, fig["block_size"], order=fig["free_order"])
    for n, moment in ((fig["prompt_len"], "after_prompt"), (1, "after_decode1"), (1, "after_decode2")):
        manager.append("A", n)
        assert books(manager) == fig[moment]


def test_figure_8():
    fig = VECTORS["fig8"]
    manager = BlockManager(8, fig["block_size"], order=[7, 1, 3])
    manager.append("A1", 7)
    manager.fork("A1", "A2")
    assert books(manager) == fig["after_prompt_fork"] and manager.num_filled_slots == 7
    assert manager.blocks_needed("A1") == 1
    assert manager.append("A1") == Growth(1, [3], [tuple(fig["a1_append_cow"])])
    assert books(manager) == fig["after_a1"]
    assert fig["a2_append_cow"] is None and manager.blocks_needed("A2") == 0
    assert manager.append("A2") == Growth(2, [], [])
    assert books(manager) == fig["after_a2"] and manager.num_cow_copies == 1
    assert (manager.num_logical_blocks, manager.num_used, manager.num_filled_slots) == (4, 3, 12)


def beams(manager, before):
    "Grow tables of full blocks, one token a block, that look as Figure 9's do."
    for name, blocks in before.items():
        shared = next((other for other in manager.tables if other in before
                       and manager.table(other).blocks[0] == blocks[0]), None)
        if shared is None:
            manager.append(name, len(blocks))
            continue
        other = max((o for o in manager.tables), key=lambda o: common(manager.table(o).blocks, blocks))
        manager.fork(other, name, common(manager.table(other).blocks, blocks))
        manager.append(name, len(blocks) - manager.table(name).num_tokens)


def common(a, b): return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_figure_9():
    fig = VECTORS["fig9"]
    manager = BlockManager(13, 1, order=[0, 1, 3, 5, 6, 7, 2, 4, 8, 9, 10, 11, 12])
    beams(manager, fig["before"]["tables"])
    assert {i: t.blocks for i, t in manager.tables.items()} == fig["before"]["tables"]
    assert counts(manager) == fig["before"]["ref"]
    for i, parent in enumerate(fig["parents"]): manager.fork(parent, f"n{i}")
    free = manager.allocator.free_blocks()
    for name in fig["before"]["tables"]: manager.free(name)
    assert sorted(set(manager.allocator.free_blocks()) - set(free)) == fig["freed"]
    assert counts(manager) == fig["ref_after_free"]
    assert [manager.append(f"n{i}").blocks for i in range(4)] == [[9], [10], [11], [12]]
    assert {i: t.blocks for i, t in manager.tables.items()} == fig["after"]["tables"]
    assert counts(manager) == fig["after"]["ref"] and manager.num_cow_copies == 0
    manager.check()


@pytest.mark.parametrize("vector, tokens", [("prefix341_B16", 341), ("prefix80_B16", 80)])
def test_figure_10_a_pinned_prefix(vector, tokens, world):
    "64 requests over one pin: full blocks are shared, a partial tail is copied for each of them."
    fact, w = VECTORS[vector], world(400, 16)
    pin = w.start(list(range(tokens)))
    full, tail = divmod(tokens, 16)
    assert (full, tail) == (fact["full_shared_blocks"], fact["tail_tokens"])
    requests = [w.fork(pin) for _ in range(64)]
    assert w.manager.num_used == fact.get("blocks_ceil", full)
    copies = w.grow(*requests, tokens=range(1000, 1020))
    assert [len(c) for c in copies] == [int(fact["tail_needs_cow"])] * 64
    assert all(w.manager.allocator.refs[b] == 65 for b in w.manager.table(pin).blocks[:full])
    assert w.manager.num_used == full + bool(tail) + 64 * -(-(tail + 20) // 16)


# ---- how many copies

@pytest.mark.parametrize("m", [1, 2, 3, 6])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_m_children_make_m_minus_one_copies(m, length, world):
    "The last holder writes in place. Whoever's prompt fills its block copies nothing."
    w = world(40, 4)
    seqs = [w.start([7] * length)]
    seqs += [w.fork(seqs[0]) for _ in range(m - 1)]
    copies = w.grow(*seqs)
    assert [len(c) for c in copies] == ([1] * (m - 1) + [0] if length % 4 else [0] * m)
    assert w.manager.append(seqs[0], 0) is not None and w.manager.num_cow_copies == sum(map(len, copies))


def test_a_pin_makes_it_m_copies(world):
    w = world(40, 4)
    pin = w.start([7] * 6)
    seqs = [w.fork(pin) for _ in range(3)]
    assert [len(c) for c in w.grow(*seqs)] == [1, 1, 1]
    assert w.manager.table(pin).entries()[1][1] == 2        # the pin's tail is as it was


def test_a_request_on_a_pinned_tail_copies_it_once_before_its_own_forks(world):
    w = world(40, 4)
    pin = w.start([7] * 6)
    first = w.fork(pin)
    assert w.grow(first, tokens=[1, 2, 3]) == [[(1, 2)]]     # in prefill: 9 tokens now
    seqs = [first, *(w.fork(first) for _ in range(2))]
    assert [len(c) for c in w.grow(*seqs)] == [1, 1, 0]


def test_one_append_copies_one_block_however_long(world):
    w = world(40, 4)
    a = w.start([7] * 6)
    b = w.fork(a)
    assert w.manager.blocks_needed(a, 11) == 1 + 3
    assert w.grow(a, tokens=range(11)) == [[(1, 2)]]
    assert w.manager.append(b, 0) == Growth(2, [], []) and w.manager.num_cow_copies == 1


def test_a_reserved_block_is_not_given_to_the_child(world):
    w = world(8, 4)
    a = w.start([7] * 5, reserve=14)                         # blocks for 14, tokens for 5
    b = w.fork(a)
    assert w.manager.table(b).blocks == [0, 1] and w.manager.table(a).blocks == [0, 1, 2, 3]
    copies, writes = owed = w.append(a, [1, 2, 3, 4])
    assert copies == [(1, 4)] and w.mirror[a] == [0, 4, 2, 3]
    w.execute([owed])
    assert w.manager.blocks_needed(b) == 0


def test_fork_of_a_part(world):
    w = world(8, 4)
    a = w.start([5] * 7)
    for n, blocks in ((0, []), (3, [0]), (4, [0]), (5, [0, 1]), (7, [0, 1])):
        assert w.manager.table(w.fork(a, n)).blocks == blocks
    for n in (-1, 8):
        with pytest.raises(ValueError, match="sequence 0 has 7"):
            w.manager.fork(a, "x", n)
    with pytest.raises(ValueError, match="'nobody' has no table"):
        w.manager.fork("nobody", "x")
    with pytest.raises(ValueError, match="sequence 1 has a table"):
        w.manager.fork(a, 1)


# ---- when a block is needed (BA-5), full pools, orders of ending (BA-4, FK-5)

def test_boundary_with_an_empty_pool(world):
    w = world(2, 4)
    a = w.start([7] * 3)
    b = w.start([8] * 4)
    assert w.manager.num_free == 0
    assert w.manager.blocks_needed(a) == 0 and w.grow(a) == [[]]             # 3 -> 4
    assert w.manager.blocks_needed(a) == 1 and w.append(a, [1]) is None      # 4 -> 5
    w.free(b)
    assert w.grow(a) == [[]] and w.manager.num_free == 0


def test_a_copy_needs_a_block_and_a_full_pool_says_no(world):
    "3 -> 4 fits where it is, unless it is shared; the refusal leaves everything as it was."
    w = world(2, 4)
    a = w.start([7] * 3)
    b, c = w.fork(a), w.start([8] * 4)
    assert w.manager.blocks_needed(a) == 1 and w.append(a, [1]) is None
    assert w.manager.blocks_needed(a, 0) == 0 and w.manager.append(a, 0) == Growth(1, [], [])
    w.free(b)
    assert w.manager.blocks_needed(a) == 0 and w.grow(a) == [[]]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_fork_three_ways_diverge_and_end_in_any_order(order, world):
    w = world(12, 4)
    a = w.start([7] * 6)
    seqs = [a, w.fork(a), w.fork(a)]
    w.grow(*seqs, tokens=[1, 2, 3])
    for i in order:
        w.free(seqs[i])
        w.check()
        with pytest.raises(ValueError, match=f"sequence {seqs[i]} has no table"):
            w.manager.free(seqs[i])
        w.check()
    assert sorted(w.manager.allocator.free_blocks()) == list(range(12))


def test_a_block_twice_in_one_table_is_seen_and_freed_once():
    manager = BlockManager(4, 4)
    manager.append("bad", 5)
    manager.append("good", 5)
    manager.table("bad").blocks.append(0)
    with pytest.raises(AssertionError, match="'bad' has a block twice"):
        manager.check()
    with pytest.raises(ValueError, match="block 0 was freed twice"):
        manager.free("bad")
    assert sorted(manager.allocator.free_blocks()) == [0, 1]
    assert manager.table("good").blocks == [2, 3]


def test_a_copied_block_is_freed_and_reassigned_in_the_same_step(world):
    "The source of one copy is, in the same step, the destination of another."
    w = world(6, 4)
    a = w.start([7] * 3)
    a2 = w.fork(a)
    c = w.start([8] * 6)
    c2 = w.fork(c)
    w.free(w.start([9] * 8))                                # blocks 4 and 3, 5 before them
    owed = [w.append(a, [1])]                               # 0 is copied, and a2 alone has it
    w.free(a2)                                              # 0 is free, at the tail
    x = w.manager.allocator.free_blocks()
    assert owed[0][0][0][0] == x[-1] == 0
    for _ in x[:-1]: w.manager.append("filler", 4)
    owed += [w.append(c, [2])]
    assert owed[1][0] == [(2, 0)]
    w.manager.free("filler")
    w.execute(owed)
    w.check()
    w.free(c2)


# ---- cached prefixes

def text_of(*blocks, size=4): return [10 * b + i for b in blocks for i in range(size)]


def run(w, text, salt=None):
    "Compute a prompt, commit and free it; the tokens that it found in the cache."
    before = w.hits
    seq = w.start(text, salt)
    w.commit(seq)
    w.check()
    w.free(seq)
    return (w.hits - before) * w.size


def test_never_a_hit_on_what_is_not_computed(world):
    w = world(12, 4)
    text = text_of(1, 2, 3)
    a = w.start(text)
    assert w.manager.lookup(text) == []
    w.commit(a, 7)
    assert w.manager.lookup(text) == [0]
    w.commit(a, 8)
    w.commit(a, 8)
    assert w.manager.lookup(text) == [0, 1]
    w.commit(a)
    assert w.manager.lookup(text) == [0, 1] and w.manager.lookup(text + [0]) == [0, 1, 2]
    with pytest.raises(ValueError, match="13 computed, but only 12"):
        w.manager.commit(a, 13, None)


def test_commit_asks_for_new_tokens_only(world):
    w, asked = world(12, 4), []
    a = w.start(text_of(1, 2, 3, 4)[:14])
    def tokens_from(start, n):
        asked.append((start, n))
        return w.texts[a][start:start + n]
    for n in (3, 4, 5, 12, 14, 14): w.manager.commit(a, n, tokens_from)
    assert asked == [(0, 4), (4, 4), (8, 4)]


def test_ba_2_finished_requests_hold_nothing(world):
    w = world(4, 4)
    for i in range(20):
        assert run(w, text_of(i)) == 0
        m = w.manager
        assert m.num_free == 4 and m.num_used == 0 and m.num_cached == min(i + 1, 4)


def test_ba_3_a_deferred_request_leaves_no_trace(world):
    w = world(6, 4)
    run(w, text_of(1, 2))
    a = w.start(text_of(5, 6, 7, 8))
    refs, queue = list(w.manager.allocator.refs), w.manager.allocator.free_blocks()
    for _ in range(100):
        assert w.start(text_of(1, 2, 3, 4)) is None          # World.start compares everything
    assert w.manager.allocator.refs == refs and w.manager.allocator.free_blocks() == queue
    w.free(a)
    assert run(w, text_of(1, 2, 3, 4)) == 8


def test_adopted_blocks_count_as_taken(world):
    "Two hits that are free come out of the same pool as the block that the rest needs."
    w = world(3, 4)
    run(w, text_of(1, 2))
    text = text_of(1, 2, 3)
    hits = w.manager.lookup(text)
    assert (hits, w.manager.num_free_of(hits), w.manager.num_free) == ([0, 1], 2, 3)
    a = w.start(text)
    assert w.manager.num_free == 0 and w.manager.num_free_of(hits) == 0 and w.manager.num_cached == 0
    assert w.start(text[:9]) is None                        # the hits are there, no block is
    w.free(a)


def test_pc_1_a_recycled_block_is_forgotten(world):
    w = world(4, 4)
    x = text_of(1, 2, 3)
    assert run(w, x) == 0
    for i in range(10, 14): run(w, text_of(i, i + 10))
    assert w.manager.lookup(x + [0]) == [] and len(w.manager.cache.entries) <= 4
    assert run(w, x) == 0 and run(w, x + [0]) == 12


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_pc_2_the_last_token_is_always_computed(length, world):
    w, text = world(12, 4), text_of(1, 2, 3)[:length]
    assert run(w, text) == 0
    reader = w.start(text)                                  # holds the hits, and goes on reading
    assert len(w.texts[reader]) - (length - 1) // 4 * 4 >= 1
    for _ in range(2):
        again = w.start(text)
        known = (length - 1) // 4
        assert w.manager.table(again).blocks[:known] == w.manager.table(reader).blocks[:known]
        assert not set(w.manager.table(again).blocks[known:]) & set(w.manager.table(reader).blocks)
        w.commit(again)
        w.check()                                           # the reader's contents, too
        w.free(again)


@pytest.mark.parametrize("digest", ["constant", "two bits"])
def test_pc_4_collisions_never_hit(digest, world):
    w, cache = world(20, 4, digest=DIGESTS[digest]), PrefixCache(DIGESTS[digest])
    for a in range(6):
        for b in range(6): run(w, text_of(a, b) + [1])      # each content is compared inside
    first = cache.add(0, (1, 2), Root())
    assert cache.find((1, 2), Root()) is first and cache.find((5, 6), Root()) is None
    assert cache.find((1, 2), Root("a")) is None and cache.find((1, 2), first) is None
    w.manager.cache.entries.clear(), w.manager.cache.of_block.clear()
    run(w, text_of(9) + [1])
    assert run(w, text_of(9) + [1]) == 4                    # and what is there is found


def test_the_same_tokens_after_others_are_no_hit_even_if_digests_collide(world):
    "(1, 2) after (0, 0) is not (1, 2) after (3, 3); an unchained hash would say so."
    unchained = world(12, 4, digest=lambda before, tokens: chain_digest(b"", tokens))
    assert run(unchained, text_of(1, 2) + [0]) == 0
    assert run(unchained, text_of(3, 2) + [0]) == 0
    assert run(unchained, text_of(3, 2) + [0]) == 8


@pytest.mark.parametrize("salt", [None, "a"])
def test_digest_after_names_the_block_that_was_missed(salt, world):
    w, text = world(12, 4), text_of(1, 2, 3) + [0]
    entries, before = w.manager.cache.entries, Root(salt).digest
    for known in range(4):                                  # blocks of the text that are there
        hits = w.manager.lookup(text, salt)
        assert len(hits) == known
        missed = w.manager.digest_after(hits, text, salt)
        if known == 3: break
        before = chain_digest(before, tuple(text[4 * known:4 * known + 4]))
        assert missed == before and missed not in entries
        other = w.manager.digest_after(w.manager.lookup(text, "other"), text, "other")
        run(w, text[:4 * known + 4], salt)
        assert missed in entries and other not in entries   # now a lookup would find more
    assert missed == b""                                    # all of it, but for the last token
    assert w.manager.digest_after([], [1, 2, 3, 4], salt) == b""
    off = world(12, 4, caching=False)
    assert off.manager.digest_after([], text, salt) == b""


def test_pc_5_salts_are_tagged(world):
    w, text = world(40, 4), text_of(1, 2) + [0]
    salts = ["a", "b", None, "", "None", "no salt", "salt a", "\ud800"]
    assert [run(w, text, salt) for salt in salts] == [0] * len(salts)
    assert [run(w, text, salt) for salt in salts] == [8] * len(salts)
    assert len({Root(salt).digest for salt in salts}) == len(salts)
    a = w.start(text, "a")
    w.grow(w.fork(a), tokens=text_of(3))                    # a child keeps its parent's salt
    for seq in list(w.texts): w.commit(seq)
    assert len(w.findable(text + text_of(3) + [0], "a")) > len(w.findable(text + text_of(3), "b"))


def test_pc_6_the_tail_goes_first(world):
    w = world(3, 4)
    run(w, text_of(1, 2, 3))
    run(w, [99])                                            # one block is needed
    assert run(w, text_of(1, 2, 3)) == 8


def test_pc_7_hits_are_a_run_from_the_start(world):
    w = world(3, 4)
    a = w.start(text_of(1, 2, 3))
    w.commit(a)
    keep = w.fork(a, 4)                                     # A is held, C and B are free
    w.free(a)
    run(w, [99])                                            # C goes
    w.manager.allocator.take(2), w.manager.allocator.free(2)
    run(w, [99])                                            # B goes
    assert w.manager.lookup(text_of(1, 2, 3) + [0]) == [0]
    w.free(keep)
    b, c = world(6, 4), text_of(1, 2, 3) + [0]
    run(b, c)
    blocks = b.manager.lookup(c)
    b.manager.cache.forget(blocks[1])                       # A and C stay
    assert b.manager.lookup(c) == blocks[:1]
    assert run(b, c) == 4 and run(b, c) == 12               # C is found again once it is new


def test_two_equal_prompts_in_one_step(world):
    "Neither finds the other; one of the two copies is mapped, and both go on committing."
    w, text = world(12, 4), text_of(1, 2)
    a, b = w.start(text), w.start(text)
    assert not set(w.manager.table(a).blocks) & set(w.manager.table(b).blocks)
    w.commit(a)
    w.commit(b)
    assert w.manager.lookup(text + [0]) == w.manager.table(a).blocks and len(w.manager.cache.entries) == 2
    w.grow(b, tokens=text_of(3))
    w.commit(b)
    assert w.manager.lookup(text_of(1, 2, 3) + [0]) == [*w.manager.table(a).blocks, w.manager.table(b).blocks[2]]


def test_an_entry_whose_parent_has_gone_is_replaced(world):
    w, text = world(6, 4), text_of(1, 2, 3)
    a, b = w.start(text_of(1)), w.start(text)
    w.commit(a)
    w.commit(b)                                             # its first block is a's entry
    w.free(a)
    run(w, text_of(7, 8)[:5])                               # a's block is used for something else
    run(w, text_of(7, 8)[:5])
    assert w.manager.lookup(text + [0]) == []               # the chain has lost its beginning
    w.free(b)
    c = w.start(text)
    w.commit(c)
    assert w.manager.lookup(text + [0]) == w.manager.table(c).blocks


def test_a_part_that_is_written_in_place_is_no_longer_what_it_was(world):
    "A fork cuts a full, cached block; when its other holders are gone it writes into that block."
    w, text = world(4, 4), text_of(1, 2)
    a = w.start(text)
    w.commit(a)
    child = w.fork(a, 6)
    w.free(a)
    assert w.manager.lookup(text + [0]) == [0, 1]
    assert w.grow(child) == [[]]
    assert w.manager.lookup(text + [0]) == [0]
    w.grow(child)
    w.commit(child)
    assert w.manager.lookup(w.texts[child] + [0]) == [0, 1] and w.manager.lookup(text + [0]) == [0]


def test_a_child_goes_on_committing(world):
    w = world(20, 4)
    a = w.start(text_of(1, 2)[:6])
    w.commit(a)
    b, whole = w.fork(a), w.fork(a, 4)
    w.grow(a, tokens=[1, 1, 1])
    w.grow(b, tokens=[2, 2, 2])
    w.grow(whole, tokens=[3] * 4)
    for seq in (b, a, whole): w.commit(seq)
    for seq in (a, b, whole):
        assert w.manager.lookup(w.texts[seq] + [0] * 4)[:2] == w.manager.table(seq).blocks[:2]


def test_stale_hits_are_refused_and_change_nothing(world):
    w, text = world(3, 4), text_of(1, 2, 3)
    run(w, text)
    hits = w.manager.lookup(text)
    run(w, [99] * 6)                                        # 2 and 1 are used for something else
    before = w.state()
    for wrong in (hits, hits[1:], [7]):
        with pytest.raises(ValueError, match="no longer holds"):
            w.manager.adopt("late", wrong)
    with pytest.raises(ValueError, match="no longer holds"):
        w.manager.adopt("late", hits[:1], "other salt")
    assert w.state() == before
    a = w.start(text[:3])
    with pytest.raises(ValueError, match=f"sequence {a} has a table"):
        w.manager.adopt(a, [])


def test_without_caching_nothing_is_remembered(world):
    w = world(6, 4, caching=False)
    for _ in range(3): assert run(w, text_of(1, 2)) == 0
    assert w.manager.num_cached == 0 and not w.manager.cache.entries


def test_the_digest_is_the_same_in_every_process():
    "Little-endian 64-bit ids after what came before; Python's hash() would differ."
    raw = b"no salt" + b"".join(t.to_bytes(8, "little") for t in (5, 70000))
    assert chain_digest(Root().digest, (5, 70000)) == blake2b(raw, digest_size=16).digest()
    assert chain_digest(b"x", (1, 2)) != chain_digest(b"x", (2, 1)) != chain_digest(b"y", (2, 1))


# ---- check() sees what it must

def cached_house():
    w = World(8, 4)
    w.commit(w.start(text_of(1, 2)))
    w.fork(0)
    return w.manager


def swap_entries(m): m.cache.of_block[0], m.cache.of_block[1] = m.cache.of_block[1], m.cache.of_block[0]


CORRUPTIONS = {
    "has no block, or two": lambda m: m.cache.of_block.pop(0),
    "does not carry the entry": swap_entries,
    "not of the same sequences": lambda m: m.chains.pop(1),
    "has 1 full blocks only": lambda m: setattr(m.table(1), "num_tokens", 7),
    "count 2, but 1 tables": lambda m: (m.tables.pop(1), m.chains.pop(1)),
    "count 1, but 2 tables": lambda m: m.allocator.free(0),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_check_fails_on(message):
    manager = cached_house()
    manager.check()
    CORRUPTIONS[message](manager)
    with pytest.raises(AssertionError, match=message):
        manager.check()


# ---- the model sees: a world that is wiped or mixed up is noticed

def test_the_model_sees_a_wrong_slot():
    w = World(8, 4)
    a = w.start(text_of(1, 2)[:6])
    w.fork(a)
    w.check()
    w.slots[5] = w.slots[4]
    with pytest.raises(AssertionError): w.check()


def test_a_long_chain_is_dropped_without_deep_recursion():
    manager = BlockManager(20_000, 1, enable_prefix_caching=True)
    manager.append(0, 20_000)
    manager.commit(0, 20_000, lambda start, n: [1] * n)
    assert len(repr(manager.cache.of_block[19_999])) < 200
    manager.free(0)
    for block in range(20_000): manager.cache.forget(block)
