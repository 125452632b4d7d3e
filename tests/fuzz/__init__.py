"""Fuzzing of everything that reads bytes from elsewhere: files of a run, other people's files, messages."""
