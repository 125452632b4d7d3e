"""The crash ring: kills, faults and damage at every place where they can come, and what must be true afterwards."""
