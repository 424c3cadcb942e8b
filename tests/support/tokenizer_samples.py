"""Difficult texts for tokenizers, Meta's tokenizer file, and small byte-level BPE tokenizers, trained when called."""

from importlib.resources import files
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mlx_llama3.tokenizer.vocabulary.byte_level import to_text

META_MODEL = Path(str(files("llama_models.llama3") / "tokenizer.model"))

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXTS = [
    "",
    " ",
    "Hello, world! It's 2024; we'll see, WE'LL SEE, don't 'you'?",
    "a  1", "a 1", "a1", "1 2", " 12  345   6789\t0", "x\n 1", "\n\n 1\n", "tab\t\t1 \t 2", "①② Ⅻ ½ ٣٤ 一二",
    "def f(x):\n    if x > 10:\n\t\treturn {'a': [1, 2.5e-3], \"b\": None}  # done\r\n\r\n\r\n",
    "for (int i=0;i<n;++i) { a[i] += b[i]*c[i]; } /* ... */\n#include <stdio.h>\n",
    "Русский текст, Ελληνικά, עברית, العربية ١٢٣, हिन्दी में, ไทย, 日本語のテキスト、中文文本。 한국어 ქართული አማርኛ",
    "naïve café: e\u0301 a\u0308\u0304 Z\u0351\u036b\u0343 \u200b\u200d zero",
    # Skin tones, a family of four joined by U+200D, the rainbow flag, the flag of England in tag characters.
    "\U0001f600\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 "
    "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "\u2764\ufe0f\u200d\U0001f525",
    "   leading, trailing   ", " " * 87, "\n" * 19, "\t \n \t\r\n   \u00a0\u2003\u3000x",
    "a" * 300, "ha" * 200, "=" * 77 + "\n",
    "<|eot_id|><|im_end|> <|begin_of_text|>x<|endoftext|> <|reserved_special_token_3|",
    "\ufffd\ufeff\x00\x01\x7f\x85 \x1c\x1d",
]  # fmt: skip

_ANY = st.characters(codec="utf-8")


def texts(alphabet: st.SearchStrategy[str] = _ANY) -> st.SearchStrategy[str]:
    """Concatenations of `TEXTS`, short pieces and random text of `alphabet`, for all kinds of boundaries."""
    pieces = [*TEXTS, " ", "  ", "\n", "1", "12", "'", "s", "é", "x"]
    return st.lists(st.sampled_from(pieces) | st.text(alphabet)).map("".join)


_CORPUS = [
    "the cat sat on the mat and the dog sat on the log, that is that",
    "def function(self): return self.value + 12345 # the value of the thing",
    "Это русский текст о том, что текст бывает русским; это так.",
    "日本語のテキスト。日本の言葉。 naïve café théâtre 😀😀 👍👍",
    "    if x == 1:\n        return 'the end'\n\n\n    else:\n        it's what they'll do\n",
]


# Bytes without a token in SmolLM: control characters missing from its training text, and bytes invalid in UTF-8.
SMOLLM_MISSING = bytes([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)])


def small_bpe(kind: str = "llama3", *, vocab_size: int = 400, missing: bytes = b"") -> Tokenizer:
    """A byte-level BPE tokenizer with the pretokenizer of `llama3`, `gpt2` or `smollm`, without `missing` bytes."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "llama3")
    splitters = {
        "llama3": [pre_tokenizers.Split(Regex(LLAMA3_REGEX), "isolated")],
        "gpt2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    }[kind]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splitters, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=[to_text(bytes([byte])) for byte in range(256) if byte not in missing],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer
