"""A book that runs: paged attention, block by block, and the small server that it builds.

`from pagedlm import LLM, SamplingParams` is all that most programs need; each name is imported
when it is first used, so that `import pagedlm` is quick."""
__version__ = "0.0.1"

import importlib
import os

_HOME = {"LLM": "engine", "Engine": "engine", "RequestOutput": "engine", "CompletionOutput": "engine",
         "EngineStats": "engine", "AsyncEngine": "async_engine", "SamplingParams": "sampling",
         "QueueFull": "scheduler", "Policy": "scheduler"}
__all__ = ["__version__", *_HOME]


def _has_cuda() -> bool:
    "Without importing torch: is there a CUDA device to be seen?"
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")


if not _has_cuda():   # Triton reads this once, when it is first imported; an explicit 0 stands
    os.environ.setdefault("TRITON_INTERPRET", "1")


def __getattr__(name: str):
    if name not in _HOME: raise AttributeError(f"module 'pagedlm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pagedlm.{_HOME[name]}"), name)


def __dir__():
    return sorted(__all__)
