"""Shared set-up: kernels are interpreted unless the run is meant for a GPU."""

import os
from collections.abc import Generator
from typing import Any

import pytest

pytest_plugins = ["pytester"]
if os.environ.get("SPECMORTEM_TEST_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture
def interpreted() -> None:
    """Skips where this run compiles its kernels for a GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for a GPU in this run; bounds are checked in the interpreter")


@pytest.fixture(scope="session")
def package_index() -> None:
    """Skips where no package index answers; in CI that is a failure."""
    import requests

    from specmortem.errors import UnavailableError
    from specmortem.upstream import index

    try:
        with index.session() as session:
            session.get(f"{index.endpoint()}/pip/", timeout=20, stream=True).close()
    except (UnavailableError, requests.ConnectionError, requests.Timeout) as error:
        pytest.skip(f"no package index: {index.redacted(error)}")


@pytest.fixture(autouse=True, scope="module")
def supervisors_kept() -> None:
    """A supervisor takes two seconds to start: where that is not the subject, one serves a whole file of tests."""
    from specmortem import isolation

    isolation.keep_supervisors()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Pytest names the test in the environment, which would be another one for each; see `supervisors_kept`."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """As `pytest_fixture_setup`."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that execute notebooks come first: begun last, one of them would keep a single worker busy to the end."""
    slow = {item.path for item in items if item.get_closest_marker("notebook")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, each file goes to one worker, in the order given, so that what a module sets up is set up once."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With SPECMORTEM_REQUIRE_INDEX, as in CI, a test that finds no package index fails instead of being skipped."""
    report = yield
    if os.environ.get("SPECMORTEM_REQUIRE_INDEX") and report.skipped and item.get_closest_marker("network"):
        report.outcome = "failed"
    return report
