"""Converts any checkpoint into an MLX model folder, in little memory. The folder appears complete or not at all.

plan -> check the disk -> for every tensor, block by block: read, unshard, cast, quantize, write -> flush -> rename
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
from convert.conversion.updates import hold_updates, loss_notes
from convert.lora.fuse import with_adapter
from convert.sources.open import open_source
from convert.sources.source import Source
from convert.storage.file_states import check_unchanged, file_states
from convert.storage.overwriting import carried_over, check_source_stays
from convert.storage.safetensors_writer import SafetensorsWriter
from convert.storage.staged_folder import check_disk, check_folder_target, staged_folder
from convert.storage.stored_tensor import Checksum

import mlx.core as mx

# MLX's cache of freed buffers, for the blocks that follow.
_CACHE_BYTES = 256 << 20
# Room for tokenizer and configuration files and for the file system's metadata.
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
    """Convert a checkpoint into a model folder that this project, mlx-lm and LM Studio load.

    Args:
        source: a folder of Meta, Hugging Face or MLX format, or a `.gguf` file.
        target: the folder to write; it appears only when it is complete.
        dtype: "float16", "bfloat16" or "float32" for values and scales; None keeps the source's.
        recipe: the quantization to write (`recipe.make_recipe`); None keeps the source's.
        dequantize: write dense matrices where the source's are quantized.
        adapter: a folder with a LoRA adapter, of PEFT or mlx-lm, to fuse into the weights.
        rope_factor: overrides the RoPE scaling factor of Meta's checkpoints.
        exact_scales: float32 scales for GGUF types whose scales need them.
        overwrite: replace the model in an existing target once all is written; other files in it are kept.
        progress: show a bar on standard error, if that is a terminal.
        on_progress: called with (bytes written, total bytes) after each block; it may raise to end the conversion.

    Raises:
        UserError: the source is damaged, incomplete or of an unknown kind; the target exists; the disk is too small; a
            value is NaN, infinite or too large for `dtype`. Nothing is left behind.
    """
    started = time.perf_counter()
    target = Path(target)
    check_folder_target(target, overwrite=overwrite)
    opened = open_source(source, rope_factor=rope_factor, exact_scales=exact_scales)
    if adapter is not None:
        opened = with_adapter(opened, Path(adapter))
    check_source_stays(opened.files, target)
    before = file_states(opened.files)
    kept = carried_over(target) if target.exists() else []
    plan, held = hold_updates(make_plan(opened, dtype=dtype, recipe=recipe, dequantize=dequantize), progress=progress)
    check_disk(target, plan.nbytes + _SPARE_BYTES)
    notes = [*opened.notes, *loss_notes(held), *_dense_notes(plan, recipe)]
    with staged_folder(target, overwrite=overwrite) as folder:
        checksums = _write_tensors(plan, folder, progress, on_progress)
        _write_other_files(opened, plan, folder, checksums, notes)
        check_unchanged(before)
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
        notes=[*notes, *([f"kept in {target}: {', '.join(kept)}"] if kept else [])],
    )


def _write_tensors(
    plan: Plan, folder: Path, progress: bool, on_progress: Callable[[int, int], None] | None = None
) -> int:
    """Write all tensors; returns the number of checksums of the source that were verified."""
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
    """Yield the steps; meanwhile a thread verifies the checksums of the next one, which also reads it ahead.

    A checksum that does not match raises before its tensor is converted.
    """

    def verify(checksums: Sequence[Checksum]) -> None:
        for checksum in checksums:
            if (checksum.path, checksum.offset) not in verified:
                checksum.verify()
                verified.add((checksum.path, checksum.offset))

    with ThreadPoolExecutor(1) as thread:
        verification: Future[None] = thread.submit(verify, steps[0].tensor.checksums)
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            verification.result()
            if following:
                verification = thread.submit(verify, following.tensor.checksums)
            yield step


def _write_other_files(source: Source, plan: Plan, folder: Path, checksums: int, notes: Sequence[str]) -> None:
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


def _dense_notes(plan: Plan, recipe: Recipe | None) -> list[str]:
    """A note if matrices stay dense because their rows are not whole groups; an empty list otherwise."""
    if recipe is None:
        return []
    size = recipe.default.group_size
    odd = [s for s in plan.steps if len(s.tensor.shape) == 2 and not s.quantization and s.tensor.shape[1] % size]
    if not odd:
        return []
    return [f"{len(odd)} matrices stay dense: their rows are not whole groups of {size} ({odd[0].tensor.name})"]
