"""The suite's marks at work: what is skipped and what may fail depends on who answers."""

from __future__ import annotations

import pytest

from tests.server.live import Target


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "helios_only(reason): not asked of other servers")
    config.addinivalue_line("markers", "vllm_bug(reason): expected to fail when vLLM answers")


@pytest.fixture(autouse=True)
def _who_answers(request: pytest.FixtureRequest, target: Target) -> None:
    ours = request.node.get_closest_marker("helios_only")
    if ours is not None and target.foreign:
        pytest.skip(f"only Helios: {ours.args[0]}")
    theirs = request.node.get_closest_marker("vllm_bug")
    if theirs is not None and target.owner == "vllm":
        request.node.add_marker(pytest.mark.xfail(reason=theirs.args[0], strict=False))


@pytest.fixture
def known_model(target: Target) -> Target:
    """The server, if it serves SmolLM2, whose token ids these tests know."""
    if not target.smollm2:
        pytest.skip("the served model is not SmolLM2")
    return target
