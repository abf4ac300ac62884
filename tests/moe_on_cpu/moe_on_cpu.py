"""What vLLM's CPU build lacks for experts over data-parallel ranks, added in every process of an engine.

vLLM loads `install` as a general plugin where this folder is in PYTHONPATH. Its CPU communicator has no gathers and
scatters of unequal parts, and its CPU kernel takes a rank's own experts for all experts, and reads beyond their end.
"""

from typing import Any

import torch
import torch.distributed as dist


def all_gatherv(self: Any, parts: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if isinstance(parts, list | tuple):
        return [all_gatherv(self, part, dim, sizes) for part in parts]
    sizes = sizes or [parts.shape[0]] * self.world_size
    padded = parts.new_zeros((max(sizes), *parts.shape[1:]))
    padded[: parts.shape[0]] = parts
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def reduce_scatterv(self: Any, whole: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    total = whole.clone()
    dist.all_reduce(total, group=self.device_group)
    sizes = sizes or [whole.shape[0] // self.world_size] * self.world_size
    start = sum(sizes[: self.rank_in_group])
    return total[start : start + sizes[self.rank_in_group]].contiguous()


def local_experts(apply: Any) -> Any:
    """`apply` of a kernel, with the ids of this rank's experts; those of other ranks weigh nothing."""

    def mapped(*args: Any, **kwargs: Any) -> None:
        if (expert_map := kwargs.get("expert_map")) is not None:
            ids = expert_map[kwargs["topk_ids"].long()]
            kwargs["topk_weights"] = kwargs["topk_weights"].masked_fill(ids < 0, 0)
            kwargs["topk_ids"] = ids.clamp(min=0).to(kwargs["topk_ids"].dtype)
        apply(*args, **kwargs)

    return mapped


def install() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if CpuCommunicator.all_gatherv is all_gatherv:
        return
    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
    CPUUnquantizedExperts.apply = local_experts(CPUUnquantizedExperts.apply)
