import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor

from lightning_perf import presets
from lightning_perf.benchmark.variant import Variant, load_variant, overlay


def test_none_is_plain_lightning():
    assert load_variant("none") == Variant("none")
    assert load_variant("none").trainer_kwargs() == {}


def test_auto_is_the_preset_for_this_machine():
    name = presets.resolve("auto")
    assert load_variant("auto").name == name


def test_a_preset_gives_its_trainer_arguments():
    variant = load_variant("cpu")
    assert (variant.name, variant.preset) == ("cpu", "cpu")
    assert repr(variant.trainer_kwargs()) == repr(presets.trainer_kwargs("cpu"))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="cpu_bf16"):
        load_variant("cpu_bf17")


def test_a_file_overrides_its_preset(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "preset: cpu\n"
        "trainer:\n"
        "  gradient_clip_val: 0.5\n"
        "  callbacks:\n"
        "  - class_path: LearningRateMonitor\n"
        "    init_args: {logging_interval: step}\n"
        "env:\n"
        "  OMP_NUM_THREADS: 2\n"
    )
    variant = load_variant(file)
    assert (variant.name, variant.preset) == ("mine", "cpu")
    assert variant.env == {"OMP_NUM_THREADS": "2"}
    arguments = variant.trainer_kwargs()
    assert arguments["gradient_clip_val"] == 0.5
    assert isinstance(arguments["callbacks"][-1], LearningRateMonitor)
    assert len(arguments["callbacks"]) == 1 + len(presets.trainer_kwargs("cpu")["callbacks"])


def test_an_empty_file_is_plain_lightning(tmp_path):
    file = tmp_path / "nothing.yaml"
    file.write_text("")
    assert load_variant(str(file)) == Variant("nothing")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {class_path: X}", "'model'; a variant has preset, trainer, env"),
        ("- 1", "must hold a mapping"),
        ("trainer: 5", "`trainer`.*must be a mapping, not 5"),
        ("env: [OMP_NUM_THREADS]", "`env`.*must be a mapping"),
        ("preset: cpu_bf17", "cpu_bf16"),
    ],
)
def test_a_file_that_is_no_variant(tmp_path, text, words):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_variant(file)


def test_a_missing_file():
    with pytest.raises(FileNotFoundError, match=r"mine\.yaml"):
        load_variant("mine.yaml")


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"max_epoch": 3}, "max_epoch"),
        ({"callbacks": [{"class_path": "NoSuchCallback"}]}, "NoSuchCallback"),
        ({"precision": 7}, "precision"),
    ],
)
def test_an_impossible_trainer_section_names_the_variant_and_the_argument(trainer, words):
    with pytest.raises(ValueError, match=words) as caught:
        Variant("mine", trainer=trainer).trainer_kwargs()
    assert "variant 'mine'" in str(caught.value)


def test_overlay_adds_callbacks_and_replaces_those_of_the_same_class():
    own = LearningRateMonitor(logging_interval="step")
    others = LearningRateMonitor(logging_interval="epoch")
    kept = GradientAccumulationScheduler({0: 2})
    merged = overlay(
        {"precision": "32-true", "max_epochs": 3, "callbacks": [others, kept]},
        {"precision": "bf16-mixed", "callbacks": own},
    )
    assert merged == {"precision": "bf16-mixed", "max_epochs": 3, "callbacks": [kept, own]}
    assert overlay({}, {}) == {"callbacks": []}
