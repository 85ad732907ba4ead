"""By what micro-batches are weighed, and when there is nothing to weigh."""

from __future__ import annotations

import logging
import sys
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from big_batch import Big, BigTokens, loader, rows, tokens
from lightning.pytorch.strategies import SingleDeviceStrategy
from models import trainer
from torch import Tensor, nn
from torch.nn import functional

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf.callbacks import CUDAGraph, ExactAccumulation
from lightning_perf.callbacks._loss_weights import counter, cross_entropy_weights, function_of

EXACT = 1e-9
LENGTHS = [[3, 4], [1, 1, 1], [9], [2, 7], [5]]


def fit(module: Any, data: Any, weight: Any, **kwargs: Any) -> Any:
    callbacks = [ExactAccumulation(weight), *kwargs.pop("callbacks", [])]
    run = trainer(callbacks=callbacks, **{"accumulate_grad_batches": 2, **kwargs})
    run.fit(module, data)
    return run


def count_samples(batch: Any) -> int:
    return len(batch[0])


def number_of(weight: Any, batch: Any, loss: Tensor | None = None) -> float:
    some = torch.tensor(0.0) if loss is None else loss
    return float(counter(weight, lambda message: None)(batch)(some))


# --- what the loss was divided by


@pytest.mark.parametrize("ignore", [-100, 2])
def test_tokens_are_those_of_the_cross_entropy(ignore: int) -> None:
    module = BigTokens(ignore=ignore)
    fit(module, loader(tokens(LENGTHS, ignore=ignore)), "tokens", max_epochs=2)
    assert len(module.errors) == 6
    assert max(module.errors) < EXACT


def test_tokens_of_a_model_that_shifts_its_labels() -> None:
    """Causal language models leave out the first label of each sequence; the batch does not say."""

    class Shifts(BigTokens):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            if y.dim() == 1:
                return super().loss(batch)
            return super().loss((x[:, :-1], y[:, 1:]))

        def together(self, batches: Any) -> Tensor:
            return super().together([(x[:, :-1], y[:, 1:]) for x, y in batches])

    fit(module := Shifts(), loader(tokens([[3, 4], [2, 2, 6], [9]])), "tokens")
    assert max(module.errors) < EXACT


def test_tokens_weighed_by_class_and_smoothed() -> None:
    class Weighted(BigTokens):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            weight = torch.tensor([1, 2, 3, 4, 5], dtype=torch.float64)
            logits, targets = self.net(x).flatten(0, -2), y.flatten()
            loss = functional.cross_entropy(logits, targets, weight=weight, label_smoothing=0.1)
            return loss / 3 + 0.1 * self.net[0].weight.square().sum()

    fit(module := Weighted(), loader(tokens(LENGTHS)), "tokens")
    assert max(module.errors) < EXACT


def test_a_micro_batch_without_any_token_adds_nothing() -> None:
    """Its mean is 0 / 0."""
    data = tokens([[3, 4], [2], [1, 1, 1], [2], [2]])
    for empty in (1, 3, 4):
        data[empty][1].fill_(-100)
    module = BigTokens()
    fit(module, loader(data), "tokens", accumulate_grad_batches=3)
    assert module.errors[0] < EXACT
    assert module.norms[1] == 0
    fit(module := BigTokens(), loader(data), "tokens", limit_train_batches=4)
    assert max(module.errors) < EXACT


def test_the_first_micro_batch_without_any_token() -> None:
    data = tokens([[2], [3, 4], [1, 1, 1]])
    data[0][1].fill_(-100)
    fit(module := BigTokens(), loader(data), "tokens")
    assert max(module.errors) < EXACT


class Identity(torch.autograd.Function):
    """What wrappers of several processes put around an output."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


LOGITS = torch.zeros(2, 5, 3, requires_grad=True)
TARGETS = torch.tensor([[0, 1, -100], [4, -100, -100]])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda: functional.cross_entropy(LOGITS, TARGETS), [3]),
        (lambda: Identity.apply(functional.cross_entropy(LOGITS, TARGETS).float() * 2), [3]),
        (lambda: functional.nll_loss(LOGITS.log_softmax(1), TARGETS) + LOGITS.sum(), [3]),
        (lambda: functional.cross_entropy(LOGITS, TARGETS, reduction="sum") / 3, []),
        (lambda: functional.cross_entropy(LOGITS, TARGETS, reduction="none").mean(), []),
        (lambda: functional.mse_loss(LOGITS, torch.zeros_like(LOGITS)), []),
        (lambda: 2 * functional.cross_entropy(LOGITS, TARGETS) + LOGITS.mean() ** 2, [3]),
        (lambda: sum(functional.cross_entropy(LOGITS + i, TARGETS) for i in range(2)), [3, 3]),
        (lambda: torch.tensor(1.0), []),
        # Only single numbers are followed back, and not the whole network.
        (lambda: functional.cross_entropy(LOGITS, TARGETS).expand(2).mean(), []),
    ],
)
def test_what_a_loss_shows(loss: Any, expected: list[int]) -> None:
    assert [float(weight) for weight in cross_entropy_weights(loss())] == expected


# --- what the batch says


class MaskedMean(BigTokens):
    """A mean over tokens that is no cross-entropy of torch's, from batches with names."""

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, tuple):
            batch = {"x": batch[0], "labels": batch[1]}
        labels = batch.pop("labels") if "labels" in batch else batch["target"]
        mask = batch.get("attention_mask", labels != -100)
        scores = self.net(batch["x"]).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return (scores.square() * mask).sum() / mask.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.window.append((batch["x"], batch["labels" if "labels" in batch else "target"]))
        return self.loss(dict(batch))


@pytest.mark.parametrize("names", [("labels",), ("target", "attention_mask")])
def test_tokens_by_the_names_in_the_batch(
    names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    data = [
        {"x": x, names[0]: y} | dict.fromkeys(names[1:], (y != -100).long())
        for x, y in tokens(LENGTHS)
    ]
    with caplog.at_level(logging.INFO):
        fit(module := MaskedMean(), loader(data), "tokens", max_epochs=2)
    assert max(module.errors) < EXACT
    told = [record.getMessage() for record in caplog.records if "tokens are" in record.getMessage()]
    assert len(told) == 1
    assert f"`{names[-1]}`" in told[0]


def test_tokens_by_the_attributes_of_a_batch() -> None:
    @dataclass
    class Data:
        labels: Tensor

    labels = torch.tensor([[0, 1, -100]])
    assert number_of("tokens", Data(labels)) == 2
    assert number_of("tokens", namedtuple("Batch", "labels")(labels)) == 2


def test_samples_by_the_first_dimension() -> None:
    image, label = torch.zeros(6, 3, 2, 2), torch.zeros(6)
    for batch in (image, (image, label), {"x": [image], "y": label, "epoch": torch.tensor(3)}):
        assert number_of("samples", batch) == 6


@pytest.mark.parametrize(
    "weight",
    [
        count_samples,
        lambda batch: torch.tensor([len(batch[0])]),
        "project_of_user.data.count",
    ],
)
def test_a_callable_or_its_path(weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "project_of_user", Project)
    fit(module := Big(), loader(rows([4, 2, 3, 1, 2])), weight, max_epochs=2)
    assert max(module.errors) < EXACT


class Project:
    """Stands for a module of the user's project."""

    class data:
        count = staticmethod(count_samples)


# --- wrong uses


@pytest.mark.parametrize(
    ("weight", "batch", "message"),
    [
        ("samples", (torch.zeros(3, 2), torch.zeros(8)), "are 3, 8, so its number of samples is"),
        ("samples", ["text"], "a list, are not there"),
        ("tokens", (torch.zeros(3, 2),), "a tuple, has no integer `labels` and no `attention_mask"),
        ("tokens", {"labels": torch.zeros(3)}, "a dict, has no integer `labels`"),
    ],
)
def test_what_cannot_be_found_in_a_batch(weight: str, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"weight='{weight}'.*{message}.*Pass a callable"):
        number_of(weight, batch)


def test_two_cross_entropies_have_no_one_weight() -> None:
    loss = functional.cross_entropy(LOGITS, TARGETS) + functional.cross_entropy(LOGITS * 2, TARGETS)
    with pytest.raises(ValueError, match=r"made of 2 cross-entropies.*Pass a callable"):
        number_of("tokens", {"labels": TARGETS}, loss)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("many", "'many', a str. It must be one number"),
        (None, "None, a NoneType. It must be one number"),
        (torch.ones(2), "a Tensor. It must be one number"),
        (-1, "is -1.0. It must be the number of things"),
        (float("nan"), "is nan"),
        (torch.tensor(torch.inf), "is inf"),
    ],
)
def test_a_callable_that_returns_no_count(returned: Any, message: str) -> None:
    module = Big()
    with pytest.raises(ValueError, match=message):
        fit(module, loader(rows([4] * 2)), lambda batch: returned)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("token", "it is 'batches', 'samples', 'tokens', a callable"),
        (3, "it is 'batches', 'samples', 'tokens', a callable"),
        ("no_such_project.count", "nothing at that path: No module named 'no_such_project'"),
        ("math.no_such_function", "nothing at that path: .*no_such_function"),
        ("math.pi", "there is a float"),
        ("a..b", "nothing at that path"),
    ],
)
def test_wrong_weights_are_explained(weight: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExactAccumulation(weight)
    assert function_of("math.floor")(2.5) == 2


# --- nothing to do


class Accumulates(SingleDeviceStrategy):
    """Says that it accumulates itself, as DeepSpeed does."""

    handles_gradient_accumulation = True


class Shards(SingleDeviceStrategy):
    """Says that it shards, as FSDP does."""

    restore_checkpoint_after_setup = True


class Manual(Big):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.window = [batch]
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class Fetches(Big):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        self.window = [batch]
        return self.loss(batch)


class Newton(Big):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


ALONE = {"accumulate_grad_batches": 1}


@pytest.mark.parametrize(
    ("make", "weight", "options", "reason"),
    [
        (Big, "batches", ALONE, "With accumulate_grad_batches=1 each step has one batch"),
        (Big, "samples", ALONE, "With accumulate_grad_batches=1 and one process each step"),
        (Big, "batches", {"strategy": Accumulates()}, "Accumulates accumulates gradients itself"),
        (Big, "batches", {"strategy": Shards()}, "Shards shards gradients"),
        (Manual, "batches", ALONE, "Manual optimizes manually.*Use GradientWindow"),
        (Newton, "batches", {}, "LBFGS computes the last micro-batch"),
        (Fetches, "batches", {}, "takes `dataloader_iter`"),
        (
            Big,
            "batches",
            {"callbacks": [CUDAGraph("step", strict=False)]},
            "replays training steps, past",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_it_stands_aside_and_says_why(
    make: Any, weight: str, options: dict[str, Any], reason: str
) -> None:
    if isinstance(strategy := options.get("strategy"), SingleDeviceStrategy):
        options = options | {"strategy": type(strategy)(device="cpu")}
    with pytest.warns(NoEffectWarning, match=f"ExactAccumulation has no effect here: .*{reason}"):
        run = fit(make(), loader(rows([4] * 3)), weight, **options)
    assert not statuses(run)[0].active


def test_only_training_is_its_concern() -> None:
    class Tests(Big):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

    run = trainer(callbacks=[ExactAccumulation()], accumulate_grad_batches=2)
    run.test(Tests(), loader(rows([4] * 3)), verbose=False)
    assert statuses(run) == ()


def test_modules_are_not_mistaken_for_weights() -> None:
    assert function_of(nn.Identity()) is not None
