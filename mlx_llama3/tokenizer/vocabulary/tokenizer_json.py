"""Reads the vocabulary from a Hugging Face `tokenizer.json` (library `tokenizers`) with byte-level BPE."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_llama3.errors import UserError
from mlx_llama3.system.files import parse_json, read_bytes, read_json
from mlx_llama3.tokenizer.vocabulary import pretokenizers
from mlx_llama3.tokenizer.vocabulary.added_tokens import classify, name_of, token_table
from mlx_llama3.tokenizer.vocabulary.bpe_ranks import to_ranks
from mlx_llama3.tokenizer.vocabulary.byte_level import to_bytes, to_text
from mlx_llama3.tokenizer.vocabulary.tokenizer_json_check import (
    check_added_by_configuration,
    check_model,
    check_pipeline,
)
from mlx_llama3.tokenizer.vocabulary.tokenizer_model import read_ranks

# Options of the BPE model that can change its ids, with the value that has no effect.
_NEUTRAL = {
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
}


def read(path: Path) -> dict[str, Any]:
    """The fields of `Vocabulary`; for the errors see `Vocabulary.from_tokenizer_json`."""
    config = folder_config(path.parent)
    data = read_bytes(path)
    document, ranks = _with_model_ranks(data, path) or (_parse(data, path), None)
    check_pipeline(document, path)
    if document.get("normalizer"):
        raise UserError(f"{path}: the normalizer {document['normalizer'].get('type')} is not supported; expected none")
    special, added = classify(_added(document, config, path))
    fields = {
        "special": special,
        "added": added,
        "pre_tokenizer": pretokenizers.from_hugging_face(document.get("pre_tokenizer"), str(path)),
    }
    if ranks is not None:
        fields |= {"ranks": ranks, "tokens": token_table(zip(ranks, ranks.values(), strict=True), special, added)}
    else:
        fields |= _bpe_fields(document.get("model") or {}, special | added, path)
    return fields | _bos_eos(document, config, special | added)


def folder_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` merged over the older `special_tokens_map.json`; either may be missing."""
    files = (folder / "special_tokens_map.json", folder / "tokenizer_config.json")
    return {key: value for file in files if file.exists() for key, value in read_json(file).items()}


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    document = parse_json(data, path)
    if not isinstance(document, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def _with_model_ranks(data: bytes, path: Path) -> tuple[dict[str, Any], dict[bytes, int]] | None:
    """The document without its model, and the ranks of a `tokenizer.model` in the same folder; None if they disagree.

    The model is the last and by far the largest part: its 128,000 tokens and 280,000 merges take half a second to
    parse, the ranks a tenth of a second.
    """
    match = re.search(rb'"model"\s*:\s*\{', data)
    model = path.with_name("tokenizer.model")
    if match is None or not model.exists():
        return None
    try:
        head = parse_json(data[: match.start()].rstrip().removesuffix(b",") + b"}", path)
        check_pipeline(head, path)
        ranks = read_ranks(model)
    except ValueError:  # the parts have another order, or `tokenizer.model` another format: parse the whole document
        return None
    first_added = min((entry["id"] for entry in head.get("added_tokens", [])), default=None)
    samples = list(ranks)[-1 :: -(len(ranks) // 3)]
    if first_added != len(ranks) or not all(_has_entry(data, token, ranks[token]) for token in samples):
        return None
    return head, ranks


def _has_entry(data: bytes, token: bytes, n: int) -> bool:
    name = json.dumps(to_text(token), ensure_ascii=False).encode()
    return any(name + colon + str(n).encode() in data for colon in (b":", b": "))


def _added(document: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> list[tuple[str, int, bool]]:
    """(name, id, special) of all added tokens, including those of `tokenizer_config.json`, as in transformers."""
    entries = {entry["content"]: entry for entry in document.get("added_tokens", [])}
    configured = config.get("added_tokens_decoder") or {}
    check_added_by_configuration(configured, path.with_name("tokenizer_config.json"))
    for n, entry in configured.items():
        entries.setdefault(entry["content"], {**entry, "id": int(n)})
    for name, entry in entries.items():
        if option := next((key for key in ("single_word", "lstrip", "rstrip") if entry.get(key)), None):
            raise UserError(f"{path}: the added token {name!r} has {option}, which is not supported")
    return [(name, entry["id"], bool(entry.get("special"))) for name, entry in entries.items()]


def _bpe_fields(model: Mapping[str, Any], added: Mapping[str, int], path: Path) -> dict[str, Any]:
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        kind = model.get("type") if isinstance(model, Mapping) else model
        raise UserError(f"{path}: the model is {kind!s:.60}; expected byte-level BPE")
    words, merges = model["vocab"], model.get("merges")
    check_model(model, path)
    for option, neutral in _NEUTRAL.items():
        if (model.get(option) or neutral) != neutral:
            raise UserError(f"{path}: the model has {option} {model[option]!r}, which is not supported")
    tokens = token_table(zip(to_bytes(list(words)), words.values(), strict=True), added)
    ranks, ids = to_ranks(words, merges, tokens, str(path))
    if model.get("ignore_merges"):
        whole = next((word for word, n in words.items() if tokens[n] not in ranks and word not in added), None)
        if whole is not None:  # it can only match a whole piece, which ranks cannot express
            raise UserError(f"{path}: no merge makes the token {whole!r}; expected merges for all tokens")
    return {"tokens": tokens, "ranks": ranks, "ids": ids, "unknown_id": words.get(model.get("unk_token"))}


def _bos_eos(document: Mapping[str, Any], config: Mapping[str, Any], added: Mapping[str, int]) -> dict[str, Any]:
    """BOS and EOS, and whether texts begin with BOS: from `add_bos_token` if it is set, else the post-processor."""
    processor = document.get("post_processor") or {}
    templates = [step.get("single", []) for step in processor.get("processors", [processor])]
    first = next((template[0].get("SpecialToken", {}).get("id") for template in templates if template), None)
    bos, eos = (name_of(config.get(key)) for key in ("bos_token", "eos_token"))
    add_bos = config.get("add_bos_token")
    add_bos = first is not None if add_bos is None else bool(add_bos)
    bos_id = added.get(first if first and add_bos else bos)
    return {
        "bos_id": bos_id,
        "eos_ids": (added[eos],) if eos in added else (),
        "add_bos": add_bos and bos_id is not None,
    }
