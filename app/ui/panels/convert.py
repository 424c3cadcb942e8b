"""The convert drawer: a checkpoint of Meta's, Hugging Face's or a GGUF file becomes a model that can be loaded here."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr

from app.ui.html import notice, progress_bar, size
from app.ui.panels import model_list as catalogue
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
_HERE = {"concurrency_id": "convert", "concurrency_limit": 1, "show_progress": "hidden"}


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
    """Make the components in the current place."""
    source = gr.Textbox(
        label="Source",
        info="A folder of Meta's or Hugging Face's, a .gguf file, or a hub id. The path is one of this machine.",
        placeholder="~/Llama3.2-1B-Instruct",
        elem_id="convert-source",
    )
    name = gr.Textbox(
        label="Name of the result",
        info=f"It is kept in {catalogue.models_dir()}. Empty: the source's name.",
        elem_id="convert-name",
    )
    bits = gr.Dropdown(_BITS, value="", label="Bits of a weight", elem_id="convert-bits")
    with gr.Row():
        start = gr.Button("Convert", variant="primary", elem_id="convert-start")
        cancel = gr.Button("Cancel", variant="stop", elem_id="convert-cancel", interactive=False)
    return ConvertPanel(source, name, bits, start, cancel, gr.HTML(elem_id="convert-status"))


@dataclass
class Converter:
    """One conversion at a time, on a thread of its own, so that the chat goes on."""

    engine: Engine = field(default_factory=Engine)
    watch: Progress = field(default_factory=Progress)

    def run(self, source: str, name: str, bits: str) -> Iterator[tuple[Any, ...]]:
        """Convert; yields values for start, cancel, status, the model chooser and its status line."""
        self.watch = watch = Progress()
        busy, idle = (_enabled(False), _enabled(True)), (_enabled(True), _enabled(False))
        try:
            target = _target(source, name)
            yield *busy, progress_bar("Opening the source …", None), gr.skip(), gr.skip()
            work = self.engine.submit(_convert, source.strip(), target, bits, watch)
            for _ in follow(work):
                part = f"{size(watch.done)} of {size(watch.total)}" if watch.total else "Opening the source …"
                yield *busy, progress_bar(f"{target.name}: {part}", watch.share), gr.skip(), gr.skip()
            report = work.result()
            yield *idle, notice(str(report)), *_choose(target)
        except Cancelled:
            yield *idle, notice("Cancelled; nothing is left of it."), gr.skip(), gr.skip()
        except Exception as error:  # whatever it was, the app goes on; `explained` tells and logs it
            yield *idle, notice(explained(error), "error"), gr.skip(), gr.skip()
        finally:
            watch.cancel.set()  # a closed tab cancels, too

    def cancel(self) -> str:
        """End the conversion at its next block."""
        self.watch.cancel.set()
        return progress_bar("Cancelling …", None)

    def close(self) -> None:
        """Cancel what runs, and wait until nothing is left of it."""
        self.watch.cancel.set()
        self.engine.close()


def connect(panel: ConvertPanel, converter: Converter, models: ModelsPanel) -> None:
    """Wire the panel; the result becomes the choice of the model chooser."""
    outputs = [panel.start, panel.cancel, panel.status, models.chooser, models.status]
    panel.start.click(converter.run, [panel.source, panel.name, panel.bits], outputs, **_HERE)
    panel.cancel.click(converter.cancel, None, [panel.status], queue=False, show_progress="hidden")


def _convert(source: str, target: Path, bits: str, watch: Progress) -> Any:
    recipe = make_recipe(**({"recipe": bits} if bits.startswith("mixed") else {"quantize": bits or None}))
    return convert(find_source(source, watch), target, recipe=recipe, progress=False, on_progress=watch)


def _target(source: str, name: str) -> Path:
    if not source.strip():
        raise UserError("name the source: a folder, a .gguf file or a hub id")
    name = name.strip() or Path(source.strip()).expanduser().name.removesuffix(".gguf")
    if name in (".", "..") or "/" in name or "\\" in name or not name:
        raise UserError(f"{name!r} is no name for the result: leave out slashes")
    if (catalogue.models_dir() / name).exists():
        raise UserError(f"{name!r} is there already: give the result another name")
    return catalogue.models_dir() / name


def _choose(target: Path) -> tuple[Any, str]:
    return gr.update(choices=catalogue.choices(), value=str(target)), notice("converted: Load begins to use it")


def _enabled(yes: bool) -> Any:
    return gr.update(interactive=yes)
