"""Config groups of nemo-uneven-tp, installed as ``nemo_uneven_tp.conf``."""
