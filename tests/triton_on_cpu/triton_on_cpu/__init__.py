"""Triton on a CPU: its kernels are interpreted (`TRITON_INTERPRET=1`), one program after the other.

With it vLLM's second model runner, which it has on GPUs, runs here too: a step of a tiny model takes some 30 ms. Triton
finds this package as a backend and vLLM as a plugin where this folder is in PYTHONPATH.
"""

import functools
from typing import Any


def install() -> None:
    """In every process of an engine: what the interpreter does not take, in vLLM's kernels."""
    from triton.runtime import interpreter
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # loops over `tl.range`, whose numbers the interpreter has as Python's
    # It would patch its language for each kernel, and for each function that one calls: most of a kernel's time.
    interpreter._LangPatchScope.restore = lambda self: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    builder.create_masked_load = lambda self, places, mask, *rest: load(self, places, _of_bools(mask), *rest)
    builder.create_masked_store = lambda self, places, value, mask, *rest: store(
        self, places, value, _of_bools(mask), *rest
    )


def _of_bools(mask: Any) -> Any:
    """Compiled kernels take one of integers too."""
    mask.data = mask.data.astype(bool)
    return mask
