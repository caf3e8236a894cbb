"""Write tests/data/reference.json: 16 prompts and what transformers' `generate` answers to each alone.

Run it once, by hand (`python tests/reference.py`); the tests read its result. For each step it also
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


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.float32).eval()
    rows = [answer(model, p) for p in prompts()]
    (DATA / "reference.json").write_text(json.dumps(rows))
    print("smallest gap:", min(min(r["gaps"]) for r in rows))
