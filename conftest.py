"""One setting for all tests and doctests: the same examples on every run, a seed for each, no clock in any verdict."""

import gc
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.alone import alone, seed

# adapters have no doctests, and to import their frameworks takes seconds of each worker
collect_ignore = ["src/secateur/integrations"]
if importlib.util.find_spec("ultralytics") is None:  # it has an environment of its own, make detectors
    collect_ignore.append("tests/wild/detectors.py")

settings.register_profile(
    "steady",
    derandomize=True,
    max_examples=50,
    deadline=None,
    # a fixture may be the same for all examples of a test
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    with alone(request.node.name):  # without its file, which may move
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """A fixture of many tests is made by whichever of them comes first, before that one is seeded."""
    if fixturedef.scope != "function":
        seed(f"{fixturedef.argname} {getattr(request, 'param_index', '')}")
    return (yield)


def pytest_collection_finish() -> None:
    """What is loaded by now is no garbage: to look through it again and again takes a tenth of the run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Modules draw as well, for the parameters of their tests."""
    seed(collector.name)
    return (yield)
