"""The engine on the Triton kernels: the same greedy ids as in PyTorch, with preemption and chunks.

Without a GPU the kernels run in Triton's interpreter, and recorded decode steps run as plain calls."""
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedlm import Engine, SamplingParams
from pagedlm.engine import DecodeGraphs, graph_sizes
from pagedlm.models import load_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[(5 * i + j * j) % 64 for j in range(n)] for i, n in enumerate([1, 7, 8, 19, 4])]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=48, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=6, num_key_value_heads=2, head_dim=20,
                         max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return load_model(folder, device=DEVICE, dtype="float32")


def serve(model, monkeypatch, backend, graphs=False, num_blocks=64, **kw):
    "Ids of all prompts served together, and the engine; every step's tables are checked."
    monkeypatch.setenv("PAGEDLM_BACKEND", backend)
    engine = Engine(model, num_blocks=num_blocks, block_size=4, **kw)
    engine.runner.graphs = DecodeGraphs(model, engine.runner.kv, engine.runner.tables) if graphs else None
    engine.runner.kv.data.fill_(torch.nan)
    for i, prompt in enumerate(PROMPTS): engine.add_request(str(i), prompt, GREEDY)
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        engine.blocks.check()
    assert engine.blocks.num_free == num_blocks
    return [done[str(i)] for i in range(len(PROMPTS))], engine


@pytest.fixture(scope="module")
def reference(model):
    with pytest.MonkeyPatch.context() as patch: return serve(model, patch, "torch")[0]


def test_the_fixture_sees_the_cache(model, reference, monkeypatch):
    "Wiping a block changes the ids."
    monkeypatch.setenv("PAGEDLM_BACKEND", "torch")
    engine = Engine(model, num_blocks=64, block_size=4)
    engine.add_request("0", PROMPTS[3], GREEDY)
    engine.step()
    engine.runner.kv.data[:, :, engine.blocks.tables[0].blocks[1]] = 0
    while engine.has_unfinished(): out = engine.step()
    assert out[0].outputs[0].token_ids != reference[3]


@pytest.mark.parametrize("graphs", [False, True])
def test_ids_equal_those_of_pytorch(model, reference, monkeypatch, graphs):
    ids, engine = serve(model, monkeypatch, "triton", graphs)
    assert ids == reference
    if graphs: assert engine.runner.graphs.recorded.keys() == {8}


@pytest.mark.parametrize("graphs, preemption", [(False, "recompute"), (True, "swap")])
def test_ids_survive_preemption_and_chunks(model, reference, monkeypatch, graphs, preemption):
    ids, engine = serve(model, monkeypatch, "triton", graphs, num_blocks=9, max_num_batched_tokens=6, preemption=preemption)
    assert ids == reference
    assert engine.stats().preemptions >= 2
    if graphs: assert len(engine.runner.graphs.recorded) >= 2


def test_every_batch_size_has_a_recording_that_holds_it():
    for largest in range(1, 70):
        sizes = graph_sizes(largest)
        assert sizes == sorted(set(sizes)) and sizes[-1] == largest and sizes[0] == 1
        for n in range(1, largest + 1):
            fits = next(s for s in sizes if s >= n)
            assert fits - n < 8


def test_each_batch_size_is_served(model, monkeypatch):
    "Batches of 1 to 5 sequences over recordings of 1, 2, 4 and 5 rows, all with the ids of a run alone."
    monkeypatch.setenv("PAGEDLM_BACKEND", "triton")
    few = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    alone = []
    for prompt in PROMPTS:
        monkeypatch.setenv("PAGEDLM_BACKEND", "torch")
        engine = Engine(model, num_blocks=64, block_size=4)
        engine.add_request("0", prompt, few)
        while engine.has_unfinished(): out = engine.step()
        alone.append(out[0].outputs[0].token_ids)
    monkeypatch.setenv("PAGEDLM_BACKEND", "triton")
    engine = Engine(model, num_blocks=64, block_size=4, max_num_seqs=5)
    engine.runner.graphs = DecodeGraphs(model, engine.runner.kv, engine.runner.tables)
    for n in range(1, 6):
        for i in range(n): engine.add_request(str(i), PROMPTS[i], few)
        done = {}
        while engine.has_unfinished(): done |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
        assert [done[str(i)] for i in range(n)] == alone[:n]
    assert engine.runner.graphs.recorded.keys() == {1, 2, 4, 5}


@pytest.mark.parametrize("block_size", [3, 12, 48, 512])
def test_a_block_size_that_the_kernels_do_not_take(model, monkeypatch, block_size):
    monkeypatch.setenv("PAGEDLM_BACKEND", "triton")
    with pytest.raises(ValueError, match=f"block_size is {block_size}.*1, 2, 4, 8, 16, 32, 64, 128, 256"):
        Engine(model, num_blocks=64, block_size=block_size)
    monkeypatch.setenv("PAGEDLM_BACKEND", "torch")
    Engine(model, num_blocks=64, block_size=block_size).close()
