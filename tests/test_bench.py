"The benchmarks of the kernels and of the scheduler: records, counts, clocks, checks, and what they do without a GPU or a peer."
import collections
import gc
import json
import subprocess
import sys
import types

import pytest
import torch

from pagedlm import bench
from pagedlm.attention import paged_attention
from pagedlm.bench import (
    FIGURE_18A, FIGURE_19A, TOLERANCE, Case, Rig, against, attention, attention_bytes,
    attention_cases, attention_flops, attempt, block_copy, block_write, by_events, decode, exact_attention, jobs,
    kernel_line, kernel_records, make_paged, model_shape, outcome, pack, peer_calls, recompute, repage, roof,
    sdpa_calls, spread, swap, take_times)
from pagedlm.cli import main
from pagedlm.kernels import BLOCK_SIZES, INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
SHAPE = dict(num_heads=4, num_kv_heads=2, head_dim=16, block_size=8)


@pytest.fixture(scope="module")
def rig():
    return Rig("cpu", "float32", repeat=2)


@pytest.fixture(scope="module")
def records():
    return list(kernel_records("cpu", repeat=1))


# --- records

def check_record(r):
    "What every record of a run without a GPU must say, and must not."
    assert r["bench"] == "kernels" and r["device"] == "cpu" and r["gpu"] is None and r["tiny"] is True
    assert r["error"] is None and 0 <= r["max_abs_error"] <= TOLERANCE[getattr(torch, r["dtype"])]
    assert r["backend"] in ("triton", "torch") and r["interpreted"] == (r["backend"] == "triton")
    assert ("us" in r) != r["interpreted"], "an interpreted kernel has no time, and all else has one"
    if "us" in r: assert r["us_quartiles"][0] <= r["us"] <= r["us_quartiles"][1] and r["us"] > 0
    assert "share_of_copy" not in r and "predicted_us" not in r       # no roof is claimed for a CPU
    assert {"pagedlm", "torch", "triton", "cuda", "flash-attn", "flashinfer-python", "vllm"} == set(r["versions"])
    json.dumps(r, allow_nan=False)


def test_records_of_a_machine_without_a_gpu(records):
    for r in records: check_record(r)
    assert records[0]["case"] == "copy"
    seen = {(r["case"], r["backend"]) for r in records}
    both = {"decode", "decode split", "prefill", "mixed", "figure 18a", "block write", "block copy", "pack"}
    paths = ("torch", "triton") if INTERPRETED else ("torch",)
    assert seen == {(c, p) for c in both for p in paths} | {(c, "torch") for c in ("copy", "swap", "recompute")}
    for case in ("swap", "recompute"):
        assert [r["block_size"] for r in records if r["case"] == case] == [1, 2, 4, 8, 16, 32]


def test_attention_records_name_the_best_contiguous_backend(records):
    for r in (r for r in records if "sdpa" in r):
        if r["case"] == "mixed":      # unequal lengths would need padding
            assert r["sdpa"] is None and not any(p.startswith("sdpa") for p in r["peers"])
            continue
        timed = {n: p["us"] for n, p in r["peers"].items() if n.startswith("sdpa") and isinstance(p, dict)}
        best = min(timed, key=timed.get)
        assert r["sdpa"]["backend"] == best and r["sdpa"]["ratio"] == pytest.approx(r["us"] / timed[best], abs=1e-3)
        assert "No viable backend" in r["peers"]["sdpa cudnn"]      # said, not raised
        assert {"sdpa flash", "sdpa math"} <= set(timed)


@pytest.mark.skipif(any(m in sys.modules for m in ("flash_attn", "vllm", "flashinfer")), reason="a peer is here")
def test_absent_peers_are_null(records):
    for r in (r for r in records if "sdpa" in r):
        assert [r["peers"][name] for name in ("flash_attn", "vllm", "flashinfer")] == [None] * 3


def test_the_paper_stands_beside_figure_18a_and_19a(records):
    assert {f"{100 * (a / b - 1):.0f}" for a, b in FIGURE_18A.values()} == {"44", "25", "35", "26", "19", "21"}
    tiny = [r for r in records if r["case"] == "figure 18a" and not r["interpreted"]]
    assert tiny[0]["paper"] is None and tiny[0]["overhead"] == pytest.approx(tiny[0]["sdpa"]["ratio"] - 1, abs=1e-3)
    found = bench.figure_18a(decode(8, 64, "figure 18a", **bench.OPT_13B), {"sdpa": {"ratio": 1.1}})
    assert found["overhead"] == 0.1 and found["paper"] == {"paged_us": 31.5, "contiguous_us": 21.9, "overhead": 0.4384}
    assert all(len(ms) == len(BLOCK_SIZES) for ms in FIGURE_19A.values())
    assert bench.paper_19a(16, 256, "swap") == {"paper": {"ms": 40.1}} and bench.paper_19a(16, 32, "swap") == {"paper": None}


def test_a_line_for_each_record(records):
    lines = [kernel_line(r) for r in records]
    assert all(len(line.splitlines()) == 1 and "off by " in line for line in lines)
    assert sum("no time" in line for line in lines) == sum(r["interpreted"] for r in records)
    assert "FAILED: ValueError: why" in kernel_line({"case": "pack", "backend": "torch", "error": "ValueError: why"})


# --- counts

def test_bytes_and_operations_equal_hand_counts():
    case = decode(64, 1024)
    assert attention_bytes(case, 2) == 268_435_456 + 1_048_576 + 16_384
    assert attention_flops(case) == 64 * 1024 * 32 * 128 * 4
    # 3 queries on 5 keys see 3, 4 and 5 of them; 1 on 4 sees 4; blocks of 2: 3 and 2
    case = Case("mixed", ((3, 5), (1, 4)), num_heads=2, num_kv_heads=1, head_dim=8, block_size=2)
    assert attention_bytes(case, 4) == (2 * 9 * 1 + 2 * 4 * 2) * 8 * 4 + 4 * 5
    assert attention_flops(case) == 4 * 2 * 8 * (3 + 4 + 5 + 4)


def test_bytes_and_transfers_of_moves(rig):
    row = 2 * 16 * 4                                                    # a token of a layer's keys or values: 2 heads of 16
    assert block_write(rig, "torch", 8)["bytes"] == 8 * (2 * 2 * row + 8)      # k and v, read and written; slots
    made = block_copy(rig, "torch", 3)
    assert made["loop_copies"] == 2 * 2 * 3 and made["bytes"] == 2 * 3 * (2 * 2 * 16 * row)
    assert pack(rig, "torch", 3)["bytes"] == 2 * 3 * (2 * 2 * 16 * row)
    for size in (1, 4, 32):
        made = swap(rig, model_shape("tiny"), size, 32)
        assert made["bytes"] == 2 * 32 * 2 * 2 * row                    # out and in, 32 tokens, K and V, two layers
        assert made["packed_transfers"] == 2 and made["loop_transfers"] == 2 * (2 * 2 * (32 // size))


def test_the_loops_count_what_they_copy():
    data, host = torch.randn(2, 3, 6, 2, 1, 4), torch.zeros(2, 3, 6, 2, 1, 4)
    assert bench.loop_copy(data.clone(), [(0, 1), (2, 3)]) == 2 * 3 * 2
    assert bench.loop_transfer(data, host, [(5, 0), (2, 4)]) == 2 * 3 * 2
    assert torch.equal(host[:, :, [0, 4]], data[:, :, [5, 2]]) and not host[:, :, [1, 2, 3, 5]].any()


def test_shapes_of_a_gpu_run():
    cases = attention_cases(tiny=False)
    decodes = {(len(c.lens), c.lens[0][1], c.block_size, c.num_heads) for c in cases if c.name == "decode"}
    lens = (1024, 2048, 4096, 8192)
    assert decodes == {(64, n, b, 32) for n in lens for b in (16, 32, 128)} | {(64, n, 16, 9) for n in lens}
    assert {(len(c.lens), c.lens[0][1]) for c in cases if c.name == "decode split"} == {
        (m, n) for m in (1, 4, 16) for n in (8192, 32768)}
    assert [(len(c.lens), c.lens[0][1]) for c in cases if c.name == "figure 18a"] == list(FIGURE_18A)
    for c in cases: assert all(1 <= q <= n for q, n in c.lens) and c.num_heads % c.num_kv_heads == 0
    c = model_shape("llama-13b")
    assert 2 * c.num_layers * c.num_kv_heads * c.head_dim * 2 == 819_200         # a token of OPT-13B's


# --- the data and the checks

@pytest.mark.parametrize("case", attention_cases(tiny=True), ids=lambda c: c.name)
def test_every_candidate_computes_the_same(rig, case):
    d = make_paged(case, rig)
    exact = exact_attention(d)
    calls = {"torch": bench.our_call("torch", d)} | sdpa_calls(d)
    errors = {name: outcome(f, exact, rig.dtype) for name, f in calls.items()}
    assert all(isinstance(e, float) for n, e in errors.items() if n in ("torch", "sdpa flash", "sdpa math", "sdpa math folded"))
    if case.num_heads > case.num_kv_heads and case.lens[0][0] == 1: assert "sdpa math folded" in errors
    other = repage(d, 4)
    assert other.case.block_size == 4 and other.caches.isfinite().all()
    torch.testing.assert_close(paged_attention(other.q, *other.caches, other.batch), exact.float(), atol=2e-5, rtol=0)


def test_unused_slots_are_nan_and_tables_are_shuffled(rig):
    d = make_paged(decode(3, 41, **SHAPE), rig)
    empty = d.caches.isnan().all((3, 4))
    assert empty.sum() == 2 * 3 * (6 * 8 - 41) and torch.equal(empty, d.caches.isnan().any(4).any(3))
    flat = d.batch.block_tables.flatten().tolist()
    assert sorted(flat) == list(range(18)) and flat != list(range(18))


def test_a_wrong_kernel_is_refused_and_not_timed(rig, monkeypatch):
    def wrong(q, *args): return paged_attention(q, *args) * 1.001
    monkeypatch.setitem(bench.OURS, "torch", wrong)
    with pytest.raises(RuntimeError, match="off the reference by"): attention(rig, decode(3, 41, **SHAPE), "torch")
    monkeypatch.setitem(bench.OURS, "torch", lambda q, *args: torch.full_like(q, torch.nan))
    with pytest.raises(RuntimeError, match="off the reference by nan"): attention(rig, decode(3, 41, **SHAPE), "torch")


@pytest.mark.parametrize("name, wrong, run", [
    ("torch_write", lambda real: lambda k, v, slots, *new: real(k, v, slots.flip(0), *new), lambda rig: block_write(rig, "torch", 8)),
    ("torch_copy", lambda real: lambda data, pairs: None, lambda rig: block_copy(rig, "torch", 3)),
    ("loop_copy", lambda real: lambda data, pairs: real(data, pairs[1:]), lambda rig: block_copy(rig, "torch", 3))])
def test_a_wrong_move_is_refused(rig, monkeypatch, name, wrong, run):
    monkeypatch.setattr(bench, name, wrong(getattr(bench, name)))
    with pytest.raises(RuntimeError, match="differs from the reference"): run(rig)


def test_a_swap_that_loses_a_block_is_refused(rig, monkeypatch):
    real = bench.Swapper.swap_in
    monkeypatch.setattr(bench.Swapper, "swap_in", lambda self, pairs: real(self, pairs[1:]))
    with pytest.raises(RuntimeError, match="differs"): swap(rig, model_shape("tiny"), 4, 32)


def test_a_recomputed_cache_that_differs_is_refused(rig):
    config = model_shape("tiny")
    model = bench.Model(config, bench.RandomWeights(config, rig.dtype, rig.device))
    assert recompute(rig, model, 4, 32)["max_abs_error"] < 1e-6
    calls, layer = [], model.layers[0]
    def odd(*args):                                     # another answer at the second pass
        calls.append(1)
        return layer(*args) + (len(calls) > 1)
    model.layers[0] = odd
    with pytest.raises(RuntimeError, match="the cache differs"): recompute(rig, model, 4, 32)


def test_a_failing_case_is_a_record_and_the_run_goes_on(monkeypatch):
    def fail(*args): raise RuntimeError("out of\nmemory " + "x" * 500)
    monkeypatch.setattr(bench, "pack", fail)
    fail.__name__ = "pack"
    rows = list(kernel_records("cpu", repeat=1))
    failed = [r for r in rows if r["error"]]
    assert {r["case"] for r in failed} == {"pack"} and "us" not in failed[0] and rows[-1]["case"] == "recompute"
    assert failed[0]["error"].startswith("RuntimeError: out of memory xxx") and len(failed[0]["error"]) < 140


# --- peers

def fake_peers(monkeypatch):
    "Modules with the peers' signatures, whose kernels are ours: right answers through the arguments that they got."
    def dense(q, caches, lens, starts, tables):
        batch = bench.PagedBatch(tables, lens, starts, caches[0].shape[1])
        return paged_attention(q, *caches, batch)
    def with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal):
        assert causal and k_cache.shape[1] % 256 == 0 and block_table.dtype == cache_seqlens.dtype == torch.int32
        starts = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
        return dense(q.flatten(0, 1), (k_cache, v_cache), cache_seqlens, starts, block_table).view_as(q)
    def varlen(q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, causal, seqused_k, block_table):
        assert causal and max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == seqused_k.max()
        return dense(q, (k, v), seqused_k, cu_seqlens_q, block_table)
    class Wrapper:
        def __init__(self, workspace, layout, use_tensor_cores): assert layout == "NHD" and not use_tensor_cores
        def plan(self, indptr, indices, last, heads, kv_heads, dim, size, *, q_data_type, kv_data_type):
            assert q_data_type == kv_data_type and indptr.dtype == indices.dtype == last.dtype == torch.int32
            self.counts, self.indices, self.size = indptr.diff(), indices, size
            self.lens = ((self.counts - 1) * size + last).int()
        def run(self, q, caches):
            tables = bench.pad_sequence(self.indices.split(self.counts.tolist()), batch_first=True)
            return dense(q, caches, self.lens, torch.arange(len(q) + 1), tables)
    for name, parts in {"flash_attn": {"flash_attn_with_kvcache": with_kvcache}, "vllm": {}, "vllm.vllm_flash_attn":
                        {"flash_attn_varlen_func": varlen}, "flashinfer": {"BatchDecodeWithPagedKVCacheWrapper": Wrapper}}.items():
        module = types.ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("case", attention_cases(tiny=True), ids=lambda c: c.name)
def test_peers_are_called_as_they_document(rig, monkeypatch, case):
    fake_peers(monkeypatch)
    d = make_paged(case, rig)
    exact, calls = exact_attention(d), peer_calls(d)
    found = {name: outcome(f, exact, rig.dtype) if callable(f) else f for name, f in calls.items()}
    assert isinstance(found["vllm"], float)
    if case.name != "mixed": assert isinstance(found["flash_attn"], float)
    else: assert isinstance(found["flash_attn"], str)                    # it takes equal lengths only
    if case.name in ("prefill", "mixed"): assert found["flashinfer"] == "ValueError: only decoding is compared"
    else: assert isinstance(found["flashinfer"], float)


def test_a_peer_with_another_interface_is_an_error_string(rig, monkeypatch):
    fake_peers(monkeypatch)
    monkeypatch.setattr(sys.modules["vllm.vllm_flash_attn"], "flash_attn_varlen_func", lambda q, k, v: q)
    monkeypatch.delattr(sys.modules["flash_attn"], "flash_attn_with_kvcache")
    found = attention(rig, decode(3, 41, **SHAPE), "torch")["peers"]
    assert found["vllm"].startswith("TypeError") and found["flash_attn"].startswith("AttributeError")
    assert isinstance(found["flashinfer"], dict) and found["flashinfer"]["us"] > 0


def test_a_broken_installation_is_said_and_not_null(rig, monkeypatch):
    def broken(name):
        if name == "flash_attn": raise ImportError("undefined symbol: _ZN")
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    monkeypatch.setattr(bench, "import_module", broken)
    found = peer_calls(make_paged(decode(2, 9, **SHAPE), rig))
    assert found == {"varlen_attn": None, "flash_attn": "ImportError: undefined symbol: _ZN", "vllm": None, "flashinfer": None}


# --- the clock

def test_the_clock_of_a_gpu_flushes_before_it_starts(monkeypatch):
    log = []
    class Event:
        def __init__(self, enable_timing): assert enable_timing
        def record(self): log.append("event")
        def elapsed_time(self, other): return 0.25                       # milliseconds
    class Flush:
        def zero_(self): log.append("flush")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    ask = by_events(types.SimpleNamespace(flush=Flush()), lambda: log.append("call"))
    assert log == ["flush", "event", "call", "event"] and ask() == 250


def test_calls_take_turns(rig):
    log = []
    times = take_times(Rig("cpu", repeat=4), {"a": lambda: log.append("a"), "b": lambda: log.append("b")})
    assert log == ["a", "b"] * (3 + 4) and set(times) == {"a", "b"}
    assert spread([5, 1, 4, 2, 3]) == {"us": 3, "us_quartiles": [2, 4]} and spread([7])["us_quartiles"] == [7, 7]


def test_the_roof_is_the_rate_of_a_copy():
    gpu = types.SimpleNamespace(cuda=True, rates={"copy": 4e12, "link": 5e10})
    assert roof(gpu, 4_000_000, 2.0) == {"predicted_us": 1.0, "share_of_copy": 0.5}
    assert roof(gpu, 100_000, 4.0, "link") == {"predicted_us": 2.0, "share_of_link": 0.5}
    assert against(3.0, {"sdpa flash": {"us": 2.0}, "sdpa math": {"us": 9.0}, "vllm": {"us": 1.0}, "sdpa cudnn": "no"}
                   )["sdpa"] == {"backend": "sdpa flash", "us": 2.0, "ratio": 1.5}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    rig = Rig("cpu", dtype, repeat=1)
    for what, job in jobs(rig):
        r = attempt(rig, job)
        assert r["error"] is None, (what, r["error"])


# --- the command

def test_the_command_appends_one_object_a_line(tmp_path, records):
    out = tmp_path / "kernels.jsonl"
    out.write_text('{"earlier": true}\n')
    run = subprocess.run([sys.executable, "-m", "pagedlm", "bench", "kernels", "--json", "--tiny", "--device", "cpu", "--dtype",
                          "bfloat16", "--repeat", "1", "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    printed = [json.loads(line) for line in run.stdout.splitlines()]
    for r in printed: check_record(r)
    assert {r["dtype"] for r in printed} == {"bfloat16"} and len(printed) == len(records)
    assert [json.loads(line) for line in out.read_text().splitlines()] == [{"earlier": True}, *printed]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_one_line(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["bench", "kernels", "--device", "cuda", "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert said.err == "pagedlm: error: device='cuda': PyTorch sees no GPU here; use 'cpu'\n"
    assert said.out == "" and not out.exists()


def test_other_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    assert main(["bench", "kernels", "--device", "cpu", "--out", str(tmp_path / "no" / "file")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setenv("PAGEDLM_BACKEND", "cuda")
    assert main(["bench", "kernels", "--device", "cpu"]) == 2
    assert "PAGEDLM_BACKEND is 'cuda'" in capsys.readouterr().err
    for args in (["--repeat", "0"], ["--device", "tpu"], ["--dtype", "int8"]):
        with pytest.raises(SystemExit) as e: main(["bench", "kernels", *args])
        assert e.value.code == 2
    with pytest.raises(ValueError, match="repeat must be 1 or more"): Rig("cpu", repeat=0)


def test_a_failed_case_is_exit_status_1(capsys, monkeypatch):
    row = {"case": "pack", "backend": "torch", "error": "RuntimeError: no"}
    monkeypatch.setattr(bench, "kernel_records", lambda *args: iter([row]))
    assert main(["bench", "kernels"]) == 1 and "FAILED: RuntimeError: no" in capsys.readouterr().out
    assert main(["bench", "kernels", "--json"]) == 1 and json.loads(capsys.readouterr().out) == row


@interpreted
def test_both_paths_are_measured_here():
    assert Rig("cpu").backends == ["torch", "triton"] and Rig("cpu").interprets("triton")


@pytest.mark.cuda
def test_records_of_a_gpu():
    rows = list(kernel_records("cuda", repeat=3, tiny=True))
    for r in rows:
        assert r["error"] is None and r["device"] == "cuda" and r["gpu"] and not r["interpreted"], r
        assert r["us"] > 0 and (r["backend"] == "triton" or r["case"] == "copy")
    copies = [r for r in rows if r["case"] == "block copy"]
    assert all(r["launches"] is None or r["launches"]["triton"]["kernels"] == 1 for r in copies)


# --- the scheduler alone

CASES = {"decode", "no new block", "all fill one", "all enter one", "arrival", "asks", "waits", "gangs of 4", "lost",
         "computed again", "swapped out", "swapped in"}


@pytest.fixture(scope="module")
def scheduler_rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("scheduler") / "rows.jsonl"
    out.write_text('{"earlier": true}\n')
    run = subprocess.run([sys.executable, "-m", "pagedlm", "bench", "scheduler", "--seqs", "16", "--contexts", "128", "32",
                          "--turns", "3", "--rounds", "2", "--out", str(out)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [json.loads(line) for line in out.read_text().splitlines()] == [{"earlier": True}, *rows]
    return {(r["case"], r["context"], r["prefix_caching"]): r for r in rows}


def test_scheduler_records_are_complete(scheduler_rows):
    assert set(scheduler_rows) == {(c, n, on) for c in CASES for n in (32, 128) for on in (False, True)}
    for r in scheduler_rows.values():
        assert (r["bench"], r["num_seqs"], r["block_size"], r["turns"], r["rounds"]) == ("scheduler", 16, 16, 3, 2)
        assert r["gc"] == "disabled while timing" and r["clock"] == "CPU time of the thread"
        assert set(r["machine"]) == {"cpu", "cores", "python", "load_average", "load_average_before"}
        for key in ("schedule_us", "update_us", "us", "ratio"):
            assert 0 < r[key]["p10"] <= r[key]["median"] <= r[key]["p90"]
        assert r["samples"] == (5 if r["case"] == "decode" else 1) * 6         # five of the cycles have a plain step of this kind
        if r["context"] == 32: assert r["ratio"] == {"median": 1, "p10": 1, "p90": 1}
        if r["case"] in ("decode", "no new block"): assert r["extra_us"] == 0 and r["us_per_block"] is None


def test_scheduler_records_count_what_changed(scheduler_rows):
    for (case, context, caching), r in scheduler_rows.items():
        rows, new, freed, moved = (r[k] for k in ("rows", "new_blocks", "freed_blocks", "moved_blocks"))
        assert rows == {"arrival": 17, "lost": 15, "swapped out": 15}.get(case, 16)
        most = context // 16 + 36
        if case in ("no new block", "all fill one"): assert new == 0
        if case == "all enter one": assert new == r["changed_blocks"] == 16
        if case == "all fill one": assert r["cached_blocks"] == r["changed_blocks"] == 16 * caching
        if case == "arrival": assert 32 <= new <= 34 and 32 * caching <= r["cached_blocks"] <= 34 * caching
        if case in ("lost", "swapped out"): assert context // 16 <= freed <= most
        else: assert freed == 0
        if case == "swapped out": assert moved == pytest.approx(freed, abs=1)
        elif case == "swapped in": assert context // 16 <= moved <= most and new >= moved
        else: assert moved == 0


def calls_of(load):
    "Function calls of a step, by name: no clock is needed to see what grows."
    seen = collections.Counter()
    def note(frame, event, arg):
        if event == "call": seen[frame.f_code.co_name] += 1
        if event == "c_call": seen[arg.__name__] += 1
    def watched(f, *args):
        gc.disable()                               # others may be called back when garbage is collected
        sys.setprofile(note)
        try: return f(*args)
        finally:
            sys.setprofile(None)
            gc.enable()
    plan = watched(load.scheduler.schedule)
    watched(load.scheduler.update, plan, bench.some_tokens(load, plan))
    return seen


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("kind", [{}, {"in_phase": True}, {"width": 4}])
def test_a_step_makes_the_same_calls_at_any_context(kind, caching):
    loads = [bench.Load(32, context, caching, **kind) for context in (64, 1024)]
    for _ in range(18):                        # a block's length and more
        short, long = map(calls_of, loads)
        assert short == long and sum(short.values()) > 32 * 20
    for load in loads: load.blocks.check()


@pytest.mark.parametrize("caching", [False, True])
def test_who_waits_costs_the_same_at_any_context_once_refused(caching):
    found = []
    for context in (64, 1024):
        load = bench.Load(16, context, caching)
        load.scheduler.watermark = .99
        load.add("waits", 0, bench.DOOR)
        asks, waits = calls_of(load), calls_of(load)
        found.append((sum(asks.values()), waits))
    assert found[0][1] == found[1][1]
    assert (found[1][0] > found[0][0] + 100) == caching             # asking anew looks up each block that it might share


def test_each_cycle_ends_as_it_began():
    busy = bench.Busy(16, 64, True, turns=4)
    for _ in range(4):
        for cycle in busy.cycles(): cycle()
        for load in (busy.single, busy.phased, busy.gangs):
            load.blocks.check(), load.scheduler.host.check()
            assert len(load.scheduler.running) == 16 // load.width and not load.scheduler.waiting + load.scheduler.preempted
            assert bench.BALLAST not in load.blocks.tables and not load.scheduler.host.tables


def test_the_collector_is_back_whatever_happens():
    assert gc.isenabled()
    turns = bench.take_turns({0: bench.Busy(16, 32, False, 1)}, 1, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        for _ in turns: assert not gc.isenabled()
    assert gc.isenabled()


def fake_step(us, new=0, freed=0, moved=0, cached=0):
    return bench.Step(us - 1, 1, 16, new, freed, moved, cached, 0)


def test_what_a_block_costs_by_hand():
    plain = fake_step(100, new=1)
    few, many = [(fake_step(130, 1, freed=10), plain)] * 3, [(fake_step(190, 1, freed=40), plain)] * 3
    r = bench.scheduler_record(many, few)                # a slope: (90 - 30) us for 30 blocks more
    assert (r["extra_us"], r["changed_blocks"], r["us_per_block"], r["ratio"]["median"]) == (90, 40, 2, 1.46)
    assert bench.scheduler_record(few, few)["us_per_block"] == 3
    assert bench.scheduler_record([(plain, plain)], [(plain, plain)])["us_per_block"] is None
    assert bench.quantiles(list(range(1, 11))) == {"median": 5.5, "p10": 2, "p90": 9}


@pytest.mark.parametrize("args, message", [
    (["--seqs", "100"], "num_seqs must be a multiple of 16, not 100"), (["--contexts", "16", "512"], "32 tokens or more, not [16, 512]")])
def test_sizes_that_cannot_be_are_one_line(tmp_path, capsys, args, message):
    out = tmp_path / "out.jsonl"
    assert main(["bench", "scheduler", *args, "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert message in said.err and len(said.err.splitlines()) == 1 and not said.out and not out.exists()
    for bad in (["--turns", "0"], ["--rounds", "x"], ["--contexts"]):
        with pytest.raises(SystemExit) as e: main(["bench", "scheduler", *bad])
        assert e.value.code == 2
    with pytest.raises(ValueError, match="turns and rounds must be 1 or more, not 0 and 5"): bench.scheduler_records(turns=0)


def test_help_of_the_scheduler_benchmark(capsys):
    with pytest.raises(SystemExit) as e: main(["bench", "scheduler", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert e.value.code == 0 and "default: 512 2048 8192" in said and "without a model" in said and "microseconds a step" in said


# --- throughput: how a request gives way

@pytest.fixture
def short_workload(tmp_path):
    row = {"id": 0, "prompt_token_ids": list(range(3, 23)), "max_tokens": 30}
    file = tmp_path / "w.json"
    file.write_text(json.dumps({"requests": [row | {"id": i} for i in range(3)], "warmup": [row], "single": row | {"id": "one"}}))
    return file


def test_the_peer_knows_no_preemption(capsys, short_workload):
    assert main(["bench", "throughput", "--workload", str(short_workload), "--engine", "transformers", "--preemption", "swap"]) == 2
    assert capsys.readouterr().err == "pagedlm: error: engine='transformers' knows no preemption\n"
    with pytest.raises(SystemExit): main(["bench", "throughput", "--workload", str(short_workload), "--preemption", "drop"])


@pytest.mark.parametrize("ask", [{}, {"preemption": "recompute"}, {"preemption": "swap", "num_host_blocks": 64}])
def test_throughput_passes_on_how_to_give_way(monkeypatch, short_workload, ask, capsys):
    asked = []
    @bench.contextmanager
    def fake(model, dtype, kv_tokens, max_num_seqs, **options):
        asked.append(options)
        counts = iter([2, 7])
        yield lambda rows: {r["id"]: [1] * r["max_tokens"] for r in rows}, lambda: next(counts)
    monkeypatch.setitem(bench.ENGINES, "pagedlm", fake)
    flags = [x for name, value in ask.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["bench", "throughput", "--workload", str(short_workload), "--json", *flags]) == 0
    out = json.loads(capsys.readouterr().out)
    assert asked == [ask] and out["preemptions"] == 5 and {k: out[k] for k in ask} == ask and ("preemption" in out) == bool(ask)


# --- the server

def test_server_record_of_a_tiny_model(tmp_path):
    from tiny_server import save_tiny
    out = tmp_path / "server.jsonl"
    out.write_text('{"earlier": true}\n')
    args = ["--model", str(save_tiny(tmp_path / "tiny")), "--streams", "3", "--max-tokens", "6", "--rounds", "2", "--threads", "1"]
    threads = torch.get_num_threads()
    try: assert main(["bench", "server", *args, "--out", str(out)]) == 0
    finally: torch.set_num_threads(threads)
    earlier, r = map(json.loads, out.read_text().splitlines())
    assert earlier == {"earlier": True} and r["bench"] == "server"
    assert (r["streams"], r["max_tokens"], r["rounds"], r["threads"], r["same_texts"], r["texts"]) == (3, 6, 2, 1, 6, 6)
    for key in ("offline_tok_s", "http_tok_s", "percent", "offline_cpu_us", "server_cpu_us", "client_cpu_us", "ttft_ms", "tpot_ms"):
        assert 0 < r[key]["p10"] <= r[key]["median"] <= r[key]["p90"]
    assert r["loop_cpu_us"]["median"] < r["server_cpu_us"]["median"] and 0 < r["client_percent_of_cores"]["median"] < 100


def test_an_answer_is_read_after_the_clock():
    reply = types.SimpleNamespace(parts=[b'HTTP/1.1 200 OK\r\nx: y\r\n\r\ne\r\ndata: {"a": ', b'1}\r\n2\r\n\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'])
    assert bench.Reply.events(reply) == [{"a": 1}]
    for broken in ([b"HTTP/1.1 429 Too Many\r\n\r\n{}"], [b'HTTP/1.1 200 OK\r\n\r\nf\r\ndata: {"a": 1}\n\r\n0\r\n\r\n'], []):
        with pytest.raises(RuntimeError, match="the server answered"): bench.Reply.events(types.SimpleNamespace(parts=broken))


def test_what_http_costs_by_hand():
    def way(s, **more): return {"s": s, "cpu": s, "texts": ["a", "b"], **more}
    http = dict(loop=.1, client=.01, events=11, ttft=[.1, .3], tpot=[.02, .02])
    r = bench.server_numbers([{"offline": way(.9), "http": way(1.0, **http)}, {"offline": way(.8), "http": way(1.0, **http) | {"texts": ["a", "c"]}}], 10)
    assert r["percent"] == {"median": 85, "p10": 80, "p90": 90} and r["http_tok_s"]["median"] == 10
    assert (r["loop_cpu_us"]["median"], r["client_cpu_us"]["median"], r["ttft_ms"]["p90"]) == (10_000, 1000, 300)
    assert (r["same_texts"], r["texts"], r["events_per_token"]) == (3, 4, 1.1)


def test_a_stream_of_another_length_is_no_result():
    reply = types.SimpleNamespace(events=lambda: [{"choices": [{"text": "a"}]}, {"choices": [], "usage": {"completion_tokens": 1}}])
    with pytest.raises(RuntimeError, match="a stream got 1 tokens, not 2"): bench.client_view([reply], 0, 2)


def test_a_server_that_does_not_start_is_said(tmp_path):
    with pytest.raises(RuntimeError, match="the server ended: .*no-such"), bench.server_process(str(tmp_path / "no-such"), threads=1): pass
    with pytest.raises(ValueError, match="max_tokens must be 2 or more"): bench.server_record(max_tokens=1)
