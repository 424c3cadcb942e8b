"""`load`: a model and its tokenizer by name. `load_draft`: what drafts for it."""

from pathlib import Path

from mlx_llama3.autotune.choice import requested_kernels, use_chosen
from mlx_llama3.checkpoint.folder import read_settings
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.generation.speculative.draft_switch import DraftSwitch
from mlx_llama3.generation.speculative.drafters import ModelDrafter, NgramDrafter
from mlx_llama3.generation.speculative.speculation import Speculation, check_tokens
from mlx_llama3.generation.speculative.vocabulary_match import check_same_tokens
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.system.hub import resolve
from mlx_llama3.system.memory import hold_wired
from mlx_llama3.tokenizer.tokenizer import Tokenizer, load_tokenizer

import mlx.core as mx

NGRAM = "ngram"


def load(name: str, *, dtype: mx.Dtype | None = None) -> tuple[Transformer, Tokenizer]:
    """Load a model and its tokenizer.

    Args:
        name: a folder, a Hugging Face id ("org/name", downloaded on first use), or an alias: "demo", "llama3.2-1b",
            "llama3.2-3b", "llama3.1-8b", "llama3.3-70b".
        dtype: as in `load_model`.

    Raises:
        UserError: the model is not found, cannot be fetched, or cannot be loaded; one line that says what to do.
    """
    return load_folder(resolve(name), dtype=dtype)


def load_folder(folder: Path, *, dtype: mx.Dtype | None = None) -> tuple[Transformer, Tokenizer]:
    """As `load`, for a folder that is there. What is quick to find wrong fails before gigabytes are read."""
    requested_kernels()
    read_settings(folder)  # knows best what a folder is that is no model's
    tokenizer = load_tokenizer(folder)
    return _ready(load_model(folder, dtype=dtype)), tokenizer


def _ready(model: Transformer) -> Transformer:
    """The model as it should run on this machine: its memory wired, the kernels chosen that serve it."""
    hold_wired(model)
    use_chosen(model)
    return model


def load_draft(name: str, model: Transformer, tokenizer: Tokenizer, *, tokens: int | None = None) -> Speculation:
    """What drafts for a model; give it to `generate` or `Conversation` as `draft`. One for each stream of answers.

    Args:
        name: a smaller model with the same tokenizer, named as for `load`; or "ngram", which needs none: it proposes
            what followed the last words where they stood before, as in summaries, edited code and quotes.
        model, tokenizer: those that it drafts for.
        tokens: at most so many at a time. None takes 4 of a model, 6 of ngram, whose guesses cost nothing.

    Raises:
        UserError: as for `load`; tokenizers that differ, before the draft model is loaded; `tokens` out of range.
    """
    return ngram_draft(tokens) if name == NGRAM else load_draft_folder(resolve(name), model, tokenizer, tokens=tokens)


def ngram_draft(tokens: int | None = None) -> Speculation:
    """As `load_draft` for "ngram"."""
    return Speculation(NgramDrafter, tokens=6 if tokens is None else tokens, switch=DraftSwitch)


def load_draft_folder(
    folder: Path, model: Transformer, tokenizer: Tokenizer, *, tokens: int | None = None
) -> Speculation:
    """As `load_draft`, for a folder that is there."""
    tokens = check_tokens(4 if tokens is None else tokens)
    read_settings(folder)
    check_same_tokens(load_tokenizer(folder), tokenizer, str(folder))
    small = _ready(load_model(folder))
    return Speculation(lambda: ModelDrafter(small, model.args.vocab_size), tokens=tokens, switch=DraftSwitch)
