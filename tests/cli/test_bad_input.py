"""Every bad input: exit code 2, one sentence, no traceback, nothing started or written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome

UnevenTP = Callable[..., Outcome]

BAD = {
    "unknown key": (["foo=1"], "foo"),
    "misspelt key": (["model.num_layrs=3"], "did you mean model.num_layers"),
    "misspelt added key": (["+optim.adam_beta=3"], "did you mean optim.adam_beta1"),
    "misspelt option": (["--config-nam", "x"], "--config-nam"),
    "no such configuration": (["--config-name", "nope"], "gpt_tiny_cpu"),
    "no such choice": (["uneven_tp=maybe"], "off, on"),
    "not an override": (["model.num_layers"], "key=value"),
    "unreadable override": (["model.num_layers=["], "can't be read"),
    "wrong type": (["trainer.devices=four"], "an integer"),
    "several values": (["data.split=0,0,0"], "write data.split=[0,0,0]"),
    "split of nothing": (["data.split=[0,0,0]"], "leaves nothing for training"),
    "mapping for a list": (["uneven_tp.failed_ranks={a:1}"], "must be a list such as"),
    "no boolean": (["uneven_tp.allow_dropped_replicas=2"], "true or false"),
    "seed no integer": (["seed=abc"], "uneven-tp: seed=abc"),
    "epsilon negative": (["model.layernorm_epsilon=-1"], "greater than 0"),
    "rotary above one": (["model.rotary_percent=3"], "at most 1"),
    "beta of one": (["optim.adam_beta1=1"], "less than 1"),
    "sweep": (["-m", "seed=1,2"], "--multirun"),
    "failed rank out of range": (["uneven_tp.failed_ranks=[4]"], "0 to 3"),
    "failed rank negative": (["uneven_tp.failed_ranks=[-1]"], "0 to 3"),
    "failed rank no integer": (["uneven_tp.failed_ranks=[a]"], "0 to 3"),
    "failed rank repeated": (["uneven_tp.failed_ranks=[3,3]"], "more than once"),
    "replica lost": (["uneven_tp.failed_ranks=[2,3]"], "uneven_tp.allow_dropped_replicas=true"),
    "all ranks lost": (["uneven_tp.failed_ranks=[0,1,2,3]"], "at least one"),
    "degree above nominal": (["uneven_tp.degrees=[3,1]"], "from 1 to"),
    "degree zero": (["uneven_tp.degrees=[2,0]"], "from 1 to"),
    "degree no integer": (["uneven_tp.degrees=[2,1.5]"], "from 1 to"),
    "too many degrees": (["uneven_tp.degrees=[2,2,1]"], "one per data-parallel replica"),
    "degrees and failed ranks": (
        ["uneven_tp.degrees=[2,1]", "uneven_tp.failed_ranks=[3]"],
        "keep one",
    ),
    "failed ranks without the plugin": (
        ["uneven_tp=off", "uneven_tp.failed_ranks=[3]"],
        "uneven_tp=on",
    ),
    "fewer query groups than ranks": (
        ["model.num_query_groups=2", "strategy.tensor_model_parallel_size=4"],
        "model.num_query_groups",
    ),
    "FFN smaller than the degree": (["model.ffn_hidden_size=1"], "model.ffn_hidden_size"),
    "heads no multiple of groups": (["model.num_query_groups=3"], "num_attention_heads"),
    "batch no multiple": (["data.global_batch_size=11"], "data.micro_batch_size"),
    "batch too small": (["data.global_batch_size=2"], "data.global_batch_size"),
    "world no multiple": (["trainer.devices=3"], "tensor_model_parallel_size"),
    "mixture of experts": (["+model.num_moe_experts=4"], "mixture of experts"),
    "context parallel": (["strategy.context_parallel_size=2"], "context parallel"),
    "FSDP": (["+strategy.fsdp=megatron"], "FSDP"),
    "virtual pipeline": (["strategy.virtual_pipeline_model_parallel_size=2"], "virtual pipeline"),
    "no such tokenizer": (["data.tokenizer=nope"], "data.tokenizer=nope"),
    "checkpoint every no step": (
        ["checkpoint.every_n_steps=0"],
        "checkpoint.every_n_steps=0 must be at least 1, or null, which saves nothing",
    ),
    "checkpoint every half step": (
        ["checkpoint.every_n_steps=0.5"],
        "checkpoint.every_n_steps=0.5 must be an integer or null",
    ),
    "checkpoint keep none": (
        ["checkpoint.keep=0"],
        "checkpoint.keep=0 must be at least 1, or null, which keeps all",
    ),
    "checkpoint keep no integer": (
        ["checkpoint.keep=all"],
        "checkpoint.keep=all must be an integer or null",
    ),
    "checkpoint async no boolean": (
        ["checkpoint.async_save=2"],
        "checkpoint.async_save=2 must be true or false",
    ),
    "checkpoint async null": (
        ["checkpoint.async_save=null"],
        "checkpoint.async_save=null must be true or false",
    ),
    "resume auto no boolean": (
        ["resume.auto=maybe"],
        "resume.auto=maybe must be true or false",
    ),
    "resume fall back no boolean": (
        ["resume.fall_back=7"],
        "resume.fall_back=7 must be true or false",
    ),
    "resume from a list": (["resume.from=[a,b]"], "resume.from=['a', 'b'] must be text or null"),
    "resume misspelt": (["resume.fallback=true"], "did you mean resume.fall_back"),
    "recipe without name": (["--config-name", "nemo_recipe"], "recipe.name"),
}


def assert_refused(outcome: Outcome, said: str) -> None:
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("uneven-tp: ")
    assert outcome.err.count("\n") == 1, outcome.err
    assert said in outcome.err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("command", ["plan", "pretrain", "demo"])
@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_configuration(uneven_tp: UnevenTP, command: str, case: str) -> None:
    arguments, said = BAD[case]
    assert_refused(uneven_tp(command, *arguments), said)


@pytest.fixture
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


def test_missing_text(uneven_tp: UnevenTP, text: Path) -> None:
    assert_refused(uneven_tp("pretrain", f"data.paths={text / 'no.txt'}"), "does not exist")


def test_empty_text(uneven_tp: UnevenTP, text: Path) -> None:
    (text / "a.txt").touch()
    assert_refused(uneven_tp("pretrain", f"data.paths=[{text / 'a.txt'}]"), "empty")
    assert_refused(uneven_tp("pretrain", f"data.paths=[{text}]"), "no text")


def test_binary_text(uneven_tp: UnevenTP, text: Path) -> None:
    (text / "a.bin").write_bytes(bytes(range(256)))
    assert_refused(uneven_tp("pretrain", f"data.paths=[{text / 'a.bin'}]"), "not UTF-8 text")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_text(uneven_tp: UnevenTP, text: Path) -> None:
    (text / "a.txt").write_text("a")
    (text / "a.txt").chmod(0)
    assert_refused(uneven_tp("pretrain", f"data.paths=[{text / 'a.txt'}]"), "cannot read")


def test_a_dangling_link(uneven_tp: UnevenTP, text: Path) -> None:
    (text / "a.txt").symlink_to(text / "gone")
    assert_refused(uneven_tp("pretrain", f"data.paths=[{text / 'a.txt'}]"), "cannot read")


def test_a_run_dir_that_holds_a_run(uneven_tp: UnevenTP, text: Path) -> None:
    (text / "plan.json").touch()
    assert_refused(uneven_tp("pretrain", f"run_dir={text}"), "holds another run")


def test_a_run_dir_that_is_a_file(uneven_tp: UnevenTP, text: Path) -> None:
    (text / "file").touch()
    assert_refused(uneven_tp("pretrain", f"run_dir={text / 'file'}"), "not a folder")
    assert_refused(uneven_tp("pretrain", f"run_dir={text / 'file' / 'x'}"), "can't be created")


def test_nothing_to_resume_from(uneven_tp: UnevenTP, text: Path) -> None:
    allowed = "a run directory or a checkpoint folder"

    def refused(place: object, said: str) -> None:
        outcome = uneven_tp("pretrain", f"resume.from={place}")
        assert_refused(outcome, f"resume.from={place} {said}")
        assert allowed in outcome.err

    refused("", "is empty")
    refused(text / "no", "is not a folder")
    (text / "file").touch()
    refused(text / "file", "is not a folder")
    refused(text, "holds no complete checkpoint")
    # A stock checkpoint that was interrupted: Megatron's metadata.json comes last.
    weights = text / "checkpoints" / "step_3" / "weights"
    weights.mkdir(parents=True)
    (weights / ".metadata").touch()
    refused(text, "holds no complete checkpoint (step_3: metadata.json is missing)")
    refused(weights, "holds no complete checkpoint (step_3: metadata.json is missing)")


def test_several_nodes_without_a_launcher(uneven_tp: UnevenTP) -> None:
    assert_refused(uneven_tp("pretrain", "trainer.num_nodes=2"), "torchrun or srun")


def test_another_number_of_processes_than_configured(
    uneven_tp: UnevenTP, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert_refused(uneven_tp("pretrain", "run_dir=r"), "3 processes")


def test_a_launcher_without_job_id(uneven_tp: UnevenTP, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert_refused(uneven_tp("pretrain"), "--rdzv-id")


def test_gpus_that_are_not_there(uneven_tp: UnevenTP) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    assert_refused(uneven_tp("pretrain", "trainer.accelerator=gpu"), "trainer.accelerator=cpu")


def test_the_command_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nemo_uneven_tp", "pretrain", "uneven_tp.failed_ranks=[9]"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
