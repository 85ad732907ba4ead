"""How `CUDAGraph` records and replays: of a whole step, or of networks."""
