"""The layout of the page: top bar, chat on the left, views on the right, drawers; and its events."""

from collections.abc import Iterator
from contextlib import contextmanager

import gradio as gr

from app.options.draft import Drafting
from app.ui.panels import (
    chat as chat_panel,
    conversations as conversations_panel,
    convert as convert_panel,
    models as models_panel,
    settings as settings_panel,
)
from app.ui.panels.chat import MODEL_QUEUE, QUICK
from app.ui.session.mlx_thread import Engine
from app.ui.session.services import Services
from app.ui.session.session import Sessions
from app.ui.views import tabs
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings

TITLE = "mlx-llama3"
_KEYS = """<dialog id="keys" aria-label="Keys"><h2>Keys</h2><dl>
<dt><kbd>/</kbd></dt><dd>to the message</dd>
<dt><kbd>Enter</kbd></dt><dd>send; with <kbd>Shift</kbd> a new line</dd>
<dt><kbd>Esc</kbd></dt><dd>stop the answer; close what is open</dd>
<dt><kbd>←</kbd> <kbd>→</kbd> <kbd>↑</kbd> <kbd>↓</kbd></dt><dd>in the heat map: another token, another layer</dd>
<dt><kbd>?</kbd></dt><dd>this list</dd>
</dl><form method="dialog"><button class="lg secondary">Close</button></form></dialog>"""


def build(
    engine: Engine,
    converter: convert_panel.Converter,
    model: str,
    draft: Drafting | None = None,
    cache_settings: CacheSettings | None = None,
) -> gr.Blocks:
    """The page. It loads `model` when it is first opened; `draft` and `cache_settings` apply to every model."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True, fill_width=True) as page:
        services = Services(engine, Sessions(cache_settings or DEFAULT), gr.State(None), gr.State(0))
        with gr.Column(elem_id="page"):
            with gr.Row(elem_id="topbar"):
                gr.HTML(f"<h1>{TITLE}</h1>", elem_id="brand")
                models = models_panel.build(model)
                gauge = gr.HTML(elem_id="gauge")
                gr.Button("Convert", elem_id="open-convert", size="sm")
                gr.Button("Settings", elem_id="open-settings", size="sm")
                gr.Button("◐", elem_id="theme", size="sm")
                gr.Button("?", elem_id="show-keys", size="sm")
            with gr.Row(elem_id="main"):
                with gr.Column(elem_id="chat-column"):
                    chooser = conversations_panel.build()
                    chat = chat_panel.build(gauge)
                with gr.Column(elem_id="views-column"):
                    live = tabs.build(services)
                with _drawer("settings-drawer", "Settings"):
                    settings = settings_panel.build()
                with _drawer("convert-drawer", "Convert a checkpoint"):
                    convert = convert_panel.build()
        gr.HTML(_KEYS)
        conversations = conversations_panel.connect(chooser, chat, settings, services)
        for answered in chat_panel.connect(chat, services, settings, live.heat):
            answered.then(conversations.listed, [services.session_id], [chooser.chooser], **QUICK)
        convert_panel.connect(convert, converter, models)
        models_panel.connect(models, models_panel.Loader(services, model, draft), conversations, page, MODEL_QUEUE)
    return page


@contextmanager
def _drawer(elem_id: str, title: str) -> Iterator[None]:
    """A column that covers the views while it is open; page.js opens and closes it."""
    with gr.Column(elem_id=elem_id, elem_classes="drawer"):
        with gr.Row(elem_classes="drawer-head"):
            gr.HTML(f"<h2>{title}</h2>")
            gr.Button("Close", elem_classes="close-drawer", size="sm", min_width=64, scale=0)
        yield
