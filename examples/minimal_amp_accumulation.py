"""The minimal example of the Linux tuning guide, with Lightning and lightning_perf.

    python examples/minimal_amp_accumulation.py

Step by step, the guide's loop and what stands for it here:

    autocast() and GradScaler()             `precision`, which the preset for this machine sets
    loss / accumulation_steps,              Trainer(accumulate_grad_batches=4)
      `if i % accumulation_steps == 0`
    zero_grad(set_to_none=True)             what Lightning does
    memory_allocated(), memory_reserved()   the callback PrintMemory below
    optim.Adam                              the same; FusedOptimizer makes its step one kernel
    pin_memory=True, num_workers=4          pinned on a GPU; no workers: the data are in memory

Random numbers are all there is to learn, as in the guide: the loss falls as they are memorised.
"""

import argparse

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf.presets import auto, trainer_kwargs


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1024, 1024)
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class PrintMemory(Callback):
    """Prints the memory in use before training, every few batches, and after it."""

    def __init__(self, every: int):
        self.every = every

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        print(f"[before]   {memory(module.device)}")

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *step: object) -> None:
        batches = len(module.losses)
        if batches % self.every == 0:
            print(f"[batch {batches:2d}] {memory(module.device)} | update {trainer.global_step}")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        print(f"[after]    {memory(module.device)}")


def memory(device: torch.device) -> str:
    if device.type == "cuda":
        used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return f"alloc {used / 2**20:.1f} MB | resv {reserved / 2**20:.1f} MB"
    # The allocator of a CPU keeps no books: this is what the system gave to the process.
    return f"resident {psutil.Process().memory_info().rss / 2**20:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3, help="default: 3")
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64; the guide: 256")
    parser.add_argument("--accumulate", type=int, default=4, help="batches per update (default: 4)")
    parser.add_argument("--precision", help="such as bf16-mixed (default: what the preset says)")
    args = parser.parse_args()

    seed_everything(0)
    data = TensorDataset(torch.randn(1024, 1024), torch.randn(1024, 1024))
    pin = torch.cuda.is_available()
    loader = DataLoader(data, args.batch_size, shuffle=True, pin_memory=pin)
    chosen = {"precision": args.precision} if args.precision else {}
    trainer = Trainer(
        **trainer_kwargs(
            "auto",
            max_epochs=args.epochs,
            accumulate_grad_batches=args.accumulate,
            callbacks=[PrintMemory(every=2 * args.accumulate)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **chosen,
        )
    )
    preset, reason = auto()
    print(f"Precision {trainer.precision}. The preset for this machine is {preset}: {reason}.")
    trainer.fit(module := Regression(), loader)
    print(
        f"{len(module.losses)} batches made {trainer.global_step} updates, and the loss went from "
        f"{module.losses[0]:.3f} to {module.losses[-1]:.3f}."
    )


if __name__ == "__main__":
    main()
