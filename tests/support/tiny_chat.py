"""The chat with a tiny model, as a program for tests over a pseudo-terminal.

`python tiny_chat.py FOLDER REPLY [OPTION ...]`: FOLDER has the tokenizer, REPLY is the model's answer to every message,
and the options are those of `mlx-llama3 chat`.
"""

import sys

from watched_model import WatchedModel

from app import cli
from app.chat import loop
from app.options.model import OpenModel
from mlx_llama3.tokenizer.tokenizer import load_tokenizer


class Repeats(list):
    """A list of replies that `pop` does not empty."""

    def pop(self, index: int = -1) -> list[int]:
        return list(self[index])


tokenizer = load_tokenizer(sys.argv[1])
model = WatchedModel(vocab_size=tokenizer.vocab_size, max_seq_len=4096)
model.replies = Repeats([[*tokenizer.encode(sys.argv[2]), *sorted(tokenizer.stop_ids)[:1]]])
loop.open_model = lambda name: OpenModel("tiny", model, tokenizer)
sys.exit(cli.main(["chat", *sys.argv[3:]]))
