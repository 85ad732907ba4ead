"""Every item, the preset for this GPU, and a comparison, on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from items import ROWS, Row
from lightning.pytorch import Callback
from models import Classifier, images, trainer

from lightning_perf._item import statuses
from lightning_perf._knobs import read_knobs
from lightning_perf.benchmark import compare
from lightning_perf.callbacks import ChannelsLast, Compile, FusedOptimizer
from lightning_perf.presets import resolve, trainer_kwargs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_classification.py"


def fitted(*callbacks: Callback) -> Classifier:
    torch.manual_seed(0)
    module = Classifier()
    trainer(accelerator="cuda", callbacks=list(callbacks)).fit(module, images(samples=64))
    return module


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_an_item_learns_the_same_and_leaves_no_trace(row: Row) -> None:
    before, plain = read_knobs(), row.model()
    module = row.model()
    module.load_state_dict(plain.state_dict())
    row.run(plain, accelerator="cuda")
    run = row.run(module, row.item(strict=False), accelerator="cuda")

    assert read_knobs() == before
    assert statuses(run)
    if not row.changes_learning:
        assert module.losses == pytest.approx(plain.losses, rel=1e-2)
        assert module.test_losses == pytest.approx(plain.test_losses, rel=1e-2)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert all(value.is_contiguous() for value in module.state_dict().values())


class Look(Callback):
    """Notes whether activations are NHWC, and which update the optimizer has."""

    def on_train_start(self, trainer, pl_module) -> None:
        self.fused = [group.get("fused") for group in trainer.optimizers[0].param_groups]
        self.nhwc: set[bool] = set()
        self.handle = pl_module.net[3].register_forward_hook(self.look)

    def look(self, layer, inputs, output) -> None:
        self.nhwc.add(output.is_contiguous(memory_format=torch.channels_last))

    def on_train_end(self, trainer, pl_module) -> None:
        self.handle.remove()


def test_activations_are_nhwc_and_the_optimizer_is_fused() -> None:
    look = Look()
    fitted(ChannelsLast(strict=True), FusedOptimizer(strict=True), look)

    assert look.nhwc == {True}
    assert look.fused == [True]


@pytest.mark.slow
def test_compiled_by_inductor_it_learns_the_same() -> None:
    assert fitted(Compile(strict=True)).losses == pytest.approx(fitted().losses, rel=1e-2)


def test_the_preset_for_this_gpu_trains() -> None:
    before = read_knobs()
    run = trainer(**trainer_kwargs("auto"))
    module = Classifier()
    run.fit(module, images())

    assert resolve("auto") in ("none", "cuda_fp16", "cuda_bf16")
    assert any(status.active for status in statuses(run))
    assert read_knobs() == before


def test_a_comparison_trains_on_the_gpu() -> None:
    result = compare(f"{EXAMPLE}:make", "none", "auto", quick=True, learning_steps=10)

    assert result.environment_b["device"].startswith("cuda")
    assert result.losses_agree is not False, result.learning_summary
    assert result.peak_device_memory_b
