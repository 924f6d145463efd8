"""Exact counts and paired times of a plan: bytes sent, memory held, step time against peers."""
