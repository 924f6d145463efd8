"""Decisions of a supervisor: which ranks a job goes on without after a failure."""
