"""Fixtures that several rooms' tests share."""

import pytest
import torch

from models.target import Target, load_target


@pytest.fixture(scope="session")
def tiny() -> Target:
    """The bundled target."""
    return load_target("tiny", device="cpu")


@pytest.fixture(autouse=True)
def _global_random_state_is_left_alone():
    """Tests that seed torch must not change what the next one sees."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
