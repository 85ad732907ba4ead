"""Train from a YAML file in which one line names the preset.

    python examples/cli/train.py fit --config examples/cli/train.yaml

`PerfCLI` takes the place of `LightningCLI`; nothing else differs. Needs
`pip install 'lightning-perf[demo]'`.
"""

from lightning_perf.benchmark.demo_task import DigitClassifier, Digits
from lightning_perf.cli import PerfCLI

if __name__ == "__main__":
    PerfCLI(DigitClassifier, Digits)
