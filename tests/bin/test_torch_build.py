"""Which build of torch the installers take, and what they say before it is downloaded; by the real pip, from folders of empty wheels."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
set -euo pipefail
source bin/torch_build.sh
cpu_index=$2 gpu=$3
has_gpu() { [ "$gpu" = yes ]; }
pip=("$1" -m pip --disable-pip-version-check install --quiet "${@:4}")
choose_torch 'small' 'large'
echo "torch from: ${torch_from[*]}"
"""


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """An index for each build: a CUDA build's version has no suffix, and it requires NVIDIA's packages."""
    for build, version, needs in (("cuda", "2.13.0", 'nvidia-cudnn-cu13; platform_system == "Linux"'), ("cpu", "2.13.0+cpu", "sympy")):
        folder = tmp_path / build / "torch"
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            about = f"torch-{version}.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\nRequires-Dist: {needs}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
        (folder / "index.html").write_text(f'<a href="torch-{version}-py3-none-any.whl">torch-{version}-py3-none-any.whl</a>')
    return tmp_path


def choose(*options: str, cpu_index: str, has_gpu: bool = False) -> list[str]:
    """The lines that choose_torch says; last the options to install torch with."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | {"PIP_CONFIG_FILE": os.devnull}
    command = ["bash", "-c", SCRIPT, "bin/install", sys.executable, cpu_index, "yes" if has_gpu else "no", *options]
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_machine_without_a_gpu_gets_the_cpu_build_of_pytorchs_index(wheels: Path) -> None:
    here, cpu = (wheels / "cuda").as_uri(), (wheels / "cpu").as_uri()
    said = choose("--ignore-installed", "--index-url", here, cpu_index=cpu)
    assert said == ["install: torch's CPU build: small", f"torch from: --index-url {cpu}"]


def test_a_cpu_build_where_pip_is_set_up_to_look_needs_no_other_index(wheels: Path) -> None:
    folder = str(wheels / "cpu" / "torch")
    said = choose("--ignore-installed", "--index-url", (wheels / "cuda").as_uri(), "--find-links", folder, cpu_index="http://127.0.0.1:9")
    assert said == ["install: torch's CPU build: small", "torch from: "]


def test_without_a_cpu_build_the_cuda_build_is_taken_and_said_with_its_size_and_the_remedy(wheels: Path) -> None:
    here = (wheels / "cuda").as_uri()
    said = choose("--ignore-installed", "--index-url", here, cpu_index="http://127.0.0.1:9")
    assert said[0] == "install: torch's CUDA build, though this machine has no GPU: large"
    assert "no CPU build (small), neither where it is set up to look nor at http://127.0.0.1:9" in said[1]
    assert "PIP_EXTRA_INDEX_URL=URL or PIP_FIND_LINKS=DIR" in said[2]
    assert said[3:] == ["torch from: "]


def test_a_machine_with_a_gpu_keeps_the_cuda_build(wheels: Path) -> None:
    here = (wheels / "cuda").as_uri()
    said = choose("--ignore-installed", "--index-url", here, cpu_index=(wheels / "cpu").as_uri(), has_gpu=True)
    assert said == ["install: torch's CUDA build, as this machine has a GPU: large", "torch from: "]


def test_an_installed_torch_is_left_without_a_word(wheels: Path) -> None:
    here = (wheels / "cuda").as_uri()
    assert choose("--index-url", here, cpu_index=(wheels / "cpu").as_uri()) == ["torch from: "]
