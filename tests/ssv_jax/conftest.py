"""What the tests of the library share."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_programs):
    """All models here are tiny."""


@pytest.fixture
def cache_home(tmp_path_factory, monkeypatch):
    """Compiled code of tests stays out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    jax.config.update("jax_compilation_cache_dir", None)
