"""The server of the page. It serves this machine only, sends nothing elsewhere, and refuses other sites' pages."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from app.ui.local_only import middleware
from app.ui.session.mlx_thread import Engine
from mlx_llama3.errors import UserError

if TYPE_CHECKING:
    import gradio as gr

    from app.options.draft import Drafting
    from mlx_llama3.model.cache.settings import CacheSettings

HOST = "127.0.0.1"
FIRST_PORT, PORTS = 7860, 100


@contextmanager
def serving(
    model: str, port: int | None, draft: "Drafting | None" = None, cache_settings: "CacheSettings | None" = None
) -> Iterator[str]:
    """Serve the page while the block runs; yields its address. The page loads `model` when it is first opened.

    port: None takes the first free one from 7860 on. draft: the speculative decoding of all answers. cache_settings: of
    the key-value caches of all conversations. Raises `UserError` if the port is taken.
    """
    engine = Engine()
    with TemporaryDirectory(prefix="mlx-llama3-") as uploads, _environment(uploads):
        from app.ui.layout import build
        from app.ui.panels.convert import Converter

        converter = Converter()
        page = build(engine, converter, model, draft, cache_settings)
        try:
            yield _launch(page, port)
        finally:
            page.close(verbose=False)
            converter.close()
            engine.close()


def _launch(page: "gr.Blocks", port: int | None) -> str:
    """Start the server in background threads; returns the page's address."""
    import gradio as gr

    from app.ui.theme import theme

    # All options are given: an environment variable may set one that is left out.
    page.queue(api_open=False, default_concurrency_limit=4, max_size=64)
    try:
        _, address, _ = page.launch(
            server_name=HOST,
            server_port=port,
            share=False,
            inbrowser=False,
            inline=False,
            prevent_thread_lock=True,
            quiet=True,
            debug=False,
            show_error=True,
            auth=None,
            run_history=False,
            enable_monitoring=False,
            mcp_server=False,
            ssr_mode=False,
            num_workers=0,
            pwa=True,
            root_path="",
            favicon_path=str(files("app.ui") / "icon.svg"),
            max_file_size="1gb",
            footer_links=[],
            strict_cors=True,
            app_kwargs={"middleware": middleware(), "docs_url": None, "redoc_url": None, "openapi_url": None},
            theme=theme(),
            css=_file("page.css") + _file("views/views.css"),
            head=f"<script>{_file('page.js')}</script>",
        )
    except OSError:
        taken = f"port {port} is" if port else f"the ports from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} are"
        raise UserError(f"{taken} taken: give another one with --port") from None
    gr.set_static_paths([])
    return address


def _file(name: str) -> str:
    return (files("app.ui") / name).read_text(encoding="utf-8")


@contextmanager
def _environment(uploads: str) -> Iterator[None]:
    """Set the environment variables for Gradio, and remove the user's; Gradio must be imported after this."""
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]
    os.environ |= {
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "GRADIO_TEMP_DIR": uploads,  # Gradio's default has a known name and is shared by all users of the machine
        "GRADIO_NUM_PORTS": str(PORTS),
    }
    # Gradio sends a request to its own server at start, which must not go to a proxy.
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), HOST, "localhost"]))
    yield
