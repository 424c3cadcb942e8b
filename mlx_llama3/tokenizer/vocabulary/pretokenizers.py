"""Pre-tokenizers: the regular expressions that split text before merges, and their names in the file formats.

Only rules that are known to be exact are supported. A rule that differs in one detail would silently give other ids for
some texts, so every other pre-tokenizer is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_llama3.errors import UserError


@dataclass(frozen=True)
class PreTokenizer:
    """One rule for splitting text.

    Attributes:
        pattern: the whole rule as one regular expression, for tiktoken.
        hugging_face: its steps in `tokenizer.json`, with the keys that have an effect.
        gguf: its values of `tokenizer.ggml.pre`; the converter writes the first.
        ignore_merges: whether a piece that is a token becomes that token, whatever its merges (Hugging Face's term).
    """

    pattern: str
    hugging_face: tuple[Mapping[str, Any], ...]
    gguf: tuple[str, ...]
    ignore_merges: bool


# Meta models/llama3/tokenizer.py, `pat_str`. It must be exact, because `tokenizer.json` is compared with it.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}

LLAMA3 = PreTokenizer(
    pattern=_LLAMA3_PATTERN,
    hugging_face=(
        {"type": "Split", "pattern": {"Regex": _LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
        {**_BYTE_LEVEL, "use_regex": False},
    ),
    gguf=("llama-bpe", "llama3", "llama-v3", "smaug-bpe"),
    ignore_merges=True,
)
GPT2 = PreTokenizer(
    pattern=r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    hugging_face=({**_BYTE_LEVEL, "use_regex": True},),
    gguf=("gpt-2",),
    ignore_merges=False,
)
# GPT-2's rule applied to the text between single digits. Hugging Face splits at the digits first, so for the second
# rule the text ends before each digit: white space there is a piece of its own, and never joins a digit.
DIGITS_GPT2 = PreTokenizer(
    pattern=r"'s|'t|'re|'ve|'m|'ll|'d|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
    hugging_face=({"type": "Digits", "individual_digits": True}, {**_BYTE_LEVEL, "use_regex": True}),
    gguf=("smollm",),
    ignore_merges=False,
)
KNOWN = (LLAMA3, GPT2, DIGITS_GPT2)
_DEFAULTS = {"use_regex": True, "invert": False}  # defaults of keys that older files omit


def from_hugging_face(written: Mapping[str, Any] | None, source: str) -> PreTokenizer:
    """The rule for the `pre_tokenizer` of a `tokenizer.json`. Raises `UserError` for an unknown one."""
    written = written or {}
    steps = written.get("pretokenizers", []) if written.get("type") == "Sequence" else [written]
    for known in KNOWN:
        if len(steps) == len(known.hugging_face) and all(map(_same, steps, known.hugging_face)):
            return known
    raise UserError(
        f"{source}: the pre-tokenizer {' + '.join(map(_describe, steps))} is not supported; "
        "those of Llama 3, GPT-2 and SmolLM are"
    )


def from_gguf(name: str, source: str) -> PreTokenizer:
    """The rule named by `tokenizer.ggml.pre`. Raises `UserError` for an unknown one."""
    for known in KNOWN:
        if name in known.gguf:
            return known
    names = ", ".join(name for known in KNOWN for name in known.gguf)
    raise UserError(f"{source}: the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; these are: {names}")


def _same(step: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return all(step.get(key, _DEFAULTS.get(key)) == value for key, value in known.items())


def _describe(step: Mapping[str, Any]) -> str:
    options = [f"{key} {value}" for key, value in step.items() if key not in ("type", "trim_offsets")]
    return f"{step.get('type', 'none')} ({', '.join(options)})" if options else str(step.get("type", "none"))
