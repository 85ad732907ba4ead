"""Options, and the launch halves of presets."""

from pathlib import Path

import pytest
import yaml

from lightning_perf import presets
from lightning_perf.launch.options import (
    Options,
    launch_file,
    launch_half,
    read_launch_section,
)

HALVES = sorted(
    path.name.removesuffix(".launch.yaml")
    for path in launch_file("cpu").parent.glob("*.launch.yaml")
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"allocator": "malloc"},
            "allocator='malloc' was asked for; it is one of auto, glibc, jem",
        ),
        ({"openmp": "llvm"}, "openmp='llvm' was asked for; it is one of auto, gnu, intel"),
        ({"threads": "4"}, "threads='4' was asked for; it is one of auto, none"),
        ({"numa": "die"}, "numa='die' was asked for; it is one of auto, none, gpu, socket"),
        ({"numa": "0,x"}, "or a list of NUMA nodes"),
        ({"instances": 0}, "instances=0 was asked for; it is 1 or more"),
        ({"interop_threads": -1}, "interop_threads=-1 was asked for"),
    ],
)
def test_values_that_mean_nothing_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**wrong)


def test_numa_may_be_a_list_of_nodes() -> None:
    assert Options(numa="0,2-3").nodes == {0, 2, 3}
    assert Options(numa="node").nodes == frozenset()


def test_the_user_wins_and_what_he_names_is_required() -> None:
    half = Options(allocator="jemalloc", env={"A": "1", "B": "1"})
    both = half.overridden({"allocator": "tcmalloc", "named_env": {"B": "2"}})
    assert both.allocator == "tcmalloc"
    assert (both.env, both.named_env) == ({"A": "1", "B": "1"}, {"B": "2"})
    assert both.required == {"allocator", "named_env"}
    assert half.overridden({}) == half


def test_the_presets_that_have_a_launch_half() -> None:
    assert set(HALVES) >= {"cpu", "cpu_bf16", "cpu_ddp", "cuda_bf16"}
    assert set(HALVES) - {"cpu_ddp"} <= set(presets.names())
    assert launch_half("mps") is None


@pytest.mark.parametrize("name", HALVES)
def test_launch_halves_are_read_and_name_their_preset(name: str) -> None:
    assert isinstance(launch_half(name), Options)
    assert f"--preset {name}`" in launch_file(name).read_text("utf-8").partition("\n")[0]


@pytest.mark.parametrize("name", HALVES)
def test_each_line_has_its_reason_and_says_whether_it_was_measured(name: str) -> None:
    text = launch_file(name).read_text("utf-8")
    comment: list[str] = []
    seen = set()
    for line in text.partition("launch:\n")[2].splitlines():
        if line.strip().startswith("#"):
            comment.append(line.strip(" #"))
            continue
        key = line.partition(":")[0].strip()
        if key != "env":
            reason = " ".join(comment)
            assert ("nmeasured" in reason) != ("docs/results/" in reason), line
            seen.add(key)
            comment = []
    section = yaml.safe_load(text)["launch"]
    assert seen == (section.keys() - {"env"}) | section.get("env", {}).keys()


def test_a_section_with_other_keys_is_refused() -> None:
    for text in (
        "launch: {allocater: auto}",
        "trainer: {}",
        "launch:",
        "- 1",
        "launch: {required: x}",
    ):
        with pytest.raises(ValueError, match="has a section `launch` with any of instances, alloc"):
            read_launch_section(text)


def test_numbers_in_yaml_become_text() -> None:
    options = read_launch_section("launch: {numa: 0, env: {NCCL_NSOCKS_PERTHREAD: 4}}")
    assert options.nodes == {0}
    assert options.env == {"NCCL_NSOCKS_PERTHREAD": "4"}


def test_the_files_are_part_of_the_package() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    assert 'package-data."lightning_perf.presets" = ["*.yaml"]' in pyproject
