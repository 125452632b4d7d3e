"""Measurements, each a module to run by itself (`python -m benchmarks.loop_time`), all together by `make bench`.

They write benchmarks/results/: raw samples with hardware, versions and command as JSON, a table, a plot. Rules for
numbers are in CONTRIBUTING.md.
"""
