"""The ``lightning-perf`` command, and `PerfCLI` for scripts of your own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_perf.cli.perf_cli import PerfCLI

__all__ = ["PerfCLI"]


def __getattr__(name: str) -> Any:
    # The class needs Lightning, whose import takes seconds; the command mostly does not.
    if name == "PerfCLI":
        from lightning_perf.cli.perf_cli import PerfCLI

        return PerfCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
