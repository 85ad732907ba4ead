from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_perf._float32_precision import MATMUL_PRECISIONS
from lightning_perf._knobs import KNOBS, knobs, read_knobs

has_tree = hasattr(torch._C, "_set_fp32_precision_setter")
needs_tree = pytest.mark.skipif(not has_tree, reason="torch has the old precision switch only")


def old(word: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(word)


def new(backend: str, op: str, value: str) -> Callable[[], None]:
    return lambda: torch._C._set_fp32_precision_setter(backend, op, value)


def allow_tf32(value: bool) -> Callable[[], None]:
    def set_it() -> None:
        torch.backends.cuda.matmul.allow_tf32 = value

    return set_it


# What a user or a library may have done before, with either family of switches.
SETTINGS = {
    **{f"old={word}": old(word) for word in MATMUL_PRECISIONS},
    "allow_tf32": allow_tf32(True),
    "no_tf32": allow_tf32(False),
}
if has_tree:
    for node in (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), ("mkldnn", "matmul")):
        for value in ("ieee", "tf32", "bf16"):
            if (node[0], value) != ("cuda", "bf16"):
                SETTINGS[f"{'.'.join(node)}={value}"] = new(*node, value)
    SETTINGS |= {f"cuda.matmul={v}": new("cuda", "matmul", v) for v in ("ieee", "tf32")}


def old_getters() -> list[object]:
    """What the old getters answer, errors included."""
    answers: list[object] = []
    for getter in (torch.get_float32_matmul_precision, torch._C._get_cublas_allow_tf32):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers.append(getter())
        except RuntimeError:
            answers.append("raises")
    return answers


def hidden_word() -> object:
    """The old setting even where its getter raises; leaves the tree changed."""
    if has_tree:
        for node in (("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")):
            new(*node, "ieee")()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.get_float32_matmul_precision()


def reset_precision() -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("highest")
    if has_tree:
        for node in ("generic", "all"), ("cuda", "all"), ("mkldnn", "all"):
            new(*node, "none")()
        new("cuda", "matmul", "none")()
        new("mkldnn", "matmul", "none")()
    tree: dict[str, str] = read_knobs()["fp32_precision"]
    return tree


@pytest.fixture
def untouched_precision() -> Iterator[None]:
    yield
    reset_precision()


@pytest.mark.usefixtures("untouched_precision")
@pytest.mark.parametrize("first", SETTINGS)
def test_matmul_precision_is_exact_whatever_was_set_before(first: str) -> None:
    for second in SETTINGS:
        untouched = reset_precision()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SETTINGS[first]()
            SETTINGS[second]()
        getters, seen = old_getters(), read_knobs()
        assert seen["fp32_precision"].keys() == untouched.keys()

        for word in MATMUL_PRECISIONS:
            with knobs(matmul_precision=word):
                assert KNOBS["matmul_precision"].read() == word
                # The two families are never made to contradict each other.
                assert "raises" in getters or "raises" not in old_getters()
            assert old_getters() == getters, second
            assert read_knobs() == seen, second

        word_after = hidden_word()
        reset_precision()
        SETTINGS[first]()
        SETTINGS[second]()
        assert word_after == hidden_word(), second


@needs_tree
@pytest.mark.usefixtures("untouched_precision")
def test_leaves_that_asked_their_parent_do_so_again() -> None:
    with knobs(matmul_precision="high"):
        pass

    torch.backends.fp32_precision = "tf32"

    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@needs_tree
def test_convolution_settings_of_either_family_do_not_disturb() -> None:
    """In a process of its own: the initial convolution setting cannot be put back."""
    script = """
        import warnings
        import torch
        from lightning_perf._knobs import knobs, read_knobs

        def conv():
            return [torch._C._get_fp32_precision_getter(b, o)
                    for b in ("cuda", "mkldnn") for o in ("conv", "rnn")]

        warnings.simplefilter("error")
        initial = conv()
        for prepare in (
            lambda: None,
            lambda: torch._C._set_cudnn_allow_tf32(False),
            lambda: torch._C._set_fp32_precision_setter("cuda", "conv", "ieee"),
            lambda: torch._C._set_fp32_precision_setter("mkldnn", "conv", "bf16"),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                prepare()
            before, conv_before = read_knobs(), conv()
            with knobs(matmul_precision="medium"):
                assert conv() == conv_before
            assert (read_knobs(), conv()) == (before, conv_before)
        assert conv() != initial
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)


def test_matmul_precision_where_only_the_old_switch_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with knobs(matmul_precision="highest"):  # so that the old setter's traces in the tree go, too
        if has_tree:
            monkeypatch.delattr(torch._C, "_set_fp32_precision_setter")
        assert read_knobs()["fp32_precision"] == {}
        with knobs(matmul_precision="high"):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "highest"
        monkeypatch.undo()


def test_deprecation_warnings_of_the_old_switch_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def noisy(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            warnings.warn("Please use the new API settings", UserWarning, stacklevel=2)
            return function(*args)

        return call

    for name in ("get_float32_matmul_precision", "set_float32_matmul_precision"):
        monkeypatch.setattr(torch, name, noisy(getattr(torch, name)))

    with knobs(matmul_precision="high"):
        read_knobs()
