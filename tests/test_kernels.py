"""The kernels against float64 dense attention over poisoned pools; each against its PyTorch specification.

Without a GPU they run in Triton's interpreter, and another process compiles them for real targets."""
import importlib.util, json, mmap, os, re, subprocess, sys, tempfile
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

import pagedlm  # noqa: F401  first of all: it decides whether Triton interprets
from pagedlm import kernels as K
from pagedlm.attention import PagedBatch, partial_attention
from test_attention import Case, error, one_thread, windowed  # noqa: F401

import triton
import triton.language as tl

DEVICE = torch.device("cpu" if K.INTERPRETED else "cuda")
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.skipif(not K.INTERPRETED and not torch.cuda.is_available(), reason="Triton needs its interpreter or a GPU")
def examples(n): return settings(max_examples=n, deadline=None, derandomize=True)     # the same cases each time

@pytest.fixture
def triton_backend(monkeypatch): monkeypatch.setenv("PAGEDLM_BACKEND", "triton")

@pytest.fixture(params=["triton", "torch"])
def backend(request, monkeypatch):
    monkeypatch.setenv("PAGEDLM_BACKEND", request.param)
    return request.param

class Launches:
    "Stands for a kernel, and notes what each launch was given: grid, arguments, options"
    def __init__(self, monkeypatch, name, run=True):
        self.kernel, self.calls, self.run = getattr(K, name), [], run
        monkeypatch.setattr(K, name, self)

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.calls.append((grid, args, options))
            if self.run: self.kernel[grid](*args, **options)
        return launch

    def __len__(self): return len(self.calls)


# --- attention

class KernelCase(Case):
    """A random batch on the kernels' device. Around the pool lie NaN blocks, and table entries behind the last block
    name those, or other sequences' blocks. `hot`: queries scaled until the largest score is 60. `shared`: the second
    of two long contexts begins with the first one's blocks."""
    def __init__(self, lens, block_size, heads=4, kv_heads=2, dim=16, dtype=torch.float32, seed=0, hot=False, shared=False,
                 index=torch.int32):
        super().__init__(lens, block_size, heads, kv_heads, dim, dtype, seed, index)
        g = torch.Generator().manual_seed(seed)
        if shared: self.share(*sorted(range(len(lens)), key=lambda i: -lens[i][1])[:2])
        if hot: self.q = (self.q.double() * 60 / self.largest_score()).to(dtype)
        for row, (_, ctx) in zip(self.tables, lens):
            tail = row[-(-ctx // block_size):]
            outside = torch.randint(2, tail.shape, generator=g) * (self.shape[0] + 1) - 1    # -1 or num_blocks
            tail.copy_(tail.where(torch.rand(tail.shape, generator=g) < 0.5, outside))
        wide = torch.stack([self.tables, self.tables * 0 - 1], -1).to(index)
        self.tables = wide[:, :, 0] if seed % 2 else wide[:, :, 0].contiguous()
        self.k, self.v = (self.guarded(c) for c in (self.k, self.v))
        self.batch = PagedBatch(self.tables.to(DEVICE), *(t.to(DEVICE) for t in (self.batch.context_lens, self.batch.query_starts)), block_size)
        self.q = self.q.to(DEVICE)

    def guarded(self, cache):
        pool = torch.full((self.shape[0] + 2, *self.shape[1:]), torch.nan, dtype=cache.dtype)
        pool[1:-1] = cache
        return pool.to(DEVICE)[1:-1]

    def share(self, i, j):
        n = min(self.lens[i][1], self.lens[j][1]) // self.B
        own = self.tables[j, :n].clone()
        for c in (self.k, self.v): c[own] = torch.nan
        self.tables[j, :n] = self.tables[i, :n]
        for theirs, mine in zip(self.dense[i], self.dense[j]): mine[:n * self.B] = theirs[:n * self.B]

    def largest_score(self):
        rows = self.q.double().split([q for q, _ in self.lens])
        top = [torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], -1)), k).abs().max()
               for q, (k, _) in zip(rows, self.dense) if q.numel()]
        return float(max(top)) * self.q.shape[-1] ** -0.5

    def dense_over(self, values, window):
        rows = self.q.double().cpu().split([q for q, _ in self.lens])
        return torch.cat([windowed(q, k, values(v), None, window) for q, (k, v) in zip(rows, self.dense)])

    def tolerance(self, window=None, hot=False):
        """float32: 1e-5 where scores are small. A score of 60 is itself rounded by 60 * 2^-24 in each of a few sums:
        4e-5. Half types: the products are exact in float32, but each probability (on a GPU) and each result
        is rounded to the type, by eps/2 each, or by one eps where the interpreter truncates: eps * sum of p |v|."""
        if self.q.dtype == torch.float32: return (4e-5 if hot else 1e-5) * (1 + self.dense_over(lambda v: v, window).abs())
        return torch.finfo(self.q.dtype).eps * self.dense_over(torch.abs, window) + (4e-5 if hot else 1e-5)

    def run(self, window=None, splits=None):
        return K.triton_attend(self.q, self.k, self.v, self.batch, self.q.shape[-1] ** -0.5, window, splits)

    def check(self, got=None, window=None, splits=None, hot=False):
        got = self.run(window, splits) if got is None else got
        assert got.dtype == self.q.dtype and got.shape == self.q.shape
        wrong = (got.double().cpu() - self.dense_over(lambda v: v, window)).abs() / self.tolerance(window, hot)
        assert wrong.max() <= 1, f"{wrong.max():.3g} times the tolerance"    # a NaN is not <= 1


DIMS, GROUPS, BLOCKS = [16, 64, 80, 96, 128], [1, 3, 4, 7, 8], [8, 16, 32]

def mixed(B):
    "Queries 1 to 70 in one batch: decodes at every boundary, a prompt, chunks, an idle sequence"
    return [(1, B), (70, 70), (1, 1), (B, B + 1), (1, 500), (0, B), (1, B - 1), (20, 50), (1, B + 1), (2, 2)]

def small(B): return [(1, B), (9, 9), (1, 1), (5, 2 * B + 3), (0, B), (1, B + 1)]

@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", DIMS)
def test_grid_of_mixed_batches(dim, group):
    i, j = DIMS.index(dim), GROUPS.index(group)
    kv_heads, hot = 1 + (group == 1 or dim == 64), bool((i // 2 + j) % 2)
    KernelCase(mixed(BLOCKS[(i + j) % 3]), BLOCKS[(i + j) % 3], kv_heads * group, kv_heads, dim, FLOATS[(i + 2 * j) % 3],
               seed=5 * i + j, hot=hot, shared=bool(i % 2), index=[torch.int32, torch.int64][j % 2]).check(hot=hot)

@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_grid_of_decodes(dtype, block_size):
    "The other tile shape: no sequence has two queries"
    B, n = block_size, FLOATS.index(dtype) + 3 * BLOCKS.index(block_size)
    lens = [(1, c) for c in (B, 1, B - 1, 500, B + 1)] + [(0, 9)]
    for group, dim in ((GROUPS[n % 5], DIMS[n // 2]), (GROUPS[(n + 2) % 5], DIMS[(n + 3) % 5])):
        case = KernelCase(lens, B, 2 * group if dim < 80 else group, 2 if dim < 80 else 1, dim, dtype, n, hot=True, shared=True)
        assert case.largest_score() == pytest.approx(60, rel=1e-2)
        case.check(hot=True)

@pytest.mark.parametrize("block_size", [1, 2, 4, 64, 128, 256])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other_block_sizes(block_size, dtype):
    KernelCase([(1, 257), (3, 70), (1, 64), (9, 9)], block_size, 3, 1, 20, dtype, 3).check()

@pytest.mark.parametrize("block_size", [64, 256])
def test_windows_and_splits_over_large_blocks(block_size):
    "One table entry serves a tile of keys, wherever the window begins"
    case = KernelCase([(1, 330), (40, 200)], block_size, 2, 1, 16)
    for window in (50, 130): case.check(window=window, splits=2)

index_types = st.sampled_from([torch.int32, torch.int64])

@st.composite
def cases(draw):
    ctx = st.one_of(st.integers(1, 40), st.integers(1, 150))
    lens = [(draw(st.one_of(st.just(1), st.integers(0, min(70, c)))), c) for c in draw(st.lists(ctx, min_size=1, max_size=4))]
    if not sum(q for q, _ in lens): lens.append((1, 1))
    group, kv_heads, dtype = draw(st.sampled_from([*GROUPS, 2, 5])), draw(st.integers(1, 2)), draw(st.sampled_from(FLOATS))
    hot, shared = draw(st.booleans()), draw(st.booleans()) and len(lens) > 1
    case = KernelCase(lens, draw(st.sampled_from([*BLOCKS, 1, 2, 4, 64])), group * kv_heads, kv_heads,
                      draw(st.sampled_from([*DIMS, 1, 5, 33])), dtype, draw(st.integers(0, 99)), hot, shared, draw(index_types))
    return case, hot, draw(st.one_of(st.none(), st.integers(1, 170))), draw(st.one_of(st.none(), st.integers(1, 4)))

@examples(30)
@given(cases())
def test_random_cases(drawn):
    case, hot, window, splits = drawn
    case.check(window=window, splits=splits, hot=hot)

@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [None, 1, 5, 33])
def test_splits_and_windows(splits, window):
    "Also more splits than tiles of keys, windows in a tile, contexts far wider than the window: parts without a key"
    dtype = FLOATS[splits % 3]
    KernelCase([(1, 1), (1, 500), (0, 3), (1, 130)], 16, 3, 1, 16, dtype, splits).check(window=window, splits=splits)
    if splits in (2, 7): KernelCase([(12, 30), (1, 40), (3, 100)], 8, 3, 1, 16, dtype, splits).check(window=window, splits=splits)

def test_more_splits_than_keys():
    KernelCase([(1, 3), (1, 100)], 16, 2, 1, 16).check(splits=20)

@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_splits_of_large_scores(dtype):
    KernelCase([(1, 400), (1, 70)], 16, 2, 1, 64, dtype, hot=True).check(splits=3, hot=True)

def test_a_window_over_whole_blocks_and_tiles():
    "One query at each position: the window's edge passes every offset in a block and in a tile of keys"
    case = KernelCase([(70, 70)], 8, 1, 1, 16, torch.float32)
    tile = K.attend_shape(case.q, case.k, case.batch, None)["TILE_K"]
    for window in (1, 8, 9, tile - 1, tile, tile + 1, 69): case.check(window=window)
    assert_close(case.run(70), case.run())
    with pytest.raises(AssertionError): case.check(case.run(69))

@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("splits", [1, 3])
def test_chunks_and_decode_agree_with_the_prompt(window, splits):
    case, cuts = KernelCase([(67, 67)], 8, 2, 1, 16), [0, 1, 30, 64, 65, 67]
    whole = case.run(window)
    for a, b in zip(cuts, cuts[1:]):
        step = PagedBatch(case.batch.block_tables, *(torch.tensor(t, device=DEVICE) for t in ([b], [0, b - a])), 8)
        assert_close(K.triton_attend(case.q[a:b], case.k, case.v, step, 0.25, window, splits), whole[a:b], atol=1e-6, rtol=1e-5)

def test_both_backends_through_the_public_function(backend, monkeypatch):
    launches = Launches(monkeypatch, "attend_kernel")
    for dtype in FLOATS:
        case = KernelCase(small(8), 8, 3, 1, 16, dtype)
        case.check(K.attend(case.q, case.k, case.v, case.batch))
        case.check(K.attend(case.q, case.k, case.v, case.batch, 0.25, 9), window=9)
    assert len(launches) == (6 if backend == "triton" else 0)       # one launch for a layer
    half = K.attend(case.q, case.k, case.v, case.batch, 0.125)
    assert_close(half, K.attend(case.q / 2, case.k, case.v, case.batch), rtol=0, atol=0)
    with pytest.raises(AssertionError): case.check(half)

def test_strides_of_queries_and_caches(backend):
    "Queries cut from a fused projection or transposed; caches inside larger tensors, heads before slots: read as they are"
    case = KernelCase([(1, 20), (9, 30), (1, 7)], 8, 6, 2, 16)
    attend = lambda q, k, v: case.check(K.attend(q, k, v, case.batch))
    fused = torch.cat([case.q, torch.full_like(case.q, torch.nan)], 1)
    attend(fused[:, :6], case.k, case.v)
    attend(case.q.transpose(0, 1).contiguous().transpose(0, 1), case.k, case.v)
    attend(case.q.transpose(1, 2).contiguous().transpose(1, 2), case.k, case.v)
    pool = torch.stack([case.k, case.v], 1)                                   # [num_blocks, 2, ...]
    pool = torch.nn.functional.pad(pool, (0, 0, 0, 0, 0, 0, 0, 0, 1, 1), value=torch.nan)[1:-1]
    attend(case.q, pool[:, 0], pool[:, 1])
    heads = torch.stack([case.k, case.v]).transpose(2, 3).contiguous().transpose(2, 3)
    attend(case.q, *heads)

def test_index_tensors_with_strides_and_of_mixed_types():
    case = KernelCase([(1, 20), (9, 30), (1, 7)], 8, 6, 2, 16, seed=1)
    b = case.batch
    assert not b.block_tables.is_contiguous()
    doubled = torch.stack([b.context_lens, b.context_lens + 1], -1).long()[:, 0]
    starts = torch.stack([b.query_starts, b.query_starts + 1], -1)[:, 0]
    case.batch = PagedBatch(b.block_tables.T.contiguous().T, doubled, starts, 8)
    case.check()
    case.batch = PagedBatch(b.block_tables.long()[:, ::1], b.context_lens, b.query_starts.long(), 8)
    case.check(splits=2)

def test_caches_must_be_laid_out_alike(triton_backend):
    case = KernelCase([(1, 20)], 8)
    other = case.v.transpose(1, 2).contiguous().transpose(1, 2)
    error(lambda: K.attend(case.q, case.k, other, case.batch), "equal strides", case.k.stride(), other.stride())
    last = torch.stack([case.k, case.v], -1)
    error(lambda: K.attend(case.q, last[..., 0], last[..., 1], case.batch), "last dimension")

def test_shapes_are_checked(backend):
    case = KernelCase([(1, 20)], 8)
    error(lambda: K.attend(case.q[:, :3], case.k, case.v, case.batch), "num_heads (3)", "num_kv_heads (2)")
    error(lambda: K.attend(case.q, case.k, case.v, case.batch, window=0), "window", 0)
    error(lambda: K.attend(case.q, case.k[:, :4], case.v[:, :4], case.batch), "block_size", 8, 4)
    error(lambda: K.attend(torch.cat([case.q] * 2), case.k, case.v, case.batch), "2 rows", 1)

@pytest.mark.parametrize("lens", [[], [(0, 0)], [(0, 9), (0, 1)]], ids=str)
def test_nothing_to_do(lens, backend):
    tables = torch.zeros(len(lens), 2, dtype=torch.int32)
    batch = PagedBatch(*(t.to(DEVICE) for t in (tables, torch.tensor([c for _, c in lens], dtype=torch.int32), torch.zeros(len(lens) + 1, dtype=torch.int32))), 8)
    cache = torch.full((2, 8, 2, 16), torch.nan, device=DEVICE)
    assert K.attend(torch.zeros(0, 4, 16, device=DEVICE), cache, cache, batch).shape == (0, 4, 16)

@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_padded_rows_of_a_recorded_decode(dtype):
    "A graph's spare rows: one query, no context, slot -1. They write nothing, read nothing, and give 0"
    case = KernelCase([(1, 40), (1, 1), (1, 9), (1, 1)], 8, 3, 1, 16, dtype)
    want, before = case.dense_over(lambda v: v, None)[[0, 2]], [case.k.clone(), case.v.clone()]
    case.batch.context_lens[torch.tensor([1, 3], device=DEVICE)] = 0
    case.batch.lens = [(i, 1, 40) for i in range(4)]             # what the host assumes when it records
    case.batch.block_tables[1], case.batch.block_tables[3] = -1, -1
    for window in (None, 100):
        for splits in (1, 3):
            out = case.run(window, splits)
            assert not out[[1, 3]].any() and out.isfinite().all()
            assert_close(out[[0, 2]].double().cpu(), want, atol=1e-5, rtol=torch.finfo(dtype).eps * 4)
    nothing = torch.full((4,), -1, device=DEVICE)
    K.triton_write(case.k, case.v, nothing, *torch.randn(2, 4, 1, 16, device=DEVICE))
    for a, b in zip(before, (case.k, case.v)): same(b, a)

def test_inputs_stay_as_they_were():
    case = KernelCase(small(8), 8, 3, 1, 16)
    inputs = (case.q, case.k, case.v, case.batch.block_tables, case.batch.context_lens, case.batch.query_starts)
    before = [t.clone() for t in inputs]
    for splits in (1, 3): case.check(splits=splits)
    for a, b in zip(before, inputs): same(b, a)

def test_the_checks_see():
    "One token fewer, one block number wrong, one head's group wrong: each must show"
    case = KernelCase([(1, 9), (4, 9)], 8, 6, 2, 16, torch.bfloat16)
    b, want = case.batch, case.run()
    for batch in (PagedBatch(b.block_tables, b.context_lens - 1, b.query_starts, 8), PagedBatch(b.block_tables.flip(0), b.context_lens, b.query_starts, 8)):
        with pytest.raises(AssertionError): case.check(K.triton_attend(case.q, case.k, case.v, batch, 0.25))
    with pytest.raises(AssertionError): case.check(K.triton_attend(case.q, case.k.flip(2), case.v.flip(2), b, 0.25))
    with pytest.raises(AssertionError): case.check(want.where(torch.arange(5, device=DEVICE)[:, None, None] > 0, torch.nan))
    with pytest.raises(AssertionError): case.check(want * 1.04)

@pytest.mark.parametrize("group", [3, 7])
def test_programs_in_any_order(group, monkeypatch):
    "A GPU runs them as it likes: no program writes a row of another's, not even one that is overwritten later"
    case, made = KernelCase([(25, 25), (13, 30)], 8, group, 1, 20), K.query_tiles
    case.check()
    monkeypatch.setattr(K, "query_tiles", lambda *a: made(*a).flip(0))
    case.check()

def test_tiles_of_queries_are_made_once():
    case = KernelCase([(5, 9), (0, 3), (1, 4)], 8)
    tiles = K.query_tiles(case.batch, 2)
    assert tiles.tolist() == [[0, 0], [0, 2], [0, 4], [2, 0]] and tiles.dtype == torch.int32
    assert K.query_tiles(case.batch, 2) is tiles and len(K.query_tiles(case.batch, 8)) == 2


# --- the shape of a program, and the split heuristic

@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tile_shapes(dtype):
    for group in (1, 3, 7, 8, 16, 71):
        for dim in (1, 16, 20, 64, 80, 128, 256):
            for decodes in (True, False):
                shape, size = K.tile_shape(group, dim, dtype.itemsize, decodes), dtype.itemsize
                M, keys = shape["TILE_M"], shape["TILE_K"]
                assert M >= max(16, group) and keys >= 16 and M & (M - 1) == keys & (keys - 1) == 0
                assert keys * K.pad(dim) * size <= 2**14 or keys == 16
                assert K.tile_shape(group, dim, size, False)["TILE_M"] >= M

def test_how_many_splits():
    assert K.num_splits(1, 500, 132) == K.num_splits(1, 1023, 132) == 1 and K.num_splits(1, 1024, 132) == 2
    assert K.num_splits(1, 10**6, 132) == 64 and K.num_splits(264, 10**6, 132) == 1 and K.num_splits(263, 10**6, 132) == 2
    for programs in (1, 5, 8, 100, 263, 264, 10**4):
        for longest in (1, 511, 512, 4096, 32768, 10**6):
            n = K.num_splits(programs, longest, 132)
            assert 1 <= n <= 64 and (n == 1 or longest / n >= 512)
            assert n == 1 or programs * (n - 1) < 2 * 132                       # no more than it takes to fill the GPU

def test_a_long_context_is_split(monkeypatch, triton_backend):
    "As the heuristic says, merged by one more launch"
    attends, merges = Launches(monkeypatch, "attend_kernel"), Launches(monkeypatch, "merge_kernel")
    monkeypatch.setattr(K, "num_sms", lambda device: 132)
    case = KernelCase([(1, 1600), (1, 40)], 16, 2, 1, 16)
    case.check(K.attend(case.q, case.k, case.v, case.batch))
    assert len(attends) == len(merges) == 1 and attends.calls[0][0] == (2, 3)
    short = KernelCase([(1, 1000), (1, 40)], 16, 2, 1, 16)
    short.check(K.attend(short.q, short.k, short.v, short.batch))
    assert len(merges) == 1 and attends.calls[1][0] == (2, 1)

def test_merge_is_the_specification():
    "Parts merge as their log-sum-exps (base 2) say; an empty one weighs nothing; all empty gives 0"
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 24, generator=g, dtype=torch.float64) for n, h in ((3, 6), (40, 2), (40, 2)))
    edges = [0, 7, 7, 30, 31, 40]
    outs, lses = zip(*(partial_attention(q * 9, k[a:b], v[a:b]) for a, b in zip(edges, edges[1:])))
    parts, lse = torch.stack(outs).float().to(DEVICE), (torch.stack(lses) * K.LOG2_E).float().to(DEVICE)
    out = torch.full((3, 6, 24), torch.nan, device=DEVICE)
    K.merge(out, parts, lse)
    assert lse.isinf().any() and lse.abs().nan_to_num(posinf=0).max() > 30
    assert_close(out.double().cpu(), partial_attention(q * 9, k, v)[0], atol=2e-5, rtol=2e-5)
    K.merge(out, parts, torch.full_like(lse, -torch.inf))
    assert not out.any()


# --- write

def same(got, want): assert_close(got, want, rtol=0, atol=0, equal_nan=True)

def poisoned(*shape, dtype=torch.float32): return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)

def check_write(k, v, block_size=8, slots=None, dtype=torch.float32, cast=False):
    "Exactly the slots named hold the new tokens; all else is still NaN, a block before and behind the caches too"
    tokens, heads, dim = k.shape
    slots = torch.randperm(7 * block_size)[:tokens] if slots is None else slots
    pools = poisoned(2, 9, block_size, heads, dim, dtype=dtype)
    want = pools.clone()
    for pool, new in zip(want, (k, v)): pool[1:-1].view(-1, heads, dim)[slots] = new.to(dtype)
    K.write_blocks(*pools[:, 1:-1], slots.to(DEVICE), k, v)
    if cast and K.INTERPRETED: return assert_close(pools, want, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)   # it may truncate
    same(pools, want)

@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32, 256])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_write(backend, dtype, block_size):
    for heads, dim in ((1, 16), (3, 80), (2, 5)): check_write(*torch.randn(2, 7, heads, dim, device=DEVICE).to(dtype), block_size, dtype=dtype)

def test_write_from_any_strides(backend):
    "Cut from a fused projection, heads first, head size first, every other token, one token repeated"
    T, H, D = 6, 3, 80
    fused = torch.randn(T, (9 + 2 * H) * D, device=DEVICE)
    k, v = (fused[:, a * D:(a + H) * D].view(T, H, D) for a in (9, 9 + H))
    assert not k.is_contiguous() and k.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    check_write(k, v)
    check_write(k, v.contiguous())
    check_write(k.transpose(0, 1).contiguous().transpose(0, 1), v)
    check_write(k, v.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    check_write(*torch.randn(2, 2 * T, H, D, device=DEVICE)[:, ::2])
    check_write(k[:1].expand(T, -1, -1), v)

def test_write_skips_slot_minus_one():
    slots = torch.tensor([3, -1, 55, -1, 0])
    for block_size in (8, 64):
        pools = poisoned(2, 9, block_size, 3, 80)
        k, v = torch.randn(2, 5, 3, 80, device=DEVICE)
        want = pools.clone()
        for pool, new in zip(want, (k, v)): pool[1:-1].view(-1, 3, 80)[[3, 55, 0]] = new[[0, 2, 4]]
        K.triton_write(*pools[:, 1:-1], slots.to(DEVICE), k, v)
        same(pools, want)

@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("of", FLOATS, ids=str)
def test_write_casts_to_the_cache(backend, of, to):
    check_write(*torch.randn(2, 5, 2, 16, device=DEVICE).to(of), dtype=to, cast=of != to)

def test_write_is_one_launch(triton_backend, monkeypatch):
    launches = Launches(monkeypatch, "write_kernel")
    check_write(*torch.randn(2, 23, 3, 16, device=DEVICE))
    assert len(launches) == 1 and launches.calls[0][0] == (23,)

def test_write_slots_with_strides_and_no_tokens(backend):
    slots = torch.stack([torch.randperm(56)[:5], torch.full((5,), 55)], -1)[:, 0]
    check_write(*torch.randn(2, 5, 2, 16, device=DEVICE), slots=slots)
    check_write(*torch.randn(2, 0, 2, 16, device=DEVICE))

def test_write_refuses_other_shapes(backend):
    caches, slots = poisoned(2, 7, 8, 3, 16), torch.arange(5, device=DEVICE)
    good, bad = torch.zeros(5, 3, 16, device=DEVICE), torch.zeros(5, 2, 16, device=DEVICE)
    error(lambda: K.write_blocks(*caches, slots, bad, good), "k has shape [5, 2, 16]", [5, 3, 16])
    error(lambda: K.write_blocks(*caches, slots, good, good[:4]), "v has shape [4, 3, 16]", [5, 3, 16])
    assert caches.isnan().all()

@pytest.mark.parametrize("layout", ["apart", "interleaved", "heads first"])
def test_write_into_caches_with_strides(backend, layout):
    "Written, or refused; never lost in a copy"
    pool = poisoned(7, 2, 8, 3, 16)
    k_cache, v_cache = {"apart": poisoned(2, 7, 16, 3, 16)[:, :, :8], "interleaved": pool.transpose(0, 1),
                        "heads first": poisoned(2, 7, 3, 8, 16).transpose(2, 3)}[layout]
    slots, k, v = torch.tensor([50, 3, 17], device=DEVICE), *torch.randn(2, 3, 3, 16, device=DEVICE)
    try: K.write_blocks(k_cache, v_cache, slots, k, v)
    except (ValueError, RuntimeError): return
    same(k_cache[slots // 8, slots % 8], k)
    same(v_cache[slots // 8, slots % 8], v)
    assert (~k_cache.isnan()).sum() == (~v_cache.isnan()).sum() == k.numel()


# --- 64-bit addresses

FAR = 2**29         # elements from one block (token, head, split) to the next: number 4 lies beyond 2**31
HALF = 2**31        # a product kept in 32 bits would land this far before the right place: still our memory

class Huge:
    "Address space of which only the touched pages exist; `view` gives strided views far into it, apart from each other"
    def __init__(self, dtype, elements):
        elements += 2**20
        size = (HALF + elements) * dtype.itemsize
        self.next = HALF
        if DEVICE.type == "cuda":
            if torch.cuda.mem_get_info()[0] < size + 2**30: pytest.skip(f"{size} bytes are not free on the GPU")
            self.flat = torch.zeros(HALF + elements, dtype=dtype, device=DEVICE)
        else:
            noreserve = 0x4000
            space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve)
            self.flat = torch.frombuffer(space, dtype=dtype)

    def view(self, shape, stride, fill=None):
        at, self.next = self.next, self.next + 2**16
        view = self.flat.as_strided(shape, stride, at)
        return view if fill is None else view.copy_(fill.to(view))

def without_casts(tmp_path):
    "The module with its casts to 64 bits taken out"
    source = Path(K.__file__).read_text()
    assert source.count(".to(tl.int64)") >= 8
    path = tmp_path / "narrow.py"
    path.write_text(source.replace(".to(tl.int64)", ""))
    spec = importlib.util.spec_from_file_location("pagedlm.narrow", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def far_write(K, layout="blocks"):
    "Blocks, tokens or heads FAR apart; slots in either integer type"
    slots, T, D = torch.tensor([5 * 4 + 3, 0, 4 * 4 + 1, -1, 4 * 4], dtype=torch.int32, device=DEVICE), 5, 16
    H, strides = (6, (64, 16, FAR, 1)) if layout == "heads" else (2, (FAR, 2 * D, D, 1))
    memory = Huge(torch.float16, 6 * FAR)
    caches = [memory.view((6, 4, H, D), strides) for _ in range(2)]
    new = [torch.randn(T, H, D, device=DEVICE).half() for _ in range(2)]
    if layout == "tokens": new = [memory.view((T, H, D), (FAR, D, 1), t) for t in new]
    K.triton_write(*caches, slots, *new)
    there = (slots >= 0).nonzero()[:, 0]
    where = slots[there].long()
    return all(torch.equal(c[where // 4, where % 4], t[there]) for c, t in zip(caches, new))

def far_attend(K, layout="blocks", splits=1):
    heads = 6 if layout == "heads" else 1
    case = KernelCase([(1, 17), (4, 9), (1, 3)], 4, heads, heads, 16, torch.float16, seed=2, index=torch.int32)
    strides = (case.B * 16, 16, FAR, 1) if layout == "heads" else (FAR, heads * 16, 16, 1)
    assert heads == 6 or len(case.batch.block_tables[0, :5].unique()) == 5
    memory = Huge(torch.float16, case.shape[0] * FAR if heads == 1 else 6 * FAR)
    case.k, case.v = (memory.view(c.shape, strides, c) for c in (case.k, case.v))
    if layout == "tokens": case.q = memory.view(case.q.shape, (FAR, 16, 1), case.q)
    got = K.triton_attend(case.q, case.k, case.v, case.batch, 0.25, None, splits)
    try: case.check(got)
    except AssertionError: return False
    return True

def far_merge(K, layout):
    parts, lse = torch.randn(6, 6, 1, 16, device=DEVICE), torch.randn(6, 6, 1, device=DEVICE)
    want, memory = torch.empty(6, 1, 16, device=DEVICE), Huge(torch.float32, 6 * FAR)
    K.merge(want, parts, lse)
    out = memory.view(want.shape, (FAR, 16, 1) if layout == "tokens" else (16, 16, 1))
    K.merge(out, memory.view(parts.shape, (16, FAR, 16, 1) if layout == "tokens" else (FAR, 16, 16, 1), parts), lse)
    return torch.equal(out, want)

def far_copy(K, monkeypatch):
    "Three planes of six blocks; the pool's own shape would be terabytes, so `planes` gives the view"
    flat = Huge(torch.int8, 9 * FAR).view((3, 6, 100), (2 * FAR + 4096, FAR, 1), torch.randint(-99, 99, (3, 6, 100)))
    want, pairs = flat.clone(), [(0, 5), (5, 4), (4, 1), (2, 3)]
    want[:, [5, 4, 1, 3]] = flat[:, [0, 5, 4, 2]]
    monkeypatch.setattr(K, "planes", lambda data: flat)
    K.triton_copy(torch.empty(0, device=DEVICE), pairs)
    return torch.equal(flat, want)

def far_pack(K, monkeypatch):
    memory, blocks = Huge(torch.int8, 9 * FAR), torch.tensor([5, 0, 4], device=DEVICE)
    pool = memory.view((3, 6, 100), (2 * FAR + 4096, FAR, 1), torch.randint(-99, 99, (3, 6, 100)))
    staged = memory.view((3, 3, 100), (2 * FAR + 2048, 100, 1))
    views = {1: pool, 2: staged}
    monkeypatch.setattr(K, "planes", lambda data: views[data.numel()])
    K.launch_pack(torch.empty(1), torch.empty(2), blocks, unpack=False)
    if not torch.equal(staged, pool[:, blocks]): return False
    before = staged.clone()
    pool.zero_()
    K.launch_pack(torch.empty(1), torch.empty(2), blocks, unpack=True)
    return torch.equal(pool[:, blocks], before) and not pool[:, 1:4].any()

def far_staged(K):
    "Place i of the staging buffer, FAR elements a block: the first 64 of each are moved"
    memory, blocks = Huge(torch.int8, 6 * FAR), torch.arange(6, device=DEVICE).flip(0)
    pool, staged = torch.randint(-99, 99, (6, 64), device=DEVICE).to(torch.int8), memory.view((6, 64), (FAR, 1))
    K.pack_kernel[(6, 1, 1)](pool, staged, blocks, 0, 64, 0, FAR, TILE=64, UNPACK=False)
    return torch.equal(staged, pool.flip(0))

FAR_CHECKS = {
    "write blocks": lambda K, m: far_write(K), "write tokens": lambda K, m: far_write(K, "tokens"), "write heads": lambda K, m: far_write(K, "heads"),
    "attend blocks": lambda K, m: far_attend(K), "attend tokens": lambda K, m: far_attend(K, "tokens"),
    "attend heads": lambda K, m: far_attend(K, "heads"), "attend splits": lambda K, m: far_attend(K, splits=2),
    "merge splits": lambda K, m: far_merge(K, "splits"), "merge tokens": lambda K, m: far_merge(K, "tokens"),
    "copy": far_copy, "pack": far_pack, "pack staged": lambda K, m: far_staged(K)}

@pytest.mark.parametrize("check", FAR_CHECKS)
def test_addresses_beyond_32_bits(check, monkeypatch): assert FAR_CHECKS[check](K, monkeypatch)

@pytest.mark.skipif(not K.INTERPRETED, reason="wrong addresses, on purpose")
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("check", FAR_CHECKS)
def test_a_32_bit_product_would_be_seen(check, monkeypatch, tmp_path): assert not FAR_CHECKS[check](without_casts(tmp_path), monkeypatch)

if K.INTERPRETED:
    @triton.jit
    def narrow_offsets(table, at, key, held, cache_block, cache_slot, BLOCK_SIZE: tl.constexpr, TILE_K: tl.constexpr):
        if BLOCK_SIZE >= TILE_K: block = tl.load(table + at // BLOCK_SIZE)
        else: block = tl.load(table + key // BLOCK_SIZE, mask=held, other=0)
        return block * cache_block + (key % BLOCK_SIZE) * cache_slot

    @pytest.mark.filterwarnings("ignore:overflow")
    def test_the_indirection_alone_in_32_bits_would_be_seen(monkeypatch):
        monkeypatch.setattr(K, "key_offsets", narrow_offsets)
        assert not far_attend(K)
        KernelCase([(1, 17), (4, 9)], 4).check()         # while ordinary strides do not show it


# --- copy

mappings = st.dictionaries(st.integers(0, 9), st.integers(0, 9), min_size=1).flatmap(
    lambda source: st.permutations([(src, dst) for dst, src in source.items()]))

def check_copy(pairs, shape=(2, 2, 10, 2, 1, 3), dtype=torch.float32):
    data = torch.randn(shape, device=DEVICE).to(dtype)
    want = data.clone()
    for src, dst in pairs: want[:, :, dst] = data[:, :, src]
    K.copy_blocks(data, pairs)
    same(data, want)

@pytest.mark.parametrize("name", K.BACKENDS)
@examples(40)
@given(pairs=mappings)
def test_copies_are_simultaneous(name, pairs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDLM_BACKEND", name)
        check_copy(pairs, (2, 1, 10, 2, 1, 3))

TANGLES = [[(1, 2), (2, 3)], [(2, 3), (1, 2)], [(1, 2), (2, 1)], [(0, 1), (1, 2), (2, 0), (0, 4), (4, 5), (5, 9)], [(3, 3)], [(3, 3), (3, 4), (4, 5)],
           [(1, 3), (1, 2), (2, 1)], [(1, 2), (1, 3), (2, 1), (3, 4), (2, 5), (0, 6), (6, 7), (0, 8)]]

@pytest.mark.parametrize("pairs", TANGLES, ids=str)
def test_copies_of_every_kind(pairs, backend):
    "Chains, trees, cycles, cycles with tails, self copies; blocks of more elements than a program carries"
    check_copy(pairs)
    check_copy(pairs[::-1], (2, 1, 10, 8, 3, 43), torch.bfloat16)        # 1,032 elements: a chunk and 8 more

def follow(pairs):
    "What each chain reads from others and writes, after checking its own order"
    chains = K.copy_chains(pairs)
    assert sorted(p for c in chains for p in c) == sorted(pairs)             # each pair once
    for chain in chains:
        written = set()
        for src, dst in chain[:-1]:          # the last pair's source is read before all others
            assert src == dst or src not in written, f"{src} is written before it is read in {chain} of {chains}"
            written.add(dst)
    return chains

def check_apart(chains):
    "No chain writes what another reads or writes: their programs run in no order (a self copy changes nothing)"
    for chain in chains:
        written = {dst for src, dst in chain if src != dst}
        for other in chains:
            if other is chain: continue
            touched = {src for src, _ in other} | {dst for _, dst in other}
            assert not written & touched, f"{chain} writes what {other} touches"

@examples(300)
@given(mappings)
def test_chains_hold_each_pair_once_and_read_before_they_write(pairs): follow(pairs)

@examples(300)
@given(mappings)
def test_chains_may_run_side_by_side(pairs): check_apart(follow(pairs))

@pytest.mark.parametrize("pairs", TANGLES, ids=str)
def test_chains_of_every_kind(pairs):
    for order in (pairs, pairs[::-1]): check_apart(follow(order))

@examples(300)
@given(mappings, st.integers(0, 2**32))
def test_chains_in_any_order_of_time(pairs, seed):
    "Interleave the chains' steps as a GPU might, on a list of blocks"
    random = Random(seed)
    memory, want = list(range(10)), list(range(10))
    for src, dst in pairs: want[dst] = src
    def steps(chain):
        held = memory[chain[-1][0]]
        yield
        for src, dst in chain[:-1]:
            memory[dst] = memory[src]
            yield
        memory[chain[-1][1]] = held
    running = [steps(c) for c in K.copy_chains(pairs)]
    while running:
        one = random.choice(running)
        if next(one, "done") == "done": running.remove(one)
    assert memory == want, K.copy_chains(pairs)

def test_copy_is_one_launch(triton_backend, monkeypatch):
    launches = Launches(monkeypatch, "copy_kernel")
    check_copy([(0, 1), (1, 2), (5, 6), (5, 7), (8, 9), (9, 8)], (2, 3, 10, 8, 3, 43))
    assert len(launches) == 1 and launches.calls[0][0][1:] == (6, 2)         # planes, chunks
    check_copy([])
    assert len(launches) == 1

@pytest.mark.parametrize("pairs, words", [([(0, 1), (2, 1)], ("block 1", "two copies")), ([(0, 1), (0, 1)], ("block 1", "two copies")),
                                          ([(0, 1), (10, 2)], ("block 10", "0 to 9")), ([(0, 1), (3, 10)], ("block 10", "0 to 9")),
                                          ([(0, 1), (-1, 2)], ("block -1",)), ([(0, 1), (2, -1)], ("block -1",))], ids=str)
def test_copies_refused_change_nothing(pairs, words, backend):
    data = torch.randn(2, 2, 10, 4, device=DEVICE)
    before = data.clone()
    error(lambda: K.copy_blocks(data, iter(pairs)), *words)
    same(data, before)

def test_copy_takes_an_iterator_and_a_contiguous_pool(backend):
    data = torch.randn(2, 2, 10, 4, device=DEVICE)
    source = data[:, :, 3].clone()
    K.copy_blocks(data, iter([(3, 7)]))
    same(data[:, :, 7], source)
    if backend == "triton": error(lambda: K.copy_blocks(data[:, :, ::2], [(0, 1)]), "contiguous")


# --- pack, unpack, swap

SHAPE = (2, 3, 10, 8, 3, 43)      # 1,032 elements a block and plane: a chunk and 8 more

def numbered(*shape): return torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=DEVICE).view(shape)

@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
@pytest.mark.parametrize("blocks", [[3], [9, 0, 4], list(range(10)), []], ids=str)
def test_pack_and_back(blocks, dtype, backend):
    data = (torch.randn(SHAPE, device=DEVICE) * 40).to(dtype)
    index, before = torch.tensor(blocks, dtype=torch.int64, device=DEVICE), data.clone()
    staged = K.pack_blocks(data, index)
    same(staged, before[:, :, index])
    same(data, before)
    K.unpack_blocks(data, staged * 0 + 1, index)
    want = before.index_fill(2, index, 1)
    same(data, want)

def test_pack_is_one_launch_and_takes_strided_numbers(triton_backend, monkeypatch):
    launches, data = Launches(monkeypatch, "pack_kernel"), numbered(*SHAPE)
    index = torch.tensor([[7, 0], [2, 1], [5, 2]], device=DEVICE)[:, 0]
    same(K.pack_blocks(data, index), data[:, :, [7, 2, 5]])
    K.unpack_blocks(data, torch.zeros(2, 3, 3, 8, 3, 43, device=DEVICE), index)
    assert not data[:, :, [7, 2, 5]].any() and len(launches) == 2 and launches.calls[0][0] == (3, 6, 2)

@pytest.fixture
def swap(backend):
    "Pools of 10 device blocks and 6 host blocks; the device's are numbered, the host's NaN"
    return K.Swapper(numbered(*SHAPE), torch.full((2, 3, 6, 8, 3, 43), torch.nan))

BLOCK_BYTES = 2 * 3 * 8 * 3 * 43 * 4

def test_swap_out_and_in(swap):
    before = swap.device.clone()
    swap.swap_out([(4, 0), (9, 5), (0, 2)])
    swap.settle()
    same(swap.host[:, :, [0, 5, 2]], before[:, :, [4, 9, 0]].cpu())
    assert swap.host[:, :, [1, 3, 4]].isnan().all()
    same(swap.device, before)
    swap.swap_in(iter([(5, 1), (2, 8)]))
    want = before.clone()
    want[:, :, [1, 8]] = before[:, :, [9, 0]]
    same(swap.device, want)
    assert (swap.bytes_out, swap.bytes_in, swap.transfers) == (3 * BLOCK_BYTES, 2 * BLOCK_BYTES, 2)

def test_nothing_to_swap(swap):
    swap.swap_out([]), swap.swap_in([]), swap.settle()
    assert (swap.bytes_out, swap.bytes_in, swap.transfers) == (0, 0, 0)

def test_the_device_block_may_be_overwritten_at_once(swap):
    before = swap.device.clone()
    swap.swap_out([(4, 0), (5, 1)])
    swap.device[:, :, 4:6] = -1
    swap.swap_out([(4, 2)])
    swap.device.zero_()
    swap.settle()
    same(swap.host[:, :, :2], before[:, :, 4:6].cpu())
    assert (swap.host[:, :, 2] == -1).all()

def test_one_transfer_at_most_is_landing(swap):
    "Each swap-out settles the one before, so what is pinned does not grow; a swap-in leaves none."
    before = swap.device.clone()
    for block in range(6):
        swap.swap_out([(block, block)])
        assert len(swap.landing) == 1
        for host in range(block): same(swap.host[:, :, host], before[:, :, host].cpu())    # arrived
        swap.device[:, :, block] = torch.nan
    swap.swap_out([])
    assert len(swap.landing) == 1
    swap.swap_in([(5, 9)])
    assert swap.landing == []
    same(swap.device[:, :, 9], before[:, :, 5])
    same(swap.host, before[:, :, :6].cpu())

def test_swap_in_right_after_the_swap_out(swap):
    before = swap.device.clone()
    swap.swap_out([(4, 3)])
    swap.device[:, :, 4] = torch.nan
    swap.swap_in([(3, 7)])
    same(swap.device[:, :, 7], before[:, :, 4])

def test_a_host_block_is_used_again(swap):
    "Twice on its way without a wait: the later one stays. And after a swap-in that read the earlier one"
    before = swap.device.clone()
    swap.swap_out([(1, 0)]), swap.swap_out([(2, 0)])
    swap.swap_in([(0, 5)])
    swap.swap_out([(3, 0)])
    swap.settle()
    same(swap.device[:, :, 5], before[:, :, 2])
    same(swap.host[:, :, 0], before[:, :, 3].cpu())
    assert swap.transfers == 4 and (swap.bytes_out, swap.bytes_in) == (3 * BLOCK_BYTES, BLOCK_BYTES)

def test_swapping_a_cycle_through_the_host(swap):
    "Exchange two device blocks"
    before = swap.device.clone()
    swap.swap_out([(1, 0), (2, 1)])
    swap.swap_in([(0, 2), (1, 1)])
    same(swap.device[:, :, [1, 2]], before[:, :, [2, 1]])

def test_random_swaps(swap):
    "Against two dictionaries"
    g = torch.Generator().manual_seed(0)
    device, host = list(range(10)), [None] * 6
    origin = swap.device.clone()
    for _ in range(25):
        out, n = int(torch.randint(2, (1,), generator=g)), int(torch.randint(1, 4, (1,), generator=g))
        d, h = (torch.randperm(k, generator=g)[:n].tolist() for k in (10, 6))
        if out:
            swap.swap_out(zip(d, h))
            for a, b in zip(d, h): host[b] = device[a]
        else:
            pairs = [(b, a) for a, b in zip(d, h) if host[b] is not None]
            swap.swap_in(pairs)
            for b, a in pairs: device[a] = host[b]
        same(swap.device, origin[:, :, device])
    swap.settle()
    for b, a in enumerate(host):
        if a is not None: same(swap.host[:, :, b], origin[:, :, a].cpu())

@pytest.mark.parametrize("call, pairs, words", [
    ("swap_out", [(0, 1), (10, 2)], ("block 10", "0 to 9")), ("swap_out", [(0, 1), (1, 6)], ("block 6", "0 to 5")),
    ("swap_out", [(0, 1), (2, 1)], ("block 1", "two")), ("swap_out", [(-1, 1)], ("block -1",)),
    ("swap_in", [(0, 1), (6, 2)], ("block 6", "0 to 5")), ("swap_in", [(0, 1), (1, 10)], ("block 10", "0 to 9")),
    ("swap_in", [(0, 1), (2, 1)], ("block 1", "two")), ("swap_in", [(0, -1)], ("block -1",))], ids=str)
def test_swaps_refused_change_nothing(swap, call, pairs, words):
    device, host = swap.device.clone(), swap.host.clone()
    error(lambda: getattr(swap, call)(pairs), *words)
    swap.settle()
    same(swap.device, device), same(swap.host, host)
    assert (swap.bytes_out, swap.bytes_in, swap.transfers) == (0, 0, 0)


# --- dispatch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

def test_without_a_wish_the_device_decides(monkeypatch):
    monkeypatch.delenv("PAGEDLM_BACKEND", raising=False)
    assert K.pick_backend(CPU) == "torch"
    monkeypatch.setenv("PAGEDLM_BACKEND", "")
    assert K.pick_backend(CPU) == "torch"
    for problem, picked in ((None, "triton"), ("it is too old", "torch")):
        monkeypatch.setattr(K, "triton_problem", lambda device: problem)
        assert K.pick_backend(CUDA) == picked and K.pick_backend(CPU) == "torch"

def test_either_can_be_forced(monkeypatch):
    for name in K.BACKENDS:
        monkeypatch.setenv("PAGEDLM_BACKEND", name)
        assert K.pick_backend(DEVICE) == name

@pytest.mark.parametrize("name", ["cuda", "Triton", "torch "])
def test_an_unknown_backend_is_refused(monkeypatch, name):
    monkeypatch.setenv("PAGEDLM_BACKEND", name)
    error(lambda: K.pick_backend(CPU), "PAGEDLM_BACKEND", repr(name), "triton", "torch")
    data = torch.zeros(2, 1, 4, 2)
    error(lambda: K.copy_blocks(data, [(0, 1)]), "PAGEDLM_BACKEND")

def test_an_old_gpu_falls_back_or_says_so(monkeypatch):
    monkeypatch.setattr(K, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.delenv("PAGEDLM_BACKEND", raising=False)
    assert K.pick_backend(CUDA) == "torch"
    monkeypatch.setenv("PAGEDLM_BACKEND", "triton")
    error(lambda: K.pick_backend(CUDA), "PAGEDLM_BACKEND is 'triton'", "7.5", "8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert K.pick_backend(CUDA) == "triton"

def python(code, **env):
    "Run code in a process of its own; what it printed"
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PAGEDLM_BACKEND")} | env
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return run.stdout

TINY = """
import torch
from pagedlm import kernels as K
from pagedlm.attention import PagedBatch
batch = PagedBatch(torch.tensor([[1]]), torch.tensor([2]), torch.tensor([0, 2]), 4)
k, v = torch.zeros(2, 3, 4, 1, 8)
data = torch.stack([k, v])[:, None]
def refused(call):
    try: call()
    except ValueError as e: print(e)
    else: print("not refused")
def everything():
    K.write_blocks(k, v, batch.slots, *torch.ones(2, 2, 1, 8))
    assert K.attend(torch.ones(2, 2, 8), k, v, batch).eq(1).all()
    K.copy_blocks(data, [(0, 1)]); K.unpack_blocks(data, K.pack_blocks(data, torch.tensor([1])), torch.tensor([0]))
    swap = K.Swapper(data, data.clone()); swap.swap_out([(0, 1)]); swap.swap_in([(1, 0)])
"""

def test_no_interpreter_and_no_gpu():
    code = TINY + "everything(); import os; os.environ['PAGEDLM_BACKEND'] = 'triton'; refused(everything)"
    said = python(code, TRITON_INTERPRET="0")
    assert all(word in said for word in ("PAGEDLM_BACKEND is 'triton'", "'cpu'", "no CUDA device", "TRITON_INTERPRET=1")), said

def test_no_triton():
    code = ("import sys; sys.modules['triton'] = None\n" + TINY
            + "assert K.triton is None; everything(); import os; os.environ['PAGEDLM_BACKEND'] = 'triton'; refused(everything)")
    said = python(code)
    assert "PAGEDLM_BACKEND is 'triton'" in said and "triton is not installed" in said

@pytest.mark.parametrize("size", [0, 3, 48, 512, -16])
def test_block_sizes_that_triton_does_not_take(size, triton_backend, monkeypatch):
    allowed = str((1, 2, 4, 8, 16, 32, 64, 128, 256))
    error(lambda: K.check_kernel_block_size(size), f"block_size is {size};", allowed, "PAGEDLM_BACKEND=torch")
    if size < 1: return
    caches, new = poisoned(2, 2, size, 1, 16), torch.ones(2, 1, 1, 16, device=DEVICE)
    error(lambda: K.write_blocks(*caches, torch.tensor([1], device=DEVICE), *new), f"block_size is {size};", allowed)
    assert caches.isnan().all()
    batch = PagedBatch(*(torch.tensor(t, device=DEVICE) for t in ([[1]], [1], [0, 1])), size)
    error(lambda: K.attend(new[0], *caches, batch), f"block_size is {size};", allowed)
    monkeypatch.setenv("PAGEDLM_BACKEND", "torch")
    K.write_blocks(*caches, torch.tensor([size], device=DEVICE), *new)
    assert_close(K.attend(new[0], *caches, batch), new[0])

def test_block_sizes_that_triton_takes():
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256): assert K.check_kernel_block_size(size) == size


# --- compiled for real targets, in a process without the interpreter

class Recorded:
    "Stands for a kernel and compiles what each launch would run, instead of running it"
    def __init__(self, kernel, target): self.kernel, self.target, self.programs = kernel, target, []

    def __getitem__(self, grid): return self.launch

    def launch(self, *args, num_stages=3, num_warps=4, **constants):
        "Triton's own specialisation: 1 is a constant, multiples of 16 and aligned pointers are known as such"
        signature, constants, attrs = {}, dict(constants), {}
        names = self.kernel.arg_names
        for i, (name, value) in enumerate(zip(names, args)):
            if isinstance(value, torch.Tensor): signature[name] = "*" + POINTERS[value.dtype]
            elif isinstance(value, float): signature[name] = "fp32"
            elif value == 1: signature[name], constants[name] = "constexpr", 1
            else: signature[name] = "i32" if abs(value) < 2**31 else "i64"
            aligned = value.data_ptr() % 16 == 0 if isinstance(value, torch.Tensor) else isinstance(value, int) and value % 16 == 0
            if aligned and name not in constants: attrs[(i,)] = [["tt.divisibility", 16]]
        signature |= {name: "constexpr" for name in names[len(args):]}
        source = triton.compiler.ASTSource(self.kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attrs)
        target = triton.backends.compiler.GPUTarget("cuda", self.target, 32)
        self.programs.append(triton.compile(source, target=target, options=dict(num_warps=num_warps, num_stages=num_stages)))

POINTERS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}

def look(program):
    "What ptxas, cuobjdump and nvdisasm say of one program"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(program.asm["cubin"]), f.flush()
        tool = lambda name, *options: subprocess.run([Path(triton.__file__).parent / "backends/nvidia/bin" / name, *options, f.name],
                                                     capture_output=True, text=True, check=True).stdout
        usage, code = tool("cuobjdump", "-res-usage"), tool("nvdisasm", "-c")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    count = lambda pattern: len(re.findall(pattern, code))
    return dict(cubin=len(program.asm["cubin"]), registers=int(registers), stack=int(stack), shared=program.metadata.shared,
                tf32="tf32" in program.asm["ptx"], spills=count(r"\b(STL|LDL)\b"), wide=count(r"\b(LDG|LDGSTS)\.[\w.]*128"),
                loads=count(r"\b(LDG|LDGSTS)\."), wide_stores=count(r"\bSTG\.[\w.]*128"), stores=count(r"\bSTG\."),
                products=count(r"\b(HMMA|HGMMA)\."))

SHAPES = {torch.float32: (9, 3, 64), torch.float16: (32, 8, 80), torch.bfloat16: (32, 8, 128)}    # heads, KV heads, head size

def compile_all():
    "Each launch that an engine makes, block size 16, as tensors of real shapes would have it compiled"
    report = {}
    def compiled(label, name, target, call):
        kernel = getattr(K, name)
        setattr(K, name, Recorded(kernel, target))
        try: call()
        finally:
            program, = getattr(K, name).programs
            setattr(K, name, kernel)
        report[label] = look(program)
    def attention(dtype, queries, target, label, **options):
        heads, kv_heads, dim = SHAPES[dtype]
        batch = PagedBatch(torch.zeros(4, 64, dtype=torch.int32), torch.full((4,), 500), torch.arange(5) * queries, 16)
        q, cache = torch.zeros(4 * queries, heads, dim, dtype=dtype), torch.zeros(2, 16, kv_heads, dim, dtype=dtype)
        merge, K.merge = K.merge, lambda *a: None
        compiled(label, "attend_kernel", target, lambda: K.triton_attend(q, cache, cache, batch, 0.1, **options))
        K.merge = merge
    for dtype in FLOATS:
        for queries, kind in ((1, "decode"), (64, "prefill")): attention(dtype, queries, 90, f"{kind} {dtype}")
    attention(torch.bfloat16, 1, 90, "split decode", splits=4)
    attention(torch.bfloat16, 64, 80, "prefill on sm_80", window=1024)
    parts = torch.zeros(4, 8, 32, 128)
    compiled("merge", "merge_kernel", 90, lambda: K.merge(parts[0].bfloat16(), parts, parts[..., 0].contiguous()))
    fused, cache = torch.zeros(64, 48, 128, dtype=torch.bfloat16), torch.zeros(2, 16, 8, 128, dtype=torch.bfloat16)
    compiled("write", "write_kernel", 90, lambda: K.triton_write(cache, cache, torch.arange(64), fused[:, 32:40], fused[:, 40:]))
    pool, blocks = torch.zeros(2, 2, 4, 16, 8, 128, dtype=torch.bfloat16), torch.arange(2)
    compiled("copy", "copy_kernel", 90, lambda: K.triton_copy(pool, [(0, 1), (1, 2)]))
    compiled("pack", "pack_kernel", 90, lambda: K.launch_pack(pool, pool[:, :, :2].contiguous(), blocks, unpack=False))
    return report

@pytest.fixture(scope="module")
def compiled():
    pytest.importorskip("triton.backends.nvidia")
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)

ATTENDS = [*(f"{kind} {dtype}" for kind in ("decode", "prefill") for dtype in FLOATS), "split decode", "prefill on sm_80"]

def test_every_kernel_compiles(compiled):
    assert sorted(compiled) == sorted([*ATTENDS, "merge", "write", "copy", "pack"])
    assert all(program["cubin"] > 1000 for program in compiled.values())

def test_float32_products_are_not_tf32(compiled):
    for label, program in compiled.items():
        assert not program["tf32"], label
        tensor_cores = label in ATTENDS and "float32" not in label
        assert (program["products"] > 0) == tensor_cores, label

def test_registers_suffice(compiled):
    "A decode must not spill at all; the widest prefills may keep a few words of a row aside"
    for label, program in compiled.items():
        few = label in ("prefill torch.float32", "prefill on sm_80")
        assert program["stack"] <= (128 if few else 0), (label, program)
        assert few or not program["spills"], (label, program)

def test_shared_memory_fits(compiled):
    "227 KB on sm_90; and 99 KB, what a program may have on sm_86 and sm_89"
    for label, program in compiled.items(): assert program["shared"] <= (99 if "bfloat16" in label or "sm_80" in label else 227) * 1024, label

def test_the_cache_is_read_16_bytes_at_a_time(compiled):
    "All loads but those of table entries, lengths and block numbers: whole copies of the loop's few scalars"
    for label in ATTENDS:
        program = compiled[label]
        assert program["wide"] >= 8 and program["loads"] - program["wide"] <= 12, (label, program)
    for label in ("write", "copy", "pack"): assert compiled[label]["wide"] >= 1 and compiled[label]["wide_stores"] == compiled[label]["stores"], label
    assert compiled["write"]["loads"] == 3 and compiled["pack"]["loads"] == 2      # keys, values, a slot; a block, its number


# --- on a GPU

@pytest.mark.cuda
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_accuracy_on_the_device(dtype, dim):
    "As the grid, at lengths that the interpreter has no time for: half types multiply on tensor cores here"
    assert DEVICE.type == "cuda", "TRITON_INTERPRET is set: nothing ran on the GPU"
    for group, B in ((1, 16), (4, 32), (7, 8)):
        for hot in (False, True):
            KernelCase([(1, 3000), (70, 700), (300, 300), (1, 17), (64, 1000)], B, 2 * group, 2, dim, dtype, hot=hot).check(hot=hot)
            for splits in (None, 1, 5): KernelCase([(1, 3000), (1, 1), (1, 700)], B, 2 * group, 2, dim, dtype, hot=hot).check(splits=splits, hot=hot)
            KernelCase([(1, 3000), (100, 700)], B, 2 * group, 2, dim, dtype, hot=hot).check(window=200, hot=hot)

@pytest.mark.cuda
def test_swaps_overlap_other_work():
    "Blocks are overwritten, and read again, while their transfers may still be on their way"
    data = torch.randn(2, 8, 64, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    swap, before = K.Swapper(data, torch.zeros(2, 8, 64, 16, 8, 128, dtype=torch.bfloat16)), data.clone()
    for first in range(0, 64, 8):
        swap.swap_out([(b, 63 - b) for b in range(first, first + 8)])
        data[:, :, first:first + 8] = torch.nan
    swap.swap_in([(63 - b, b) for b in range(32)])
    same(data[:, :, :32], before[:, :, :32])
    assert data[:, :, 32:].isnan().all()
    swap.swap_in([(63 - b, b) for b in range(32, 64)])
    same(data, before)
    assert swap.transfers == 10 and swap.bytes_out == swap.bytes_in == data.nbytes

@pytest.mark.cuda
def test_copies_on_the_device():
    "Programs run in any order here: many planes and chunks, tangled mappings, again and again"
    for pairs in TANGLES:
        for _ in range(5): check_copy(pairs, (2, 16, 10, 16, 8, 128), torch.bfloat16)


if __name__ == "__main__": print(json.dumps(compile_all()))


@pytest.mark.parametrize("host", [(2, 1, 4, 4), (2, 2, 4, 3), (1, 2, 4, 4)])
def test_pools_that_are_not_alike_are_refused(host):
    with pytest.raises(ValueError, match="alike"): K.Swapper(torch.zeros(2, 2, 6, 4), torch.zeros(*host))
    with pytest.raises(ValueError, match="alike"): K.Swapper(torch.zeros(2, 2, 6, 4), torch.zeros(2, 2, 4, 4, dtype=torch.half))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_scale_that_is_none_is_refused(monkeypatch, backend, scale):
    monkeypatch.setenv("PAGEDLM_BACKEND", backend)
    batch = PagedBatch(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1]), torch.tensor([0, 1]), 4)
    cache = torch.zeros(1, 4, 1, 16)
    with pytest.raises(ValueError, match="scale"): K.attend(torch.zeros(1, 1, 16), cache, cache, batch, scale)
    with pytest.raises(ValueError, match="window"): K.attend(torch.zeros(1, 1, 16), cache, cache, batch, None, 1.5)
