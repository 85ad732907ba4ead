"""Train ResNet-18 on handwritten digits with the preset for this machine.

Needs `pip install 'lightning-perf[demo]'`. Compare with plain Lightning:

    lightning-perf bench --config examples/digits.py:make --a none --b auto
"""

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything

from lightning_perf.benchmark.demo_task import DigitClassifier, Digits
from lightning_perf.presets import trainer_kwargs


def make() -> tuple[LightningModule, LightningDataModule]:
    return DigitClassifier(), Digits(image_size=48, batch_size=32)


if __name__ == "__main__":
    seed_everything(0, workers=True)
    module, data = make()
    trainer = Trainer(**trainer_kwargs("auto", max_steps=60, logger=False))
    trainer.fit(module, data)
    trainer.validate(module, data)
