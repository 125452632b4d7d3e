"""A fault injector for file calls: C in rules.c and calls.c, Python in faults.py."""
