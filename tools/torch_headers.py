"""Downloads torch's C++ headers, for compiling the backend against torch that is not installed.

    python tools/torch_headers.py [--versions 2.11.0,...] [--into build/torch_headers]

Each wheel of torch on PyPI has about 500 MB. This reads its directory and the part with include/
alone, 10 MB, by HTTP range requests. setup.py compiles one module for each folder of headers if
PYCOMM_TORCH_HEADERS is set (see there). Headers are the same in all patch releases of a minor
version, and for all versions of Python and processors. Standard library only.
"""

import argparse
import io
import json
import re
import shutil
import sys
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX = "https://pypi.org/simple/torch/"
# The last patch release of each minor version that is supported.
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PREFIX = "torch/include/"
BLOCK = 12 << 20  # as large as the part of a wheel that has the headers
TIMEOUT_S = 60


class RemoteFile(io.RawIOBase):
    """A file on a web server, of which only the parts that are read are downloaded."""

    def __init__(self, url: str) -> None:
        self._url, self._position = url, 0
        self._size = int(self._get(0, 0)[1].rpartition("/")[2])

    def _get(self, first: int, last: int) -> tuple[bytes, str]:
        """The bytes from `first` to `last`, inclusive, and the header Content-Range."""
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            if reply.status != 206:
                sys.exit(f"pycomm: {self._url}: the server does not support range requests")
            return reply.read(), reply.headers["Content-Range"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # io passes these
        last = min(self._position + len(buffer), self._size) - 1
        if last < self._position:
            return 0
        content, _ = self._get(self._position, last)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def wheels() -> dict[str, str]:
    """For each released version of torch, the address of a wheel for Linux."""
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(INDEX, headers=accept)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        files = json.load(reply)["files"]
    names = ((re.match(r"torch-([\d.]+)-.*manylinux.*x86_64", f["filename"]), f) for f in files)
    return {match[1]: file["url"] for match, file in names if match}


def download(url: str, folder: Path) -> None:
    """Writes the headers of the wheel at `url` to folder/include, all or nothing."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(url), BLOCK)) as wheel:
        members = [one for one in wheel.infolist() if one.filename.startswith(PREFIX)]
        for one in sorted(members, key=lambda one: one.header_offset):  # few and long reads
            wheel.extract(one, part)
    (part / "torch").rename(folder)
    part.rmdir()


def main() -> None:
    """Downloads what is missing, and prints the folder of each version."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", default=",".join(VERSIONS))
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "torch_headers")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    missing = [v for v in options.versions.split(",") if not (options.into / v).exists()]
    found = wheels() if missing else {}
    for version in missing:
        if version not in found:
            sys.exit(f"pycomm: {INDEX} has no torch {version}")
        download(found[version], options.into / version)
    for version in options.versions.split(","):
        print(options.into / version)


if __name__ == "__main__":
    main()
