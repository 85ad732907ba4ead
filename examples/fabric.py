"""The items without a Trainer: their plain functions around a training loop of Lightning Fabric.

    python examples/fabric.py
    python examples/fabric.py --compile inductor

Each function is a context manager: it makes its change when the block begins and takes it back
when the block ends, also after an error. A plain PyTorch loop uses them in just the same way.

Needs `pip install 'lightning-perf[demo]'`: the 1797 handwritten digits come with scikit-learn.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from lightning.fabric import Fabric, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_perf.callbacks.channels_last import channels_last
from lightning_perf.callbacks.compile import compiled
from lightning_perf.callbacks.cudnn_benchmark import cudnn_benchmark
from lightning_perf.callbacks.disable_debug_apis import debug_aids_off
from lightning_perf.callbacks.fused_optimizer import fused
from lightning_perf.callbacks.garbage_collection import garbage_collection
from lightning_perf.callbacks.loader_settings import loader_settings
from lightning_perf.callbacks.matmul_precision import matmul_precision
from lightning_perf.callbacks.threads import threads
from lightning_perf.presets import trainer_kwargs


def network() -> nn.Sequential:
    def block(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

    blocks = [block(1, 32), block(32, 64), block(64, 128)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128, 10))


def digits(batch_size: int) -> tuple[DataLoader, DataLoader]:
    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 8 - 1
    samples = TensorDataset(images, torch.from_numpy(data.target).long())
    train, val = random_split(samples, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, convert: Callable[[Tensor], Tensor]) -> float:
    model.eval()
    right = [(model(convert(images)).argmax(1) == labels).float() for images, labels in loader]
    return torch.cat(right).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5, help="default: 5")
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--compile", metavar="BACKEND", help="compile too, such as inductor")
    args = parser.parse_args()

    # Of a preset, Fabric takes the accelerator and the precision; the items are below.
    preset = trainer_kwargs("auto", callbacks=None)
    kept = ("accelerator", "precision")
    fabric = Fabric(devices=1, **{key: preset[key] for key in kept if key in preset})
    fabric.launch()
    seed_everything(0)
    net = network()
    with ExitStack() as items:
        # Switches of the process.
        items.enter_context(threads())
        items.enter_context(debug_aids_off())
        items.enter_context(matmul_precision("high"))
        watch = items.enter_context(cudnn_benchmark(net))
        collector = items.enter_context(garbage_collection(50))
        # Before the optimizer is built and Fabric wraps the model; then the rest.
        convert = items.enter_context(channels_last(net))
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.05, momentum=0.9))
        items.enter_context(fused(optimizer))
        if args.compile:
            regions = items.enter_context(compiled(net, backend=args.compile))
            fabric.print(f"compiled: {', '.join(filter(None, regions)) or 'the whole network'}")

        loaders = digits(args.batch_size)
        for loader in loaders:
            items.enter_context(loader_settings(loader, None, pin_memory=True))
        train, val = fabric.setup_dataloaders(*loaders)
        start = time.perf_counter()
        for epoch in range(args.epochs):
            model.train()
            for images, labels in train:
                optimizer.zero_grad()
                loss: Tensor = nn.functional.cross_entropy(model(convert(watch(images))), labels)
                fabric.backward(loss)
                optimizer.step()
                collector.step()
            fabric.print(f"epoch {epoch + 1}: accuracy {accuracy(model, val, convert):.1%}")
        seconds = time.perf_counter() - start
    fabric.print(
        f"Read {accuracy(model, val, lambda x: x):.1%} of the digits it has not seen after "
        f"{seconds:.1f} s of training; all switches and the weights' layout are as before."
    )


if __name__ == "__main__":
    main()
