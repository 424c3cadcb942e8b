"""The conversion itself: any checkpoint -> one MLX model folder, in little memory, whole or not at all.

plan -> check the disk -> for every tensor, block by block: read, merge, cast, pack, write -> flush -> rename
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convert.conversion.blocks import read_blocks
from convert.conversion.plan import Plan, PlanStep, make_plan
from convert.conversion.progress import ProgressBar
from convert.conversion.recipe import Recipe
from convert.conversion.report import Report, describe_packing, model_card
from convert.lora.fuse import with_adapter
from convert.sources.open import open_source
from convert.sources.source import Source
from convert.storage.safetensors_writer import SafetensorsWriter
from convert.storage.staged_folder import check_disk, check_folder_target, staged_folder
from convert.storage.stored_tensor import Checksum

import mlx.core as mx

# Buffers of dropped blocks that MLX may keep for the next ones.
_CACHE_BYTES = 256 << 20
# For tokenizer and configuration files, and the file system's own bookkeeping.
_SPARE_BYTES = 64 << 20
_LICENCES = ("LICENSE*", "USE_POLICY*", "NOTICE*")


def convert(
    source: Path | str,
    target: Path | str,
    *,
    dtype: str | None = None,
    recipe: Recipe | None = None,
    dequantize: bool = False,
    adapter: Path | str | None = None,
    rope_factor: float | None = None,
    exact_scales: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Convert a checkpoint into a folder that this project, mlx-lm and LM Studio load.

    Args:
        source: a folder of Meta's, Hugging Face's or MLX's, or a `.gguf` file.
        target: the folder to make; it appears at the end, whole.
        dtype: "float16", "bfloat16" or "float32" for values and scales; None keeps the source's.
        recipe: how to quantize (`recipe.make_recipe`); None keeps matrices as the source holds them.
        dequantize: unpack matrices that the source holds quantized.
        adapter: a folder with a LoRA adapter, of PEFT or mlx-lm, to fuse into the weights.
        rope_factor: overrides the factor of the scaled RoPE of Meta's checkpoints.
        exact_scales: float32 scales for GGUF types whose scales need them.
        overwrite: replace an existing target, at the end.
        progress: show a bar on standard error, if that is a terminal.
        on_progress: called with (bytes written, all bytes) after each block. What it raises ends the conversion.

    Raises:
        UserError: the source is damaged, incomplete or of another kind; the target exists; the disk is too small; a
            value is NaN, infinite or too large for `dtype`. Nothing is left behind.
    """
    started = time.perf_counter()
    target = Path(target)
    check_folder_target(target, overwrite=overwrite)
    opened = open_source(source, rope_factor=rope_factor, exact_scales=exact_scales)
    if adapter is not None:
        opened = with_adapter(opened, Path(adapter))
    plan = make_plan(opened, dtype=dtype, recipe=recipe, dequantize=dequantize)
    check_disk(target, plan.nbytes + _SPARE_BYTES)
    notes = [*opened.notes, *_left_dense(plan, recipe)]
    with staged_folder(target, overwrite=overwrite) as folder:
        checksums = _write_tensors(plan, folder, progress, on_progress)
        _write_rest(opened, plan, folder, checksums, notes)
    return Report(
        source=opened.path,
        kind=opened.kind,
        target=target,
        parameters=sum(step.tensor.nbytes // step.tensor.dtype.size for step in plan.steps),
        tensors=len(plan.entries),
        packing=describe_packing(plan),
        bits_per_weight=plan.bits_per_weight,
        nbytes=plan.nbytes,
        checksums=checksums,
        seconds=time.perf_counter() - started,
        notes=notes,
    )


def _write_tensors(
    plan: Plan, folder: Path, progress: bool, on_progress: Callable[[int, int], None] | None = None
) -> int:
    """Write all tensors; returns how many checksums of the source were verified."""
    writer = SafetensorsWriter(folder, plan.entries)
    bar = ProgressBar(writer.nbytes, len(plan.steps), shown=progress)
    verified: set[tuple[Path, int]] = set()
    numbers = {step.tensor.name: n for n, step in enumerate(plan.steps, 1)}
    written = 0
    try:
        with _small_cache(), bar:
            for block in read_blocks(_with_checksums(plan.steps, verified)):
                bar.begin(numbers[block.step.tensor.name])
                for entry, array in zip(block.step.entries, block.arrays, strict=True):
                    writer.write(entry.name, block.start, array)
                    bar.update(array.nbytes)
                    written += array.nbytes
                if on_progress is not None:
                    on_progress(written, writer.nbytes)
        writer.finish()
    finally:
        writer.close()
    return len(verified)


@contextmanager
def _small_cache() -> Iterator[None]:
    before = mx.set_cache_limit(_CACHE_BYTES)
    try:
        yield
    finally:
        mx.set_cache_limit(before)


def _with_checksums(steps: Sequence[PlanStep], verified: set[tuple[Path, int]]) -> Iterator[PlanStep]:
    """Yield the steps while another thread verifies the checksums of the step after, which also reads it ahead.

    A checksum that does not match raises before the conversion ends, so before anything appears.
    """

    def verify(checksums: Sequence[Checksum]) -> None:
        for checksum in checksums:
            if (checksum.path, checksum.offset) not in verified:
                checksum.verify()
                verified.add((checksum.path, checksum.offset))

    with ThreadPoolExecutor(1) as thread:
        ahead: Future[None] = thread.submit(verify, steps[0].tensor.checksums)
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            ahead.result()
            if following:
                ahead = thread.submit(verify, following.tensor.checksums)
            yield step


def _write_rest(source: Source, plan: Plan, folder: Path, checksums: int, notes: Sequence[str]) -> None:
    _write_json(folder / "config.json", plan.config)
    if source.generation_config:
        _write_json(folder / "generation_config.json", source.generation_config)
    has_tokenizer = bool(source.write_tokenizer(folder))
    if source.path.is_dir():
        for pattern in _LICENCES:
            for licence in filter(Path.is_file, source.path.glob(pattern)):
                shutil.copyfile(licence, folder / licence.name)
    card = model_card(source, plan, checksums, notes, has_tokenizer=has_tokenizer)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _left_dense(plan: Plan, recipe: Recipe | None) -> list[str]:
    """A sentence if matrices could not be packed because their rows are not whole groups."""
    if recipe is None:
        return []
    size = recipe.default.group_size
    odd = [s for s in plan.steps if len(s.tensor.shape) == 2 and not s.quantization and s.tensor.shape[1] % size]
    if not odd:
        return []
    return [f"{len(odd)} matrices stay dense: their rows are not whole groups of {size} ({odd[0].tensor.name})"]
