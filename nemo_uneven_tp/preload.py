"""What the fork server of a launcher imports, once, so that its worker processes need not.

A worker that is forked from it starts in a fraction of a second, where the import of NeMo takes
10 to 20. Nothing here may start CUDA or a thread that a fork would lose. Imports the heavy
packages as its only purpose; nobody else imports this module.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback

from nemo_uneven_tp.processes import die_with_parent

MODULES = ("nemo_uneven_tp.nemo.pretrain", "nemo_uneven_tp.nemo.strategy")


def load() -> None:
    """Import :data:`MODULES`. An error is left to the workers, which meet it again and tell it."""
    die_with_parent()
    sys.stdout.flush()
    terminal = os.dup(1)
    os.dup2(2, 1)  # libraries that print when they are imported
    # The imports make millions of objects that stay: collecting among them is wasted time, and
    # would later copy the pages that the workers share.
    gc.disable()
    try:
        for module in MODULES:
            importlib.import_module(module)
    except Exception:
        traceback.print_exc()
    finally:
        gc.freeze()
        gc.enable()
        sys.stdout.flush()
        os.dup2(terminal, 1)
        os.close(terminal)


load()
