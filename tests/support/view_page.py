"""A page with the views only, the UI's real services and any model, for tests in a browser."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from typing import Any

import gradio as gr
import numpy as np

from app.options.model import OpenModel
from app.ui.heat_map import heat_map
from app.ui.session.mlx_thread import Engine
from app.ui.session.services import Services
from app.ui.session.session import ChatRequest, Session, Sessions
from app.ui.theme import theme
from app.ui.views import tabs
from mlx_llama3.trace.store import Trace

QUESTION = "What is the capital of France?"
# A JavaScript function: element id -> the heat map's element, which has `heatData`.
HEAT = "(id) => [...document.querySelectorAll(`#${id}, #${id} *`)].find((each) => each.heatData)"


class ViewPage:
    """The served page. address: its URL. session: the one that a newly opened tab shows."""

    def __init__(self, load: Callable[[], OpenModel]) -> None:
        self.engine, self.sessions = Engine(), Sessions()
        self.sessions.opened = self.engine.run(load)
        self.session: Session = self.engine.run(self.sessions.add)
        self.source = Source()
        with gr.Blocks(fill_width=True, analytics_enabled=False) as self.page:
            self.services = Services(self.engine, self.sessions, gr.State(None), gr.State(0))
            with gr.Row():
                changed = gr.Button("changed", elem_id="changed", size="sm")
                stream = gr.Button("stream", elem_id="stream", size="sm")
            with gr.Column(elem_id="views-column"):
                live = tabs.build(self.services)
            changed.click(self.services.next_change, None, self.services.generation_done)
            stream.click(self.source.stream, None, live.heat, show_progress="hidden")
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
            css=files("app.ui.views").joinpath("views.css").read_text(encoding="utf-8"),
        )

    def new_session(self) -> Session:
        """Create another session for tabs that are opened from now on."""
        self.session = self.engine.run(self.sessions.add)
        return self.session

    def say(self, text: str, **options: object) -> None:
        """Send a message to the session, and wait for the answer."""
        request = ChatRequest(partial(self.session.send, text), [], text)
        self.engine.run(lambda: list(self.session.answer(request, **options)))

    def close(self) -> None:
        """Stop the server and the model's thread."""
        self.page.close(verbose=False)
        self.engine.close()


class Source:
    """A stand-in for a model: a trace of 30 layers that grows in real time.

    It starts with `begin` tokens, then grows by `tokens` more, `speed` per second, yielded at most 12 times per second,
    as the chat does. late: the first tokens are not sent to the page.
    """

    def __init__(self) -> None:
        self.begin, self.tokens, self.speed, self.late = 0, 4000, 100, False
        self.trace: Trace | None = None

    def stream(self) -> Iterator[dict]:
        """The values that the chat would yield for the heat map."""
        random = np.random.default_rng(0)
        norms = random.lognormal(4, 1, (5, 30, self.begin + self.tokens)).astype(np.float32)
        trace = self.trace = Trace.empty(
            "stand-in", 30
        )  # a reference, as in a session: the page may request missing rows
        trace.extend(range(self.begin), [f" word{i}" for i in range(self.begin)], norms[..., : self.begin])

        def grow() -> None:
            start = time.monotonic()
            for i in range(self.begin, self.begin + self.tokens):
                time.sleep(max(0.0, start + (i - self.begin) / self.speed - time.monotonic()))
                trace.extend([i], [f" word{i}"], norms[..., i : i + 1])

        thread = threading.Thread(target=grow, daemon=True)
        thread.start()
        sent = self.begin if self.late else 0
        while sent < self.begin + self.tokens:
            value = heat_map.payload(trace, sent)
            if value["tokens"]:
                sent += len(value["tokens"])
                yield value
            time.sleep(1 / 12)


def canvas_values(page: Any, elem_id: str = "live-heat") -> np.ndarray:
    """All values of a canvas, float32 `(points, rows, columns)`."""
    values = page.evaluate(
        f"(() => {{ const d = ({HEAT})('{elem_id}').heatData;"
        "return [d.rows, d.count, Array.from(d.values.subarray(0, d.size * d.count))]; })()"
    )
    rows, columns, flat = values
    return np.array(flat, np.float32).reshape(columns, -1, rows).transpose(1, 2, 0)


def click(page: Any, row: int, column: int, rows: int = 30, elem_id: str = "live-heat") -> None:
    """Click into the middle of a cell of a heat map that has token labels.

    A trial click checks that the mouse can reach the canvas. The click itself is a script's event, because on a busy
    machine the layout may change between locating the cell and the mouse's click.
    """
    page.locator(f"#{elem_id} canvas").click(trial=True)
    page.evaluate(
        """([id, row, column, rows]) => {
            const find = (what) => document.querySelector(`#${id} ${what}`);
            const scroller = find(".heat-scroll"), canvas = find("canvas");
            const bounds = canvas.getBoundingClientRect(), tall = (scroller.clientHeight - 6 - 72) / rows;
            const clientX = bounds.left + 44 + 12 * (column + 0.5) - scroller.scrollLeft;
            const clientY = bounds.top + 6 + (rows - 1 - row + 0.5) * tall;
            canvas.dispatchEvent(new MouseEvent("click", { bubbles: true, clientX, clientY }));
        }""",
        [elem_id, row, column, rows],
    )


@contextmanager
def view_page(load: Callable[[], OpenModel]) -> Iterator[ViewPage]:
    """Serve the page while the block runs; `load` is called on the engine's thread."""
    page = ViewPage(load)
    try:
        yield page
    finally:
        page.close()
