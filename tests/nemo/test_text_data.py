"""NeMo's data module over text: Megatron's index is safe, and the order never changes."""

from __future__ import annotations

import hashlib
import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.nemo import tokenizers
from nemo_uneven_tp.nemo.text_data import build_data_module

# NeMo takes 20 s to import: forks of this process have it already.
_CONTEXT = multiprocessing.get_context("fork")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    text = tmp_path / "mine.txt"
    text.write_text("".join(f"line {i} of a text é\n" for i in range(3000)), encoding="utf-8")
    return {
        "model": {"seq_length": 64},
        "data": {
            "paths": str(text),
            "tokenizer": "byte",
            "micro_batch_size": 2,
            "global_batch_size": 12,
            "split": "900,50,50",
            "num_workers": 0,
            "cache_dir": str(tmp_path / "cache"),
            "seed": 1234,
        },
        "trainer": {"max_steps": 20, "val_check_interval": 10, "limit_val_batches": 2},
    }


def samples(module: Any) -> str:
    """A digest of every training and validation sample, in order, as stock NeMo sets them up."""
    module.build(20, 10, 2, 1.0)
    digest = hashlib.sha256()
    for dataset in (module._train_ds, module._validation_ds):
        for i in range(len(dataset)):
            digest.update(dataset[i]["tokens"].numpy().tobytes())
            digest.update(dataset[i]["loss_mask"].numpy().tobytes())
    return digest.hexdigest()


def test_samples_are_the_text(config: dict[str, Any]) -> None:
    module = build_data_module(config)
    module.build(20, 10, 2, 1.0)
    assert len(module._train_ds) >= 240
    text = Path(config["data"]["paths"]).read_bytes()
    sample = module._train_ds[3]
    assert sample["tokens"].shape == (64,)
    assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()
    pieces = bytes(sample["tokens"].tolist()).split(b"\0")  # documents end with eod, id 0
    assert all(piece in text for piece in pieces)
    assert sample["loss_mask"].min() == 1


def test_order_is_the_same_in_a_new_cache_and_after_damage(
    config: dict[str, Any], tmp_path: Path
) -> None:
    first = samples(build_data_module(config))
    assert samples(build_data_module(config)) == first
    (index,) = (tmp_path / "cache").glob("*/index-*/")
    for file in index.glob("*shuffle_index.npy"):
        file.write_bytes(file.read_bytes()[:100])
    assert samples(build_data_module(config)) == first
    (index / "complete.json").unlink()  # as after a kill
    assert samples(build_data_module(config)) == first
    config["data"]["cache_dir"] = str(tmp_path / "other")
    assert samples(build_data_module(config)) == first
    config["data"]["seed"] = 1
    assert samples(build_data_module(config)) != first


def _report(config: dict[str, Any], results: Any) -> None:
    results.put(samples(build_data_module(config)))


def test_processes_at_once_see_the_same_samples(config: dict[str, Any], tmp_path: Path) -> None:
    results = _CONTEXT.Queue()
    processes: list[BaseProcess] = [
        _CONTEXT.Process(target=_report, args=(config, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    seen = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    config["data"]["cache_dir"] = str(tmp_path / "other")
    assert seen == {samples(build_data_module(config))}


def _report_in_group(config: dict[str, Any], rank: int, size: int, file: str, results: Any) -> None:
    import torch.distributed as dist

    module = build_data_module(config)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    results.put((size, samples(module)))
    dist.destroy_process_group()


def test_order_does_not_depend_on_the_number_of_ranks(
    config: dict[str, Any], tmp_path: Path
) -> None:
    seen = set()
    for size in (1, 3):
        config["data"]["cache_dir"] = str(tmp_path / f"cache-{size}")
        results = _CONTEXT.Queue()
        processes = [
            _CONTEXT.Process(
                target=_report_in_group,
                args=(config, rank, size, str(tmp_path / f"store-{size}"), results),
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        seen |= {results.get(timeout=60)[1] for _ in processes}
        for process in processes:
            process.join(30)
    assert len(seen) == 1


def test_too_little_text_is_refused_before_megatron_loops(config: dict[str, Any]) -> None:
    Path(config["data"]["paths"]).write_text("a few words\n")
    with pytest.raises(UserError, match=r"data\.paths holds too little text"):
        build_data_module(config)


def test_byte_tokenizer_fits_megatron() -> None:
    tokenizer = tokenizers.build_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod) == (512, 0)
    assert tokenizer.text_to_ids("é\n") == [0xC3, 0xA9, 10]


def hugging_face_folder(folder: Path, eos: str | None = "<eos>") -> Path:
    """A tiny byte-pair tokenizer, trained and saved here."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"])
    tokenizer.train_from_iterator(["some words of a text"] * 10, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos).save_pretrained(folder)
    return folder


def test_hugging_face_folder(config: dict[str, Any], tmp_path: Path) -> None:
    from nemo_uneven_tp.config.vocabulary import tokenizer_vocab_size

    name = str(hugging_face_folder(tmp_path / "hf"))
    tokenizer = tokenizers.build_tokenizer(name)
    assert tokenizer_vocab_size(name) == tokenizer.vocab_size
    config["data"]["tokenizer"] = name
    module = build_data_module(config)
    module.build(20, 10, 2, 1.0)
    assert module._train_ds[0]["tokens"].max() < tokenizer.vocab_size
    before = tokenizers.identity(name)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    assert tokenizers.identity(name) != before


def test_sentencepiece_model(config: dict[str, Any], tmp_path: Path) -> None:
    import sentencepiece

    from nemo_uneven_tp.config.vocabulary import tokenizer_vocab_size

    sentencepiece.SentencePieceTrainer.train(
        input=config["data"]["paths"],
        model_prefix=str(tmp_path / "sp"),
        vocab_size=40,
        minloglevel=2,
    )
    name = str(tmp_path / "sp.model")
    tokenizer = tokenizers.build_tokenizer(name)
    assert tokenizer_vocab_size(name) == tokenizer.vocab_size == 40
    config["data"]["tokenizer"] = name
    build_data_module(config).build(20, 10, 2, 1.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nothing", "does not exist"), ("file.txt", "is not a .model file"), ("bare", "cannot be")],
)
def test_bad_tokenizers(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match=rf"data\.tokenizer=.*{reason}"):
        tokenizers.build_tokenizer(str(tmp_path / name))


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path / "hf", eos=None)
    with pytest.raises(UserError, match="no end-of-text token"):
        tokenizers.build_tokenizer(str(folder))
