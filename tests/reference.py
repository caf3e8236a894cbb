"""Write tests/data/reference.json, 16 prompts and what transformers' `generate` answers to each alone,
and tests/data/beams.json, what its beam search finds for some of them.

Run it once, by hand (`python tests/reference.py`); the tests read its results. For each greedy step it also
keeps the gap between the two best logits, since a smaller one than rounding could go either way."""
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from pagedlm.models import resolve_model

DATA = Path(__file__).parent / "data"
LENGTHS = [3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 256, 333, 400]
NEW_TOKENS = 48


def prompts() -> list[list[int]]:
    "Pieces of the benchmark's text, one of each length, all with different beginnings."
    text = [t for r in json.loads((DATA / "workload.json").read_text())["requests"] for t in r["prompt_token_ids"]]
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [text[s:s + n] for s, n in zip(starts, LENGTHS)]


@torch.inference_mode()
def answer(model, prompt: list[int]) -> dict:
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None,
                         pad_token_id=0, output_logits=True, return_dict_in_generate=True)
    top = torch.cat(out.logits).topk(2).values
    return {"prompt": prompt, "ids": out.sequences[0, len(prompt):].tolist(),
            "gaps": [round(g, 5) for g in (top[:, 0] - top[:, 1]).tolist()]}


MARKS = [28, 30, 198]      # a comma, a full stop, a line break
SEARCHES = [               # the length of the prompt, and how it is searched for 16 tokens: with ends and without
    (33, {"n": 2}), (17, {"n": 2, "stop_token_ids": MARKS}),
    (47, {"n": 4}), (31, {"n": 4, "stop_token_ids": MARKS, "early_stopping": "never", "length_penalty": 2.0}),
    (32, {"n": 6}), (64, {"n": 6, "stop_token_ids": MARKS, "early_stopping": True, "length_penalty": 0.5})]


def search(model, prompt: list[int], n: int, stop_token_ids=None, early_stopping=False, length_penalty=1.0) -> list:
    "transformers' hypotheses, best first: [[ids, score]]."
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, num_beams=n,
                         num_return_sequences=n, length_penalty=length_penalty, early_stopping=early_stopping,
                         eos_token_id=stop_token_ids, pad_token_id=0, max_new_tokens=16,
                         return_dict_in_generate=True, output_scores=True)
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    return [[i[len(prompt):len(prompt) + k], round(s, 5)]
            for i, k, s in zip(out.sequences.tolist(), lengths, out.sequences_scores.tolist())]


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.float32).eval()
    rows = [answer(model, p) for p in prompts()]
    (DATA / "reference.json").write_text(json.dumps(rows))
    print("smallest gap:", min(min(r["gaps"]) for r in rows))
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    found = []
    for n, params in SEARCHES:
        prompt = next(r["prompt"] for r in rows if len(r["prompt"]) >= n)[:n]
        found.append({"prompt": prompt, "params": params, "answers": search(model, prompt, **params)})
    (DATA / "beams.json").write_text(json.dumps(found))
