"""The README and the docs run as they are printed."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import mslmn

ROOT = Path(__file__).parent.parent


def python_blocks(path):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(), re.MULTILINE | re.DOTALL)


def test_the_first_block_of_the_readme_is_at_most_ten_lines_and_does_what_it_says(capsys):
    block = python_blocks("README.md")[0]
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    names = {}
    exec(block, names)
    assert capsys.readouterr().out == "torch.Size([41, 350]) tensor([97, 41, 68])\n"
    assert names["state"].clock == 300
    assert "# [41, 2 * 7 * 25], tensor([97, 41, 68])" in block


@pytest.mark.parametrize("path", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))])
def test_blocks_of_the_docs_run(path):
    for block in python_blocks(path):
        exec(block, {})


def test_public_names():
    """A new public name is a decision: it is added here, and to the README."""
    assert set(mslmn.__all__) == {
        "LMN", "MSLMN", "ClockworkRNN", "LinearAutoencoder", "Plan", "SequenceModel", "State", "add_module", "clock",
        "direct_gradients", "fit", "load", "nearest_size", "objectives", "save", "set_backend", "set_forget_gate_bias",
        "standardise",
    }  # fmt: skip
    readme = (ROOT / "README.md").read_text()
    for name in mslmn.__all__:
        assert hasattr(mslmn, name) and f"mslmn.{name}" in readme


def test_one_version():
    """pyproject.toml has it; the package, its metadata and the newest entry of the changelog agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert mslmn.__version__ == version("mslmn") == project == newest


def test_files_listed_in_the_readme_exist_and_none_is_missing():
    readme = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"^    src/mslmn/(\S+)", readme, re.MULTILINE))
    present = {p.name for p in (ROOT / "src/mslmn").glob("*.py")} - {"__init__.py"}
    present |= {f"{p.parent.name}/" for p in (ROOT / "src/mslmn").glob("*/__init__.py")}
    assert listed == present


@pytest.mark.parametrize("path", sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("examples/*.py")))
def test_examples_run(path, tmp_path):
    result = subprocess.run([sys.executable, ROOT / path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert not result.stderr and result.stdout
    for picture in re.findall(r"^wrote (\S+\.png)$", result.stdout, re.MULTILINE):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_importing_the_package_does_not_import_scikit_learn():
    code = "import sys, mslmn; assert 'sklearn' not in sys.modules; mslmn.LinearAutoencoder(1)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'LSTM'"):
        mslmn.LSTM  # noqa: B018
