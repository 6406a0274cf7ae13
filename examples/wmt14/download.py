#!/usr/bin/env python3
"""Downloads and unpacks the WMT 2014 texts in corpora.toml. After an interruption, run it again to resume.

    python download.py en-de en-fr --folder data

This command writes data/en-de/europarl-v7.en, .de and so on. The archives, and a record of their sizes and SHA-256, are
in data/archives. The script needs Python 3.11 and nothing else. English-German needs 1.7 GB of downloads.
English-French also needs the UN and the Giga archives; the Giga archive alone has 2.6 GB.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

CHUNK = 1 << 20
ATTEMPTS = 8  # consecutive attempts without a new byte


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", choices=["en-de", "en-fr"])
    parser.add_argument("--folder", type=Path, default=Path("data"))
    parser.add_argument("--corpora", type=Path, default=Path(__file__).with_name("corpora.toml"))
    parser.add_argument("--accept-counts", action="store_true", help="only warn of unexpected line counts")
    arguments = parser.parse_args()
    corpora = tomllib.loads(arguments.corpora.read_text())
    try:
        for pair in arguments.pairs:
            texts = [text for text in corpora["texts"] if text["pair"] == pair]
            for name in dict.fromkeys(text["archive"] for text in texts):
                archive = fetch(corpora["archives"][name], arguments.folder / "archives")
                unpack(archive, [text for text in texts if text["archive"] == name], arguments.folder / pair)
            for text in texts:
                check_lines(text, arguments.folder / pair, arguments.accept_counts)
    except (OSError, ValueError) as error:
        sys.exit(f"download.py: error: {error}")


def fetch(archive: dict[str, str], folder: Path) -> Path:
    """Downloads the archive into `folder` if it is missing, and records or compares its checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / archive["url"].rsplit("/", 1)[-1]
    record_path = folder / "downloads.json"
    record = json.loads(record_path.read_text()) if record_path.is_file() else {}
    if path.is_file() and record.get(path.name, {}).get("bytes") == path.stat().st_size:
        return path
    if not path.is_file():
        part = path.with_name(path.name + ".part")
        resume(archive["url"], part)
        part.rename(path)
    sums = {"bytes": path.stat().st_size, "sha256": checksum(path, "sha256"), "md5": checksum(path, "md5")}
    if "md5" in archive and archive["md5"] != sums["md5"]:
        raise ValueError(
            f"{path}: MD5 {sums['md5']}, but {archive['md5']} was published; remove the file and try again"
        )
    known = record.setdefault(path.name, {"url": archive["url"], "fetched": time.strftime("%Y-%m-%d"), **sums})
    if known["sha256"] != sums["sha256"]:
        raise ValueError(
            f"{path}: SHA-256 {sums['sha256']}, but {known['sha256']} at the first download on {known['fetched']}"
        )
    write_whole(record_path, json.dumps(record, indent=2).encode())
    print(f"{path.name}: {sums['bytes']:,} bytes, SHA-256 {sums['sha256']}")
    return path


def resume(url: str, part: Path) -> None:
    """Downloads `url` into `part`, starting at the byte where an earlier attempt stopped."""
    attempts = 0
    while True:
        before = part.stat().st_size if part.is_file() else 0
        try:
            if fetch_rest(url, part, before):
                return
        except urllib.error.HTTPError as error:
            if 400 <= error.code < 500 and error.code != 429:
                raise ValueError(f"{url}: the server answers {error.code} {error.reason}") from error
            problem = str(error)
        except OSError as error:
            problem = str(error)
        else:
            problem = "the connection closed early"
        after = part.stat().st_size if part.is_file() else 0
        attempts = 0 if after > before else attempts + 1
        if attempts == ATTEMPTS:
            raise OSError(f"{url}: {problem}; {after:,} bytes are kept; run this again to resume")
        if attempts:
            time.sleep(2**attempts)


def fetch_rest(url: str, part: Path, start: int) -> bool:
    """Makes one attempt. Returns whether the file is complete."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{start}":
            return True  # the file is complete
        raise
    with response:
        if response.status != 206:
            start = 0  # the server does not support ranges and sends the whole file
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        with part.open("r+b" if start else "wb") as file:
            file.seek(start)
            shown = 0.0
            while chunk := response.read(CHUNK):
                file.write(chunk)
                if sys.stderr.isatty() and time.monotonic() - shown > 0.5:
                    shown = time.monotonic()
                    share = f" of {total / 1e6:,.0f}" if total else ""
                    print(f"\r{part.name}: {file.tell() / 1e6:,.0f}{share} MB ", end="", file=sys.stderr)
            if sys.stderr.isatty():
                print(file=sys.stderr)
            return total is None or file.tell() == total


def checksum(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def unpack(archive: Path, texts: list[dict], folder: Path) -> None:
    """Writes the texts of the archive into `folder`, except texts that exist."""
    wanted = {}
    for text in texts:
        for language, member in text["members"].items():
            target = folder / f"{text['name']}.{language}{'.gz' if member.endswith('.gz') else ''}"
            if not target.is_file():
                wanted[member] = target
    if not wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for entry in tar:
            target = wanted.pop(entry.name.removeprefix("./"), None)
            if target is None:
                continue
            content = tar.extractfile(entry)
            if content is None:
                raise ValueError(f"{archive}: {entry.name} is not a file")
            partial = target.with_name(target.name + ".part")
            with content, partial.open("wb") as file:
                if entry.name.endswith(".sgm"):
                    file.writelines(line + b"\n" for line in segments(content.read()))
                else:
                    shutil.copyfileobj(content, file, CHUNK)
            partial.rename(target)
            print(f"{target} from {archive.name}")
            if not wanted:
                return
    raise ValueError(f"{archive} lacks {', '.join(wanted)}")


def segments(sgm: bytes) -> list[bytes]:
    """Returns the sentences of an SGM file. Runs of white space become one space, as in sacreBLEU."""
    return [b" ".join(text.split()) for text in re.findall(rb"<seg[^>]*>(.*?)</seg>", sgm, flags=re.DOTALL)]


def check_lines(text: dict, folder: Path, accept: bool) -> None:
    for language, member in text["members"].items():
        path = folder / f"{text['name']}.{language}{'.gz' if member.endswith('.gz') else ''}"
        lines = count_lines(path)
        if lines == text["lines"]:
            print(f"{path}: {lines:,} lines, as counted by {text['counted_by']}")
            continue
        message = f"{path} has {lines:,} lines; {text['lines']:,} were counted by {text['counted_by']}"
        if not accept:
            raise ValueError(f"{message}. Remove the file to unpack it again, or continue with --accept-counts")
        print(f"warning: {message}", file=sys.stderr)


def count_lines(path: Path) -> int:
    r"""Counts the lines of a text. Only \n ends a line, because lines of these corpora contain \r."""
    lines, last = 0, b"\n"
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while chunk := file.read(CHUNK):
            lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines + (last != b"\n")


def write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(content)
    os.replace(partial, path)


if __name__ == "__main__":
    main()
