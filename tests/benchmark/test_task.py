import functools
import subprocess
import sys
import textwrap

import pytest
from lightning.pytorch import LightningModule
from models import Classifier, images

from lightning_perf.benchmark.task import Task, load_task


def make():
    return Classifier(), images()


def make_with_trainer():
    return Classifier(), images(), {"gradient_clip_val": 0.5}


def make_nothing():
    return None


def make_lists():
    return [Classifier(), images()]


@pytest.fixture(autouse=True)
def as_in_a_worker(monkeypatch):
    """What a worker does to its own import path stays in the test, and it has no arguments."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    # LightningCLI calls jsonargparse by names of old.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def test_a_function_is_found_by_its_name():
    task = load_task(make)
    assert task == Task(__name__, "make")
    module, data, arguments = task.build()
    assert isinstance(module, Classifier)
    assert len(data) == 4
    assert arguments == {}


def test_trainer_arguments_may_come_along():
    assert Task(__name__, "make_with_trainer").build()[2] == {"gradient_clip_val": 0.5}


@pytest.mark.parametrize("name", ["make_nothing", "make_lists"])
def test_something_else_than_module_and_data_is_refused(name):
    with pytest.raises(ValueError, match="must return a LightningModule") as caught:
        Task(__name__, name).build()
    assert "it returned builtins." in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [lambda: None, functools.partial(make), Classifier().forward, Classifier.configure_optimizers],
)
def test_a_function_that_no_other_process_can_find(function):
    with pytest.raises(ValueError, match="at the top level of a file"):
        load_task(function)


def test_a_function_within_a_function():
    def inner():
        return make()

    with pytest.raises(ValueError, match="at the top level of a file"):
        load_task(inner)


@pytest.mark.parametrize("text", ["train", "train.py", "module:", ":make", "module:a.b"])
def test_a_text_that_names_no_function(text):
    with pytest.raises(ValueError, match="give a function"):
        load_task(text)


@pytest.mark.parametrize("text", ["missing.py:make", "missing.yaml"])
def test_a_missing_file(text):
    with pytest.raises(FileNotFoundError, match="There is no file missing"):
        load_task(text)


def test_a_missing_module_or_function():
    with pytest.raises(ValueError, match="no module 'no_such_module'"):
        load_task("no_such_module:make").build()
    with pytest.raises(ValueError, match="no function 'no_such_function'"):
        load_task("json:no_such_function").build()


def test_an_import_error_inside_the_module_is_the_user_s(tmp_path):
    (tmp_path / "broken_task.py").write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_task(f"{tmp_path}/broken_task.py:make").build()


SCRIPT = """
from models import Classifier, images

def make():
    return Classifier(lr=0.125), images()

if __name__ == "__main__":
    raise SystemExit("ran as a script")
"""


@pytest.mark.parametrize("stem", ["my_task_script", "json", "not-a-name"])
def test_a_script_is_imported_and_not_run_whatever_its_name(tmp_path, stem):
    file = tmp_path / f"{stem}.py"
    file.write_text(SCRIPT)
    task = load_task(f"{file}:make")
    assert task.where == str(file)
    assert task.build()[0].lr == 0.125
    assert task.build()[0].lr == 0.125


@pytest.mark.parametrize("arguments", [["script.py"], ["-m", "script"]])
def test_a_function_of_the_running_script(tmp_path, arguments):
    (tmp_path / "script.py").write_text(
        "from lightning_perf.benchmark.task import load_task\n"
        "def make(): ...\n"
        "if __name__ == '__main__':\n"
        "    print(load_task(make))\n"
    )
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    where = "script" if "-m" in arguments else str(tmp_path / "script.py")
    assert run.stdout.strip() == str(Task(where, "make"))


def test_an_interactive_function_is_refused():
    program = (
        "from lightning_perf.benchmark.task import load_task\ndef make(): ...\nload_task(make)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "was defined interactively" in run.stderr


CONFIG = """
seed_everything: 3
trainer:
  max_epochs: 3
  gradient_clip_val: 0.25
  callbacks:
  - class_path: LearningRateMonitor
model:
  class_path: models.Classifier
  init_args: {lr: 0.125}
data:
  class_path: config_data.Images
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.5}
ckpt_path: null
"""
DATA = """
from lightning.pytorch import LightningDataModule
from models import images

class Images(LightningDataModule):
    def train_dataloader(self):
        return images()
"""


@pytest.mark.filterwarnings("ignore:`Classifier.configure_optimizers` will be overridden")
@pytest.mark.parametrize("nested", [False, True])
def test_a_lightning_cli_file(tmp_path, nested):
    (tmp_path / "config_data.py").write_text(DATA)
    text = f"fit:\n{textwrap.indent(CONFIG, '  ')}" if nested else CONFIG
    (tmp_path / "train.yaml").write_text(text)
    module, data, arguments = load_task("train.yaml").build()
    assert isinstance(module, LightningModule)
    assert module.lr == 0.125
    assert type(module.configure_optimizers()).__name__ == "AdamW"
    assert len(data.train_dataloader()) == 4
    assert arguments["max_epochs"] == 3
    assert arguments["gradient_clip_val"] == 0.25
    assert [type(callback).__name__ for callback in arguments["callbacks"]] == [
        "LearningRateMonitor"
    ]


@pytest.mark.filterwarnings("ignore:`Classifier.configure_optimizers` will be overridden")
def test_a_saved_configuration_with_a_preset_in_it(tmp_path):
    preset = "  - {class_path: lightning_perf.presets.Preset, init_args: {name: cpu}}"
    text = CONFIG.replace("  - class_path: LearningRateMonitor", preset)
    (tmp_path / "config_data.py").write_text(DATA)
    (tmp_path / "train.yaml").write_text(text)
    with pytest.raises(ValueError, match="preset 'cpu' written out"):
        load_task("train.yaml").build()


@pytest.mark.parametrize("text", ["trainer: {max_epochs: 3}", "", "model: {lr: 0.5}", "- 1"])
def test_a_file_without_a_class_path_for_the_model(tmp_path, text):
    (tmp_path / "train.yaml").write_text(text)
    with pytest.raises(ValueError, match="needs `model:` with a `class_path`"):
        load_task("train.yaml").build()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {class_path: models.NoSuchModel}", "NoSuchModel"),
        ("model: {class_path: models.Classifier, init_args: {depth: 3}}", "depth"),
    ],
)
def test_a_model_that_cannot_be_built(tmp_path, text, words):
    (tmp_path / "train.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        load_task("train.yaml").build()
