"""Noise to text."""
