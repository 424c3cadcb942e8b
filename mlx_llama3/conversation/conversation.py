"""A multi-turn conversation: its messages, their token ids, and the KV cache.

Each turn prefills only its new tokens. Replies keep the ids that the model generated; they are not encoded from text.
Where the chat template leaves the reasoning of earlier replies out, the conversation is encoded again without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_llama3.conversation import saved as saved_conversation
from mlx_llama3.conversation.system_prefix import keep_system_prefix
from mlx_llama3.errors import UserError
from mlx_llama3.generation.speculative.speculation import Speculation
from mlx_llama3.generation.stop_strings import all_stop_ids
from mlx_llama3.generation.stream import Step, generate
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.prefix import PrefixCache
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.tokenizer.tokenizer import Tokenizer

OVERFLOW_POLICIES = ("stop", "roll")


class ContextFull(UserError):
    """The next message does not fit into the context; the conversation is unchanged."""


def context_capacity(model: Transformer, max_context: int | None) -> int:
    """Tokens of context to use: `max_context`, or the model's `max_seq_len`. Raises `UserError` if out of range."""
    longest = model.args.max_seq_len
    if max_context is not None and not 1 <= max_context <= longest:
        raise UserError(f"a context of {max_context} tokens is asked for; this model takes from 1 to {longest}")
    return max_context or longest


@dataclass
class Turn:
    """One message of the user and its reply.

    prompt: ids from the end of the previous reply (in the first turn: from the start, with the system prompt) to the
    start of this reply. reply: ids of the reply's content, without the end-of-turn token.
    """

    user: str
    prompt: list[int]
    reply: list[int] = field(default_factory=list)
    text: str = ""


class Conversation:
    """A chat with a model. Not thread-safe.

    Args:
        overflow: what `send` does when a message does not fit: "stop" raises `ContextFull`; "roll" drops the oldest
            turns, but not the system prompt, down to half of the context, so that it does not happen at every turn.
        max_context: the most tokens to use; by default the model's `max_seq_len`.
        settings: options of `generate` for every turn; `send(text, **options)` overrides them.
        cache_settings: the kind of KV cache.
        draft: from `load_draft`, for speculative decoding; one for each conversation.

    Attributes (of the last `send` or `retry`):
        dropped: number of messages that were dropped.
        prompt_ids: all ids before the reply.
        fed: number of ids, the last of `prompt_ids`, that were prefilled because they were not in the cache.

    Raises `UserError` for an unknown policy, a context longer than the model's, or cache settings that the model does
    not support.
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
        self._cut: tuple[list[dict[str, str]], list[int] | None] = ([], None)  # of `_cut_prompt`
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
        return [*self._before_reply(self._turns), *self._turns[-1].reply] if self._turns else []

    @property
    def cache(self) -> list[KVCache]:
        """The KV cache, one entry a layer; read-only, for `trace.position.look`."""
        return self._cache.layers

    @property
    def used(self) -> int:
        """Tokens of the context that are in use."""
        return len(self.ids)

    @property
    def system(self) -> str | None:
        """The system prompt; setting it keeps the turns, and the cache up to where the prompts differ."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._settle()
        before, self._system = self._system, text
        try:
            self._prompt([], "?")  # raises if the template takes no system prompt; the next message would be too late
            turns = self._from_start(self._turns)
            if self.cache_settings.max_kv_size is not None:
                self._cache = self._new_cache()  # raises if the system prompt does not fit the window
        except UserError:
            self._system = before
            raise
        self._turns = turns

    def send(self, text: str, **options: Any) -> Iterator[Step]:
        """Send `text` as the user; the iterator yields the reply as `generate` does.

        The reply is limited to the remaining context (finish_reason "length"). If the iterator is closed or an error
        ends it, the text so far becomes the reply; without any text the turn is discarded.

        Raises:
            ContextFull: at once, the message does not fit.
            PromptError: at once, the message is empty.
            UserError: at the first step, what `generate` raises.
        """
        self._settle()
        return self._answer([*self._turns, Turn(text, self._prompt(self._turns, text))], options)

    def retry(self, **options: Any) -> Iterator[Step]:
        """Answer the last message again; the new reply, once it has text, replaces the old one.

        Raises `UserError` if there is no message.
        """
        self._settle()
        last = self._last("answer again")
        return self._answer([*self._turns[:-1], Turn(last.user, last.prompt)], options)

    def undo(self) -> str:
        """Remove the last message and its reply; returns the message. Raises `UserError` if there is none."""
        self._settle()
        last = self._last("take back")
        self._turns = self._turns[:-1]
        return last.user

    def reset(self) -> None:
        """Remove all turns. The system prompt stays, and so does its part of the cache."""
        self._settle()
        self._turns = []

    def adopt(self, cache: PrefixCache) -> None:
        """Replace the cache by a loaded one (`prompt_cache.load`); the ids that both share are not prefilled again."""
        self._settle()
        self._cache = cache
        # `kv_keep` follows from the system prompt, which may change.
        self.cache_settings = replace(cache.settings, kv_keep=self.cache_settings.kv_keep)

    def use(self, model: Transformer) -> None:
        """Continue with another model that has the same tokenizer, such as an edited one, and an empty cache."""
        self._settle()
        self.model = model
        self._cache = self._new_cache()

    def cut_cache(self, length: int) -> None:
        """Truncate the cache to `length` positions, so that the next answer prefills (and traces) the others again."""
        self._settle()
        self._cache.truncate(length)

    def to_json(self) -> str:
        """System prompt, messages and settings as JSON, for `from_json`."""
        return saved_conversation.dump(self._system, self._messages(self._turns, system=False), self.settings)

    @classmethod
    def from_json(
        cls, text: str, model: Transformer, tokenizer: Tokenizer, *, source: str = "conversation", **keywords: Any
    ) -> "Conversation":
        """Load a conversation written by `to_json`, with any model.

        source: the text's name in errors. keywords: those of `Conversation`, except system and settings.
        Replies are encoded from their text, because ids of another tokenizer would be meaningless.
        Raises `UserError`, one line with the source and the fault.
        """
        saved = saved_conversation.load(text, source)
        conversation = cls(model, tokenizer, system=saved.system, settings=saved.settings, **keywords)
        for user, reply in saved.turns:
            prompt = conversation._prompt(conversation._turns, user)
            conversation._turns.append(Turn(user, prompt, tokenizer.encode(reply), reply))
        return conversation

    def _new_cache(self) -> PrefixCache:
        """An empty cache; a window always keeps the system prompt."""
        settings = keep_system_prefix(self.cache_settings, self.tokenizer, self._system)
        return PrefixCache(self.model.make_cache(settings), settings)

    def _messages(self, turns: Sequence[Turn], *, system: bool = True) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self._system}] if system and self._system else []
        for turn in turns:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.text}]
        return messages

    def _prompt(self, before: Sequence[Turn], user: str) -> list[int]:
        """Ids of the user's message `user` after the turns `before`; with the system prompt if there are none."""
        messages = [*self._messages(before), {"role": "user", "content": user}]
        return self.tokenizer.encode_after_reply(messages) if before else self.tokenizer.encode_chat(messages)

    def _before_reply(self, turns: Sequence[Turn]) -> list[int]:
        """All ids before the last turn's reply."""
        cut = self._cut_prompt(self._messages(turns)[:-1]) if len(turns) > 1 else None
        if cut is not None:
            return cut
        return [token for turn in turns[:-1] for token in (*turn.prompt, *turn.reply)] + turns[-1].prompt

    def _cut_prompt(self, messages: list[dict[str, str]]) -> list[int] | None:
        """The ids of `messages` if the template leaves a part of earlier replies out; the last result is kept."""
        if messages != self._cut[0]:
            cuts = self.tokenizer.cuts_answers(messages)
            self._cut = messages, self.tokenizer.encode_chat(messages) if cuts else None
        return self._cut[1]

    def _from_start(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns with the first one's prompt encoded again, so that it begins with the system prompt."""
        return [replace(turn, prompt=self._prompt([], turn.user)) for turn in turns[:1]] + list(turns[1:])

    def _fitting(self, turns: list[Turn], max_tokens: int | None) -> list[Turn]:
        """`turns`, the last one without its reply; under "roll" only the latest ones if they do not all fit."""
        used = len(self._before_reply(turns))
        if self.overflow == "stop":
            if used < self.capacity:
                return turns
        else:
            # Reserve an eighth of the context, so that a nearly full one does not truncate every reply to a word.
            room = min(max_tokens or self.capacity, self.capacity // 8)
            if used + room <= self.capacity:
                return turns
            while len(turns) > 1 and len(self._before_reply(turns)) > self.capacity // 2:
                turns = self._from_start(turns[1:])
            if len(self._before_reply(turns)) < self.capacity:
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

    def _last(self, action: str) -> Turn:
        if not self._turns:
            raise UserError(f"there is no message to {action}")
        return self._turns[-1]

    def _settle(self) -> None:
        """Close an unfinished answer, so that its text becomes the reply before anything else changes."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _answer(self, turns: list[Turn], options: dict[str, Any]) -> Iterator[Step]:
        """Drop turns as needed to fit the last of `turns`, then start its reply."""
        options = {"max_tokens": None} | self.settings | options
        fitting = self._fitting(turns, options["max_tokens"])
        self.dropped = 2 * (len(turns) - len(fitting))
        self._stream = self._reply(fitting, options)
        return self._stream

    def _reply(self, turns: list[Turn], options: dict[str, Any]) -> Iterator[Step]:
        last = turns[-1]
        context, stop_ids = self._before_reply(turns), all_stop_ids(self.tokenizer, options.get("stop", ()))
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
                last.text += step.text
                yield step
        finally:
            self._cache.set_ids(context + tokens)
            last.reply = self._content(tokens, last.text, stop_ids)
            if last.text.strip():
                self._turns = turns

    def _content(self, tokens: list[int], text: str, stop_ids: frozenset[int]) -> list[int]:
        """The ids whose text is `text`: without a stop id, a stop string, or an incomplete character.

        A stop string may begin inside a token; only that token's text before it is encoded again.
        """
        end = len(tokens) - 1 if tokens and tokens[-1] in stop_ids else len(tokens)
        while not text.startswith(decoded := self.tokenizer.decode(tokens[:end])):
            end -= 1
        return tokens[:end] + self.tokenizer.encode(text[len(decoded) :])
