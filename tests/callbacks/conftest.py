"""Fixtures of the tests of compiling."""

from __future__ import annotations

import pytest
from compiling import forget_compiled_code, listen


@pytest.fixture
def no_compiled_code() -> None:
    forget_compiled_code()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    return listen(caplog)
