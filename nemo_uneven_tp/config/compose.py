"""Command line -> composed configuration, by Hydra's own command line.

``hydra.main`` reads ``--config-name``, ``--config-dir``, ``--cfg``, ``--info`` and the
overrides. The task it runs only hands the composed config back; the work happens after
Hydra has returned, so an error in it is not reported as Hydra's. Every error of Hydra's
or OmegaConf's becomes a :class:`~nemo_uneven_tp.errors.UserError` of one sentence.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_uneven_tp.config.keys import groups, is_known, type_in_words, type_of, unknown_key
from nemo_uneven_tp.config.schema import RecipeRunConfig, RunConfig
from nemo_uneven_tp.errors import UserError

DEFAULT_CONFIG_NAME = "gpt_tiny_cpu"
RECIPE_CONFIG_NAME = "nemo_recipe"

_TAKES_A_VALUE = {
    *("--config-name", "-cn", "--config-dir", "-cd", "--config-path", "-cp"),
    *("--cfg", "-c", "--package", "-p"),
}
_FLAGS = {
    *("--hydra-help", "--info", "-i", "--multirun", "-m", "--resolve", "--run", "-r"),
    *("--shell-completion", "-sc"),
}
# Hydra must leave nothing behind: no folder, no log file of its own, no change of directory.
_HYDRA_OVERRIDES = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
_OVERRIDE = re.compile(
    r"^(?P<sign>\+\+|\+|~)?(?P<key>[^=@]+)(@[^=]*)?(=(?P<value>.*))?$", re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """Arguments of a subcommand, as Hydra understands them."""

    options: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def config_name(self) -> str:
        """The name of the primary config."""
        return self.option("--config-name", "-cn") or DEFAULT_CONFIG_NAME

    @property
    def schema(self) -> type:
        """The schema a key of this command line most likely belongs to."""
        return RecipeRunConfig if self.config_name == RECIPE_CONFIG_NAME else RunConfig

    def option(self, *names: str) -> str | None:
        """The value of an option, ``None`` if it is not given."""
        value = None
        for i, token in enumerate(self.options):
            if token in names and i + 1 < len(self.options):
                value = self.options[i + 1]
            for name in names:
                if token.startswith(f"{name}="):
                    value = token.removeprefix(f"{name}=")
        return value


def split_arguments(arguments: Sequence[str]) -> CommandLine:
    """Tell options from overrides; Hydra wants the options first, people mix them.

    Raises:
        UserError: if an option is unknown or its value is missing.
    """
    options: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if not token.startswith("-"):
            overrides.append(token)
            continue
        name = token.partition("=")[0]
        if name not in _TAKES_A_VALUE | _FLAGS:
            raise UserError(f"{name} is not an option; --help lists the options")
        options.append(token)
        takes_choice = token in ("--info", "-i") and rest and re.fullmatch(r"[a-z-]+", rest[0])
        if token in _TAKES_A_VALUE and not rest:
            raise UserError(f"{token} needs a value; --help lists the options")
        if token in _TAKES_A_VALUE or takes_choice:
            options.append(rest.pop(0))
    return CommandLine(options=tuple(options), overrides=tuple(overrides))


def compose(program: str, arguments: Sequence[str]) -> DictConfig | None:
    """Compose the configuration that ``arguments`` describe.

    Returns ``None`` if they ask Hydra for something else, which it has then printed
    (``--cfg``, ``--info``, ``--hydra-help``, ``--shell-completion``).

    Raises:
        UserError: for anything that Hydra or OmegaConf refuses.
    """
    line = split_arguments(arguments)
    if {"--multirun", "-m"} & set(line.options):
        raise UserError("--multirun is not supported; run one configuration per command")
    composed: list[DictConfig] = []
    task = hydra.main(
        config_path="pkg://nemo_uneven_tp.recipes",
        config_name=DEFAULT_CONFIG_NAME,
        version_base="1.3",
    )(lambda config: composed.append(config))
    said = io.StringIO()
    with (
        _command_line(program, [*line.options, *_HYDRA_OVERRIDES, *line.overrides]),
        redirect_stderr(said),
    ):
        try:
            task()
        except Exception as error:  # Hydra lets all kinds through, and nothing but Hydra ran
            raise UserError(_sentence(error, line)) from error
        except SystemExit as leaving:
            if leaving.code not in (0, None):
                usage = said.getvalue().rpartition("error: ")[2].strip()
                raise UserError(f"{usage or leaving.code}; --help lists the options") from leaving
    sys.stderr.write(said.getvalue())
    return composed[0] if composed else None


def name_run_after_job(config: DictConfig, job_id: str | None) -> None:
    """Put a job id where ``run_dir`` has the time, which differs between processes.

    Used under torchrun and Slurm, where every process composes its own configuration.

    Raises:
        UserError: if ``run_dir`` holds the time and there is no job id to put there.
    """
    raw = OmegaConf.to_container(config, resolve=False)
    run_dir = str(raw.get("run_dir")) if isinstance(raw, dict) else ""
    if "${now:" not in run_dir:
        return
    if not job_id:
        raise UserError(
            f"run_dir={run_dir} differs between the processes of a launcher that has no job id; "
            "set run_dir=..., or give torchrun --rdzv-id"
        )
    config["run_dir"] = re.sub(r"\$\{now:[^}]*\}", job_id, run_dir)


def config_names() -> list[str]:
    """The configurations that come with the package."""
    from importlib.resources import files

    recipes = files("nemo_uneven_tp.recipes").iterdir()
    return sorted(Path(f.name).stem for f in recipes if f.name.endswith(".yaml"))


@contextmanager
def _command_line(program: str, arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads ``sys.argv``, and passes errors on only with this variable set."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [program, *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _sentence(error: Exception, line: CommandLine) -> str:
    if isinstance(error, MissingConfigException):
        return _missing_config(error, line)
    said = f"{error} {error.__cause__}"
    for override in line.overrides:
        match = _OVERRIDE.match(override)
        if match is None:
            continue
        key = match["key"]
        if match["value"] is None and match["sign"] != "~":
            return f"{override} is not an override; write key=value"
        if not key.startswith("hydra") and not is_known(key, line.schema):
            return unknown_key(key, line.schema)
        if f"override {override}" in said and "Cannot merge" in said:
            return f"{override} must be {type_in_words(type_of(key, line.schema))}"
        if f"argument '{override}'" in said and "Ambiguous" in said:
            return f"{override} reads as several values; write {key}=[{match['value']}]"
    if isinstance(error, OverrideParseException):
        why = str(error.message).splitlines()[0]
        return f"{error.override} can't be read as an override ({why}); quote special characters"
    if not isinstance(error, (HydraException, OmegaConfBaseException, YAMLError)):
        return f"Hydra can't compose {' '.join(line.overrides)} ({error}); check the overrides"
    text = f"{error}" if error.__cause__ is None else f"{error} {error.__cause__}"
    lines = [part.strip() for part in text.splitlines()]
    kept = [part for part in lines if part and "hydra.cc" not in part and "full_key" not in part]
    return " ".join(kept).rstrip(".") or type(error).__name__


def _missing_config(error: MissingConfigException, line: CommandLine) -> str:
    missing = error.missing_cfg_file or ""
    if missing.removesuffix(".yaml") == line.config_name.removesuffix(".yaml"):
        return (
            f"--config-name {line.config_name}: no such configuration; choose one of "
            f"{', '.join(config_names())}, or add a folder of your own with --config-dir"
        )
    group, _, choice = missing.rpartition("/")
    if group not in groups(RunConfig) and group not in groups(RecipeRunConfig):
        return f"no configuration called {missing}"
    options = ", ".join(error.options or ())
    return f"{group}={choice}: no such choice; {group} is one of {options}"
