"""The device that kernels are launched on: this CPU."""

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    def __init__(self) -> None: ...

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


CPUDriver.__abstractmethods__ = frozenset()  # what compiled kernels need
