"""Every model family against Hugging Face's: the same logits at prefill and at each of 40 decode steps,
in a batch of unequal lengths, under preemption, with a cached prefix, on random models of odd shapes."""
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from pagedlm import Engine, SamplingParams
from pagedlm.attention import PagedBatch
from pagedlm.blocks import KVCache
from pagedlm.models import (FAMILIES, Model, ModelConfig, Weights, load_model, packed_product_works,
                            read_config)

VOCAB, STEPS = 101, 40
LENGTHS = {"a": 3, "b": 17, "c": 33}          # 33 + 40 tokens: more than three times ROPE_LENGTH
ROPE_LENGTH = 16
PROMPTS = {k: torch.randint(2, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for k, n in LENGTHS.items()}

BASE = dict(vocab_size=VOCAB, hidden_size=36, num_hidden_layers=2, num_attention_heads=9, max_position_embeddings=128,
            initializer_range=.2, bos_token_id=0, eos_token_id=1, pad_token_id=None)
LIKE_LLAMA = BASE | dict(num_key_value_heads=3, intermediate_size=40, rms_norm_eps=1e-3, tie_word_embeddings=False)
GPT2 = dict(vocab_size=VOCAB, n_embd=30, n_layer=2, n_head=5, n_positions=128, initializer_range=.2,
            layer_norm_epsilon=1e-3, eos_token_id=1)
OPT = BASE | dict(hidden_size=30, num_attention_heads=5, ffn_dim=40, word_embed_proj_dim=30, init_std=.2, pad_token_id=0)
NEOX = BASE | dict(hidden_size=40, num_attention_heads=5, intermediate_size=44, layer_norm_eps=1e-3)


def rope(kind="default", theta=1e4, **settings):
    "Rope parameters, with an original length that the tests exceed three times"
    kinds = dict(default={}, linear=dict(factor=4.), yarn=dict(factor=8., original_max_position_embeddings=ROPE_LENGTH),
                 llama3=dict(factor=8., low_freq_factor=1., high_freq_factor=4.,
                             original_max_position_embeddings=ROPE_LENGTH))
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **kinds[kind] | settings))


TIED, UNTIED = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)
CASES = {
    "llama": LIKE_LLAMA | rope(),
    "llama tied, biases": LIKE_LLAMA | TIED | dict(head_dim=10, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama llama3 rope": LIKE_LLAMA | rope("llama3") | dict(num_key_value_heads=1, head_dim=16),
    "llama yarn rope": LIKE_LLAMA | rope("yarn") | TIED | dict(head_dim=16),
    "mistral": LIKE_LLAMA | dict(sliding_window=7, head_dim=6, num_attention_heads=7, num_key_value_heads=1),
    "mistral linear rope": LIKE_LLAMA | rope("linear", 500.) | TIED | dict(sliding_window=None, head_dim=12),
    "qwen2": LIKE_LLAMA | TIED | rope(),
    "qwen2 window, yarn rope": LIKE_LLAMA | rope("yarn") | dict(
        use_sliding_window=True, sliding_window=5, max_window_layers=1, num_attention_heads=3, num_key_value_heads=3),
    "qwen3": LIKE_LLAMA | TIED | dict(head_dim=16),
    "qwen3 biases, window, llama3 rope": LIKE_LLAMA | rope("llama3") | dict(
        head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=9, max_window_layers=0),
    "phi3": LIKE_LLAMA | dict(num_attention_heads=3, num_key_value_heads=1) | rope(partial_rotary_factor=.5),
    "phi3 window": LIKE_LLAMA | TIED | dict(num_attention_heads=9, num_key_value_heads=9, sliding_window=6),
    "gpt2": GPT2,
    "gpt2 untied": GPT2 | UNTIED | dict(n_inner=44, activation_function="gelu", n_head=3),
    "opt": OPT,
    "opt untied": OPT | UNTIED | dict(num_attention_heads=3),
    "opt 350m": OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=14),
    "opt 350m untied, no biases": OPT | UNTIED | dict(do_layer_norm_before=False, word_embed_proj_dim=14, enable_bias=False,
                                                      activation_function="gelu"),
    "gpt_neox": NEOX | rope(partial_rotary_factor=.25),
    "gpt_neox sequential, tied": NEOX | TIED | dict(use_parallel_residual=False, hidden_act="gelu_fast")
        | rope("linear", 1e3, partial_rotary_factor=.5),
    "gpt_neox no biases, yarn rope": NEOX | dict(attention_bias=False) | rope("yarn", partial_rotary_factor=1.),
}


@dataclass
class Case:
    "A random model as it came back from the disk, there and here, and what Hugging Face says"
    name: str
    folder: object
    hf: object
    model: Model
    prompts: dict[str, list[int]]
    answers: dict[str, list[int]]         # its greedy ids
    logits: dict[str, torch.Tensor]       # of every token of prompt and answer but the last


def random_model(name, settings, seed=0):
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[name.split()[0]](**settings)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False).float()
    for key, p in hf.named_parameters():      # biases begin as 0 and norms as 1: a lost one would not show
        if p.ndim > 1: continue
        if key.endswith("bias"): p.normal_(std=.1)
        else: p.normal_(mean=1, std=.3)
    return hf


@torch.inference_mode()
def hf_answers(hf, prompts):
    "Greedy ids of each prompt alone, and the logits of all positions but the last"
    answers, logits = {}, {}
    for name, prompt in prompts.items():
        ids = generate(hf, prompt)
        answers[name], logits[name] = ids[len(prompt):], hf(torch.tensor([ids[:-1]])).logits[0]
        assert logits[name][len(prompt) - 1:].argmax(-1).tolist() == answers[name]
    return answers, logits


def generate(hf, prompt):
    "Prompt and greedy answer of transformers"
    out = hf.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
                      max_new_tokens=STEPS, min_new_tokens=STEPS, eos_token_id=None, pad_token_id=0)
    return out[0].tolist()


def lively_model(name, settings):
    "The first random model that does not fall into a rut of a few tokens"
    for seed in range(40):
        hf = random_model(name, settings, seed)
        if len(set(generate(hf, PROMPTS["c"])[33:])) > 8: return hf


def make_case(name, settings, folder):
    hf = lively_model(name, settings)
    hf.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert torch.equal(again(torch.tensor([PROMPTS["c"]])).logits, hf(torch.tensor([PROMPTS["c"]])).logits)
    return Case(name, folder, again, load_model(folder, device="cpu"), PROMPTS, *hf_answers(again, PROMPTS))


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return make_case(request.param, CASES[request.param], tmp_path_factory.mktemp("model"))


def assert_logits(got, want):
    error, scale = (got - want).abs().max().item(), max(1.0, want.abs().max().item())
    assert error <= 1e-4 * scale, f"{error} > 1e-4 * {scale}"


class Paged:
    "The model alone, on block tables in a shuffled order over a pool full of NaN"
    def __init__(self, model, block, num_blocks=60):
        c = model.config
        self.model, self.block, self.tables, self.lens = model, block, {}, {}
        self.kv = KVCache(c.num_layers, num_blocks, block, c.num_kv_heads, c.head_dim, model.dtype)
        self.kv.data.fill_(float("nan"))
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def step(self, new):
        "{sequence: new tokens} to {sequence: their logits}"
        for name, tokens in new.items():
            self.lens[name] = self.lens.get(name, 0) + len(tokens)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block < self.lens[name]: table.append(self.free.pop())
        width, counts = max(len(self.tables[name]) for name in new), [len(tokens) for tokens in new.values()]
        batch = PagedBatch(torch.tensor([self.tables[n] + [0] * (width - len(self.tables[n])) for n in new]),
                           torch.tensor([self.lens[name] for name in new]),
                           torch.tensor([0, *torch.tensor(counts).cumsum(0)]), self.block)
        logits = self.model(torch.tensor(sum(new.values(), [])), batch, self.kv, torch.arange(sum(counts)))
        return dict(zip(new, logits.split(counts)))


def decode(paged, ids, before=lambda i: None, steps=STEPS - 1):
    "Logits of each further step when `ids` are fed one by one, all sequences together"
    got = []
    for i in range(steps):
        before(i)
        got.append(paged.step({name: [tokens[i]] for name, tokens in ids.items()}))
    return {name: torch.cat([step[name] for step in got]) for name in ids}


@pytest.mark.parametrize("block", [4, 16])
def test_prefill_and_forty_steps_in_one_batch(case, block):
    "The longest prompt enters in two chunks; then each step feeds what Hugging Face chose"
    paged, c = Paged(case.model, block), case.prompts["c"]
    first = paged.step({"c": c[:14]})["c"]
    rest = paged.step({"a": case.prompts["a"], "c": c[14:], "b": case.prompts["b"]})
    steps = decode(paged, case.answers)
    rest["c"] = torch.cat((first, rest["c"]))
    for name in LENGTHS: assert_logits(torch.cat((rest[name], steps[name])), case.logits[name])


def test_the_fixture_sees_a_wiped_block(case):
    "Else the equality of ids below would say nothing"
    def greedy(wipe=None):
        paged, token, out = Paged(case.model, 4), case.prompts["c"], []
        for i in range(STEPS):
            out.append(paged.step({"c": token})["c"][-1].argmax().item())
            if i == 0 and wipe is not None: paged.kv.data[:, :, paged.tables["c"][wipe]] = 0
            token = out[-1:]
        return out
    assert greedy() == case.answers["c"]
    assert any(greedy(wipe=block) != case.answers["c"] for block in (7, 4, 0))     # of 33 tokens in blocks of 4


def logged(engine):
    "[(request, position, logits)] of all steps that the engine will take"
    log, execute = [], engine.runner.execute
    def run(plan):
        logits, at = execute(plan), 0
        for r in plan.rows:
            request = engine.scheduler.sequences[r.seq_id].request_id
            for k in range(r.num_logits, 0, -1):
                log.append((request, r.position + len(r.tokens) - k, logits[at].clone()))
                at += 1
        return logits
    engine.runner.execute = run
    return log


def serve(engine, prompts, suffix=""):
    "All prompts together, greedily; outputs by name"
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    for name, prompt in prompts.items(): engine.add_request(name + suffix, prompt, params)
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id[:1]: o for o in engine.step() if o.finished}
        engine.blocks.check()
    return done


@pytest.mark.parametrize("block, preemption", [(4, "recompute"), (16, "swap")])
def test_served_with_preemption_and_cached_prefixes(case, block, preemption):
    "A pool that holds one and a half of them; then the longest again, whose prompt is found in the cache"
    engine = Engine(case.model, block_size=block, num_blocks=112 // block, max_num_batched_tokens=24,
                    preemption=preemption, num_host_blocks=128 // block if preemption == "swap" else None)
    log = logged(engine)
    assert {n: o.outputs[0].token_ids for n, o in serve(engine, case.prompts).items()} == case.answers
    s = engine.stats()
    assert (s.preemptions_swap if preemption == "swap" else s.preemptions_recompute) > 0
    again = serve(engine, {"c": case.prompts["c"]}, suffix=" again")["c"]
    assert again.num_cached_tokens >= 32 // block * block and again.outputs[0].token_ids == case.answers["c"]
    assert len(log) >= 4 * STEPS
    for name, position, logits in log: assert_logits(logits, case.logits[name[0]][position])
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_half_precision_is_as_close_as_transformers_in_the_same(case):
    hf = AutoModelForCausalLM.from_pretrained(case.folder, attn_implementation="eager", dtype=torch.bfloat16).eval()
    ids, n = case.prompts["c"], len(case.prompts["c"])
    with torch.inference_mode(): theirs = hf(torch.tensor([ids])).logits[0].float() - case.logits["c"][:n]
    ours = load_model(case.folder, dtype="bfloat16", device="cpu")
    assert ours.dtype == ours.embed.tokens.dtype == torch.bfloat16
    got = Paged(ours, 4).step({"c": ids})["c"] - case.logits["c"][:n]
    assert got.abs().mean() < 1.5 * theirs.abs().mean() + 1e-3


def test_its_bytes_are_those_of_its_weights(case):
    "A tied head counts again, as a packed copy of the embedding, where products are packed"
    weights = sum(p.nbytes for p in case.hf.parameters())
    again = case.model.head.product.num_bytes if case.model.config.tie_embeddings and packed_product_works() else 0
    assert case.model.num_bytes == weights + again


def bare(name, tensors):
    "A checkpoint as the inner model saves it: without the first part of the names, and with old buffers"
    first = {"gpt2": "transformer.", "opt": "model.", "gpt_neox": "gpt_neox."}.get(name, "model.")
    assert sum(key.startswith(first) for key in tensors) > 10
    buffers = {"gpt2": "h.1.attn.bias", "gpt_neox": "layers.1.attention.bias"}
    return {key.removeprefix(first): t for key, t in tensors.items()} | {
        buffers.get(name, "layers.1.self_attn.rotary_emb.inv_freq"): torch.ones(8)}


def test_saved_in_other_ways(case, tmp_path):
    "In several files, and bare: the same logits, bit by bit"
    want = Paged(case.model, 4).step(case.prompts)
    case.hf.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    shutil.copytree(case.folder, tmp_path / "bare")
    path = tmp_path / "bare/model.safetensors"
    save_file(bare(case.name.split()[0], load_file(path)), path, metadata={"format": "pt"})
    for folder in ("many", "bare"):
        got = Paged(load_model(tmp_path / folder, device="cpu"), 4).step(case.prompts)
        for name in want: assert torch.equal(got[name], want[name])


def test_no_weight_may_be_missing_or_left_over_or_of_another_shape(case, tmp_path):
    "Of the second layer and of what stands outside of the layers, one fault each in turn; the message names it"
    shutil.copytree(case.folder, tmp_path / "x")
    path, tensors = tmp_path / "x/model.safetensors", load_file(case.folder / "model.safetensors")
    c = case.model.config
    def said(changed):
        save_file(changed, path, metadata={"format": "pt"})
        weights = Weights(tmp_path / "x", c.family, torch.float32, torch.device("cpu"), c.head_dim)
        with pytest.raises(ValueError) as error: Model(c, weights)
        return str(error.value)
    keys = [k for k in tensors if ".0." not in k]
    for i, key in enumerate(keys):
        without = {k: t for k, t in tensors.items() if k != key}
        more = key.replace("weight", "scale").replace("bias", "scale")
        fault = [without, without | {key: tensors[key][1:].clone()}, tensors | {more: torch.ones(2)}][i % 3]
        assert (more if i % 3 == 2 else key) in said(fault)


# ---- what has no case of its own ---------------------------------------------------------

REFUSED = {
    "mistral": dict(layer_types=["full_attention", "sliding_attention"], sliding_window=0, quantization_config=dict(quant_method="awq")),
    "qwen2": dict(dual_chunk_attention_config=dict(chunk_size=8), use_mrope=True, hidden_act="quick_gelu",
                  layer_types=["full_attention", "chunked_attention"]),
    "qwen3": dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.),
                  quantization_config=dict(quant_method="gptq")),
    "phi3": dict(layer_types=["sliding_attention"] * 2, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, partial_rotary_factor=1., short_factor=[1.] * 2, long_factor=[2.] * 2,
        original_max_position_embeddings=ROPE_LENGTH, factor=2.)),
    "gpt2": dict(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, add_cross_attention=True,
                 activation_function="tanh", sliding_window=4),
    "opt": dict(layer_norm_elementwise_affine=False, _remove_final_layer_norm=True, sliding_window=4),
    "gpt_neox": dict(hidden_act="selu", layer_types=["full_attention"] * 2, rope_parameters=dict(
        rope_type="spiral", rope_theta=1e4, partial_rotary_factor=.25)),
}


@pytest.mark.parametrize("kind, key", [(kind, key) for kind in REFUSED for key in REFUSED[kind]])
def test_a_setting_that_would_change_the_result_is_refused_by_name(kind, key):
    config = CONFIG_MAPPING[kind](**CASES[kind])
    config.architectures = [a for a, f in FAMILIES.items() if f.model_type == kind]
    ModelConfig.from_hf(config)
    value = REFUSED[kind][key]
    setattr(config, key, value)
    said = value["rope_type"] if key == "rope_parameters" else key
    with pytest.raises(ValueError, match=f"{said}.*(allowed|not implemented)"): ModelConfig.from_hf(config)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "GemmaForCausalLM", "OPTModel",
                                          "GPT2ForSequenceClassification"])
def test_another_architecture_is_refused_with_the_list_of_those_that_are_not(tmp_path, architecture):
    (tmp_path / "config.json").write_text(json.dumps(dict(architectures=[architecture], model_type="llama")))
    with pytest.raises(ValueError) as error: load_model(tmp_path)
    assert all(name in str(error.value) for name in (architecture, *FAMILIES))


PUBLISHED = {     # what differs from the defaults in the config.json of some models that people have
    "Phi-3-mini-4k": (dict(
        architectures=["Phi3ForCausalLM"], model_type="phi3", hidden_size=3072, num_attention_heads=32,
        original_max_position_embeddings=4096, rope_scaling=None, rope_theta=10000.0, sliding_window=2047,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}), dict(windows=(2047,) * 32, head_dim=96, max_model_len=4096)),
    "Qwen2.5-0.5B": (dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=896, num_attention_heads=14,
        num_key_value_heads=2, num_hidden_layers=24, max_window_layers=21, rope_theta=1000000.0, sliding_window=32768,
        tie_word_embeddings=True, use_mrope=False, use_sliding_window=False), dict(windows=(None,) * 24, qkv_bias=True, out_bias=False)),
    "Mistral-7B-v0.1": (dict(
        architectures=["MistralForCausalLM"], model_type="mistral", rope_theta=10000.0, sliding_window=4096),
        dict(windows=(4096,) * 32, num_kv_heads=8)),
    "opt-350m": (dict(
        architectures=["OPTForCausalLM"], model_type="opt", hidden_size=1024, do_layer_norm_before=False, ffn_dim=4096,
        num_attention_heads=16, num_hidden_layers=24, word_embed_proj_dim=512, prefix="</s>", layerdrop=0.0),
        dict(embed_size=512, norm_first=False, intermediate_size=4096, rope=None, tie_embeddings=True)),
    "pythia-70m": (dict(
        architectures=["GPTNeoXForCausalLM"], model_type="gpt_neox", hidden_size=512, num_attention_heads=8,
        num_hidden_layers=6, rotary_emb_base=10000, rotary_pct=0.25), dict(parallel=True, tie_embeddings=False, rope=dict(
            rope_type="default", rope_theta=10000, partial_rotary_factor=0.25))),
    "gpt2": (dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", n_ctx=1024, n_embd=768, n_head=12, n_layer=12),
             dict(intermediate_size=3072, tie_embeddings=True, activation="gelu_new", max_model_len=1024)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(tmp_path, name):
    raw, facts = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read = read_config(tmp_path)
    assert {key: getattr(read, key) for key in facts} == facts


@pytest.mark.parametrize("changes, said", [
    (dict(rope_scaling=dict(type="su", short_factor=[1.] * 48, long_factor=[1.] * 48)), "rope type 'su'.*allowed"),
    (dict(rope_scaling=dict(type="linear")), "config.json.*factor"), (dict(hidden_size="large"), "config.json.*hidden_size")])
def test_a_config_that_makes_no_sense_is_a_value_error(tmp_path, changes, said):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Mistral-7B-v0.1"][0] | changes))
    with pytest.raises(ValueError, match=f"(?s){said}"): read_config(tmp_path)


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_the_table_of_positions_is_a_limit(tmp_path, name):
    "Its last place is used, and not one more"
    settings = CASES[name] | dict(max_position_embeddings=24)
    if name == "gpt2": settings["n_positions"] = settings.pop("max_position_embeddings")
    hf, ids = random_model(name, settings), list(range(2, 26))
    hf.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu")
    assert model.config.max_model_len == 24
    assert_logits(Paged(model, 4).step({"a": ids})["a"], hf(torch.tensor([ids])).logits[0])
    with pytest.raises(ValueError, match="25 exceeds the model's own limit of 24"): Engine(model, num_blocks=9, max_model_len=25)
    with pytest.raises(ValueError, match="24"): Engine(model, num_blocks=9).add_request("0", ids + [5])


@pytest.mark.parametrize("block", [4, 16])
def test_windows_and_head_norms_through_the_triton_kernels(tmp_path, monkeypatch, block):
    "In the interpreter where there is no GPU: prompt and decode steps beyond the window"
    monkeypatch.setenv("PAGEDLM_BACKEND", "triton")
    settings = CASES["qwen3 biases, window, llama3 rope"] | dict(num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1)
    hf, ids = random_model("qwen3", settings), list(range(2, 28))
    hf.save_pretrained(tmp_path)
    paged = Paged(load_model(tmp_path, device="cpu"), block)
    got = [paged.step({"a": ids[:20], "b": ids[:3]})["a"], *(paged.step({"a": [i], "b": [i]})["a"] for i in ids[20:])]
    assert_logits(torch.cat(got), hf(torch.tensor([ids])).logits[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_weights_leave_no_second_copy_behind(tmp_path):
    "The peak of memory while a model of 126 MB loads is its size and a few products"
    config = CONFIG_MAPPING["gpt2"](vocab_size=2000, n_embd=768, n_layer=4, n_head=12, n_positions=64, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    script = """
import re, sys, torch
from pathlib import Path
from pagedlm.models import Linear, Model, Weights, read_config
def status(key): return 1024 * int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
c = read_config(Path(sys.argv[1]))
Linear(torch.ones(64, 64))(torch.ones(2, 64))
before = status("VmRSS")
model = Model(c, Weights(Path(sys.argv[1]), c.family, torch.float32, torch.device("cpu")))
print(status("VmHWM") - before, model.num_bytes)
"""
    out = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    grown, size = map(int, out.split())
    assert size > 110e6 and .7 * size < grown < 1.5 * size, (grown, size)      # a product or four under way


def test_every_family_is_here():
    assert {FAMILIES[a].model_type for a in FAMILIES} == {name.split()[0] for name in CASES}
