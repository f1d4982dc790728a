"""Run folders, checkpoints, exports: from disk to a model and back."""
