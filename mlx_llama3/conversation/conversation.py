"""A conversation of many turns: its messages, the token ids they became, and the cache that holds them.

A turn costs only its new tokens. Replies stay the ids that the model chose; their text is never encoded again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_llama3.conversation import saved as saved_conversation
from mlx_llama3.conversation.system_prefix import keep_head
from mlx_llama3.errors import UserError
from mlx_llama3.generation.speculative.speculation import Speculation
from mlx_llama3.generation.stream import Step, generate
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.prefix import PrefixCache
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.tokenizer.tokenizer import Tokenizer

OVERFLOW_POLICIES = ("stop", "roll")


class ContextFull(UserError):
    """The next message does not fit into the context; nothing was changed."""


def context_capacity(model: Transformer, max_context: int | None) -> int:
    """Tokens of context to use: `max_context`, or all that the model was trained for. Raises `UserError` for more."""
    longest = model.args.max_seq_len
    if max_context is not None and not 1 <= max_context <= longest:
        raise UserError(f"a context of {max_context} tokens is asked for; this model takes from 1 to {longest}")
    return max_context or longest


@dataclass
class Turn:
    """One message of the user and its reply.

    prompt: ids from the end of the reply before (in the first turn: from the very start, with the system prompt) to
    where the reply begins. reply: ids of the reply's content, without the end-of-turn token.
    """

    user: str
    prompt: list[int]
    reply: list[int] = field(default_factory=list)
    text: str = ""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.reply)


class Conversation:
    """What a chat keeps. Not for use from several threads.

    overflow: what `send` does when a message does not fit: "stop" raises `ContextFull`; "roll" leaves out the oldest
    turns, keeping the system prompt, down to half of the context, so that it does not happen at every turn.
    max_context: tokens to use at most; by default all that the model was trained for.
    settings: options of `generate` that hold for every turn; `send(text, **options)` overrides them.
    cache_settings: how the positions so far are kept.
    draft: from `load_draft`, this conversation's own: what drafts the replies.

    `dropped` is the number of messages that the last `send` left out, `fed` that of the tokens it had to feed, the last
    of `prompt_ids`: all ids before its reply.
    Raises `UserError` for an unknown policy, a context that is longer than the model's, a cache that it cannot have.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        overflow: str = "stop",
        max_context: int | None = None,
        settings: Mapping[str, Any] | None = None,
        cache_settings: CacheSettings = DEFAULT,
        draft: Speculation | None = None,
    ) -> None:
        if overflow not in OVERFLOW_POLICIES:
            raise UserError(f"overflow is {overflow!r}; it must be one of {', '.join(OVERFLOW_POLICIES)}")
        self.model = model
        self.tokenizer = tokenizer
        self.overflow = overflow
        self.capacity = context_capacity(model, max_context)
        self.settings = dict(settings or {})
        self.draft = draft
        self.dropped = 0
        self.fed = 0
        self.prompt_ids: list[int] = []
        self._system = system
        self._turns: list[Turn] = []
        self.cache_settings = cache_settings
        self._cache = self._new_cache()
        self._stream: Iterator[Step] | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages so far, as `Tokenizer.encode_chat` takes them."""
        return self._messages(self._turns)

    @property
    def ids(self) -> list[int]:
        """The token ids of the conversation up to the end of the last reply's content."""
        return [token for turn in self._turns for token in (*turn.prompt, *turn.reply)]

    @property
    def cache(self) -> list[KVCache]:
        """What is kept of the positions so far, a layer each; for reading, as `trace.position.look` does."""
        return self._cache.layers

    @property
    def used(self) -> int:
        """Tokens of the context that are in use."""
        return sum(map(len, self._turns))

    @property
    def system(self) -> str | None:
        """The system prompt; setting it keeps the turns, and the cache up to where the prompts differ."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._settle()
        before, self._system = self._system, text
        try:
            self._prompt([], "?")  # a template may take no system prompt, which the next message would tell too late
            turns = self._from_start(self._turns)
            if self.cache_settings.max_kv_size is not None:
                self._cache = self._new_cache()  # which a system prompt that is longer than the window has not
        except UserError:
            self._system = before
            raise
        self._turns = turns

    def send(self, text: str, **options: Any) -> Iterator[Step]:
        """Say `text` as the user; the iterator yields the reply as `generate` does.

        The reply is limited to the context that is left (finish_reason "length"). If the iterator is closed or an
        error ends it, what was shown so far is kept as the reply; if that is nothing, the turn never happened.
        Raises at once, before anything is changed: `ContextFull`, `PromptError` for an empty message; at the first step
        what `generate` raises.
        """
        self._settle()
        return self._answer([*self._turns, Turn(text, self._prompt(self._turns, text))], options)

    def retry(self, **options: Any) -> Iterator[Step]:
        """Answer the last message again; its first reply is forgotten once the new one begins.

        Raises `UserError` if there is none.
        """
        self._settle()
        last = self._last("answer again")
        return self._answer([*self._turns[:-1], Turn(last.user, last.prompt)], options)

    def undo(self) -> str:
        """Forget the last message and its reply; returns the message. Raises `UserError` if there is none."""
        self._settle()
        last = self._last("take back")
        self._turns = self._turns[:-1]
        return last.user

    def reset(self) -> None:
        """Forget all turns. The system prompt stays, and so does its part of the cache."""
        self._settle()
        self._turns = []

    def adopt(self, held: PrefixCache) -> None:
        """Go on with a cache that was filled elsewhere (`prompt_cache.load`), as far as its ids are those here."""
        self._settle()
        self._cache = held
        # How much a window keeps is a matter of the system prompt, which may change.
        self.cache_settings = replace(held.settings, kv_keep=self.cache_settings.kv_keep)

    def use(self, model: Transformer) -> None:
        """Go on under another model with the same tokenizer, as what-if edits make it; the cache is filled anew."""
        self._settle()
        self.model = model
        self._cache = self._new_cache()

    def cut_cache(self, length: int) -> None:
        """Forget what the cache holds from position `length` on, so that the next answer feeds (and traces) it."""
        self._settle()
        self._cache.truncate(length)

    def to_json(self) -> str:
        """System prompt, messages and settings as the JSON text that `from_json` reads."""
        return saved_conversation.dump(self._system, self._messages(self._turns, system=False), self.settings)

    @classmethod
    def from_json(
        cls, text: str, model: Transformer, tokenizer: Tokenizer, *, source: str = "conversation", **keywords: Any
    ) -> "Conversation":
        """The conversation that `to_json` wrote, to go on with under this model.

        source: the name that errors give the text. keywords: as for `Conversation`, except system and settings.
        Replies are encoded anew, since the ids of another model would mean nothing.
        Raises `UserError`, one line that names the source and what is wrong.
        """
        saved = saved_conversation.load(text, source)
        conversation = cls(model, tokenizer, system=saved.system, settings=saved.settings, **keywords)
        for user, reply in saved.turns:
            prompt = conversation._prompt(conversation._turns, user)
            conversation._turns.append(Turn(user, prompt, tokenizer.encode(reply), reply))
        return conversation

    def _new_cache(self) -> PrefixCache:
        """An empty cache; if it has a window, the system prompt never leaves it."""
        settings = keep_head(self.cache_settings, self.tokenizer, self._system)
        return PrefixCache(self.model.make_cache(settings), settings)

    def _messages(self, turns: Sequence[Turn], *, system: bool = True) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self._system}] if system and self._system else []
        for turn in turns:
            head += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.text}]
        return head

    def _prompt(self, before: Sequence[Turn], user: str) -> list[int]:
        """Ids that follow the reply of the turns `before` when the user says `user`."""
        messages = [*self._messages(before), {"role": "user", "content": user}]
        return self.tokenizer.encode_after_reply(messages) if before else self.tokenizer.encode_chat(messages)

    def _from_start(self, turns: Sequence[Turn]) -> list[Turn]:
        """The same turns as a whole conversation: the first one's prompt begins with the system prompt."""
        return [replace(turn, prompt=self._prompt([], turn.user)) for turn in turns[:1]] + list(turns[1:])

    def _fitting(self, turns: list[Turn], max_tokens: int | None) -> list[Turn]:
        """`turns`, the last without its reply, or as many of them as the policy lets fit. Changes nothing."""
        used = sum(map(len, turns))
        if self.overflow == "stop":
            if used < self.capacity:
                return turns
        else:
            # Room for an answer worth the name, else a full context would cut every reply to a word.
            room = min(max_tokens or self.capacity, self.capacity // 8)
            if used + room <= self.capacity:
                return turns
            while len(turns) > 1 and sum(map(len, turns)) > self.capacity // 2:
                turns = self._from_start(turns[1:])
            if sum(map(len, turns)) < self.capacity:
                return turns
        new = len(turns[-1].prompt)
        if len(turns) == 1:
            raise ContextFull(
                f"the message takes {new} tokens with its system prompt, the context holds {self.capacity}; "
                "shorten it, or use a larger context"
            )
        raise ContextFull(
            f"the context is full: {used - new} of {self.capacity} tokens are used and the message takes {new}; "
            "undo or reset, let overflow roll, or use a larger context"
        )

    def _last(self, what: str) -> Turn:
        if not self._turns:
            raise UserError(f"there is no message to {what}")
        return self._turns[-1]

    def _settle(self) -> None:
        """End an answer that its consumer left half-read, so that what was shown is kept before anything else."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _answer(self, turns: list[Turn], options: dict[str, Any]) -> Iterator[Step]:
        """Find room for the last of `turns`, then start its reply."""
        options = {"max_tokens": None} | self.settings | options
        fitting = self._fitting(turns, options["max_tokens"])
        self.dropped = 2 * (len(turns) - len(fitting))
        self._stream = self._reply(fitting, options)
        return self._stream

    def _reply(self, turns: list[Turn], options: dict[str, Any]) -> Iterator[Step]:
        turn = turns[-1]
        context = [token for each in turns for token in (*each.prompt, *each.reply)]
        space = self.capacity - len(context)
        if options["max_tokens"] is None or options["max_tokens"] > space:
            options["max_tokens"] = space
        options.setdefault("draft", self.draft)
        new = self._cache.reuse(context)
        self.fed, self.prompt_ids = len(new), context
        history = context[: -self.fed]
        tokens: list[int] = []
        steps = generate(self.model, self.tokenizer, new, cache=self._cache.layers, history=history, **options)
        try:
            for step in steps:
                tokens.append(step.token)
                turn.text += step.text
                yield step
        finally:
            self._cache.set_ids(context + tokens)
            turn.reply = self._content(tokens, turn.text)
            if turn.text.strip():
                self._turns = turns

    def _content(self, tokens: list[int], text: str) -> list[int]:
        """The ids whose text is `text`: without a stop id, a stop string, or bytes that were still held back.

        A stop string may begin inside a token; only what that token said before it is encoded anew.
        """
        end = len(tokens) - 1 if tokens and tokens[-1] in self.tokenizer.stop_ids else len(tokens)
        while not text.startswith(said := self.tokenizer.decode(tokens[:end])):
            end -= 1
        return tokens[:end] + self.tokenizer.encode(text[len(said) :])
