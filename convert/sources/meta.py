"""Meta's own checkpoints: `params.json`, `tokenizer.model` and one shard `consolidated.NN.pth` per rank."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.sources import unshard
from convert.sources.params_json import from_meta
from convert.sources.source import Source, SourceTensor
from convert.sources.tokenizer_files import write_tokenizer
from convert.storage.safetensors_reader import read_safetensors
from convert.storage.stored_tensor import WEIGHT_DTYPES, StoredTensor, to_mlx
from convert.storage.torch_zip import read_pth
from mlx_llama3.checkpoint.tensor_names import hf_to_official, official_to_hf
from mlx_llama3.checkpoint.tensor_shapes import expected_shapes
from mlx_llama3.errors import UserError
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.system.files import read_json
from mlx_llama3.tokenizer.llama3_format import llama3_chat_template
from mlx_llama3.tokenizer.vocabulary.tokenizer_model import Llama3Version, llama3_version
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

_SHARD = re.compile(r"consolidated(?:\.(\d+))?\.(pth|safetensors)")
_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_TIED_BLOCK_ROWS = 4096

Shards = Sequence[Mapping[str, StoredTensor]]


def is_meta_folder(folder: Path) -> bool:
    """Whether a folder holds `consolidated*.pth` or `consolidated*.safetensors` and their `params.json`."""
    return (folder / "params.json").exists() and any(map(_SHARD.fullmatch, (path.name for path in folder.iterdir())))


def open_meta(folder: Path, *, rope_factor: float | None = None) -> Source:
    """Open a folder with `params.json` and `consolidated*`; only headers are read, and the head if it may be tied.

    `rope_factor` overrides the RoPE scaling factor, which `params.json` does not state (`params_json.from_meta`).

    Raises `UserError` if a shard is missing, shards differ in their tensors, or a tensor is unknown, missing or has the
    wrong shape.
    """
    files, notes = _choose_files(folder)
    params = read_json(folder / "params.json")
    # Called first to refuse vision, QAT and LoRA checkpoints, some of whose files hold more than plain tensors.
    from_meta(params, source=str(folder / "params.json"), rope_factor=rope_factor, vocab_size=1)
    shards = [_read_shard(path) for path in files]
    _check_same_tensors(files, shards)
    args = from_meta(
        params, source=str(folder / "params.json"), rope_factor=rope_factor, vocab_size=_vocab_size(files, shards)
    )
    if rope_factor is not None and args.rope_scaling is None:
        raise UserError(f"{folder / 'params.json'}: says nothing of use_scaled_rope, so --rope-factor has no use here")
    args = dataclasses.replace(args, tie_word_embeddings=_is_tied(shards))
    tensors = _source_tensors(args, files, shards)
    tokenizer = _Tokenizer(folder, args, llama3_version(params))
    if args.tie_word_embeddings and "output.weight" in shards[0]:
        notes.append("the head equals the embedding: it is stored once, and config.json says that they are tied")
    if tokenizer.path is None:
        notes.append(f"no tokenizer.model in {folder}: the new folder runs, but not on text")
    return Source(
        path=folder,
        kind=f"Meta checkpoint, {len(files)} shard{'s' if len(files) > 1 else ''}",
        args=args,
        tensors=tensors,
        generation_config=tokenizer.generation_config(),
        write_tokenizer=tokenizer.write,
        notes=notes,
        files=[folder / "params.json", *files, *([tokenizer.path] if tokenizer.path else [])],
    )


class _Tokenizer:
    """`tokenizer.model` beside the shards, if it exists. It is read here, so that a damaged one fails early."""

    def __init__(self, folder: Path, args: ModelArgs, version: Llama3Version) -> None:
        path = folder / "tokenizer.model"
        self.path = path if path.exists() else None
        self._version, self._max_seq_len = version, args.max_seq_len
        self._vocabulary = Vocabulary.from_tokenizer_model(path, version) if self.path else None
        if self._vocabulary and len(self._vocabulary.tokens) > args.vocab_size:
            raise UserError(
                f"{path}: has {len(self._vocabulary.tokens)} tokens, but the embedding has {args.vocab_size}; "
                "it belongs to another model"
            )

    def generation_config(self) -> dict[str, Any]:
        """`bos_token_id` and `eos_token_id` for generation_config.json."""
        if self._vocabulary is None:
            return {}
        special = self._vocabulary.special
        return {
            "bos_token_id": special["<|begin_of_text|>"],
            "eos_token_id": [special[name] for name in _ENDS if name in special],
        }

    def write(self, target: Path) -> list[str]:
        """Write the tokenizer's files into the folder `target` and return their names."""
        if self._vocabulary is None:
            return []
        return write_tokenizer(
            self._vocabulary,
            target,
            chat_template=llama3_chat_template(self._version),
            model_max_length=self._max_seq_len,
            tokenizer_model=self.path,
        )


def _choose_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The shards in the order of their numbers, either `.pth` or `.safetensors`; and notes for the person."""
    shards_by_suffix: dict[str, dict[int, Path]] = {"pth": {}, "safetensors": {}}
    for path in folder.iterdir():
        if match := _SHARD.fullmatch(path.name):
            shards = shards_by_suffix[match[2]]
            number = int(match[1] or 0)
            if number in shards:
                raise UserError(f"{path}: has the number of {shards[number].name}; remove one of them")
            shards[number] = path
    suffixes = [suffix for suffix, shards in shards_by_suffix.items() if shards]
    if not suffixes:
        raise UserError(f"{folder}: no consolidated.*.pth and no consolidated*.safetensors")
    shards = shards_by_suffix[suffixes[-1]]
    count = max(shards) + 1
    for number in range(count):
        if number not in shards:
            raise UserError(
                f"{folder}: consolidated.{number:02d}.{suffixes[-1]} is missing; "
                f"files up to number {count - 1} are there"
            )
    both = f"{folder.name} holds consolidated files of both kinds; only *.{suffixes[-1]} were read"
    notes = [both] if suffixes[1:] else []
    return [shards[number] for number in range(count)], notes


def _read_shard(path: Path) -> Mapping[str, StoredTensor]:
    tensors = read_pth(path) if path.suffix == ".pth" else read_safetensors(path)[0]
    return {name: tensor for name, tensor in tensors.items() if name != "rope.freqs"}


def _check_same_tensors(files: Sequence[Path], shards: Shards) -> None:
    """Raise `UserError` unless all shards hold the same names, each with the same shape and dtype."""
    for path, shard in zip(files[1:], shards[1:], strict=True):
        unmatched = sorted(shard.keys() ^ shards[0].keys())
        if unmatched:
            holder = path if unmatched[0] in shard else files[0]
            raise UserError(f"{path}: {unmatched[0]} is only in {holder.name}; the shards are not of one model")
        for name, tensor in shard.items():
            first = shards[0][name]
            if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
                raise UserError(
                    f"{path}: {name} is {tensor.dtype} {tensor.shape}, but {first.dtype} {first.shape} in "
                    f"{files[0].name}; the shards are not of one model"
                )


def _vocab_size(files: Sequence[Path], shards: Shards) -> int:
    embedding = shards[0].get("tok_embeddings.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{files[0]}: tok_embeddings.weight is missing; this is not a Llama 3 checkpoint")
    return embedding.shape[0] * len(shards)


def _is_tied(shards: Shards) -> bool:
    """Whether the head is tied to the embedding: absent, or bit for bit equal."""
    for shard in shards:
        embedding, output = shard["tok_embeddings.weight"], shard.get("output.weight")
        if output is None:
            continue
        if (embedding.shape, embedding.dtype) != (output.shape, output.dtype):
            return False
        for start in range(0, embedding.shape[0], _TIED_BLOCK_ROWS):
            stop = min(start + _TIED_BLOCK_ROWS, embedding.shape[0])
            if not np.array_equal(embedding.rows(start, stop), output.rows(start, stop)):
                return False
    return True


def _source_tensors(args: ModelArgs, files: Sequence[Path], shards: Shards) -> dict[str, SourceTensor]:
    """The tensors in the order of the forward pass, each checked against the shape that params.json implies."""
    expected = expected_shapes(args)
    for name in shards[0]:
        if official_to_hf(name) not in expected and name != "output.weight":
            raise UserError(
                f"{files[0]}: tensor {name[:100]!r} is not part of a Llama 3 text model of this params.json"
            )
    tensors = {}
    for name, shape in expected.items():
        official = hf_to_official(name)
        if official not in shards[0]:
            raise UserError(f"{files[0]}: tensor {official} is missing; fetch the checkpoint again")
        tensors[name] = _unsharded(args, name, shape, [shard[official] for shard in shards])
    return tensors


def _unsharded(args: ModelArgs, name: str, shape: tuple[int, ...], shards: list[StoredTensor]) -> SourceTensor:
    first = shards[0]
    if first.dtype not in WEIGHT_DTYPES:
        raise UserError(
            f"{first.path}: {first.name} is stored as {first.dtype}; quantized checkpoints of Meta's are not read, "
            "convert the plain bfloat16 one instead"
        )
    read = _reader(args, first.name, shape, shards)
    origin = first.origin if len(shards) == 1 else f"{first.path.name} .. {shards[-1].path.name}: {first.name}"
    return SourceTensor(
        name=name,
        shape=shape,
        dtype=first.mx_dtype,
        origin=origin,
        rows=lambda start, stop: to_mlx(read(start, stop), first.mx_dtype),
        checksums=tuple(shard.checksum for shard in shards if shard.checksum),
    )


def _reader(args: ModelArgs, official: str, shape: tuple[int, ...], shards: list[StoredTensor]) -> unshard.ReadRows:
    """Read the whole tensor from its shards. Its name tells along which axis it was split; its shape is the check."""
    module = official.split(".")[-2]
    local, count = shards[0].shape, len(shards)
    if len(shape) == 1:
        merged, read = local, unshard.first_if_equal(shards)
    elif module in ("wo", "w2"):
        merged, read = (*local[:1], *(axis * count for axis in local[1:])), unshard.join_columns(shards)
    else:
        merged, read = (local[0] * count if local else 0, *local[1:]), unshard.stack_rows(shards)
    copies = merged[0] // shape[0] if module in ("wk", "wv") else 1
    if copies > 1 and count % copies == 0 and merged == (shape[0] * copies, shape[1]):
        merged, read = shape, unshard.drop_copies([shards[at : at + copies] for at in range(0, count, copies)])
    if merged != shape:
        raise UserError(
            f"{shards[0].path}: {official} has shape {local} in each of {count} shards, "
            f"params.json means {shape} in all"
        )
    return unshard.half_split(read, args.head_dim) if module in ("wq", "wk") else read
