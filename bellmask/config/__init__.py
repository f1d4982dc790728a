"""The options of a run, where their values come from, and the checks that span them."""
