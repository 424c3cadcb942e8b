"""Writes any checkpoint as one GGUF file for llama.cpp: F16, Q8_0 or Q4_1, streamed in blocks of rows."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from convert.conversion.progress import ProgressBar
from convert.conversion.updates import HeldUpdate, hold, loss_notes
from convert.gguf.config import ROPE_FACTORS
from convert.gguf.dequantize import dequantize, is_finite
from convert.gguf.metadata import model_metadata, tokenizer_metadata, unwritten_stop_ids
from convert.gguf.quantize import TYPES, quantize, repack_q4_1
from convert.gguf.rope_factors import rope_factors
from convert.gguf.types import LAYOUTS
from convert.gguf.writer import TensorOutput, file_size, write_gguf
from convert.lora.fuse import with_adapter
from convert.lora.loss import lost_share
from convert.sources.open import open_source
from convert.sources.source import Source, SourceTensor
from convert.storage.file_states import check_unchanged, file_states
from convert.storage.overwriting import check_gguf_target, check_source_stays
from convert.storage.staged_file import staged_file
from convert.storage.staged_folder import check_disk
from mlx_llama3.checkpoint.tensor_names import hf_to_gguf
from mlx_llama3.errors import UserError
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.system.files import read_json
from mlx_llama3.tokenizer.tokenizer import load_tokenizer
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

import mlx.core as mx

# Elements per block of rows: 16 MB in float32.
BLOCK_ELEMENTS = 1 << 22
# Q8_0 in a Q4_1 file: these lose most with few bits, and llama.cpp too gives them more than the rest.
EIGHT_BIT = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class GGUFReport:
    """The result: what was read, and the number of tensors written of each type."""

    kind: str
    target: Path
    types: Mapping[str, int]
    nbytes: int
    seconds: float
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        types = ", ".join(f"{count} {name}" for name, count in self.types.items())
        lines = [
            f"{self.target}: GGUF, {types}, {self.nbytes / 1e9:.2f} GB",
            f"from {self.kind}",
            f"{self.seconds:.1f} s, {self.nbytes / 1e6 / max(self.seconds, 1e-9):.0f} MB/s",
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def to_gguf(
    source: Path | str,
    target: Path | str,
    *,
    type_name: str = "F16",
    adapter: Path | str | None = None,
    rope_factor: float | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> GGUFReport:
    """Write any checkpoint that `open_source` opens as one GGUF file, with its tokenizer and chat template.

    Args:
        source: the checkpoint: a folder or a `.gguf` file.
        target: the file to write; it appears only when it is complete.
        type_name: the type of the matrices: "F16", "Q8_0" or "Q4_1".
        adapter: a folder with a LoRA adapter, of PEFT or mlx-lm, to fuse into the weights.
        rope_factor: overrides the RoPE scaling factor of Meta's checkpoints.
        overwrite: replace an existing file once all is written.
        progress: show a bar on standard error, if that is a terminal.

    Raises:
        UserError: an unknown type; a source that is damaged or has no tokenizer; an existing target; too little disk; a
            value that is not finite, or too large for float16. Nothing is left behind.
    """
    started = time.perf_counter()
    opened, target = open_source(source, rope_factor=rope_factor), Path(target)
    if overwrite:
        check_gguf_target(target)
    check_source_stays(opened.files, target)
    if adapter is not None:
        opened = with_adapter(opened, Path(adapter))
    vocabulary, templates = _tokenizer(opened)
    planned, held = plan_types(opened, type_name)
    options = {
        "type_name": type_name,
        "planned": planned,
        "chat_template": templates,
        "overwrite": overwrite,
        "progress": progress,
    }
    types = write_model(opened, vocabulary, target, **options)
    seconds = time.perf_counter() - started
    notes = [*opened.notes, *loss_notes(held, remedy="only an MLX folder in float32 holds it")]
    if lost := unwritten_stop_ids(vocabulary):
        notes.append(f"a GGUF holds three stop ids: {', '.join(map(str, lost))} stop nothing in llama.cpp")
    return GGUFReport(opened.kind, target, types, target.stat().st_size, seconds, notes)


def _tokenizer(source: Source) -> tuple[Vocabulary, Mapping[str, str]]:
    """The vocabulary, with all stop ids of the source, and the chat templates by name.

    They are read from the files that the source writes into a model folder.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        if not source.write_tokenizer(folder):
            raise UserError(
                f"{source.path}: has no tokenizer, which llama.cpp needs; put tokenizer.json beside the weights"
            )
        try:
            tokenizer = load_tokenizer(folder)
        except UserError as error:  # names the person's files, not the copies
            raise UserError(str(error).replace(str(folder), str(source.path))) from error
        vocabulary = tokenizer.vocabulary
        if vocabulary.merges is None and (folder / "tokenizer.json").exists():
            # Merges computed from the ranks are equivalent, but several times as many.
            written = read_json(folder / "tokenizer.json")["model"]["merges"]
            # Current files write pairs, older ones "left right".
            merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in written]
            vocabulary = replace(vocabulary, merges=merges)
    declared = source.generation_config.get("eos_token_id") or []
    ends = [*vocabulary.eos_ids, *(declared if isinstance(declared, list) else [declared])]
    ends = [n for n in ends if type(n) is int and 0 <= n < len(vocabulary.tokens)]
    return replace(vocabulary, eos_ids=tuple(dict.fromkeys(ends))), tokenizer.chat_templates


def write_model(
    source: Source,
    vocabulary: Vocabulary,
    target: Path,
    *,
    type_name: str = "F16",
    planned: Mapping[str, str] | None = None,
    chat_template: str | Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Mapping[str, int]:
    """Write an open checkpoint as one GGUF file; returns the number of tensors of each type.

    Vectors are F32. Matrices have `type_name`, except those whose rows are not whole blocks of 32 (F16), and the
    embedding and the head of a Q4_1 file (Q8_0). Matrices that the source holds in MLX's 4-bit affine packing become
    Q4_1 without a change of value, if float16 holds their scales and biases exactly.

    `planned` are the types of `plan_types`, if they were decided already. `chat_template` is Jinja text,
    or texts by name; the other options and errors are those of `to_gguf`.
    """
    kinds = plan_types(source, type_name)[0] if planned is None else planned
    metadata = {
        **model_metadata(source.args, source.name, type_name),
        **tokenizer_metadata(vocabulary, source.args.vocab_size, chat_template),
    }
    outputs = [_output(tensor, kinds[tensor.name], source.args) for tensor in source.tensors.values()]
    if source.args.rope_scaling:
        factors = rope_factors(source.args)
        outputs.append(TensorOutput(ROPE_FACTORS, factors.shape, "F32", lambda: iter([factors.view(np.uint8)])))
    size, before = file_size(metadata, outputs), file_states(source.files)
    check_disk(target, size)
    with staged_file(target, overwrite=overwrite) as file, ProgressBar(size, len(outputs), shown=progress) as bar:
        tracked = [replace(output, blocks=partial(_track, output, bar, n)) for n, output in enumerate(outputs, 1)]
        write_gguf(file, metadata, tracked)
        check_unchanged(before)
    return Counter(output.type for output in outputs)


def _track(output: TensorOutput, bar: ProgressBar, number: int) -> Iterator[np.ndarray]:
    bar.begin(number)
    for block in output.blocks():
        yield block
        bar.update(block.nbytes)


def plan_types(source: Source, type_name: str) -> tuple[dict[str, str], list[HeldUpdate]]:
    """The type of each tensor by name, and what was measured of an adapter's updates.

    A matrix whose update would be rounded away gets more bits than `type_name` means: Q8_0, or F16 where Q8_0 loses as
    much. Raises `UserError` for a type that cannot be written.
    """
    if type_name not in TYPES:
        raise UserError(f"{type_name!r} is not a type that can be written; choose one of {', '.join(TYPES)}")
    kinds, held = {}, []
    for tensor in source.tensors.values():
        kinds[tensor.name] = _type_of(tensor, type_name)
        if tensor.base and len(tensor.shape) == 2:
            choices = ((kind, kind) for kind in _roomier(tensor, kinds[tensor.name]))
            kinds[tensor.name], update = hold(tensor.name, choices, partial(_update_loss, tensor))
            held.append(update)
    return kinds, held


def _roomier(tensor: SourceTensor, kind: str) -> Iterable[str]:
    def bits(name: str) -> float:
        return 8 * LAYOUTS[name].n_bytes / LAYOUTS[name].values

    wider = (name for name in ("Q8_0", "F16") if bits(name) > bits(kind))
    return [kind, *(name for name in wider if tensor.shape[1] % LAYOUTS[name].values == 0)]


def _update_loss(tensor: SourceTensor, kind: str) -> float:
    """The share of the update of a fused matrix that is lost when it is written as `kind`."""

    def written(side: SourceTensor, start: int, stop: int) -> mx.array:
        return mx.array(dequantize(_encoded_rows(side, kind, start, stop), kind))

    block_rows = max(1, BLOCK_ELEMENTS // tensor.shape[1])
    return lost_share(tensor, partial(written, tensor), partial(written, tensor.base), block_rows)


def _output(tensor: SourceTensor, kind: str, args: ModelArgs) -> TensorOutput:
    return TensorOutput(hf_to_gguf(tensor.name), tensor.shape, kind, partial(_blocks, tensor, kind, args.head_dim))


def _type_of(tensor: SourceTensor, type_name: str) -> str:
    if len(tensor.shape) == 1:
        return "F32"
    if type_name == "Q4_1" and tensor.name in EIGHT_BIT:
        type_name = "Q8_0"
    return type_name if tensor.shape[1] % LAYOUTS[type_name].values == 0 else "F16"


def _blocks(tensor: SourceTensor, kind: str, head_dim: int) -> Iterator[np.ndarray]:
    """The rows of a tensor in GGUF's encoding, block by block: uint8 (rows, row bytes)."""
    is_q_or_k = tensor.name.endswith(("q_proj.weight", "k_proj.weight"))
    n_rows = max(1, BLOCK_ELEMENTS // math.prod(tensor.shape[1:]))
    if is_q_or_k:
        n_rows = max(head_dim, n_rows - n_rows % head_dim)
    for start in range(0, tensor.shape[0], n_rows):
        stop = min(start + n_rows, tensor.shape[0])
        block = _encoded_rows(tensor, kind, start, stop)
        if not is_finite(block, kind):
            raise UserError(f"{tensor.origin}: holds values that are not finite, or too large for float16")
        yield _interleaved(block, head_dim) if is_q_or_k else block


def _encoded_rows(tensor: SourceTensor, kind: str, start: int, stop: int) -> np.ndarray:
    quantization = tensor.quantization
    if kind == "Q4_1" and quantization is not None and (quantization.mode, quantization.bits) == ("affine", 4):
        rows = tensor.quantized_rows(start, stop)
        packed = (rows.weight, rows.scales.astype(mx.float32), rows.biases.astype(mx.float32))
        repacked = repack_q4_1(*map(np.array, packed))
        if repacked is not None:
            return repacked
    values = np.array(tensor.rows(start, stop).astype(mx.float32))
    return values[:, None].view(np.uint8) if kind == "F32" else quantize(values, kind)


def _interleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder rows of whole heads from Hugging Face's RoPE layout (two halves) to GGUF's (adjacent pairs)."""
    # (heads, 2, head_dim / 2, bytes) -> (heads, head_dim / 2, 2, bytes)
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1]).swapaxes(1, 2)
    return np.ascontiguousarray(heads).reshape(rows.shape)
