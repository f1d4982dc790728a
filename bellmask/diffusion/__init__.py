"""When to corrupt, what to hide, how to score. Imports torch only."""
