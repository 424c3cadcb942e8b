"""`mlx-llama3 app`: the desktop UI in the browser, or in a window of its own."""

import argparse
import importlib.util
import threading
import webbrowser

from app.options.options import add_cache_options, add_draft_options, add_model_option, cache_settings, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-llama3 app`."""
    add_model_option(parser)
    parser.add_argument("--port", type=positive, metavar="N", help="default: the first free one from 7860 on")
    add_draft_options(parser)
    add_cache_options(parser)
    display = parser.add_mutually_exclusive_group()
    display.add_argument("--no-browser", action="store_true", help="only serve, and print the address")
    display.add_argument("--window", action="store_true", help="a window of its own (pip install 'mlx-llama3[window]')")


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or until its window is closed. Raises `UserError`."""
    from app.options.draft import requested_draft
    from app.ui.server import serving
    from mlx_llama3.errors import UserError

    if args.window and importlib.util.find_spec("webview") is None:
        raise UserError("--window needs pywebview: pip install 'mlx-llama3[window]', or leave --window out")
    draft, cache = requested_draft(args), cache_settings(args)
    print("Starting ...", flush=True)
    with serving(args.model, args.port, draft, cache) as address:
        print(f"mlx-llama3 is open at {address} (this machine only); Ctrl-C ends it", flush=True)
        if args.window:
            import webview

            webview.create_window("mlx-llama3", address, width=1360, height=860, min_size=(1024, 640))
            webview.start()
            return 0
        if not args.no_browser:
            webbrowser.open(address)
        threading.Event().wait()
    return 0
