"""A tokenizer for synthetic checkpoints: byte-level BPE that round-trips any text, with the model's special tokens.

Its merges carry no knowledge of language. Beyond the 256 bytes the vocabulary is filled with printable ASCII pieces, so
that what a model of random weights emits is readable noise rather than broken UTF-8.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_IDS = 60
"""Ids at the end of the vocabulary that are kept for special tokens: in the published one, 154820 up to 154879."""

HIDDEN_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
)
"""Special tokens that decoding leaves out."""

SHOWN_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
"""Special tokens that stay in the text, for the server's reasoning and tool-call parsers to find."""

PAD_TOKEN = "<|endoftext|>"
EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- if tools %}<|system|>
{{ tools | tojson }}
{%- endif %}
{%- for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>
{{ message.content or '' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


def special_token_id(token: str, vocab: int) -> int:
    """The id of a special token in a vocabulary of `vocab` ids.

    Raises:
        ValueError: a name that is no special token.
    """
    return vocab - SPECIAL_IDS + (HIDDEN_TOKENS + SHOWN_TOKENS).index(token)


def build_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer with a token for every id below `vocab`, but for the unused ones among the last `SPECIAL_IDS`.

    Raises:
        ValueError: a vocabulary too small for the 256 bytes and the special ids, or larger than the pieces there are.
    """
    pieces = vocab - SPECIAL_IDS
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if pieces < len(alphabet):
        raise ValueError(f"vocab {vocab} is less than {len(alphabet)} bytes and {SPECIAL_IDS} special ids")
    merges = list(itertools.islice(_merges(), pieces - len(alphabet)))
    tokens = alphabet + [left + right for left, right in merges]
    if len(tokens) < pieces:
        raise ValueError(f"vocab {vocab} is more than {len(tokens) + SPECIAL_IDS}, the ids that there are pieces for")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in HIDDEN_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in SHOWN_TOKENS])
    return tokenizer


def write_tokenizer(directory: Path, vocab: int, context_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json.

    Args:
        directory: an existing directory.
        vocab: ids of the model's vocabulary.
        context_tokens: tokens of the longest prompt.
    """
    build_tokenizer(vocab).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD_TOKEN,
        "eos_token": EOS_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {
        "pad_token_id": special_token_id(PAD_TOKEN, vocab),
        "eos_token_id": [special_token_id(token, vocab) for token in EOS_TOKENS],
    }
    for name, contents in (("tokenizer_config", tokenizer_config), ("generation_config", generation_config)):
        (directory / f"{name}.json").write_text(json.dumps(contents, indent=2) + "\n")


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs of printable ASCII characters, then each pair with a third; letters first."""
    # ByteLevel writes a space as this letter; the other printable characters stand for themselves.
    space = "Ġ"
    printable = string.ascii_letters + space + string.digits + string.punctuation
    yield from itertools.product(printable, repeat=2)
    for first, second, third in itertools.product(printable, repeat=3):
        yield first + second, third
