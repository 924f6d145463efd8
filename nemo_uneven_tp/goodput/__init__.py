"""Goodput of a job from its ``events.jsonl``: books that balance, and comparisons (pure)."""
