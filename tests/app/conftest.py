"""The demo model, loaded once for all tests of the app that run in this process."""

import pytest

from app.options.model import OpenModel, open_model


@pytest.fixture(scope="session")
def opened(demo_folder) -> OpenModel:
    return open_model("demo")
