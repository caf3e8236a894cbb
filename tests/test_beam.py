"Beam search: equal to a dense brute force and to transformers, ids and scores; forks, ties, ends, odd shapes."
import itertools
import math
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedlm.sampling import BeamSearch, Hypothesis, token_logprobs

EARLY = [False, True, "never"]
inf, nan = math.inf, math.nan


def search(width, n=None, length_penalty=1.0, early_stopping=False, eos_ids=(0,), max_tokens=5, logprobs=None):
    return BeamSearch(width, n or width, length_penalty, early_stopping, eos_ids, max_tokens, logprobs)

def drive(beams, logits_of):
    "Run the search to its end; `logits_of(list of token lists)` recomputes every row from its tokens."
    held = [[]]                                           # what forked and freed tables would hold
    while not beams.done:
        rows = [h.token_ids for h in beams.live]
        assert held == rows and 0 < len(rows) <= beams.width
        told = beams.step(logits_of(rows))
        assert len(told) == len(rows)
        held = [[*row, t] for row, tokens in zip(rows, told) for t in tokens]
    assert held == []
    return beams.best()


# transformers

def llama(seed, vocab=64, layers=2):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False,
                         bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return LlamaForCausalLM(config).eval().requires_grad_(False)

def theirs(model, prompt, width, n, length_penalty, early_stopping, eos_ids, max_tokens):
    "(ids, score) of the n best hypotheses of transformers' generate."
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, num_beams=width,
                         num_return_sequences=n, length_penalty=length_penalty, early_stopping=early_stopping,
                         eos_token_id=list(eos_ids) or None, pad_token_id=model.config.vocab_size - 1, max_new_tokens=max_tokens,
                         return_dict_in_generate=True, output_scores=True, output_logits=True)
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    return [(ids[len(prompt):len(prompt) + k], s) for ids, k, s in zip(out.sequences.tolist(), lengths, out.sequences_scores.tolist())]

def dense(model, prompt):
    return lambda rows: model(torch.tensor([prompt + row for row in rows])).logits[:, -1]

def same(ours, want, tolerance=1e-3):
    assert [h.token_ids for h in ours] == [ids for ids, _ in want]
    for h, (_, score) in zip(ours, want): assert abs(h.score - score) <= tolerance * max(1, abs(score))

@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("early_stopping", EARLY)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_equals_transformers(width, early_stopping, length_penalty):
    reasons = set()
    for seed, eos_ids in [(0, (3,)), (1, (3, 11, 40)), (2, tuple(range(0, 64, 8)))]:
        model, prompt = llama(seed), [5, 9, 1 + seed, 30]
        how = (width, max(1, width - seed), length_penalty, early_stopping, eos_ids, 12)
        ours = drive(BeamSearch(*how), dense(model, prompt))
        same(ours, theirs(model, prompt, *how))
        reasons |= {h.finish_reason for h in ours}
    assert "stop" in reasons or length_penalty > 1
