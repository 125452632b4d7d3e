"""Stand-ins for hardware that the machine does not have."""
