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


def report(sentence: str, exit_code: int | None = None) -> None:
    """Leave ``sentence`` for the launcher, or print it to stderr where there is none.

    Args:
        exit_code: what this process is about to end with.
    """
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path:
        try:
            with open(path, "w", encoding="utf-8") as file:
                said = {"message": sentence, "timestamp": int(time.time())}
                json.dump({**said, "exit_code": exit_code}, file)
            return
        except OSError:
            pass  # then stderr, which is always there
    sys.stderr.write(f"uneven-tp: {sentence}\n")
