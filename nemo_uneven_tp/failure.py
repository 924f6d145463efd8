"""How a failing worker process says why, in one sentence, to the process that started it.

torch.distributed's launcher gives each worker a file for that (``TORCHELASTIC_ERROR_FILE``)
and hands its message to whoever called it. Imports no torch: a worker may fail before that.
"""

from __future__ import annotations

import json
import os
import sys
import time

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def report(sentence: str) -> None:
    """Leave ``sentence`` for the launcher, or print it to stderr where there is none."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path:
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": sentence, "timestamp": int(time.time())}, file)
            return
        except OSError:
            pass  # then stderr, which is always there
    sys.stderr.write(f"uneven-tp: {sentence}\n")
