"""The plugin in a stock NeMo recipe: from Python (:func:`apply`) and from a configuration.

:func:`apply` exchanges one node of the recipe's tree, ``MegatronStrategy``, and leaves the
rest alone; the strategy does everything else at run time. Planning reads sizes off the tree,
so it builds no model and needs neither GPUs nor a network.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fiddle as fdl
import nemo_run as run
from nemo import lightning as nl
from nemo.collections import llm

from nemo_uneven_tp.errors import UnsupportedError, UserError
from nemo_uneven_tp.layout_options import LayoutOptions
from nemo_uneven_tp.model_shape import ModelShape
from nemo_uneven_tp.nemo.recipe_support import check_supported, value_name
from nemo_uneven_tp.nemo.recipe_tree import build_recipe, class_of, value_at
from nemo_uneven_tp.nemo.shape import model_shape
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.planner import PlanRequest
from nemo_uneven_tp.topology import Degrees, make_topology

if TYPE_CHECKING:
    from nemo_uneven_tp.nemo.logs import Console

logger = logging.getLogger(__name__)

DEFAULT_TOKENIZER_VOCAB_SIZE = 50257
"""Entries of GPT-2's tokenizer, which NeMo's data modules take where none is given
(``get_nmt_tokenizer("megatron", "GPT2BPETokenizer")``), whatever the model's own is.
Source: the published ``vocab.json`` of GPT-2."""

_STRATEGY = "recipe.trainer.strategy"


def apply(
    recipe: fdl.Buildable,
    failed_ranks: Sequence[int] = (),
    degrees: Degrees | None = None,
    allow_dropped_replicas: bool = False,
    reference_tensor_parallel_size: int | None = None,
    check_replicas_every: int | None = None,
    layout_options: LayoutOptions | None = None,
) -> Any:
    """Put uneven tensor parallelism into a NeMo recipe, in place.

    Args:
        recipe: what a ``pretrain_recipe`` of ``nemo.collections.llm.recipes`` returns. Its
            ``trainer.devices`` and ``num_nodes`` are nominal: failed ranks are counted in.
        failed_ranks: nominal ranks that are gone.
        degrees: instead of ``failed_ranks``, the degree of each data-parallel replica, or a row of
            degrees (one per pipeline stage) per replica.
        allow_dropped_replicas: whether a replica with no living rank may be dropped.
        reference_tensor_parallel_size: the undamaged layout whose padded vocabulary and initial
            weights the run reproduces; default: the nominal one.
        check_replicas_every: steps between comparisons of the replicas' weights; default: none.
        layout_options: how cells cut their work, such as ``LayoutOptions(rank_speeds={3: 0.7})``.

    Returns:
        ``recipe``, its ``trainer.strategy`` now ``UnevenMegatronStrategy`` with all arguments
        it had before and the ones above.

    Raises:
        UserError: the ranks or degrees make no sense.
        UnsupportedError: the recipe asks for what is not supported yet.
    """
    from nemo_uneven_tp.nemo.strategy import UnevenMegatronStrategy

    strategy = _strategy_of(recipe)
    check_supported(recipe)
    _check_ranks(recipe, failed_ranks, degrees, allow_dropped_replicas)
    fdl.update_callable(strategy, UnevenMegatronStrategy)
    strategy.failed_ranks = list(failed_ranks)
    strategy.degrees = None if degrees is None else list(degrees)
    strategy.allow_dropped_replicas = allow_dropped_replicas
    strategy.reference_tensor_parallel_size = reference_tensor_parallel_size
    if layout_options is not None and layout_options != LayoutOptions():
        strategy.layout_options = layout_options
    if check_replicas_every:
        _add_replica_check(recipe, check_replicas_every)
    return recipe


def request_from_recipe(
    recipe: fdl.Buildable,
    failed_ranks: Sequence[int] = (),
    degrees: Degrees | None = None,
    allow_dropped_replicas: bool = False,
    reference_tensor_parallel_size: int | None = None,
    layout_options: LayoutOptions | None = None,
) -> PlanRequest:
    """What to plan for a recipe, read off its tree.

    Raises:
        UserError: a size is missing or cannot be told without running the recipe.
    """
    strategy = _strategy_of(recipe)
    return PlanRequest(
        model=shape_from_recipe(recipe),
        tensor_model_parallel_size=_size(recipe, "trainer.strategy.tensor_model_parallel_size"),
        pipeline_model_parallel_size=_size(recipe, "trainer.strategy.pipeline_model_parallel_size"),
        context_parallel_size=_size(recipe, "trainer.strategy.context_parallel_size"),
        world_size=_size(recipe, "trainer.devices") * _size(recipe, "trainer.num_nodes"),
        global_batch_size=_size(recipe, "data.global_batch_size"),
        micro_batch_size=_size(recipe, "data.micro_batch_size"),
        failed_ranks=tuple(failed_ranks),
        degrees=None if degrees is None else tuple(degrees),
        allow_dropped_replicas=allow_dropped_replicas,
        reference_tensor_parallel_size=reference_tensor_parallel_size,
        sequence_parallel=bool(value_at(strategy, "sequence_parallel", False)),
        options=layout_options or LayoutOptions(),
    )


def shape_from_recipe(recipe: fdl.Buildable) -> ModelShape:
    """The model's shape, from ``model.config`` in the tree and its class's defaults."""
    config = value_at(recipe, "model.config")
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if not isinstance(value_at(config, name), int):
            raise UserError(f"recipe.model.config.{name} is not set; planning needs it")
    preset = value_at(config, "vocab_size")
    return model_shape(config, None if preset is not None else tokenizer_vocab_size(recipe))


def tokenizer_vocab_size(recipe: fdl.Buildable) -> int:
    """Entries of the tokenizer the run will use, which is that of its data (``llm.pretrain``).

    Raises:
        UserError: it cannot be built here, for example for want of a network.
    """
    tokenizer = value_at(recipe, "data.tokenizer")
    way_out = (
        "set the padded size with ++recipe.overrides.model.config.vocab_size=N, or give a "
        "tokenizer that is on this machine"
    )
    if tokenizer is None:
        if class_of(value_at(recipe, "data")).__module__.startswith("nemo.collections.llm."):
            logger.warning(
                "recipe.data.tokenizer is not set: NeMo's data modules then take GPT-2's, with %d "
                "entries, whatever the model's own is",
                DEFAULT_TOKENIZER_VOCAB_SIZE,
            )
            return DEFAULT_TOKENIZER_VOCAB_SIZE
        raise UserError(
            f"recipe.data.tokenizer is not set, so the vocabulary is unknown; {way_out}"
        )
    try:
        built = fdl.build(tokenizer) if isinstance(tokenizer, fdl.Buildable) else tokenizer
        return int(built.vocab_size)
    except Exception as error:  # whatever the tokenizer's library raises
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"recipe.data.tokenizer={value_name(tokenizer)} cannot be built here ({reason}), so "
            f"the vocabulary is unknown; {way_out}"
        ) from error


# --- from a checked configuration ---------------------------------------------------------


def recipe_of(config: Mapping[str, Any]) -> run.Partial:
    """The stock recipe that ``config["recipe"]`` names, with its overrides."""
    recipe = config["recipe"]
    return build_recipe(recipe["name"], recipe["args"], recipe["overrides"])


def shape_and_request_from_recipe(config: Mapping[str, Any]) -> PlanRequest:
    """What to plan for a checked configuration of ``--config-name nemo_recipe``.

    Raises:
        UserError: the recipe does not exist, cannot be planned or is not supported.
    """
    recipe = recipe_of(config)
    _strategy_of(recipe)
    if config["uneven_tp"]["enabled"]:
        check_supported(recipe)
    return request_from_recipe(recipe, **_uneven_arguments(config))


def nodes_and_accelerator(config: Mapping[str, Any]) -> tuple[int, str]:
    """``trainer.num_nodes`` and ``trainer.accelerator`` of the recipe."""
    recipe = recipe_of(config)
    return _size(recipe, "trainer.num_nodes"), str(value_at(recipe, "trainer.accelerator", "auto"))


def run_recipe(config: Mapping[str, Any], plan: Plan, run_dir: Path, console: Console) -> None:
    """Train as a recipe says, as one of the processes of the run.

    Like :func:`nemo_uneven_tp.nemo.pretrain.run`, of which it is the counterpart for
    ``--config-name nemo_recipe``. Logs and checkpoints of NeMo's go to ``run_dir/nemo``, unless
    the recipe says where.
    """
    from nemo_uneven_tp import cpu_mode
    from nemo_uneven_tp.nemo.callbacks import RunReport
    from nemo_uneven_tp.nemo.goodput_callback import GoodputCallback
    from nemo_uneven_tp.nemo.pretrain import seeded

    on_cpu = cpu_mode.activate()
    recipe = recipe_of(config)
    if config["uneven_tp"]["enabled"]:
        apply(recipe, **_uneven_arguments(config))
        recipe.trainer.strategy.expected_plan_digest = plan.digest
    # Ours prints the steps; NeMo's, on rank 0 alone, enters a collective of the world.
    _strategy_of(recipe).replace_progress_bar = False
    if on_cpu:
        _settle_on_cpu(recipe)
    recipe.trainer.enable_progress_bar = False
    if value_at(recipe, "log") is None:
        recipe.log = run.Config(nl.NeMoLogger)
    if value_at(recipe, "log.log_dir") is None:
        recipe.log.log_dir = str(run_dir / "nemo")
    report = RunReport(
        run_dir,
        console,
        tokens_per_step=plan.global_batch_size * _size(recipe, "data.seq_length"),
        global_batch_size=plan.global_batch_size,
        check_replicas_every=config["uneven_tp"]["check_replicas_every"],
    )
    recorder = GoodputCallback(run_dir, process_start_written=True)
    stock = value_at(recipe, "trainer.callbacks") or []
    recipe.trainer.callbacks = [recorder, *stock, report]
    with seeded(config["seed"]):
        fdl.build(recipe)()


def _uneven_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    uneven_tp = config["uneven_tp"]
    return {
        "failed_ranks": tuple(uneven_tp["failed_ranks"] or ()),
        "degrees": None if uneven_tp["degrees"] is None else tuple(uneven_tp["degrees"]),
        "allow_dropped_replicas": uneven_tp["allow_dropped_replicas"],
        "reference_tensor_parallel_size": config["model"]["reference_tensor_parallel_size"],
        "layout_options": LayoutOptions.of(uneven_tp),
    }


def _strategy_of(recipe: Any) -> Any:
    """The node of ``MegatronStrategy``, or of ours where the recipe has it already."""
    if not isinstance(recipe, fdl.Buildable):
        raise UserError(
            f"recipe: {type(recipe).__name__} is no NeMo recipe; give what a pretrain_recipe of "
            "nemo.collections.llm.recipes returns"
        )
    strategy = value_at(recipe, "trainer.strategy")
    kind = class_of(strategy)
    if not isinstance(strategy, fdl.Buildable) or not (
        kind is nl.MegatronStrategy or getattr(kind, "is_uneven", False)
    ):
        raise UnsupportedError(
            f"{_STRATEGY}={value_name(strategy)} is not a run.Config of NeMo's MegatronStrategy, "
            "the only one uneven_tp can stand in for"
        )
    return strategy


def _check_ranks(
    recipe: fdl.Buildable,
    failed_ranks: Sequence[int],
    degrees: Degrees | None,
    allow_dropped_replicas: bool,
) -> None:
    """Refuse bad ranks now, where the recipe tells how many there are."""
    sizes = [value_at(recipe, f"trainer.{name}") for name in ("devices", "num_nodes")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return  # devices="auto": the strategy checks once it knows
    make_topology(
        tensor_model_parallel_size=_size(recipe, "trainer.strategy.tensor_model_parallel_size"),
        world_size=sizes[0] * sizes[1],
        failed_ranks=failed_ranks,
        degrees=degrees,
        allow_dropped_replicas=allow_dropped_replicas,
    )


def _add_replica_check(recipe: Any, every: int) -> None:
    from nemo_uneven_tp.nemo.replica_check_callback import ReplicaCheck

    callbacks = [
        callback
        for callback in value_at(recipe, "trainer.callbacks") or []
        if class_of(callback) is not ReplicaCheck
    ]
    recipe.trainer.callbacks = [*callbacks, run.Config(ReplicaCheck, every=every)]


def _settle_on_cpu(recipe: Any) -> None:
    """What a machine without GPUs needs, which recipes are not made for."""
    from nemo_uneven_tp.nemo.cpu_strategy import CPUMegatronStrategy
    from nemo_uneven_tp.nemo.pretrain import CPU_MODEL_SETTINGS

    accelerator = value_at(recipe, "trainer.accelerator")
    if accelerator != "cpu":
        raise UserError(
            f"recipe.trainer.accelerator={accelerator}, but torch finds no GPU here; start on a "
            "machine with GPUs, or set ++recipe.overrides.trainer.accelerator=cpu"
        )
    if class_of(value_at(recipe, "data")) is llm.MockDataModule:
        raise UserError(
            "recipe.data=MockDataModule gives no attention mask, which only Transformer Engine can "
            "do without; set ++recipe.overrides.data._target_="
            "nemo.collections.llm.PreTrainingDataModule and its fields"
        )
    for name, value in CPU_MODEL_SETTINGS.items():
        setattr(recipe.model.config, name, value)
    strategy = _strategy_of(recipe)
    if class_of(strategy) is nl.MegatronStrategy:
        fdl.update_callable(strategy, CPUMegatronStrategy)


def _size(recipe: Any, path: str) -> int:
    value = value_at(recipe, path)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(
            f"recipe.{path}={value} must be an integer of at least 1; set it in the recipe or with "
            f"++recipe.overrides.{path}=N"
        )
    return value
