"""NVIDIA GPUs and the NUMA nodes they are attached to."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_perf.launch.kernel_files import Read, parse_number

QUERY = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]


@dataclass(frozen=True)
class GPU:
    """One GPU.

    Attributes:
        index: Its number, by which nvidia-smi calls it.
        uuid: Its name in the world.
        node: NUMA node it is attached to, -1 where the system does not tell.
    """

    index: int
    uuid: str
    node: int


def parse_gpus(table: str, read: Read) -> tuple[GPU, ...]:
    """Return the GPUs that ``nvidia-smi`` lists, with their NUMA nodes.

    Args:
        table: Its answer to `QUERY`.
        read: Returns the content of a text file, ``""`` if it cannot be read.
    """
    gpus = []
    for line in table.splitlines():
        index, _, rest = line.partition(",")
        uuid, _, address = rest.partition(",")
        if index.strip().isdecimal():
            # nvidia-smi writes eight digits of the domain where the kernel writes four.
            device = address.strip().lower()[-len("0000:00:00.0") :]
            node = parse_number(read(f"/sys/bus/pci/devices/{device}/numa_node"))
            gpus.append(GPU(int(index), uuid.strip(), node))
    return tuple(gpus)


def installed_gpus(read: Read) -> tuple[GPU, ...]:
    """Return the GPUs of this machine; none where ``nvidia-smi`` is missing or fails."""
    if shutil.which(QUERY[0]) is None:
        return ()
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(done.stdout, read) if done.returncode == 0 else ()


def visible_gpus(gpus: tuple[GPU, ...], environ: Mapping[str, str]) -> tuple[GPU, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order.

    As CUDA reads it: the first entry that is unknown, such as a MIG instance, ends the list. CUDA
    may number GPUs of different kinds otherwise than nvidia-smi, unless ``CUDA_DEVICE_ORDER`` is
    ``PCI_BUS_ID``.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return gpus
    found: list[GPU] = []
    for entry in (part.strip() for part in listed.split(",")):
        named = [
            gpu
            for gpu in gpus
            if entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
        ]
        if len(named) != 1:
            break
        found += named
    return tuple(found)
