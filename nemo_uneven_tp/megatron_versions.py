"""What differs between the Megatron-Core versions we run on, in one place.

Developed on 0.15 (the version NeMo 2.7 matches); the core also runs on 0.16.
"""

from __future__ import annotations

import megatron.core
from packaging.version import Version

MEGATRON = Version(megatron.core.__version__)

GATED_FC1_STRIDE = 2 if Version("0.16.0rc0") <= MEGATRON else 1
"""How many equal blocks the master of a gated ``linear_fc1`` is cut into before each is cut by
rank. Up to 0.15 a rank gets one block and reads it as ``[gate; up]``, so the same master means
another function at every degree; from 0.16 on it gets a piece of each half."""
