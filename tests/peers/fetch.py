"""Fetches the tests of the installed transformers and PEFT into build/peers: from their sdists on the package index.

transformers' sdist lacks two files that its tests of models import. One, the tests of `generate`, comes from GitHub;
where that cannot be reached, they are left out.
"""

import subprocess
import sys
import tarfile
import urllib.request
from importlib.metadata import version
from pathlib import Path

PEERS = Path("build/peers")
GENERATION = "generation/test_utils.py"
URL = "https://raw.githubusercontent.com/huggingface/transformers/v{}/tests/" + GENERATION


def fetch_tests(package: str) -> Path:
    """The folder `NAME_tests` of a package's tests, an importable one."""
    how = ["--no-deps", "--no-binary", package, "--no-build-isolation", "--dest", str(PEERS)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *how, f"{package}=={version(package)}"], check=True)
    folder, name = PEERS / f"{package}_tests", f"{package}-{version(package)}"
    with tarfile.open(PEERS / f"{name}.tar.gz") as archive:
        archive.extractall(PEERS, [each for each in archive if each.name.startswith(f"{name}/tests/")], filter="data")
    (PEERS / name / "tests").rename(folder)
    (folder / "__init__.py").touch()
    return folder


def main() -> None:
    """Fetches both."""
    PEERS.mkdir(parents=True)
    folder = fetch_tests("transformers")
    try:
        with urllib.request.urlopen(URL.format(version("transformers")), timeout=30) as response:
            generation = response.read()
    except OSError as error:
        print(f"transformers' tests of `generate` are left out: {URL.format(version('transformers'))}: {error}")
        generation = b"class GenerationTesterMixin: ...\n"
    for name, content in {
        GENERATION: generation,
        "exporters/test_export.py": b"class ExportTesterMixin: ...\n",
    }.items():
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(content)
        (folder / name).with_name("__init__.py").touch()
    fetch_tests("peft")
    target = ["--target", str(PEERS / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", *target, "parameterized"], check=True)


if __name__ == "__main__":
    main()
