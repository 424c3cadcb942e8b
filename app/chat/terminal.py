"""The chat on a terminal: line editing and history (prompt_toolkit), colours, and Ctrl-C to stop an answer."""

import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from app.console import VISIBLE
from app.options.options import SETTINGS
from mlx_llama3.errors import UserError
from mlx_llama3.system.hub import cache_dir

QUOTES = '"""'
PROMPT, CONTINUATION = ">>> ", "... "
BOLD, DIM, RED, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"


class Terminal:
    """The screen of a terminal. It has the methods of `pipe.Plain`."""

    def __init__(self) -> None:
        self._coloured = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._progress = ""

    def welcome(self, text: str) -> None:
        """Print a greeting."""
        print(self._styled(text, DIM))

    def messages(self, status: Callable[[], str], commands: Sequence[str]) -> Iterator[str]:
        """Messages and commands until Ctrl-D, or Ctrl-C on an empty line. `status` is shown below the input."""
        session = PromptSession(
            ANSI(self._styled(PROMPT, BOLD)),
            multiline=True,
            prompt_continuation=CONTINUATION,
            history=_history(self.note),
            completer=CommandCompleter(commands),
            complete_while_typing=False,
            key_bindings=_key_bindings(),
            bottom_toolbar=lambda: f" {status()} ",
            style=Style([("bottom-toolbar", "noreverse fg:ansibrightblack"), ("bottom-toolbar.text", "")]),
            output=TerminalOutput.from_pty(sys.stdout, term=os.environ.get("TERM")),
            color_depth=None if self._coloured else ColorDepth.DEPTH_1_BIT,
        )
        while True:
            try:
                text = session.prompt(handle_sigint=False)
            except EOFError:
                return
            text = _unquoted(text)
            if text.strip():
                yield text

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """A context for one answer: Ctrl-C only sets a flag, so that MLX is never interrupted inside a step.

        It yields a function that returns the flag. Typed text is not echoed meanwhile; it waits for the next prompt.
        """
        pressed = False

        def press(_signal: int, _frame: object) -> None:
            nonlocal pressed
            pressed = True

        handler = signal.signal(signal.SIGINT, press)
        mode = termios.tcgetattr(sys.stdin)
        no_echo = mode[:3] + [mode[3] & ~(termios.ECHO | termios.ICANON)] + mode[4:]
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, no_echo)
        try:
            yield lambda: pressed
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)
            signal.signal(signal.SIGINT, handler)

    def reading(self, done: int, total: int) -> None:
        """Show the prefill progress of a long prompt on a line that is wiped before the answer."""
        self._wipe_progress()
        if done < total:
            self._progress = f"(reading: {done} of {total} tokens)"
            print(self._styled(self._progress, DIM), end="", flush=True)

    def _wipe_progress(self) -> None:
        if self._progress:
            print("\r" + " " * len(self._progress) + "\r", end="", flush=True)
            self._progress = ""

    def write(self, text: str) -> None:
        """Print a piece of the answer."""
        print(text.translate(VISIBLE), end="", flush=True)

    def end_answer(self) -> None:
        """End the answer."""
        self._wipe_progress()
        print("\n", flush=True)

    def show(self, text: str) -> None:
        """Print the output of a command."""
        print(text.translate(VISIBLE) + "\n", flush=True)

    def note(self, text: str) -> None:
        """Print a note that is not part of the answer."""
        print(self._styled(f"({text})", DIM) + "\n", flush=True)

    def error(self, error: UserError) -> None:
        """Print an error; the chat continues."""
        print(self._styled(f"error: {error}", RED) + "\n", flush=True)

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{PLAIN}" if self._coloured else text


class TerminalOutput(Vt100_Output):
    """A terminal whose cursor position is never queried.

    prompt_toolkit shows no status line until the terminal has answered that query, and some terminals never do. Without
    the query the status line is right below the input instead of at the bottom of the screen.
    """

    def get_rows_below_cursor_position(self) -> int:
        """The number of rows that is certain without a query: 1."""
        return 1


class CommandCompleter(Completer):
    """Completes a command, the setting after `/set`, and the file after `/save` and `/load`."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = commands
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """The possible completions of the word before the cursor."""
        command, space, rest = document.text_before_cursor.partition(" ")
        if not space:
            yield from _starting_with(command, self._commands if command.startswith("/") else [])
        elif command == "/set":
            yield from _starting_with(rest, [*SETTINGS, "overflow"])
        elif command in ("/save", "/load"):
            yield from self._files.get_completions(Document(rest), complete_event)


def _starting_with(word: str, choices: Sequence[str]) -> Iterator[Completion]:
    return (Completion(choice, -len(word)) for choice in choices if choice.startswith(word))


class TolerantHistory(FileHistory):
    """A history file that ignores write errors: an entry that cannot be written lasts for this chat only."""

    def store_string(self, string: str) -> None:
        """Append to the file; a full disk must not interrupt the chat."""
        with suppress(OSError):
            super().store_string(string)


def _history(note: Callable[[str], None]) -> History:
    """The history of all chats in the user's cache folder, or of this chat only if that cannot be written."""
    path = cache_dir() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # readable by the user alone
    except OSError as error:
        note(f"{path}: {error.strerror}; the history of this chat will not be kept")
        return InMemoryHistory()
    return TolerantHistory(path)


def _unquoted(text: str) -> str:
    """`text` without enclosing triple quotes."""
    stripped = text.strip()
    if stripped.startswith(QUOTES):
        return stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


def _is_open(text: str) -> bool:
    """Whether `text` starts with triple quotes that are not closed at its end."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and (len(stripped) < 6 or not stripped.endswith(QUOTES))


def _key_bindings() -> KeyBindings:
    """Enter sends; Alt-Enter, or Enter after a backslash, starts a new line; Ctrl-C clears the input, then leaves."""
    keys = KeyBindings()
    in_input = has_focus(DEFAULT_BUFFER)

    # Ctrl-J is the newline character: a script that types into the terminal sends it for Enter.
    @keys.add("enter", filter=in_input)
    @keys.add("c-j", filter=in_input)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _is_open(buffer.text):
            buffer.insert_text("\n")
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=in_input)
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=in_input)
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=EOFError)

    return keys
