"""The restricted unpickler: it reads what torch writes and refuses everything else."""

import collections
import io
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st
from torch_zip import group, number, storage, table, tensor, text

from convert.storage.torch_pickle import MAX_PICKLE_BYTES, StatePickle, Storage, TensorView
from mlx_llama3.errors import UserError

PLAIN = tensor("BF16", "0", 6, (2, 3), (3, 1))
VIEW = TensorView(Storage("BF16", "0", 6), 0, (2, 3), (3, 1))


def load(data: bytes) -> dict:
    return StatePickle(data, "model.pth").load()


def test_state_dictionary_of_torch():
    actual = load(table({"a.weight": PLAIN, "b": tensor("F32", "1", 9, (), (), offset=8)}))
    assert actual == {"a.weight": VIEW, "b": TensorView(Storage("F32", "1", 9), 8, (), ())}


def test_parameter_and_metadata_of_a_module():
    parameter = b"ctorch._utils\n_rebuild_parameter\n(" + PLAIN + b"\x88ccollections\nOrderedDict\n)RtR"
    ordered = b"\x80\x02ccollections\nOrderedDict\n)R(" + text("w") + parameter + b"u}" + text("_metadata") + b"}sb."
    assert load(ordered) == {"w": VIEW}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pythons_own_pickler(protocol):
    data = collections.OrderedDict(a=[1, 2**40, -5, True, None, 1.5], b={"c": (1, (2, 3, 4)), "d": ()})
    expected = {"a": [1, 2**40, -5, True, None, 1.5], "b": {"c": (1, (2, 3, 4)), "d": ()}}
    assert load(pickle.dumps(data, protocol)) == expected


class Evil:
    """An object whose pickle calls `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def eval_pickle(protocol: int) -> bytes:
    return pickle.dumps({"a": Evil(eval, "1 / 0")}, protocol)


HOSTILE = {
    "os.system": (b"cos\nsystem\n(" + text("touch HACKED") + b"tR.", "os.system"),
    "posix.system, protocol 4": (b"\x80\x04" + b"\x8c\x05posix\x8c\x06system\x93.", "posix.system"),
    "builtins.eval": (eval_pickle(2), "__builtin__.eval"),
    "builtins.eval, protocol 5": (eval_pickle(5), "builtins.eval"),
    "torch.hub.load": (b"ctorch.hub\nload\n)R.", "torch.hub.load"),
    "torch.load within": (b"ctorch\nload\n)R.", "torch.load"),
    "reducer of newer tensors": (b"ctorch._tensor\n_rebuild_from_type_v2\n)R.", "torch._tensor._rebuild_from_type_v2"),
    "code object": (b"ctypes\nCodeType\n)R.", "types.CodeType"),
    "operator chain": (b"coperator\nattrgetter\n" + text("system") + b"\x85R.", "operator.attrgetter"),
    "dotted name, protocol 4": (b"\x80\x04\x8c\x05torch\x8c\x0b_utils.evil\x93.", "torch._utils.evil"),
    "dotted global": (b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n.", "_rebuild_tensor_v2.__globals__"),
    "global nested in a table": (table({"a": b"}" + text("b") + b"cos\nsystem\ns"}), "os.system"),
    "INST": (b"(" + text("touch HACKED") + b"ios\nsystem\n.", "INST of 'os.system'"),
    "OBJ": (b"(ccollections\nOrderedDict\no.", "OBJ"),
    "NEWOBJ": (b"ccollections\nOrderedDict\n)\x81.", "NEWOBJ"),
    "EXT1": (b"\x82\x01.", "EXT1"),
    "text persistent id": (b"Pstorage\n.", "PERSID"),
    "STRING, which Python evaluates": (b"S'a'\n.", "STRING"),
    "unknown instruction": (b"\xff.", "0xff"),
    "BUILD on a storage": (storage("F32", "0", 1)[1:] + b"}" + text("key") + text("x") + b"sb.", "state of a Storage"),
    "BUILD with another state": (b"}" + text("items") + b"b.", "state of a dict"),
    "call of a storage class": (b"ctorch\nFloatStorage\n)R.", "torch.FloatStorage"),
    "call of a tensor": (PLAIN + b")R.", "calls a TensorView"),
    "call of text": (text("os.system") + b")R.", "calls a str"),
    "persistent id that is a path": (text("/etc/passwd") + b"Q.", "refers to data beside it"),
    "persistent id of another kind": (b"(" + text("module") + b"ctorch\nFloatStorage\ntQ.", "refers to data beside it"),
    "persistent id with a foreign class": (b"(" + text("storage") + b"cos\nsystem\n", "os.system"),
    "rebuild without a storage": (b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))tR.", "arguments that do not fit"),
    "OrderedDict with arguments": (b"ccollections\nOrderedDict\n(]tR.", "arguments that do not fit"),
    "tuple as a key": (b"})Ns.", "uses a tuple as the name"),
    "same name twice": (b"}(" + text("w") + PLAIN + text("w") + PLAIN + b"u.", "holds 'w' twice"),
    "negative size": (table({"w": tensor("F32", "0", 4, (-1, 4), (4, 1))}), "make no sense"),
    "size beyond 62 bits": (table({"w": tensor("F32", "0", 4, (1 << 62,), (1,))}), "make no sense"),
    "shape and strides differ in length": (table({"w": tensor("F32", "0", 4, (2, 2), (1,))}), "make no sense"),
    "shape of tensors": (
        b"ctorch._utils\n_rebuild_tensor_v2\n"
        + storage("F32", "0", 1)
        + number(0)
        + b"("
        + PLAIN
        + b"t"
        + group([1])
        + b"tR.",
        "make no sense",
    ),
    "not a table": (b"\x80\x02K\x01.", "holds a int"),
    "protocol 9": (b"\x80\x09}.", "protocol 9"),
    "empty": (b"", "breaks off"),
    "text longer than the file": (b"X\xff\xff\xff\xff", "breaks off"),
    "global without an end": (b"cos", "breaks off"),
    "text that is not UTF-8": (b"X\x01\x00\x00\x00\xff.", "not UTF-8"),
    "value from nothing": (b"\x85.", "never pushed"),
    "value from below the mark": (b"K\x01(\x85.", "never pushed"),
    "group without a mark": (b"t.", "never opened"),
    "memo never stored": (b"h\x07.", "never wrote"),
    "append to a table": (b"}K\x01a.", "appends to a dict"),
    "item of a list": (b"]K\x01K\x01s.", "sets items of what is no table"),
    "odd number of items": (b"}(K\x01u.", "sets items of what is no table"),
}


@pytest.mark.parametrize("data, named", HOSTILE.values(), ids=HOSTILE)
def test_hostile_or_damaged_pickle_is_refused_by_name(data, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        load(data)
    message = str(error.value)
    assert message.startswith("model.pth: its pickle ") and named in message
    assert "\n" not in message and len(message) < 400
    assert list(tmp_path.iterdir()) == []


def test_the_hostile_pickles_are_real(tmp_path, monkeypatch):
    """Python's own unpickler executes them, so the corpus is not made of harmless bytes."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE["os.system"][0])
    assert (tmp_path / "HACKED").exists()
    with pytest.raises(ZeroDivisionError):
        pickle.loads(eval_pickle(4))


def test_names_in_messages_are_shortened_and_on_one_line():
    with pytest.raises(UserError) as error:
        load(b"\x80\x04" + text("evil\n" * 1000) + text("x") + b"\x93.")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_more_bytes_than_any_table_needs_are_refused_unread():
    with pytest.raises(UserError, match="far fewer, refused"):
        load(b"}" * (MAX_PICKLE_BYTES + 1))


@pytest.mark.parametrize(
    "data",
    [
        b")"
        + b"\x85" * 1_000_000
        + b".",  # a tuple nested a million deep: hashing or printing it overflows the C stack
        b"]" + b"]a" * 500_000 + b".",
        b")" + b"q\x00h\x00\x86" * 1000 + b"N}h\x00Ns.",  # 2 ** 1000 leaves, if anything traverses them
        b"r\xff\xff\xff\x7f." * 1,
        b"Nr\xff\xff\xff\x7f." * 1,  # Python's unpickler would allocate two billion memo entries
    ],
    ids=["deep tuple", "deep list", "doubling tuple", "memo from nothing", "memo far away"],
)
def test_bombs_cost_nothing(data):
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            load(data)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(data) + 10_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    try:
        assert isinstance(load(data), dict)
    except UserError as error:
        assert "\n" not in str(error)


GOOD = table({"tok_embeddings.weight": PLAIN, "norm.weight": tensor("F16", "1", 4, (4,), (1,))})


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255), st.integers(0, len(GOOD)))
def test_flipped_or_cut_pickles_are_read_or_refused(at, flip, length):
    damaged = bytearray(GOOD)
    damaged[at] ^= flip
    for data in (bytes(damaged), GOOD[:length]):
        try:
            assert isinstance(load(data), dict)
        except UserError as error:
            assert "\n" not in str(error)


def test_agrees_with_pythons_machine_on_random_tables():
    """The same table, read by Python's unpickler with stubs for torch's names."""

    class Stubs(pickle.Unpickler):
        def find_class(self, module, name):
            return collections.OrderedDict if name == "OrderedDict" else lambda *arguments: (name, arguments)

        def persistent_load(self, pid):
            return pid[2], pid[4]

    generator = np.random.default_rng(0)
    entries = {}
    for key in range(50):
        shape = tuple(map(int, generator.integers(1, 9, generator.integers(0, 4))))
        entries[f"t{key}"] = tensor("F32", str(key), 4096, shape, tuple(range(len(shape))), offset=key)
    data = table(entries)
    expected = Stubs(io.BytesIO(data)).load()
    actual = load(data)
    assert list(actual) == list(expected)
    for name, (_, ((key, numel), offset, shape, strides, *_)) in expected.items():
        assert actual[name] == TensorView(Storage("F32", key, numel), offset, shape, strides)
