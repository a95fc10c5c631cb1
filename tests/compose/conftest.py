import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "process")]
from engine import Unavailable, base_image, compose_command, engine


@pytest.fixture(scope="session")
def docker():
    """A running engine with the base image in it."""
    try:
        compose_command()
        with engine():
            base_image()
            yield
    except Unavailable as reason:
        pytest.skip(str(reason))
