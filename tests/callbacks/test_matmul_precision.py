from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from models import Classifier, images, trainer

from lightning_perf import NoEffectWarning
from lightning_perf._hardware import Hardware, detect
from lightning_perf._item import statuses
from lightning_perf._knobs import KNOBS, knobs, read_knobs
from lightning_perf.callbacks import MatmulPrecision
from lightning_perf.callbacks import matmul_precision as stem
from lightning_perf.callbacks.matmul_precision import matmul_precision, matmul_precision_useless

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


def machine(*isa: str, capability: tuple[int, int] | None = None) -> Hardware:
    return replace(detect(), isa=frozenset(isa), capability=capability)


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the CPU has AMX, where the setting is worth making."""
    monkeypatch.setattr(stem, "detect", lambda: machine("amx_bf16", "amx_fp16"))


class Observe(Callback):
    def on_train_start(self, trainer, pl_module) -> None:
        self.seen = KNOBS["matmul_precision"].read()


@pytest.mark.parametrize(
    ("precision", "current", "device", "hardware", "reason"),
    [
        ("high", "highest", CUDA, machine(capability=(8, 0)), None),
        ("high", "highest", CUDA, machine(capability=(9, 0)), None),
        ("medium", "high", CUDA, machine(capability=(8, 6)), None),
        ("high", "highest", CUDA, machine(capability=(7, 5)), "capability 7.5 has no TF32"),
        ("medium", "highest", CUDA, machine(capability=(6, 1)), "capability 6.1 has no TF32"),
        ("high", "highest", CPU, machine("amx_fp16", "amx_bf16"), None),
        ("high", "highest", CPU, machine("amx_bf16", "avx512_bf16"), "needs amx_fp16"),
        ("medium", "highest", CPU, machine("amx_bf16"), None),
        ("medium", "highest", CPU, machine("bf16", "asimd"), None),
        ("medium", "highest", CPU, machine("avx512_bf16"), "needs amx_bf16 or bf16"),
        ("medium", "highest", CPU, machine(), "needs amx_bf16 or bf16"),
        ("high", "highest", MPS, machine(), "no reduced float32 precision on 'mps'"),
        # What the process already does is never made slower, except on demand.
        ("high", "high", CUDA, machine(capability=(8, 0)), "already uses 'high'"),
        ("high", "medium", CUDA, machine(capability=(8, 0)), "already uses 'medium'"),
        ("highest", "highest", CPU, machine(), "already uses 'highest'"),
        ("highest", "medium", CPU, machine(), None),
        ("highest", "high", CUDA, machine(capability=(8, 0)), None),
    ],
)
def test_it_knows_where_it_cannot_matter(
    precision: str, current: str, device: torch.device, hardware: Hardware, reason: str | None
) -> None:
    found = matmul_precision_useless(precision, current=current, device=device, hardware=hardware)

    assert found is None if reason is None else reason in str(found)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_run_uses_it_and_puts_it_back(precision: str) -> None:
    before, observe = read_knobs(), Observe()
    run = trainer(callbacks=[MatmulPrecision(precision), observe])

    run.fit(Classifier(), images())

    assert observe.seen == precision
    assert read_knobs() == before
    (status,) = statuses(run)
    assert status.active
    assert status.text == f"{precision!r} instead of 'highest'"


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_it_skips_itself_where_nothing_is_multiplied_in_float32(precision: str) -> None:
    run = trainer(callbacks=[MatmulPrecision("high", strict=False)], precision=precision)

    run.predict(Classifier(torch.nn.Flatten()), images())

    assert not statuses(run)[0].active
    assert "nothing is multiplied in float32" in statuses(run)[0].text


@pytest.mark.usefixtures("amx")
def test_a_faster_setting_of_the_user_is_left_alone() -> None:
    run = trainer(callbacks=[MatmulPrecision("high"), observe := Observe()])

    with (
        knobs(matmul_precision="medium"),
        pytest.warns(NoEffectWarning, match="already uses 'medium'"),
    ):
        run.fit(Classifier(), images())

    assert observe.seen == "medium"


@pytest.mark.usefixtures("amx")
@pytest.mark.skipif(
    not hasattr(torch._C, "_set_fp32_precision_setter"), reason="torch has the old switch only"
)
def test_a_user_of_the_new_switches_gets_them_back() -> None:
    """Lightning's own use of the old getter would raise if the two families were mixed by us."""
    with knobs(fp32_precision={"cuda.matmul": "tf32"}):
        before = read_knobs()
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        run = trainer(callbacks=[MatmulPrecision("medium"), observe := Observe()])
        run.fit(Classifier(), images())
        assert observe.seen == "medium"
        assert read_knobs() == before


@pytest.mark.parametrize("precision", ["low", "tf32", "HIGH", "", None])
def test_an_unknown_precision_is_refused(precision: str) -> None:
    with pytest.raises(ValueError, match="'highest', 'high', 'medium'"):
        MatmulPrecision(precision)
    with (
        pytest.raises(ValueError, match="'highest', 'high', 'medium'"),
        matmul_precision(precision),
    ):
        pytest.fail("The block must not run.")


def test_the_function_works_without_a_trainer() -> None:
    with matmul_precision("high"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
