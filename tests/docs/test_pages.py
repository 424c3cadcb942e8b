"""What the documentation points at is there: files, options of the commands, tables, and the program's messages."""

import ast
import re
from argparse import ArgumentParser
from functools import cache
from pathlib import Path

import pytest

from app.cli import COMMANDS, build_parser
from benchmarks import model_sizes

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
LONGEST = {"README.md": 100} | {f"docs/{path.name}": 150 for path in (ROOT / "docs").glob("*.md")}
VARIABLE = "\0"  # what differs in a message
OF_MLX_LAUNCH = {"--backend", "--auto-setup"}


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@cache
def options(command: str) -> set[str]:
    """All that the parser knows of a command, and what every command takes."""
    parser = build_parser(command)
    (commands,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    found: set[str] = set()
    each: ArgumentParser
    for each in (parser, commands[command]):
        found |= {text for action in each._actions for text in action.option_strings}
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_to_a_file(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", page(name)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            file = (ROOT / name).parent / path
            assert file.exists(), target
            if anchor:
                titles = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
                assert anchor in {title.lower().replace(" ", "-") for title in titles}, target


@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_longer_than_a_reader_likes(name):
    assert page(name).count("\n") <= LONGEST.get(name, 150)


def code(name: str) -> str:
    """The blocks and words of a page that are set as code, a line each."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page(name), re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^ *```.*?^ *```", "", page(name), flags=re.DOTALL | re.MULTILINE)
    return "\n".join([*blocks, *(words.replace("\n", " ") for words in re.findall(r"`([^`]+)`", rest))])


@pytest.mark.parametrize("name", PAGES)
def test_every_option_of_a_command_is_known(name):
    for command, rest in re.findall(r"mlx-llama3 (?!COMMAND)([\w./-]+)(.*)", code(name)):
        if command.startswith("-"):
            assert command in options("chat"), command
            continue
        assert command in COMMANDS, command
        rest = re.split(r"[|;]|\s#\s", rest)[0]  # up to a pipe, the next command or a comment
        for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest):
            assert option in options(command), f"mlx-llama3 {command} {option}"


@pytest.mark.parametrize("name", PAGES)
def test_every_option_that_a_sentence_names_is_known(name):
    known = set().union(*(options(command) for command in COMMANDS))
    for option in re.findall(r"^(--[a-z][\w-]*)", code(name), re.MULTILINE):
        assert option in known | OF_MLX_LAUNCH, option


@pytest.mark.parametrize("name", PAGES)
def test_every_target_of_make_is_there(name):
    targets = re.findall(r"^([\w-]+):", page("Makefile"), re.MULTILINE)
    for target in re.findall(r"^make ([\w-]+)", code(name), re.MULTILINE):
        assert target in targets, target


def test_the_tables_of_sizes_are_as_they_are_computed():
    for row in model_sizes.model_rows():
        assert row in page("README.md")
    for row in model_sizes.cache_rows():
        assert row in page("docs/long-context.md")


def test_the_folders_of_the_readme_are_those_of_the_repository():
    tree = page("README.md").partition("    app/ ")[2].partition("\n\n")[0]
    words = set(re.findall(r"\w+", tree))
    for floor in ("app", "convert", "mlx_llama3"):
        rooms = {path.parent.name for path in (ROOT / floor).glob("*/__init__.py")}
        assert rooms <= words, rooms - words


@cache
def program_texts() -> str:
    """All texts of the program's source, and of the script that installs it."""
    texts = [re.sub(r'" \\\n\s+"', " ", page("scripts/venv.sh"))]
    for floor in ("app", "convert", "mlx_llama3"):
        for path in sorted((ROOT / floor).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else VARIABLE for part in node.values)
                    texts.append("".join(parts))
    return "\n".join(texts)


def test_the_messages_of_troubleshooting_are_the_programs():
    quoted = re.findall(r"^(?:\| |- )([^|\n]*`[^|\n]*)(?: \||:)", page("docs/troubleshooting.md"), re.MULTILINE)
    messages = [message for cell in quoted for message in re.findall(r"`([^`]+)`", cell)]
    messages = [message.removeprefix("error: ") for message in messages if " " in message]
    messages = [re.sub(r"^MLX_LLAMA3_KERNELS", VARIABLE, message) for message in messages]
    assert len(messages) > 30
    missing = [message for message in messages if message not in program_texts()]
    assert not missing
