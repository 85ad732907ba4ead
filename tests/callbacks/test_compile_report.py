"""Compile: what is counted and said."""

from __future__ import annotations

import re

import pytest
import torch
from compiling import (
    Breaking,
    calls_of,
    deep,
    fit,
    lines,
)
from models import Classifier, conv_net, images, trainer
from torch import nn
from torch._dynamo.utils import counters

from lightning_perf.callbacks.compile import Compile

pytestmark = pytest.mark.usefixtures("no_compiled_code")


def numbers(line: str) -> str:
    """A line without the seconds, which differ."""
    return re.sub(r"in \d+ s", "in _ s", line)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graphs_are_counted_and_not_their_backward_passes(backend: str, said) -> None:
    fit(Classifier(deep()), Compile(backend=backend), max_epochs=2)
    assert [numbers(line) for line in lines(said)] == ["epoch 0: 2 graphs compiled in _ s."]


def test_a_run_that_compiles_nothing_anew_says_nothing(said) -> None:
    fit(Classifier(deep()), Compile(backend="eager"))
    said.clear()
    fit(Classifier(deep()), Compile(backend="eager"))
    assert lines(said) == []


def test_an_evaluation_alone_says_what_it_compiled(said) -> None:
    trainer(callbacks=[Compile(backend="eager")]).test(Classifier(deep()), images(), verbose=False)
    assert [numbers(line) for line in lines(said)] == ["test: 1 graph compiled in _ s."]


def test_later_recompilation_is_said_in_its_epoch_and_summed(said) -> None:
    class Freeze(Classifier):
        def on_train_epoch_start(self) -> None:
            self.net[1][0].linear.weight.requires_grad_(self.current_epoch != 2)

    fit(Freeze(deep()), Compile(backend="eager"), max_epochs=4)
    first, again, total = map(numbers, lines(said))
    assert first == "epoch 0: 2 graphs compiled in _ s."
    assert again.startswith("epoch 2: 2 graphs compiled again (train, validate) in _ s, as a sh")
    assert "TORCH_LOGS=recompiles" in again
    assert total == "in all 4 graphs compiled in _ s, 2 of them again, and 0 graph breaks."


def test_rare_validation_is_not_taken_for_recompilation(said) -> None:
    fit(Classifier(deep()), Compile(backend="eager"), max_epochs=2, check_val_every_n_epoch=2)
    assert not [line for line in lines(said) if "compiled again" in line]


def to_channels_last(net: nn.Module) -> None:
    net.to(memory_format=torch.channels_last)


def to_double(net: nn.Module) -> None:
    net.double()


@pytest.mark.parametrize(("net", "change"), [(conv_net, to_channels_last), (deep, to_double)])
def test_what_changes_after_compiling_is_recompiled_and_right(net, change, said) -> None:
    class Change(Classifier):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                change(self.net)

        def loss(self, batch):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x.to(next(self.parameters()).dtype)), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    plain, module = Change(net()), Change(net())
    module.load_state_dict(plain.state_dict())
    fit(plain, max_epochs=2)
    fit(module, Compile(backend="eager"), max_epochs=2)
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
    (again,) = [line for line in lines(said) if "compiled again" in line]
    assert again.startswith("epoch 1: 2 graphs compiled again (train, validate)")


def test_graph_breaks_are_counted_and_the_users_counters_kept(said) -> None:
    counters["graph_break"]["the user's own"] = 5
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), Breaking(), nn.Linear(16, 4))
    fit(Classifier(net), Compile(["net.2"], backend="eager"))
    assert counters["graph_break"]["the user's own"] == 5
    (line,) = lines(said)
    assert line.startswith("epoch 0: ")
    assert ". 2 graph breaks: " in line
    assert "graph_break" in line
    assert "user's own" not in line


def test_full_graph_raises_at_a_graph_break_and_everything_is_undone() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), Breaking(), nn.Linear(16, 4))
    module = Classifier(net)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        fit(module, Compile(["net.2"], backend="eager", fullgraph=True))
    assert not any(calls_of(module).values())


def test_many_different_blocks_do_not_reach_the_limit(said) -> None:
    widths = [nn.Sequential(nn.Linear(w, w + 1), nn.ReLU()) for w in range(4, 16)]
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Sequential(*widths))
    fit(Classifier(net), Compile([f"net.2.{i}" for i in range(12)], backend="eager"))
    assert [numbers(line) for line in lines(said)] == ["epoch 0: 24 graphs compiled in _ s."]


def test_a_reset_of_dynamo_in_a_run_does_no_harm() -> None:
    class Reset(Classifier):
        def on_train_epoch_end(self) -> None:
            torch._dynamo.reset()

    fit(Reset(deep()), Compile(backend="eager"), max_epochs=2)
