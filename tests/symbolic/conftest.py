"""The network of ``kit/digits.py`` and its data."""

import pytest
from kit import digits as kit


@pytest.fixture(scope="session")
def digits():
    return kit.Digits()


@pytest.fixture
def net():
    return kit.seeded()


@pytest.fixture
def symbol():
    return kit.symbol()
