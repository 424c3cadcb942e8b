"""The tokenizer in a GGUF: its files in the written folder, its ids, and values that do not fit."""

import numpy as np
import pytest
from gguf_builder import MERGES, TOKENIZER, TOKENS, Typed, gguf_bytes
from tiny_gguf import ARGS, entries, metadata, random_weights, write_tiny
from transformers import AutoTokenizer

from convert.sources.gguf import open_gguf
from convert.sources.gguf_tokenizer import read_tokenizer
from mlx_llama3.errors import UserError
from mlx_llama3.tokenizer.tokenizer import load_tokenizer

BOS, END, EOT = (TOKENS.index(name) for name in ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"))
PLAIN = {key: value.value[1] if isinstance(value, Typed) else value for key, value in TOKENIZER.items()}
TEXT = "the thin <|eot_id|> \U0001f600\n\n 12345"


def test_written_files_give_the_same_ids_here_and_in_transformers(tmp_path):
    path, folder = tmp_path / "model.gguf", tmp_path / "folder"
    folder.mkdir()
    write_tiny(path)
    source = open_gguf(path)
    assert source.write_tokenizer(folder) == ["tokenizer.json", "tokenizer_config.json"]
    tokenizer = load_tokenizer(folder)
    the = TOKENS.index("the")
    assert tokenizer.encode("the") == [the]
    assert tokenizer.encode("the<|eot_id|>", allow_special=True) == [the, EOT]
    theirs = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode(TEXT, allow_special=True) == theirs.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (theirs.bos_token_id, theirs.eos_token_id) == (BOS, EOT)


def test_template_is_kept(tmp_path):
    path, folder = tmp_path / "model.gguf", tmp_path / "folder"
    folder.mkdir()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    path.write_bytes(gguf_bytes(metadata() | {"tokenizer.chat_template": template}, entries(random_weights())))
    open_gguf(path).write_tokenizer(folder)
    assert load_tokenizer(folder).render_chat([{"role": "user", "content": "hi"}]) == "<|begin_of_text|><user>hi"


def test_generation_config():
    assert read_tokenizer(PLAIN, ARGS, "file").generation_config() == {"bos_token_id": BOS, "eos_token_id": EOT}
    without = {key: value for key, value in PLAIN.items() if "token_id" not in key}
    assert read_tokenizer(without, ARGS, "file").generation_config() == {}
    several = PLAIN | {"tokenizer.ggml.eot_token_id": EOT, "tokenizer.ggml.eom_token_id": END}
    assert read_tokenizer(several, ARGS, "file").generation_config()["eos_token_id"] == [EOT, END]


def test_llama_3_ends_with_all_its_end_tokens():
    names = [
        *TOKENS[:-3],
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    llama3 = PLAIN | {
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [1] * (len(names) - 5) + [3] * 5,
        "tokenizer.ggml.eos_token_id": len(names) - 1,
    }
    tokenizer = read_tokenizer(llama3, ARGS.__class__(**{**vars(ARGS), "vocab_size": len(names)}), "file")
    assert tokenizer.generation_config()["eos_token_id"] == [len(names) - 1, names.index("<|end_of_text|>")]


def test_a_named_template_that_is_no_text():
    with pytest.raises(UserError, match="tokenizer.chat_template.tool_use is 5, expected str; the file is damaged"):
        read_tokenizer(PLAIN | {"tokenizer.chat_template.tool_use": 5}, ARGS, "file")


def test_file_without_tokenizer(tmp_path):
    path = tmp_path / "model.gguf"
    bare = {key: value for key, value in metadata().items() if not key.startswith("tokenizer.")}
    path.write_bytes(gguf_bytes(bare, entries(random_weights())))
    source = open_gguf(path)
    assert source.write_tokenizer(tmp_path) == []
    assert source.generation_config == {}
    assert source.notes == ["the file holds no tokenizer: the new folder runs, but not on text"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": 5}, "tokenizer.ggml.model is 5, expected str"),
        ({"tokenizer.ggml.pre": "qwen2"}, "'qwen2'"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of str"),
        ({"tokenizer.ggml.tokens": "words"}, "tokenizer.ggml.tokens must be an array of str"),
        ({"tokenizer.ggml.tokens": [*TOKENS, "more"]}, r"tokenizer.ggml.tokens has \d+ entries, but the embedding has"),
        ({"tokenizer.ggml.tokens": TOKENS[:-1]}, "eos_token_id is 261, but there are 261 tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries"),
        ({"tokenizer.ggml.token_type": [0.5] * len(TOKENS)}, "token_type must be an array of int"),
        ({"tokenizer.ggml.merges": [*MERGES, "q q"]}, "'qq', which is not in the vocabulary"),
        ({"tokenizer.ggml.merges": []}, "merges"),
        ({"tokenizer.ggml.bos_token_id": "1"}, "bos_token_id is '1', expected int"),
        ({"tokenizer.ggml.bos_token_id": -1}, "bos_token_id is -1"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token is 1, expected bool"),
        ({"tokenizer.chat_template": ["a"]}, "chat_template is"),
    ],
)
def test_values_that_do_not_fit(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        read_tokenizer(PLAIN | changes, ARGS, "file.gguf")
    assert "file.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_demo_tokenizer(demo_gguf, tmp_path):
    source = open_gguf(demo_gguf)
    source.write_tokenizer(tmp_path)
    assert source.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    ids = load_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1 and np.count_nonzero(np.array(ids) == 2) == 2
