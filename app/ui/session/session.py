"""One open tab: its conversation, the trace of it, the what-if edits. Kept by id, a bounded number of them."""

import itertools
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.options.model import OpenModel
from app.ui.session import saved_conversations as saved
from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.errors import UserError
from mlx_llama3.generation.speculative.speculation import Speculation
from mlx_llama3.generation.stream import Step
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings
from mlx_llama3.model.hooks.edits import Edit, edited
from mlx_llama3.trace.position import Position, look
from mlx_llama3.trace.store import Trace

import mlx.core as mx

# A session holds a key-value cache, which is large: 1 GB for 8,000 tokens of the 8B model. The browser allows about
# five tabs of this page at a time anyway, for each keeps a connection open.
MOST_SESSIONS = 6


@dataclass(frozen=True)
class Asked:
    """What the person asked for: `steps(**options)` begins it, `shown` is the chat up to the question.

    text: what goes back to the composer if nothing comes of it; "" if the message was there before.
    stop: set it to end the answer, running or waiting.
    """

    steps: Callable[..., Iterator[Step]]
    shown: list[dict[str, str]]
    text: str
    stop: threading.Event = field(default_factory=threading.Event)


class Session:
    """What one tab works on. Everything that touches the conversation runs on the engine's thread.

    conversation: under the model with `edits`. trace: the norms of all positions in it, grows while it is generating.
    Other threads read `trace.norms` first: a position counts once its norms are there.
    selected: (layer, position) of the heat map, or None.
    asked: from the moment when the person asks until the answer is done, else None.
    saved_id, title: of the file that keeps the conversation; no file before the first answer.
    """

    def __init__(
        self, opened: OpenModel, draft: Speculation | None = None, cache_settings: CacheSettings = DEFAULT
    ) -> None:
        self.draft, self._cache_settings = draft, cache_settings
        self.id = secrets.token_urlsafe(12)
        self.edits: list[Edit] = []
        self.selected: tuple[int, int] | None = None
        self.asked: Asked | None = None
        self._answer: Iterator[Step] | None = None
        self._waiting = ""
        self.conversation: Conversation | None = None
        self.open(opened)

    def open(self, opened: OpenModel, saved_id: str | None = None) -> None:
        """Begin a conversation with this model, or go on with a saved one. Forgets the edits.

        Raises `UserError` if there is no such conversation; then nothing has changed.
        """
        if saved_id is None:
            title, conversation = "", self._fresh(opened)
        else:
            title, text = saved.read(saved_id)
            conversation = self._saved(text, opened, source=title)
        self.settle()
        self.saved_id, self.title = saved_id or secrets.token_hex(8), title
        self._begin(opened, conversation)

    def close(self) -> None:
        """Let go of the model; the conversation waits as text for `reopen`."""
        self.leave()
        self._waiting = self.conversation.to_json()
        self.opened = self.conversation = self.trace = self.draft = None
        self.edits, self.selected = [], None

    def reopen(self, opened: OpenModel, draft: Speculation | None = None) -> None:
        """Go on with the same conversation under another model; with a new one if it does not fit that model."""
        self.draft = draft
        try:
            conversation = self._saved(self._waiting, opened)
        except UserError:  # no chat template, a smaller context: what was said stays on disk
            self.open(opened)
        else:
            self._begin(opened, conversation)

    def _fresh(self, opened: OpenModel) -> Conversation:
        """An empty conversation with the settings of the one before."""
        before, keep = self.conversation, {}
        if before is not None:
            keep = {"system": before.system, "overflow": before.overflow, "settings": before.settings}
        return Conversation(opened.model, opened.tokenizer, cache_settings=self._cache_settings, **keep)

    def _saved(self, text: str, opened: OpenModel, **source: str) -> Conversation:
        keep = {"cache_settings": self._cache_settings} | source
        return Conversation.from_json(text, opened.model, opened.tokenizer, **keep)

    def _begin(self, opened: OpenModel, conversation: Conversation) -> None:
        self.opened, self.model_name, self.conversation = opened, opened.name, conversation
        conversation.draft = self.draft and self.draft.copy()
        self.edits, self.selected = [], None
        self.trace = self._empty_trace()

    def set_edits(self, edits: Sequence[Edit]) -> None:
        """Go on under these edits: what was measured and cached without them is forgotten.

        Raises `UserError` for an edit that does not fit the model; then nothing has changed.
        """
        model = edited(self.opened.model, edits) if edits else self.opened.model
        self.conversation.use(model)
        self.edits, self.selected = list(edits), None
        self.trace = self._empty_trace()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of the conversation, without the system prompt."""
        return [each for each in self.conversation.messages if each["role"] != "system"]

    def send(self, text: str, **options: Any) -> Iterator[Step]:
        """`Conversation.send`, of the conversation that is there when the answer begins."""
        return self.conversation.send(text, **options)

    def retry(self, **options: Any) -> Iterator[Step]:
        """`Conversation.retry`, likewise."""
        return self.conversation.retry(**options)

    def send_instead(self, turn: int, text: str, **options: Any) -> Iterator[Step]:
        """Forget the conversation from the `turn`th question on, and ask `text` in its place."""
        while len(self.messages) > 2 * turn:
            self.conversation.undo()
        return self.conversation.send(text, **options)

    def look(self, position: int) -> Position:
        """All states of a position of the trace, under the edits. On the engine's thread; evaluate the result there."""
        return look(self.conversation.model, self.trace.tokens.tolist(), position, cache=self.conversation.cache)

    def answer(self, asked: Asked, **options: Any) -> Iterator[Step]:
        """The steps of what was asked, while `trace` grows by what they measure. options: as for `generate`."""
        self.settle()
        # The cache may hold a token more than was measured, for the pass after the last one was under way.
        self.conversation.cut_cache(self.trace.norms.shape[-1])
        self._answer = self._traced(asked.steps(trace=True, **options))
        return self._answer

    def done(self, asked: Asked) -> None:
        """Be ready for the next question, unless that is here already."""
        asked.stop.set()
        if self.asked is asked:
            self.asked = None

    def leave(self) -> None:
        """End what a page that is gone was waiting for; on the engine's thread."""
        if self.asked is not None:
            self.done(self.asked)
        self.settle()

    def settle(self) -> None:
        """End an answer that its reader left, on the engine's thread; what was said is kept."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def save(self) -> None:
        """Keep the conversation on disk, if anything was said. Raises `UserError` if the disk does not take it."""
        if messages := self.messages:
            self.title = self.title or saved.shortened(messages[0]["content"])
            saved.write(self.saved_id, self.title, self.conversation.to_json())

    def fork(self) -> None:
        """Keep what follows in a file of its own."""
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
        """The text of one token, special tokens by their names."""
        return self.opened.tokenizer.decode([token], keep_special=True)

    def settings(self) -> dict[str, Any]:
        """What the trace was made with."""
        edits = [repr(edit) for edit in self.edits]
        return {key: value for key, value in self.conversation.settings.items() if value is not None} | {"edits": edits}

    def _empty_trace(self) -> Trace:
        return Trace.empty(self.model_name, self.opened.model.args.n_layers)


class Sessions:
    """The sessions by id, all with the one loaded model; beyond `MOST_SESSIONS` the least recently used one goes."""

    def __init__(self, cache_settings: CacheSettings = DEFAULT) -> None:
        self._cache_settings = cache_settings
        self.opened: OpenModel | None = None
        self.draft: Speculation | None = None
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._changes = itertools.count(1)
        self._lock = threading.Lock()

    def close_model(self) -> None:
        """Let go of the model, so that its memory is free for another one. On the engine's thread."""
        for session in self._all():
            session.close()
        self.opened = self.draft = None
        mx.clear_cache()

    def open_model(self, opened: OpenModel, draft: Speculation | None = None) -> None:
        """Give all sessions this model, and what drafts for it. On the engine's thread.

        Raises `UserError` for a model that cannot have the cache that was asked for; then it is not opened.
        """
        opened.model.make_cache(self._cache_settings)
        for session in self._all():
            session.reopen(opened, draft)
        self.opened, self.draft = opened, draft

    def find(self, session_id: str | None) -> Session | None:
        """The session with this id, as the most recently used one; None while no model is loaded, too."""
        with self._lock:
            if session_id not in self._sessions or self.opened is None:
                return None
            self._sessions.move_to_end(session_id)
            return self._sessions[session_id]

    def add(self) -> Session:
        """A new session with the loaded model, which there must be. On the engine's thread."""
        session = Session(self.opened, self.draft, self._cache_settings)
        with self._lock:
            self._sessions[session.id] = session
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return session

    def others_with(self, saved_id: str, than: Session) -> list[Session]:
        """Sessions other than one that have a saved conversation open."""
        return [session for session in self._all() if session is not than and session.saved_id == saved_id]

    def next_change(self) -> int:
        """A number that was never given before."""
        return next(self._changes)

    def _all(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())
