"""Masked diffusion in other trainers."""
