"""Runs that differ in one thing only, and the speed-up of one over another."""
