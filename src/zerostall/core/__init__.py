"""Pure data and pure decisions: layout, names, small values, records, checksums, retention.

Nothing in here does I/O, reads a clock, starts a thread or knows torch.
"""
