"""The settings drawer: sampling, length limit, system prompt and overflow, from the next answer on."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.options.options import SETTINGS, check_settings
from mlx_llama3.conversation.conversation import OVERFLOW_POLICIES, Conversation

# As on the command line: greedy, so that answers are reproducible.
DEFAULTS = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
    "max_tokens": 1024,
}
_RANGES = {
    "temperature": (0.0, 2.0, 0.05),
    "top_k": (0, 200, 1),
    "top_p": (0.05, 1.0, 0.01),
    "min_p": (0.0, 0.5, 0.01),
    "repetition_penalty": (1.0, 1.5, 0.01),
    "presence_penalty": (-2.0, 2.0, 0.1),
    "frequency_penalty": (-2.0, 2.0, 0.1),
}


@dataclass(frozen=True)
class SettingsPanel:
    """inputs: the components whose values `apply` takes, in this order; `values` sets them."""

    inputs: list[Any]

    def values(self, conversation: Conversation) -> list[Any]:
        """The values of `inputs` for a conversation."""
        settings = DEFAULTS | conversation.settings
        return [conversation.system or "", conversation.overflow, *(settings[name] for name in DEFAULTS)]


def build() -> SettingsPanel:
    """Create the components in the current place."""
    system = gr.Textbox(
        label="System prompt",
        lines=2,
        max_lines=5,
        placeholder="What the model should be like. Empty: the model's own default.",
        elem_id="system-prompt",
    )
    inputs = {name: _slider(name) for name in _RANGES}
    with gr.Row():
        inputs["seed"] = gr.Number(None, label="Seed", info=SETTINGS["seed"].help, precision=0, elem_id="seed")
        inputs["max_tokens"] = gr.Number(
            DEFAULTS["max_tokens"],
            label="Longest answer",
            info="in tokens",
            precision=0,
            minimum=1,
            elem_id="max-tokens",
        )
    overflow = gr.Radio(
        [("stop and say so", "stop"), ("leave out the oldest messages", "roll")],
        value=OVERFLOW_POLICIES[0],
        label="When the context is full",
        elem_id="overflow",
    )
    reset = gr.Button("Back to the defaults", size="sm")
    reset.click(lambda: list(DEFAULTS.values()), None, [inputs[name] for name in DEFAULTS], queue=False)
    return SettingsPanel([system, overflow, *(inputs[name] for name in DEFAULTS)])


def apply(conversation: Conversation, system: str, overflow: str, *values: Any) -> None:
    """Apply the values of the panel's `inputs` to a conversation; on the engine's thread.

    Raises `UserError` for a value out of range, or for a system prompt that does not fit.
    """
    settings = {name: value for name, value in zip(DEFAULTS, values, strict=True) if value is not None}
    check_settings(settings)
    if (system.strip() or None) != conversation.system:
        conversation.system = system.strip() or None
    conversation.overflow = overflow
    # Settings without an input (logit_bias, stop) are kept: a conversation saved elsewhere may have them.
    rest = {name: value for name, value in conversation.settings.items() if name not in DEFAULTS}
    conversation.settings = rest | settings


def _slider(name: str) -> gr.Slider:
    low, high, step = _RANGES[name]
    return gr.Slider(
        low,
        high,
        DEFAULTS[name],
        step=step,
        label=name.replace("_", " ").capitalize(),
        info=SETTINGS[name].help,
        elem_id=name.replace("_", "-"),
    )
