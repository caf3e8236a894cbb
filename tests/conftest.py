"The marker `cuda`: tests that need a GPU, skipped where there is none."
import os
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)      # a shell's background jobs ignore it, and so would their children
if "PYTEST_XDIST_WORKER" in os.environ: os.environ["OMP_NUM_THREADS"] = "1"    # a core for each worker

import pagedlm   # noqa: F401  first of all: it sets TRITON_INTERPRET before anything can import triton
import pytest
import torch

def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device; skipped where there is none")

def pytest_collection_modifyitems(items):
    if torch.cuda.is_available(): return
    for item in items:
        if "cuda" in item.keywords: item.add_marker(pytest.mark.skip(reason="no CUDA device"))


# ---- the real model, in float32: loaded once for all files; nobody changes it -----------------

@pytest.fixture(scope="session")
def smollm2():
    from pagedlm.models import load_model
    return load_model("smollm2", dtype="float32")


@pytest.fixture(scope="session")
def smollm2_of_transformers():
    from transformers import AutoModelForCausalLM

    from pagedlm.models import resolve_model
    return AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.float32).eval()
