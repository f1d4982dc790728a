"""The longer subcommands, one file each."""
