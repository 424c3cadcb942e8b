"""Memory with a stand-in for Metal: free memory, and the wired limit while models are loaded."""

import gc
import subprocess
import sys

import pytest

from mlx_llama3.system import memory
from mlx_llama3.system.memory import Wiring

import mlx.core as mx


class Model:
    pass


@pytest.fixture
def limits(monkeypatch) -> list[int]:
    """The wired limits of a Mac, in order: the initial one, then each that is set."""
    limits = [7]

    def set_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"max_recommended_working_set_size": 1000.0})
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    return limits


def test_the_recommended_working_set_as_long_as_there_are_models(limits) -> None:
    wiring = Wiring()
    first, second = Model(), Model()
    wiring.hold(first)
    wiring.hold(second)
    assert limits == [7, 1000]
    del first
    gc.collect()
    assert limits == [7, 1000]
    del second
    gc.collect()
    assert limits == [7, 1000, 7]
    third = Model()
    wiring.hold(third)
    del third
    gc.collect()
    assert limits == [7, 1000, 7, 1000, 7]


def test_it_is_put_back_at_exit() -> None:
    script = (
        "import mlx_llama3, mlx.core as mx; from mlx_llama3.system.memory import hold_wired\n"
        "mx.metal.is_available = lambda: True\n"
        "mx.device_info = lambda device: {'max_recommended_working_set_size': 1000}\n"
        "mx.set_wired_limit = lambda limit: print(limit, flush=True) or 7\n"
        "class Model: pass\n"
        "model = Model(); hold_wired(model); print('running', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1000", "running", "7"]


def test_without_metal_nothing_is_set(monkeypatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: pytest.fail("it was set"))
    model = Model()
    Wiring().hold(model)
    del model
    gc.collect()


def test_on_a_mac_the_weights_are_not_free(monkeypatch) -> None:
    def working_set(device: mx.Device | None = None) -> dict:
        """The GPU has one; the default device may be the CPU, which has none."""
        return {"max_recommended_working_set_size": 10**9} if device == mx.gpu else {"device_name": "M9"}

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", working_set)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 4 * 10**8)
    assert memory.free_memory() == 6 * 10**8
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 * 10**9)
    assert memory.free_memory() == 0
