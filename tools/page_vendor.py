"""Puts the libraries of the server's pages into nanovllm/apps/server/page/vendor/, unchanged.

    python -m tools.page_vendor

npm fetches the pinned packages. A file with another sha256 than the one here is refused; to update
a library, change its version and what the refusal names.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VENDOR = Path(__file__).parents[1] / "nanovllm/apps/server/page/vendor"


class File(NamedTuple):
    """A file that the pages need, or a licence."""

    path: str
    """In its package."""
    name: str
    """In VENDOR."""
    sha256: str


PACKAGES = {
    "markdown-it@15.0.3": (
        File(
            "dist/browser/markdown-it.esm.min.mjs",
            "markdown-it.js",
            "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30",
        ),
        File(
            "LICENSE",
            "markdown-it.LICENSE",
            "792c48c5a849a15fdf9e37e8bcf9e6d1dd13b32b46c642a748a0a46a9919d473",
        ),
    ),
    "dompurify@3.5.0": (
        File(
            "dist/purify.es.mjs",
            "purify.js",
            "5e8c53cd086a012531fc754ee6a7ad7a02e8a06fc4dadd805b912e128c3f6c58",
        ),
        File(
            "LICENSE",
            "purify.LICENSE",
            "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
        ),
    ),
    "@highlightjs/cdn-assets@11.12.0": (
        File(
            "es/highlight.min.js",
            "highlight.js",
            "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
        ),
        File(
            "LICENSE",
            "highlight.LICENSE",
            "6c081431591d9df696c82dc598fe1423765b8a299b200ed00b281afd0f64c490",
        ),
    ),
    "idb-keyval@6.3.0": (
        File(
            "dist/index.js",
            "idb-keyval.js",
            "480f1d31a40b5720fbaaee44c1a21d83392c6cf9516672007813a1824483a058",
        ),
        File(
            "LICENCE",
            "idb-keyval.LICENSE",
            "20c27d6339619eeb3113cb865d4e98a3f559e52964fc75caea9cb5fa72674565",
        ),
    ),
}
"""By a package of npm and its version."""


def fetch(package: str, files: tuple[File, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the package's files; end this process if one is another."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["npm", "pack", "--silent", "--pack-destination", directory, package]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        with tarfile.open(Path(directory) / done.stdout.split()[-1]) as archive:
            for file in files:
                member = archive.extractfile(f"package/{file.path}")
                assert member is not None
                data = member.read()
                found = hashlib.sha256(data).hexdigest()
                if found != file.sha256:
                    sys.exit(f"{file.path} of {package} has the sha256 {found}, not {file.sha256}")
                yield file.name, data


def main() -> None:
    """Fetch all, then write the folder anew."""
    found = [each for package, files in PACKAGES.items() for each in fetch(package, files)]
    VENDOR.mkdir(exist_ok=True)
    for old in VENDOR.iterdir():
        old.unlink()
    for name, data in found:
        (VENDOR / name).write_bytes(data)


if __name__ == "__main__":
    main()
