"""A user's project, and doing the same with it plainly and with a preset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from models import Classifier, images, trainer
from torch import nn

from lightning_perf._item import statuses
from lightning_perf.callbacks import Compile
from lightning_perf.presets import trainer_kwargs


class Project(Classifier):
    """A user's module, with its data, in a fixed order, and an optimizer that keeps a state."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return images(18, self.batch_size)

    def val_dataloader(self) -> Any:
        return images(8)

    test_dataloader = predict_dataloader = val_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def plain(**kwargs: Any) -> Trainer:
    return trainer(**kwargs)


def preset(**kwargs: Any) -> Trainer:
    """The same with a preset, in which also Compile has something to do."""
    own = kwargs.pop("callbacks", [])
    items = [Compile(["net"], backend="eager", strict=False), *own]
    return trainer(**trainer_kwargs("cpu", callbacks=items, **kwargs))


def project(cls: type[Classifier] = Project) -> Any:
    torch.manual_seed(3)
    return cls()


def active(run: Trainer) -> set[str]:
    return {status.item for status in statuses(run) if status.active}


def trace(module: nn.Module) -> dict[str, Any]:
    """What a run must leave as a plain one leaves it."""
    return {
        "keys": list(module.state_dict()),
        "strides": [p.stride() for p in module.parameters()],
        "compiled": [m._compiled_call_impl is not None for m in module.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()],
        "attributes": [sorted(vars(m)) for m in module.modules()],
    }


def both(
    use: Callable[[Trainer, Any], None], make: Callable[[], Any] = project, **kwargs: Any
) -> tuple[Any, Any, Trainer]:
    """Do the same with a plain Trainer and with a preset; return both modules and the Trainer."""
    modules = []
    for build in (plain, preset):
        own = {"callbacks": [make_one() for make_one in kwargs.get("callbacks", ())]}
        run, module = build(**{**kwargs, **own}), make()
        use(run, module)
        modules.append(module)
    return *modules, run


def fit(run: Trainer, module: LightningModule) -> None:
    run.fit(module)


def agree(theirs: Any, ours: Any, *, atol: float = 1e-3) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)
    assert trace(ours) == trace(theirs)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-2, atol=atol)
