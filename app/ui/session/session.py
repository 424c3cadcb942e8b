"""The session of an open tab: its conversation, trace and what-if edits; and the bounded set of sessions by id."""

import itertools
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.options.model import OpenModel
from app.ui.session import saved_conversations
from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.errors import UserError
from mlx_llama3.generation.speculative.speculation import Speculation
from mlx_llama3.generation.stream import Step
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings
from mlx_llama3.model.hooks.edits import Edit, edited
from mlx_llama3.trace.position import Position, look
from mlx_llama3.trace.store import Trace

import mlx.core as mx

# A session holds a key-value cache, which is large: 1 GB for 8,000 tokens of the 8B model. Browsers allow only about
# five tabs of this page at a time, because each has an open connection.
MOST_SESSIONS = 6


@dataclass(frozen=True)
class ChatRequest:
    """A request for an answer, waiting or running.

    steps: starts the generation, with options as for `generate`. messages: the chat to show, up to the question.
    text: goes back to the composer if the answer is empty; "" for a retry, whose message is in the chat already.
    stop: set it to end the answer, waiting or running.
    """

    steps: Callable[..., Iterator[Step]]
    messages: list[dict[str, str]]
    text: str
    stop: threading.Event = field(default_factory=threading.Event)


class Session:
    """The state of one tab. Everything that touches the conversation runs on the engine's thread.

    conversation: runs the model with `edits`. trace: the norms of all its positions; it grows during generation. Other
    threads read `trace.norms` first: a position is complete once its norms are there.
    selected: (layer, position) of the selected cell of the heat map, or None.
    request: the waiting or running request, else None.
    saved_id, title: of the saved file, which exists from the first answer on.
    """

    def __init__(
        self, opened: OpenModel, draft: Speculation | None = None, cache_settings: CacheSettings = DEFAULT
    ) -> None:
        self.draft, self._cache_settings = draft, cache_settings
        self.id = secrets.token_urlsafe(12)
        self.edits: list[Edit] = []
        self.selected: tuple[int, int] | None = None
        self.request: ChatRequest | None = None
        self._answer: Iterator[Step] | None = None
        self._closed_text = ""
        self.conversation: Conversation | None = None
        self.open(opened)

    def open(self, opened: OpenModel, saved_id: str | None = None) -> None:
        """Start a new conversation with this model, or continue a saved one; removes the edits.

        Raises `UserError`, and changes nothing, if there is no such conversation.
        """
        if saved_id is None:
            title, conversation = "", self._new_conversation(opened)
        else:
            title, text = saved_conversations.read(saved_id)
            conversation = self._read_conversation(text, opened, source=title)
        self.settle()
        self.saved_id, self.title = saved_id or secrets.token_hex(8), title
        self._begin(opened, conversation)

    def close(self) -> None:
        """Release the model; the conversation is stored as text for `reopen`."""
        self.leave()
        self._closed_text = self.conversation.to_json()
        self.opened = self.conversation = self.trace = self.draft = None
        self.edits, self.selected = [], None

    def reopen(self, opened: OpenModel, draft: Speculation | None = None) -> None:
        """Continue the conversation with another model; start a new one if it does not fit that model."""
        self.draft = draft
        try:
            conversation = self._read_conversation(self._closed_text, opened)
        except UserError:  # no chat template, or a smaller context; the conversation remains on disk
            self.open(opened)
        else:
            self._begin(opened, conversation)

    def _new_conversation(self, opened: OpenModel) -> Conversation:
        """An empty conversation with the settings of the previous one."""
        previous, options = self.conversation, {}
        if previous is not None:
            options = {"system": previous.system, "overflow": previous.overflow, "settings": previous.settings}
        return Conversation(opened.model, opened.tokenizer, cache_settings=self._cache_settings, **options)

    def _read_conversation(self, text: str, opened: OpenModel, **source: str) -> Conversation:
        options = {"cache_settings": self._cache_settings} | source
        return Conversation.from_json(text, opened.model, opened.tokenizer, **options)

    def _begin(self, opened: OpenModel, conversation: Conversation) -> None:
        self.opened, self.model_name, self.conversation = opened, opened.name, conversation
        conversation.draft = self.draft and self.draft.copy()
        self.edits, self.selected = [], None
        self.trace = self._empty_trace()

    def set_edits(self, edits: Sequence[Edit]) -> None:
        """Continue with these edits; the trace and cache without them are dropped.

        Raises `UserError`, and changes nothing, if an edit does not fit the model.
        """
        model = edited(self.opened.model, edits) if edits else self.opened.model
        self.conversation.use(model)
        self.edits, self.selected = list(edits), None
        self.trace = self._empty_trace()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of the conversation, without the system prompt."""
        return [message for message in self.conversation.messages if message["role"] != "system"]

    def send(self, text: str, **options: Any) -> Iterator[Step]:
        """`Conversation.send` of the conversation that is open when the answer starts."""
        return self.conversation.send(text, **options)

    def retry(self, **options: Any) -> Iterator[Step]:
        """`Conversation.retry` of the conversation that is open when the answer starts."""
        return self.conversation.retry(**options)

    def send_instead(self, turn: int, text: str, **options: Any) -> Iterator[Step]:
        """Remove the conversation from question number `turn` on (from 0), and send `text` in its place."""
        while len(self.messages) > 2 * turn:
            self.conversation.undo()
        return self.conversation.send(text, **options)

    def look(self, position: int) -> Position:
        """All states at a position of the trace, with the edits. Call and evaluate it on the engine's thread."""
        return look(self.conversation.model, self.trace.tokens.tolist(), position, cache=self.conversation.cache)

    def answer(self, request: ChatRequest, **options: Any) -> Iterator[Step]:
        """The steps of the answer; their norms are appended to `trace`. options: as for `generate`."""
        self.settle()
        # The cache may hold one position more than the trace: the pass after the last step had been queued.
        self.conversation.cut_cache(self.trace.norms.shape[-1])
        self._answer = self._traced(request.steps(trace=True, **options))
        return self._answer

    def done(self, request: ChatRequest) -> None:
        """Finish a request; a newer one is left in place."""
        request.stop.set()
        if self.request is request:
            self.request = None

    def leave(self) -> None:
        """End the request of a page that was closed or reloaded; on the engine's thread."""
        if self.request is not None:
            self.done(self.request)
        self.settle()

    def settle(self) -> None:
        """End an abandoned answer, on the engine's thread; its text so far is kept."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def save(self) -> None:
        """Save the conversation, if it has messages. Raises `UserError` if it cannot be written."""
        if messages := self.messages:
            self.title = self.title or saved_conversations.shortened(messages[0]["content"])
            saved_conversations.write(self.saved_id, self.title, self.conversation.to_json())

    def fork(self) -> None:
        """Save to a new file from now on."""
        self.saved_id = secrets.token_hex(8)

    def _traced(self, steps: Iterator[Step]) -> Iterator[Step]:
        tokens: list[int] | None = None
        try:
            for step in steps:
                if tokens is None:
                    prompt = self.conversation.prompt_ids
                    tokens = prompt[len(prompt) - self.conversation.fed :]
                    self.trace.truncate(len(prompt) - len(tokens))
                    self.trace.settings = self.settings()
                self.trace.extend(tokens, [self.piece(token) for token in tokens], step.norms)
                tokens = [step.token]
                yield step
        finally:
            steps.close()

    def piece(self, token: int) -> str:
        """The text of one token; special tokens by name."""
        return self.opened.tokenizer.decode([token], keep_special=True)

    def settings(self) -> dict[str, Any]:
        """The settings to store in the trace."""
        edits = [repr(edit) for edit in self.edits]
        return {key: value for key, value in self.conversation.settings.items() if value is not None} | {"edits": edits}

    def _empty_trace(self) -> Trace:
        return Trace.empty(self.model_name, self.opened.model.args.n_layers)


class Sessions:
    """The sessions by id, all with the one loaded model; beyond `MOST_SESSIONS` the least recently used is dropped."""

    def __init__(self, cache_settings: CacheSettings = DEFAULT) -> None:
        self._cache_settings = cache_settings
        self.opened: OpenModel | None = None
        self.draft: Speculation | None = None
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._changes = itertools.count(1)
        self._lock = threading.Lock()

    def close_model(self) -> None:
        """Release the model, so that its memory is free for another one. On the engine's thread."""
        for session in self._all():
            session.close()
        self.opened = self.draft = None
        mx.clear_cache()

    def open_model(self, opened: OpenModel, draft: Speculation | None = None) -> None:
        """Set the model of all sessions, and its speculative decoding. On the engine's thread.

        Raises `UserError`, and opens nothing, if the model does not support the requested cache.
        """
        opened.model.make_cache(self._cache_settings)
        for session in self._all():
            session.reopen(opened, draft)
        self.opened, self.draft = opened, draft

    def find(self, session_id: str | None) -> Session | None:
        """The session with this id, marked as most recently used; None if it is unknown or no model is loaded."""
        with self._lock:
            if session_id not in self._sessions or self.opened is None:
                return None
            self._sessions.move_to_end(session_id)
            return self._sessions[session_id]

    def add(self) -> Session:
        """Create a session with the loaded model, on the engine's thread; a model must be loaded."""
        session = Session(self.opened, self.draft, self._cache_settings)
        with self._lock:
            self._sessions[session.id] = session
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return session

    def others_with(self, saved_id: str, session: Session) -> list[Session]:
        """The sessions other than `session` that have this saved conversation open."""
        return [other for other in self._all() if other is not session and other.saved_id == saved_id]

    def next_change(self) -> int:
        """A number that was never returned before."""
        return next(self._changes)

    def _all(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())
