"""Several ranks, each a process: forked from a warm one, with a gloo group of their own."""
