"""What `CPUDDPStrategy` is made of."""
