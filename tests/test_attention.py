"Paged attention against dense attention in float64, over poisoned pools."
import subprocess, sys
from itertools import permutations

import pytest
import torch
from torch.testing import assert_close

from pagedlm import attention
from pagedlm.attention import PagedBatch, dense_attention, merge_partials, paged_attention, partial_attention

# relative; half precision is computed in float32, so what remains is the rounding of the result
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}

@pytest.fixture(autouse=True, scope="module")
def one_thread():
    "Tiny tensors: threads would only wait for each other"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

def lengths(block_size, seed=0):
    "(query, context) of a mixed batch: decodes at every boundary, chunks, whole prompts, an idle one; shuffled"
    B = block_size
    ctx = [1, B - 1, B, B + 1, 4 * B + 3, 100]
    pairs = ([(1, c) for c in ctx if c] + [(c, c) for c in ctx if c] + [(2, 4 * B + 3), (min(B, 7), 4 * B), (40, 100)]
             + [(0, 0), (0, B)])
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    return [pairs[i] for i in order]

def close(got, want):
    rtol = TOLERANCE[got.dtype]
    assert_close(got.double(), want, rtol=rtol, atol=min(rtol, 2e-5))

def windowed(q, k, v, scale=None, window=None):
    "The oracle with a window: the query at position p sees the keys at j <= p with p - j < window"
    if window is None: return dense_attention(q, k, v, scale)
    p, j = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    return partial_attention(q, k, v, scale, (j <= p) & (p - j < window))[0]

class Case:
    "A random batch: pool poisoned wherever no context lies, dense float64 K and V beside it"
    def __init__(self, lens, block_size, heads=4, kv_heads=2, dim=16, dtype=torch.float32, seed=0, index=torch.int32):
        g = torch.Generator().manual_seed(seed)
        rand = lambda *shape: torch.randn(*shape, generator=g).to(dtype)
        need = [-(-c // block_size) for _, c in lens]
        num_blocks = sum(need) + 5
        self.lens, self.B, self.shape = lens, block_size, (num_blocks, block_size, kv_heads, dim)
        self.k = torch.full(self.shape, torch.nan, dtype=dtype)
        self.v = torch.full(self.shape, torch.inf, dtype=dtype)
        free = torch.randperm(num_blocks, generator=g)
        self.tables = torch.randint(num_blocks, (len(lens), max(need) + 2), generator=g)   # behind the last block: anything
        self.dense = []
        for i, ((_, ctx), n) in enumerate(zip(lens, need)):
            self.tables[i, :n], free = free[:n], free[n:]
            k, v = rand(ctx, kv_heads, dim), rand(ctx, kv_heads, dim)
            slots = (self.tables[i, :n, None] * block_size + torch.arange(block_size)).flatten()[:ctx]
            self.k.view(-1, kv_heads, dim)[slots], self.v.view(-1, kv_heads, dim)[slots] = k, v
            self.dense.append((k.double(), v.double()))
        self.q = rand(sum(q for q, _ in lens), heads, dim)
        starts = torch.tensor([0] + [q for q, _ in lens]).cumsum(0)
        self.batch = PagedBatch(self.tables.to(index), torch.tensor([c for _, c in lens]).to(index), starts.to(index), block_size)

    def expected(self, scale=None, window=None):
        rows = self.q.double().split([q for q, _ in self.lens])
        return torch.cat([windowed(q, k, v, scale, window) for q, (k, v) in zip(rows, self.dense)])

    def check(self, got=None, scale=None, window=None):
        got = paged_attention(self.q, self.k, self.v, self.batch, scale, window) if got is None else got
        assert got.dtype == self.q.dtype and got.shape == self.q.shape
        close(got, self.expected(scale, window))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32])
def test_mixed_batches(block_size, heads, dtype):
    dim = [16, 64, 80][(block_size + heads[0]) % 3]
    Case(lengths(block_size), block_size, *heads, dim, dtype).check()

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 5, 16, 64, 80, 128])
def test_head_sizes(dim, dtype):
    Case(lengths(4), 4, 9, 3, dim, dtype).check()

@pytest.mark.parametrize("seed", range(20))
def test_random_batches(seed):
    g = torch.Generator().manual_seed(seed)
    pick = lambda n: int(torch.randint(n, (1,), generator=g))
    lens = []
    for _ in range(1 + pick(30)):
        ctx = 1 + pick(200)
        lens.append((1 if pick(2) else 1 + pick(ctx), ctx))
    dtype = [torch.float32, torch.float64, torch.bfloat16][seed % 3]
    Case(lens, 1 + pick(40), *[(3, 1), (8, 8), (12, 4)][pick(3)], 1 + pick(70), dtype, seed, [torch.int32, torch.int64][seed % 2]).check()

@pytest.mark.parametrize("lens", [[(1, 1)], [(1, 37)] * 9, [(5, 5)], [(3, 20)], [(0, 0)], [(0, 9), (1, 9)], [(1, 9), (0, 0)]], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_batches_of_one_kind(lens, dtype):
    Case(lens, 4, dtype=dtype).check()

def test_long_contexts_and_two_threads():
    torch.set_num_threads(2)
    Case([(1, 5000), (1, 3), (100, 4100)], 16, 9, 3, 64).check()
    torch.set_num_threads(1)

@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_scale_is_used(dtype):
    case = Case(lengths(4), 4, dtype=dtype)
    case.check(scale=0.5)
    assert not torch.allclose(paged_attention(case.q, case.k, case.v, case.batch, 0.5),
                              paged_attention(case.q, case.k, case.v, case.batch))

def test_the_checks_see():
    "One token fewer, or one block number wrong, must show"
    case = Case([(1, 9), (4, 9)], 4)
    b = case.batch
    short = PagedBatch(b.block_tables, b.context_lens - 1, b.query_starts, 4)
    with pytest.raises(AssertionError): case.check(paged_attention(case.q, case.k, case.v, short))
    swapped = PagedBatch(b.block_tables.flip(0), b.context_lens, b.query_starts, 4)
    with pytest.raises(AssertionError): case.check(paged_attention(case.q, case.k, case.v, swapped))

@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (7, 1)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gathered_decode_in_every_dtype(heads, dtype):
    "The path for half precision and for other devices, also where the CPU would read in place"
    case = Case([(1, c) for c in (1, 3, 4, 5, 19, 150, 2, 2, 2, 40, 41, 60)], 4, *heads, dtype=dtype)
    case.check(attention._decode_gathered(case.q, case.k, case.v, case.batch, 16 ** -0.5))

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shared_blocks(dtype):
    "Two tables hold the same blocks, and one table holds a block twice"
    g = torch.Generator().manual_seed(1)
    k, v = (torch.randn(6, 4, 2, 16, generator=g).to(dtype) for _ in range(2))
    tables = torch.tensor([[5, 2, 0], [5, 2, 1], [5, 2, 0], [3, 3, 0]])
    ctx, starts = torch.tensor([9, 12, 10, 8]), torch.tensor([0, 1, 2, 6, 7])
    q = torch.randn(7, 6, 16, generator=g).to(dtype)
    got = paged_attention(q, k, v, PagedBatch(tables, ctx, starts, 4))
    flat = [[c[t].flatten(0, 1)[:n].double() for c in (k, v)] for t, n in zip(tables, ctx)]
    want = torch.cat([dense_attention(a.double(), *kv) for a, kv in zip(q.split(starts.diff().tolist()), flat)])
    close(got, want)

def test_caches_with_strides():
    "Views into a larger tensor are read as they are"
    case = Case(lengths(4), 4, 6, 2)
    wide = torch.stack([case.k, case.v], -1)
    case.k, case.v = wide[..., 0], wide[..., 1]
    assert not case.k.is_contiguous()
    case.check()
    more_heads = torch.cat([case.k, case.k, case.v, case.v], 2)
    case.k, case.v = more_heads[:, :, :2], more_heads[:, :, 4:6]
    case.check()
    strided = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(paged_attention(strided, case.k, case.v, case.batch), paged_attention(case.q, case.k, case.v, case.batch))

def test_other_precision_than_the_cache():
    case = Case(lengths(4), 4)
    case.q = case.q.bfloat16()
    case.check()

def test_large_scores_do_not_overflow():
    case = Case(lengths(4), 4)
    case.q = case.q * 300
    assert (case.q.double().flatten(1).norm(dim=1).max() > 1000)
    got = paged_attention(case.q, case.k, case.v, case.batch)
    assert got.isfinite().all()
    assert_close(got.double(), case.expected(), atol=2e-3, rtol=2e-3)   # a score of 1e3 has 1e-4 of rounding

def test_alone_or_in_a_batch():
    case = Case(lengths(8), 8, 9, 3, 64)
    whole, b = paged_attention(case.q, case.k, case.v, case.batch), case.batch
    for i, (first, query, _) in enumerate(b.lens):
        solo = PagedBatch(b.block_tables[i:i + 1], b.context_lens[i:i + 1], torch.tensor([0, query]), 8)
        assert_close(paged_attention(case.q[first:first + query], case.k, case.v, solo), whole[first:first + query], atol=1e-6, rtol=1e-5)

def test_inference_mode_and_after():
    case = Case(lengths(4), 4)
    with torch.inference_mode(): case.check()
    case.check()

def test_inputs_stay_as_they_were():
    case = Case(lengths(4), 4)
    before = [t.clone() for t in (case.q, case.k, case.v, case.batch.block_tables)]
    case.check()
    for a, b in zip(before, (case.q, case.k, case.v, case.batch.block_tables)): assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# --- a sliding window

@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 19, 99, 100, 1000])
def test_window_in_mixed_batches(window, dtype):
    heads = [(4, 4), (6, 2), (7, 1)][window % 3]
    Case(lengths(4), 4, *heads, dtype=dtype).check(window=window)
    Case([(1, c) for c in (1, 3, 4, 5, 19, 150, 2, 40, 41, 60)], 8, *heads, dtype=dtype).check(window=window)

@pytest.mark.parametrize("seed", range(15))
def test_random_windows(seed):
    g = torch.Generator().manual_seed(seed)
    pick = lambda n: int(torch.randint(n, (1,), generator=g))
    lens = []
    for _ in range(1 + pick(12)):
        ctx = 1 + pick(120)
        lens.append((1 if pick(2) else 1 + pick(ctx), ctx))
    dtype = [torch.float32, torch.float64, torch.bfloat16, torch.float16][seed % 4]
    Case(lens, 1 + pick(20), 6, 2, 8, dtype, seed).check(window=1 + pick(90))

@pytest.mark.parametrize("window", [1, 4, 30])
def test_windowed_gathered_decode(window):
    case = Case([(1, c) for c in (1, 3, 4, 5, 19, 150, 2, 2, 2, 40, 41, 60)], 4, 6, 2)
    case.check(attention._decode_gathered(case.q, case.k, case.v, case.batch, 16 ** -0.5, window), window=window)

def test_window_is_the_textbook_formula():
    "Key j is seen by the query at position i if and only if 0 <= i - j < window; prompt, chunks and decode agree"
    case, window = Case([(11, 11)], 4, 4, 2, dtype=torch.float64), 3
    (k, v), whole = case.dense[0], paged_attention(case.q, case.k, case.v, case.batch, window=3)
    for i in range(11):
        seen = range(max(0, i - window + 1), i + 1)
        for h in range(4):
            p = (k[seen, h // 2] @ case.q[i, h] / 4).softmax(0)
            assert_close(whole[i, h], p @ v[seen, h // 2])
    for cuts in ([0, 5, 6, 11], range(12), [0, 2, 11]):
        for a, b in zip(cuts, cuts[1:]):
            step = PagedBatch(case.batch.block_tables, torch.tensor([b]), torch.tensor([0, b - a]), 4)
            assert_close(paged_attention(case.q[a:b], case.k, case.v, step, window=3), whole[a:b])

@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_window_wider_than_the_context_changes_nothing(dtype):
    case = Case(lengths(4), 4, dtype=dtype)
    assert_close(paged_attention(case.q, case.k, case.v, case.batch, window=100), paged_attention(case.q, case.k, case.v, case.batch))
    with pytest.raises(AssertionError): case.check(paged_attention(case.q, case.k, case.v, case.batch, window=99))

def test_a_batch_serves_layers_of_different_windows():
    "What is built once a step is built once for each window"
    for lens in (lengths(4), [(1, c) for c in (1, 3, 30, 31)]):
        for dtype in (torch.float32, torch.bfloat16):
            case = Case(lens, 4, dtype=dtype)
            for window in (7, None, 2, 7): case.check(window=window)

@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_keys_that_left_the_window_are_not_read(dtype):
    "Their blocks may belong to others by now"
    case, window = Case([(1, 30), (6, 30), (1, 5), (30, 30)], 4, dtype=dtype), 9
    want = case.expected(window=window)
    for row, (query, ctx) in zip(case.tables, case.lens):
        gone = row[:max(0, ctx - query - window + 1) // 4]
        case.k[gone], case.v[gone] = torch.nan, torch.nan
    assert case.k.isnan().sum() > 0
    close(paged_attention(case.q, case.k, case.v, case.batch, window=window), want)

@pytest.mark.parametrize("window", [0, -1])
def test_a_window_holds_at_least_the_query(window):
    case = Case(lengths(4), 4)
    error(lambda: paged_attention(case.q, case.k, case.v, case.batch, window=window), "window", window)


# --- the batch

def test_to_another_device_with_its_lens():
    "Nobody asks the other device for numbers that the host has (the meta device has none to give)"
    b = PagedBatch(torch.tensor([[7, 1, 3]]), torch.tensor([9]), torch.tensor([0, 2]), 4)
    moved = attention.to_device(b, torch.device("meta"))
    assert moved.lens == b.lens == [(0, 2, 9)] and moved.block_size == 4
    assert {t.device.type for t in (moved.block_tables, moved.context_lens, moved.query_starts)} == {"meta"}

def test_garbage_behind_the_last_block():
    for lens in (lengths(4), [(1, c) for c in (1, 3, 30, 31)]):
        for dtype in (torch.float32, torch.bfloat16):
            case = Case(lens, 4, dtype=dtype)
            for row, (_, ctx) in zip(case.tables, lens): row[-(-ctx // 4):] = 2**31 - 1
            b = case.batch
            case.batch = PagedBatch(case.tables.int(), b.context_lens, b.query_starts, 4)
            case.check()

def test_positions_and_slots():
    b = PagedBatch(torch.tensor([[7, 1, 3], [5, 2, 0], [4, 9, 9]], dtype=torch.int32), torch.tensor([9, 6, 0]), torch.tensor([0, 1, 5, 5]), 4)
    assert b.positions.tolist() == [8, 2, 3, 4, 5]
    assert b.slots.tolist() == [3 * 4, 5 * 4 + 2, 5 * 4 + 3, 2 * 4, 2 * 4 + 1]
    assert b.positions.dtype == b.slots.dtype == torch.int64
    assert b.slots is b.slots and b.lens == [(0, 1, 9), (1, 4, 6), (5, 0, 0)]

def test_slots_are_64_bit():
    "block * block_size beyond 2**31, from a 32-bit table"
    b = PagedBatch(torch.tensor([[2**30]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), 16)
    assert b.slots.tolist() == [2**34 + 2]

def test_index_type():
    assert attention._index_dtype(2**31 - 1) == torch.int32
    assert attention._index_dtype(2**31) == torch.int64

@pytest.mark.parametrize("num_slots", [64, 2**31], ids=["int32", "int64"])
def test_sparse_index_in_full(num_slots):
    b = PagedBatch(torch.tensor([[7, 1], [5, 0]]), torch.tensor([5, 2]), torch.tensor([0, 1, 2]), 4)
    index = attention._sparse_index(b, 4, 2, num_slots)
    assert index.cols.dtype == (torch.int32 if num_slots == 64 else torch.int64)
    assert index.crow.tolist() == [0, 5, 10, 15, 20, 22, 24, 26, 28]
    a, c = [28, 29, 30, 31, 4], [20, 21]
    want = [[2 * s + g for s in slots] for slots in (a, c) for g in (0, 0, 1, 1)]
    assert index.cols.tolist() == sum(want, [])
    assert index.rows.tolist() == [r for r, cols in enumerate(want) for _ in cols]

def test_wide_index_gives_the_same(monkeypatch):
    case = Case(lengths(4), 4, 9, 3)
    narrow = paged_attention(case.q, case.k, case.v, case.batch)
    monkeypatch.setattr(attention, "_index_dtype", lambda largest: torch.int64)
    b = case.batch
    assert_close(paged_attention(case.q, case.k, case.v, PagedBatch(b.block_tables, b.context_lens, b.query_starts, 4)), narrow)

def test_index_is_built_once(monkeypatch):
    calls, build = [], attention._sparse_index
    monkeypatch.setattr(attention, "_sparse_index", lambda *a: calls.append(a) or build(*a))
    case = Case(lengths(4), 4)
    for _ in range(3): case.check()
    assert len(calls) == 1


# --- partial results

def parts(q, k, v, cuts):
    edges = [0, *cuts, len(k)]
    return [partial_attention(q, k[a:b], v[a:b]) for a, b in zip(edges, edges[1:])]

@pytest.fixture
def qkv():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(n, h, 16, generator=g, dtype=torch.float64) for n, h in ((3, 6), (23, 2), (23, 2))]

def test_split_anywhere(qkv):
    whole, lse = partial_attention(*qkv)
    assert_close(whole, dense_attention(*qkv, causal=False))
    for a in range(24):
        for b in range(a, 24):       # a == b, 0 and 23 give empty parts
            out, merged = merge_partials(*zip(*parts(*qkv, (a, b))))
            assert_close(out, whole); assert_close(merged, lse)

def test_any_order_and_grouping(qkv):
    whole, p = dense_attention(*qkv, causal=False), parts(*qkv, (1, 9, 10))
    for order in permutations(p): assert_close(merge_partials(*zip(*order))[0], whole)
    left = merge_partials(*zip(p[3], p[0]))
    assert_close(merge_partials(*zip(left, merge_partials(*zip(p[2], p[1]))))[0], whole)

def test_merging_large_scores(qkv):
    q, k, v = qkv
    whole, lse = partial_attention(q * 1e4, k, v)
    assert whole.isfinite().all() and lse.abs().max() > 1e4
    assert_close(merge_partials(*zip(*parts(q * 1e4, k, v, (7, 11))))[0], whole)

def test_empty_parts_have_no_weight():
    out, lse = torch.ones(2, 3), torch.zeros(2)
    nothing, never = torch.full((2, 3), torch.nan), torch.full((2,), -torch.inf)
    assert_close(merge_partials([out, nothing], [lse, never]), (out, lse))
    all_empty = merge_partials([nothing, nothing], [never, never])
    assert_close(all_empty, (torch.zeros(2, 3), never))

def test_masked_out_query_gives_zero(qkv):
    mask = torch.ones(3, 23, dtype=torch.bool); mask[1] = False
    out, lse = partial_attention(*qkv, mask=mask)
    assert not out[1].any() and (lse[1] == -torch.inf).all() and out[0].any()

def test_dense_is_the_textbook_formula(qkv):
    q, k, v = qkv
    for i in range(3):
        for h in range(6):
            n = 23 - 3 + i + 1
            p = (k[:n, h // 3] @ q[i, h] / 4).softmax(0)
            assert_close(dense_attention(q, k, v)[i, h], p @ v[:n, h // 3])


# --- errors, and the process around

def error(call, *words):
    with pytest.raises(ValueError) as e: call()
    assert all(str(w) in str(e.value) for w in words), str(e.value)

def test_errors_name_the_numbers():
    tables, ctx, starts = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([12, 1]), torch.tensor([0, 1, 2])
    batch, cache, q = PagedBatch(tables, ctx, starts, 4), torch.zeros(5, 4, 2, 8), torch.zeros(2, 4, 8)
    error(lambda: paged_attention(torch.zeros(2, 3, 8), cache, cache, batch), "num_heads (3)", "num_kv_heads (2)")
    error(lambda: paged_attention(torch.zeros(2, 4, 9), cache, cache, batch), 9, 8)
    error(lambda: paged_attention(torch.zeros(3, 4, 8), cache, cache, batch), 3, 2)
    error(lambda: paged_attention(torch.zeros(4, 8), cache, cache, batch), "(4, 8)")
    error(lambda: paged_attention(q, cache, cache[1:], batch), "(5, 4, 2, 8)", "(4, 4, 2, 8)")
    error(lambda: paged_attention(q, cache.view(-1, 2, 2, 8), cache.view(-1, 2, 2, 8), batch), "(4)", "(2)")
    error(lambda: PagedBatch(tables, torch.tensor([13, 1]), starts, 4), "sequence 0", 13, 12)
    error(lambda: PagedBatch(tables, torch.tensor([12, 1]), torch.tensor([0, 1, 3]), 4), "sequence 1", "(2)", "(1)")
    error(lambda: PagedBatch(tables, ctx, torch.tensor([0, 2, 1]), 4), "sequence 1", "(-1)")
    error(lambda: PagedBatch(tables, ctx, torch.tensor([1, 2, 3]), 4), "begin with 0")
    error(lambda: PagedBatch(tables, ctx, torch.tensor([0, 1]), 4), "(2, 3)")
    error(lambda: PagedBatch(tables[0], ctx, starts, 4), "(3,)")
    error(lambda: PagedBatch(tables, ctx, starts, 0), "block_size", 0)
    error(lambda: dense_attention(torch.zeros(3, 1, 4), *torch.zeros(2, 2, 1, 4)), 3, 2)
    error(lambda: dense_attention(torch.zeros(1, 1, 4), torch.zeros(2, 1, 4), torch.zeros(3, 1, 4)), "(2, 1, 4)", "(3, 1, 4)")
    error(lambda: merge_partials([torch.zeros(2, 3)], [torch.zeros(3)]), "(1, 2, 3)", "(1, 3)")

def test_no_warning_and_no_filter_changed():
    code = ("import warnings, torch; before = list(warnings.filters); import pagedlm.attention as a; assert warnings.filters == before\n"
            "b = a.PagedBatch(torch.tensor([[0]]), torch.tensor([2]), torch.tensor([0, 1]), 4); c = torch.ones(1, 4, 1, 2)\n"
            "a.paged_attention(torch.ones(1, 1, 2), c, c, b)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and not run.stderr, run.stderr
