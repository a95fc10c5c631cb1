"""Everything that would stop a run is found before it starts, named with its option, and changes nothing."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from protocol.files import FileLock
from services.check.check import Report, check
from services.check.devices import check_devices
from services.check.machine import file_system, slot_size
from services.check.model import check_model
from services.config.fingerprint import identity, model_fingerprint
from services.config.load import Loaded, load
from services.coordinator.ledger import Ledger
from services.data.dataset import Dataset, Sample
from services.data.gpu_memory import CUDA_BYTES, most_positions, target_memory
from services.data.token_use import occurrences
from services.data.writer import write_dataset
from services.local.view import size

ROWS = 64


def write_model(folder: Path, vocabulary: int = ROWS - 4) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=ROWS, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, vocabulary)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    words = {f"w{number}": number for number in range(vocabulary)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w3"))
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="w0", bos_token="w1", eos_token="w2"
    ).save_pretrained(folder)


def write_data(folder: Path, lengths: list[int], supervised: bool = True, info: dict | None = None) -> None:
    random = np.random.default_rng(0)
    samples = [
        Sample(random.integers(4, 60, length).astype(np.int32), np.full(length, supervised, np.uint8))
        for length in lengths
    ]
    write_dataset(folder, samples, info or {})


@pytest.fixture(scope="module")
def good_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check") / "model"
    write_model(folder)
    return folder


@pytest.fixture
def place(tmp_path_factory, good_model):
    """A folder in which everything is right, named shortly for its sockets; tests break one thing each."""
    place = tmp_path_factory.mktemp("p")
    (place / "model").mkdir()
    for file in good_model.iterdir():
        (place / "model" / file.name).write_bytes(file.read_bytes())
    write_data(place / "data", [12, 20, 30])
    return place


def looked(place: Path, **options: str) -> list[str]:
    """Findings as text; the disk must be what it was."""
    return [str(finding) for finding in report(place, **options).findings]


def report(place: Path, **options: str) -> Report:
    loaded, before = loaded_with(place, **options), snapshot(place)
    found = check(loaded)
    assert snapshot(place) == before
    return found


def loaded_with(place: Path, **options: str) -> Loaded:
    words = {
        "run.dir": place / "run", "model.path": place / "model", "data.path": place / "data",
        "arena.dir": place / "shm", "plan.token_budget": "96", "plan.bucket_edges": "16,32",
        "drafter.taps": "2", "drafter.layers": "1", "coordinator.http_port": "0",
    } | {name.replace("__", "."): value for name, value in options.items()}  # fmt: skip
    return load(None, [(f"--{name}", str(value)) for name, value in words.items()], {})


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in folder.rglob("*")}


def the_one(findings: list[str]) -> str:
    assert len(findings) == 1, findings
    return findings[0]


def test_a_good_run_has_no_findings(place):
    assert looked(place) == []


def delete(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def only_pickles(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def truncate(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def garble(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 100)


def lose_a_shard(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def grow_the_tokenizer(model: Path) -> None:
    write_tokenizer(model, ROWS + 5)


@pytest.mark.parametrize(
    ("harm", "rule"),
    [
        (delete("config.json"), "has no config.json"),
        (delete("model.safetensors"), "has no *.safetensors"),
        (only_pickles, "pickled weights only (pytorch_model.bin)"),
        (truncate, "its header says"),
        (garble, "is no safetensors file"),
        (lose_a_shard, "1 of 2 weight files are missing (model-2.safetensors"),
        (grow_the_tokenizer, "has id 68, the embedding 64 rows"),
    ],
)
def test_a_model_that_is_not_whole(place, harm, rule):
    harm(place / "model")
    found = the_one(looked(place))
    assert found.startswith(f"model.path = {place / 'model'} (--model.path): ")
    assert rule in found


def test_a_missing_model_and_missing_data_are_found_together(place):
    findings = looked(place, model__path="nowhere", data__path="neither")
    assert len(findings) == 2
    assert findings[0].startswith("model.path = nowhere (--model.path): is no folder")
    assert findings[1].startswith("data.path = neither (--data.path)")


def test_taps_that_the_target_does_not_have(place):
    assert "5" in the_one(looked(place, drafter__target_layer_ids="1,5"))


def test_too_many_taps_name_the_option_and_how_many_fit(place):
    found = the_one(looked(place, drafter__taps="5"))
    assert found.startswith("drafter.taps = 5 (--drafter.taps): the target has 6 layers, at most 3 can be")


def test_a_model_without_a_spare_row_is_offered_those_that_the_data_leave(place):
    write_tokenizer(place / "model", ROWS)
    findings = looked(place, drafter__taps="5")
    assert [found.split(" = ")[0] for found in findings] == ["drafter.taps", "drafter.mask_token_id"]
    assert "name a row that your data never uses. No sample of data.path uses 61, 62, 63" in findings[1]
    write_dataset(place / "each", [Sample(np.arange(ROWS, dtype=np.int32), np.ones(ROWS, np.uint8))], {})
    assert "The data use all 64" in the_one(looked(place, data__path=place / "each", plan__bucket_edges="96"))
    assert looked(place, drafter__mask_token_id="61") == []


def test_a_mask_token_that_the_data_use_is_refused_with_its_count(place):
    marked = np.array([5, 60, 7, 60, 9, 8], np.int32)
    write_dataset(place / "marked", [Sample(marked, np.ones(6, np.uint8))] * 3, {})
    found = the_one(looked(place, data__path=place / "marked"))
    assert found.startswith("drafter.mask_token_id = -1 (default), data.path = ")
    assert "token 60, which stands for what is still to be drafted, is 6 times among the 18 tokens" in found
    assert looked(place, data__path=place / "marked", drafter__mask_token_id="61") == []
    assert "is 3 times" in the_one(looked(place, data__path=place / "marked", drafter__mask_token_id="9"))
    assert occurrences(Dataset.open(place / "marked"), 60, look_tokens=8) == (3, 8)


def test_a_model_without_tokenizer_will_do_if_the_mask_token_is_named_and_nothing_is_text(place):
    for file in (place / "model").glob("tokenizer*"):
        file.unlink()
    assert looked(place, drafter__mask_token_id="60") == []
    found = the_one(looked(place))
    assert found.startswith("model.path") and "there is no tokenizer in it (tokenizer.json" in found
    (place / "held.jsonl").write_text('{"prompt": "w5"}\n')
    found = the_one(looked(place, drafter__mask_token_id="60", eval__prompts=place / "held.jsonl"))
    assert found.startswith("eval.prompts") and "the model's folder has no tokenizer" in found


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"prompt": "w5"}\n{"messages": [', "line 2: not JSON"),
        ('{"text": "w5"}\n', "line 1: keys ['text']"),
        ('{"messages": "w5"}\n', "line 1: the conversation is a str; must be a list"),
        (
            '{"messages": [{"role": "assistant", "content": "w5"}]}\n',
            "no message of a user is left",
        ),
        ("\n", "holds none"),
    ],
)
def test_prompts_that_no_evaluation_could_read(place, text, rule):
    (place / "held.jsonl").write_text(text)
    found = the_one(looked(place, eval__prompts=place / "held.jsonl"))
    assert found.startswith("eval.prompts = ") and rule in found


def test_samples_without_supervision(tmp_path, place):
    write_data(place / "mute", [8], supervised=False)
    assert "sample 0 has an all-zero loss mask" in the_one(looked(place, data__path=place / "mute"))


def test_samples_longer_than_the_plan_allows(place):
    write_data(place / "long", [12, 40])
    found = the_one(looked(place, data__path=place / "long"))
    assert "plan.bucket_edges = 16,32 (--plan.bucket_edges)" in found
    assert "sample 1 has 40 tokens" in found


def test_data_prepared_for_another_model_or_tokenizer(place):
    write_data(place / "other", [12], info={"embedding_rows": 99, "tokenizer_sha256": "0" * 64})
    findings = looked(place, data__path=place / "other")
    assert "was prepared for 99 embedding rows, the model has 64" in findings[0]
    assert "another tokenizer" in findings[1]


def test_arenas_larger_than_memory_name_their_numbers(place):
    (place / "held-out.jsonl").write_text('{"prompt": "w5"}\n')
    evaluator = {"evaluator__count": "1", "eval__prompts": place / "held-out.jsonl"}
    findings = looked(place, plan__token_budget="100000000000", **evaluator)
    assert any(found.startswith("arena.dir") and "2 x 1 targets x 8 slots" in found for found in findings), (
        findings
    )
    (memory,) = (found for found in findings if "the run takes up to" in found)
    parts = ("arenas ", "drafters ", "a checkpoint being written ", "processes ", "evaluator ")
    assert all(part in memory for part in parts)


def test_a_cap_smaller_than_a_step(place):
    found = the_one(looked(place, coordinator__in_flight_cap_bytes="1000"))
    assert "7 full packs must fit into it" in found


def test_a_port_that_is_taken(place):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        found = report(place, coordinator__http_port=str(other.getsockname()[1])).findings
    assert "cannot listen there (Address already in use)" in the_one([str(finding) for finding in found])
    assert found[0].in_use


def test_what_the_roles_take_of_a_gpu_is_told_and_refused_by_the_same_numbers(place, monkeypatch):
    evaluator = {"evaluator__count": "1", "eval__prompts": place / "held-out.jsonl"}
    (place / "held-out.jsonl").write_text('{"prompt": "w5"}\n')
    options = evaluator | {"target__gpus": "0", "drafter__gpus": "0", "evaluator__gpu": "0"}
    model, _ = check_model(loaded_with(place, **options))
    plan = loaded_with(place, **options).config
    positions = most_positions(plan, 30)
    target = target_memory(plan, model.loaded_bytes, model.widths, positions, slot_size(plan, model)).total
    for room in (1 << 30, 1 << 40):
        monkeypatch.setattr("services.check.check.gpu_memory", lambda room=room: {0: room})
        found = report(place, **options)
        (told,) = (text for name, text in found.facts if name == "GPU 0")
        assert f"target 0 {size(target + CUDA_BYTES['target'])} (weights " in told
        assert "activations" in told and "evaluator" in told and told.count("CUDA") == 3
        (taken,) = {told.split(" of ")[0]}
        refused = [str(finding) for finding in found.findings]
        assert len(refused) == (room == 1 << 30)
        assert all(f"take {taken}; a role runs on one GPU" in finding for finding in refused)


@pytest.mark.parametrize(
    ("options", "gpus", "rule"),
    [
        ({"arena__kind": "pinned"}, 0, "target 0 is on a CPU, pinned needs every target on a GPU"),
        ({"arena__kind": "cuda_ipc", "target__count": "2"}, 1, "target 1 is on a CPU, cuda_ipc needs"),
        ({"arena__kind": "cuda_ipc", "drafter__gpus": "cpu"}, 1, "drafter 0 is on a CPU, which cannot read"),
        ({"arena__kind": "pinned", "drafter__gpus": "cpu"}, 1, ""),
        ({"arena__kind": "cuda_ipc"}, 1, ""),
        ({"arena__kind": "auto", "target__gpus": "cpu"}, 1, ""),
    ],
)
def test_kinds_of_arenas_that_need_a_gpu(place, options, gpus, rule):
    loaded = loaded_with(place, **options)
    model, _ = check_model(loaded)
    devices = check_devices(loaded, model, 64, dict.fromkeys(range(gpus), 1 << 40))
    found = [str(finding) for finding in devices.findings]
    assert ([rule] if rule else []) == [rule for one in found if rule and rule in one] and len(found) <= 1


def test_what_works_but_less_well_is_a_warning(place):
    assert file_system(Path("/proc/self")) == "proc"
    found = report(place, drafter__count="3", plan__packs_per_step="1", arena__dir="/dev/shm/draftmill")
    assert found.findings == []
    assert "2 of them always wait" in the_one(
        [str(w) for w in found.warnings if not str(w).startswith("arena")]
    )


def test_samples_behind_the_targets_positions_are_a_warning(place):
    write_data(place / "longer", [12, 65])
    found = report(place, data__path=place / "longer", plan__bucket_edges="16,96")
    assert found.findings == []
    told = [str(warning) for warning in found.warnings if "positions" in str(warning)]
    assert len(told) == 1 and "65 tokens, the target 64 positions" in told[0]
    assert "data.max_length = 64" in told[0]


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("checkpoint__upload", "nowhere://x", "Protocol not known: nowhere"),
        ("coordinator__keys", "/no/such/keys", "/no/such/keys/allowed"),
        ("log__sinks", "tensorboard", "the package tensorboard is missing"),
    ],
)
def test_what_only_the_coordinator_reads_is_looked_at_before_it_starts(
    place, monkeypatch, option, value, rule
):
    monkeypatch.setattr("services.coordinator.sinks.importlib.util.find_spec", lambda name: None)
    found = the_one(looked(place, **{option: value}))
    assert found.startswith(option.replace("__", ".")) and rule in found


def test_a_folder_whose_sockets_would_have_too_long_names(place):
    assert "the kernel takes 107; shorten it" in the_one(looked(place, arena__dir=place / ("x" * 80)))


def test_checkpoints_whose_ledger_is_gone(place):
    (place / "old" / "checkpoints" / "ckpt-0-8-drafter-1").mkdir(parents=True)
    assert "of a ledger that is gone" in the_one(looked(place, run__dir=place / "old"))


def test_a_run_folder_that_is_a_file(place):
    (place / "run").write_text("")
    assert "is a file; choose a folder" in the_one(looked(place))


def test_a_compile_cache_that_is_a_file_matters_to_those_who_compile(place):
    (place / "kernels").write_text("")
    options = {"run__compile_cache": place / "kernels", "drafter__gpus": "cpu"}
    assert looked(place, **options) == []
    found = the_one(looked(place, **options, target__compile="true"))
    assert found.startswith("run.compile_cache") and "is a file; choose a folder" in found


@pytest.mark.parametrize("option", ["eval__prompts", "drafter__init_from"])
def test_other_files_that_are_not_there(place, option):
    found = the_one(looked(place, **{option: "nowhere"}))
    assert found.startswith(f"{option.replace('__', '.')} = nowhere")


def write_ledger(place: Path, **options: str) -> Path:
    """The ledger of a run with the good options but for `options`."""
    words = [("--model.path", str(place / "model")), ("--data.path", str(place / "data"))]
    words += [("--plan.token-budget", "96"), ("--plan.bucket-edges", "16,32"), ("--drafter.taps", "2")]
    words += [
        ("--drafter.layers", "1"),
        *((f"--{name.replace('__', '.')}", value) for name, value in options.items()),
    ]
    (place / "run").mkdir()
    tree = identity(
        load(None, words, {}).config,
        Dataset.open(place / "data").fingerprint,
        model_fingerprint(place / "model"),
    )
    ledger = Ledger(place / "run" / "ledger.sqlite", tree)
    ledger.new_coordinator_epoch()
    ledger.close()
    return place / "run" / "ledger.sqlite"


def test_the_ledger_of_the_same_run_is_welcome_with_other_depth_transport_profile_and_counts(place):
    write_ledger(place, target__postprocess_depth="3")
    assert (
        looked(place, arena__kind="shm", profile__interval_s="1", target__count="2", drafter__count="2") == []
    )


def test_a_changed_training_option_is_named_with_both_values(place):
    write_ledger(place, recipe__lr="0.001")
    assert "recipe.lr: 0.001 in the run, 0.0006 now" in the_one(looked(place))


def test_data_that_takes_over_later_is_checked_like_the_first(place):
    later = {"data__later": f"1:{place / 'later'}", "run__epochs": "2"}
    found = the_one(looked(place, **later))
    assert found.startswith("data.later = 1:") and "no prepared dataset" in found
    write_data(place / "later", [12, 40])
    assert "sample 1 has 40 tokens" in the_one(looked(place, **later))
    (place / "good").mkdir()
    write_data(place / "good" / "later", [12, 20])
    assert looked(place, data__later=f"1:{place / 'good' / 'later'}", run__epochs="2") == []


def test_other_data_for_a_run_that_exists_is_refused_with_the_way(place):
    write_ledger(place)
    write_data(place / "more", [12, 20])
    found = the_one(looked(place, data__later=f"1:{place / 'more'}", run__epochs="2"))
    assert "run.epochs: 1 in the run, 2 now" in found and "`draftmill extend`" in found
    found = the_one(looked(place, data__path=place / "more", recipe__lr="0.1"))
    assert found.startswith("data.path = ") and "recipe.lr: 0.0006 in the run, 0.1 now" in found
    assert "extend" not in found
    found = the_one(looked(place, data__path=place / "more"))
    assert found.startswith(f"data.path = {place / 'more'} (--data.path), run.dir = ")
    began, now = (Dataset.open(place / name).fingerprint for name in ("data", "more"))
    assert f"({now[:12]}, not {began[:12]})" in found and began not in found
    assert 'data.later = ["EPOCH:PATH"] and `draftmill extend`' in found


def test_a_truncated_ledger(place):
    ledger = write_ledger(place)
    ledger.write_bytes(ledger.read_bytes()[:5000])
    found = the_one(looked(place))
    assert found.startswith(f"run.dir = {place / 'run'}")
    assert "restore it from a backup" in found


def test_a_second_coordinator_on_the_same_run(place):
    (place / "run").mkdir()
    with FileLock(place / "run" / "coordinator.lock"):
        assert "another coordinator runs it (starting)" in the_one(looked(place))
