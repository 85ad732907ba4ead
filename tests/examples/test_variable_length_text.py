"""The peak memory and the padding of text of variable length, in three ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest

SCRIPT = "variable_length_text.py"


@pytest.mark.slow
def test_the_peak_is_reached_in_the_first_step_with_preallocate(
    run_example: Callable[..., str],
) -> None:
    output = run_example(SCRIPT, "--steps=15")
    head, plain, preallocated, budget = output.splitlines()
    assert "reached in" in head
    assert plain.split()[0] == "plain"
    assert "step 1 " not in plain
    assert preallocated.split()[0] == "Preallocate"
    assert "step 1 " in preallocated
    assert budget.startswith("token budget")
    assert "step 1 " in budget
    plain_share, _, budget_share = (
        int(line.split()[-1].rstrip("%")) for line in (plain, preallocated, budget)
    )
    assert budget_share < plain_share / 2


def test_help_says_what_is_compared(help_of: Callable[[str], str]) -> None:
    output = help_of(SCRIPT)
    assert f"python examples/{SCRIPT}" in output
    assert "--picture" in output
