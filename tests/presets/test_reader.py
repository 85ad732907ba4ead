"""Names, files, the choice of `auto`, and the merging of a preset with the user's arguments."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, Trainer
from presets.machines import GPUS, HOME, hardware

from lightning_perf import NoEffectWarning, presets
from lightning_perf import callbacks as items
from lightning_perf.presets import Preset

On = Callable[[str], None]
NAMES = sorted(HOME)
ALIASES = {
    "volta": "cuda_fp16",
    "turing": "cuda_fp16",
    "ampere": "cuda_bf16",
    "ada": "cuda_bf16",
    "hopper": "cuda_bf16",
    "blackwell": "cuda_bf16",
}


def trainer_section(name: str) -> dict[str, Any]:
    content = yaml.safe_load(presets.path(name).read_text(encoding="utf-8"))
    assert list(content) == ["trainer"]
    return content["trainer"]


def types(kwargs: dict[str, Any]) -> list[type]:
    return [type(callback) for callback in kwargs["callbacks"]]


class Mine(Callback):
    pass


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """Makes the presets believe they are on some hardware."""

    def pretend(name: str) -> None:
        monkeypatch.setattr("lightning_perf.presets._reader.detect", lambda: hardware(name))

    return pretend


# --- names and files ---


def test_names_are_the_files() -> None:
    assert presets.names() == NAMES


def test_companion_files_are_not_presets(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for file in ("cpu.yaml", "cpu.launch.yaml", "README.md"):
        (tmp_path / file).touch()
    monkeypatch.setattr("lightning_perf.presets._reader.__file__", str(tmp_path / "_reader.py"))
    assert presets.names() == ["cpu"]


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases_are_accepted_everywhere(on: On, alias: str, name: str) -> None:
    on(HOME[name])
    assert presets.resolve(alias) == name
    assert presets.path(alias) == presets.path(name)
    assert presets.metadata(alias) == presets.metadata(name)
    assert alias in presets.metadata(name).aliases
    assert presets.trainer_kwargs(alias)["precision"] == trainer_section(name)["precision"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_for_itself_on_any_hardware(name: str) -> None:
    assert presets.resolve(name, hardware("Mac")) == name


@pytest.mark.parametrize(
    ("call"), [presets.resolve, presets.path, presets.metadata, presets.trainer_kwargs]
)
@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("cpu-bf16", "cpu_bf16"),
        ("hoper", "hopper"),
        ("Auto", "auto"),
        ("CPU", "cpu"),
        ("cuda_bf_16", "cuda_bf16"),
    ],
)
def test_an_unknown_name_lists_the_known_ones_and_the_closest(
    call: Callable[[str], Any], wrong: str, meant: str
) -> None:
    with pytest.raises(ValueError, match=f"no preset {wrong!r}. Did you mean {meant!r}") as error:
        call(wrong)
    for known in [*NAMES, *ALIASES, "auto", "none"]:
        assert known in str(error.value)


def test_a_name_like_no_other_gets_no_guess() -> None:
    with pytest.raises(ValueError, match=r"no preset 'xyzzy'\. Presets: cpu,"):
        presets.resolve("xyzzy")


def test_a_callback_that_is_a_class_is_explained() -> None:
    with pytest.raises(ValueError, match=r"holds the class Threads; write Threads\(\)"):
        presets.trainer_kwargs("cpu", callbacks=[items.Threads])


def test_plain_lightning_has_no_file() -> None:
    with pytest.raises(ValueError, match="plain Lightning"):
        presets.path("none")


# --- what the files say ---


@pytest.mark.parametrize("name", NAMES)
def test_the_first_callback_names_the_preset(name: str) -> None:
    first = trainer_section(name)["callbacks"][0]
    assert first == {"class_path": "lightning_perf.presets.Preset", "init_args": {"name": name}}


@pytest.mark.parametrize("name", NAMES)
def test_items_are_exported_and_quiet(name: str) -> None:
    for entry in trainer_section(name)["callbacks"][1:]:
        module, _, item = entry["class_path"].rpartition(".")
        assert module == "lightning_perf.callbacks"
        assert item in items.__all__
        assert entry["init_args"]["strict"] is False


def reasons(name: str) -> dict[str, str]:
    """Returns the comment above each setting of a preset."""
    found, comment = {}, []
    for line in presets.path(name).read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("#"):
            comment.append(line.strip(" #"))
        elif line.startswith(
            ("  accelerator:", "  precision:", "  strategy:", "    - class_path:")
        ):
            found[line.strip(" -").removeprefix("class_path: ")] = " ".join(comment)
            comment = []
        elif not line.startswith("  callbacks:"):
            comment = []
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_line_has_its_reason_and_says_whether_it_was_measured(name: str) -> None:
    found, section = reasons(name), trainer_section(name)
    assert len(found) == len(section) - 1 + len(section["callbacks"])
    for line, reason in found.items():
        assert reason, line
        if line.startswith(("precision", "lightning_perf.callbacks")):
            assert ("nmeasured" in reason) != ("docs/results/" in reason), line


@pytest.mark.parametrize("name", NAMES)
def test_what_changes_learning_says_so(name: str) -> None:
    text = presets.path(name).read_text(encoding="utf-8")
    assert ("precision" in trainer_section(name)) == (
        "changes what is learned"
        in text.replace("Nothing in this file changes what is learned", "")
    )


@pytest.mark.parametrize("name", NAMES)
def test_metadata(name: str) -> None:
    about = presets.metadata(name)
    assert about.description
    assert about.hardware
    assert set(about.aliases) == {alias for alias, preset in ALIASES.items() if preset == name}
    assert about.measured is None or "docs/results/" in about.measured


@pytest.mark.parametrize("name", ["cuda_bf16", "cuda_ddp", "cuda_fp16", "mps"])
def test_nobody_has_measured_the_gpu_presets(name: str) -> None:
    assert presets.metadata(name).measured is None


# --- auto ---


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        ("old CPU", "cpu"),
        ("new CPU", "cpu_bf16"),
        ("V100", "cuda_fp16"),
        ("T4", "cuda_fp16"),
        ("A100", "cuda_bf16"),
        ("RTX 4090", "cuda_bf16"),
        ("H100", "cuda_bf16"),
        ("B200", "cuda_bf16"),
        ("Mac", "mps"),
        ("P100", "none"),
    ],
)
def test_auto(on: On, machine: str, name: str) -> None:
    chosen, reason = presets.auto(hardware(machine))
    assert chosen == name
    assert machine in reason
    assert presets.resolve("auto", hardware(machine)) == name
    on(machine)
    assert presets.resolve("auto") == name
    if name != "none":
        assert presets.path("auto") == presets.path(name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert presets.trainer_kwargs("auto")["callbacks"][0].name == name


def test_auto_on_a_gpu_without_tensor_cores_leaves_lightning_plain(on: On) -> None:
    on("P100")
    with pytest.warns(NoEffectWarning, match=r"P100, compute capability 6\.0; .* need 7\.0"):
        assert presets.trainer_kwargs("auto", max_epochs=1) == {"max_epochs": 1}


# --- hardware that is not there ---


@pytest.mark.parametrize("machine", ["old CPU", "Mac"])
@pytest.mark.parametrize("name", ["cuda_bf16", "cuda_fp16", "hopper"])
def test_a_cuda_preset_without_cuda(on: On, machine: str, name: str) -> None:
    on(machine)
    device = hardware(machine).device
    with pytest.raises(RuntimeError, match=f"needs .*'cuda'; found {device} .*{machine}.* 'auto'"):
        presets.trainer_kwargs(name)


def test_the_mps_preset_on_a_pc(on: On) -> None:
    on("H100")
    with pytest.raises(RuntimeError, match=r"'mps'; found cuda \(H100\) \(compute capability 9.0"):
        presets.trainer_kwargs("mps")


@pytest.mark.parametrize(
    ("name", "machine", "found"),
    [
        ("cpu_bf16", "old CPU", "old CPU"),
        ("cpu_bf16", "H100", "host CPU"),  # the GPU's bfloat16 is of no use to the CPU
        ("cuda_bf16", "T4", r"compute capability 7\.5"),
    ],
)
def test_emulated_bf16_is_said(on: On, name: str, machine: str, found: str) -> None:
    on(machine)
    with pytest.warns(NoEffectWarning, match=f"{found}.* emulated and slower .*'auto'") as said:
        kwargs = presets.trainer_kwargs(name)
    assert [warning.filename for warning in said] == [__file__]
    assert kwargs["precision"] == "bf16-mixed"


@pytest.mark.parametrize("machine", [*GPUS, "Mac", "new CPU"])
def test_the_cpu_preset_runs_anywhere(on: On, machine: str) -> None:
    on(machine)
    assert presets.trainer_kwargs("cpu")["accelerator"] == "cpu"


def test_what_the_user_overrides_is_not_checked(on: On) -> None:
    on("old CPU")
    presets.trainer_kwargs("cuda_bf16", accelerator="cpu", precision="32-true")
    presets.trainer_kwargs("cpu_bf16", precision="32-true")


# --- merging ---


@pytest.mark.parametrize("name", [None, "none"])
def test_no_preset_is_just_the_overrides(name: str | None) -> None:
    assert presets.trainer_kwargs(name) == {}
    mine = Mine()
    assert presets.trainer_kwargs(name, callbacks=[mine], max_steps=3) == {
        "callbacks": [mine],
        "max_steps": 3,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_gives_the_arguments_of_a_trainer(on: On, name: str) -> None:
    on(HOME[name])
    kwargs, section = presets.trainer_kwargs(name), trainer_section(name)
    built = ("callbacks", "strategy")
    assert {k: v for k, v in kwargs.items() if k not in built} == {
        k: v for k, v in section.items() if k not in built
    }
    if "strategy" in section:
        assert kwargs["strategy"].__class__.__name__ in section["strategy"]["class_path"]
    assert [callback.__class__.__name__ for callback in kwargs["callbacks"]] == [
        entry["class_path"].rpartition(".")[2] for entry in section["callbacks"]
    ]
    Trainer(**{**kwargs, "accelerator": "cpu", "precision": "32-true"}, logger=False)


def test_overrides_win(on: On) -> None:
    on("new CPU")
    kwargs = presets.trainer_kwargs("cpu_bf16", precision="64-true", max_epochs=7)
    assert kwargs["precision"] == "64-true"
    assert kwargs["max_epochs"] == 7
    assert kwargs["accelerator"] == "cpu"


def test_each_call_builds_new_callbacks() -> None:
    first, second = presets.trainer_kwargs("cpu"), presets.trainer_kwargs("cpu")
    assert not {id(c) for c in first["callbacks"]} & {id(c) for c in second["callbacks"]}


@pytest.mark.parametrize("form", [lambda c: c, lambda c: [c], lambda c: (c,)])
def test_the_users_callbacks_are_added(form: Callable[[Callback], Any]) -> None:
    mine = Mine()
    kwargs = presets.trainer_kwargs("cpu", callbacks=form(mine))
    assert types(kwargs) == [*types(presets.trainer_kwargs("cpu")), Mine]
    assert kwargs["callbacks"][-1] is mine


def test_the_users_list_is_left_alone() -> None:
    own = [Mine()]
    presets.trainer_kwargs("cpu", callbacks=own)
    assert types({"callbacks": own}) == [Mine]


@pytest.mark.parametrize("subclass", [False, True])
def test_the_users_item_replaces_that_of_the_preset(subclass: bool) -> None:
    cls = type("MyThreads", (items.Threads,), {}) if subclass else items.Threads
    mine = cls(intra_op=1)
    kwargs = presets.trainer_kwargs("cpu", callbacks=[mine])
    threads = [c for c in kwargs["callbacks"] if isinstance(c, items.Threads)]
    assert threads == [mine]
    assert len(kwargs["callbacks"]) == len(presets.trainer_kwargs("cpu")["callbacks"])


def test_no_callbacks_drops_the_items_only(on: On) -> None:
    on("new CPU")
    kwargs = presets.trainer_kwargs("cpu_bf16", callbacks=None)
    assert kwargs == {"accelerator": "cpu", "precision": "bf16-mixed", "callbacks": None}


def test_an_empty_list_adds_nothing() -> None:
    assert types(presets.trainer_kwargs("cpu", callbacks=[])) == types(
        presets.trainer_kwargs("cpu")
    )


# --- the marker, and the cost of importing ---


def test_preset_marker() -> None:
    marker = Preset("cpu")
    assert marker.name == "cpu"
    assert repr(marker) == "Preset('cpu')"


def test_names_and_files_are_read_without_lightning_and_torch() -> None:
    code = (
        "import sys; from lightning_perf import presets\n"
        "presets.names(); presets.path('ada'); presets.metadata('cpu')\n"
        "assert not {'torch', 'lightning'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Presett'"):
        presets.Presett  # noqa: B018
