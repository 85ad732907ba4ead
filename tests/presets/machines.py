"""Invented hardware for the tests of presets."""

from __future__ import annotations

from lightning_perf._hardware import Hardware

GPUS = {
    "P100": (6, 0),
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "RTX 4090": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
}


HOME = {
    "cpu": "old CPU",
    "cpu_bf16": "new CPU",
    "cpu_ddp": "old CPU",
    "cuda_bf16": "H100",
    "cuda_ddp": "2 x H100",
    "cuda_fp16": "T4",
    "mps": "Mac",
}
"""For each preset the hardware that it is for."""


def hardware(name: str = "old CPU") -> Hardware:
    """Returns a GPU of the table or several, `Mac`, `new CPU` (with bfloat16) or `old CPU`."""
    count, _, name = name.rpartition(" x ")
    device = "cuda" if name in GPUS else "mps" if name == "Mac" else "cpu"
    return Hardware(
        device=device,
        device_name=name,
        device_count=int(count or 1),
        capability=GPUS.get(name),
        isa=frozenset({"avx512f", "avx512_bf16"} if name == "new CPU" else {"avx2"}),
        cpu_name=name if device == "cpu" else "host CPU",
        cores=4,
        logical_cpus=8,
        quota=None,
        sockets=1,
        numa_nodes=1,
        memory=2**34,
        system="Darwin" if name == "Mac" else "Linux",
    )
