import pytest

from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.messages import PromptError, read_messages, read_tools

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_messages_are_copied_and_keep_other_keys():
    given = [{**USER, "name": "Ann"}]
    read = read_messages(given)
    assert read == given
    assert read[0] is not given[0]


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "one two"}]


def test_answers_and_results_may_be_empty():
    read = read_messages([USER, {"role": "assistant", "content": ""}, {"role": "tool", "content": ""}])
    assert [message["content"] for message in read] == ["hi", "", ""]


def test_tool_calls_are_normalized():
    bare = {"name": "g", "arguments": {"y": "z"}}
    [_, read] = read_messages([USER, {"role": "assistant", "content": None, "tool_calls": [CALL, bare]}])
    assert read["content"] == ""
    assert read["tool_calls"] == [
        {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}},
        {"type": "function", "function": {"name": "g", "arguments": {"y": "z"}}},
    ]


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ("hello", "messages: expected a list of objects with role and content, found str"),
        (USER, "messages: expected a list of objects with role and content, found dict"),
        (None, "messages: expected a list .* found NoneType"),
        ([], "messages: there is none from the user"),
        ([{"role": "system", "content": "x"}], "messages: there is none from the user"),
        ([USER, "hello"], "message 2: expected an object with role and content, found str"),
        (
            [{"role": "human", "content": "x"}],
            "message 1: unknown role 'human'; expected one of system, user, assistant",
        ),
        ([{"content": "x"}], "message 1: unknown role None"),
        ([{"role": "user", "content": ""}], r"message 1 \(user\) is empty"),
        ([{"role": "user", "content": " \n\t"}], r"message 1 \(user\) is empty"),
        ([{"role": "user", "content": []}], r"message 1 \(user\) is empty"),
        ([{"role": "user"}], r"message 1 \(user\): expected text as content, found NoneType"),
        ([{"role": "user", "content": 3}], r"message 1 \(user\): expected text as content, found int"),
        ([USER, {"role": "assistant", "content": None}], r"message 2 \(assistant\): expected text"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "type 'image' is not supported; .* text model",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type 'image_url' is not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], "type 'text' is not supported"),
        ([{"role": "user", "content": ["x"]}], "type 'str' is not supported"),
        ([{**USER, "tool_calls": [CALL]}], "message 1: only an assistant can have tool_calls, not 'user'"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {}}]}], "message 2: tool call: expected a function"),
        ([USER, {"role": "assistant", "tool_calls": 5}], "message 2: expected a list as tool_calls, found int"),
        ([USER, {"role": "assistant", "tool_calls": ["f"]}], "message 2: tool call: expected a function with a name"),
        ([USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "call 'f' are not JSON"),
        ([USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 10**5}]}], "'f' are not JSON"),
        ([USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "3"}]}], "call 'f' are not an object"),
    ],
)
def test_faults_are_one_line_errors(messages, fault):
    with pytest.raises(PromptError, match=f"^{fault}" if fault.startswith("message") else fault) as caught:
        read_messages(messages)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UserError)


def test_a_user_is_needed_only_for_an_answer():
    system = [{"role": "system", "content": "Be brief."}]
    assert read_messages(system, need_user=False) == system


def test_tools():
    assert read_tools(None) is None
    assert read_tools([]) is None
    schema = {"name": "f", "parameters": {}}
    wrapped = {"type": "function", "function": schema}
    assert read_tools([schema, wrapped]) == [wrapped, wrapped]
    for wrong in ("f", [print], [{"type": "function"}], [{"function": {"description": "x"}}], {"name": "f"}):
        with pytest.raises(PromptError, match=r"^tool"):
            read_tools(wrong)


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": ""}]])
def test_an_empty_system_message_is_none(content):
    assert read_messages([{"role": "system", "content": content}, USER]) == [USER]
