"""The subcommands of ``uneven-tp`` and what ``--help`` says about each."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_uneven_tp import __version__

PROGRAM = "uneven-tp"

_OPTIONS = """\
options
  --config-name NAME   gpt_tiny_cpu (default), gpt3_126m, nemo_recipe (any stock NeMo recipe),
                       or a configuration of your own
  --config-dir DIR     a folder with configurations of your own
  --cfg job            print the configuration and stop
  --help, --version
"""
_OVERRIDES = """\
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
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand: ``function`` of module ``nemo_uneven_tp.cli.NAME`` runs it.

    ``summary`` is its lines in the general help, ``text`` what its own help adds.
    """

    summary: str
    text: str
    usage: str = "[--config-name NAME] [KEY=VALUE ...]"
    composes: bool = True


COMMANDS = {
    "pretrain": Command(
        summary="train; starts its own processes unless torchrun or Slurm has started it",
        text="""\
Trains, with one process per rank on this machine, or as one of the processes that torchrun
or srun has started with the same command on every node. Leaves run_dir/ with config.yaml,
plan.json, metrics.jsonl (a line per step), result.json, train.log and checkpoints/.

examples
  uneven-tp pretrain data.paths=my.txt uneven_tp.failed_ranks=[3]
  uneven-tp pretrain run_dir=runs/job checkpoint.every_n_steps=100 resume.auto=true
  srun uneven-tp pretrain --config-name gpt3_126m trainer.num_nodes=4 uneven_tp.failed_ranks=[17]
""",
    ),
    "plan": Command(
        summary="print who holds, sends and computes what, and start nothing (--json: as JSON)",
        usage="[--json] [--config-name NAME] [KEY=VALUE ...]",
        text="""\
Prints the plan of a run: replicas and their degrees, each rank's share of the model, the
groups in which gradients meet, micro-batches. Starts nothing and writes nothing.

examples
  uneven-tp plan uneven_tp.failed_ranks=[3]
  uneven-tp plan --config-name nemo_recipe recipe.name=llama3_8b uneven_tp.failed_ranks=[5] \\
      ++recipe.overrides.trainer.strategy.tensor_model_parallel_size=4 \\
      ++recipe.overrides.trainer.strategy.context_parallel_size=1
""",
    ),
    "bench": Command(
        summary="""\
count what each rank sends and holds, and time it against stock and its peers
             (--json; --counts-only)""",
        usage="[--json] [--counts-only] [--config-name NAME] [KEY=VALUE ...]",
        text="""\
Runs real steps on real processes and counts the bytes each rank sends, its optimizer state and
its FLOPs; without --counts-only also times them in pairs.

example
  uneven-tp bench uneven_tp.failed_ranks=[3] --counts-only
""",
    ),
    "checkpoint": Command(
        summary="""\
inspect|verify PATH
             what checkpoints hold, and whether they are whole (--json)""",
        usage="inspect|verify PATH [--json]",
        composes=False,
        text="""\
inspect prints what the checkpoints at PATH hold: step, the layout they come from, tensors with
their global shapes and sizes, and whether all files are as they were written. verify does the
checks alone and exits with 1 if anything is damaged. PATH: a run_dir or a checkpoint folder.
""",
    ),
    "goodput": Command(
        summary="""\
report RUN | compare BASELINE RUN...
             what the time of a job went into, failures and the way back (--json; --html FILE)""",
        usage="report RUN | compare BASELINE RUN... [--json] [--html FILE]",
        composes=False,
        text="""\
report prints what the wall time of a run went into, read from events.jsonl in its run_dir: kept
steps and classes of badput, which add up to the wall time; time, token and GPU goodput; each
failure with the times of the way back. compare puts runs of the same job side by side and refuses
runs of another model, batch or data. --html FILE writes a page with plots, which needs plotly.

examples
  uneven-tp goodput report runs/job
  uneven-tp goodput compare runs/stock runs/uneven --html goodput.html
""",
    ),
    "demo": Command(
        summary="train gpt_tiny_cpu twice, stock and with a lost rank, and compare the losses",
        text="""\
Trains gpt_tiny_cpu on this machine twice, stock and with a lost rank, and compares the losses
step by step. Overrides go to both runs, those of uneven_tp to the second.
""",
    ),
}


def general_help() -> str:
    """What ``uneven-tp --help`` prints."""
    commands = "".join(f"  {name:<10} {c.summary}\n" for name, c in COMMANDS.items())
    return f"""\
{PROGRAM} {__version__}: NeMo GPT pretraining that goes on after it has lost a GPU.

usage: {PROGRAM} COMMAND [--config-name NAME] [KEY=VALUE ...]

commands ({PROGRAM} COMMAND --help tells more)
{commands}
{_OPTIONS}
{_OVERRIDES}"""


def help_of(name: str) -> str:
    """What ``uneven-tp NAME --help`` prints."""
    command = COMMANDS[name]
    shared = f"\n{_OPTIONS}\n{_OVERRIDES}" if command.composes else ""
    return f"usage: {PROGRAM} {name} {command.usage}\n\n{command.text}{shared}"
