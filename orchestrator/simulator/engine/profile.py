"""The speed and size of one worker: the coefficients of its step time, its KV memory and its link.

A profile is a JSON file that says where its numbers come from. `orchestrator profile` measures one (`real/calibrate`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.config.settings import ConfigError
from orchestrator.types import EngineSpeed

PROFILES = Path(__file__).parents[1] / "profiles"  # the profiles in the package

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine step that computes p prompt tokens (each after c earlier ones) beside n decoding sequences takes (s)

    `step_s + p * prefill_s_per_token + p * c * attention_s + n * decode_s_per_seq + kv_s_per_token * (their KV tokens)`

    and `prompt_s` more if p > 0: CUDA graphs, for example, are for steps that only decode. `steps_ahead`: how many more
    steps are scheduled while one runs. What arrives comes after them. With asynchronous scheduling, vLLM's default on
    GPUs, it is one. `slowed_beside`: how many times as long a step takes while 1, 2, 3 and so on other workers compute,
    as on CPUs, where all share a host's cores and memory; the last counts for more of them, too.
    """

    name: str
    origin: str  # what these numbers were measured on, or computed from
    step_s: Seconds
    prefill_s_per_token: Annotated[float, Meta(gt=0)]
    attention_s: Seconds = 0.0
    prompt_s: Seconds = 0.0
    steps_ahead: Annotated[int, Meta(ge=0, le=2)] = 0
    slowed_beside: tuple[Annotated[float, Meta(ge=1)], ...] = ()
    decode_s_per_seq: Seconds = 0.0
    kv_s_per_token: Seconds = 0.0
    blocks: Count
    block_size: Count = 16  # tokens
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8192
    max_model_len: Count = 131_072  # tokens
    adapter_slots: Annotated[int, Meta(ge=0)] = 0  # vLLM's max_loras; 0: adapters cost nothing
    adapter_load_s: Seconds = 0.0  # in which a step waits for an adapter
    kv_bytes_per_token: Count
    link_bytes_per_s: Annotated[float, Meta(gt=0)]
    link_latency_s: Seconds = 0.0
    host_bytes_per_s: Annotated[float, Meta(gt=0)] = 2.5e10  # from its host tier to the device
    router_s: Seconds = 0.001  # from the client to a worker, and for the first token back
    ttft_slo_s: Annotated[float, Meta(gt=0)] = 2.0
    tpot_slo_s: Annotated[float, Meta(gt=0)] = 0.1

    @property
    def speed(self) -> EngineSpeed:
        """The speed that a worker of this kind would measure at its start."""
        fixed_s = self.step_s + self.prompt_s
        return EngineSpeed(fixed_s, self.prefill_s_per_token, self.step_s, self.decode_s_per_seq)


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError if the file cannot be read or is not a profile."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a profile's JSON file") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not a profile: {error}") from None
