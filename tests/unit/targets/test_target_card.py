"""An export says in its README.md what it is for and where it comes from, and what nobody recorded."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
from huggingface_hub import metadata_load
from target_families import FAMILIES, model_of
from typer.testing import CliRunner

from protocol.errors import CheckpointError, DataError, ModelError
from services.cli import app
from services.config.fingerprint import identity, model_fingerprint
from services.config.load import load
from services.coordinator.ledger import Ledger
from services.dflash.checkpoint import write_checkpoint
from services.dflash.drafter import Drafter
from services.dflash.drafter_config import derive
from services.dflash.eval_result import EvalResult
from services.dflash.export import load_zlab
from services.dflash.speculate import Generation
from services.evaluator.agenda import Recorded
from services.evaluator.figures import line_of
from services.evaluator.kept import Kept
from services.models.publish import export, version

CARD = "---\nlicense: other\nlicense_name: tiny-research\nlicense_link: LICENSE\n---\n# Tiny\n"
FLAGS = [("--model.path", "target"), ("--data.path", "data"), ("--recipe.lr", "0.002"),
         ("--drafter.mask_token_id", "96"), ("--drafter.taps", "2"), ("--drafter.layers", "2")]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target with a card, and a run with a ledger and a checkpoint."""
    place = tmp_path_factory.mktemp("card")
    model = model_of(FAMILIES["gemma3"], tied=True)
    model.save_pretrained(place / "tiny-gemma")
    (place / "tiny-gemma" / "README.md").write_text(CARD)
    config = load(None, FLAGS, {}).config
    drafter = Drafter(derive(model.config, config.drafter, None), seed=1)
    write_checkpoint(
        place / "run" / "checkpoints" / "ckpt-0-7-drafter-1",
        weights=dict(drafter.state_dict()),
        optimizer={},
        state={"timeline": 0, "step": 7},
        drafter=drafter.config,
    )
    ran = identity(config, "d" * 64, model_fingerprint(place / "tiny-gemma"))
    Ledger(place / "run" / "ledger.sqlite", ran).close()
    return place


ANSWER = Generation((5, 6, 7, 8), (3, 1), 0.1, 0.2)


def checkpoint(place: Path) -> Path:
    return place / "run" / "checkpoints" / "ckpt-0-7-drafter-1"


def evaluation(folder: Path) -> Path:
    answers = (ANSWER, Generation((5, 6), (2,), 0.1, 0.2))
    found = EvalResult(("maths", "code"), answers, answers, (), (), 16, 64, (2,), None)
    (folder / "eval.json").write_text(json.dumps(found.to_dict()))
    return folder / "eval.json"


def test_the_card_names_target_data_recipe_acceptance_and_versions(place, tmp_path):
    found = export(
        checkpoint(place), tmp_path / "out", target=str(place / "tiny-gemma"), evaluation=evaluation(tmp_path)
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert metadata_load(tmp_path / "out" / "README.md") == {
        "tags": ["dflash", "speculative-decoding", "draft-model"],
        "license": "other", "license_name": "tiny-research", "license_link": "LICENSE",
    }  # fmt: skip
    for said in (
        "# DFlash drafter for tiny-gemma",
        "| its licence, which may bind this drafter | tiny-research |",
        f"| its fingerprint | {model_fingerprint(place / 'tiny-gemma')} |",
        "| input_embedding_scale | 5.65685 |",
        f"Dataset fingerprint `{'d' * 64}`",
        "step 7, timeline 0",
        "| `recipe.lr` | 0.002 |",
        "2 held-out prompts, greedy, at most 64 new tokens, blocks of 16",
        "| acceptance length, pooled over rounds | 2.000 |",
        "| pooled, maths | 2.000 |",
        "| answers are the target's own, up to ties of logits | yes |",
        '"num_speculative_tokens":15',
        "--speculative-num-draft-tokens 16 --dtype bfloat16",
        "scales its embedding rows by 5.65685. vLLM",
        f"{found['tensors']} tensors read back",
        "| transformers | 5.",
        "| draftmill | ",
    ):
        assert said in card, said
    load_zlab(tmp_path / "out")


@pytest.mark.parametrize(("family", "scaled"), [("gemma3", True), ("qwen3", False)])
def test_what_a_server_does_not_read_is_told_at_the_export(tmp_path, family, scaled):
    shape = derive(model_of(FAMILIES[family], tied=True).config, load(None, FLAGS, {}).config.drafter, None)
    folder = tmp_path / "ckpt-0-7-drafter-1"
    weights = dict(Drafter(shape, seed=1).state_dict())
    write_checkpoint(folder, weights=weights, optimizer={}, state={"step": 7}, drafter=shape)
    said = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "out"), "--dtype", "float16"])
    assert said.exit_code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("feeds the drafter unscaled rows" in card) == scaled == ("warning: " in said.stderr)
    assert "--dtype float16" in card


def test_the_best_checkpoint_is_described_by_its_runs_ledger_and_its_own_evaluation(place, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(place / "run" / "ledger.sqlite", tmp_path / "run")
    kept, found = Kept(tmp_path / "run"), EvalResult(("",), (ANSWER,), (ANSWER,), (), (), 16, 64, (2,), None)
    held = kept.hold(checkpoint(place))
    line = line_of(Recorded(held.name, 0, 7, 0), found, None, seconds=1.0, at_unix_s=0.0)
    kept.write_figures(held, line)
    kept.promote(held)
    best = tmp_path / "run" / "best"
    export(best, tmp_path / "out", evaluation=best / "evaluation.json")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Dataset fingerprint `{'d' * 64}`" in card and "step 7, timeline 0" in card
    assert "| acceptance length, pooled over rounds | 2.000 |" in card


def test_what_was_not_recorded_is_said_to_be_so(place, tmp_path):
    export(checkpoint(place), tmp_path / "out")
    export(tmp_path / "out", tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert "an unnamed target" in card and "Not recorded: the checkpoint lies outside" in card
    assert "Not measured at export" in card and "license" not in metadata_load(
        tmp_path / "again" / "README.md"
    )


def test_a_package_that_is_not_installed_is_named_as_source():
    assert version("torch") == metadata.version("torch")
    assert version("no-such-package") == "from source"


def test_another_target_is_refused_before_anything_is_written(place, tmp_path):
    model_of(FAMILIES["gemma3"], tied=True, seed=5).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="not those that this run was trained for"):
        export(checkpoint(place), tmp_path / "out", target=str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"prompts": 3}'])
def test_a_wrong_evaluation_is_refused_before_anything_is_written(place, tmp_path, text):
    (tmp_path / "eval.json").write_text(text)
    with pytest.raises(DataError, match="draftmill eval --json"):
        export(checkpoint(place), tmp_path / "out", evaluation=tmp_path / "eval.json")
    assert not (tmp_path / "out").exists()


def test_a_damaged_ledger_is_named(place, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "ckpt-0-7-drafter-1"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(checkpoint(place))
    (tmp_path / "run" / "ledger.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(CheckpointError, match=r"ledger.sqlite.*cannot be read"):
        export(folder, tmp_path / "out")


class RecordedHub:
    """Takes what Hugging Face's API would be given."""

    def __init__(self, error: OSError | None = None) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.error = error

    def create_repo(self, repo_id, **options):
        self.calls.append((repo_id, options))
        if self.error:
            raise self.error

    def upload_folder(self, **options):
        self.calls.append(("upload", options))
        return "https://hub/someone/drafter/commit/1"


def test_a_push_creates_a_private_repository_and_uploads_the_checked_folder(place, tmp_path):
    hub = RecordedHub()
    found = export(checkpoint(place), tmp_path / "out", push_to_hub="someone/drafter", hub=hub)
    (created, uploaded) = hub.calls
    assert created == ("someone/drafter", {"private": True, "exist_ok": True})
    assert uploaded[1]["repo_id"] == "someone/drafter"
    assert uploaded[1]["folder_path"] == str(tmp_path / "out")
    assert found["pushed"] == "https://hub/someone/drafter/commit/1"


def test_a_refused_push_leaves_the_export_and_says_how_to_go_on(place, tmp_path):
    hub = RecordedHub(OSError("no token"))
    with pytest.raises(ModelError, match=r"no token; the export itself is complete .* `hf upload`"):
        export(checkpoint(place), tmp_path / "out", push_to_hub="someone/drafter", hub=hub)
    assert (tmp_path / "out" / "README.md").is_file()
    with pytest.raises(ModelError, match="a b"):
        export(checkpoint(place), tmp_path / "second", push_to_hub="a b", hub=hub)
    assert not (tmp_path / "second").exists()


def test_the_command_takes_these_options(place, tmp_path):
    words = ["export", str(checkpoint(place)), str(tmp_path / "out"), "--target", str(place / "tiny-gemma"),
             "--evaluation", str(evaluation(tmp_path)), "--dtype", "float32"]  # fmt: skip
    done = CliRunner().invoke(app, words, obj=[], catch_exceptions=False)
    assert done.exit_code == 0 and json.loads(done.stdout)["tensors"] == 25
    assert "tiny-research" in (tmp_path / "out" / "README.md").read_text()
