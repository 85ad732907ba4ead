"""What the launcher is asked for: by a preset's launch half, and by the command line over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import yaml

from lightning_perf.launch.kernel_files import parse_cpu_list
from lightning_perf.launch.libraries import Allocator, OpenMP

NUMA = ("auto", "none", "gpu", "socket", "node", "l3", "core")
_THREADS = ("auto", "none")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked for.

    Attributes:
        instances: How many processes of the program to start.
        allocator: ``"jemalloc"``, ``"tcmalloc"``; ``"glibc"``: the C library's own, told to keep
            freed tensors; ``"none"``: as it is; ``"auto"``: see `AUTO_ALLOCATOR`.
        openmp: ``"gnu"``: the one PyTorch brings; ``"intel"``; ``"auto"``: see `AUTO_OPENMP`.
        numa: Where a process computes and allocates. ``"gpu"``: beside its GPU; ``"socket"``,
            ``"node"``, ``"l3"``, ``"core"``: several instances share the machine without crossing
            that border; ``"auto"``: the same with NUMA nodes; a list such as ``"0"`` or ``"0,2"``:
            as ``"auto"`` on those nodes only; ``"none"``: anywhere.
        threads: ``"auto"``: ``OMP_NUM_THREADS`` is one per core; ``"none"``: leave it.
        bind_threads: Keep each OpenMP thread on one core.
        huge_pages: Ask for transparent huge pages for tensors.
        interop_threads: Inter-op threads, None to leave them.
        env: Other environment variables; those of the user's environment win.
        named_env: Those that the user has named for this run; they win over his environment.
        required: Names of the options that the user asked for: where one cannot be had, it is an
            error and not a remark.
    """

    instances: int = 1
    allocator: Allocator = "auto"
    openmp: OpenMP = "auto"
    numa: str = "auto"
    threads: str = "auto"
    bind_threads: bool = False
    huge_pages: bool = False
    interop_threads: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    named_env: Mapping[str, str] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for name, known in (
            ("allocator", get_args(Allocator)),
            ("openmp", get_args(OpenMP)),
            ("threads", _THREADS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} was asked for; it is one of "
                    f"{', '.join(known)}."
                )
        if self.numa not in NUMA and not self.nodes:
            raise ValueError(
                f"numa={self.numa!r} was asked for; it is one of {', '.join(NUMA)}, or a list of "
                "NUMA nodes such as 0 or 0,2."
            )
        for name, number in (
            ("instances", self.instances),
            ("interop_threads", self.interop_threads),
        ):
            if number is not None and number < 1:
                raise ValueError(f"{name}={number} was asked for; it is 1 or more.")

    @property
    def nodes(self) -> frozenset[int]:
        """The NUMA nodes to stay on, empty for all."""
        try:
            return parse_cpu_list(self.numa)
        except ValueError:
            return frozenset()

    def overridden(self, asked: Mapping[str, Any]) -> Options:
        """Return these options with what the user asked for over them.

        Args:
            asked: Values by name.
        """
        return replace(self, **asked, required=self.required | asked.keys())


def launch_half(preset: str) -> Options | None:
    """Return what a preset wants before the process starts, None if it wants nothing.

    Args:
        preset: Name of a preset, not an alias.

    Example:
        >>> launch_half("cpu").threads
        'auto'
    """
    path = launch_file(preset)
    if not path.exists():
        return None
    return read_launch_section(path.read_text(encoding="utf-8"))


def launch_file(preset: str) -> Path:
    """Return the file of a preset's launch half, whether there is one or not."""
    return Path(__file__).parents[1] / "presets" / f"{preset}.launch.yaml"


def read_launch_section(text: str) -> Options:
    """Return the options in the ``launch`` section of a YAML text.

    Raises:
        ValueError: It has no such section, or one with unknown keys or values.
    """
    content = yaml.safe_load(text)
    section = content.get("launch") if isinstance(content, dict) else None
    users = ("named_env", "required")
    known = [option.name for option in fields(Options) if option.name not in users]
    if not isinstance(section, dict) or not section.keys() <= set(known):
        raise ValueError(f"A launch file has a section `launch` with any of {', '.join(known)}.")
    values = dict(section)
    # YAML reads `numa: 0` as a number, and so it does variables.
    if "numa" in values:
        values["numa"] = str(values["numa"])
    values["env"] = {name: str(value) for name, value in (values.get("env") or {}).items()}
    return Options(**values)
