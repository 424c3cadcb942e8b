"""The table of bandwidths, and chips whose bandwidth depends on their GPU cores."""

import subprocess

import pytest

from app.machine import apple_chips
from app.machine.apple_chips import bandwidth, gpu_cores


@pytest.mark.parametrize(
    ("chip", "cores", "expected"),
    [
        ("Apple M1", None, 68.25),
        ("Apple M2 Pro", 16, 200),
        ("Apple M2 Ultra", None, 800),
        ("Apple M3 Max", 30, 300),
        ("Apple M3 Max", 40, 400),
        ("Apple M4 Max", 32, 410),
        ("Apple M4 Max", 40, 546),
        ("Apple M4 Max", 8, None),
        ("Apple M99", 10, None),
        ("Intel(R) Xeon(R) Processor", None, None),
        ("", None, None),
    ],
)
def test_bandwidth(chip, cores, expected) -> None:
    assert bandwidth(chip, cores) == expected


def test_the_system_is_asked_only_where_the_name_does_not_tell(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(apple_chips, "gpu_cores", lambda: asked.append(1) or 40)
    assert bandwidth("Apple M4 Pro") == 273
    assert not asked
    assert bandwidth("Apple M4 Max") == 546
    assert asked
    monkeypatch.setattr(apple_chips, "gpu_cores", lambda: None)
    assert bandwidth("Apple M4 Max") is None


@pytest.mark.parametrize(
    ("said", "cores"),
    [
        ('{"SPDisplaysDataType": [{"_name": "x"}, {"sppci_cores": "38"}]}', 38),
        ('{"SPDisplaysDataType": []}', None),
        ('{"SPDisplaysDataType": [{"sppci_cores": "many"}]}', None),
        ("{}", None),
        ("no JSON", None),
    ],
)
def test_cores_as_macos_tells_them(monkeypatch, said, cores) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=said.encode())
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert gpu_cores() == cores


def test_no_such_program(monkeypatch) -> None:
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert gpu_cores() is None
