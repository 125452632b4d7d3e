"""To and from other people's files, and into new tensors: export, import, load."""
