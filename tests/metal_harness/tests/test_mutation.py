import numpy as np
import pytest

from tests.metal_harness.checking.checks import check, check_launch
from tests.metal_harness.checking.mutation import barriers, mutants, unneeded_barriers
from tests.metal_harness.mlx_kernels import mlx_kernel
from tests.metal_harness.tests.snippets import dispatch_of, first_line

import mlx.core as mx

# A sum in a tree, round after round: the second barrier is needed only when the loop goes round.
TREE = """
uint i = thread_position_in_grid.x;
threadgroup float t[64];
t[i] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint width = 32; width >= LAST; width /= 2) {
  if (i < width) t[i] += t[i + width];
  threadgroup_barrier(
      mem_flags::mem_threadgroup);
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // threadgroup_barrier(mem_flags::mem_none) for nothing
y[i] = t[0];
"""


def tree(last):
    inputs, outputs = {"x": mx.arange(64, dtype=mx.float32)}, {"y": ((64,), mx.float32)}
    return dispatch_of(TREE, inputs, outputs, template=[("LAST", last)])


def test_barriers_are_found():
    source = tree(1).kernel.source
    found = [source[slice(*place)] for place in barriers(source)]
    assert ["".join(text.split()) for text in found] == ["threadgroup_barrier(mem_flags::mem_threadgroup)"] * 3


def test_each_needed_barrier_is_noticed():
    tested = tree(1)
    first, second, third = mutants(tested.kernel, lambda kernel: check_kernel(tested, kernel))
    line = first_line(tested)
    assert [first.line, second.line, third.line] == [line + 4, line + 7, line + 10]
    assert any("race" in text for text in first.findings)
    assert any("race" in text for text in second.findings)
    assert third.findings == ()  # the loop ends with one


def check_kernel(dispatch, kernel):
    return check_launch(kernel, dispatch.buffers(dispatch.empty_outputs()), dispatch.grid, dispatch.threadgroup)


def test_unneeded_barriers_are_told():
    line = first_line(tree(1))
    assert unneeded_barriers([tree(1)]) == [line + 10]
    # With no round at all, the first and the last do the same, so either can go. All shapes together count.
    assert unneeded_barriers([tree(64)]) == [line + 4, line + 7, line + 10]
    assert unneeded_barriers([tree(64), tree(1)]) == [line + 10]


def test_kernel_without_barriers():
    tested = dispatch_of("y[0] = x[0];", {"x": mx.ones((8,))}, {"y": ((1,), mx.float32)}, grid=(1, 1, 1))
    assert unneeded_barriers([tested]) == []
    assert check(tested).findings == ()


def attention_buffers(keys):
    rng = np.random.default_rng(keys)
    q, k, v = (
        rng.normal(size=(heads, length, 64)).astype(np.float32) for heads, length in ((6, 1), (2, keys), (2, keys))
    )
    buffers = {"queries": q, "keys": k, "values": v, "N": np.int32(keys), "gqa_factor": np.int32(3)}
    buffers |= {"k_head_stride": np.uint64(keys * 64), "v_head_stride": np.uint64(keys * 64)}
    buffers |= {"k_seq_stride": np.uint64(64), "v_seq_stride": np.uint64(64), "scale": np.float32(0.125)}
    return buffers | {"out": np.full((6, 1, 64), np.nan, np.float32)}


def second_pass_buffers():
    rng, blocks = np.random.default_rng(0), 32
    sums, maxs = rng.uniform(1, 2, size=(6, blocks)), rng.normal(size=(6, blocks))
    parts = {"sums": sums.astype(np.float32), "maxs": maxs.astype(np.float32)}
    partials = rng.normal(size=(6, blocks, 64)).astype(np.float32)
    return parts | {"partials": partials, "out": np.full((6, 1, 64), np.nan, np.float32)}


def softmax_buffers():
    x = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
    return {"in": x, "out": np.full_like(x, np.nan), "axis_size": np.int32(1000)}


MLX = {
    "sdpa_vector": ("sdpa_vector.h", {"T": "float", "D": 64, "V": 64}, {}, attention_buffers(77), (6, 1, 1), 1024),
    "sdpa_vector_2pass_2": (
        *("sdpa_vector.h", {"T": "float", "D": 64}, {"blocks": 32}),
        *(second_pass_buffers(), (6, 1, 1), 1024),
    ),
    "softmax_single_row": (
        *("softmax.h", {"T": "float", "AccT": "float", "N_READS": 4}, {}),
        *(softmax_buffers(), (3, 1, 1), 256),
    ),
}


NUMBER_OF_BARRIERS = {"sdpa_vector": 3, "sdpa_vector_2pass_2": 2, "softmax_single_row": 5}


@pytest.mark.parametrize("name", MLX)
def test_every_barrier_of_mlx_own_kernels_is_needed(name):
    header, template, constants, buffers, groups, threads = MLX[name]
    kernel = mlx_kernel(header, name, template, **constants)
    given = [np.asarray(buffers.get(parameter.name, np.zeros(1, np.int64))) for parameter in kernel.buffers]
    grid = (groups[0] * threads, *groups[1:])

    def run(mutated):
        return check_launch(mutated, given, grid, (threads, 1, 1))

    assert run(kernel).findings == ()
    found = mutants(kernel, run)
    assert len(found) == NUMBER_OF_BARRIERS[name]
    assert [mutant.line for mutant in found if not mutant.findings] == []
