"""Object stores for tests: a real S3 server on a port that the system picks, and what may go wrong on the way to it."""
