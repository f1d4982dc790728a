"""Loss to optimiser to checkpoint."""
