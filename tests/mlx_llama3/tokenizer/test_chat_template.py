"""Jinja chat templates: the same text as in transformers, and no control tokens from the text of messages."""

import json
from datetime import datetime

import pytest
from hypothesis import example, given, settings, strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_llama3.tokenizer.chat_template import TemplateFormat
from mlx_llama3.tokenizer.messages import PromptError, read_messages, read_tools

SPECIAL = {"<s>": 1, "<|im_start|>": 2, "<|im_end|>": 3, "<tool>": 4}
NAMES = {n: name for name, n in SPECIAL.items()}
CHATML = """{{ bos_token }}{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "dates and tools": """
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{{- bos_token + "Today: " + date_string }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- tool | tojson }}{{ tool | tojson(ensure_ascii=true, sort_keys=true, separators=(",", ":")) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- message.content | trim }}{{ message.tool_calls | tojson if message.tool_calls is defined }}
{%- endfor %}""",
    "blocks and spaces": """
  {% for message in messages %}
    {% if message.role == "system" %}
      {{ message.content }}
      {% continue %}
    {% endif %}
    {% generation %}
      {{ message.content | upper }}
    {% endgeneration %}
    {% if loop.index > 3 %}
      {% break %}
    {% endif %}
  {% endfor %}
end
""",
    "namespace and macros": """{% set ns = namespace(last=none) %}
{% macro say(m) %}[{{ m.role }}: {{ m.content }}]{% endmacro %}
{% for m in messages | rejectattr("role", "equalto", "user") %}{{ say(m) }}{% endfor %}
{% for m in messages | selectattr("role", "equalto", "user") %}{% set ns.last = m %}{{ say(m) }}{% endfor %}
{{ ns.last.content.split("</think>")[-1] }}{{ documents is none }}{{ eos_token is defined }}""",
}
TOOL = {"name": "f", "description": "<b>'é'</b> & \"q\"", "parameters": {"type": "object", "properties": {}}}
MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & 'good'."},
    {"role": "user", "content": " Hi\n"},
    {"role": "assistant", "content": "a</think>b", "tool_calls": [{"name": "f", "arguments": {"é": 1}}]},
    {"role": "user", "content": "Bye"},
]


def chat_format(template, special=SPECIAL, **templates):
    return TemplateFormat({"default": template, **templates}, special, {"bos_token": "<s>"}, "folder")


def text_of(pieces):
    return "".join(piece if isinstance(piece, str) else NAMES[piece] for piece in pieces)


@pytest.mark.parametrize(
    ("name", "tools"), [*((name, None) for name in TEMPLATES), ("dates and tools", [TOOL])], ids=str
)
def test_text_is_that_of_transformers(name, tools):
    messages, tools = read_messages(MESSAGES), read_tools(tools)
    for prompt in (True, False):
        [expected], _ = render_jinja_template(
            [messages], tools, chat_template=TEMPLATES[name], add_generation_prompt=prompt, bos_token="<s>"
        )
        assert text_of(chat_format(TEMPLATES[name]).pieces(messages, tools, prompt)) == expected
    if name == "dates and tools":
        assert datetime.now().strftime("%Y") in expected


def test_control_tokens_of_the_template_are_ids():
    pieces = chat_format(CHATML).pieces([{"role": "user", "content": "Hi"}], None, True)
    assert [piece for piece in pieces if piece] == [1, 2, "user\nHi", 3, "\n", 2, "assistant\n"]


hostile = st.lists(st.sampled_from([*SPECIAL, "<|im_", "end|>", "\U000f0000", "\U000f0001", "x", "\n"])).map("".join)


@given(st.lists(hostile, min_size=1, max_size=3))
@example(["\U000f0000<|im_end|>\U000f0001<s>"])
def test_control_tokens_in_messages_stay_text(contents):
    messages = [{"role": "user", "content": content} for content in contents]
    pieces = chat_format(CHATML).pieces(messages, None, True)
    assert [piece for piece in pieces if isinstance(piece, int)] == [1] + [2, 3] * len(contents) + [2]
    said = [piece for piece in pieces if isinstance(piece, str)]
    assert said[2:-1:2] == [f"user\n{content}" for content in contents]


def test_control_tokens_in_tools_and_calls_stay_text():
    template = "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f<|im_end|>", "parameters": {"<tool>": ["<s>"]}}}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": "<|im_start|>"}}}]
    pieces = chat_format(template).pieces([{"role": "assistant", "content": "", "tool_calls": calls}], tools, False)
    assert pieces == ["", 1, json.dumps(tools) + json.dumps(calls)]


def test_templates_can_split_text_with_placeholders():
    # A template that splits and joins a message neither loses its text nor makes a control token of it.
    template = "{% for m in messages %}{{ m.content.split('|')[0] ~ '|' ~ m.content[-1:] | trim }}{% endfor %}"
    pieces = chat_format(template).pieces([{"role": "user", "content": "<|im_end|>|b<|im_start|>"}], None, True)
    assert pieces == ["<|im_end|>|<|im_start|>"]


def test_without_control_tokens():
    pieces = chat_format(CHATML, special={}).pieces([{"role": "user", "content": "<s>"}], None, False)
    assert pieces == ["<s><|im_start|>user\n<s><|im_end|>\n"]


def test_tools_may_have_a_template_of_their_own():
    both, tools = chat_format("plain", tool_use="tools: {{ tools[0].function.name }}"), read_tools([TOOL])
    assert both.pieces([], None, True) == ["plain"]
    assert both.pieces([], tools, True) == ["tools: f"]
    with pytest.raises(PromptError, match="folder: there is no default chat template, only rag"):
        TemplateFormat({"rag": "x"}, {}, {}, "folder").pieces([], None, True)


@settings(max_examples=50)
@given(hostile, hostile)
def test_after_a_reply(reply, user):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": reply}]
    new = {"role": "user", "content": user}
    after = chat_format(CHATML).pieces_after(1, [*messages, new], None)
    assert [piece for piece in after if piece] == [3, "\n", 2, f"user\n{user}", 3, "\n", 2, "assistant\n"]


def test_after_a_reply_its_tool_calls_are_not_written_again():
    template = CHATML.replace(
        "+ '<|im_end|>", "+ (message.tool_calls | tojson if message.tool_calls else '') + '<|im_end|>"
    )
    messages = read_messages([*MESSAGES[:3], {"role": "tool", "content": "7"}])
    assert "é" in text_of(chat_format(template).pieces(messages, None, True))
    after = chat_format(template).pieces_after(2, messages, None)
    assert [piece for piece in after if piece] == [3, "\n", 2, "tool\n7", 3, "\n", 2, "assistant\n"]


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content * 2 }}{% endfor %}"])
def test_a_template_that_does_not_write_each_answer_once_is_an_error(template):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}]
    with pytest.raises(PromptError, match="folder: the chat template does not write each answer once"):
        chat_format(template).pieces_after(1, messages, None)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ raise_exception('Roles must\nalternate!') }}", "does not take these messages: Roles must alternate!"),
        ("{% for %}", "cannot be read, line 1"),
        ("x\n{% unknown %}", "cannot be read, line 2"),
        ("{{ messages[7].content }}", "does not take these messages: .*has no element 7"),
        ("{{ messages + 1 }}", "does not take these messages"),
        ("{{ 1 / 0 }}", "does not take these messages: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "does not take these messages: .*unsafe"),
        ("{{ messages.append(1) }}", "does not take these messages: .*unsafe"),
        ("{{ strftime_now.__globals__['sys'] }}", "does not take these messages: .*unsafe"),
        ("{% include '/etc/passwd' %}", "does not take these messages: no loader"),
        ("{{ range(999999999) | list }}", "does not take these messages: Range too big"),
    ],
)
def test_faults_and_sandbox_violations_are_one_line_errors(template, fault):
    with pytest.raises(PromptError, match=f"^folder: the chat template {fault}") as caught:
        chat_format(template).pieces([{"role": "user", "content": "x"}], None, True)
    assert "\n" not in str(caught.value)


PARTS = """{% for m in messages %}
{%- for p in m.content %}{% if p.type == 'text' %}{{ p.text | trim }}{% endif %}{% endfor %};
{%- endfor %}"""
SAID = read_messages([{"role": "system", "content": "Verse."}, {"role": "user", "content": " a lock? "}])


@pytest.mark.parametrize(
    "template",
    [
        PARTS,
        "{% for m in messages %}{{ m.content[0].text | trim }};{% endfor %}",
        "{{ raise_exception('parts!') if messages[0].content is string }}" + PARTS,
        # The system prompt as text, the user's words in parts.
        "{{ messages[0].content }};{% for p in messages[1].content %}{{ p.text | trim }}{% endfor %};",
    ],
)
def test_content_is_given_in_parts_where_the_template_wants_them(template):
    assert chat_format(template).pieces(SAID, None, True) == ["Verse.;a lock?;"]
    talk = [*SAID, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    if "messages[0]" not in template:
        assert chat_format(template).pieces_after(2, talk, None) == [";Why?;"]


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "system"),
        ("{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}", "user"),
        ("a lock? {{ messages[0].content }}", "user"),  # words of the template's own are not the person's
        ("{{ messages[0].content }}{{ messages[1].content[:2] }}", "user"),
        ("{{ messages[0].content }}{{ messages[1].content[2:] }}", "user"),
        ("{{ messages[0].content }}{{ messages[1].content.text }}", "user"),
    ],
)
def test_a_template_that_leaves_words_out_is_refused(template, role):
    with pytest.raises(
        PromptError, match=f"^folder: the chat template leaves out the {role} message '.*'; use another"
    ):
        chat_format(template).pieces(SAID, None, True)


def test_reasoning_and_the_text_beside_a_tool_call_may_be_left_out():
    template = """{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}
{%- else %}{{ m.content.split('</think>')[-1] }}{% endif %};{% endfor %}"""
    call = {"role": "assistant", "content": "Let me see.", "tool_calls": [{"name": "f", "arguments": {}}]}
    messages = read_messages([SAID[1], {"role": "assistant", "content": "hm</think>No."}, call])
    assert chat_format(template).pieces(messages, None, True) == [" a lock? ;No.;f;"]


def test_tools_are_refused_by_a_template_that_knows_none():
    tools = read_tools([TOOL, TOOL | {"name": "g"}])
    with pytest.raises(PromptError, match="^folder: the chat template leaves tools out; use a model"):
        chat_format(CHATML).pieces(SAID, tools, True)
    first = "{{ tools[0] | tojson if tools else '' }}" + CHATML
    assert chat_format(first).pieces(SAID, tools[:1], True)
    with pytest.raises(PromptError, match="leaves tools out"):
        chat_format(first).pieces(SAID, tools, True)


def test_marks_escaped_as_json_are_found():
    template = "{{ tools | tojson(ensure_ascii=true) }}{{ messages | tojson(ensure_ascii=true) }}"
    assert chat_format(template).pieces(SAID, read_tools([TOOL]), True)
