"""The node's agent: lends memory that outlives trainers, seals images, carries them to disk. Never imports torch."""
