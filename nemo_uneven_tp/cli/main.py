"""Entry point of ``uneven-tp``: picks the subcommand, turns user errors into one sentence.

Exit codes: 0 done; 1 a run failed; 2 bad input, one sentence on stderr and nothing written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nemo_uneven_tp import __version__
from nemo_uneven_tp.errors import USER_ERROR_EXIT_CODE, UserError

PROGRAM = "uneven-tp"
INTERRUPTED_EXIT_CODE = 130

HELP = f"""\
{PROGRAM} {__version__}: NeMo GPT pretraining that goes on after it has lost a GPU.

usage: {PROGRAM} COMMAND [--config-name NAME] [KEY=VALUE ...]

commands
  pretrain   train; starts its own processes unless torchrun or Slurm has started it
  plan       print who holds, sends and computes what, and start nothing (--json: as JSON)
  bench      count what each rank sends and holds, and time it against stock and its peers
             (--json; --counts-only)
  checkpoint inspect|verify PATH
             what checkpoints hold, and whether they are whole (--json)
  demo       train gpt_tiny_cpu twice, stock and with a lost rank, and compare the losses

options
  --config-name NAME   gpt_tiny_cpu (default), gpt3_126m, nemo_recipe (any stock NeMo recipe),
                       or a configuration of your own
  --config-dir DIR     a folder with configurations of your own
  --cfg job            print the configuration and stop
  --help, --version

KEY=VALUE are Hydra overrides; keys are NeMo's and Megatron's own names. Often used:
  uneven_tp.failed_ranks=[3]                ranks that are gone, numbered as in the whole job
  uneven_tp=off                             stock NeMo, untouched
  data.paths=[my.txt,books/]                text files, folders or globs
  trainer.max_steps=100  trainer.accelerator=gpu  trainer.devices=8  trainer.num_nodes=1
  strategy.tensor_model_parallel_size=4     the degree of the whole job
  data.global_batch_size=256  data.micro_batch_size=2  optim.lr=3e-4
  run_dir=runs/mine                         where metrics.jsonl, train.log, ... go
  checkpoint.every_n_steps=100  checkpoint.keep=2  checkpoint.async_save=true
  resume.auto=true                          go on in the same run_dir, in any layout
  resume.from=PATH  resume.fall_back=true   start from a checkpoint, stock NeMo's too

examples
  {PROGRAM} demo
  {PROGRAM} plan uneven_tp.failed_ranks=[3]
  {PROGRAM} pretrain data.paths=my.txt uneven_tp.failed_ranks=[3]
  {PROGRAM} plan --config-name nemo_recipe recipe.name=llama3_8b uneven_tp.failed_ranks=[5] \\
      ++recipe.overrides.trainer.strategy.tensor_model_parallel_size=4 \\
      ++recipe.overrides.trainer.strategy.context_parallel_size=1
"""


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
    if not given or "--help" in given or "-h" in given:
        sys.stdout.write(HELP)
        return 0 if given else USER_ERROR_EXIT_CODE
    if "--version" in given:
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        return 0
    command, rest = given[0], given[1:]
    if command == "plan":
        from nemo_uneven_tp.cli.plan import plan

        return plan(rest)
    if command == "pretrain":
        from nemo_uneven_tp.cli.pretrain import pretrain

        return pretrain(rest)
    if command == "bench":
        from nemo_uneven_tp.cli.bench import bench

        return bench(rest)
    if command == "checkpoint":
        from nemo_uneven_tp.cli.checkpoint import checkpoint

        return checkpoint(rest)
    if command == "demo":
        from nemo_uneven_tp.cli.demo import demo

        return demo(rest)
    raise UserError(
        f"{command}: no such command; choose pretrain, plan, checkpoint, bench or demo (--help "
        "tells more)"
    )
