"""How `ActivationCheckpointing` recomputes blocks, and tells what that costs."""
