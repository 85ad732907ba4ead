"""Models made faster for evaluation, without Lightning."""
