"""The chat with a tiny model in the place of a real one, as a program for tests over a pseudo-terminal.

`python tiny_chat.py FOLDER REPLY [OPTION ...]`: FOLDER holds the tokenizer, REPLY is what the model always says; the
options are those of `mlx-llama3 chat`.
"""

import sys

from watched_model import WatchedModel

from app import cli
from app.chat import loop as chat
from app.options.model import OpenModel
from mlx_llama3.tokenizer.tokenizer import load_tokenizer


class Repeats(list):
    """Replies that never run out."""

    def pop(self, index: int = -1) -> list[int]:
        return list(self[index])


tokenizer = load_tokenizer(sys.argv[1])
model = WatchedModel(vocab_size=tokenizer.vocab_size, max_seq_len=4096)
model.replies = Repeats([[*tokenizer.encode(sys.argv[2]), *sorted(tokenizer.stop_ids)[:1]]])
chat.open_model = lambda name: OpenModel("tiny", model, tokenizer)
sys.exit(cli.main(["chat", *sys.argv[3:]]))
