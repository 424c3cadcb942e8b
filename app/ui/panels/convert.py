"""The convert drawer: converts a checkpoint of Meta or Hugging Face, or a GGUF file, to a model for this app."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr

from app.ui.html import notice, progress_bar, size
from app.ui.panels import model_list
from app.ui.panels.models import ModelsPanel
from app.ui.panels.progress import Cancelled, Progress, follow
from app.ui.session.failures import explained
from app.ui.session.mlx_thread import Engine
from convert.conversion.recipe import make_recipe
from convert.conversion.to_mlx import convert
from convert.sources.find import find_source
from mlx_llama3.errors import UserError

_BITS = [
    ("as in the source", ""),
    ("8 bits", "8"),
    ("6 bits", "6"),
    ("4 bits", "4"),
    ("mixed 4 and 6 bits", "mixed_4_6"),
]
_CONVERT_QUEUE = {"concurrency_id": "convert", "concurrency_limit": 1, "show_progress": "hidden"}


@dataclass(frozen=True)
class ConvertPanel:
    """The components."""

    source: gr.Textbox
    name: gr.Textbox
    bits: gr.Dropdown
    start: gr.Button
    cancel: gr.Button
    status: gr.HTML


def build() -> ConvertPanel:
    """Create the components in the current place."""
    source = gr.Textbox(
        label="Source",
        info="A folder of Meta's or Hugging Face's, a .gguf file, or a hub id. The path is one of this machine.",
        placeholder="~/Llama3.2-1B-Instruct",
        elem_id="convert-source",
    )
    name = gr.Textbox(
        label="Name of the result",
        info=f"It is kept in {model_list.models_dir()}. Empty: the source's name.",
        elem_id="convert-name",
    )
    bits = gr.Dropdown(_BITS, value="", label="Bits of a weight", elem_id="convert-bits")
    with gr.Row():
        start = gr.Button("Convert", variant="primary", elem_id="convert-start")
        cancel = gr.Button("Cancel", variant="stop", elem_id="convert-cancel", interactive=False)
    return ConvertPanel(source, name, bits, start, cancel, gr.HTML(elem_id="convert-status"))


@dataclass
class Converter:
    """Runs one conversion at a time, on its own thread, so that the chat remains usable."""

    engine: Engine = field(default_factory=Engine)
    progress: Progress = field(default_factory=Progress)

    def run(self, source: str, name: str, bits: str) -> Iterator[tuple[Any, ...]]:
        """Convert; yields values for start, cancel, status, the model chooser and its status line."""
        self.progress = progress = Progress()
        busy, idle = (_enabled(False), _enabled(True)), (_enabled(True), _enabled(False))
        try:
            target = _target(source, name)
            yield *busy, progress_bar("Opening the source …", None), gr.skip(), gr.skip()
            work = self.engine.submit(_convert, source.strip(), target, bits, progress)
            for _ in follow(work):
                status = (
                    f"{size(progress.done)} of {size(progress.total)}" if progress.total else "Opening the source …"
                )
                yield *busy, progress_bar(f"{target.name}: {status}", progress.share), gr.skip(), gr.skip()
            report = work.result()
            yield *idle, notice(str(report)), *_choose(target)
        except Cancelled:
            yield *idle, notice("Cancelled; nothing is left of it."), gr.skip(), gr.skip()
        except Exception as error:  # the app continues after any error; `explained` also logs it
            yield *idle, notice(explained(error), "error"), gr.skip(), gr.skip()
        finally:
            progress.cancel.set()  # a closed tab cancels, too

    def cancel(self) -> str:
        """Cancel the conversion at its next block."""
        self.progress.cancel.set()
        return progress_bar("Cancelling …", None)

    def close(self) -> None:
        """Cancel a running conversion, and wait until its files are removed."""
        self.progress.cancel.set()
        self.engine.close()


def connect(panel: ConvertPanel, converter: Converter, models: ModelsPanel) -> None:
    """Connect the panel's events; the result is selected in the model chooser."""
    outputs = [panel.start, panel.cancel, panel.status, models.chooser, models.status]
    panel.start.click(converter.run, [panel.source, panel.name, panel.bits], outputs, **_CONVERT_QUEUE)
    panel.cancel.click(converter.cancel, None, [panel.status], queue=False, show_progress="hidden")


def _convert(source: str, target: Path, bits: str, on_progress: Progress) -> Any:
    recipe = make_recipe(**({"recipe": bits} if bits.startswith("mixed") else {"quantize": bits or None}))
    return convert(find_source(source, on_progress), target, recipe=recipe, progress=False, on_progress=on_progress)


def _target(source: str, name: str) -> Path:
    if not source.strip():
        raise UserError("name the source: a folder, a .gguf file or a hub id")
    name = name.strip() or Path(source.strip()).expanduser().name.removesuffix(".gguf")
    if name in (".", "..") or "/" in name or "\\" in name or not name:
        raise UserError(f"{name!r} is no name for the result: leave out slashes")
    if (model_list.models_dir() / name).exists():
        raise UserError(f"{name!r} is there already: give the result another name")
    return model_list.models_dir() / name


def _choose(target: Path) -> tuple[Any, str]:
    return gr.update(choices=model_list.choices(), value=str(target)), notice("converted: Load begins to use it")


def _enabled(yes: bool) -> Any:
    return gr.update(interactive=yes)
