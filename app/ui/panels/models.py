"""The model chooser of the top bar: the models, the memory that one needs, and loading with progress."""

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
from app.ui.panels import model_list
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
    """Create the components in the top bar's row; first: the model that is loaded when the page is opened."""
    choices = model_list.choices()
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


# Values for (chooser, status line). A `Loading` yields them while a model is loaded, and returns the last ones.
ChooserUpdate = tuple[Any, str]
Loading = Generator[ChooserUpdate, None, ChooserUpdate]


class Loader:
    """Downloads and loads models, one at a time, for all tabs, which share one model.

    The last values are returned, not yielded: the page must show them together with the conversation, or the user
    could send a message before the conversation is ready.
    """

    def __init__(self, services: Services, first: str, draft: Drafting | None = None) -> None:
        self.name = first  # the requested name of the model that is loaded or will be
        self._draft, self._draft_error = draft, ""
        self._services = services
        self._fetcher = Engine()  # its own daemon thread: a download blocks neither the chat nor the end of the process
        self._lock = threading.Lock()

    def first(self) -> Loading:
        """Load the model that the app was started with, unless one is loaded."""
        return self._one_at_a_time(self._load_first)

    def load(self, name: str) -> Loading:
        """Load another model into every tab."""
        return self._one_at_a_time(partial(self._load, (name or "").strip()))

    def _one_at_a_time(self, load: Callable[[], Loading]) -> Loading:
        while not self._lock.acquire(timeout=0.25):
            yield gr.skip(), progress_bar("Another tab is loading a model …", None)
        try:
            return (yield from load())
        finally:
            self._lock.release()

    def _load_first(self) -> Loading:
        if self._services.sessions.opened is None:
            return (yield from self._load(self.name))
        return gr.update(choices=model_list.choices(), value=self.name), self._loaded()

    def _load(self, name: str) -> Loading:
        try:
            title, folder = yield from self._fetch(name)
            yield from self._read(title, folder)
            self.name = name
            return gr.skip(), self._loaded()
        except Exception as error:  # the app continues after any error; `explained` also logs it
            return gr.skip(), notice(explained(error), "error")

    def describe(self, name: str | None) -> str:
        """The status line for the chosen model, loaded or not."""
        if name == self.name and self._services.sessions.opened is not None:
            return self._loaded()
        return notice(f"{name}: {self._services.engine.run(model_list.estimate, name)}") if name else ""

    def _loaded(self) -> str:
        kind = "warning" if self._draft_error else "info"  # the page truncates an info, but not a warning
        return notice(f"loaded · {size(mx.get_active_memory())} of memory{self._draft_error}", kind)

    def _fetch(self, name: str) -> Generator[ChooserUpdate, None, tuple[str, Path]]:
        """Find the model, or download it; returns its title and folder."""
        progress = Progress()
        finding = self._fetcher.submit(find_model, name, progress)
        for _ in follow(finding):
            part = f": {size(progress.done)} of {size(progress.total)}" if progress.total else " …"
            yield gr.skip(), progress_bar(f"Fetching {name}{part}", progress.share)
        return finding.result()

    def _read(self, title: str, folder: Path) -> Generator[ChooserUpdate, None, None]:
        """Load the model from its folder, and set it in all sessions."""
        engine, sessions = self._services.engine, self._services.sessions
        needed, _ = engine.run(model_list.needs, folder)
        # Two models may not fit into memory. `needs` has checked the folder, so the old model can be released now.
        engine.run(sessions.close_model)
        before = mx.get_active_memory()
        loading = engine.submit(load_found, title, folder)
        for _ in follow(loading):
            loaded = max(0, mx.get_active_memory() - before)
            yield (
                gr.skip(),
                progress_bar(f"Loading {title}: {size(min(loaded, needed))} of about {size(needed)}", loaded / needed),
            )
        draft = yield from self._read_draft(loading.result())
        engine.run(sessions.open_model, loading.result(), draft)

    def _read_draft(self, opened: OpenModel) -> Generator[ChooserUpdate, None, Speculation | None]:
        """Open the speculative decoding of a model; on a `UserError` returns None and notes it: drafts are optional."""
        self._draft_error = ""
        if self._draft is None:
            return None
        try:
            if not self._draft.needs_model:
                return self._draft.open(opened)
            _, folder = yield from self._fetch(self._draft.name)
            return self._services.engine.run(self._draft.load, opened, folder)
        except UserError as error:
            self._draft_error = f" · answers are not drafted: {error}"
            return None


def connect(
    panel: ModelsPanel, loader: Loader, conversations: Conversations, page: gr.Blocks, queue: dict[str, Any]
) -> None:
    """Connect the events of choosing and loading; opening the page loads the first model."""
    panel.chooser.input(loader.describe, [panel.chooser], [panel.status], queue=False, show_progress="hidden")

    def load(name: str, session_id: str, memory: str) -> Iterator[list[Any]]:
        yield from _updates(loader.load(name), conversations, partial(conversations.refresh, session_id, memory))

    def arrive(memory: str) -> Iterator[list[Any]]:
        yield from _updates(loader.first(), conversations, partial(conversations.arrive, memory))

    outputs = [panel.chooser, panel.status, *conversations.outputs]
    tab, memory = conversations.services.session_id, conversations.panel.memory
    panel.load.click(load, [panel.chooser, tab, memory], outputs, show_progress="hidden", **queue)
    page.load(arrive, [memory], outputs, js=RECALL, show_progress="hidden")


def _updates(loading: Loading, conversations: Conversations, show: Callable[[], list[Any]]) -> Iterator[list[Any]]:
    """The updates of a loading; the last one includes the conversation's values, from `show`."""
    while True:
        try:
            update = next(loading)
        except StopIteration as end:
            yield [*end.value, *show()]
            return
        yield [*update, *conversations.unchanged]
