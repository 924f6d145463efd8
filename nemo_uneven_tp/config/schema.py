"""The keys of a run configuration: their names, types and meaning.

Values live in ``conf/`` and ``recipes/``; these dataclasses only check them (OmegaConf
structured configs). Field names are NeMo's and Megatron's own: ``model`` follows
``GPTConfig``, ``strategy`` ``MegatronStrategy`` and ``DistributedDataParallelConfig``,
``optim`` ``OptimizerConfig``, ``trainer`` Lightning's ``Trainer``, ``data``
``PreTrainingDataModule``. Further fields of theirs may be added, see
:mod:`nemo_uneven_tp.config.passthrough`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

NORMALIZATIONS = ("LayerNorm", "RMSNorm")
POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope")
ACTIVATIONS = ("gelu", "quick_gelu", "relu", "silu", "squared_relu")
ACCELERATORS = ("cpu", "gpu", "auto")
PRECISIONS = ("32", "bf16-mixed", "16-mixed")
OPTIMIZERS = ("adam", "sgd")
LAUNCHERS = ("local",)
START_METHODS = ("auto", "forkserver", "fresh")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

CHOICES = {
    "model.normalization": NORMALIZATIONS,
    "model.position_embedding_type": POSITION_EMBEDDING_TYPES,
    "model.activation": ACTIVATIONS,
    "trainer.accelerator": ACCELERATORS,
    "trainer.precision": PRECISIONS,
    "optim.optimizer": OPTIMIZERS,
    "launcher.type": LAUNCHERS,
    "launcher.start_method": START_METHODS,
    "launcher.log_level": LOG_LEVELS,
}
"""Keys that take one of a few words."""


@dataclass
class ModelConfig:
    """``model``: the shape of a dense GPT."""

    num_layers: int = MISSING
    hidden_size: int = MISSING
    num_attention_heads: int = MISSING
    num_query_groups: int | None = None  # None: num_attention_heads
    kv_channels: int | None = None  # None: hidden_size / num_attention_heads
    ffn_hidden_size: int | None = None  # None: 4 * hidden_size
    seq_length: int = MISSING
    gated_linear_unit: bool = False
    activation: str = "gelu"  # GPTConfig.activation_func by name
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    share_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: int = 128
    vocab_size: int | None = None  # NeMo's preset, already padded; None: the tokenizer's, padded
    init_method_std: float = 0.02
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    reference_tensor_parallel_size: int | None = None  # None: the nominal degree


@dataclass
class DataConfig:
    """``data``: text, tokenizer and batch."""

    paths: Any = None  # one path or a list: files, folders, globs; None: the standard library
    tokenizer: str = "byte"  # "byte", a SentencePiece .model file, a Hugging Face folder
    micro_batch_size: int = MISSING
    global_batch_size: int = MISSING
    split: Any = "900,50,50"  # or a list of three weights
    num_workers: int = 0
    cache_dir: str | None = None
    seed: int = 1234


@dataclass
class TrainerConfig:
    """``trainer``: length and hardware. devices x num_nodes counts failed ranks in."""

    max_steps: int = MISSING
    accelerator: str = "auto"
    devices: int = MISSING
    num_nodes: int = 1
    val_check_interval: int = MISSING
    limit_val_batches: int = 0
    precision: str = "32"


@dataclass
class StrategyConfig:
    """``strategy``: parallel sizes, then fields of DistributedDataParallelConfig."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_fp32: bool = True
    average_in_collective: bool = False
    bucket_size: int | None = None
    check_for_nan_in_grad: bool = True


@dataclass
class OptimConfig:
    """``optim``: the optimizer and NeMo's cosine schedule."""

    optimizer: str = "adam"
    lr: float = MISSING
    min_lr: float = 0.0
    warmup_steps: int = 0
    constant_steps: int = 0
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False


@dataclass
class UnevenTPConfig:
    """``uneven_tp``: the plugin's own keys. The planner checks ranks and degrees."""

    enabled: bool = True
    failed_ranks: list[Any] = field(default_factory=list)  # nominal ranks
    degrees: list[Any] | None = None  # one per replica, instead of failed_ranks
    allow_dropped_replicas: bool = False
    rank_speeds: Any = None  # a table {nominal rank: speed}, a list; None: all alike
    check_replicas_every: int = 0  # steps; 0: once, at the end


@dataclass
class CheckpointConfig:
    """``checkpoint``: what a run saves, into ``run_dir/checkpoints``."""

    every_n_steps: int | None = None  # None: nothing
    keep: int | None = None  # None: all
    async_save: bool = False


@dataclass(init=False, repr=False, eq=False)
class ResumeConfig:
    """``resume``: which checkpoint a run starts from."""

    auto: bool = False  # the newest complete one in run_dir, if there is one
    fall_back: bool = False  # an older one, if it is damaged
    # The key ``from``, which Python has no way to write as a field.
    __annotations__["from"] = "str | None"
    vars()["from"] = None


@dataclass
class LauncherConfig:
    """``launcher``: how local processes are started."""

    type: str = "local"
    start_method: str = "auto"  # forkserver on CPUs, fresh processes elsewhere
    timeout_s: int = 600
    threads_per_rank: int = 1
    log_level: str = "WARNING"


@dataclass
class RecipeConfig:
    """``recipe``: a stock NeMo recipe by name, its arguments, and fields of its tree."""

    name: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecipeModelConfig:
    """``model`` of a run whose model comes from a NeMo recipe."""

    reference_tensor_parallel_size: int | None = None


@dataclass
class RunConfig:
    """A run whose model, data, trainer and optimizer are given by our groups."""

    name: str = MISSING
    seed: int = 1234
    run_dir: str = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    uneven_tp: UnevenTPConfig = field(default_factory=UnevenTPConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)


@dataclass
class RecipeRunConfig:
    """A run that a stock NeMo recipe gives, with the plugin put into it."""

    name: str = MISSING
    seed: int = 1234
    run_dir: str = MISSING
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    model: RecipeModelConfig = field(default_factory=RecipeModelConfig)
    uneven_tp: UnevenTPConfig = field(default_factory=UnevenTPConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
