"The real model, greedy in float32: whatever the pool and the chunks, the ids of transformers' `generate` alone."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import pagedlm
from pagedlm import LLM, SamplingParams
from pagedlm.bench import read_workload, throughput
from pagedlm.engine import Engine
from pagedlm.models import load_model, load_tokenizer, resolve_model
from reference import answer

REFERENCE = json.loads((Path(__file__).parent / "data" / "reference.json").read_text())
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2", dtype="float32")


def serve(engine):
    "All 16 prompts at once, checking the tables after every step and an empty pool at the end."
    for i, r in enumerate(REFERENCE): engine.add_request(str(i), r["prompt"], PARAMS)
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        engine.blocks.check()
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return [done[str(i)] for i in range(len(REFERENCE))]


def same(ids, row) -> bool:
    "Equal, or different first where the two best logits are closer than rounding."
    differ = next((i for i, (a, b) in enumerate(zip(ids, row["ids"])) if a != b), None)
    return len(ids) == len(row["ids"]) and (differ is None or row["gaps"][differ] < 1e-3)


def test_no_prompt_hangs_on_a_near_tie():
    assert [len(r["prompt"]) for r in REFERENCE][::15] == [3, 400]
    assert min(min(r["gaps"]) for r in REFERENCE) >= 1e-3


def test_the_reference_is_what_transformers_says():
    hf = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.float32).eval()
    for row in REFERENCE[1:8:3]: assert answer(hf, row["prompt"])["ids"] == row["ids"]


@pytest.mark.parametrize("kw", [
    {"num_blocks": 48, "preemption": "recompute"}, {"num_blocks": 48, "max_num_batched_tokens": 16, "preemption": "recompute"},
    {"num_blocks": 768, "block_size": 1},
    {"num_blocks": 96, "block_size": 8}, {"num_blocks": 24, "block_size": 32}, {"num_blocks": 256}], ids=str)
def test_ids_equal_transformers(model, kw):
    engine = Engine(model, **kw)
    ids = serve(engine)
    assert all(same(a, r) for a, r in zip(ids, REFERENCE))
    preemptions = engine.stats().preemptions
    assert preemptions == 0 if kw["num_blocks"] == 256 else preemptions >= 3


def test_the_promise_of_the_readme():
    with LLM("smollm2", num_blocks=256) as llm:
        outs = llm.generate(["The capital of France is", "Once upon a time"], SamplingParams(temperature=0, max_tokens=32))
        assert "Paris" in outs[0].outputs[0].text
        assert llm.chat([{"role": "user", "content": "What is the capital of France?"}],
                        SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text.count("Paris")
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


def test_generate_json():
    r = pagedlm_cli("generate", "Say hi", "--json", "--max-tokens", "5", "--num-blocks", "32")
    out = json.loads(r.stdout)
    assert len(out["token_ids"]) == 5 and out["finish_reason"] == "length" and out["stats"]["num_blocks"] == 32


def test_bench_throughput(tmp_path):
    request = {"id": 0, "prompt_token_ids": REFERENCE[0]["prompt"], "max_tokens": 8}
    workload = {"requests": [request, request | {"id": 1}], "warmup": [request], "single": request | {"id": "one"}}
    (tmp_path / "w.json").write_text(json.dumps(workload))
    r = pagedlm_cli("bench", "throughput", "--workload", str(tmp_path / "w.json"), "--dtype", "float32", "--threads", "2",
                    "--kv-tokens", "64", "--ids-out", str(tmp_path / "ids.json"), "--json")
    out = json.loads(r.stdout)
    assert {"wall_s", "out_tok_s", "total_tok_s", "single_tok_s", "peak_rss_mb", "preemptions", "versions"} <= set(out)
    assert json.loads((tmp_path / "ids.json").read_text()) == {k: REFERENCE[0]["ids"][:8] for k in ("0", "1", "one")}


def test_version_and_light_import():
    assert pagedlm_cli("--version").stdout.strip() == f"pagedlm {pagedlm.__version__}"
    heavy = "import sys, pagedlm, pagedlm.engine; print({'matplotlib', 'ipywidgets', 'nbdev', 'fastapi'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize("args, message", [
    (["generate"], "PROMPT"), (["generate", "x", "--temperature", "9"], "temperature"), (["generate", "x", "--max-tokens", "0"], "'0'"),
    (["generate", "", "--raw"], "empty"), (["generate", "x", "--model", "no/such-model"], "smollm2"),
    (["bench", "throughput", "--workload", "no-such-file.json"], "no-such-file.json"), ([], "COMMAND")])
def test_what_a_user_gets_wrong_is_one_line(args, message):
    r = pagedlm_cli(*args, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert r.returncode == 2 and message in r.stderr.splitlines()[-1] and "Traceback" not in r.stderr


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


def test_a_reader_that_has_had_enough():
    r = subprocess.run(f"'{sys.executable}' -m pagedlm generate 'Tell me a story.' --max-tokens 8 | head -c 1", shell=True,
                       capture_output=True, text=True, timeout=300)
    assert len(r.stdout) == 1 and "error" not in r.stderr and "Traceback" not in r.stderr
