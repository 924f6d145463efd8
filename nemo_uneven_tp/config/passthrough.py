"""Fields of NeMo's and Megatron's own classes that may be added to a configuration.

``+model.FIELD=value`` passes any other field of NeMo's ``GPTConfig`` on, ``+strategy.FIELD``
one of ``MegatronStrategy`` or ``DistributedDataParallelConfig``, ``+optim.FIELD`` one of
``OptimizerConfig``. The names are written down here so that a misspelt one is refused
without the tens of seconds it takes to import NeMo; a test compares them with the classes
of the supported versions (nemo_toolkit 2.7.3, megatron-core 0.15.3).
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


GPT_CONFIG_FIELDS = _names(
    """
    _cpu_offloading_context account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split activation_func activation_func_clamp_value
    activation_func_fp8_input_store add_bias_linear add_qkv_bias apply_query_key_layer_scaling
    apply_residual_connection_post_layernorm apply_rope_fusion async_tensor_model_parallel_allreduce
    attention_backend attention_dropout attention_softmax_in_fp32 autocast_dtype
    barrier_with_L1_time batch_p2p_comm batch_p2p_sync bf16 bias_activation_fusion
    bias_dropout_fusion calculate_per_token_loss clone_scatter_output_in_embedding config_logger_dir
    context_parallel_size cp_comm_type cpu_offloading cpu_offloading_activations
    cpu_offloading_double_buffering cpu_offloading_num_layers cpu_offloading_weights
    cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_impl
    cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool
    cuda_graph_warmup_steps data_step_fn deallocate_pipeline_outputs defer_embedding_wgrad_compute
    delay_wgrad_compute deterministic_mode disable_bf16_reduced_precision_matmul
    disable_parameter_transpose_cache distribute_saved_activations embedding_init_method
    embedding_init_method_std enable_autocast enable_cuda_graph expert_model_parallel_size
    expert_tensor_parallel_size external_cuda_graph ffn_hidden_size finalize_model_grads_func
    first_last_layers_bf16 flash_decode forward_step_fn fp16 fp16_lm_cross_entropy
    fp32_residual_connection fp4 fp4_param fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len
    fp8_dot_product_attention fp8_interval fp8_margin fp8_multi_head_attention fp8_param fp8_recipe
    fp8_wgrad fused_single_qkv_rope gated_linear_unit generation_config glu_linear_offset
    grad_scale_func grad_sync_func gradient_accumulation_fusion hetereogenous_dist_checkpoint
    heterogeneous_block_specs hidden_dropout hidden_size hierarchical_context_parallel_sizes
    inference_rng_tracker inference_sampling_seed init_method init_method_std
    init_model_with_meta_device is_hybrid_model kv_channels layernorm_epsilon
    layernorm_zero_centered_gamma make_vocab_size_divisible_by mamba_head_dim mamba_num_groups
    mamba_num_heads mamba_state_dim masked_softmax_fusion memory_efficient_layer_norm
    microbatch_group_size_per_vp_stage mlp_chunks_for_prefill moe_apply_probs_on_input
    moe_aux_loss_coeff moe_deepep_num_sms moe_enable_deepep moe_expert_capacity_factor
    moe_extended_tp moe_ffn_hidden_size moe_grouped_gemm moe_input_jitter_eps moe_layer_freq
    moe_layer_recompute moe_pad_expert_input_to_capacity moe_per_layer_logging moe_permute_fusion
    moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias
    moe_router_force_load_balancing moe_router_fusion moe_router_group_topk
    moe_router_load_balancing_type moe_router_num_groups moe_router_padding_for_fp8
    moe_router_pre_softmax moe_router_score_function moe_router_topk moe_router_topk_limited_devices
    moe_router_topk_scaling_factor moe_shared_expert_intermediate_size moe_shared_expert_overlap
    moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping moe_use_legacy_grouped_gemm
    moe_z_loss_coeff mrope_section mtp_loss_scaling_factor mtp_num_layers multi_latent_attention
    no_rope_freq no_sync_func normalization num_attention_heads num_layers num_layers_at_end_in_bf16
    num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    num_microbatches_with_partial_activation_checkpoints num_moe_experts num_query_groups
    output_layer_init_method overlap_moe_expert_parallel_comm overlap_p2p_comm
    overlap_p2p_comm_warmup_flush parallel_output param_sync_func params_dtype
    perform_initialization persist_layer_norm pipeline_dtype pipeline_model_parallel_comm_backend
    pipeline_model_parallel_layout pipeline_model_parallel_size position_embedding_type qk_layernorm
    quant_recipe recompute_granularity recompute_method recompute_modules recompute_num_layers
    rotary_base rotary_interleaved rotary_percent scatter_embedding_sequence_parallel
    seq_len_interpolation_factor seq_length sequence_parallel share_embeddings_and_output_weights
    softmax_scale softmax_type symmetric_ar_type tensor_model_parallel_size test_mode timers
    tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad
    tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_cfg
    tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs
    tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_only_amax_red transformer_impl
    transformer_layer_spec use_cpu_initialization use_fused_weighted_squared_relu use_kitchen
    use_mamba_mem_eff_path use_ring_exchange_p2p use_te_activation_func use_te_rng_tracker
    use_transformer_engine_full_layer_spec variable_seq_lengths virtual_pipeline_model_parallel_size
    vocab_size wgrad_deferral_limit window_attn_skip_freq window_size
    """
)
"""Fields of ``nemo.collections.llm.GPTConfig``."""

MEGATRON_STRATEGY_ARGS = _names(
    """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split checkpoint_io
    ckpt_assume_constant_structure ckpt_async_save ckpt_load_directly_on_device
    ckpt_load_main_params ckpt_load_optimizer ckpt_load_strictness ckpt_optim_fully_reshardable
    ckpt_parallel_load ckpt_parallel_save ckpt_parallel_save_optim ckpt_parallel_save_within_dp
    ckpt_save_optimizer ckpt_torch_dist_multiproc cluster_environment context_parallel_size
    data_sampler ddp distrib_optim_fully_reshardable_mem_efficient
    encoder_pipeline_model_parallel_size encoder_tensor_model_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size find_unused_parameters fsdp
    init_model_parallel lazy_init megatron_log_level microbatch_group_size_per_vp_stage
    moe_extended_tp nccl_communicator_config_path num_distributed_optimizer_instances
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage parallel_devices
    pipeline_dtype pipeline_model_parallel_comm_backend pipeline_model_parallel_layout
    pipeline_model_parallel_size progress_interval replace_progress_bar restore_config
    save_ckpt_format sequence_parallel setup_optimizers tensor_model_parallel_size
    use_gloo_process_groups use_sharp use_te_rng_tracker use_tp_pp_dp_mapping
    virtual_pipeline_model_parallel_size
    """
)
"""Arguments of ``nemo.lightning.MegatronStrategy``."""

DDP_CONFIG_FIELDS = _names(
    """
    align_param_gather average_in_collective bucket_size check_for_large_grads check_for_nan_in_grad
    data_parallel_sharding_strategy delay_wgrad_compute disable_symmetric_registration
    fp8_param_gather fsdp_double_buffer grad_reduce_in_fp32 gradient_reduce_div_fusion
    keep_fp8_transpose_cache nccl_ub num_distributed_optimizer_instances outer_dp_sharding_strategy
    overlap_grad_reduce overlap_param_gather pad_buckets_for_high_nccl_busbw preserve_fp32_weights
    reuse_grad_buf_for_mxfp8_param_ag suggested_communication_unit_size use_custom_fsdp
    use_distributed_optimizer use_megatron_fsdp
    """
)
"""Fields of ``megatron.core.distributed.DistributedDataParallelConfig``."""

OPTIMIZER_CONFIG_FIELDS = _names(
    """
    adam_beta1 adam_beta2 adam_eps barrier_with_L1_time bf16 clip_grad config_logger_dir
    decoupled_lr decoupled_min_lr decoupled_weight_decay exp_avg_dtype exp_avg_sq_dtype fp16
    fp8_recipe hysteresis initial_loss_scale log_num_zeros_in_grad loss_scale loss_scale_window lr
    main_grads_dtype main_params_dtype min_loss_scale min_lr optimizer optimizer_cpu_offload
    optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d overlap_param_gather
    overlap_param_gather_with_optimizer_step params_dtype pin_cpu_grads pin_cpu_params
    reuse_grad_buf_for_mxfp8_param_ag sgd_momentum store_param_remainders timers
    use_distributed_optimizer use_precision_aware_optimizer use_torch_optimizer_for_cpu_offload
    weight_decay
    """
)
"""Fields of ``megatron.core.optimizer.OptimizerConfig``."""

SET_BY = {
    "model.activation_func": "model.activation",
    "model.tensor_model_parallel_size": "strategy.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size": "strategy.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size": "strategy.virtual_pipeline_model_parallel_size",
    "model.context_parallel_size": "strategy.context_parallel_size",
    "model.expert_model_parallel_size": "strategy.expert_model_parallel_size",
    "model.sequence_parallel": "strategy.sequence_parallel",
    "model.fp16": "trainer.precision",
    "model.bf16": "trainer.precision",
    "model.params_dtype": "trainer.precision",
    "model.pipeline_dtype": "trainer.precision",
    "model.autocast_dtype": "trainer.precision",
    "strategy.pipeline_dtype": "trainer.precision",
    "strategy.use_distributed_optimizer": "optim.use_distributed_optimizer",
    "strategy.num_distributed_optimizer_instances": "optim.use_distributed_optimizer",
    "optim.fp16": "trainer.precision",
    "optim.bf16": "trainer.precision",
    "optim.params_dtype": "trainer.precision",
    "optim.overlap_param_gather": "strategy.overlap_param_gather",
}
"""Fields that one of our own keys already sets."""

PYTHON_OBJECTS = _names(
    """
    model._cpu_offloading_context model.data_step_fn model.embedding_init_method
    model.finalize_model_grads_func model.forward_step_fn model.generation_config
    model.grad_scale_func model.grad_sync_func model.init_method model.no_sync_func
    model.output_layer_init_method model.param_sync_func model.quant_recipe model.timers
    model.transformer_layer_spec
    strategy.checkpoint_io strategy.cluster_environment strategy.data_sampler strategy.ddp
    strategy.init_model_parallel strategy.lazy_init strategy.parallel_devices
    strategy.restore_config strategy.setup_optimizers
    optim.exp_avg_dtype optim.exp_avg_sq_dtype optim.main_grads_dtype optim.main_params_dtype
    optim.timers
    """
)
"""Fields that take Python objects, which a configuration can't hold."""

FIELDS = {
    "model": GPT_CONFIG_FIELDS,
    "strategy": MEGATRON_STRATEGY_ARGS | DDP_CONFIG_FIELDS,
    "optim": OPTIMIZER_CONFIG_FIELDS,
}
"""Fields that may be added, by group."""

OWNERS = {
    "model": "NeMo's GPTConfig",
    "strategy": "NeMo's MegatronStrategy or Megatron's DistributedDataParallelConfig",
    "optim": "Megatron's OptimizerConfig",
}
"""What the added fields belong to, in words."""
