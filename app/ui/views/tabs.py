"""The tabs of the right column, which share one selected cell."""

import gradio as gr

from app.ui.session.selection import Selection
from app.ui.session.services import Services
from app.ui.views import (
    architecture as architecture_view,
    lens as lens_view,
    live as live_view,
    traces as traces_view,
    what_if as what_if_view,
)
from app.ui.views.live import LiveView

_VIEWS = (live_view, lens_view, architecture_view, what_if_view, traces_view)


def build(services: Services) -> LiveView:
    """Create all views in the current column; returns the live one, which the chat feeds."""
    selection = Selection(services, gr.State(None), gr.State(live_view.TAB))
    views = []
    with gr.Tabs(elem_id="views"):
        for view in _VIEWS:
            with gr.Tab(view.TAB) as tab:
                views.append(view.build(selection))
            tab.select(lambda name=view.TAB: name, None, selection.tab, concurrency_limit=None, show_progress="hidden")
    return views[0]
