"""setup.py: nvcc's options from CUDAARCHS and the machine, and the page for a package index."""

import os
import re
import runpy
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import setuptools
from paths import ROOT

BOTH = "-gencode=arch=compute_{0},code=[sm_{0},compute_{0}]"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names of setup.py, which has built nothing."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.delenv("CUDAARCHS", raising=False)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")))


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        ("80;90", [BOTH.format("80"), BOTH.format("90")]),
        ("90a, 120", [BOTH.format("90a"), BOTH.format("120")]),
        ("90-real", ["-gencode=arch=compute_90,code=sm_90"]),
        ("90-virtual", ["-gencode=arch=compute_90,code=compute_90"]),
        ("all", ["-arch=all"]),
        ("all-major", ["-arch=all-major"]),
    ],
)
def test_architectures_are_cmakes(
    build: Any, monkeypatch: pytest.MonkeyPatch, value: str, flags: list[str]
) -> None:
    monkeypatch.setenv("CUDAARCHS", value)
    assert build.gpu_flags() == flags


@pytest.mark.parametrize("value", ["sm_90", "9.0", "90;native", "90-fast"])
def test_other_names_are_rejected(build: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDAARCHS", value)
    with pytest.raises(SystemExit, match="is no architecture"):
        build.gpu_flags()


def test_build_for_this_machine_has_machine_code_and_ptx(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="9.0\n9.0\n12.0\n")
    )
    monkeypatch.setenv("CUDAARCHS", "native")
    assert build.gpu_flags() == [BOTH.format("120"), BOTH.format("90")]
    monkeypatch.delenv("CUDAARCHS")
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    assert build.gpu_flags() == [BOTH.format("120"), BOTH.format("90")]


def test_build_without_a_gpu_has_ptx(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    assert build.gpu_flags() == ["-gencode=arch=compute_75,code=compute_75"]


def test_links_of_the_readme_are_absolute_for_a_package_index(build: Any) -> None:
    text = build.readme("https://host/{}/main")
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "](https://host/raw/main/docs/pictures/time_to_loss.svg)" in text
    assert "](https://host/blob/main/docs/install.md)" in text
    assert build.readme("") == (ROOT / "README.md").read_text()
