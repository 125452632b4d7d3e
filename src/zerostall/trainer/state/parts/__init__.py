"""The kinds of objects a state is made of, one file each."""
