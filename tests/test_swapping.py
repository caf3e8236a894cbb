"""Out to the host and back, against a model that stores whole texts.

Both pools are slots that are really written, moved and read through the tables. What a slot holds
stands for keys and values: it depends on the token, on all that comes before it, and on the salt.
"""
from collections import Counter
from copy import deepcopy
from itertools import permutations

import pytest
import torch
from hypothesis import event, given, settings, strategies as st

from pagedlm.blocks import KVCache, blocks_for
from pagedlm.kernels import Swapper
from pagedlm.sharing import BlockManager, Root, chain_digest
from pagedlm.swapping import HostPool, SwapCosts

DIGESTS = [chain_digest, chain_digest, lambda before, tokens: b"",
           lambda before, tokens: bytes([sum(tokens) + len(before) & 3])]


class World:
    "A device, a host, what both really hold, and every sequence's text."

    def __init__(self, size, num_blocks=60, num_host_blocks=60, caching=True, digest=chain_digest):
        self.size, self.device = size, BlockManager(num_blocks, size, enable_prefix_caching=caching)
        self.device.cache.digest = digest
        self.host = HostPool(num_host_blocks, size)
        self.slots = [[None] * size for _ in range(num_blocks)]
        self.host_slots = [[None] * size for _ in range(num_host_blocks)]
        self.texts, self.salts, self.next_id = {}, {}, 0

    def kv(self, i, p): return self.salts[i], tuple(self.texts[i][:p + 1])

    def write(self, i, start):
        "The keys and values of all tokens from `start` on; then what is full enters the cache."
        text, table = self.texts[i], self.device.table(i)
        for p in range(start, len(text)):
            block = table.blocks[p // self.size]
            assert self.device.allocator.refs[block] == 1
            self.slots[block][p % self.size] = self.kv(i, p)
        self.device.commit(i, len(text), lambda s, n: text[s:s + n])

    def start(self, text, salt=None):
        i, self.next_id = self.next_id, self.next_id + 1
        self.texts[i], self.salts[i] = list(text), salt
        hits = self.device.lookup(text, salt)
        self.device.adopt(i, hits, salt)
        known = len(hits) * self.size
        assert self.device.append(i, len(text) - known) is not None
        self.write(i, known)
        return i

    def fork(self, parent, n):
        i, self.next_id = self.next_id, self.next_id + 1
        self.device.fork(parent, i, n)
        self.texts[i], self.salts[i] = self.texts[parent][:n], self.salts[parent]
        return i

    def grow(self, i, tokens):
        start = len(self.texts[i])
        growth = self.device.append(i, len(tokens))
        for a, b in growth.copies: self.slots[b] = list(self.slots[a])
        self.texts[i] += tokens
        self.write(i, start)

    def free(self, i):
        pool = self.device if i in self.device.tables else self.host
        pool.free(i)
        del self.texts[i], self.salts[i]

    # what is swapped

    def out(self, seqs, undone=None):
        "Swap these out, really, and spoil what the device has no reason to keep."
        computed = {i: len(self.texts[i]) for i in seqs}
        pairs = self.host.swap_out(self.device, computed, undone)
        if pairs is None: return None
        held = [self.slots[a] for a, _ in pairs]
        for (_, b), what in zip(pairs, held): self.host_slots[b] = list(what)
        self.spoil()
        return pairs

    def back(self, seqs):
        pairs = self.host.swap_in(self.device, seqs)
        held = [self.host_slots[a] for a, _ in pairs]
        for (_, b), what in zip(pairs, held): self.slots[b] = list(what)
        self.spoil()
        return pairs

    def spoil(self):
        "Free blocks that nobody can find hold nothing."
        for pool, slots in ((self.device, self.slots), (self.host, self.host_slots)):
            kept = pool.cache.of_block if pool is self.device else ()
            for block, ref in enumerate(pool.allocator.refs):
                if ref == 0 and block not in kept: slots[block] = [None] * self.size

    # what must hold

    def sharing(self, pool, seqs, undone=None):
        "Which blocks of which sequences are one: the (sequence, index) pairs of each."
        places = {}
        for i in seqs:
            for j, b in enumerate(pool.table(i).blocks[:blocks_for(len(self.texts[i]), self.size)]):
                places.setdefault((undone or {}).get(b, b), set()).add((i, j))
        return sorted(map(sorted, places.values()))

    def check(self):
        self.device.check(), self.host.check()
        assert not self.device.tables.keys() & self.host.tables.keys()
        assert -1 not in self.device.tables
        for i, text in self.texts.items():
            here = i in self.device.tables
            pool, slots = (self.device, self.slots) if here else (self.host, self.host_slots)
            table = pool.table(i)
            assert table.num_tokens == len(text)
            for p in range(len(text)):
                assert slots[table.blocks[p // self.size]][p % self.size] == self.kv(i, p), (i, p)

    def state(self):
        "All that a call which does nothing leaves as it is."
        return [(pool.allocator.free_blocks(), list(pool.allocator.refs),
                 {i: (t.num_tokens, list(t.blocks)) for i, t in pool.tables.items()},
                 {i: list(chain) for i, chain in pool.chains.items()})
                for pool in (self.device, self.host)], dict(self.device.cache.entries)

    def stay(self, seqs):
        "{host block: device block} of what the device has, by a walk that asks no digest."
        stay, entries = {}, self.device.cache.of_block.values()
        for i in seqs:
            text, parent = self.texts[i], Root(self.salts[i])
            for j in range(len(text) // self.size if self.device.enable_prefix_caching else 0):
                tokens = tuple(text[j * self.size:(j + 1) * self.size])
                found = [e for e in entries if e.tokens == tokens and e.parent == parent]
                if not found: break
                parent = found[0]
                stay[self.host.table(i).blocks[j]] = parent.block
                assert self.slots[parent.block] == [self.kv(i, p) for p in range(
                    j * self.size, (j + 1) * self.size)]
        return stay


def tokens(rng, n): return [rng.randint(0, 1) for _ in range(n)]    # few, so that much is equal


def crowd(rng, **kwargs):
    "A world with survivors and a gang: forks of parts, copies, samples that grew, equal texts."
    size = rng.randint(1, 4)
    world = World(size, caching=rng.random() < .8, digest=rng.choice(DIGESTS), **kwargs)
    salt = rng.choice([None, None, "a"])
    for _ in range(rng.randint(0, 2)):
        world.start(tokens(rng, rng.randint(1, 3 * size)), rng.choice([salt, None, "b"]))
    return world, grow_gang(rng, world, salt)


def grow_gang(rng, world, salt):
    size = world.size
    gang = [world.start(tokens(rng, rng.randint(1, 4 * size)), salt)]
    for _ in range(rng.randint(0, 5)):
        parent = rng.choice(gang)
        what = rng.choice(["fork", "fork", "part", "grow", "again"])
        if what == "grow": world.grow(parent, tokens(rng, rng.randint(1, size + 1)))
        elif what == "again": gang.append(world.start(list(world.texts[parent]), salt))
        else:
            n = len(world.texts[parent])
            gang.append(world.fork(parent, rng.randint(1, n) if what == "part" else n))
    world.check()
    return gang


def plan(rng, world, gang):
    "Some have room for their next tokens when the gang gives way; the copies that are not made."
    undone = {}
    for i in rng.sample(gang, rng.randint(0, len(gang))):
        n = rng.randint(1, world.size + 1)
        growth = world.device.append(i, n, reserve=len(world.texts[i]) + rng.randint(0, 5))
        undone |= {b: a for a, b in growth.copies}
    return undone


def meanwhile(rng, world):
    "Others come, and go, while the gang waits."
    here = list(world.device.tables)
    for _ in range(rng.randint(0, 5)):
        if here and rng.random() < .5: world.free(here.pop(rng.randrange(len(here))))
        else:
            text = list(rng.choice(list(world.texts.values()))) if rng.random() < .4 else []
            text += tokens(rng, rng.randint(1, 2 * world.size))
            if blocks_for(len(text), world.size) > world.device.num_free: continue
            here.append(world.start(text, rng.choice([None, "a", "b"])))
    if rng.random() < .3: world.device.append(999, world.size * rng.randint(0, world.device.num_free))
    if 999 in world.device.tables: world.device.free(999)
    world.spoil()


randoms = st.randoms(use_true_random=False)
many = settings(max_examples=100, deadline=None, derandomize=True)


@many
@given(rng=randoms)
def test_out_each_block_once_and_sharing_is_kept(rng):
    world, gang = crowd(rng)
    undone = plan(rng, world, gang)
    before = world.sharing(world.device, gang, undone)
    sources = {undone.get(b, b) for i in gang for b in world.device.table(i).blocks[
        :blocks_for(len(world.texts[i]), world.size)]}
    free = world.device.num_free
    alone = {b for b, n in Counter(b for i in gang for b in world.device.table(i).blocks).items()
             if world.device.allocator.refs[b] == n}
    pairs = world.out(gang, undone)
    assert {a for a, _ in pairs} == sources and len({b for _, b in pairs}) == len(pairs) == len(sources)
    assert world.sharing(world.host, gang) == before
    assert world.device.num_free == free + len(alone)
    world.check()
    event(f"copies undone: {len(undone)}")


@many
@given(rng=randoms)
def test_there_and_back(rng):
    world, gang = crowd(rng)
    undone = plan(rng, world, gang)
    world.out(gang, undone)
    other = grow_gang(rng, world, rng.choice([None, "a"]))
    if rng.random() < .5: world.out(other)
    meanwhile(rng, world)
    if rng.random() < .3:
        for i in rng.sample(gang, rng.randint(0, len(gang) - 1)):
            world.free(i)
            gang.remove(i)
            world.check()
    before, stay = world.sharing(world.host, gang), world.stay(gang)
    held = list(dict.fromkeys(b for i in gang for b in world.host.table(i).blocks))
    pairs = world.back(gang)
    assert [a for a, _ in pairs] == [b for b in held if b not in stay]
    world.check()
    after = world.sharing(world.device, gang)
    assert all(any(set(was) <= set(now) for now in after) for was in before)   # what was one is one
    if not stay: assert after == before
    for i in gang:                          # and they can go on, and be found
        world.grow(i, [0])
        world.check()
    event("stayed" if stay else "all travelled")
    for i in list(world.texts): world.free(i)
    world.check()
    assert world.device.num_used == world.host.num_used == 0


def leave_free(world, n, keep):
    "A filler takes all free blocks but n; of those to `keep`, none."
    spare = [b for b in world.device.allocator.free_blocks() if b not in keep]
    many = world.device.num_free - n
    if many > len(spare): return False
    world.device.begin(998, spare[:many], 0)
    return True


def returns(world, lengths):
    "Does the gang come back and get room for its next tokens?"
    try: world.back(list(lengths))
    except AttributeError: return False         # `append` said None to the stand-in
    for i, n in lengths.items():
        if world.device.append(i, n - len(world.texts[i])) is None: return False
    return True


@many
@given(rng=randoms)
def test_blocks_needed_is_exact(rng):
    world, gang = crowd(rng)
    world.out(gang, plan(rng, world, gang))
    meanwhile(rng, world)
    for i in rng.sample(gang, rng.randint(0, len(gang) - 1)) if rng.random() < .4 else ():
        world.free(i)
        gang.remove(i)
    lengths = {i: len(world.texts[i]) + rng.choice([1, 1, 1, rng.randint(1, 9)]) for i in gang}
    before = world.state()
    need, keep = world.host.blocks_needed(world.device, lengths), set(world.stay(gang).values())
    assert world.state() == before          # a question changes nothing
    for n in (need, need - 1):
        trial = deepcopy(world)
        if not leave_free(trial, n, keep): continue
        assert trial.host.blocks_needed(trial.device, lengths) == need
        assert returns(trial, lengths) == (n == need)
        if n == need:
            assert trial.device.num_free == 0
            trial.device.check(), trial.host.check()
    event(f"free hits: {min(3, trial.device.num_free_of(keep))}")


@many
@given(rng=randoms)
def test_a_host_without_room_says_none_and_nothing_changes(rng):
    world, gang = crowd(rng)
    undone = plan(rng, world, gang)
    computed = {i: len(world.texts[i]) for i in gang}
    need = len(world.sharing(world.device, gang, undone))
    world.host = HostPool(need + 1, world.size)
    world.host.begin("other", [world.host.allocator.queue.end - 1, 0], 0)
    world.host.chains["other"] = []
    before = world.state()
    assert world.host.swap_out(world.device, computed, undone) is None
    assert world.state() == before
    world.host.free("other")
    world.host.begin("other", [rng.randrange(need + 1)], 0)
    world.host.chains["other"] = []
    assert len(world.host.swap_out(world.device, computed, undone)) == need and world.host.num_free == 0


# ---- one thing at a time -----------------------------------------------------------------

def waiting(lengths, size=4, num_blocks=20, samples=1, caching=False):
    "One text of this length for each, and forks of the first, out on the host."
    world = World(size, num_blocks, caching=caching)
    gang = [world.start(range(100 * k, 100 * k + n)) for k, n in enumerate(lengths)]
    gang += [world.fork(gang[0], lengths[0]) for _ in range(samples - 1)]
    world.out(gang)
    return world, gang


@pytest.mark.parametrize("n,need", [(1, 1), (3, 1), (4, 2), (5, 2), (8, 3), (9, 3), (12, 4)])
def test_sc_4_the_next_token_counts(n, need):
    world, gang = waiting([n])
    assert world.host.blocks_needed(world.device, {0: n + 1}) == need
    assert leave_free(world, n // 4 if n % 4 == 0 else need, set())
    fits = need <= world.device.num_free
    assert fits == (n % 4 != 0)                 # with exactly len/B free blocks: refused


@pytest.mark.parametrize("samples", [1, 2, 3, 6])
def test_copies_among_writers(samples):
    world, gang = waiting([6], samples=samples)
    lengths = dict.fromkeys(gang, 7)
    assert world.host.blocks_needed(world.device, lengths) == 2 + samples - 1
    world.back(gang)
    copies = [world.device.append(i).copies for i in gang]
    assert sum(map(len, copies)) == samples - 1 and copies[-1] == []


def test_a_reader_of_a_shared_block_makes_every_writer_copy():
    world = World(4)
    parent = world.start(range(8))
    children = [world.fork(parent, 6) for _ in range(2)]
    world.out([parent, *children])
    lengths = {parent: 9, **dict.fromkeys(children, 7)}
    assert world.host.blocks_needed(world.device, lengths) == 2 + 1 + 2


def test_a_hit_counts_as_free_once_and_in_use_not_at_all():
    world, gang = waiting([10], samples=3, caching=True)
    lengths = dict.fromkeys(gang, 11)
    assert world.host.blocks_needed(world.device, lengths) == 3 + 2      # two hits are free
    other = world.start(list(range(10)))
    assert world.device.table(other).blocks[:2] == [0, 1]
    assert world.host.blocks_needed(world.device, lengths) == 1 + 2      # now somebody has them
    assert world.back(gang) == [(2, world.device.table(gang[0]).blocks[2])]
    assert world.device.allocator.refs[:2] == [4, 4]
    world.check()


def test_fresh_blocks_are_not_those_that_stayed():
    "The free queue begins with what has stayed; the block that travels must go elsewhere."
    world, gang = waiting([8, 3], num_blocks=3, caching=True)
    assert world.device.allocator.free_blocks() == [1, 0, 2]
    assert world.back(gang) == [(2, 2)] and world.device.table(0).blocks == [0, 1]
    world.check()


def test_stale_numbers_are_not_trusted():
    world, gang = waiting([12], num_blocks=3, caching=True)
    world.free(world.start(range(500, 512)))    # the same three blocks, full, cached, free
    assert len(world.device.cache.of_block) == 3 and world.host.blocks_needed(world.device, {0: 12}) == 3
    assert len(world.back(gang)) == 3
    world.check()


def test_the_walk_ends_at_the_first_gap():
    "The last block is there, but right behind the first: in another text."
    world = World(2, num_blocks=8)
    world.out([world.start([1, 1, 2, 2, 3, 3])])
    world.device.append(999, 16), world.device.free(999)
    world.start([1, 1, 3, 3])
    assert [a for a, _ in world.back([0])] == [1, 2]
    world.check()


def test_what_others_computed_again_is_found():
    world, gang = waiting([12], num_blocks=6, caching=True)
    world.free(world.start(range(500, 524)))    # all six
    other = world.start(list(range(12)) + [7])
    assert world.back(gang) == [] and world.device.table(0).blocks == world.device.table(other).blocks[:3]
    world.check()


def test_another_salt_is_another_text():
    world = World(4, caching=True)
    mine = world.start(range(8), "a")
    world.out([mine])
    world.device.append(999, 4 * 60), world.device.free(999)
    world.start(range(8), "b"), world.start(range(8))
    assert len(world.back([mine])) == 2
    world.check()
    world.free(mine)
    assert world.device.lookup(list(range(9)), "a") == []       # it travelled: not committed again


def test_returned_blocks_are_found_after_the_next_commit():
    world, gang = waiting([8], caching=True, num_blocks=8)
    world.device.append(999, 32), world.device.free(999)
    assert len(world.back(gang)) == 2 and not world.device.cache.entries
    world.grow(0, [1])
    assert world.device.lookup(list(range(9))) == world.device.table(0).blocks[:2]


def test_a_planned_copy_is_undone():
    world = World(4, num_blocks=3)
    first = world.start(range(6))
    samples = [first, world.fork(first, 6), world.fork(first, 6)]
    assert world.device.append(samples[0]).copies == [(1, 2)] and world.device.append(samples[1]) is None
    assert world.out(samples, {2: 1}) == [(0, 0), (1, 1)]
    assert world.host.allocator.refs[:3] == [3, 3, 0]
    world.check()
    world.back(samples)
    world.check()


def test_the_original_may_have_been_let_go():
    "Its last other holder left first, and the block went to somebody: swaps come before writes."
    world = World(4, num_blocks=4)
    pin = world.start(range(6))
    child = world.fork(pin, 6)
    (copy,) = world.device.append(child).copies
    world.free(pin)
    world.device.append(999, 4)                # nothing is written yet
    assert world.out([child], {copy[1]: copy[0]}) == [(0, 0), (1, 1)]
    world.device.free(999)
    world.check()


def test_what_is_only_reserved_stays_behind():
    world = World(4)
    i = world.start(range(5))
    world.device.append(i, 9, reserve=40)
    assert len(world.device.table(i).blocks) == 10 and len(world.out([i])) == 2
    assert world.device.num_used == 0 and world.host.table(i).num_tokens == 5


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_freed_on_the_host_in_any_order(order):
    world = World(4)
    parent = world.start(range(10))
    gang = [parent, world.fork(parent, 10), world.fork(parent, 6), world.start(range(50, 53))]
    world.grow(gang[1], [1, 2, 3])
    world.out(gang)
    for k in order:
        world.free(gang[k])
        world.check()
    assert world.host.num_free == 60 and world.device.num_free == 60


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_gangs_return_in_any_order(order):
    world = World(4, num_blocks=12)
    gangs = []
    for k in range(3):
        i = world.start([*range(8), k, k])
        gangs.append([i, world.fork(i, 9)])
    for gang in gangs: world.out(gang)
    assert world.host.num_used == 9             # the prefix of all three goes with each
    for k in order:
        world.back(gangs[k])
        world.check()
    assert world.host.num_used == 0 and world.device.num_used == 5      # and is one again


def test_nothing_computed_nothing_moved():
    world = World(4)
    world.device.append(0, 7)
    world.texts[0], world.salts[0], world.next_id = [], None, 1
    assert world.out([0]) == [] and world.back([0]) == [] and world.device.num_used == 0
    assert world.host.blocks_needed(world.device, {}) == 0


def test_unknown_sequences_are_refused():
    world, gang = waiting([6])
    for call in (lambda: world.host.swap_out(world.device, {5: 3}), lambda: world.host.free(5)):
        with pytest.raises(ValueError, match="5 has no table"): call()
    with pytest.raises(KeyError): world.host.swap_in(world.device, [5])
    world.check()


def test_check_sees_a_chain_without_a_table():
    host = HostPool(4, 4)
    host.check()
    host.chains[0] = [Root()]
    with pytest.raises(AssertionError, match="chains and tables differ"): host.check()


# ---- tensors, and seconds ----------------------------------------------------------------

@pytest.mark.parametrize("caching", [False, True])
def test_tensors_travel_in_one_piece(caching):
    world = World(4, num_blocks=12, num_host_blocks=9, caching=caching)
    kv, host_kv = KVCache(3, 12, 4, 2, 5), KVCache(3, 9, 4, 2, 5)
    kv.data.normal_(), host_kv.data.fill_(torch.nan)
    swapper = Swapper(kv.data, host_kv.data)
    first = world.start(range(10))
    gang = [first, world.fork(first, 10), world.fork(first, 7)]
    world.grow(gang[1], [3, 4, 5]), world.grow(gang[2], [9])
    before = {i: kv.read(1, world.device.table(i)) for i in gang}
    blocks = {b for i in gang for b in world.device.table(i).blocks}
    swapper.swap_out(world.out(gang))
    taken = world.device.append(999, 40).blocks
    kv.data[:, :, taken] = torch.nan
    world.device.free(999)
    world.spoil()
    swapper.swap_in(world.back(gang))
    for i, (k, v) in before.items():
        now = kv.read(1, world.device.table(i))
        assert torch.equal(now[0], k) and torch.equal(now[1], v)
    assert swapper.transfers == 2 and swapper.bytes_out == len(blocks) * kv.bytes_per_block
    world.check()


def test_costs():
    costs = SwapCosts(block_bytes=16 * 819_200, token_flops=26e9, link_bytes_s=12e9, flops_s=156e12)
    assert costs.swap_s(16) == pytest.approx(2 * 256 * 819_200 / 12e9) == pytest.approx(.03495, rel=1e-3)
    assert costs.recompute_s(256) == pytest.approx(256 / 6000)
    assert costs.swap_s(0) == costs.recompute_s(0) == 0
