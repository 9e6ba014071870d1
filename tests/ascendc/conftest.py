import pytest
from ascendc.driver import Driver


@pytest.fixture(scope="session")
def driver():
    """One instruction of the twin at a time."""
    return Driver()
