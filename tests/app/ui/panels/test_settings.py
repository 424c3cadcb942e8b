"""The settings drawer's values and a conversation's settings."""

import gradio as gr
import pytest
from watched_model import WatchedModel

from app.ui.panels import settings as settings_panel
from app.ui.panels.settings import DEFAULTS
from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.errors import UserError
from mlx_llama3.generation.sampling import Sampling
from mlx_llama3.tokenizer.tokenizer import load_tokenizer


@pytest.fixture
def conversation(demo_folder):
    tokenizer = load_tokenizer(demo_folder)
    model = WatchedModel(vocab_size=tokenizer.vocab_size)
    return Conversation(model, tokenizer, settings={"stop": ["END"], "logit_bias": {3: -1.0}})


def values(**changes):
    return list((DEFAULTS | changes).values())


def test_what_is_shown_is_what_was_applied(conversation):
    with gr.Blocks():
        panel = settings_panel.build()
    assert [each.value for each in panel.inputs[2:]] == values()
    wanted = ["Be brief.", "roll", *values(temperature=0.7, top_k=40, seed=3, max_tokens=9)]
    settings_panel.apply(conversation, *wanted)
    assert panel.values(conversation) == wanted
    assert conversation.settings["stop"] == ["END"] and conversation.settings["logit_bias"] == {3: -1.0}


def test_no_seed_is_a_new_one_each_time(conversation):
    settings_panel.apply(conversation, "", "stop", *values(seed=4))
    settings_panel.apply(conversation, "  ", "stop", *values(seed=None))
    assert "seed" not in conversation.settings
    assert conversation.system is None


def test_a_value_out_of_range_changes_nothing(conversation):
    before = dict(conversation.settings)
    with pytest.raises(UserError, match="top_p"):
        settings_panel.apply(conversation, "Be brief.", "roll", *values(top_p=7.0))
    assert (conversation.settings, conversation.system, conversation.overflow) == (before, None, "stop")


def test_every_end_of_every_slider_is_allowed():
    for name, (low, high, _) in settings_panel._RANGES.items():
        for value in (low, high, DEFAULTS[name]):
            Sampling(**{name: value})
