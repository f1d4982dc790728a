"""Models to numbers with error bars."""
