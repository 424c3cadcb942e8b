"""The app with the real demo model, and a browser in which any error, or any request to another host, is a failure."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

PLACES = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
]
CHROMIUM = next(filter(None, map(shutil.which, PLACES)), None)
# Without these flags the browser's own requests could not be distinguished from the page's.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ANSWER = 240_000  # milliseconds; the demo model needs two seconds, on a busy machine many more


def pytest_collection_modifyitems(items):
    """Rerun a browser test that timed out, as happens on a busy machine; do not rerun one that fails."""
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=["TimeoutError"]))


def pytest_terminal_summary(terminalreporter):
    if CHROMIUM is None:
        terminalreporter.write_sep(
            "!", "no chromium: the UI was NOT tested in a browser; sh scripts/chromium.sh", red=True
        )


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Iterator[Path]:
    """The tests' own folder for saved conversations."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_LLAMA3_DATA", str(folder))
        yield folder


@pytest.fixture(scope="session")
def address(demo_folder, data_folder) -> Iterator[str]:
    """The address of the app, which is served for all tests of a run."""
    from app.ui.server import serving

    with serving("demo", None) as address:
        yield address


@pytest.fixture(scope="session")
def chromium():
    if CHROMIUM is None:
        if os.environ.get("BROWSER_REQUIRED"):
            pytest.fail("no chromium, and BROWSER_REQUIRED is set: sh scripts/chromium.sh says how to get it")
        pytest.skip("no chromium: sh scripts/chromium.sh says how to get it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """A browser tab with the app, and the actions of a user. page: Playwright's."""

    def __init__(self, page, address: str) -> None:
        self.page, self.address = page, address
        self.faults: list[str] = []
        self.leaving = False  # Gradio logs an error when a page is left during a stream
        page.on("pageerror", lambda error: self.faults.append(f"page error: {error}"))
        page.on("console", self._on_console)
        page.on("request", self._on_request)
        page.on("dialog", lambda dialog: dialog.accept())

    def _on_console(self, message) -> None:
        if message.type == "error" and not self.leaving:
            self.faults.append(f"console: {message.text}")

    def _on_request(self, request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.faults.append(f"a request leaves: {request.url}")

    def open(self) -> "Tab":
        self.page.goto(self.address)
        return self.ready()

    def reload(self) -> "Tab":
        self.leaving = True
        self.page.reload()
        self.leaving = False
        return self.ready()

    def ready(self) -> "Tab":
        """Wait until the model is loaded and the conversation shown."""
        self.page.wait_for_selector("#gauge meter", timeout=ANSWER, state="attached")
        return self

    def ask(self, text: str) -> None:
        self.page.fill("#composer textarea", text)
        self.page.press("#composer textarea", "Enter")
        self.answering()

    def answering(self) -> None:
        """Wait until an answer has started: Stop is visible, and Send, which Gradio hides later, is not."""
        self.page.wait_for_function("document.querySelector('#stop') && !document.querySelector('#send')")

    def answered(self) -> None:
        """Wait until the running answer has ended."""
        self.page.wait_for_function(
            "document.querySelector('#send') && !document.querySelector('#stop')", timeout=ANSWER
        )

    def say(self, text: str) -> str:
        """Ask, wait for the whole answer, and return it."""
        self.ask(text)
        self.answered()
        return self.messages()[-1]

    def messages(self) -> list[str]:
        return [each.strip() for each in self.page.locator("#chat .message .prose").all_inner_texts()]

    def notice(self) -> str:
        """The sentence above the composer, "" if there is none."""
        return "".join(self.page.locator("#chat-notice .notice").all_inner_texts())

    def set_longest_answer(self, tokens: int) -> None:
        self.page.click("#open-settings")
        self.page.fill("#max-tokens input", str(tokens))
        self.page.press("#max-tokens input", "Tab")
        self.page.keyboard.press("Escape")

    def used(self) -> int:
        """The tokens of context that the gauge shows."""
        return int(re.search(r"([\d,]+) / ", self.page.inner_text("#gauge"))[1].replace(",", ""))


@pytest.fixture
def new_tab(chromium, address):
    """Creates tabs, each in its own browser context; fails at the end if a tab had a fault."""
    contexts, tabs = [], []

    def make(**options) -> Tab:
        contexts.append(chromium.new_context(viewport={"width": 1360, "height": 860}, **options))
        tabs.append(Tab(contexts[-1].new_page(), address))
        return tabs[-1]

    yield make
    for context in contexts:
        context.close()
    assert [fault for tab in tabs for fault in tab.faults] == []


@pytest.fixture
def tab(new_tab) -> Tab:
    return new_tab().open()


@pytest.fixture(scope="session")
def view_server(demo_folder, data_folder, address):
    """The views on a separate page, with the demo model, which has answered one question.

    It depends on `address`, because that server sets Gradio's upload folder in the environment.
    """
    from view_page import QUESTION, view_page

    from app.options.model import open_model

    with view_page(lambda: open_model("demo")) as server:
        server.say(QUESTION)
        yield server


@pytest.fixture
def view_tab(chromium, view_server):
    """Opens that page at a given size with nothing selected; fails at the end if it had a fault."""
    contexts, tabs = [], []
    view_server.session.selected = None  # a selection of the previous test would look like one of this test

    def make(width: int = 900, height: int = 900, **options):
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, **options))
        tabs.append(Tab(contexts[-1].new_page(), view_server.address))
        tabs[-1].page.goto(view_server.address)
        tabs[-1].page.wait_for_selector("#live-heat canvas", timeout=ANSWER)
        return tabs[-1].page

    yield make
    for context in contexts:
        context.close()
    assert [fault for tab in tabs for fault in tab.faults] == []
