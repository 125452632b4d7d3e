"""What a save costs training on a GPU, beside other ways to save. See `python -m benchmarks.stall --help`."""
