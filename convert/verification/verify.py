"""Verifies a conversion: reads the folder again, compares tensors and tokenizer with the source's, and runs both."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from convert.lora.fuse import with_adapter
from convert.lora.loss import MOST_LOST
from convert.sources.huggingface import open_huggingface
from convert.sources.open import open_source
from convert.sources.source import Source
from convert.verification.adapter_effect import AdapterEffect, adapter_effect, lost_updates, variants
from convert.verification.compare import Comparison, compare
from convert.verification.layerwise_logits import run_layerwise
from convert.verification.sample_text import TEXT
from convert.verification.tokenizer_comparison import Verdict, compare_tokenizers
from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

import mlx.core as mx

# Positions of the text to run: enough for a stable mean, with at most half a gigabyte of logits.
_POSITIONS = 512
# The most that a folder's perplexity may exceed its source's, as a share: 4 bits cost less, in a model of 1B too.
_MOST_RISE = 1 / 3


@dataclass(frozen=True)
class Divergence:
    """Source and folder run on one text.

    `kl` is the mean KL divergence of the folder from the source, in nats per token. `agreement` is the fraction of
    positions with the same most likely token.
    """

    tokens: int
    source_perplexity: float
    folder_perplexity: float
    kl: float
    agreement: float


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; `divergence` is None if the models were not run.

    For a folder with an adapter fused, `lost` is the share of each update that is lost, by tensor, and `effect` what
    the adapter does when the models are run.
    """

    folder: Path
    kind: str
    comparisons: Sequence[Comparison]
    differences: Sequence[str]
    divergence: Divergence | None
    lost: Mapping[str, float] = field(default_factory=dict)
    effect: AdapterEffect | None = None
    tokenizer: Sequence[Verdict] = ()

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each part: configuration, tensors, tokenizer, chat template, stop ids, behaviour."""
        verdicts = [Verdict("configuration", not self.differences, f"{len(self.differences)} differences")]
        if self.differences:
            verdicts.append(Verdict("tensors", None, "because the configurations differ"))
        else:
            bad = sum(not (c.exact or c.within) for c in self.comparisons) + len(self._lost)
            words = f"{len(self.comparisons)} compared, {bad} wrong"
            verdicts.append(Verdict("tensors", not bad, words))
        return [*verdicts, *self.tokenizer, self._behaviour]

    @property
    def _behaviour(self) -> Verdict:
        if self.divergence is None:
            return Verdict("behaviour", None, "the models were not run")
        arrived = self.effect is None or self.effect.ok
        rise = self.divergence.folder_perplexity / self.divergence.source_perplexity - 1
        words = f"run on {self.divergence.tokens} tokens of text, perplexity {100 * rise:+.1f} %"
        return Verdict("behaviour", arrived and rise <= _MOST_RISE, words)

    @property
    def ok(self) -> bool:
        """Whether no part is wrong: the configurations, the tokenizers, templates and stop ids agree, every tensor is
        exact or within the bound of its quantization, a fused adapter arrived, and the perplexity rose little.
        """
        return all(verdict.ok is not False for verdict in self.verdicts)

    @property
    def _lost(self) -> list[str]:
        """The tensors that lost more than `MOST_LOST` of their updates."""
        return [name for name, share in self.lost.items() if share > MOST_LOST]

    def __str__(self) -> str:
        lines = [f"{self.folder}, against {self.kind}", *(f"DIFFERS: {difference}" for difference in self.differences)]
        by_packing: dict[str, list[Comparison]] = {}
        for comparison in self.comparisons:
            by_packing.setdefault(comparison.packing, []).append(comparison)
        lines += [_describe(name, comparisons) for name, comparisons in by_packing.items()]
        lines += [f"WRONG: {c.name}: {_describe_error(c)}" for c in self.comparisons if not (c.exact or c.within)]
        lines += [
            f"WRONG: {name}: {100 * self.lost[name]:.0f} % of the adapter's update is lost" for name in self._lost
        ]
        if self._lost:
            lines.append("convert with --adapter again: what packing rounds away gets more bits")
        elif self.lost:
            worst = max(self.lost, key=self.lost.__getitem__)
            lines.append(f"of the adapter's updates at most {100 * self.lost[worst]:.1f} % is lost ({worst})")
        if self.divergence:
            d = self.divergence
            lines += [
                f"on {d.tokens} tokens of text: perplexity {d.source_perplexity:.4f} of the source, "
                f"{d.folder_perplexity:.4f} of the folder",
                f"KL divergence {d.kl:.3g} nats a token, the same most likely token for {100 * d.agreement:.1f} %",
            ]
        if self.effect:
            lines.append(f"{'' if self.effect.ok else 'WRONG: '}{self.effect}")
        lines += map(str, self.verdicts)
        return "\n".join([*lines, "verified" if self.ok else "NOT VERIFIED"])


def verify(
    folder: Path | str,
    against: Path | str,
    *,
    adapter: Path | str | None = None,
    rope_factor: float | None = None,
    text: str | None = None,
    run: bool = True,
    progress: bool = True,
) -> Verification:
    """Compare a converted folder with its source checkpoint, in little memory.

    Args:
        folder: what `convert` (or mlx-lm) wrote.
        against: the source, of any kind that `convert` reads.
        adapter: the LoRA adapter that was fused.
        rope_factor: the one given to `convert`.
        text: the text to run both on; None takes the built-in text.
        run: whether to run them; if false, only configurations and tensors are compared.
        progress: show bars on standard error, if that is a terminal.

    Raises:
        UserError: one of the two cannot be read.
    """
    target, source = open_huggingface(Path(folder)), open_source(against, rope_factor=rope_factor)
    if adapter is not None:
        source = with_adapter(source, Path(adapter))
    differences = _differences(target, source)
    comparisons: list[Comparison] = []
    if not differences:
        disable = None if progress else True
        with tqdm(total=len(target.tensors), desc="compare", unit="tensor", disable=disable) as bar:
            for comparison in compare(target, source):
                comparisons.append(comparison)
                bar.update()
    divergence, effect, lost = None, None, {}
    if adapter is not None and not differences:
        lost = lost_updates(target, source)
    if run and not differences:
        divergence, effect = _run(target, source, text or TEXT, progress)
    tokenizer = compare_tokenizers(target, source)
    return Verification(Path(folder), source.kind, comparisons, differences, divergence, lost, effect, tokenizer)


def _differences(target: Source, source: Source) -> list[str]:
    """The differences of the two configurations and of the tensor names, in words."""
    differences = []
    for key, value in vars(source.args).items():
        other = getattr(target.args, key)
        if other != value:
            differences.append(f"{key} is {other} in config.json, {value} in the source")
    names = target.tensors.keys() ^ source.tensors.keys()
    return differences + [f"tensor {name} is only in one of the two" for name in sorted(names)]


def _describe(name: str, comparisons: Sequence[Comparison]) -> str:
    exact = sum(comparison.exact for comparison in comparisons)
    count = f"{len(comparisons)} tensor{'s' if len(comparisons) > 1 else ''}"
    if exact == len(comparisons):
        return f"{name}: {count}, equal to the source"
    error = math.sqrt(sum(c.error for c in comparisons) / max(sum(c.norm for c in comparisons), 1e-300))
    worst = max(comparisons, key=lambda comparison: comparison.worst)
    return (
        f"{name}: {count}, {exact} of them equal to the source; relative RMS error {100 * error:.3g} %, "
        f"largest error {worst.worst:.2f} of the bound ({worst.name})"
    )


def _describe_error(comparison: Comparison) -> str:
    if math.isinf(comparison.worst):
        error = math.sqrt(comparison.error / max(comparison.norm, 1e-300))
        return f"differs from the source, relative RMS error {error:.3g}"
    return f"the largest error is {comparison.worst:.2f} times the bound of {comparison.packing}"


def _run(target: Source, source: Source, text: str, progress: bool) -> tuple[Divergence, AdapterEffect | None]:
    """Run both; if an adapter is fused into the source, variants of the folder too, on half of the text."""
    sides = {"source": source, "folder": target, **variants(target, source)}
    ids = _tokens(target, text)[: min(2 * _POSITIONS // len(sides), target.args.max_seq_len)]
    if len(ids) < 2:
        raise UserError("the text has fewer than two tokens; give a longer one")
    tokens = mx.array(ids)
    steps = len(sides) * (target.args.n_layers + 1)
    with tqdm(total=steps, desc="run", unit="layer", disable=None if progress else True) as bar:
        outcomes = {name: _log_probabilities(side, tokens, bar) for name, side in sides.items()}
    expected, actual = outcomes["source"], outcomes["folder"]
    kl = mx.sum(mx.exp(expected) * (expected - actual), axis=-1)
    divergence = Divergence(
        tokens=len(ids),
        source_perplexity=_perplexity(expected, tokens),
        folder_perplexity=_perplexity(actual, tokens),
        kl=max(0.0, mx.mean(kl).item()),
        agreement=mx.mean(mx.argmax(expected, axis=-1) == mx.argmax(actual, axis=-1)).item(),
    )
    return divergence, adapter_effect(outcomes) if "plain" in outcomes else None


def _tokens(target: Source, text: str) -> list[int]:
    """The token ids of the text. Without a tokenizer, its bytes: no text to the models, but enough to compare them."""
    names = ("tokenizer.json", "tokenizer.model")
    if any((target.path / name).exists() for name in names):
        return load_tokenizer(target.path).encode(text, bos=True)
    return [byte % target.args.vocab_size for byte in text.encode()]


def _log_probabilities(source: Source, tokens: mx.array, bar: tqdm) -> mx.array:
    """Log probabilities of the next token, (S, vocab_size)."""
    logits = run_layerwise(source, tokens, on_layer=bar.update)
    values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(values)
    return values


def _perplexity(log_probabilities: mx.array, tokens: mx.array) -> float:
    """exp of the mean negative log-likelihood of each token given those before it."""
    chosen = mx.take_along_axis(log_probabilities[:-1], tokens[1:, None], axis=-1)
    return math.exp(-mx.mean(chosen).item())
