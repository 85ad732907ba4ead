"""The environment variables of a process that is to be started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_perf.launch.kernel_files import format_cpu_list
from lightning_perf.launch.libraries import (
    AUTO_ALLOCATOR,
    AUTO_OPENMP,
    LIBRARIES,
    allocator_among,
    openmp_among,
    preloaded,
)
from lightning_perf.launch.machine import Machine
from lightning_perf.launch.options import Options
from lightning_perf.launch.topology import Placement

# What binds OpenMP threads. Half of them the user's and half ours would be neither's plan.
BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_HUGE_PAGES_GLIBC = (2, 35)  # the first whose malloc can ask for huge pages
_UNLIMITED_MMAP_THRESHOLD = (2, 36)  # the oldest one on which it was tried
_LARGEST_OLD_THRESHOLD = 2**25

# PyTorch 2.9 knows both, and older ones the first only.
_NEWER_NAMES = {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}


@dataclass
class Settings:
    """Variables to set, gathered one by one, and what there is to say about them.

    Attributes:
        environ: The variables there are: the user's, who wins.
        variables: Those to set.
        notes: Lines for the user.
    """

    environ: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, name: str, value: str) -> None:
        """Set a variable, unless the user has."""
        theirs = self.environ.get(name)
        if theirs is None:
            self.variables[name] = value
        elif theirs != value:
            self.notes.append(f"{name}={theirs} in the environment wins over {value}.")


def environment(
    machine: Machine,
    options: Options,
    place: Placement | None,
    environ: Mapping[str, str],
) -> Settings:
    """Return the variables that a process needs, beyond those it inherits.

    Args:
        machine: What there is.
        options: What is asked for.
        place: Where the process computes, None where somebody else decides that.
        environ: The variables it inherits; they win.

    Raises:
        RuntimeError: The user asked for a library by name, and it is not installed.
    """
    settings = Settings(_without_torchruns_default(environ))
    for name, value in options.env.items():
        newer = _NEWER_NAMES.get(name)
        if newer is not None and newer in environ:
            settings.notes.append(f"{newer}={environ[newer]} in the environment wins over {value}.")
        else:
            settings.set(name, value)
    # Said later than those of the shell. What is decided below must see them as the user's.
    settings.environ = {**settings.environ, **options.named_env}
    settings.variables |= options.named_env
    openmp = _preload(machine, options, settings)
    if place is not None and options.threads == "auto":
        settings.set("OMP_NUM_THREADS", str(place.threads))
        # For loops that leave the choice to the environment; PyTorch's own do not.
        settings.set("OMP_SCHEDULE", "STATIC")
    if place is not None and options.bind_threads:
        _bind_threads(place, settings)
    if openmp == "intel":
        for name, value in LIBRARIES["intel"].environment:
            settings.set(name, value)
    if options.huge_pages:
        _huge_pages(machine, options, settings)
    return settings


def _without_torchruns_default(environ: Mapping[str, str]) -> dict[str, str]:
    """Drop the thread number that torchrun sets where nobody has: it is no wish of the user."""
    theirs = dict(environ)
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1":
        del theirs["OMP_NUM_THREADS"]
    return theirs


def _preload(machine: Machine, options: Options, settings: Settings) -> str:
    """Choose allocator and OpenMP runtime; return the runtime."""
    theirs = preloaded(settings.environ.get("LD_PRELOAD", ""))
    ours: list[str] = []
    openmp = AUTO_OPENMP.use if options.openmp == "auto" else options.openmp
    if found := openmp_among(theirs):
        if openmp not in found:
            settings.notes.append(
                f"LD_PRELOAD in the environment brings {found[0]} OpenMP, not {openmp}."
            )
        openmp = found[0]
    elif openmp == "intel":
        path = _installed(machine, "intel", "openmp", options, settings)
        openmp, ours = ("intel", [path]) if path else ("gnu", [])

    allocator = AUTO_ALLOCATOR.use if options.allocator == "auto" else options.allocator
    taken = allocator_among(theirs)
    if taken is not None:
        if allocator != taken and options.allocator != "auto":
            settings.notes.append(
                f"LD_PRELOAD in the environment brings {taken}, which wins over {allocator}."
            )
    elif allocator in LIBRARIES:
        path = _installed(machine, allocator, "allocator", options, settings)
        if path:
            ours.append(path)
            for name, value in LIBRARIES[allocator].environment:
                settings.set(name, value)
        elif options.allocator == "auto":
            _glibc_thresholds(machine, settings)
    elif allocator == "glibc":
        _glibc_thresholds(machine, settings)
    if ours:
        # The user's first: a sanitizer, say, must be.
        settings.variables["LD_PRELOAD"] = ":".join([*theirs, *ours])
    return openmp


def _installed(
    machine: Machine, key: str, option: str, options: Options, settings: Settings
) -> str | None:
    library = LIBRARIES[key]
    path = machine.libraries.get(key)
    if path is None:
        if option in options.required and getattr(options, option) != "auto":
            raise RuntimeError(
                f"{option} {key} was asked for, and {library.files[0]} is not installed: "
                f"{library.install}. With `auto` the run goes on without."
            )
        settings.notes.append(f"No {library.name}: {library.install}.")
    return path


def _glibc_thresholds(machine: Machine, settings: Settings) -> None:
    """Let glibc keep what is freed, so that the next step's tensors cost no page faults.

    Both thresholds together: either of them stops glibc from raising the other by itself, and then
    each tensor above 128 KiB is mapped and unmapped anew.
    """
    if machine.glibc is None:
        return
    if any(name.startswith("MALLOC_") for name in settings.environ) or "glibc.malloc." in (
        settings.environ.get("GLIBC_TUNABLES", "")
    ):
        settings.notes.append("The malloc settings in the environment win over ours.")
        return
    large = machine.glibc >= _UNLIMITED_MMAP_THRESHOLD
    settings.variables |= {
        # Older ones ignore more than this; then the other one alone would do harm.
        "MALLOC_MMAP_THRESHOLD_": str(2**34 if large else _LARGEST_OLD_THRESHOLD),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_TOP_PAD_": str(2**26),
    }


def _bind_threads(place: Placement, settings: Settings) -> None:
    """Keep each OpenMP thread on a core, but for the main thread.

    The runtime binds the main thread to the first place. Whatever that thread starts inherits it:
    with ``GOMP_CPU_AFFINITY`` or ``KMP_AFFINITY``, whose places are single CPUs, all loader workers
    would share one core. So the first place is the whole placement, and the others are one core
    each: the first core is left for the main thread.
    """
    theirs = [name for name in BINDING_VARIABLES if name in settings.environ]
    if theirs:
        settings.notes.append(f"{theirs[0]} in the environment wins over our binding of threads.")
    elif place.threads < len(place.cpus):
        settings.notes.append("Threads stay unbound: there are fewer than cores.")
    elif place.threads > 1:
        everywhere = _place([*place.cpus, *place.siblings])
        places = [everywhere, *(_place([cpu]) for cpu in place.cpus[1:])]
        settings.variables |= {"OMP_PROC_BIND": "CLOSE", "OMP_PLACES": ",".join(places)}


def _place(cpus: Iterable[int]) -> str:
    """Write CPUs as OpenMP does: first and length instead of first and last.

    Example:
        >>> _place([0, 1, 2, 3, 8])
        '{0:4,8}'
    """
    parts = []
    for part in format_cpu_list(cpus).split(","):
        first, _, last = part.partition("-")
        parts.append(f"{first}:{int(last) - int(first) + 1}" if last else first)
    return "{" + ",".join(parts) + "}"


def _huge_pages(machine: Machine, options: Options, settings: Settings) -> None:
    if not machine.huge_pages:
        message = (
            "Huge pages are switched off: /sys/kernel/mm/transparent_hugepage/enabled says never; "
            "an administrator can write madvise to it."
        )
        if "huge_pages" in options.required:
            raise RuntimeError(f"huge_pages was asked for. {message}")
        settings.notes.append(message)
        return
    settings.set("THP_MEM_ALLOC_ENABLE", "1")
    # glibc's own memory too, where it is glibc that allocates.
    preload = settings.variables.get("LD_PRELOAD", settings.environ.get("LD_PRELOAD", ""))
    glibc = machine.glibc is not None and machine.glibc >= _HUGE_PAGES_GLIBC
    if glibc and allocator_among(preloaded(preload)) is None:
        theirs = settings.environ.get("GLIBC_TUNABLES", "")
        if "glibc.malloc.hugetlb" not in theirs:
            tunables = [*filter(None, [theirs]), "glibc.malloc.hugetlb=1"]
            settings.variables["GLIBC_TUNABLES"] = ":".join(tunables)
