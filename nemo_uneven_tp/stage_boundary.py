"""What crosses between two pipeline stages whose cells differ in degree (pure integers).

An activation, or its gradient, has ``rows`` positions of the sequence with ``width`` elements
each. Without sequence parallelism every rank of a cell holds all of it: the sending ranks
share the work evenly, each receiving rank gets an equal part, and an all-gather inside the
receiving cell, where the network is fast, makes it whole (arXiv 2504.06095, mixed stages).
With sequence parallelism a rank holds a block of rows, and the receiver's block is made up of
parts of the senders'. Either way every element crosses once.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_uneven_tp.shares import Boundaries, block_boundaries, even_boundaries


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements ``[start, stop)`` of the flat activation, between ranks of two cells.

    ``sender`` and ``receiver`` are tensor-parallel ranks in their cells.
    """

    sender: int
    receiver: int
    start: int
    stop: int


def block_of(rows: int, degree: int) -> int:
    """Rows a rank of a sequence-parallel cell holds, the padding of the last ones included."""
    return -(-rows // degree)


def row_boundaries(rows: int, width: int, degree: int) -> Boundaries:
    """Flat boundaries of the rows each rank of a sequence-parallel cell holds, without padding."""
    return tuple(width * row for row in block_boundaries(rows, degree))


def transfers(
    rows: int, width: int, senders: int, receivers: int, sequence_parallel: bool
) -> list[Transfer]:
    """Every message of one crossing; at most one between any two ranks.

    Args:
        rows, width: of the whole activation, padding left out.
        senders, receivers: degrees of the two cells.
    """
    if sequence_parallel:
        sent = row_boundaries(rows, width, senders)
        wanted = row_boundaries(rows, width, receivers)
    else:
        sent = even_boundaries(rows * width, senders)
        wanted = block_boundaries(rows * width, receivers)
    found = []
    for sender in range(senders):
        for receiver in range(receivers):
            start = max(sent[sender], wanted[receiver])
            stop = min(sent[sender + 1], wanted[receiver + 1])
            if start < stop:
                found.append(Transfer(sender, receiver, start, stop))
    return found
