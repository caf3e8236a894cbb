"The allocator, the table, the pool of keys and values, and the manager over them."
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedlm.blocks import BlockAllocator, BlockTable, KVCache, blocks_for, first_use
from pagedlm.sharing import BlockManager, Growth, filled_slots

VECTORS = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text())
BLOCK_SIZES = [1, 3, 16]
small = st.integers(0, 40)


def as_lists(table):
    return [list(entry) for entry in table.entries()]


def in_use(manager):
    refs = enumerate(manager.allocator.refs)
    return {str(block): ref for block, ref in refs if ref}


# ---- allocator

class AllocatorMachine(RuleBasedStateMachine):
    "The allocator beside a list and a Counter."

    @initialize(num_blocks=st.integers(0, 8), order=st.permutations(range(8)))
    def start(self, num_blocks, order):
        self.free = [b for b in order if b < num_blocks]
        self.refs = Counter()
        self.allocator = BlockAllocator(num_blocks, self.free)

    @rule()
    def allocate(self):
        block = self.allocator.allocate()
        if self.free:
            assert block == self.free.pop(0)
            self.refs[block] = 1
        else:
            assert block is None

    @rule(block=st.integers(-3, 10))
    def share(self, block):
        if self.refs[block]:
            self.allocator.share(block)
            self.refs[block] += 1
        else:
            with pytest.raises(ValueError, match=f"block {block} "):
                self.allocator.share(block)

    @rule(block=st.integers(-3, 10))
    def take(self, block):
        if block in self.free:
            self.allocator.take(block)
            self.free.remove(block)
            self.refs[block] = 1
        else:
            with pytest.raises(ValueError, match=f"block {block} "):
                self.allocator.take(block)

    @rule(block=st.integers(-3, 10))
    def release(self, block):
        if not self.refs[block]:
            with pytest.raises(ValueError, match=f"block {block} "):
                self.allocator.free(block)
            return
        self.allocator.free(block)
        self.refs[block] -= 1
        if not self.refs[block]:
            self.free.append(block)

    @invariant()
    def agree(self):
        if hasattr(self, "free"):
            queue = self.allocator.queue
            assert list(queue) == self.allocator.free_blocks() == self.free
            ring = [queue.end, *self.free, queue.end]       # both ways round
            assert all(queue.next[a] == b and queue.prev[b] == a for a, b in zip(ring, ring[1:]))
            assert self.allocator.num_free == len(self.free)
            for block in range(self.allocator.num_blocks):
                assert self.allocator.ref_count(block) == self.refs[block]


class ManagerMachine(RuleBasedStateMachine):
    "The manager beside a model: how many tokens and how many blocks each sequence has."

    @initialize(num_blocks=st.integers(0, 12), block_size=st.sampled_from([1, 3, 4, 16]))
    def start(self, num_blocks, block_size):
        self.manager = BlockManager(num_blocks, block_size)
        self.size, self.tokens, self.blocks = block_size, {}, {}

    @rule(seq_id=st.integers(0, 4), n=st.integers(0, 20), reserve=small)
    def append(self, seq_id, n, reserve):
        tokens, blocks = self.tokens.get(seq_id, 0), self.blocks.get(seq_id, 0)
        need = 0
        while (blocks + need) * self.size < max(tokens + n, reserve):
            need += 1
        wanted = max(tokens + n, reserve)
        assert self.manager.blocks_needed(seq_id, n, reserve) == need
        before = self.snapshot()
        added = self.manager.append(seq_id, n, reserve)
        if need > self.manager.num_blocks - sum(self.blocks.values()):
            assert added is None and self.snapshot() == before
        else:
            assert len(added.blocks) == need and added.blocks == before[0][:need]
            assert (added.first, added.copies) == (blocks, [])
            self.tokens[seq_id], self.blocks[seq_id] = tokens + n, blocks + need
            assert self.manager.table(seq_id).blocks[blocks:] == added.blocks

    @rule(seq_id=st.integers(0, 4))
    def free(self, seq_id):
        if seq_id not in self.tokens:
            with pytest.raises(ValueError, match=f"sequence {seq_id} "):
                self.manager.free(seq_id)
            return
        queue = list(self.manager.allocator.queue)
        blocks = self.manager.table(seq_id).blocks
        self.manager.free(seq_id)
        del self.tokens[seq_id], self.blocks[seq_id]
        assert list(self.manager.allocator.queue) == queue + blocks[::-1]

    def snapshot(self):
        tables = {i: (t.num_tokens, list(t.blocks)) for i, t in self.manager.tables.items()}
        return list(self.manager.allocator.queue), list(self.manager.allocator.refs), tables

    @invariant()
    def agree(self):
        if not hasattr(self, "tokens"):
            return
        self.manager.check()
        assert self.manager.num_used == sum(self.blocks.values())
        assert self.manager.num_free + self.manager.num_used == self.manager.num_blocks
        assert self.manager.num_filled_slots == sum(self.tokens.values())
        for seq_id, tokens in self.tokens.items():
            table = self.manager.table(seq_id)
            assert table.num_tokens == tokens == sum(f for _, f in table.entries())
            assert len(set(table.slots())) == tokens


TestAllocatorMachine = AllocatorMachine.TestCase
TestManagerMachine = ManagerMachine.TestCase
TestAllocatorMachine.settings = TestManagerMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)


def test_order_is_the_order_of_first_use():
    assert first_use(8, [7, 1, 3]) == [7, 1, 3, 0, 2, 4, 5, 6]
    assert first_use(3) == [0, 1, 2]
    for order, words in (([1, 1], "block 1"), ([3], "block 3"), ([-1], "block -1")):
        with pytest.raises(ValueError, match=words):
            BlockAllocator(3, order)
    with pytest.raises(ValueError, match="-2"):
        BlockAllocator(-2)


# ---- double frees (BA-4)

def test_double_free_names_the_block_and_harms_no_one():
    allocator = BlockAllocator(4)
    first, other = allocator.allocate(), allocator.allocate()
    allocator.free(first)
    with pytest.raises(ValueError, match=f"block {first} .*twice"):
        allocator.free(first)
    assert allocator.ref_count(other) == 1 and allocator.num_free == 3
    assert sorted(allocator.allocate() for _ in range(3)) == [0, 2, 3]
    assert allocator.allocate() is None


@pytest.mark.parametrize("finish", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_shared_block_returns_once_whoever_finishes_last(finish):
    "Three tables hold one prompt's blocks, and each a block of its own."
    allocator = BlockAllocator(8)
    prompt = [allocator.allocate(), allocator.allocate()]
    for block in prompt * 2:
        allocator.share(block)
    tables = [prompt + [allocator.allocate()] for _ in range(3)]
    for i, seq in enumerate(finish):
        for block in reversed(tables[seq]):
            allocator.free(block)
        assert [allocator.ref_count(b) for b in prompt] == [2 - i] * 2
    assert sorted(allocator.queue) == list(range(8))


def test_freeing_a_sequence_twice_names_it():
    manager = BlockManager(4, 4)
    manager.append(7, 5)
    manager.append(8, 5)
    manager.free(7)
    with pytest.raises(ValueError, match="sequence 7 "):
        manager.free(7)
    manager.check()
    assert manager.table(8).num_tokens == 5 and manager.num_free == 2


# ---- when a block is needed (BA-5, BA-7)

def test_no_block_for_a_token_that_fits():
    manager = BlockManager(1, 4)
    assert manager.append(0, 3).blocks == [0] and manager.num_free == 0
    assert manager.append(0) == Growth(1, [], [])                   # 3 -> 4
    assert manager.append(0) is None                                # 4 -> 5
    assert manager.table(0).num_tokens == 4
    manager.check()


def test_the_fifth_token_takes_exactly_one_block():
    manager = BlockManager(2, 4)
    manager.append(0, 4)
    assert manager.append(0) == Growth(1, [1], []) and manager.append(0) == Growth(2, [], [])


@given(st.sampled_from([1, 3, 4, 12, 16, 48]), st.lists(st.integers(0, 50), max_size=12))
def test_any_block_size_and_any_chunks(block_size, chunks):
    manager = BlockManager(blocks_for(sum(chunks), block_size), block_size)
    for n in chunks:
        assert manager.append(0, n) is not None
        table = manager.table(0)
        assert 0 <= table.capacity - table.num_tokens < block_size      # waste < B
    assert manager.num_free == 0 and manager.append(0, block_size) is None


@pytest.mark.parametrize("block_size", [0, -4, 2.0, "16", None])
def test_bad_block_sizes_are_refused_by_everyone(block_size):
    makers = BlockTable, lambda b: BlockManager(4, b), lambda b: KVCache(1, 1, b, 1, 1)
    for make in makers:
        with pytest.raises(ValueError, match="block_size is .*1 or more"):
            make(block_size)


# ---- reserve

def test_reserve_holds_the_whole_prompt_while_chunks_fill_it():
    manager = BlockManager(6, 4)
    assert manager.append(0, 5, reserve=18) == Growth(0, [0, 1, 2, 3, 4], [])
    for n, total in ((5, 10), (5, 15), (3, 18)):
        assert manager.append(0, n, reserve=18).blocks == []
        assert manager.table(0).num_tokens == manager.num_filled_slots == total
        manager.check()
    assert manager.table(0).entries() == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 2)]
    assert manager.append(0, 3).blocks == [5]


def test_a_refusal_changes_nothing_and_begins_nothing():
    manager = BlockManager(3, 4)
    manager.append(0, 5)
    for n, reserve in ((5, 0), (1, 5), (0, 8)):
        assert manager.append(1, n, reserve) is None
        assert 1 not in manager.tables and manager.num_free == 1
    assert manager.append(1, 4).blocks == [2]
    with pytest.raises(ValueError, match="-1"):
        manager.append(1, -1)


# ---- check() sees what it must

def full_house():
    manager = BlockManager(8, 4)
    manager.append(0, 9)
    manager.append(1, 6)
    return manager


CORRUPTIONS = {
    "count 2": lambda m: m.allocator.refs.__setitem__(0, 2),
    "count 0": lambda m: m.allocator.refs.__setitem__(1, 0),
    "count 1, but 0": lambda m: m.allocator.refs.__setitem__(7, 1),
    "is free, but": lambda m: m.allocator.free(m.table(0).blocks[0]),
    "queue of 4 is torn": lambda m: m.allocator.queue.append(7),
    "only 8 slots": lambda m: setattr(m.table(1), "num_tokens", 9),
    "has a block twice": lambda m: m.table(0).blocks.append(0),
    "count 1, but 2": lambda m: m.table(0).blocks.append(3),
    "do not exist": lambda m: m.table(0).blocks.append(99),
    "!= 8": lambda m: m.allocator.queue.remove(7),
    "queue of 3 is torn": lambda m: m.allocator.queue.link(7, 5),
    "queue of 5 is torn": lambda m: setattr(m.allocator.queue, "size", 5),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_check_fails_on(message):
    manager = full_house()
    manager.check()
    CORRUPTIONS[message](manager)
    with pytest.raises(AssertionError, match=message):
        manager.check()


def test_check_and_filled_slots_know_shared_blocks():
    "Two tables over one prompt, as a fork makes them; the one that is longer counts."
    manager = BlockManager(4, 4)
    manager.append(0, 7)
    manager.fork(0, 1, 6)
    manager.check()
    swapped = [manager.table(1), manager.table(0)]
    assert manager.num_filled_slots == filled_slots(swapped) == 7
    manager.free(0)
    manager.check()
    assert manager.num_free == 2 and manager.num_filled_slots == 6


# ---- the paper's figures (V6, V7)

def test_figures_6_and_7():
    fig6, fig7 = VECTORS["fig6"], VECTORS["fig7"]["final"]
    manager = BlockManager(8, fig6["block_size"], order=[*fig6["free_order"], 5, 2])
    for n, moment in ((7, "after_prompt"), (1, "after_decode1"), (1, "after_decode2")):
        manager.append("A", n)
        assert as_lists(manager.table("A")) == fig6[moment]["tables"]["A"]
        assert in_use(manager) == fig6[moment]["ref"]
    manager.append("B", 6)
    assert {i: as_lists(manager.table(i)) for i in "AB"} == fig7["tables"]
    assert in_use(manager) == fig7["ref"]


# ---- keys and values

def strided_kv(num_tokens, num_kv_heads=2, head_dim=4, dtype=torch.float32):
    "Keys and values cut out of one projection, as models make them."
    qkv = torch.randn(num_tokens, 3 * num_kv_heads * head_dim, dtype=dtype)
    _, k, v = (x.unflatten(1, (num_kv_heads, head_dim)) for x in qkv.chunk(3, dim=1))
    assert num_tokens < 2 or not k.is_contiguous()
    return k, v


def pool_of_nan(num_blocks, block_size, num_layers=2, **kw):
    cache = KVCache(num_layers, num_blocks, block_size, 2, 4, **kw)
    cache.data.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_strided_writes_come_back_in_order(block_size):
    torch.manual_seed(0)
    manager = BlockManager(40, block_size, order=torch.randperm(40).tolist())
    cache, given_kv = pool_of_nan(40, block_size), {0: [], 1: []}
    for seq_id, n in ((0, 7), (1, 5), (0, 1), (1, 9), (0, 3)):      # interleaved
        manager.append(seq_id, n)
        table = manager.table(seq_id)
        slots = torch.tensor(table.slots(table.num_tokens - n))
        k, v = strided_kv(n)
        cache.write(1, slots, k, v)
        given_kv[seq_id].append((k, v))
    for seq_id, pairs in given_kv.items():
        for ours, given_ in zip(cache.read(1, manager.table(seq_id)), zip(*pairs)):
            assert ours.equal(torch.cat(given_))
    filled = (~cache.data[:, 1].isnan()).all((-1, -2)).sum((-1, -2))
    assert filled.tolist() == [manager.num_filled_slots] * 2
    assert cache.data[:, 0].isnan().all()                       # the other layer


def test_other_strides_and_dtypes():
    k = torch.randn(2, 4, 3).permute(2, 0, 1)                        # tokens last in memory
    v = torch.randn(1, 2, 4).expand(3, 2, 4)                         # stride 0
    cache = pool_of_nan(4, 2, dtype=torch.bfloat16)
    table = BlockTable(2, [3, 1], 3)
    cache.write(0, torch.tensor(table.slots()), k, v)
    for ours, given_ in zip(cache.read(0, table), (k, v)):
        assert ours.equal(given_.bfloat16())


def test_reading_leaves_out_reserved_and_unfilled_slots():
    cache, table = pool_of_nan(4, 3), BlockTable(3, [2, 0, 1], 0)
    assert [x.shape for x in cache.read(0, table)] == [(0, 2, 4)] * 2
    k, v = strided_kv(4)
    cache.write(0, torch.tensor(table.slots(0, 4)), k, v)
    table.num_tokens = 4
    assert cache.read(0, table)[0].equal(k)


def test_wrong_shapes_and_missing_blocks_are_errors():
    cache = pool_of_nan(4, 3)
    k, v = strided_kv(3)
    with pytest.raises(ValueError, match=r"v has shape \[2, 2, 4\]; .* \[3, 2, 4\]"):
        cache.write(0, torch.arange(3), k, v[:2])
    for bad in (12, -1):
        with pytest.raises((IndexError, RuntimeError)):
            cache.write(0, torch.tensor([0, 1, bad]), k, v)
    for start, stop in ((0, 7), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match=f"tokens {start} to {stop}"):
            BlockTable(3, [2, 1], 4).slots(start, stop)


def test_bytes():
    facts = VECTORS["kv_bytes"]
    assert KVCache.block_bytes(40, 1, 40, 128, torch.float16) == facts["opt13b_token"]
    assert KVCache.block_bytes(40, 16, 40, 128, torch.float16) == facts["opt13b_block16"]
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(3, 5, 4, 2, 8, dtype=dtype)
        assert cache.num_bytes == cache.data.nbytes == 5 * cache.bytes_per_block
    assert KVCache(1, 0, 4, 2, 8).num_bytes == 0


# ---- copies (FK-5)

def numbered(num_blocks=5):
    "Block b holds the number b in every layer, and minus b as values."
    cache = KVCache(2, num_blocks, 3, 2, 4)
    cache.data[0] = torch.arange(num_blocks).view(1, -1, 1, 1, 1)
    cache.data[1] = -cache.data[0]
    return cache


def contents(cache):
    "Which block's content each block holds; the whole block must agree."
    first = cache.data[0, 0, :, 0, 0, 0]
    assert cache.data[0].eq(first.view(1, -1, 1, 1, 1)).all()
    assert cache.data[1].eq(-first.view(1, -1, 1, 1, 1)).all()
    return first.int().tolist()


@pytest.mark.parametrize("pairs, expected", [
    ([], [0, 1, 2, 3, 4]),
    ([(1, 2), (2, 3)], [0, 1, 1, 2, 4]),
    ([(2, 3), (1, 2)], [0, 1, 1, 2, 4]),
    ([(1, 2), (2, 1)], [0, 2, 1, 3, 4]),
    ([(0, 1), (1, 2), (2, 0)], [2, 0, 1, 3, 4]),
    ([(0, 1), (0, 2), (4, 4)], [0, 0, 0, 3, 4]),
])
def test_copies_are_simultaneous(pairs, expected):
    cache = numbered()
    cache.copy(iter(pairs))
    assert contents(cache) == expected


@given(st.dictionaries(st.integers(0, 4), st.integers(0, 4)))
@settings(deadline=None, derandomize=True)
def test_any_set_of_copies(source_of):
    cache = numbered()
    cache.copy([(src, dst) for dst, src in source_of.items()])
    assert contents(cache) == [source_of.get(b, b) for b in range(5)]


@pytest.mark.parametrize("pairs, block", [
    ([(0, 3), (1, 3)], 3), ([(0, 5)], 5), ([(-1, 2)], -1), ([(1, 2), (0, -5)], -5)])
def test_refused_copies_change_nothing(pairs, block):
    cache = numbered()
    with pytest.raises(ValueError, match=f"block {block} "):
        cache.copy(pairs)
    assert contents(cache) == [0, 1, 2, 3, 4]
