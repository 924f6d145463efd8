"""Plain-text tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?[\d.,]+(e-?\d+)?( [KMGT]?i?B)?")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns under their headers; columns of numbers and sizes are set to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *texts]) for i in range(len(header))]
    right = [all(_NUMBER.fullmatch(row[i]) for row in texts) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *(line(row) for row in texts)])


def size(count: float) -> str:
    """Bytes in the largest fitting binary unit: ``1.50 MiB``."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.2f} {_UNITS[power]}"


def ranks(numbers: Sequence[int]) -> str:
    """Ranks with runs pulled together: ``0-3,6``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
