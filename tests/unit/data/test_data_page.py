"""docs/data.md shows rows and prompts: what it shows is what is taken, and every role is named in it."""

import json
import re
from pathlib import Path

import pytest

from services.data.records import ROLES, Tokenized, parse, parse_prompt
from services.data.sources import LINES
from services.dflash.prompts import load_prompts

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")


def shown(name: str) -> list[str]:
    found = re.search(rf"<!-- {name}: begin -->\n```json\n(.*?)```\n<!-- {name}: end -->", PAGE, re.DOTALL)
    assert found is not None
    return found[1].splitlines()


@pytest.mark.parametrize("line", shown("forms"))
def test_every_row_on_the_page_is_taken_and_says_the_same(line):
    parsed = parse(json.loads(line))
    if isinstance(parsed, Tokenized):
        assert parsed.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]
        return
    assert [m["content"] for m in parsed.messages if m["role"] == "user"] == ["Name a prime."]
    assert parsed.messages[-1] == {"role": "assistant", "content": "Seven."}
    assert parse_prompt(json.loads(line)).messages == parsed.messages[:-1]


def test_every_prompt_on_the_page_is_taken(tmp_path):
    file = tmp_path / "held.jsonl"
    file.write_text("\n".join(shown("prompts")))
    assert [prompt.domain for prompt in load_prompts(file, Words())] == ["", "maths", "maths"]


class Words:
    """A tokenizer without a chat template."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def test_all_roles_and_file_types_are_on_the_page():
    for name in (*ROLES, *LINES, ".parquet"):
        assert f"`{name}`" in PAGE or f"FILE{name}`" in PAGE, name
