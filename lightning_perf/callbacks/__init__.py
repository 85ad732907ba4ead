"""The items that are callbacks. ``__all__`` is the registry: tests and docs read it."""

from lightning_perf.callbacks.channels_last import ChannelsLast
from lightning_perf.callbacks.compile import Compile
from lightning_perf.callbacks.cudnn_benchmark import CudnnBenchmark
from lightning_perf.callbacks.disable_debug_apis import DisableDebugAPIs
from lightning_perf.callbacks.fused_optimizer import FusedOptimizer
from lightning_perf.callbacks.matmul_precision import MatmulPrecision
from lightning_perf.callbacks.threads import Threads

__all__ = [
    "ChannelsLast",
    "Compile",
    "CudnnBenchmark",
    "DisableDebugAPIs",
    "FusedOptimizer",
    "MatmulPrecision",
    "Threads",
]
