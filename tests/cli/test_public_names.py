"""`import bessemer`: its public names work, also after the subpackages were imported, and nothing heavy is loaded."""

import subprocess
import sys

import pytest

import bessemer


@pytest.mark.parametrize("name", [name for name in bessemer.__all__ if name != "__version__"])
def test_a_public_name_is_what_it_says(name: str) -> None:
    assert getattr(bessemer, name).__module__.startswith("bessemer.")
    assert getattr(bessemer, name) is getattr(bessemer, name)
    assert callable(getattr(bessemer, name))
    assert name in dir(bessemer)


def test_training_is_callable_however_often_it_is_asked_for() -> None:
    import bessemer.train.loop

    assert bessemer.train_run is bessemer.train_run
    assert callable(bessemer.train_run)
    assert not callable(bessemer.train)  # the subpackage keeps its name


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        bessemer.nonsense  # noqa: B018


def test_spec_run_and_plan_need_neither_torch_nor_numpy() -> None:
    code = (
        "import pkgutil, importlib, sys, bessemer.spec, bessemer.run, bessemer.plan\n"
        "for package in (bessemer.spec, bessemer.run, bessemer.plan):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "assert 'bessemer.plan.decide' in sys.modules\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
