"""Strategies for several processes.

Importing this registers the names ``"perf_ddp"`` and ``"perf_ddp_cpu"``, and the backend ``"ccl"``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_perf.strategies import oneccl  # noqa: F401  # registers its backend
from lightning_perf.strategies.cpu_ddp import CPUDDPStrategy
from lightning_perf.strategies.perf_ddp import PerfDDPStrategy
from lightning_perf.strategies.pipeline import PipelineStrategy

__all__ = ["CPUDDPStrategy", "PerfDDPStrategy", "PipelineStrategy"]

for _name, _strategy in (("perf_ddp", PerfDDPStrategy), ("perf_ddp_cpu", CPUDDPStrategy)):
    if _name not in StrategyRegistry:
        StrategyRegistry.register(
            _name, _strategy, description=f"{_strategy.__name__} of lightning_perf"
        )
