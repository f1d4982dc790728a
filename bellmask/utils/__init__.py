"""What every folder uses: errors, files, cached results, noise, statistics, console, processes."""
