"""Shared helpers: errors, files, cached results, noise, statistics, console, processes."""
