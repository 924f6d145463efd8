"""NeMo's ``MegatronStrategy`` over a plan.

Swap it for ``MegatronStrategy`` in a recipe and the job runs uneven: it makes the plan from
the model, the data and the nominal layout, lets failed ranks leave, creates the process
groups, gives the model its rank-local sizes, and puts in our data sampler, gradient sync,
optimizer and loss reduction. Where all replicas are alike, stock parts do the work.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from megatron.core.models.gpt.gpt_model import GPTModel as MCoreGPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from nemo import lightning as nl
from nemo.lightning.megatron_parallel import DDP
from nemo.utils import AppState
from torch.distributed.constants import default_pg_timeout

from nemo_uneven_tp import layer_specs
from nemo_uneven_tp.checkpoint.optimizer_state import FORMAT, FORMAT_KEY
from nemo_uneven_tp.checkpoint.segments import is_regular, save_by_segments
from nemo_uneven_tp.distributed_data_parallel import UnevenDistributedDataParallel
from nemo_uneven_tp.errors import UnsupportedError, UserError
from nemo_uneven_tp.finalize_grads import finalize_model_grads
from nemo_uneven_tp.initial_weights import broadcast_by_segment
from nemo_uneven_tp.layout_options import LayoutOptions
from nemo_uneven_tp.nemo import patches
from nemo_uneven_tp.nemo.checkpoint import CheckedCheckpoints, read_on_cpu
from nemo_uneven_tp.nemo.cluster_environment import UnevenClusterEnvironment
from nemo_uneven_tp.nemo.data_sampler import UnevenDataSampler
from nemo_uneven_tp.nemo.loss import UnevenTokenLossReduction
from nemo_uneven_tp.nemo.shape import model_shape
from nemo_uneven_tp.parallel_state import (
    destroy_uneven_model_parallel,
    initialize_uneven_model_parallel,
)
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.planner import PlanRequest, make_plan
from nemo_uneven_tp.ranks import nominal_world_size
from nemo_uneven_tp.sequence_padding import pad_sequence
from nemo_uneven_tp.topology import Degrees, make_topology


class NeMoUnevenDDP(DDP, UnevenDistributedDataParallel):
    """Our data parallelism with what NeMo adds to Megatron's."""

    def __getattr__(self, item: str) -> Any:
        # NeMo's own looks up ``super(self.__class__, self)``, which never ends in a subclass.
        try:
            return torch.nn.Module.__getattr__(self, item)
        except AttributeError:
            if item == "module":
                raise
            return getattr(self.module, item)


class UnevenMegatronStrategy(CheckedCheckpoints, nl.MegatronStrategy):
    """``MegatronStrategy`` whose replicas may run at their own tensor-parallel degree.

    Args:
        failed_ranks: nominal ranks that are gone; their processes leave with exit code 0.
        degrees: instead of ``failed_ranks``, the degree of each replica, or a row of degrees
            (one per pipeline stage) per replica.
        allow_dropped_replicas: whether a replica with no living rank may be dropped.
        layout_options: how cells cut their work (:class:`.layout_options.LayoutOptions`).
        reference_tensor_parallel_size: the undamaged layout whose padded vocabulary and
            initial weights to reproduce (default: the nominal one where it can exist).
        expected_plan_digest: if given, the plan must have this digest.
        stock: every argument of ``MegatronStrategy``; sizes are nominal.
    """

    is_uneven = True

    def __init__(
        self,
        *args: Any,
        failed_ranks: Sequence[int] = (),
        degrees: Degrees | None = None,
        allow_dropped_replicas: bool = False,
        reference_tensor_parallel_size: int | None = None,
        expected_plan_digest: str | None = None,
        layout_options: LayoutOptions | None = None,
        **stock: Any,
    ) -> None:
        self.failed_ranks = tuple(failed_ranks)
        self.degrees = None if degrees is None else tuple(degrees)
        self.allow_dropped_replicas = allow_dropped_replicas
        self.reference_tensor_parallel_size = reference_tensor_parallel_size
        self.expected_plan_digest = expected_plan_digest
        self.layout_options = layout_options or LayoutOptions()
        self.plan: Plan | None = None
        self._environment: ClusterEnvironment | None = None
        super().__init__(*args, **stock)
        patches.allow_unequal_micro_batches()
        read_on_cpu()
        patches.let_nemo_call_newer_megatron()

    # --- who takes part -------------------------------------------------------------------

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """The environment of the living ranks; setting it lets failed ranks leave."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        if environment is None or isinstance(environment, UnevenClusterEnvironment):
            self._environment = environment
            return
        world_size = (
            nominal_world_size()
            if environment.creates_processes_externally
            else environment.world_size()
        )
        topology = make_topology(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            world_size=world_size,
            failed_ranks=self.failed_ranks,
            degrees=self.degrees,
            allow_dropped_replicas=self.allow_dropped_replicas,
        )
        self._environment = UnevenClusterEnvironment(environment, topology)

    @property
    def parallelism(self) -> Any:
        """NeMo's parallel sizes, as for a job without tensor parallelism.

        NeMo derives ranks and checks divisibility from them, both of which assume equal
        degrees; the plan sets the real sizes later.
        """
        return dataclasses.replace(
            super().parallelism, tensor_model_parallel_size=1, sequence_parallel=False
        )

    # --- set-up, in the order Lightning calls it ------------------------------------------

    def setup_distributed(self) -> None:
        """Make the plan, create process groups, give the model its local sizes."""
        plan = self._make_plan()
        self._init_process_group()
        super().setup_distributed()  # process groups exist: only ranks, seeds and AppState
        state = initialize_uneven_model_parallel(
            plan,
            timeout_s=self._collective_timeout().total_seconds(),
            create_gloo_process_groups=self.use_gloo_process_groups,
        )
        self._update_app_state(plan)
        # NeMo has seeded Megatron's RNG tracker for a job without tensor parallelism.
        model_parallel_cuda_manual_seed(torch.initial_seed())
        config = self.lightning_module.config
        layer_specs.localize_model_config(config)
        config.vocab_size = layer_specs.local_vocab_size()
        config.transformer_layer_spec = _uneven_spec(config)
        stock_sampler = self._stock_sampler()
        if not plan.is_uniform:
            sampler = UnevenDataSampler(plan, state.cell.replica, stock_sampler)
            self.data_sampler = sampler
            self.trainer_datamodule.data_sampler = sampler
        if self.data_sampler:
            self.data_sampler.setup(state.rank)

    def setup_megatron_parallel(self, trainer: Any) -> None:
        """Wrap the model with our data parallelism, then let NeMo do the rest."""
        plan = self.plan
        assert plan is not None
        module = self.lightning_module
        model = _gpt_model(module)
        layer_specs.mask_dummy_vocab(model)
        pad_sequence(model)
        save_by_segments(model)
        if not is_regular(plan):
            # Stock parallel reading exchanges over data-parallel groups, which differ in size
            # here; ranks read what they need themselves.
            self.parallel_load = False
        if not plan.is_uniform:
            module._training_loss_reduction = UnevenTokenLossReduction()
            module._validation_loss_reduction = UnevenTokenLossReduction(validation_step=True)
            module.optim.finalize_model_grads = finalize_model_grads
            self._wrap_in_our_ddp()
        super().setup_megatron_parallel(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the optimizer over our gradient sync."""
        with patches.uneven_optimizer():
            super().setup_optimizers(trainer)

    @property
    def sharded_state_dict_metadata(self) -> dict[str, Any]:
        """As stock, with the one optimizer format that other layouts can read."""
        metadata = dict(super().sharded_state_dict_metadata)
        if FORMAT_KEY in metadata:
            metadata[FORMAT_KEY] = FORMAT
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = (
                self.distrib_optim_fully_reshardable_mem_efficient
            )
        return metadata

    def teardown(self) -> None:
        """Forget the process groups too."""
        super().teardown()
        destroy_uneven_model_parallel()

    # --- helpers --------------------------------------------------------------------------

    @property
    def trainer_datamodule(self) -> Any:
        """The data module of the running trainer."""
        return self.lightning_module.trainer.datamodule

    def _stock_sampler(self) -> Any:
        sampler = self.data_sampler or getattr(self.trainer_datamodule, "data_sampler", None)
        if sampler is None:
            raise UserError(
                "data: the data module has no data_sampler; uneven tensor parallelism needs NeMo's "
                "MegatronDataSampler to split the batch"
            )
        return sampler

    def _make_plan(self) -> Plan:
        module = self.lightning_module
        sampler = self._stock_sampler()
        tokenizer = getattr(module, "tokenizer", None)
        if not hasattr(module, "config") or not hasattr(module, "configure_model"):
            raise UnsupportedError(
                f"model: {type(module).__name__} has no Megatron config; uneven_tp needs a NeMo "
                "GPT model"
            )
        environment = self.cluster_environment
        assert isinstance(environment, UnevenClusterEnvironment)
        plan = make_plan(
            PlanRequest(
                model=model_shape(module.config, getattr(tokenizer, "vocab_size", None)),
                tensor_model_parallel_size=self.tensor_model_parallel_size,
                pipeline_model_parallel_size=self.pipeline_model_parallel_size,
                context_parallel_size=self.context_parallel_size,
                world_size=environment.topology.nominal_world_size,
                global_batch_size=sampler.global_batch_size,
                micro_batch_size=sampler.micro_batch_size,
                failed_ranks=self.failed_ranks,
                degrees=self.degrees,
                allow_dropped_replicas=self.allow_dropped_replicas,
                reference_tensor_parallel_size=self.reference_tensor_parallel_size,
                sequence_parallel=self.sequence_parallel,
                options=self.layout_options,
            )
        )
        if self.expected_plan_digest not in (None, plan.digest):
            raise UserError(
                f"plan.json: its digest {self.expected_plan_digest} is not that of this model and "
                f"layout ({plan.digest}); make the plan again"
            )
        if plan.stages > 1:
            raise UnsupportedError(
                f"strategy.pipeline_model_parallel_size={plan.stages} can be planned, but not run "
                "yet; set it to 1"
            )
        self.plan = plan
        return plan

    def _init_process_group(self) -> None:
        if torch.distributed.is_initialized():
            return
        environment = self.cluster_environment
        assert environment is not None
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        torch.distributed.init_process_group(
            self._get_process_group_backend(),
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            store=self.store,
            timeout=self._collective_timeout(),
        )

    def _collective_timeout(self) -> timedelta:
        # NeMo's own door to the time limit of collectives.
        limit = os.getenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
        return timedelta(seconds=int(limit)) if limit else default_pg_timeout

    def _update_app_state(self, plan: Plan) -> None:
        from megatron.core import parallel_state as mpu

        app_state = AppState()
        app_state.tensor_model_parallel_size = mpu.get_tensor_model_parallel_world_size()
        app_state.tensor_model_parallel_rank = mpu.get_tensor_model_parallel_rank()
        app_state.tensor_model_parallel_group = mpu.get_tensor_model_parallel_group()
        app_state.pipeline_model_parallel_group = mpu.get_pipeline_model_parallel_group()
        app_state.data_parallel_group = mpu.get_data_parallel_group()
        app_state.data_parallel_rank = mpu.get_data_parallel_rank()
        app_state.data_parallel_size = plan.replicas

    def _wrap_in_our_ddp(self) -> None:
        # NeMo leaves a module alone that is wrapped already; the precision plugin's conversion
        # is the last thing before it would wrap it.
        plugin = self.precision_plugin
        convert = getattr(plugin, "convert_module", None)

        def convert_and_wrap(chunk: Any) -> Any:
            chunk = convert(chunk) if convert is not None else chunk
            if not isinstance(chunk.module, DDP):
                chunk.module = NeMoUnevenDDP(chunk.module.config, self.ddp_config, chunk.module)
                if not chunk.module.config.use_cpu_initialization:
                    broadcast_by_segment(chunk.module, chunk.module.uneven_state)
            return chunk

        plugin.convert_module = convert_and_wrap


def _uneven_spec(config: Any) -> ModuleSpec:
    import inspect

    spec = config.transformer_layer_spec
    if not isinstance(spec, ModuleSpec):
        takes_stage = "vp_stage" in inspect.signature(spec).parameters
        spec = spec(config, vp_stage=0) if takes_stage else spec(config)
    if not isinstance(spec, ModuleSpec) or not hasattr(spec.submodules, "self_attention"):
        raise UnsupportedError(
            "model.config.transformer_layer_spec gives no plain transformer layer; uneven_tp "
            "supports dense GPT layers only"
        )
    return layer_specs.uneven_layer_spec(spec)


def _gpt_model(module: Any) -> MCoreGPTModel:
    while hasattr(module, "module") and not isinstance(module, MCoreGPTModel):
        module = module.module
    if not isinstance(module, MCoreGPTModel):
        raise UnsupportedError(
            f"model: {type(module).__name__} is not Megatron's GPTModel; uneven_tp supports dense "
            "GPT only"
        )
    return module
