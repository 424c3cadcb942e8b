"""The chat on a terminal: line editing and history (prompt_toolkit), colours, and Ctrl-C that stops an answer."""

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
    """What a person sees. The same methods as `plain.Plain`."""

    def __init__(self) -> None:
        self._coloured = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._progress = ""

    def welcome(self, text: str) -> None:
        """A greeting."""
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
        """Around an answer: Ctrl-C only sets a flag, so that MLX is never interrupted inside a step.

        What is typed meanwhile is not echoed into the answer; it waits for the next prompt.
        """
        pressed = False

        def press(_signal: int, _frame: object) -> None:
            nonlocal pressed
            pressed = True

        handler = signal.signal(signal.SIGINT, press)
        mode = termios.tcgetattr(sys.stdin)
        quiet = mode[:3] + [mode[3] & ~(termios.ECHO | termios.ICANON)] + mode[4:]
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
        try:
            yield lambda: pressed
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)
            signal.signal(signal.SIGINT, handler)

    def reading(self, done: int, total: int) -> None:
        """So much of the prompt is read: a line that a long prompt shows until the answer comes."""
        self._wipe_progress()
        if done < total:
            self._progress = f"(reading: {done} of {total} tokens)"
            print(self._styled(self._progress, DIM), end="", flush=True)

    def _wipe_progress(self) -> None:
        if self._progress:
            print("\r" + " " * len(self._progress) + "\r", end="", flush=True)
            self._progress = ""

    def write(self, text: str) -> None:
        """A piece of the answer."""
        print(text.translate(VISIBLE), end="", flush=True)

    def end_answer(self) -> None:
        """The answer is complete."""
        self._wipe_progress()
        print("\n", flush=True)

    def show(self, text: str) -> None:
        """What a command was asked for."""
        print(text.translate(VISIBLE) + "\n", flush=True)

    def note(self, text: str) -> None:
        """Something worth knowing that is not part of the answer."""
        print(self._styled(f"({text})", DIM) + "\n", flush=True)

    def error(self, error: UserError) -> None:
        """An error; the chat goes on."""
        print(self._styled(f"error: {error}", RED) + "\n", flush=True)

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{PLAIN}" if self._coloured else text


class TerminalOutput(Vt100_Output):
    """A terminal that is never asked where its cursor is.

    prompt_toolkit shows no status line until the terminal has answered that, and some never do. Without the answer the
    status stands right below the input instead of at the foot of the screen.
    """

    def get_rows_below_cursor_position(self) -> int:
        """Rows that are surely there."""
        return 1


class CommandCompleter(Completer):
    """Completes a command, the setting after `/set`, and the file after `/save` and `/load`."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = commands
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """What could stand in the place of the word before the cursor."""
        command, space, rest = document.text_before_cursor.partition(" ")
        if not space:
            yield from _starting_with(command, self._commands if command.startswith("/") else [])
        elif command == "/set":
            yield from _starting_with(rest, [*SETTINGS, "overflow"])
        elif command in ("/save", "/load"):
            yield from self._files.get_completions(Document(rest), complete_event)


def _starting_with(word: str, choices: Sequence[str]) -> Iterator[Completion]:
    return (Completion(choice, -len(word)) for choice in choices if choice.startswith(word))


class KeptHistory(FileHistory):
    """A history in a file as far as the disk takes it; what it does not take is remembered in this chat only."""

    def store_string(self, string: str) -> None:
        """Append to the file; a disk that is full is no reason to break into the chat."""
        with suppress(OSError):
            super().store_string(string)


def _history(note: Callable[[str], None]) -> History:
    """The history of all chats, in the user's cache folder; if that cannot be written, of this chat only."""
    path = cache_dir() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # what people write is theirs alone
    except OSError as error:
        note(f"{path}: {error.strerror}; the history of this chat will not be kept")
        return InMemoryHistory()
    return KeptHistory(path)


def _unquoted(text: str) -> str:
    """The text between triple quotes, as it stands; other text as it is."""
    stripped = text.strip()
    if stripped.startswith(QUOTES):
        return stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


def _is_open(text: str) -> bool:
    """True while triple quotes at the start are not closed at the end."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and (len(stripped) < 6 or not stripped.endswith(QUOTES))


def _key_bindings() -> KeyBindings:
    """Enter sends, Alt-Enter or a backslash at the end of the line begins another; Ctrl-C clears, then leaves."""
    keys = KeyBindings()
    here = has_focus(DEFAULT_BUFFER)

    # Ctrl-J is the newline character itself: it is what a script that types into the terminal sends for Enter.
    @keys.add("enter", filter=here)
    @keys.add("c-j", filter=here)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _is_open(buffer.text):
            buffer.insert_text("\n")
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=here)
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=here)
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=EOFError)

    return keys
