import bz2
import gzip
import io
import lzma
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard

from nmtkit.data.corpora import blocks as blocks_module
from nmtkit.data.corpora import lines as lines_module
from nmtkit.data.corpora.compression import open_bytes
from nmtkit.data.corpora.corpus import Corpus, locate_side
from nmtkit.data.corpora.lines import decode, line_windows, lists_of_lines
from nmtkit.data.dataset.dataset_tokenizer import sample_pairs
from nmtkit.data.dataset.parallel_corpora import ParallelCorpus
from nmtkit.scoring.texts import read_lines
from nmtkit.translation.lines import lines_of_stream


def read_all(
    source: Path, target: Path, folder: Path, shard: tuple[int, int] = (1, 1)
) -> list[tuple[int, bytes, bytes]]:
    return [
        (block.first_line, block.spans[0].read(), block.spans[1].read())
        for block in blocks_module.blocks([source, target], folder, 1000, shard)
    ]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_LINES", 4)
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 30)
    monkeypatch.setattr(blocks_module, "CHUNK", 7)
    monkeypatch.setattr(lines_module, "CHUNK", 7)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.usefixtures("small_blocks")
def test_blocks_are_the_lines_whatever_the_compression(suffix: str, tmp_path: Path) -> None:
    compress = {
        "": bytes,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": zstandard.ZstdCompressor().compress,
    }[suffix]
    rng = np.random.default_rng(3)
    sides = [[bytes(rng.choice(list(b"ab \x85"), rng.integers(0, 14))) for _ in range(37)] for _ in "st"]
    sides[0][5] = b"x" * 100  # longer than a block of bytes
    files = [tmp_path / f"t.{language}{suffix}" for language in ("en", "de")]
    for file, lines in zip(files, sides, strict=True):
        file.write_bytes(compress(b"\n".join(lines)))  # the last line lacks its line feed
    blocks = read_all(locate_side(str(tmp_path / "t"), "en"), locate_side(str(tmp_path / "t"), "de"), tmp_path)
    assert [b"".join(part) for part in zip(*(block[1:] for block in blocks), strict=True)] == [
        b"".join(line + b"\n" for line in lines) for lines in sides
    ]
    starts = np.cumsum([1] + [block[1].count(b"\n") for block in blocks])
    assert [block[0] for block in blocks] == starts[:-1].tolist()
    assert all(1 <= block[1].count(b"\n") <= 4 for block in blocks)
    assert all(block[1].count(b"\n") == 1 or max(map(len, block[1:])) <= 31 for block in blocks)
    assert sorted(tmp_path.iterdir()) == sorted(files)  # no temporary file is left


@pytest.mark.usefixtures("small_blocks")
def test_shards_have_every_block_once(tmp_path: Path) -> None:
    for language in ("en", "de"):
        (tmp_path / f"t.{language}").write_text("".join(f"{language} {index}\n" for index in range(50)))
    whole = read_all(tmp_path / "t.en", tmp_path / "t.de", tmp_path)
    parts = [read_all(tmp_path / "t.en", tmp_path / "t.de", tmp_path, (shard, 3)) for shard in (1, 2, 3)]
    assert sorted(block for part in parts for block in part) == sorted(whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_unequal_line_counts_name_both_files_and_counts(suffix: str, tmp_path: Path) -> None:
    compress = gzip.compress if suffix else bytes
    (tmp_path / f"t.en{suffix}").write_bytes(compress(b"a\n" * 20_000))
    (tmp_path / f"t.de{suffix}").write_bytes(compress(b"b\n" * 12_345))
    with pytest.raises(ValueError, match=r"t\.en\S* has 20,000 .*t\.de\S* has 12,345"):
        read_all(tmp_path / f"t.en{suffix}", tmp_path / f"t.de{suffix}", tmp_path)


def test_locate_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file: \S*t\.en"):
        locate_side(str(tmp_path / "t"), "en")
    (tmp_path / "t.en").touch()
    with pytest.raises(ValueError, match=r"t\.en is empty"):
        locate_side(str(tmp_path / "t"), "en")
    (tmp_path / "t.en.gz").write_bytes(gzip.compress(b"a\n"))
    with pytest.raises(ValueError, match=r"t\.en and \S*t\.en\.gz"):
        locate_side(str(tmp_path / "t"), "en")


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("chunk", [3, 4, 7, 1 << 20])
def test_line_ends_of_windows_and_byte_order_marks_are_removed_and_counted(
    chunk: int, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "CHUNK", chunk)
    monkeypatch.setattr(lines_module, "CHUNK", chunk)
    monkeypatch.setattr(blocks_module, "BLOCK_LINES", 2)
    text = "\ufeffa\r\n\r\nb\rc\n\ufeffd\r\re\r\r\nf\r".encode()
    expected = ["a", "", "b\rc", "\ufeffd\r\re\r", "f"]
    for language in ("en", "de"):
        (tmp_path / f"t.{language}{suffix}").write_bytes(gzip.compress(text) if suffix else text)
    source, target = (tmp_path / f"t.{language}{suffix}" for language in ("en", "de"))
    blocks = read_all(source, target, tmp_path)
    assert b"".join(block[1] for block in blocks).decode() == "".join(line + "\n" for line in expected)
    assert f"{source}: the byte-order mark" in caplog.text
    assert re.search(rf"{re.escape(str(target))}: .* 4 lines", caplog.text)
    assert [line for lines in lists_of_lines(source, 1000) for line in lines] == expected
    caplog.clear()
    assert [line for lines in line_windows(source, 2) for line in lines] == expected
    assert [line for lines in lines_of_stream(io.BytesIO(text), "standard input", 2) for line in lines] == expected
    assert read_lines(source) == expected
    for name in (source, "standard input", source):
        assert re.search(rf"{re.escape(str(name))}: .* 4 lines", caplog.text)


@pytest.mark.parametrize("compressed_frames", [1, 2])
def test_a_truncated_zst_file_is_an_error_wherever_it_ends(compressed_frames: int, tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    parts = [np.random.default_rng(seed).integers(0, 256, 300_000, np.uint8).tobytes() for seed in (0, 1)]
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    whole = skippable + b"".join(map(compressor.compress, [b"x" * 500_000, *parts[:compressed_frames]]))
    path = tmp_path / "t.zst"
    path.write_bytes(whole)
    with open_bytes(path) as file:
        assert file.read() == b"x" * 500_000 + b"".join(parts[:compressed_frames])
    for size in [*range(len(whole) - 12, len(whole)), len(whole) - 200_000, len(skippable) + 9]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"t\.zst is damaged"), open_bytes(path) as file:
            file.read()


def test_a_small_zst_file_of_much_text_is_read_in_bounded_memory(tmp_path: Path) -> None:
    header = bytes.fromhex("28b52ffd0058")  # a frame of unknown size
    block = (1 << 17 << 3 | 2).to_bytes(3, "little") + b"a"  # stands for 128 KiB of text
    (tmp_path / "t.zst").write_bytes(header + 4096 * block)
    tracemalloc.start()
    try:
        with open_bytes(tmp_path / "t.zst") as file:
            assert file.read(4) == b"aaaa"
        assert tracemalloc.get_traced_memory()[1] < 100 << 20  # the whole text has 512 MiB
    finally:
        tracemalloc.stop()


def test_too_little_memory_is_not_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> bytes:
        raise MemoryError

    (tmp_path / "t.gz").write_bytes(b"")
    monkeypatch.setattr("gzip.GzipFile.read", read)
    with open_bytes(tmp_path / "t.gz") as file, pytest.raises(MemoryError):
        file.read()


def test_missing_zstandard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "t.en.zst").write_bytes(b"x")
    with pytest.raises(ImportError, match=r"pip install 'nmtkit\[zstd\]'"):
        locate_side(str(tmp_path / "t"), "en")


COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
READERS = {
    "blocks": lambda path: read_all(path, path, path.parent),
    "line_lists": lambda path: list(lists_of_lines(path, 1000)),
    "line_windows": lambda path: list(line_windows(path, 100)),
    "read_lines": read_lines,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_reader_tells_of_a_truncated_file(suffix: str, reader: str, tmp_path: Path) -> None:
    text = b"".join(b"%d\n" % number for number in np.random.default_rng(0).integers(0, 1 << 60, 20_000))
    (tmp_path / f"t{suffix}").write_bytes(COMPRESS[suffix](text)[:-10])
    with pytest.raises(ValueError, match=rf"t\{suffix} is damaged"):
        READERS[reader](tmp_path / f"t{suffix}")


def test_a_file_that_is_not_what_its_name_says_is_an_error(tmp_path: Path) -> None:
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        (tmp_path / f"t.en{suffix}").write_bytes(b"plain text\n")
        with pytest.raises(ValueError, match=rf"t\.en{suffix} is damaged"):
            locate_side(str(tmp_path / "t"), "en")
        (tmp_path / f"t.en{suffix}").unlink()


def test_bad_utf8_names_file_line_and_byte() -> None:
    good = "grün\n".encode()
    assert decode(good, Path("t.de"), 1) == "grün\n"
    with pytest.raises(ValueError, match=r"t\.de:12: byte 3"):
        decode(good * 2 + b"ab\xff\n" + good, Path("t.de"), 10)
    for bad in (b"\xed\xa0\x80", b"\xc0\xaf", b"\xe2\x96", "ß".encode("latin-1")):
        with pytest.raises(ValueError, match=r"t\.de:7"):
            decode(bad, Path("t.de"), 7)


def test_text_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    for language in ("en", "de"):
        (tmp_path / f"t.{language}").write_text("a\nb\n")
    (block,) = blocks_module.blocks([tmp_path / "t.en", tmp_path / "t.de"], tmp_path, 1000)
    (tmp_path / "t.en").write_text("a\n")
    with pytest.raises(ValueError, match="shorter"):
        block.spans[0].read()


@pytest.mark.slow
@pytest.mark.parametrize("line_feed", ["\n", ""])
def test_memory_does_not_grow_with_an_over_long_line(line_feed: str, tmp_path: Path) -> None:
    size = 48 << 20
    for language in ("en", "de"):
        with gzip.open(tmp_path / f"t.{language}.gz", "wb", compresslevel=1) as file:
            file.write(f"first {language}\n".encode())
            for _ in range(size >> 20):
                file.write(b"x" * (1 << 20))
            file.write(line_feed.encode() + b"last\n" * bool(line_feed))
    corpus = ParallelCorpus.of(Corpus(tmp_path / "t.en.gz", tmp_path / "t.de.gz"))
    tracemalloc.start()
    spans = []
    for block in corpus.blocks(tmp_path, 16_384):
        spans.append((block.first_line, block.lines, block.over_long, block.spans[0].size))
        if not block.over_long:
            assert block.spans[1].read() == (b"last\n" if block.first_line == 3 else b"first de\n")
    sample = sample_pairs([corpus], 10, 1, 16_384)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert spans[:2] == [(1, 1, False, 9), (2, 1, True, size + len(line_feed))]
    assert spans[2:] == ([(3, 1, False, 5)] if line_feed else [])
    assert sample == (["first en", "last"], ["first de", "last"]) if line_feed else (["first en"], ["first de"])
    assert peak < 24 << 20
