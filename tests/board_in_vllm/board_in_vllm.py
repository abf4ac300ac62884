"""The board of a group (`workers.load.board`) in the engines of vLLM's own server, to measure them as ours are.

vLLM loads `install` as a general plugin where this folder is in PYTHONPATH. The environment announces the board of the
first rank; each engine writes the row of its own. Nothing is levelled.
"""

import functools
import os
import time
from typing import Any

_HERE = "PD_RANK_BOARD"


def install() -> None:
    from vllm.v1.engine.core import DPEngineCoreProc

    from workers.vllm_engine.steps import steps_of

    take_step = DPEngineCoreProc._process_engine_step
    if hasattr(take_step, "__wrapped__"):
        return

    @functools.wraps(take_step)
    def process_engine_step(engine: Any) -> bool:
        if not hasattr(engine, "_pd_steps"):
            os.environ[_HERE] = f"{engine.dp_rank},{os.environ[_HERE].split(',', 1)[1]}"
        steps, began = steps_of(engine), time.monotonic()
        executed = bool(take_step(engine))
        steps.ended(executed, (time.monotonic() - began) * 1e3)
        return executed

    DPEngineCoreProc._process_engine_step = process_engine_step
