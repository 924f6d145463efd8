"""How a cell's work is cut among its ranks: what the user may ask for (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_uneven_tp.speeds import SpeedTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """Keys of ``uneven_tp`` that shape the shares inside cells.

    ``rank_speeds``: relative speed of nominal ranks (see :mod:`.speeds`); ``None``: all alike.
    """

    rank_speeds: SpeedTable = None

    @classmethod
    def of(cls, uneven_tp: Mapping[str, Any]) -> LayoutOptions:
        """From the ``uneven_tp`` group of a checked configuration."""
        return cls(rank_speeds=uneven_tp["rank_speeds"])
