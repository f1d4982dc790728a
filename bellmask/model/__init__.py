"""Tokens to hidden states to log-probabilities."""
