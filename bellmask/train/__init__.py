"""Loss to optimizer to checkpoint."""
