"""One gloo device for all process groups of a single rank: each device polls a hundred times a second.

vLLM makes a dozen such groups per engine, which together cost an idle engine 1.3% of a core and talk to nobody.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

_Gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", object)
_device: Any = None


class SharedDeviceGloo(_Gloo):
    """PyTorch's, made as vLLM and `new_group` make it; groups of several ranks keep a device of their own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = default_pg_timeout) -> None:
        global _device
        if size > 1:
            super().__init__(store, rank, size, timeout=timeout)
            return
        if _device is None:
            _device = _Gloo.create_device(hostname="127.0.0.1")
        options = _Gloo._Options()
        options._devices, options._threads, options._timeout = [_device], 1, timeout
        super().__init__(store, rank, size, options)


def share_device() -> None:
    """For groups made from now on. Nothing where PyTorch has no gloo."""
    if _Gloo is not object:
        distributed_c10d.ProcessGroupGloo = SharedDeviceGloo
