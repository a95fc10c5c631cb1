import itertools

import pytest
from harness import Run, write_data, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "prepared")


@pytest.fixture
def make_run(tmp_path, model, data):
    """Runs that are killed, whatever happens, when the test ends."""
    runs, numbers = [], itertools.count()

    def make(name: str | None = None, **options) -> Run:
        run = Run(tmp_path, name or f"run-{next(numbers)}", model, data, **options)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, model, data):
    """The final weights of a run to which nothing happened."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), "run", model, data)
    run.start()
    try:
        run.wait_finished()
        run.assert_exactly_once()
        run.assert_nothing_left()
        return run.final_weights()
    finally:
        run.close()
