r"""Train with LightningCLI as it is: the preset is one more file, before your own.

    python examples/cli/train_stock.py fit \
        --config "$(lightning-perf presets path auto)" \
        --config examples/cli/train_stock.yaml

Needs `pip install 'lightning-perf[demo]'`.
"""

from lightning.pytorch.cli import LightningCLI

from lightning_perf.benchmark.demo_task import DigitClassifier, Digits

if __name__ == "__main__":
    LightningCLI(DigitClassifier, Digits)
