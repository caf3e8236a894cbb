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
