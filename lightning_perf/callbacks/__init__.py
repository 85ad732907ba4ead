"""The items that are callbacks. ``__all__`` is the registry: tests and docs read it."""

from lightning_perf.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_perf.callbacks.channels_last import ChannelsLast
from lightning_perf.callbacks.compile import Compile
from lightning_perf.callbacks.cuda_graph import CUDAGraph
from lightning_perf.callbacks.cudnn_benchmark import CudnnBenchmark
from lightning_perf.callbacks.device_prefetch import DevicePrefetch
from lightning_perf.callbacks.device_transforms import DeviceTransforms
from lightning_perf.callbacks.disable_debug_apis import DisableDebugAPIs
from lightning_perf.callbacks.drop_conv_bias import DropConvBias
from lightning_perf.callbacks.exact_accumulation import ExactAccumulation
from lightning_perf.callbacks.fuse_conv_bn import FuseConvBN
from lightning_perf.callbacks.fused_optimizer import FusedOptimizer
from lightning_perf.callbacks.garbage_collection import GarbageCollection
from lightning_perf.callbacks.keep_in_fp32 import KeepInFP32
from lightning_perf.callbacks.loader_settings import LoaderSettings
from lightning_perf.callbacks.matmul_precision import MatmulPrecision
from lightning_perf.callbacks.preallocate import Preallocate
from lightning_perf.callbacks.threads import Threads

__all__ = [
    "ActivationCheckpointing",
    "CUDAGraph",
    "ChannelsLast",
    "Compile",
    "CudnnBenchmark",
    "DevicePrefetch",
    "DeviceTransforms",
    "DisableDebugAPIs",
    "DropConvBias",
    "ExactAccumulation",
    "FuseConvBN",
    "FusedOptimizer",
    "GarbageCollection",
    "KeepInFP32",
    "LoaderSettings",
    "MatmulPrecision",
    "Preallocate",
    "Threads",
]
