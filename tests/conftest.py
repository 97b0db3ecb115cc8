"""Fixtures that several rooms' tests share."""

import pytest
import torch

from models.target import Target, load_target


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share what is costly to make go to one process: a drafter's in contract/, a file's elsewhere."""
    for item in items:
        drafter = getattr(item, "callspec", None) and item.callspec.params.get("options")
        item.add_marker(pytest.mark.xdist_group(drafter or item.path.stem))


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
