"""Entry point of ``uneven-tp``: picks the subcommand, turns user errors into one sentence.

Exit codes: 0 done; 1 a run failed; 2 bad input, one sentence on stderr and nothing written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from nemo_uneven_tp import __version__
from nemo_uneven_tp.cli.help import COMMANDS, PROGRAM, general_help, help_of
from nemo_uneven_tp.errors import USER_ERROR_EXIT_CODE, UserError

INTERRUPTED_EXIT_CODE = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except UserError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROGRAM}: interrupted\n")
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nothing left to say
        return 1


def _run(given: list[str]) -> int:
    command = given[0] if given else ""
    if not given or "--help" in given or "-h" in given:
        sys.stdout.write(help_of(command) if command in COMMANDS else general_help())
        return 0 if given else USER_ERROR_EXIT_CODE
    if "--version" in given:
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        return 0
    if command not in COMMANDS:
        *others, last = COMMANDS
        raise UserError(
            f"{command}: no such command; choose {', '.join(others)} or {last} (--help tells more)"
        )
    # Imported now: most commands need little of the package.
    run = getattr(import_module(f"nemo_uneven_tp.cli.{command}"), command)
    return int(run(given[1:]))
