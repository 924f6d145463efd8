"""``python -m nemo_uneven_tp`` is the same as the console script ``uneven-tp``."""

from __future__ import annotations

import sys

from nemo_uneven_tp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
