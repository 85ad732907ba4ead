"""What holds in each of two processes of a pipeline: run by ``strategies/test_pipeline_ranks``."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from pipelines import (
    BATCH,
    EXACT,
    Classifier,
    Masked,
    Transformer,
    assert_same,
    convolutions,
    images,
    loader,
    make_trainer,
    pipeline,
    seeded,
    sequences,
    unsplit,
)
from torch import nn
from torch.utils.data import TensorDataset

from lightning_perf.strategies import PipelineStrategy

TRANSFORMER = {"network": "net", "split_points": ["blocks.2"]}
FOLDER = Path("checkpoints")
RANK = int(os.environ.get("RANK", 0))


def sequential() -> None:
    expected = unsplit(seeded(lambda: Classifier(convolutions())), images())
    for schedule in ("gpipe", "1f1b"):
        module = seeded(lambda: Classifier(convolutions()))
        trainer = pipeline(module, images(), schedule=schedule)
        assert_same(module, expected)
        logged = trainer.callback_metrics["loss_epoch"].item()
        assert logged == pytest.approx(sum(expected.losses[-5:]) / 5, rel=EXACT)
        assert trainer.callback_metrics["loss_step"].item() == pytest.approx(module.losses[-1])


def transformer() -> None:
    expected = unsplit(seeded(lambda: Masked(Transformer())), sequences())
    for schedule in ("gpipe", "1f1b"):
        module = seeded(lambda: Masked(Transformer()))
        pipeline(module, sequences(), schedule=schedule, **TRANSFORMER)
        assert_same(module, expected)


def accumulation_and_clipping() -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 3}
    expected = unsplit(seeded(lambda: Classifier(convolutions())), images(4), **options)
    module = seeded(lambda: Classifier(convolutions()))
    pipeline(module, images(4), **options)
    assert_same(module, expected)
    free = unsplit(seeded(lambda: Classifier(convolutions())), images(4), accumulate_grad_batches=2)
    assert module.losses[-1] != pytest.approx(free.losses[-1], rel=1e-3)  # it did clip


class Around(Classifier):
    """Has parameters before and after the network, one of them both, and a count of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)))
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 5)
        self.both = nn.Parameter(torch.ones(6))
        self.register_buffer("count", torch.zeros(1))

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.net(self.before(x) * self.both)
        if self.training:
            self.count += 1
        return self.after(hidden * self.both).mean(1)


def parameters_outside() -> None:
    expected = unsplit(seeded(Around), sequences(), gradient_clip_val=0.05)
    module = seeded(Around)
    pipeline(module, sequences(), gradient_clip_val=0.05)
    assert_same(module, expected)
    assert module.count.item() == 40


class Padded(Classifier):
    """Each block needs to know which places are padding, and these are no floating point."""

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x, x[..., 0] > 1.5)


class PaddedTransformer(Transformer):
    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=padding)
        return self.head(hidden[:, padding.shape[1] // 2])


def masks_between_stages() -> None:
    expected = unsplit(seeded(lambda: Padded(PaddedTransformer())), sequences())
    module = seeded(lambda: Padded(PaddedTransformer()))
    pipeline(module, sequences(), **TRANSFORMER)
    assert_same(module, expected)


def frozen_first_stage() -> None:
    def make() -> Classifier:
        module = Classifier(convolutions())
        module.net[0].requires_grad_(False)
        module.net[2].requires_grad_(False)
        return module

    expected, module = unsplit(seeded(make), images()), seeded(make)
    pipeline(module, images(), split_points=["3"], network="net")
    assert_same(module, expected)


def shorter_batches() -> None:
    def fit(**kwargs: Any) -> Classifier:
        module = seeded(lambda: Classifier(convolutions()))
        trainer = make_trainer(**kwargs)
        # Batches of 8, 8 and 4; and for validation of 8, 8 and 5.
        trainer.fit(module, loader(images(2, 4)), loader(images(2, 5)))
        return module

    assert_same(fit(strategy=PipelineStrategy(), devices=2), fit(devices=1))


def other_loops() -> None:
    module = seeded(lambda: Classifier(convolutions()))
    alone = copy.deepcopy(module).double()
    data = loader(images(1, 3))
    trainer = make_trainer(strategy=PipelineStrategy(), devices=2)
    found = trainer.predict(module, data)
    torch.testing.assert_close(torch.cat(found), alone.net(images(1, 3).tensors[0]))
    module.test_step = module.validation_step
    metrics = trainer.validate(module, data, verbose=False)
    assert trainer.test(module, data, verbose=False)[0] == metrics[0]
    (expected,) = make_trainer(devices=1).validate(alone, data, verbose=False)
    assert metrics[0] == pytest.approx(expected, rel=EXACT)


def checkpoints() -> None:
    for kind, data, options in (
        (lambda: Classifier(convolutions()), images(), {}),
        (lambda: Masked(Transformer()), sequences(), TRANSFORMER),
    ):
        whole = seeded(kind)
        unsplit(whole, data, max_epochs=4)
        keep = ModelCheckpoint(FOLDER / "pipe", save_top_k=-1, monitor="val_loss")
        first = seeded(kind)
        trainer = pipeline(first, data, callbacks=[keep], enable_checkpointing=True, **options)
        trainer.save_checkpoint(FOLDER / "last.ckpt")
        saved = torch.load(FOLDER / "last.ckpt", weights_only=False)
        state = saved["state_dict"]
        assert list(state) == list(whole.state_dict())
        alone = kind().double()
        alone.load_state_dict(state)
        torch.testing.assert_close(dict(alone.state_dict()), dict(first.state_dict()))
        x = data.tensors[0][:BATCH]
        outputs = torch.cat(trainer.predict(first, loader(TensorDataset(x))))
        torch.testing.assert_close(alone.outputs(x), outputs, rtol=EXACT, atol=EXACT)
        # Other weights; in double, as Lightning restores them before it converts the module.
        half = kind().double()
        pipeline(half, data, max_epochs=4, ckpt_path=keep.best_model_path, **options)
        half.losses[:0] = whole.losses[: -len(half.losses)]
        half.validated = half.validated[-2:]
        assert_same(half, _last_two(whole))
        moved = kind().double()
        unsplit_after = _resumed_alone(moved, data, keep.best_model_path)
        torch.testing.assert_close(unsplit_after, dict(whole.state_dict()), rtol=EXACT, atol=EXACT)
        dist.barrier()


def _last_two(module: Classifier) -> Classifier:
    module.validated = module.validated[-2:]
    return module


def _resumed_alone(module: Classifier, data: Any, path: str) -> dict[str, Any]:
    """Resume in one process; whole batches have the mean loss of their micro-batches."""
    make_trainer(devices=1, max_epochs=4).fit(module, loader(data), loader(data), ckpt_path=path)
    return dict(module.state_dict())


def from_one_process() -> None:
    path = FOLDER / f"one{RANK}.ckpt"
    module, data = seeded(lambda: Classifier(convolutions()).double()), images()
    trainer = make_trainer(devices=1)
    trainer.fit(module, loader(data), loader(data))
    trainer.save_checkpoint(path)
    whole = seeded(lambda: Classifier(convolutions()))
    make_trainer(devices=1, max_epochs=4).fit(whole, loader(data), loader(data))
    pipeline(module, data, max_epochs=4, ckpt_path=path)
    torch.testing.assert_close(
        dict(module.state_dict()), dict(whole.state_dict()), rtol=EXACT, atol=EXACT
    )


class Look(Callback):
    """Looks at what this process holds while it trains."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.held = {
            name: parameter.untyped_storage().nbytes() == parameter.numel() * 8
            for name, parameter in module.net.named_parameters()
        }
        self.state = {id(p) for p in trainer.optimizers[0].state}
        self.shapes = [parameter.shape for parameter in module.parameters()]


def each_process_holds_its_stage() -> None:
    module, look = Classifier(convolutions()), Look()
    before = list(module.parameters())
    shapes = [parameter.shape for parameter in before]
    trainer = pipeline(module, images(), callbacks=[look], network="net", split_points=["3"])
    here = ("0.", "2.") if trainer.global_rank == 0 else ("3.", "6.")
    assert look.held == {name: name.startswith(here) for name in look.held}
    own = {id(p) for name, p in module.net.named_parameters() if name.startswith(here)}
    assert look.state == own
    assert look.shapes == shapes
    # Everything is put back.
    assert all(old is new for old, new in zip(before, module.parameters(), strict=True))
    assert "forward" not in vars(module.net)
    assert "log" not in vars(module)
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)
    together = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    rank_zero = together.clone()
    dist.broadcast(rank_zero, 0)
    assert torch.equal(together, rank_zero)
    assert together.isfinite().all()


def random_numbers() -> None:
    """Unseeded, shuffled, with dropout: batches are the same in both processes."""
    torch.manual_seed(RANK)
    module = Masked(Transformer(dropout=0.2))
    trainer = make_trainer(strategy=PipelineStrategy(**TRANSFORMER), devices=2, max_epochs=3)
    data = sequences()
    trainer.fit(module, loader(data, shuffle=True), loader(data))
    # Evaluation drops nothing.
    module.eval()
    alone = nn.functional.cross_entropy(module.outputs(data.tensors[0]), data.tensors[1])
    assert module.validated[-1] == pytest.approx(alone.item(), rel=EXACT)
    again = seeded(lambda: Masked(Transformer(dropout=0.2)))
    pipeline(again, data, **TRANSFORMER)
    same = seeded(lambda: Masked(Transformer(dropout=0.2)))
    pipeline(same, data, **TRANSFORMER)
    assert same.losses == again.losses


def mixed_precision() -> None:
    class Single(Classifier):
        def outputs(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x.float()).float()

    for make, data, options in (
        (lambda: Single(convolutions()), images(), {}),
        (lambda: Single(Transformer()), sequences(), TRANSFORMER),
    ):
        expected = unsplit(seeded(make), data, precision="bf16-mixed")
        module = seeded(make)
        pipeline(module, data, precision="bf16-mixed", **options)
        assert_same(module, expected, 0.05)


def callbacks_decide_alike() -> None:
    module = Classifier(convolutions(), lr=0.0)
    stop = EarlyStopping("loss_epoch", patience=1, check_on_train_epoch_end=True)
    trainer = pipeline(module, images(), callbacks=[stop], max_epochs=10)
    assert trainer.current_epoch == 2


def batch_norm() -> None:
    """Statistics are those of micro-batches; checkpoints have those of the stage that counted."""
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5))
    expected = copy.deepcopy(net)
    options = {"network": "net", "split_points": ["2"]}
    module = Classifier(net)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    trainer = pipeline(module, images(), **options)
    logger.removeHandler(handler)
    notes = [text for text in said if "BatchNorm in 'net' sees micro-batches" in text]
    assert len(notes) == (RANK == 0)
    assert_same(module, unsplit(Classifier(expected), images()))
    trainer.save_checkpoint(FOLDER / "norm.ckpt")
    state = torch.load(FOLDER / "norm.ckpt", weights_only=False)["state_dict"]
    assert state["net.3.num_batches_tracked"] == 40
    assert torch.equal(state["net.3.running_mean"], module.net[3].running_mean)


class Inferred:
    """Validates as Lightning does with NCCL, where it need not use ``no_grad``."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.inference_mode():
            return super().validation_step(batch, batch_idx)


def inference_mode() -> None:
    for kind, net, data, options in (
        (Classifier, convolutions, images(), {}),
        (Masked, Transformer, sequences(), TRANSFORMER),
    ):
        expected = unsplit(seeded(lambda: kind(net())), data)  # noqa: B023
        module = seeded(lambda: type("Module", (Inferred, kind), {})(net()))  # noqa: B023
        pipeline(module, data, **options)
        assert_same(module, expected)


class Many(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("before", 3)
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"sum": torch.ones(1), "rows": len(x)}, reduce_fx="sum", on_epoch=True)
        self.log("least", y.min().float(), reduce_fx="min")
        return {"loss": loss, "more": x}


def logged_values() -> None:
    module, data = Many(convolutions()), images(1)
    metrics = pipeline(module, data, max_epochs=1).callback_metrics
    least = data.tensors[1].min().item()
    assert (metrics["before"], metrics["sum"], metrics["rows"]) == (3, 4, 8)
    assert metrics["least"] == least


NUMBERS = (
    sequential,
    transformer,
    accumulation_and_clipping,
    parameters_outside,
    masks_between_stages,
    frozen_first_stage,
    shorter_batches,
    mixed_precision,
)
RUNS = (
    other_loops,
    checkpoints,
    from_one_process,
    each_process_holds_its_stage,
    random_numbers,
    callbacks_decide_alike,
    logged_values,
    batch_norm,
    inference_mode,
)
