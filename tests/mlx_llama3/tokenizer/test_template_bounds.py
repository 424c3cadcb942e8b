"""Templates that would never end, or fill the memory, are refused within seconds; ordinary ones render as before."""

import resource
import subprocess
import sys

import pytest

from mlx_llama3.tokenizer.chat_template import TemplateFormat

LONG = "{% set x = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set x.s = x.s SIGN x.s %}{% endfor %}{{ x.s }}"
SIZES = {
    "folded power": "{{ 9 ** (9 ** 9) }}",
    "power of a variable": "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}",
    "squares": "{% set x = namespace(n=9) %}{% for i in range(60) %}{% set x.n = x.n * x.n %}{% endfor %}",
    "repetition": "{{ 'x' * 99999999999 }}",
    "repetition of a list": "{{ [1] * 99999999999 }}",
    "padding": "{{ 'x' | center(99999999999) }}",
    "padding by a method": "{{ 'x'.ljust(99999999999) }}",
    "indentation": "{{ 'x' | indent(99999999999, true) }}",
    "format": "{{ '%99999999999d' | format(1) }}",
    "percent": "{{ '%99999999999d' % 1 }}",
    "format by a method": "{{ '{:>99999999999}'.format(1) }}",
    "doubling by ~": LONG.replace("SIGN", "~"),
    "doubling by +": LONG.replace("SIGN", "+"),
    "replace": "{{ ('x' * 40000000) | replace('x', 'x' * 40000000) }}",
    "replace by a method": "{{ ('x' * 40000000).replace('x', 'x' * 40000000) }}",
    "join": "{{ ('x' * 40000000) | join('x' * 40000000) }}",
}
LOOPS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
DEPTHS = {
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "not": "{{ " + "not " * 20000 + "1 }}",
    "blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "loops": "{% for a in [1] %}" * 40 + "{% endfor %}" * 40,
}
UNUSED = {
    "in a dead branch": "{% if false %}{{ 9 ** (9 ** 9) }}{% endif %}ok",
    "in a macro that nobody calls": "{% macro f() %}{{ 9 ** 9 ** 9 }}{% endmacro %}ok",
}
TOO_LARGE, TOO_LONG = "it computes too large a text or number", "it takes more than 5 seconds"
TOO_DEEP = "is nested too deeply, or calls itself without end"
KINDS = ((SIZES, TOO_LARGE), (LOOPS, TOO_LONG), (DEPTHS, TOO_DEEP), (UNUSED, "leaves out the user message"))
CASES = {name: (text, fault) for texts, fault in KINDS for name, text in texts.items()}
PROGRAM = """
import sys
from mlx_llama3.tokenizer.chat_template import TemplateFormat
from mlx_llama3.tokenizer.messages import PromptError
try:
    chat = TemplateFormat({"default": sys.stdin.read()}, {}, {}, "folder")
    chat.pieces([{"role": "user", "content": "x"}], None, True)
except PromptError as error:
    print(error)
"""


@pytest.mark.parametrize("name", CASES)
def test_a_template_without_bounds_is_refused(name):
    """In a process with 6 GB of address space and 60 seconds, so that a fault does not take the tests' own."""
    text, fault = CASES[name]
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # noqa: E731
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert done.stderr == "" and done.returncode == 0
    assert "folder: the chat template " in done.stdout and done.stdout.count("\n") == 1
    assert fault in done.stdout


def test_ordinary_operations_stay():
    template = """{{ '%5d|%s' % (7, 'a') }} {{ 'x' * 3 }} {{ 2 ** 10 }} {{ [1] + [2] }} {{ '{:>4}'.format(1) }}
{{- ' a' | trim | center(5) }} {{ 'ab'.replace('a', 'c') }} {{ ['a', 'b'] | join(', ') }} {{ 'a' ~ 1 ~ none }}
{{- '**%s** {' % 'b' }} {{ 'a*b' + 'c' }} {{ messages[0].content }}"""
    said = [{"role": "user", "content": "x"}]
    [text] = TemplateFormat({"default": template}, {}, {}, "folder").pieces(said, None, True)
    assert text == "    7|a xxx 1024 [1, 2]    1  a   cb a, b a1None**b** { a*bc x"
