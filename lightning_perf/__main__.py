"""Makes ``python -m lightning_perf`` the same as ``lightning-perf``."""

from lightning_perf.cli.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())
