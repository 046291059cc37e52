"""Faults for `tests/mutate.py`, by what they are put into."""
