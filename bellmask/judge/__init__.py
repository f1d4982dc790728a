"""Judges: which of two answers is better, by an endpoint or by a local model's likelihood."""
