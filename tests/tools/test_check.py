"""`make check` finds the tests of what changed."""

import subprocess

import pytest

from tools import check


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("nanovllm/scheduler/scheduler.py", "tests/scheduler/test_scheduler.py"),
        ("nanovllm/features/structured/grammar.py", "tests/structured/test_grammar.py"),
        ("nanovllm/kernels/cpu/csrc/linear.c", "tests/kernels/cpu"),
        ("nanovllm/testing/fake_engine.py", "tests/scheduler/test_scheduler.py"),
        ("docs/cpu.md", "tests/test_docs.py"),
    ],
)
def test_a_files_tests(changed, tests):
    assert tests in check.find_tests([changed])


def test_a_file_without_tests_of_its_name_has_those_that_import_it(tmp_path):
    source = tmp_path / "tests" / "layers"
    source.mkdir(parents=True)
    (source / "test_norm.py").write_text("from nanovllm.layers.norm import Norm")
    (source / "test_other.py").write_text("from nanovllm.layers import other")
    (source / "test_linear.py").write_text("from nanovllm.layers.linear import Linear")

    def found(*changed: str) -> list[str]:
        return check.find_tests([*changed], tmp_path)

    assert found("nanovllm/layers/norm.py") == ["tests/layers/test_norm.py"]
    (source / "test_norm.py").rename(source / "test_norms_and_more.py")
    assert found("nanovllm/layers/other.py") == ["tests/layers/test_other.py"]
    assert found("nanovllm/layers/unknown.py") == ["tests/layers"]
    assert found("nanovllm/layers/norm.py", "nanovllm/layers/linear.py") == [
        "tests/layers/test_linear.py",
        "tests/layers/test_norms_and_more.py",
    ]
    assert found("tests/conftest.py", "Makefile", "nanovllm/llm.py") == []


def test_changes_are_those_since_main_and_of_the_working_tree(tmp_path, monkeypatch):
    def git(*command: str) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-m", name)

    monkeypatch.setattr(check, "ROOT", tmp_path)
    git("init", "-b", "main")
    commit("first")
    commit("second")
    assert check.changed_files() == ["second"], "on main: the last commit"
    git("checkout", "-b", "branch")
    commit("third")
    commit("fourth")
    (tmp_path / "first").write_text("changed")
    (tmp_path / "new").write_text("")
    assert check.changed_files() == ["first", "fourth", "third", "new"]
    git("checkout", "main", "--force")
    git("branch", "-D", "branch")
    (tmp_path / "second").unlink()
    assert "second" not in check.changed_files()
