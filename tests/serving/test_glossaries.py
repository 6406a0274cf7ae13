"""Glossaries of clients on disk: changes at the same time, damaged files, limits, and the folder of --state."""

import asyncio
import shutil
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("python_multipart")

from nmtkit.serving import glossaries
from nmtkit.serving.glossaries import GlossaryStore, StoredGlossary, read_terms
from nmtkit.serving.keys import ApiKey
from nmtkit.serving.refusal import Refusal
from nmtkit.serving.server import state_folder
from nmtkit.text.glossary import load

PAIR, OTHER = ("en", "de"), ("en", "fr")


def created(store: GlossaryStore, account: str = "a") -> StoredGlossary:
    return store.create(account, name="name", dictionaries={PAIR: {"dog": "Hund", "cat": "Katze|Kater"}})


def test_glossaries_outlive_the_server_in_the_format_of_the_flag(tmp_path: Path) -> None:
    store = GlossaryStore(tmp_path)
    stored = created(store)
    store.change("a", stored.id, {OTHER: {"dog": "chien"}}, None)
    store.change("a", stored.id, {}, None, "new, “näme”")
    store.close()
    again = GlossaryStore(tmp_path).get("a", stored.id)
    assert (again.name, again.counts) == ("new, “näme”", {PAIR: 2, OTHER: 1})
    assert again.creation_time == stored.creation_time
    terms = load(GlossaryStore(tmp_path).path(again, PAIR)).terms
    assert [(term.source, term.targets) for term in terms] == [("dog", ("Hund",)), ("cat", ("Katze", "Kater"))]


@pytest.mark.parametrize(
    ("format", "line"), [("csv", '"fire, alarm","Feuermelder"'), ("tsv", "fire, alarm\tFeuermelder")]
)
def test_a_byte_order_mark_of_a_spreadsheet_is_no_part_of_a_term(format: str, line: str) -> None:
    """Such a CSV with quotes was refused, or its first term kept its quotes."""
    assert read_terms(f"\ufeff{line}\n", format) == {"fire, alarm": "Feuermelder"}


def test_without_a_folder_glossaries_end_with_the_server(tmp_path: Path) -> None:
    store = GlossaryStore(None)
    assert store.folder is None  # nothing is written before the first glossary
    created(store)
    folder = store.folder
    assert folder is not None and folder.is_dir()
    store.close()
    assert not folder.exists()


def test_additions_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    async def add() -> GlossaryStore:
        store = GlossaryStore(tmp_path)
        stored = created(store)
        changes = [store.write(store.change, "a", stored.id, {PAIR: {f"term{i}": "x"}}, 1000) for i in range(20)]
        await asyncio.gather(*changes, store.write(store.change, "a", stored.id, {}, None, "renamed"))
        return store

    (stored,) = asyncio.run(add()).listed("a")
    assert (stored.counts[PAIR], stored.name) == (22, "renamed")
    assert len(load(GlossaryStore(tmp_path).path(stored, PAIR)).terms) == 22


def test_a_change_that_is_refused_changes_no_dictionary(tmp_path: Path) -> None:
    """The dictionaries before the one that was too long were changed."""
    store = GlossaryStore(tmp_path)
    stored = created(store)
    with pytest.raises(Refusal) as error:
        store.change("a", stored.id, {PAIR: {"x": "y"}, OTHER: {"z": "y" * 100}}, 100, "new")
    assert error.value.status == 413 and store.get("a", stored.id) == stored
    assert len(load(store.path(stored, PAIR)).terms) == 2
    changed = store.change("a", stored.id, {PAIR: {"x": "y"}, OTHER: {"z": "y"}}, 100, "new")
    assert (changed.name, changed.counts) == ("new", {PAIR: 3, OTHER: 1})


def test_additions_are_bounded_together(tmp_path: Path) -> None:
    store = GlossaryStore(tmp_path)
    stored = created(store)
    store.change("a", stored.id, {PAIR: {"x": "y" * 60}}, 100)
    with pytest.raises(Refusal) as error:
        store.change("a", stored.id, {PAIR: {"z": "y" * 60}}, 100)
    assert error.value.status == 413 and "100" in error.value.message
    assert store.get("a", stored.id).counts[PAIR] == 3


def test_an_account_has_a_limited_number_of_glossaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glossaries, "MAX_GLOSSARIES", 2)
    store = GlossaryStore(tmp_path)
    first, _ = created(store), created(store)
    with pytest.raises(Refusal) as error:
        created(store)
    assert error.value.status == 456
    created(store, "b")
    store.delete("a", first.id)
    assert not (tmp_path / first.id).exists()
    created(store)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"counts": {"en-de": "x"}}', '{"counts": {}, "id": "../x"}'])
def test_a_damaged_file_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    stored = created(GlossaryStore(tmp_path))
    (tmp_path / stored.id / glossaries.FACTS).write_text(text)
    with pytest.raises(ValueError, match=stored.id):
        GlossaryStore(tmp_path)


def test_a_deletion_that_was_interrupted_leaves_no_glossary(tmp_path: Path) -> None:
    stored = created(GlossaryStore(tmp_path))
    (tmp_path / stored.id / glossaries.FACTS).unlink()
    assert GlossaryStore(tmp_path).glossaries == {}


def test_a_creation_that_was_interrupted_leaves_no_glossary(tmp_path: Path) -> None:
    """The server did not start again, because it read the unfinished folder as a damaged glossary."""
    stored = created(GlossaryStore(tmp_path))
    (tmp_path / stored.id).rename(tmp_path / f".{stored.id}.abcd")
    assert GlossaryStore(tmp_path).glossaries == {}


def test_a_folder_that_cannot_be_written_is_an_answer_to_the_client(tmp_path: Path) -> None:
    store = GlossaryStore(tmp_path / "store")
    (tmp_path / "store").write_text("a file in place of the folder")
    with pytest.raises(Refusal) as error:
        asyncio.run(store.write(store.create, "a", name="name", dictionaries={PAIR: {"dog": "Hund"}}))
    assert error.value.status == 507 and store.glossaries == {}


@pytest.mark.slow
def test_the_state_has_a_single_server_and_keeps_counts(tmp_path: Path) -> None:
    with state_folder(tmp_path / "new" / "state") as (usage, store):
        usage.count(ApiKey("a"), characters=5)
        stored = created(store)
        with pytest.raises(ValueError, match="--state"), state_folder(tmp_path / "new" / "state"):
            pass
    with state_folder(tmp_path / "new" / "state") as (usage, store):
        assert usage.counts(ApiKey("a"))["month"].characters == 5 and stored.id in store.glossaries
    shutil.rmtree(tmp_path / "new")


def test_the_counts_are_kept_if_the_server_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="failed"), state_folder(tmp_path) as (usage, _):
        usage.count(ApiKey("a"), characters=5)
        raise OSError("the server has failed")
    with state_folder(tmp_path) as (usage, _):
        assert usage.counts(ApiKey("a"))["month"].characters == 5


def test_a_wrong_row_of_csv_is_counted_as_a_row() -> None:
    """The second row is on the lines 2 and 3, so the third row is on line 4."""
    with pytest.raises(Refusal, match="row 3"):
        read_terms('dog,Hund\n"cat\n",Katze\ndog,Hündin\n', "csv")
    with pytest.raises(Refusal, match="line 2"):
        read_terms("dog\tHund\ndog\tHündin\n", "tsv")
