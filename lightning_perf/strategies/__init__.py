"""Strategies for several processes.

Importing this registers the strategy ``"perf_ddp"`` and the backend ``"ccl"``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_perf.strategies import oneccl  # noqa: F401  # registers its backend
from lightning_perf.strategies.perf_ddp import PerfDDPStrategy
from lightning_perf.strategies.pipeline import PipelineStrategy

__all__ = ["PerfDDPStrategy", "PipelineStrategy"]

if "perf_ddp" not in StrategyRegistry:
    StrategyRegistry.register(
        "perf_ddp", PerfDDPStrategy, description="Distributed data parallel of lightning_perf"
    )
