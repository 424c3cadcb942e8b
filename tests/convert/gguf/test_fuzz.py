"""Damaged GGUF models opened as a source: whatever the damage, the result is a model or a one-line error."""

from dataclasses import replace

from gguf_builder import gguf_bytes
from hypothesis import given, settings, strategies as st
from tiny_gguf import ARGS, entries, metadata, random_weights

from convert.sources.gguf import open_gguf
from mlx_llama3.errors import UserError

SMALL = replace(ARGS, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=32)
SEED = gguf_bytes(metadata(SMALL), entries(random_weights(SMALL), SMALL, "Q8_0"))
# End of the bytes to damage: metadata and tensor directory. The reader accepts any bytes as tensor data.
HEADER = SEED.index(b"output_norm.weight") + 60
INTERESTING = (0, 1, 2, 31, 32, 2**31 - 1, 2**31, 2**32 - 1)
MUTATION = st.tuples(
    st.integers(0, HEADER), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**64 - 1) | st.sampled_from(INTERESTING)
)


def test_the_seed_is_valid(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(SEED)
    assert replace(open_gguf(path).args, norm_eps=1e-5) == SMALL


@given(
    mutations=st.lists(MUTATION, min_size=1, max_size=3), drop=st.integers(0, 3), tail=st.sampled_from([0, 0, 0, 1, 40])
)
@settings(max_examples=400, deadline=1000)
def test_damaged_models_are_read_or_refused(tmp_path_factory, mutations, drop, tail):
    data = bytearray(SEED)
    for at, width, number in mutations:
        data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
    if drop:
        del data[mutations[0][0] : mutations[0][0] + drop]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data[: len(data) - tail])
    try:
        source = open_gguf(path)
        for tensor in source.tensors.values():
            tensor.rows(0, tensor.shape[0])
            if tensor.quantized_rows:
                tensor.quantized_rows(0, tensor.shape[0])
    except UserError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000
