"""The ``lightning-perf`` command."""
