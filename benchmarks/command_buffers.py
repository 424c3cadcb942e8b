"""A model of MLX's command buffers on a Mac: which layers' caches are still held when the next token is encoded.

MLX (0.32) puts a stream's dispatches into command buffers. It commits one after more than `operations` dispatches, or
when its arrays have more than `elements` elements; it adds `array::data_size`, which counts elements, not bytes
(`CommandEncoder::needs_commit`, `Device::Device` in mlx/backend/metal/device.cpp). A completed handler holds an
operation's inputs until its command buffer has run (`gpu::eval` in mlx/backend/metal/eval.cpp), and a held buffer is
not donated (`array::is_donatable`). The host waits while more than 10 of these buffers are unfinished (`eval_impl` in
mlx/transforms.cpp); the last one of a token, which ends with the token, does not count.

So a layer's slice update copies the cache if the command buffer with the same layer's attention of the token before
has not run when the host encodes the update. The model follows both clocks. It leaves out the chip's caches and takes
the memory bandwidth as reached. The seconds of the host and of a dispatch are estimates: they decide how many layers
are copied on fast chips, and where the host is slow. An instant host gives the most that can be copied.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.ledger_models import WIDTHS, Widths

MAX_ACTIVE = 10  # command buffers
MIB = 1 << 20
STEP = 256  # positions by which the cache grows
TYPE = 2  # bytes of bfloat16
DISPATCH, COMMIT = 1.5e-6, 10e-6  # GPU seconds that a dispatch and a command buffer take besides their bytes

LAYERS_AND_VOCAB = {"demo": (30, 49152), "1B": (16, 128256), "3B": (28, 128256), "8B": (32, 128256)}


@dataclass(frozen=True)
class Chip:
    """A class of chips: limits of a command buffer, memory bandwidth in bytes a second, and seconds of the host for a
    dispatch, to encode it and to build its part of the graph."""

    name: str
    operations: int
    elements: int
    bandwidth: float
    encode: float = 2.5e-6
    build: float = 5e-6


CHIPS = (
    Chip("base, 100 GB/s", 40, 40 * MIB, 100e9),
    Chip("Pro, 200 GB/s", 40, 40 * MIB, 200e9),
    Chip("Max, 400 GB/s", 50, 50 * MIB, 400e9),
    Chip("Ultra, 800 GB/s", 50, 50 * MIB, 800e9),
)


@dataclass(frozen=True)
class Dispatch:
    """One dispatch. arrays: elements by buffer. nbytes: read and written. layer: whose cache it writes or reads."""

    arrays: dict[str, int]
    nbytes: float
    kind: str = ""
    layer: int = -1


@dataclass
class Commands:
    """The open command buffer and those before it, on the host's clock and the GPU's."""

    chip: Chip
    now: float = 0.0  # of the host
    gpu: float = 0.0  # when the GPU has run all that was committed
    count: int = 0
    seconds: float = 0.0  # of the open buffer on the GPU
    arrays: dict[str, int] = field(default_factory=dict)
    holds: set[tuple[int, int]] = field(default_factory=set)  # (token, layer) whose attention it has
    ends: dict[tuple[int, int], float] = field(default_factory=dict)  # when the cache is let go
    active: deque[float] = field(default_factory=deque)  # ends of the buffers that count
    commits: int = 0

    def add(self, dispatch: Dispatch, token: int) -> None:
        """Encode a dispatch; commit the buffer if it is full, and wait if too many are unfinished."""
        self.now += self.chip.encode
        self.count += 1
        self.seconds += DISPATCH + dispatch.nbytes / self.chip.bandwidth
        self.arrays |= dispatch.arrays
        if dispatch.kind == "attention":
            self.holds.add((token, dispatch.layer))
        if self.count > self.chip.operations or sum(self.arrays.values()) // MIB > self.chip.elements // MIB:
            self.commit()
            self.active.append(self.gpu)
        self._drop_finished()
        if len(self.active) > MAX_ACTIVE:
            self.commit()
            self.now = max(self.now, self.active[0])
            self._drop_finished()

    def commit(self) -> None:
        """Hand the open buffer to the GPU."""
        if self.count:
            self.gpu = max(self.gpu, self.now) + COMMIT + self.seconds
            self.ends |= dict.fromkeys(self.holds, self.gpu)
            self.count, self.seconds, self.arrays, self.holds = 0, 0.0, {}, set()
            self.commits += 1

    def _drop_finished(self) -> None:
        while self.active and self.active[0] <= self.now:
            self.active.popleft()

    def is_held(self, token: int, layer: int) -> bool:
        """Whether the attention of a layer has not run yet, of a token before."""
        return self.ends.get((token, layer), 0.0) > self.now


@dataclass(frozen=True)
class Decoding:
    """Bytes of a decoded token. weights, cache: that must be read. copied: read and written by copies of caches; in
    `copied_layers` layers. buffers: command buffers a token."""

    weights: float
    cache: float
    copied: float
    copied_layers: float
    buffers: float

    @property
    def ratio(self) -> float:
        """All bytes by those without a copy."""
        return 1 + self.copied / (self.weights + self.cache)


def decoding(
    name: str, chip: Chip, positions: int, *, in_flight: int = 2, apart: int = 1, tokens: int = 24
) -> Decoding:
    """Decode tokens with `positions` in the cache, on the model's clocks; the mean of the last ones.

    in_flight: steps that the host queues before it reads a token. apart: how many tokens before the same buffer was
    used last: 1, or 2 for two buffers in turn.
    """
    widths, (layers, vocab) = WIDTHS[name], LAYERS_AND_VOCAB[name]
    capacity = -(-(positions + 1) // STEP) * STEP
    cache = 2 * widths.kv_heads * widths.head_dim * capacity
    commands, done, copies, skipped = Commands(chip), [], [], 8
    for token in range(tokens):
        if token >= in_flight:
            commands.now = max(commands.now, done[token - in_flight])
        first = commands.commits
        step = list(_step(widths, layers, vocab, positions, cache))
        commands.now += chip.build * len(step)
        for dispatch in step:
            if dispatch.kind == "write" and commands.is_held(token - apart, dispatch.layer):
                copy = Dispatch({f"old{dispatch.layer}": cache, **dispatch.arrays}, 2 * TYPE * cache)
                commands.add(copy, token)
                copies += [copy.nbytes] * (token >= skipped)
            commands.add(dispatch, token)
        commands.commit()
        done.append(commands.gpu)
        buffers = commands.commits - first
    weights = sum(dispatch.nbytes for dispatch in step if dispatch.kind == "weights")
    attended = TYPE * 2 * widths.kv_heads * widths.head_dim * positions * layers
    counted = tokens - skipped
    return Decoding(weights, attended, sum(copies) / counted, len(copies) / counted, buffers)


def _step(w: Widths, layers: int, vocab: int, positions: int, cache: int) -> Iterator[Dispatch]:
    """The dispatches of a token with all fused kernels (`app/machine/dispatches.py`)."""
    kv = 2 * w.kv_heads * w.head_dim
    for layer in range(layers):
        name = f"cache{layer}"
        yield Dispatch({}, 0)  # the add and the norm
        yield _product(f"qkv{layer}", w.heads * w.head_dim + kv, w.dim)
        yield Dispatch({}, 0)  # the rotation
        yield Dispatch({name: cache}, TYPE * kv, "write", layer)
        yield Dispatch({name: cache}, TYPE * kv * positions, "attention", layer)
        if positions >= 1024:
            yield Dispatch({}, 0)
        yield _product(f"o{layer}", w.dim, w.heads * w.head_dim)
        yield Dispatch({}, 0)
        yield _product(f"w13{layer}", 2 * w.hidden, w.dim)
        yield _product(f"w2{layer}", w.dim, w.hidden)
    yield Dispatch({}, 0)
    yield _product("head", vocab, w.dim)
    for _ in range(4):  # the sampler, and the largest logit
        yield Dispatch({}, 0)


def _product(name: str, rows: int, columns: int) -> Dispatch:
    """A product with a matrix of 4 bits in groups of 64: an element for 8 numbers, two more for each group."""
    numbers = rows * columns
    return Dispatch({name: numbers // 8 + numbers // 32}, numbers / 2 + TYPE * numbers / 32, "weights")
