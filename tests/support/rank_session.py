"""One rank of the desktop UI without its page: `python rank_session.py FOLDER` answers in a session on rank 0.

Like the app, it loads and runs the model on the engine's thread, traces the live norms, computes a lens, and opens
another model. Prints JSON.
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
from app.ui.session.session import ChatRequest, Sessions
from mlx_llama3.trace.lens import logit_lens


def main(folder: Path) -> dict:
    engine, sessions = Engine(), Sessions()
    results = {}
    for turn in ("first", "second"):
        engine.run(sessions.close_model)
        engine.run(sessions.open_model, engine.run(load_found, "tiny", folder))
        session = engine.run(sessions.add)
        session.conversation.settings = {"max_tokens": 5, "temperature": 1.0, "seed": 4}
        for text in ("Hello", "Again"):
            *_, last = answer(engine, session, ChatRequest(partial(session.send, text), [], text))
        results[turn] = [last.text, session.trace.norms[..., -1].tolist()]
        lens = engine.run(lambda session=session: logit_lens(session.look(3), 5))
        results[turn].append(lens.logprobs.tolist())
    engine.close()
    return results


if __name__ == "__main__":
    with in_front(argparse.Namespace(command="app")) as is_rank0:
        if is_rank0:
            print(json.dumps(main(Path(sys.argv[1]))))
