"""The command line ``uneven-tp``: pretrain, plan, demo."""
