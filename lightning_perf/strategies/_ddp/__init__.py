"""What `PerfDDPStrategy` is made of."""
