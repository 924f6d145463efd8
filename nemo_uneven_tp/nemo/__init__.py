"""Glue to NeMo 2: strategy, data, run set-up; everything that imports ``nemo``."""
