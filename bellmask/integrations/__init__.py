"""bellmask inside other people's trainers."""
