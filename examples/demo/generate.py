"""Writes train.jsonl: the demo's conversations, answered by the target itself.

Greedy answers of the target are what a drafter learns fastest: every label is the token that the
target will choose again when it verifies. 511 prompts take about ten minutes on one core in float32.

    python examples/demo/generate.py            # from prompts.txt to train.jsonl

It may be stopped at any time: finished batches stand in train.part.jsonl and are not generated again.
Greedy decoding in float32 with fixed batches depends on nothing random, so a second run writes the
same file on the same machine. Held-out prompts (heldout.jsonl) need no answers: the evaluation
compares the drafter with the target's own decoding.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.models.convert import smollm2_from_package

HERE = Path(__file__).parent
BATCH_PROMPTS = 73  # seven even batches of 511
MAX_ANSWER_TOKENS = 120
MIN_ANSWER_CHARS = 2
# An answer is dropped when fewer than this share of its three-word runs are different: greedy decoding of a
# small model sometimes circles, and a drafter that trains on circles learns nothing else.
MIN_DISTINCT_RUNS = 0.6
SENTENCE_END = re.compile(r"[.!?][\"')*]*(?=\s|$)|```(?=\s*$)|\n\n")


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(topic, prompt) pairs; `# topic` opens a topic, every other line is a prompt."""
    pairs, topic = [], ""
    for line in path.read_text().splitlines():
        if line.startswith("# "):
            topic = line[2:].strip()
        elif line.strip():
            pairs.append((topic, line.strip()))
    return pairs


def cut_cleanly(answer: str) -> str:
    """The answer up to its last complete sentence; "" when it has none."""
    ends = [match.end() for match in SENTENCE_END.finditer(answer)]
    text = answer[: ends[-1]].rstrip() if ends else ""
    text = re.sub(r"\n+\s*(\d+\.|[-*])$", "", text).rstrip()  # "3." alone is the head of a cut list entry
    return text + "\n```" if text.count("```") % 2 else text


def circles(answer: str) -> bool:
    words = answer.lower().split()
    runs = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return len(runs) > 8 and len(set(runs)) < MIN_DISTINCT_RUNS * len(runs)


def answer_batch(model: Any, tokenizer: Any, prompts: list[str]) -> list[tuple[str, bool]]:
    """(answer, whether the model itself ended it) of each prompt, decoded greedily side by side."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    batch = tokenizer(chats, return_tensors="pt", padding=True, padding_side="left")
    stop_id = tokenizer.eos_token_id
    output_BT = model.generate(**batch, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    answers = []
    for row in output_BT[:, batch.input_ids.shape[1] :].tolist():
        ended = stop_id in row
        ids = row[: row.index(stop_id)] if ended else row
        answers.append((tokenizer.decode(ids, skip_special_tokens=True), ended))
    return answers


def generate_all(pairs: list[tuple[str, str]], part: Path, model_path: Path) -> dict[str, tuple[str, bool]]:
    done = {}
    if part.exists():
        for line in part.read_text().splitlines():
            row = json.loads(line)
            done[row["prompt"]] = (row["answer"], row["ended"])
    batches = [
        [prompt for _, prompt in pairs[start : start + BATCH_PROMPTS]]
        for start in range(0, len(pairs), BATCH_PROMPTS)
    ]
    missing = [batch for batch in batches if any(prompt not in done for prompt in batch)]
    if missing:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        for prompts in track(missing, description="generate"):
            answers = answer_batch(model, tokenizer, prompts)
            with part.open("a") as file:
                for prompt, (answer, ended) in zip(prompts, answers, strict=True):
                    row = {"prompt": prompt, "answer": answer, "ended": ended}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            done.update(zip(prompts, answers, strict=True))
    return done


def conversation(prompt: str, answer: str, ended: bool) -> dict[str, Any] | None:
    """One line of the dataset, or None when the answer is not worth learning."""
    text = answer.strip() if ended else cut_cleanly(answer.strip())
    if len(text) < MIN_ANSWER_CHARS or circles(text):
        return None
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.txt")
    parser.add_argument("--out", type=Path, default=HERE / "train.jsonl")
    parser.add_argument("--cache", type=Path, default=None, help="where the converted model is kept")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    pairs = read_prompts(options.prompts)
    part = options.out.with_suffix(".part.jsonl")
    answers = generate_all(pairs, part, smollm2_from_package(options.cache))
    rows = [conversation(prompt, *answers[prompt]) for _, prompt in pairs]
    kept = [row for row in rows if row is not None]
    options.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    ended = sum(answers[prompt][1] for _, prompt in pairs)
    print(f"{options.out}: {len(kept)} conversations of {len(pairs)} prompts, {ended} ended by themselves")


if __name__ == "__main__":
    main()
