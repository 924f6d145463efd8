"""Which versions of torch, Megatron-Core and NeMo work together.

Read from package metadata only: asking costs milliseconds, importing NeMo half a minute.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from nemo_uneven_tp.errors import UserError

WORKING = "nemo_toolkit 2.7, megatron-core 0.15 or 0.16, torch 2.6 or newer, Python 3.11 or newer"
_REMEDY = (
    "without a GPU, install torch==2.13.0 and then nemo-uneven-tp[cpu] with constraints/cpu.txt; "
    "with GPUs, use a NeMo container with these versions"
)
# Distribution, module that shows it is there even without metadata, and what is accepted.
_NEEDED: tuple[tuple[str, str, Callable[[tuple[int, ...]], bool]], ...] = (
    ("torch", "torch", lambda v: v >= (2, 6)),
    ("megatron-core", "megatron.core", lambda v: v[:2] in ((0, 15), (0, 16))),
    ("nemo_toolkit", "nemo", lambda v: v[:2] == (2, 7)),
    ("nemo_run", "nemo_run", lambda v: True),
    ("lightning", "lightning", lambda v: True),
)


def check_versions(read: Callable[[str], str] = version) -> None:
    """Check that everything a run imports is there in a version that works.

    Args:
        read: gives the version of a distribution, as ``importlib.metadata.version`` does.

    Raises:
        UserError: naming the package, its version and the versions that work together.
    """
    for distribution, module, accepts in _NEEDED:
        try:
            found = read(distribution)
        except PackageNotFoundError as error:
            if _is_importable(module):
                continue  # a source tree on the path, as in some containers: take it as it is
            raise UserError(
                f"the package {distribution} is missing; these work together: {WORKING}; {_REMEDY}"
            ) from error
        if not accepts(_numbers(found)):
            raise UserError(
                f"{distribution} {found} does not work with this version of nemo-uneven-tp; these "
                f"work together: {WORKING}; {_REMEDY}"
            )


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
