"""Communication hooks: other ways to average the gradients of `DistributedDataParallel`.

They need no Lightning: ``BF16Hook().register(ddp_model)``.
"""

from lightning_perf.strategies.comm_hooks.base import CommHook, Traffic
from lightning_perf.strategies.comm_hooks.cast import BF16Hook, FP16Hook
from lightning_perf.strategies.comm_hooks.onebit import OneBitHook
from lightning_perf.strategies.comm_hooks.powersgd import PowerSGDHook

__all__ = ["BF16Hook", "CommHook", "FP16Hook", "OneBitHook", "PowerSGDHook", "Traffic"]
