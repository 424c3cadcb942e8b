"""One rank of the desktop UI without its page: `python rank_session.py FOLDER` answers in a session on rank 0.

As the app does it: the model is loaded, and runs, on the engine's thread; the live norms are traced; a lens is looked
at; another model is opened. Prints JSON.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from app.options.model import load_found
from app.options.ranks import in_front
from app.ui.session.answering import answer
from app.ui.session.mlx_thread import Engine
from app.ui.session.session import Asked, Sessions
from mlx_llama3.trace.lens import logit_lens


def main(folder: Path) -> dict:
    engine, sessions = Engine(), Sessions()
    found = {}
    for turn in ("first", "second"):
        engine.run(sessions.close_model)
        engine.run(sessions.open_model, engine.run(load_found, "tiny", folder))
        session = engine.run(sessions.add)
        session.conversation.settings = {"max_tokens": 5, "temperature": 1.0, "seed": 4}
        for text in ("Hello", "Again"):
            *_, last = answer(engine, session, Asked(partial(session.send, text), [], text))
        found[turn] = [last.text, session.trace.norms[..., -1].tolist()]
        lens = engine.run(lambda session=session: logit_lens(session.look(3), 5))
        found[turn].append(lens.logprobs.tolist())
    engine.close()
    return found


if __name__ == "__main__":
    with in_front(argparse.Namespace(command="app")) as here:
        if here:
            print(json.dumps(main(Path(sys.argv[1]))))
