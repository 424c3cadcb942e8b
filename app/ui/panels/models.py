"""The model chooser of the top bar: what there is, how much memory it needs, loading with progress."""

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from app.options.draft import Drafting
from app.options.model import OpenModel, find_model, load_found
from app.ui.html import notice, progress_bar, size
from app.ui.panels import model_list as catalogue
from app.ui.panels.conversations import RECALL, Conversations
from app.ui.panels.progress import Progress, follow
from app.ui.session.failures import explained
from app.ui.session.mlx_thread import Engine
from app.ui.session.services import Services
from mlx_llama3.errors import UserError
from mlx_llama3.generation.speculative.speculation import Speculation

import mlx.core as mx


@dataclass(frozen=True)
class ModelsPanel:
    """The components."""

    chooser: gr.Dropdown
    load: gr.Button
    status: gr.HTML


def build(first: str) -> ModelsPanel:
    """Make the components in the top bar's row; `first` is the model that is loaded with the page."""
    choices = catalogue.choices()
    if first not in [name for _, name in choices]:
        choices.insert(0, (first, first))
    chooser = gr.Dropdown(
        choices,
        value=first,
        allow_custom_value=True,
        label="Model: a name, a folder, or a hub id",
        show_label=False,
        container=False,
        elem_id="model",
        min_width=220,
        scale=0,
    )
    load = gr.Button("Load", elem_id="load", size="sm", min_width=64, scale=0)
    return ModelsPanel(chooser, load, gr.HTML(elem_id="model-status"))


# For the chooser and the status line: what is yielded while a model is loaded, and what is returned at the end.
Row = tuple[Any, str]
Loading = Generator[Row, None, Row]


class Loader:
    """Fetches and loads models, one at a time, for all tabs: they share the one that is loaded.

    What it yields is for the chooser and the status line. How it ended is returned and not yielded: the page tells it
    together with the conversation, or somebody would ask before that is there.
    """

    def __init__(self, services: Services, first: str, draft: Drafting | None = None) -> None:
        self.name = first  # as it was asked for, of the model that is loaded or will be
        self._draft, self._undrafted = draft, ""
        self._services = services
        self._fetcher = Engine()  # a download goes on beside the chat, and does not hold up the end of the process
        self._turn = threading.Lock()

    def first(self) -> Loading:
        """Load the model with which the app was started, unless one is loaded."""
        return self._in_turn(self._first)

    def load(self, name: str) -> Loading:
        """Load another model into every tab."""
        return self._in_turn(partial(self._all, (name or "").strip()))

    def _in_turn(self, begin: Callable[[], Loading]) -> Loading:
        while not self._turn.acquire(timeout=0.25):
            yield gr.skip(), progress_bar("Another tab is loading a model …", None)
        try:
            return (yield from begin())
        finally:
            self._turn.release()

    def _first(self) -> Loading:
        if self._services.sessions.opened is None:
            return (yield from self._all(self.name))
        return gr.update(choices=catalogue.choices(), value=self.name), self._loaded()

    def _all(self, name: str) -> Loading:
        try:
            title, folder = yield from self._fetch(name)
            yield from self._read(title, folder)
            self.name = name
            return gr.skip(), self._loaded()
        except Exception as error:  # whatever it was, the app goes on; `explained` tells and logs it
            return gr.skip(), notice(explained(error), "error")

    def describe(self, name: str | None) -> str:
        """What is known of a model that is chosen and perhaps not loaded."""
        if name == self.name and self._services.sessions.opened is not None:
            return self._loaded()
        return notice(f"{name}: {self._services.engine.run(catalogue.estimate, name)}") if name else ""

    def _loaded(self) -> str:
        kind = "warning" if self._undrafted else "info"  # a warning is not cut off, however long it is
        return notice(f"loaded · {size(mx.get_active_memory())} of memory{self._undrafted}", kind)

    def _fetch(self, name: str) -> Generator[Row, None, tuple[str, Path]]:
        """Find the model, downloading it if need be; returns its title and folder."""
        watch = Progress()
        finding = self._fetcher.submit(find_model, name, watch)
        for _ in follow(finding):
            part = f": {size(watch.done)} of {size(watch.total)}" if watch.total else " …"
            yield gr.skip(), progress_bar(f"Fetching {name}{part}", watch.share)
        return finding.result()

    def _read(self, title: str, folder: Path) -> Generator[Row, None, None]:
        """Load the model from its folder, and give it to all sessions."""
        engine, sessions = self._services.engine, self._services.sessions
        wanted, _ = engine.run(catalogue.needs, folder)
        # Two models at once may not fit. What is wrong with the folder was found above, before this one goes.
        engine.run(sessions.close_model)
        before = mx.get_active_memory()
        loading = engine.submit(load_found, title, folder)
        for _ in follow(loading):
            there = max(0, mx.get_active_memory() - before)
            yield (
                gr.skip(),
                progress_bar(f"Loading {title}: {size(min(there, wanted))} of about {size(wanted)}", there / wanted),
            )
        draft = yield from self._read_draft(loading.result())
        engine.run(sessions.open_model, loading.result(), draft)

    def _read_draft(self, opened: OpenModel) -> Generator[Row, None, Speculation | None]:
        """What drafts for a model; returns None, and notes why, where it cannot: the model is of use without."""
        self._undrafted = ""
        if self._draft is None:
            return None
        try:
            if not self._draft.needs_model:
                return self._draft.open(opened)
            _, folder = yield from self._fetch(self._draft.name)
            return self._services.engine.run(self._draft.load, opened, folder)
        except UserError as error:
            self._undrafted = f" · answers are not drafted: {error}"
            return None


def connect(panel: ModelsPanel, loader: Loader, shown: Conversations, page: gr.Blocks, queue: dict[str, Any]) -> None:
    """Wire choosing and loading; the first tab of the page loads the first model. The conversation is shown with it."""
    panel.chooser.input(loader.describe, [panel.chooser], [panel.status], queue=False, show_progress="hidden")

    def load(name: str, session_id: str, memory: str) -> Iterator[list[Any]]:
        yield from _ending_with(loader.load(name), shown, partial(shown.refresh, session_id, memory))

    def arrive(memory: str) -> Iterator[list[Any]]:
        yield from _ending_with(loader.first(), shown, partial(shown.arrive, memory))

    outputs = [panel.chooser, panel.status, *shown.outputs]
    tab, memory = shown.services.session_id, shown.panel.memory
    panel.load.click(load, [panel.chooser, tab, memory], outputs, show_progress="hidden", **queue)
    page.load(arrive, [memory], outputs, js=RECALL, show_progress="hidden")


def _ending_with(loading: Loading, shown: Conversations, show: Callable[[], list[Any]]) -> Iterator[list[Any]]:
    """The updates of a loading, the last one together with what `show` gives."""
    while True:
        try:
            update = next(loading)
        except StopIteration as end:
            yield [*end.value, *show()]
            return
        yield [*update, *shown.unchanged]
