"""A tiny tokenizer of either kind that targets have, with the special tokens of all test templates."""

from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = [
    "<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>", "<|end|>",
    "<|start_header|>", "<|end_header|>", "<|eot|>", "<|eom|>", "<start_of_turn>", "<end_of_turn>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|start|>",
    "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|user|>", "<|assistant|>", "<|system|>",
    "[gMASK]", "<sop>",
]  # fmt: skip
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n\nHello there! How are you today?\n",
    "You answer questions. Today: 01 Jan 2025\nuser assistant system model developer tool final",
    '{"name": "weather", "arguments": {"city": "Paris"}}  def f(x):\n    return x + 1\n### end',
    "Привет, мир! 日本語のテキスト 😀 naïve café",
]


def byte_level(trim_offsets: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim_offsets)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    return tokenizer


def piece_level() -> Tokenizer:
    """As sentencepiece models come: spaces are a letter, unknown letters fall back to bytes."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", *SPECIAL, *fallback], show_progress=False, limit_alphabet=60
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    return tokenizer


def legacy_piece_level() -> Tokenizer:
    """As the first sentencepiece models were converted: every stretch of text gets a space in front."""
    tokenizer = piece_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


MAKERS = {
    "bytes": lambda: byte_level(False),
    "trimmed": lambda: byte_level(True),
    "pieces": piece_level,
    "legacy": legacy_piece_level,
}
KINDS = ("bytes", "trimmed", "pieces")


def make_tokenizer(kind: str = "bytes", template: str | None = "chatml") -> PreTrainedTokenizerFast:
    raw = MAKERS[kind]()
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[3:],
    )
    if template is not None:
        tokenizer.chat_template = template_text(template)
    return tokenizer


def template_text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
