"""Text to tokens to blocks to batches."""
