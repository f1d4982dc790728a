"""Runs that differ in one thing only, and how many times sooner one of them gets there."""
