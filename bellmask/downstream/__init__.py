"""Scores on downstream tasks: multiple choice, completion, infilling."""
