"""CPU mode, in a process of its own: it changes torch for good."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")


def run(code: str) -> None:
    """Run ``code`` in a fresh interpreter with CPU mode on."""
    head = "import torch\nfrom nemo_uneven_tp import cpu_mode\nassert cpu_mode.activate()\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", head + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_device_calls_mean_cpu() -> None:
    run(
        """
        assert cpu_mode.activate() and cpu_mode.is_active()  # twice is once
        assert not torch.cuda.is_available()
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.zeros(2, pin_memory=True).device.type == "cpu"
        x = torch.ones(2)
        for moved in (x.cuda(), x.cuda(0), x.pin_memory(), x.to("cuda:1"), x.to(device="cuda")):
            assert moved.device.type == "cpu"
        assert x.to("cuda", torch.bfloat16).dtype == torch.bfloat16
        assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.type("torch.cuda.HalfTensor").dtype == torch.float16
        assert x.type(torch.float64).dtype == torch.float64
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            torch.cuda.Event(enable_timing=True).record()
        torch.cuda.synchronize()
        """
    )


def test_rng_tracker_forks_the_generator_that_operations_use() -> None:
    run(
        """
        from megatron.core.tensor_parallel import random
        random.model_parallel_cuda_manual_seed(7, tp_rank=1, ep_rank=0, etp_rank=0)
        tracker = random.get_cuda_rng_tracker()
        outside = torch.Generator().manual_seed(7)
        inside = torch.Generator().manual_seed(7 + 2718 + 1)
        for _ in range(2):
            assert torch.equal(torch.rand(3), torch.rand(3, generator=outside))
            with tracker.fork():
                assert torch.equal(torch.rand(3), torch.rand(3, generator=inside))
        """
    )


def test_clipping_and_norm_are_the_stock_code() -> None:
    run(
        """
        import torch.distributed as dist
        from megatron.core.optimizer.clip_grads import (
            clip_grad_by_total_norm_fp32, get_grad_norm_fp32)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        norm = get_grad_norm_fp32([parameter.grad], grad_stats_parallel_group=dist.group.WORLD)
        assert norm == 5.0
        clip_grad_by_total_norm_fp32([parameter], 1.0, norm)
        assert torch.allclose(parameter.grad, torch.tensor([0.6, 0.8]), atol=1e-6)
        """
    )


def test_norms_take_sequence_parallelism_and_compute_the_same() -> None:
    run(
        """
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig
        x = torch.randn(4, 8)
        for name, norm_class in (("LayerNorm", torch.nn.LayerNorm), ("RMSNorm", torch.nn.RMSNorm)):
            config = TransformerConfig(
                num_layers=1, hidden_size=8, num_attention_heads=2, normalization=name,
                tensor_model_parallel_size=2, sequence_parallel=True)
            build = get_gpt_layer_local_spec(normalization=name).submodules.input_layernorm
            norm = build(config=config, hidden_size=8, eps=1e-6)
            assert type(norm) is norm_class
            assert all(p.sequence_parallel for p in norm.parameters())
            assert torch.equal(norm(x), norm_class(8, eps=1e-6)(x))
        """
    )


def test_compiled_activations_run_without_a_compiler() -> None:
    run(
        """
        from megatron.core.activations import squared_relu
        x = torch.randn(64)
        assert torch.equal(squared_relu(x), x.relu() ** 2)
        """
    )
