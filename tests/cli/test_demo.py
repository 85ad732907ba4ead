from __future__ import annotations

import dataclasses
import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from benchmark.results import result
from lightning.pytorch import Trainer

from lightning_perf import presets
from lightning_perf._hardware import Hardware, detect
from lightning_perf.benchmark import VariantFailed
from lightning_perf.benchmark.demo_task import DigitClassifier, Digits
from lightning_perf.benchmark.task import load_task
from lightning_perf.cli import demo
from lightning_perf.cli.__main__ import main

FILES = [
    *("losses.png", "ratios.png", "report.html", "report.json", "row.md", "step_times.png"),
    "train.yaml",
]


class FakeCompare:
    """Returns a ready result, and remembers what was asked."""

    def __init__(self) -> None:
        self.changes: dict[str, Any] = {}
        self.error: BaseException | None = None

    def __call__(self, task: Path, a: str, b: str, **options: Any) -> Any:
        self.task, self.a, self.b, self.options = task, a, b, options
        self.config = yaml.safe_load(task.read_text())
        if self.error is not None:
            raise self.error
        return result(**{"b": b} | self.changes)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> FakeCompare:
    fake = FakeCompare()
    monkeypatch.setattr("lightning_perf.benchmark.compare", fake)
    return fake


def built(entry: dict[str, Any]) -> Any:
    module, _, name = entry["class_path"].rpartition(".")
    return getattr(import_module(module), name)(**entry.get("init_args", {}))


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_demo_writes_report_pictures_and_preset(
    compare: FakeCompare, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo"]) == 0
    preset = presets.resolve("auto")
    assert names("lightning_perf_demo") == sorted([*FILES, f"{preset}.yaml"])
    report = json.loads(Path("lightning_perf_demo/report.json").read_text())
    assert report["speedup"] == 1.25
    copy = Path(f"lightning_perf_demo/{preset}.yaml").read_text()
    assert copy == presets.path(preset).read_text()
    printed = capsys.readouterr().out
    for expected in (
        "ResNet-18 on handwritten digits",
        f"preset {preset}",
        "1.250x faster",
        "val accuracy",
        "Written to lightning_perf_demo",
        f"--config {preset}.yaml",
        "lightning-perf bench --config train.py:make",
    ):
        assert expected in printed


def test_demo_compares_plain_lightning_with_the_preset_in_quick_mode(compare: FakeCompare) -> None:
    main(["demo", "--budget", "90", "--steps", "7"])
    assert (compare.a, compare.b) == ("none", presets.resolve("auto"))
    assert compare.options["quick"]
    assert compare.options["validate"]
    assert compare.options["budget_s"] == 90
    assert compare.options["learning_steps"] == 7


def test_the_task_it_writes_trains_the_network_asked_for(compare: FakeCompare) -> None:
    main(["demo", "--quick-check", "--image-size", "24"])
    assert compare.options["budget_s"] < 30
    assert compare.options["learning_steps"] < 10
    module, data = (built(compare.config[part]) for part in ("model", "data"))
    assert isinstance(module, DigitClassifier)
    assert isinstance(data, Digits)
    assert data.image_size == 24
    assert compare.config["trainer"] == {"devices": 1}
    assert load_task("lightning_perf_demo/train.yaml").function is None


def test_a_folder_that_is_taken_is_left_alone(compare: FakeCompare) -> None:
    Path("mine").mkdir()
    Path("mine/report.json").write_text("precious")
    assert main(["demo", "--output", "mine"]) == 0
    assert main(["demo", "--output", "mine"]) == 0
    assert Path("mine/report.json").read_text() == "precious"
    assert names("mine") == ["report.json"]
    assert set(FILES) < set(names("mine_2"))
    assert set(FILES) < set(names("mine_3"))


def test_overwrite_replaces_the_files(compare: FakeCompare) -> None:
    Path("mine").mkdir()
    Path("mine/report.json").write_text("old")
    Path("mine/notes").write_text("mine")
    assert main(["demo", "--output", "mine", "--overwrite"]) == 0
    assert json.loads(Path("mine/report.json").read_text())["speedup"] == 1.25
    assert Path("mine/notes").read_text() == "mine"
    assert names(".") == ["mine"]


@pytest.mark.parametrize("error", [ValueError("no such thing"), KeyboardInterrupt()])
def test_after_an_error_no_folder_is_left(compare: FakeCompare, error: BaseException) -> None:
    compare.error = error
    assert main(["demo"]) != 0
    assert names(".") == []


def test_a_variant_that_fails_leaves_the_page_that_tells_why(compare: FakeCompare) -> None:
    compare.error = VariantFailed("B: cpu", "training", "no good", "Traceback: line 7")
    assert main(["demo"]) == 2
    assert "Traceback: line 7" in Path("lightning_perf_demo/report.html").read_text()
    assert "report.json" not in names("lightning_perf_demo")


def test_what_was_measured_survives_a_mishap_with_the_page(
    compare: FakeCompare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("lightning_perf.benchmark.page.page", fail)
    assert main(["demo"]) == 2
    report = json.loads(Path("lightning_perf_demo/report.json").read_text())
    assert report["speedup"] == 1.25


@pytest.mark.parametrize(
    ("changes", "status"),
    [({}, 0), ({"losses_agree": None}, 0), ({"losses_agree": False}, 1), ({"speedup": None}, 1)],
)
def test_exit_status_tells_whether_there_is_a_good_answer(
    compare: FakeCompare, changes: dict[str, Any], status: int
) -> None:
    compare.changes = changes
    assert main(["demo"]) == status


@pytest.mark.parametrize(("module", "package"), demo.NEEDED.items())
def test_missing_packages_are_named_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, package: str
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == module else find_spec(name))
    assert main(["demo"]) == 2
    assert f"needs {package}. Run: pip install 'lightning-perf[demo]'" in capsys.readouterr().err
    assert names(".") == []


def test_images_too_small_for_the_network_are_refused(
    compare: FakeCompare, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--image-size", "9"]) == 2
    assert "--image-size 9 is too small for ResNet-18: give at least 20" in capsys.readouterr().err


def test_a_machine_without_a_preset_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(presets, "auto", lambda hardware: ("none", "a GPU from 2014"))
    assert main(["demo"]) == 2
    assert "no preset for this machine, so nothing to show: a GPU" in capsys.readouterr().err


def machine(**changes: Any) -> Hardware:
    cpu = {"device": "cpu", "capability": None, "isa": frozenset({"avx2"})}
    return dataclasses.replace(detect(), **cpu | changes)


def test_a_cpu_without_bfloat16_is_told_to_expect_little() -> None:
    assert "Expect little" in demo.expectation(machine())
    assert "AVX512-BF16 or AMX" in demo.expectation(machine())
    assert "Expect little" not in demo.expectation(machine(isa=frozenset({"amx_bf16"})))
    assert "Expect little" not in demo.expectation(machine(device="cuda", capability=(9, 0)))


def test_a_gpu_gets_larger_images(monkeypatch: pytest.MonkeyPatch, compare: FakeCompare) -> None:
    main(["demo", "--output", "small"])
    on_cpu = compare.config["data"]["init_args"]["image_size"]
    monkeypatch.setattr("lightning_perf._hardware.detect", lambda: machine(device="mps"))
    main(["demo", "--output", "large"])
    assert compare.b == "mps"
    assert compare.config["data"]["init_args"]["image_size"] > on_cpu


def test_the_digits_are_split_once_and_enlarged_on_the_device() -> None:
    data, again = Digits(image_size=20, batch_size=4), Digits()
    data.setup("fit")
    again.setup("fit")
    assert len(data.train) + len(data.val) == 1797
    assert torch.equal(data.val.tensors[0], again.val.tensors[0])
    assert set(data.train.tensors[1].tolist()) == set(range(10))
    images, labels = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    assert images.shape == (4, 3, 20, 20)
    assert images.is_contiguous()
    assert -1 <= images.min() < images.max() <= 1
    assert labels.dtype == torch.int64


def test_the_network_learns_and_is_validated() -> None:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=3,
        val_check_interval=3,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitClassifier(), Digits(image_size=20, batch_size=8))
    assert 0 <= float(trainer.callback_metrics["val_accuracy"]) <= 1


def test_without_scikit_learn_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-perf\[demo\]'"):
        Digits().setup("fit")


@pytest.mark.slow
def test_the_whole_demo_on_small_images(capsys: pytest.CaptureFixture[str]) -> None:
    # On a busy machine there is no number, which is an answer too.
    assert main(["demo", "--quick-check", "--image-size", "24"]) in (0, 1)
    report = json.loads(Path("lightning_perf_demo/report.json").read_text())
    assert report["losses_agree"], report["learning_summary"]
    assert "val accuracy" in capsys.readouterr().out
