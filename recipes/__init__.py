"""Complete run configurations of nemo-uneven-tp, installed as ``nemo_uneven_tp.recipes``."""
