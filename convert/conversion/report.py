"""The report of a conversion: on the terminal, and as the model card (README.md) of the folder."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convert.conversion.plan import Plan
from convert.sources.source import Source
from mlx_llama3.system.files import replacing
from mlx_llama3.system.hub import cached_repository

_USE = """
    mlx-llama3 generate --model FOLDER --prompt "Hello"
    mlx_lm.generate --model FOLDER --prompt "Hello"
"""
_VERIFIED = "\n## Verified\n"


@dataclass(frozen=True)
class Report:
    """The result of a conversion. `nbytes` counts the tensors written, `seconds` the whole run."""

    source: Path
    kind: str
    target: Path
    parameters: int
    tensors: int
    packing: str
    bits_per_weight: float
    nbytes: int
    checksums: int
    seconds: float
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.target}: {self.tensors} tensors, {self.nbytes / 1e9:.2f} GB, {self.packing}",
            f"from {self.kind}: {self.parameters / 1e9:.3f} billion parameters, {self.bits_per_weight:.2f} bits each",
            f"{self.seconds:.1f} s, {self.nbytes / 1e6 / max(self.seconds, 1e-9):.0f} MB/s; {checks(self.checksums)}",
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def describe_packing(plan: Plan) -> str:
    """'bfloat16', or '4-bit in groups of 64 (225), bfloat16 (65)' with the number of tensors of each kind."""
    kinds = Counter(step.packing for step in plan.steps)
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())


def checks(checksums: int) -> str:
    """What the conversion has checked, in words; `checksums` of the source matched."""
    text = "names and shapes as the configuration means, no NaN and no infinity"
    return f"{text}, {checksums} checksums of the source match" if checksums else text


def model_card(source: Source, plan: Plan, checksums: int, notes: Sequence[str], *, has_tokenizer: bool) -> str:
    """README.md of the written folder: its source, shape and quantization, and what was checked."""
    args = source.args
    repository, commit = cached_repository(source.path) or (None, None)
    base = f"base_model: {repository}\n" if repository else ""
    listed = "".join(f"- {note}\n" for note in notes)
    use = _USE if has_tokenizer else ""
    return f"""---
library_name: mlx
pipeline_tag: text-generation
tags:
- mlx
- llama
{base}---

# {source.name}, for MLX

Converted by mlx-llama3 from {f"{repository}, commit {commit}" if repository else source.name}: {source.kind}.
The licence is that of the original model.

| | |
| --- | --- |
| parameters | {sum(step.tensor.nbytes // step.tensor.dtype.size for step in plan.steps) / 1e9:.3f} billion |
| layers, width, heads, KV heads | {args.n_layers}, {args.dim}, {args.n_heads}, {args.n_kv_heads} |
| context | {args.max_seq_len} tokens |
| weights | {describe_packing(plan)} |
| bits a weight | {plan.bits_per_weight:.2f} |
| size | {plan.nbytes / 1e9:.2f} GB |

Checked while converting: {checks(checksums)}.

{listed}{use}"""


def add_to_card(folder: Path, verification: str) -> None:
    """Append the output of `verify` to a folder's README.md, in place of an earlier one."""
    path = folder / "README.md"
    card = path.read_text(encoding="utf-8") if path.exists() else f"# {folder.absolute().name}\n"
    text = card.split(_VERIFIED)[0] + _VERIFIED + "\n" + "".join(f"    {line}\n" for line in verification.splitlines())
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
