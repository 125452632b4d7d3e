"""What moves images between tiers: the only owner of threads in Python."""
