"""The plugin in stock recipes: what is exchanged, what stays, what is refused, what is planned.

One process for all of it: NeMo takes 20 s to import.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run as run
import pytest
from fiddle import daglish
from lightning.pytorch.callbacks import Callback
from nemo import lightning as nl
from nemo.collections import llm

import nemo_uneven_tp
from nemo_uneven_tp.errors import UnsupportedError, UserError
from nemo_uneven_tp.nemo import recipe as plugin
from nemo_uneven_tp.nemo.recipe_tree import build_recipe, value_at
from nemo_uneven_tp.nemo.strategy import UnevenMegatronStrategy
from nemo_uneven_tp.planner import make_plan

pytestmark = pytest.mark.timeout(180)

STRATEGY = "trainer.strategy"
# What has to change in each stock recipe before uneven_tp takes it: the fields refused.
REFUSED: dict[str, dict[str, Any]] = {
    "llama3_8b": {f"{STRATEGY}.context_parallel_size": 1},
    "llama31_70b": {
        f"{STRATEGY}.pipeline_model_parallel_size": 1,
        f"{STRATEGY}.virtual_pipeline_model_parallel_size": None,
        f"{STRATEGY}.context_parallel_size": 1,
    },
    "gpt3_175b": {
        f"{STRATEGY}.pipeline_model_parallel_size": 1,
        f"{STRATEGY}.virtual_pipeline_model_parallel_size": None,
        "model.config.use_transformer_engine_full_layer_spec": False,
    },
    "mistral_7b": {f"{STRATEGY}.context_parallel_size": 1},
    "qwen2_7b": {},
    "nemotron3_8b": {},
}
UNEVEN = {"failed_ranks", "degrees", "allow_dropped_replicas", "reference_tensor_parallel_size"}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, leaf = path.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = value
    return tree


def leaves(recipe: fdl.Buildable) -> dict[str, Any]:
    """Every value in the tree by its path, and the class or function of every node."""
    found: dict[str, Any] = {}

    def visit(value: Any, state: daglish.State) -> None:
        path = daglish.path_str(state.current_path)
        if isinstance(value, fdl.Buildable):
            found[f"{path}()"] = (type(value), fdl.get_callable(value))
        if state.is_traversable(value):
            for _ in state.yield_map_child_values(value, ignore_leaves=False):
                pass
        else:
            found[path] = value

    daglish.BasicTraversal.run(visit, recipe)  # values that are one object count each
    return found


@pytest.fixture(params=REFUSED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def recipe(name: str) -> Any:
    """The stock recipe with what uneven_tp does not support turned off, at TP4 on 8 GPUs."""
    flat = {**REFUSED[name], f"{STRATEGY}.tensor_model_parallel_size": 4}
    return build_recipe(name, overrides=nested(flat))


def test_only_the_strategy_is_exchanged(recipe: Any) -> None:
    before, copied = leaves(recipe), copy.deepcopy(recipe)
    assert nemo_uneven_tp.apply(recipe, failed_ranks=[5]) is recipe
    after = leaves(recipe)
    added = {f".{STRATEGY}.{name}" for name in UNEVEN - {"failed_ranks"}}
    added.add(f".{STRATEGY}.failed_ranks[0]")
    assert set(after) - set(before) == added
    assert set(before) - set(after) == set()
    changed = {path for path in before if after[path] != before[path]}
    assert changed == {f".{STRATEGY}()"}
    assert after[f".{STRATEGY}()"] == (run.Config, UnevenMegatronStrategy)
    assert before[f".{STRATEGY}()"] == (run.Config, nl.MegatronStrategy)
    assert recipe.trainer.strategy.failed_ranks == [5]
    assert leaves(copied) == before


def test_the_strategy_can_be_built_with_the_stock_arguments(recipe: Any) -> None:
    stock = fdl.build(recipe.trainer.strategy)
    built = fdl.build(plugin.apply(recipe, failed_ranks=[5]).trainer.strategy)
    assert isinstance(built, nl.MegatronStrategy)
    assert built.failed_ranks == (5,)
    assert built.ddp_config == stock.ddp_config
    for field in ("tensor_model_parallel_size", "sequence_parallel", "async_save", "parallel_load"):
        assert getattr(built, field) == getattr(stock, field)


def test_the_stock_recipe_is_refused_where_it_uses_what_is_not_supported(name: str) -> None:
    stock = build_recipe(name)
    before = leaves(stock)
    if not REFUSED[name]:
        plugin.apply(stock)
        return
    with pytest.raises(UnsupportedError) as caught:
        plugin.apply(stock)
    message = str(caught.value)
    assert "\n" not in message
    for path, fix in REFUSED[name].items():
        shown = {None: "null", False: "false"}.get(fix, str(fix))
        assert f"{path}={value_at(stock, path)} (" in message
        assert f"++recipe.overrides.{path}={shown}" in message
    assert message.count("++recipe.overrides.") == len(REFUSED[name])
    assert leaves(stock) == before  # untouched


def test_the_plan_of_each_recipe(name: str, recipe: Any) -> None:
    recipe.trainer.strategy.sequence_parallel = False  # 3 ranks can't cut 8192 positions
    plan = make_plan(plugin.request_from_recipe(recipe, failed_ranks=[5]))
    assert plan.degrees == (4, 3)
    assert plan.world_size == 7
    config = recipe.model.config
    assert plan.model.num_layers == config.num_layers
    assert plan.model.hidden_size == config.hidden_size
    assert plan.model.ffn_hidden_size == config.ffn_hidden_size
    assert plan.model.gated_linear_unit == config.gated_linear_unit
    assert sum(plan.micro_batches) * recipe.data.micro_batch_size == recipe.data.global_batch_size
    if name == "qwen2_7b":
        assert (plan.model.vocab_size, plan.model.should_pad_vocab) == (152064, False)
    else:
        assert (plan.model.vocab_size, plan.vocab_size) == (50257, 50688)


def llama(**flat: Any) -> Any:
    """llama3_8b without context parallelism; ``__`` in a keyword stands for a dot."""
    paths = {key.replace("__", "."): value for key, value in flat.items()}
    paths.setdefault(f"{STRATEGY}.context_parallel_size", 1)
    paths.setdefault(f"{STRATEGY}.tensor_model_parallel_size", 4)
    return build_recipe("llama3_8b", overrides=nested(paths))


def test_all_arguments_of_apply_arrive() -> None:
    recipe = llama()
    callbacks = list(recipe.trainer.callbacks)
    plugin.apply(recipe, degrees=[4, 2], reference_tensor_parallel_size=1, check_replicas_every=10)
    strategy = recipe.trainer.strategy
    assert (strategy.failed_ranks, strategy.degrees) == ([], [4, 2])
    assert strategy.reference_tensor_parallel_size == 1
    assert recipe.trainer.callbacks[:-1] == callbacks
    assert recipe.trainer.callbacks[-1].every == 10
    assert isinstance(fdl.build(recipe.trainer.callbacks[-1]), Callback)


def test_apply_again_replaces_what_it_set() -> None:
    recipe = plugin.apply(llama(), failed_ranks=[5], check_replicas_every=10)
    plugin.apply(recipe, failed_ranks=[1], check_replicas_every=20)
    assert recipe.trainer.strategy.failed_ranks == [1]
    assert [c.every for c in recipe.trainer.callbacks[1:]] == [20]


def test_the_distributed_optimizer_is_kept() -> None:
    recipe = plugin.apply(llama(), failed_ranks=[5])
    assert recipe.optim.config.use_distributed_optimizer is True


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"failed_ranks": [8]}, "8 is not a nominal rank"),
        ({"failed_ranks": [5, 5]}, "more than once"),
        ({"failed_ranks": [4, 5, 6, 7]}, "allow_dropped_replicas=true"),
        ({"degrees": [4]}, "1 degrees for 2 replicas"),
        ({"degrees": [5, 4]}, "5 is not an integer from 1 to"),
        ({"degrees": [4, 3], "failed_ranks": [1]}, "keep one of them"),
    ],
)
def test_bad_ranks_are_refused_before_anything_changes(
    arguments: dict[str, Any], reason: str
) -> None:
    recipe = llama()
    before = leaves(recipe)
    with pytest.raises(UserError, match=reason):
        plugin.apply(recipe, **arguments)
    assert leaves(recipe) == before


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model.config.num_moe_experts", 8, "mixture of experts"),
        ("model.config.multi_latent_attention", True, "multi-latent attention"),
        ("model.config.mtp_num_layers", 1, "multi-token prediction"),
        ("model.config.fp8_param", True, "FP8 parameters"),
        ("model.config.position_embedding_type", "mrope", "position embedding"),
        (f"{STRATEGY}.expert_model_parallel_size", 2, "expert parallelism"),
        (f"{STRATEGY}.virtual_pipeline_model_parallel_size", 2, "virtual pipeline"),
        (f"{STRATEGY}.pipeline_model_parallel_size", 2, "pipeline parallelism"),
        (f"{STRATEGY}.fsdp", "megatron", "FSDP"),
        (f"{STRATEGY}.ddp.use_megatron_fsdp", True, "FSDP"),
        (f"{STRATEGY}.ddp", "pytorch", "PyTorch's DDP"),
        ("trainer.plugins.fp8_params", True, "FP8 parameters"),
        ("optim.config.optimizer_cpu_offload", True, "CPU offloading"),
    ],
)
def test_unsupported_features(path: str, value: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        plugin.apply(llama(**{path.replace(".", "__"): value}))
    assert f"{path}={value}" in str(caught.value)


@pytest.mark.parametrize(
    ("recipe_name", "words"),
    [
        ("mixtral_8x7b", "model.config.num_moe_experts=8"),
        ("deepseek_v2_lite", "multi-latent attention"),
        ("mamba2_130m", "model=MambaModel"),
        ("t5_220m", "model=T5Model"),
        ("bert_110m", "model=BertModel"),
        ("gemma2_2b", "transformer_layer_spec=gemma2_layer_spec"),
        ("gemma3_1b", "a GPT of special layers"),
    ],
)
def test_recipes_of_other_kinds(recipe_name: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        plugin.apply(build_recipe(recipe_name))
    assert "choose another recipe" in str(caught.value)


def test_overlap_of_tensor_parallel_communication_in_a_callback_is_refused() -> None:
    recipe = build_recipe("llama3_70b", {"performance_mode": True})
    with pytest.raises(UnsupportedError, match=r"trainer\.callbacks\.\d+\.tp_comm_overlap=True"):
        plugin.apply(recipe)


def test_other_strategies_and_objects_are_refused() -> None:
    class Mine(nl.MegatronStrategy):
        pass

    with pytest.raises(UnsupportedError, match="Mine is not a run.Config of NeMo's"):
        plugin.apply(with_strategy(Mine))
    with pytest.raises(UserError, match="is no NeMo recipe"):
        plugin.apply("llama3_8b")


def with_strategy(kind: type) -> Any:
    """llama3_8b with another strategy."""
    recipe = llama()
    recipe.trainer.strategy = run.Config(kind)
    return recipe


# --- recipes by name, and their overrides -------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name": "llama3_8"}, r"recipe.name=llama3_8 is no module .*did you mean llama3_\w+"),
        ({"name": "qwen3"}, "has no pretrain_recipe"),
        ({"name": "llama33_nemotron_super_49b"}, "is not for pretraining"),
        ({"name": "no.such.recipe"}, "cannot be imported"),
        (
            {"name": "llama3_8b", "args": {"num_node": 2}},
            "recipe.args.num_node: llama3_8b has no such argument; did you mean num_nodes",
        ),
        (
            {"name": "llama3_8b", "overrides": nested({f"{STRATEGY}.tensor_parallel_size": 4})},
            r"recipe.overrides.trainer.strategy.tensor_parallel_size: MegatronStrategy has no "
            r"field .*; did you mean tensor_model_parallel_size",
        ),
        (
            {"name": "llama3_8b", "overrides": {"trainr": {"devices": 4}}},
            "recipe.overrides.trainr: pretrain has no field 'trainr'; did you mean trainer",
        ),
        (
            {"name": "llama3_8b", "overrides": nested({"trainer.callbacks.9.x": 1})},
            "recipe.overrides.trainer.callbacks.9: this is a list of 1 items",
        ),
    ],
)
def test_wrong_names(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build_recipe(**arguments)


def test_arguments_and_overrides_reach_the_tree() -> None:
    recipe = build_recipe(
        "llama3_8b",
        {"num_nodes": 2, "name": "mine"},
        nested(
            {
                f"{STRATEGY}.pipeline_dtype": "torch.bfloat16",
                f"{STRATEGY}.ddp.bucket_size": 1000,
                "data.tokenizer._target_": "nemo.collections.common.tokenizers"
                ".bytelevel_tokenizers.ByteLevelTokenizer",
                "data.tokenizer.vocab_size": 300,
                "log.ckpt": None,
            }
        ),
    )
    assert recipe.trainer.num_nodes == 2
    assert str(recipe.trainer.strategy.pipeline_dtype) == "torch.bfloat16"
    assert recipe.trainer.strategy.ddp.bucket_size == 1000
    assert recipe.log.ckpt is None
    assert plugin.tokenizer_vocab_size(recipe) == 300


def own_recipe(layers: int = 2) -> Any:
    """A recipe of someone's own."""
    recipe = llama()
    recipe.model.config.num_layers = layers
    return recipe


def test_a_recipe_by_its_import_path() -> None:
    recipe = build_recipe(f"{__name__}.own_recipe", {"layers": 3})
    assert recipe.model.config.num_layers == 3


def test_a_tokenizer_that_is_not_here() -> None:
    recipe = llama()
    recipe.data.tokenizer = run.Config(
        llm.PreTrainingDataModule, paths=["nothing"]
    )  # fails to build
    with pytest.raises(UserError, match=r"\+\+recipe.overrides.model.config.vocab_size=N"):
        plugin.request_from_recipe(recipe)


@pytest.mark.parametrize("devices", ["auto", -1, [0, 1]])
def test_planning_needs_the_number_of_devices(devices: Any) -> None:
    with pytest.raises(UserError, match=r"recipe\.trainer\.devices=.* must be an integer"):
        plugin.request_from_recipe(llama(trainer__devices=devices))


def config(**uneven_tp: Any) -> dict[str, Any]:
    """As ``uneven-tp plan --config-name nemo_recipe`` composes it."""
    flat = {f"{STRATEGY}.tensor_model_parallel_size": 4, f"{STRATEGY}.context_parallel_size": 1}
    defaults = {
        "enabled": True,
        "failed_ranks": [],
        "degrees": None,
        "rank_speeds": None,
        "allow_dropped_replicas": False,
        "check_replicas_every": 0,
    }
    return {
        "name": "llama3_8b",
        "recipe": {"name": "llama3_8b", "args": {}, "overrides": nested(flat)},
        "model": {"reference_tensor_parallel_size": None},
        "uneven_tp": {**defaults, **uneven_tp},
    }


def test_the_request_of_a_configuration() -> None:
    request = plugin.shape_and_request_from_recipe(config(failed_ranks=[5]))
    assert make_plan(request).degrees == (4, 3)
    assert plugin.nodes_and_accelerator(config()) == (1, "gpu")


def test_an_unsupported_recipe_is_refused_only_with_uneven_tp_on() -> None:
    on = config()
    on["recipe"]["overrides"] = {}
    with pytest.raises(UnsupportedError, match=r"context_parallel_size=2"):
        plugin.shape_and_request_from_recipe(on)
    off = config(enabled=False)
    off["recipe"]["overrides"] = {}
    assert plugin.shape_and_request_from_recipe(off).context_parallel_size == 2


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plugin.shape_and_request_from_recipe(config(failed_ranks=[5]))
    assert list(tmp_path.iterdir()) == []
