"""The tokenizer and the chat template that lie beside an adapter: those that it was trained with."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from convert.sources.source import Source
from convert.sources.tokenizer_files import copy_tokenizer_files, tokenizer_files
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import read_json
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

_VOCABULARIES = ("tokenizer.json", "tokenizer.model")


def with_tokenizer(source: Source, folder: Path) -> Source:
    """The source with the tokenizer and chat template of an adapter's `folder`, as far as it brings them.

    The stop tokens of the tokenizer are added to those of the source. A note says what was taken, or what was left
    aside because it does not fit the model.
    """
    names = tokenizer_files(folder)
    if not names:
        return source
    try:
        return _with_tokenizer(source, folder) if set(names) & set(_VOCABULARIES) else _with_template(source, folder)
    except UserError as error:
        note = f"the adapter's {', '.join(names)} left aside, which do not fit the model: {error}"
        return replace(source, notes=[*source.notes, note])


def _with_tokenizer(source: Source, folder: Path) -> Source:
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > source.args.vocab_size:
        raise UserError(f"{tokenizer.vocab_size} tokens, the model has {source.args.vocab_size}")
    templates, what = _templates(source), "tokenizer is the adapter's"
    if tokenizer.chat_templates:
        templates, what = {}, "tokenizer and the chat template are the adapter's"

    def write(target: Path) -> list[str]:
        return [*copy_tokenizer_files(folder, target), *_write_templates(templates, target)]

    known = source.generation_config.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    stops = [*known, *sorted(set(tokenizer.vocabulary.eos_ids) - set(known))]
    config = {**source.generation_config, "eos_token_id": stops} if stops != known else source.generation_config
    notes = [note for note in source.notes if not note.startswith("no tokenizer")]
    return replace(source, write_tokenizer=write, generation_config=config, notes=[*notes, f"the {what}"])


def _with_template(source: Source, folder: Path) -> Source:
    """For a folder that brings no vocabulary: the source's tokenizer with the folder's template."""
    with TemporaryDirectory() as name:
        together = Path(name)
        if not source.write_tokenizer(together):
            raise UserError("it has no tokenizer")
        for other in set(tokenizer_files(together)) - set(_VOCABULARIES):
            (together / other).unlink()
        for own in tokenizer_files(folder):
            (together / own).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / own, together / own)
        templates = load_tokenizer(together).chat_templates
    if not templates:
        raise UserError("neither a vocabulary nor a chat template is among them")

    def write(target: Path) -> list[str]:
        names = source.write_tokenizer(target)
        _remove_templates(target)
        return [name for name in names if (target / name).exists()] + _write_templates(templates, target)

    return replace(source, write_tokenizer=write, notes=[*source.notes, "the chat template is the adapter's"])


def _templates(source: Source) -> Mapping[str, str]:
    """The source's chat templates by name."""
    with TemporaryDirectory() as name:
        return load_tokenizer(name).chat_templates if source.write_tokenizer(Path(name)) else {}


def _remove_templates(folder: Path) -> None:
    """Remove the source's own templates, so that none of another name is left beside the adapter's."""
    for name in tokenizer_files(folder):
        if "chat_template" in name:
            (folder / name).unlink()
    path = folder / "tokenizer_config.json"
    if path.exists():
        config = {key: value for key, value in read_json(path).items() if key != "chat_template"}
        path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _write_templates(templates: Mapping[str, str], target: Path) -> list[str]:
    """Write templates as transformers does: the default beside the tokenizer, the others in a folder of their own."""
    names = []
    for name, text in templates.items():
        names.append("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        (target / names[-1]).parent.mkdir(exist_ok=True)
        (target / names[-1]).write_text(text, encoding="utf-8")
    return names
