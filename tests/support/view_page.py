"""The views alone on a page of their own, with the UI's real services and any model, for tests in a browser."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files

import gradio as gr

from app.models import OpenModel
from app.ui import views
from app.ui.services import Services
from app.ui.session import Asked, Session, Sessions
from app.ui.theme import theme
from mlx_llama3.engine import Engine


class ViewPage:
    """`address` of the page, its `session`, and `changed` to tell it as the chat does."""

    def __init__(self, opened: OpenModel) -> None:
        self.engine, self.sessions = Engine(), Sessions()
        self.sessions.opened = opened
        self.session: Session = self.engine.run(self.sessions.add)
        with gr.Blocks(fill_width=True, analytics_enabled=False) as self.page:
            self.services = Services(self.engine, self.sessions, gr.State(None), gr.State(0))
            gr.Button("changed", elem_id="changed").click(
                lambda: self.services.next_change(), None, self.services.generation_done
            )
            with gr.Column(elem_id="views-column"):
                self.live = views.build(self.services)
            self.page.load(
                lambda: (self.session.id, self.services.next_change()),
                None,
                [self.services.session_id, self.services.generation_done],
            )
        self.page.queue(api_open=False)
        _, self.address, _ = self.page.launch(
            server_name="127.0.0.1",
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            ssr_mode=False,
            run_history=False,
            theme=theme(),
            css=files("app.ui").joinpath("views.css").read_text(encoding="utf-8"),
        )

    def say(self, text: str, **options: object) -> None:
        """Have the session answer, and wait for it."""
        asked = Asked(partial(self.session.send, text), [], text)
        self.engine.run(lambda: list(self.session.answer(asked, **options)))

    def close(self) -> None:
        """Stop the server and the model's thread."""
        self.page.close(verbose=False)
        self.engine.close()


@contextmanager
def view_page(opened: OpenModel) -> Iterator[ViewPage]:
    """A page while the block runs."""
    page = ViewPage(opened)
    try:
        yield page
    finally:
        page.close()
