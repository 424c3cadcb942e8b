"""The byte alphabet of GPT-2: every byte as one printable character, so that tokens can be written in JSON.

Printable Latin-1 characters stand for their own byte; U+0100 and up stand for the 68 other bytes (the space is `Ġ`).
Hugging Face's `tokenizer.json` and GGUF write tokens in this alphabet; tiktoken files contain the bytes themselves.
"""

from collections.abc import Sequence

_PRINTABLE = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
_RENAMED = [byte for byte in range(256) if byte not in _PRINTABLE]
_TO_TEXT = {byte: chr(0x100 + n) for n, byte in enumerate(_RENAMED)}
ALPHABET = "".join(_TO_TEXT.get(byte, chr(byte)) for byte in range(256))  # byte -> its character
_CHARACTERS = frozenset(ALPHABET)
_SEPARATOR = "\u2000"  # not in the alphabet, nor in Latin-1


def to_text(token: bytes) -> str:
    """The token in the byte alphabet."""
    return token.decode("latin-1").translate(_TO_TEXT)


def to_bytes(tokens: Sequence[str]) -> list[bytes]:
    """The bytes of tokens in the byte alphabet. A token with any other character is plain text and becomes UTF-8.

    All tokens are joined and translated as one string, one pass for each renamed byte. For the 128,000 tokens of a
    vocabulary this is several times faster than one by one.
    """
    joined = _SEPARATOR.join(tokens)
    if set(joined) - {_SEPARATOR} <= _CHARACTERS:
        for byte, character in _TO_TEXT.items():
            joined = joined.replace(character, chr(byte))
        return [token.encode("latin-1") for token in joined.split(_SEPARATOR)] if tokens else []
    plain = {token for token in tokens if not _CHARACTERS.issuperset(token)}
    known = to_bytes(["" if token in plain else token for token in tokens])
    return [token.encode("utf-8") if token in plain else written for token, written in zip(tokens, known, strict=True)]
