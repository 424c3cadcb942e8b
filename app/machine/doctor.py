"""`mlx-llama3 doctor`: examines the machine and how a model runs on it."""

import json
from dataclasses import asdict
from typing import Any

from app.machine import dispatches
from app.machine.doctor_text import lines
from app.machine.machine import this_machine
from app.machine.matrix_check import check_matrices
from app.options.model import OpenModel, open_model
from mlx_llama3.autotune.choice import KernelChoice, has_metal, requested_kernels, use_chosen
from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.memory import bytes_a_token, context_bytes
from mlx_llama3.model.cache.settings import KV_BITS, CacheSettings
from mlx_llama3.model.kernels.kernel_set import FUSED, NAMES, REFERENCE
from mlx_llama3.system.hub import DEMO, demo_folder
from mlx_llama3.system.memory import free_memory

import mlx.core as mx
from mlx.utils import tree_flatten


def doctor(name: str | None, *, as_json: bool) -> int:
    """Print a report on the machine and the named model; returns the exit code, 2 if the model does not load.

    name: None is the demo model, or no model if that was never fetched. Raises `UserError` as `requested_kernels`.
    """
    report = examine(name or (DEMO if demo_folder().exists() else None))
    print(json.dumps(report, ensure_ascii=False, indent=1) if as_json else "\n".join(lines(report)))
    return 2 if report["error"] else 0


def examine(name: str | None) -> dict[str, Any]:
    """The whole report as a JSON object; sizes in bytes, speeds in 10**9 bytes per second."""
    mode, machine = requested_kernels(), asdict(this_machine())  # first: a loaded model reduces the free memory
    opened, error = None, None
    try:
        opened = None if name is None else open_model(name)
    except UserError as fault:  # the report is useful without the model, too
        error = str(fault)
    choice = _choice(opened)
    return {
        "machine": machine,
        "matrices": [asdict(check) for check in check_matrices()],
        "model": opened and _model(opened),
        "error": error,
        "kernels": {"asked": mode, **{kernel: _decisions(choice, kernel) for kernel in NAMES}},
        "dispatches": [
            {
                "part": row.part,
                "references": row.count(REFERENCE),
                "kernels": row.count(FUSED),
                "in use": row.count(choice.kernels),
            }
            for row in dispatches.ROWS
        ],
    }


def _choice(opened: OpenModel | None) -> KernelChoice:
    if opened is not None:
        return use_chosen(opened.model)
    reason = "not tried without a model" if has_metal() else "there is no Metal here"
    return KernelChoice.all_alike(REFERENCE, reason)


def _decisions(choice: KernelChoice, kernel: str) -> dict[str, Any]:
    """The decisions on a kernel by the numbers of rows for which they hold."""
    return {rows.label: asdict(decision) for rows, decision in choice.decisions[kernel].items()}


def _model(opened: OpenModel) -> dict[str, Any]:
    args, dtype = opened.model.args, opened.model.norm.weight.dtype
    parameters = dict(tree_flatten(opened.model.parameters()))
    return {
        "name": opened.name,
        "layers": args.n_layers,
        "dim": args.dim,
        "dtype": str(dtype).removeprefix("mlx.core."),
        "weights": sum(weight.nbytes for weight in parameters.values()),
        "context": args.max_seq_len,
        "caches": [_cache(opened, dtype, bits) for bits in (None, *sorted(KV_BITS, reverse=True))],
    }


def _cache(opened: OpenModel, dtype: mx.Dtype, kv_bits: int | None) -> dict[str, Any]:
    """The size of a cache of this kind and the number of tokens that fit into the free memory, or why there is none."""
    args, settings = opened.model.args, CacheSettings(kv_bits=kv_bits)
    try:
        a_token = bytes_a_token(args, dtype, settings)
    except UserError as error:
        return {"kv_bits": kv_bits, "error": str(error)}
    return {
        "kv_bits": kv_bits,
        "bytes a token": a_token,
        "full context": context_bytes(args, dtype, args.max_seq_len, settings),
        "fits": min(args.max_seq_len, free_memory() // a_token),
    }
