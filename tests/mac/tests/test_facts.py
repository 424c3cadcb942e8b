"""What is recorded of MLX on macOS holds for the wheel of the installed version."""

import importlib.metadata
import re

import pytest

from tests.mac.facts import NoWheel, differences, fetch
from tests.mac.gpu import FACTS

VERSION = importlib.metadata.version("mlx")


@pytest.fixture(scope="module")
def wheels(user_cache) -> list:
    try:
        return fetch(user_cache / "wheels", VERSION)
    except NoWheel as error:
        pytest.skip(str(error))


def test_the_wheel_is_as_recorded(wheels):
    assert differences(wheels, FACTS) == []


@pytest.mark.parametrize(
    ("planted", "line"),
    [
        ({"device_info": FACTS["device_info"] | {"gpu_cores": 8}}, "the library has no text 'gpu_cores'"),
        ({"device_info_type": "dict[str, int]"}, r"device_info gives dict\[str, str \| int\], recorded is dict"),
        ({"wired_limit_error": "[metal] too much"}, "the library has no text '.metal. too much'"),
    ],
)
def test_a_change_is_noticed(wheels, planted, line):
    (found,) = differences(wheels, FACTS | planted)
    assert re.match(line, found), found


def test_the_stand_in_has_the_keys_and_types_that_are_recorded():
    info = FACTS["device_info"]
    assert len(info) == 6 and {type(value) for value in info.values()} == {str, int}
    assert VERSION.split(".")[:2] == FACTS["mlx"].split(".")[:2], (
        "look at the new MLX: python -m tests.mac.facts FOLDER"
    )


def test_without_the_wheel_the_reason_is_told(tmp_path):
    with pytest.raises(NoWheel, match="no wheel of MLX 0.0.1 for macOS: "):
        fetch(tmp_path, "0.0.1")
