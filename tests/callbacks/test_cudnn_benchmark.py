from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from models import Classifier, LateClassifier, images, mlp, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_perf._item import statuses
from lightning_perf._knobs import knobs, read_knobs
from lightning_perf.callbacks import CudnnBenchmark
from lightning_perf.callbacks import cudnn_benchmark as stem
from lightning_perf.callbacks.cudnn_benchmark import (
    ShapeCensus,
    convolution_ranks,
    cudnn_benchmark,
    signature,
)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the run is on a CUDA device: the switch is a plain flag anywhere."""
    monkeypatch.setattr(stem, "device_kind", lambda trainer: "cuda")


class Observe(Callback):
    """Notes the switch at each training step."""

    def __init__(self) -> None:
        self.on: list[bool] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.on.append(torch.backends.cudnn.benchmark)


def batches(widths: Iterable[int]) -> DataLoader[Any]:
    """One batch of two images per width."""
    data = [(torch.randn(2, 3, 8, width), torch.tensor([0, 1])) for width in widths]
    return DataLoader(data, batch_size=None)


def run_with(widths: Iterable[int]) -> tuple[list[bool], Any]:
    run = trainer(callbacks=[CudnnBenchmark(), observe := Observe()])
    run.fit(Classifier(), batches(widths))
    return observe.on, run


def decisions(shapes: Iterable[int], **limits: int) -> list[bool]:
    census = ShapeCensus(**limits)
    answers = []
    for shape in shapes:
        before = census.on
        assert census.add(((2, 3, shape, shape),)) == (census.on != before)
        answers.append(census.on)
    return answers


def test_the_census_decides_after_ten_batches_of_few_shapes() -> None:
    assert decisions([8] * 12) == [False] * 9 + [True] * 3
    assert decisions([8, 9, 10, 11] * 3) == [False] * 9 + [True] * 3


def test_the_census_stays_with_no_when_shapes_vary() -> None:
    assert not any(decisions(range(50)))
    assert not any(decisions([1, 2, 3, 4, 5] * 10))


def test_the_census_withdraws_when_new_shapes_keep_coming_and_not_before() -> None:
    assert decisions([8] * 10 + list(range(9, 16)) * 3)[9:] == [True] * 22
    answers = decisions([8] * 10 + list(range(9, 30)))
    assert answers[9:17] == [True] * 8
    assert not any(answers[17:])


def test_limits_are_arguments() -> None:
    assert decisions([1, 1, 2, 3], batches=2, few=1, most=2) == [False, True, True, False]


@pytest.mark.usefixtures("on_cuda")
def test_it_is_on_from_the_tenth_batch_and_off_after_the_run() -> None:
    before = read_knobs()

    on, run = run_with([8] * 14)

    assert on == [False] * 9 + [True] * 5
    assert read_knobs() == before
    assert statuses(run)[0].active


@pytest.mark.usefixtures("on_cuda")
def test_it_stays_off_when_shapes_vary_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        on, _ = run_with(range(8, 24))

    assert not any(on)
    assert "stays off: 10 distinct input shapes in the first 10 batches" in caplog.text
    assert caplog.text.count("CudnnBenchmark: ") == 1


@pytest.mark.usefixtures("on_cuda")
def test_it_goes_off_again_when_new_shapes_keep_coming(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        on, _ = run_with([8] * 10 + list(range(9, 24)))

    assert on[9:17] == [True] * 8
    assert not any(on[17:])
    assert caplog.text.count("off again: 9 distinct input shapes in 18 batches") == 1
    assert torch.backends.cudnn.benchmark is False


def test_the_function_works_without_a_trainer() -> None:
    said: list[str] = []
    before = read_knobs()
    with cudnn_benchmark(nn.Conv2d(3, 8, 3), say=said.append) as watch:
        on = []
        for batch in batches([8] * 12 + list(range(9, 24))):
            assert watch(batch) is batch
            on.append(torch.backends.cudnn.benchmark)
    assert on == [False] * 9 + [True] * 10 + [False] * 8
    assert [line.partition(":")[0] for line in said] == ["off again"]
    assert read_knobs() == before


@pytest.mark.usefixtures("on_cuda")
def test_it_is_put_back_after_an_error_in_a_step() -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 12:
                assert torch.backends.cudnn.benchmark
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError):
        trainer(callbacks=[CudnnBenchmark()]).fit(Failing(), batches([8] * 14))

    assert torch.backends.cudnn.benchmark is False


@pytest.mark.usefixtures("on_cuda")
def test_layers_made_in_configure_model_are_seen() -> None:
    run = trainer(callbacks=[CudnnBenchmark(strict=True)])

    run.fit(LateClassifier(), images())

    assert statuses(run)[0].active


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("switches", "arguments", "reason"),
    [
        ({"cudnn_benchmark": True}, {}, "on already"),
        ({"cudnn_deterministic": True}, {}, "deterministic"),
        ({"deterministic_algorithms": 2}, {}, "deterministic"),
        ({"deterministic_algorithms": 1}, {}, "deterministic"),
        ({}, {"benchmark": True}, "on already"),
        ({}, {"deterministic": True}, "deterministic"),
        ({}, {"deterministic": "warn"}, "deterministic"),
    ],
)
def test_it_skips_itself_when_the_user_decided(
    switches: dict[str, Any],
    arguments: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Trainer(deterministic=True) sets it
    as_it_was = read_knobs()
    with knobs(
        cudnn_benchmark=False, cudnn_deterministic=False, deterministic_algorithms=0
    ), knobs(**switches):  # fmt: skip
        run = trainer(callbacks=[CudnnBenchmark(strict=False)], **arguments)
        before = read_knobs()
        run.fit(Classifier(), images())
        assert read_knobs() == before
        torch.use_deterministic_algorithms(False)  # also clears the flag of inductor
    assert reason in statuses(run)[0].text
    assert read_knobs() == as_it_was


@pytest.mark.usefixtures("on_cuda")
def test_it_skips_itself_without_convolutions() -> None:
    run = trainer(callbacks=[CudnnBenchmark(strict=False)])

    run.fit(Classifier(mlp()), images())

    assert "Classifier has no convolution layer" in statuses(run)[0].text


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_it_skips_itself_where_batches_cannot_be_seen() -> None:
    class Iterating(Classifier):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    run = trainer(callbacks=[CudnnBenchmark(strict=False)])

    run.fit(Iterating(), images())

    assert "dataloader_iter" in statuses(run)[0].text


@pytest.mark.usefixtures("on_cuda")
def test_it_skips_itself_where_cudnn_is_turned_off() -> None:
    run = trainer(callbacks=[CudnnBenchmark(strict=False)])

    with torch.backends.cudnn.flags(enabled=False):
        run.fit(Classifier(), images())

    assert "cuDNN is turned off" in statuses(run)[0].text


def test_it_skips_itself_on_a_cpu() -> None:
    run = trainer(callbacks=[CudnnBenchmark(strict=False)])

    run.fit(Classifier(), images())

    assert "CUDA devices only; this run is on 'cpu'" in statuses(run)[0].text


@pytest.mark.parametrize(
    ("layer", "rank"),
    [
        (nn.Conv1d(2, 2, 1), 3),
        (nn.Conv2d(2, 2, 1), 4),
        (nn.ConvTranspose2d(2, 2, 1), 4),
        (nn.Conv3d(2, 2, 1), 5),
        (nn.ConvTranspose3d(2, 2, 1), 5),
        (nn.LazyConv2d(2, 1), 4),
        (nn.Linear(2, 2), None),
    ],
)
def test_ranks_of_convolution_inputs(layer: nn.Module, rank: int | None) -> None:
    module = LightningModule()
    module.net = nn.Sequential(nn.ReLU(), nn.Sequential(layer))

    assert convolution_ranks(module) == ({rank} if rank else set())


def test_shapes_are_found_in_any_structure() -> None:
    Pair = namedtuple("Pair", ["image", "label"])

    @dataclass
    class Sample:
        image: Tensor
        name: str

    image, label = torch.zeros(2, 3, 4, 5), torch.zeros(2)
    expected = ((2, 3, 4, 5),)
    for batch in (
        image,
        [image, label],
        {"image": image, "meta": ["a", 1]},
        Pair(image, label),
        Sample(image, "a"),
        ({"nested": [Pair(image, label)]}, None),
    ):
        assert signature(batch, frozenset({4})) == expected


def test_only_images_count_unless_the_batch_has_none() -> None:
    image, boxes = torch.zeros(2, 3, 4, 4), torch.zeros(7, 4)

    assert signature((image, boxes), frozenset({4})) == ((2, 3, 4, 4),)
    assert signature((boxes, torch.zeros(2)), frozenset({4})) == ((7, 4),)
