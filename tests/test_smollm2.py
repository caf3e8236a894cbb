"The real model, greedy in float32: whatever the pool and the chunks, the ids of transformers' `generate` alone."
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pagedlm
from pagedlm import LLM, SamplingParams
from pagedlm.bench import read_workload, throughput
from pagedlm.cli import main
from pagedlm.engine import Engine
REFERENCE = json.loads((Path(__file__).parent / "data" / "reference.json").read_text())
NEW_TOKENS = 18       # of the 48: each answer crosses into another block, or into two


def serve(engine, rows):
    "All prompts at once, checking the tables after every step and an empty pool at the end."
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for i, r in enumerate(rows): engine.add_request(str(i), r["prompt"], params)
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        engine.blocks.check()
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return [done[str(i)] for i in range(len(rows))]


def test_no_prompt_hangs_on_a_near_tie():
    assert [len(r["prompt"]) for r in REFERENCE][::15] == [3, 400]
    assert min(min(r["gaps"]) for r in REFERENCE) >= 1e-3


@torch.no_grad()
def test_the_reference_is_what_transformers_says(smollm2_of_transformers):
    "Greedy ids are those that are most likely at each place, given all before them: one forward shows it for all 48."
    rows = REFERENCE[:10]
    ids = [torch.tensor(r["prompt"] + r["ids"]) for r in rows]
    logits = smollm2_of_transformers(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)).logits      # what pads is behind
    for r, line in zip(rows, logits):
        top = line[len(r["prompt"]) - 1:][:48].topk(2)
        assert top.indices[:, 0].tolist() == r["ids"]
        assert (top.values[:, 0] - top.values[:, 1]).tolist() == pytest.approx(r["gaps"], abs=1e-3)


def test_ids_equal_transformers(smollm2):
    engine = Engine(smollm2, num_blocks=256)
    assert serve(engine, REFERENCE) == [r["ids"][:NEW_TOKENS] for r in REFERENCE]
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("kw", [
    {"num_blocks": 10, "max_num_batched_tokens": 16, "preemption": "recompute"}, {"num_blocks": 128, "block_size": 1, "preemption": "swap"},
    {"num_blocks": 20, "block_size": 8, "preemption": "recompute"}, {"num_blocks": 6, "block_size": 32, "preemption": "recompute"}], ids=str)
def test_ids_equal_transformers_in_a_small_pool(smollm2, kw):
    "Prompts that end before, at and behind the ends of blocks; in chunks, and preempted in both ways."
    rows = [r for r in REFERENCE if len(r["prompt"]) in (3, 8, 15, 16, 31, 32, 33)]
    engine = Engine(smollm2, **kw)
    assert len(rows) == 7 and serve(engine, rows) == [r["ids"][:NEW_TOKENS] for r in rows]
    s = engine.stats()
    assert (s.preemptions_swap if kw["preemption"] == "swap" else s.preemptions_recompute) >= 2


def test_the_promise_of_the_readme():
    with LLM("smollm2", num_blocks=256) as llm:
        outs = llm.generate(["The capital of France is", "Once upon a time"], SamplingParams(temperature=0, max_tokens=12))
        assert "Paris" in outs[0].outputs[0].text
        assert llm.chat([{"role": "user", "content": "What is the capital of France?"}],
                        SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text.count("Paris")
        with pytest.raises(ValueError, match="4081 prompt tokens|max_model_len"): llm.generate([[1] * 4200])
        assert llm.generate("2 + 2 =", SamplingParams(temperature=0, max_tokens=2))[0].finished
        s = llm.stats()
        assert (s.free_blocks, s.used_blocks, s.running, s.waiting) == (256, 0, 0, 0)


def test_bfloat16_answers_too():
    with LLM("smollm2", num_blocks=64, dtype="bfloat16") as llm:
        out = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0]
        assert "Paris" in out.outputs[0].text


def pagedlm_cli(*args, **kw):
    return subprocess.run([sys.executable, "-m", "pagedlm", *args], capture_output=True, text=True, timeout=300, **kw)


def test_generate_answers_paris_and_says_what_the_pool_did():
    r = pagedlm_cli("generate", "What is the capital of France?")
    assert r.returncode == 0 and "Paris" in r.stdout
    for words in ("prompt +", "generated tokens", "tokens/s", "blocks in use", "% of used slots held a token"):
        assert words in r.stderr


def test_generate_json(capsys):
    assert main(["generate", "Say hi", "--json", "--max-tokens", "5", "--num-blocks", "32"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert len(out["token_ids"]) == 5 and out["finish_reason"] == "length" and out["stats"]["num_blocks"] == 32


def test_bench_throughput(tmp_path):
    request = {"id": 0, "prompt_token_ids": REFERENCE[0]["prompt"], "max_tokens": 4}
    workload = {"requests": [request, request | {"id": 1}], "warmup": [request], "single": request | {"id": "one"}}
    (tmp_path / "w.json").write_text(json.dumps(workload))
    r = pagedlm_cli("bench", "throughput", "--workload", str(tmp_path / "w.json"), "--dtype", "float32", "--threads", "1",
                    "--kv-tokens", "64", "--ids-out", str(tmp_path / "ids.json"), "--json")
    out = json.loads(r.stdout)
    assert {"wall_s", "out_tok_s", "total_tok_s", "single_tok_s", "peak_rss_mb", "preemptions", "versions"} <= set(out)
    assert json.loads((tmp_path / "ids.json").read_text()) == {k: REFERENCE[0]["ids"][:4] for k in ("0", "1", "one")}


def test_version_and_light_import():
    assert pagedlm_cli("--version").stdout.strip() == f"pagedlm {pagedlm.__version__}"
    heavy = "import sys, pagedlm, pagedlm.engine; print({'matplotlib', 'ipywidgets', 'nbdev', 'fastapi'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize("args, message", [
    (["generate"], "PROMPT"), (["generate", "x", "--temperature", "9"], "temperature"), (["generate", "x", "--max-tokens", "0"], "'0'"),
    (["generate", "", "--raw"], "empty"), (["generate", "x", "--model", "no/such-model"], "smollm2"),
    (["bench", "throughput", "--workload", "no-such-file.json"], "no-such-file.json"), ([], "COMMAND")])
def test_what_a_user_gets_wrong_is_one_line(args, message, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try: status = main(args)
    except SystemExit as exit: status = exit.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and message in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize("content, message", [
    ("[]", "JSON object"), ("{", "not JSON"), ('{"requests": []}', "no 'requests'"),
    ('{"requests": [3], "warmup": [3], "single": 3}', "no request"),
    ('{"requests": [{"id": 0}], "warmup": [], "single": {}}', "lacks max_tokens, prompt_token_ids")])
def test_a_workload_that_is_none(tmp_path, content, message):
    (tmp_path / "w.json").write_text(content)
    with pytest.raises(ValueError, match=message): read_workload(tmp_path / "w.json")


def test_the_arguments_of_throughput(tmp_path):
    workload = Path(__file__).parent / "data" / "workload.json"
    for kw, message in [({"engine": "foo"}, "foo"), ({"kv_tokens": 16}, "multiple of 32"), ({"threads": 100_000}, "100000")]:
        with pytest.raises(ValueError, match=message): throughput(workload, **kw)
