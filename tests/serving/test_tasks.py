"""Workers, run in this process, give the translations of `generate` with the text options of the operator."""

import dataclasses
import pickle
import queue
import socket
import threading
from pathlib import Path

import pytest
from builders import (
    REAL_LINES,
    save_ending_transformer,
    save_transformer,
    tiny_model,
    tiny_tokenizer,
    tiny_transformer,
)

from nmtkit.cli.serve import command
from nmtkit.data import checkpoint_file
from nmtkit.jobs.processes import SocketChannel
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint, to_checkpoint, vocabulary_of
from nmtkit.models.formats import huggingface
from nmtkit.serving.config import OWN_TEXT_FIELDS, ModelPath, ServeConfig, ServeJob
from nmtkit.serving.fair_queue import BatchKey, LineBatch
from nmtkit.serving.loading import ServedModel, load_models
from nmtkit.serving.refusal import Refusal
from nmtkit.serving.workers import SlotWorker, translate_or_fail, work
from nmtkit.text.alignment import words
from nmtkit.translation.engines import Decoder
from nmtkit.translation.engines.continuous_batching import TOKENS_PER_SLOT
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.pivot import PivotTranslator
from nmtkit.translation.search.logits_processors.second_model import LMFusionConfig
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import Translator

IMPORTED = Path(__file__).parents[1] / "models" / "formats" / "huggingface"
PAIR = ("en", "de")
SHORT = {"max_len_b": 5}
LINES = [*REAL_LINES, "See {name} at http://example.org/x?y=1.", "", "ALL ARE EQUAL BEFORE THE LAW.", "{a} %s"]
TEXT = TextOptions(protect_spans=True, truecase_caps=True, protect=("#[0-9]+",))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_transformer(tmp_path_factory.mktemp("model") / "model.pt")


def task(texts, pair=PAIR, **fields):
    return LineBatch(BatchKey(pair, **fields), texts)


def job(*paths, text=None, search=None, translator=None, processors=None, engine="torch", **config):
    """Returns the job that arrives in the process of the models."""
    job = ServeJob(
        config=ServeConfig(workers=1, **config), paths=[ModelPath(path, pair) for pair, path in paths], plugins=[],
        search=search or SearchOptions(**SHORT), devices=DeviceOptions(device="cpu", engine=engine),
        translator=translator or TranslatorOptions(), text=text or TextOptions(), processors=processors or {},
    )  # fmt: skip
    return pickle.loads(pickle.dumps(job))


def generated(path, text, lines=LINES):
    """The translations of `generate` with these options."""
    translator = Translator.load(path)
    return [found.text for found in translator.stream(lines, translator.pipeline(SearchOptions(**SHORT), text))]


def texts_of(answer):
    assert isinstance(answer, list), answer
    return [line[0]["text"] for line in answer]


@pytest.mark.slow
def test_lines_are_treated_as_the_operator_asks(path):
    models = load_models(job((PAIR, path), text=TEXT))
    found = texts_of(translate_or_fail(models, task(LINES)))
    assert found == generated(path, TEXT) != generated(path, TextOptions())
    assert "http://example.org/x?y=1" in found[-4] and found[-1] == "{a} %s"


def test_a_request_of_html_has_its_tags_and_the_operators_treatment(path):
    models = load_models(job((PAIR, path), text=TEXT))
    source = "<p>All are <b>equal</b> #12 before the law.</p>"
    found = texts_of(translate_or_fail(models, task([source], html=True)))
    assert found == generated(path, dataclasses.replace(TEXT, markup="html"), [source])
    assert "#12" in found[0] and "<b>" in found[0]


@pytest.mark.slow
def test_terms_of_the_operators_glossary_are_required(path, tmp_path):
    terms = tmp_path / "terms.tsv"
    terms.write_text("law\tliberty|spirit\nrights\tequal\n")
    text = TextOptions(glossary=terms)
    models = load_models(job((PAIR, path), text=text))
    found = texts_of(translate_or_fail(models, task(LINES)))
    assert found == generated(path, text) != generated(path, TextOptions())
    assert "equal" in found[0] and any(word in found[6].lower() for word in ("liberty", "spirit"))
    assert [
        texts_of(answer) for answer in slot_answers({PAIR: unpacked(path, text)}, [task(LINES)], False).values()
    ] == [found]
    terms.write_text("law\n")
    with pytest.raises(ValueError, match=r"terms.tsv:1: no tab"):
        load_models(job((PAIR, path), text=text))
    assert texts_of(translate_or_fail(models, task(LINES))) == found
    terms.write_text("law\tspirit\n")
    newer = load_models(job((PAIR, path), text=text))
    terms.unlink()
    assert texts_of(translate_or_fail(newer, task(LINES))) != found
    assert [texts_of(answer) for answer in slot_answers(models, [task(LINES)], False).values()] == [found]


@pytest.mark.slow
def test_the_server_searches_with_the_operators_language_model(path, tmp_path):
    _, tokenizer = from_checkpoint(path)
    lm = tiny_transformer(vocabulary_of(tokenizer), encoder_layers=0, sharpness=4.0)
    checkpoint_file.save(tmp_path / "lm.pt", to_checkpoint(lm, "transformer_lm_tiny", lm.config, tokenizer, [], 1))
    search = SearchOptions(**SHORT, logits_processors=("lm_fusion",))
    fused = job((PAIR, path), search=search, processors={"lm_fusion": {"lm": str(tmp_path / "lm.pt")}})
    found = texts_of(translate_or_fail(load_models(fused), task(LINES)))
    alone = Translator.load(path)
    with_config = dataclasses.replace(search, processor_configs=(LMFusionConfig(lm=tmp_path / "lm.pt"),))
    assert found == [each.text for each in alone.stream(LINES, alone.pipeline(with_config))]
    assert found != generated(path, TextOptions())
    with pytest.raises(ValueError, match="lm_fusion needs --lm FILE"):
        load_models(job((PAIR, path), search=search))


@pytest.mark.slow
def test_a_short_line_is_answered_between_the_parts_of_a_long_line(path):
    """Both tasks have arrived before the worker begins. The long line is cut into parts of several batches."""
    models = load_models(job((PAIR, path), translator=TranslatorOptions(max_tokens=32, max_source_len=20)))
    ours, theirs = channels()
    long = " ".join(REAL_LINES * 4)
    ours.send((1, task([long])))
    ours.send((2, task(["All are equal."])))
    worker = threading.Thread(target=work, args=(theirs, models))
    worker.start()
    answers = [ours.receive(wait=True), ours.receive(wait=True)]
    ours.close()
    worker.join()
    assert [number for number, _ in answers] == [2, 1]
    assert texts_of(answers[0][1]) == generated(path, TextOptions(), ["All are equal."])
    assert answers[1][1] == translate_or_fail(models, task([long]))


@pytest.mark.slow
def test_parts_of_a_long_line_with_alternatives_are_smaller(path, monkeypatch):
    """After each part, the worker looks for other batches. The parts of both requests have about as many hypotheses."""
    models = load_models(job((PAIR, path), translator=TranslatorOptions(max_tokens=120, max_source_len=20)))
    long = " ".join(REAL_LINES * 2)
    widest = {}
    for name, fields in {"plain": {}, "all": {"alternatives": 10, "alignment": True, "quality": True}}.items():
        sizes = []
        decode = Translator.batches

        def batches(self, segments, processes, max_tokens=None, decode=decode, sizes=sizes):
            found = decode(self, segments, processes, max_tokens)
            sizes += [len(batch) * max(len(leaf.input.ids) for leaf in batch) for batch in found]
            return found

        monkeypatch.setattr(Translator, "batches", batches)
        assert isinstance(translate_or_fail(models, task([long], **fields)), list)
        monkeypatch.setattr(Translator, "batches", decode)
        widest[name] = max(sizes)
    assert 120 < widest["plain"] <= 240 and widest["all"] <= 240 / 6


@pytest.mark.slow
def test_a_worker_counts_tokens_and_translates_the_lines_that_fit(path):
    models = load_models(job((PAIR, path)))
    lines = ["All are equal.", "1234567890" * 3, *REAL_LINES[:3], "Two dogs."]
    counts = [len(ids) for ids in Translator.load(path).tokenizer.encode_source(lines).split()]
    assert counts[1] >= 30 > max(counts[0], counts[-1])
    alone = translate_or_fail(models, task(lines))
    limits = {"longest": 29, "max_tokens": 2 * max(count for count in counts if count <= 29)}
    answer = translate_or_fail(models, dataclasses.replace(task(lines), **limits))
    assert answer[1] == counts[1]
    assert [found for found in answer if not isinstance(found, int)] == [
        whole for whole, found in zip(alone, answer, strict=True) if not isinstance(found, int)
    ]
    assert answer[0] == alone[0]
    assert [found for found in answer if isinstance(found, int)] == [
        count for count, found in zip(counts, answer, strict=True) if isinstance(found, int)
    ]
    assert translate_or_fail(models, dataclasses.replace(task(lines), longest=1)) == counts


def channels():
    ours, theirs = socket.socketpair()
    return SocketChannel(ours, buffers=False), SocketChannel(theirs, buffers=False)


def test_a_worker_ends_when_the_server_has_gone_amid_a_long_line(path):
    models = load_models(job((PAIR, path), translator=TranslatorOptions(max_tokens=32, max_source_len=20)))
    ours, theirs = channels()
    ours.send((1, task([" ".join(REAL_LINES * 4)])))
    ours.connection.shutdown(socket.SHUT_WR)
    work(theirs, models)
    theirs.close()
    with pytest.raises(EOFError):  # it stopped without an answer
        ours.receive(wait=True)


@pytest.mark.slow
def test_placeholders_of_weblate_are_kept_and_change_no_other_line(path):
    models = load_models(job((PAIR, path)))
    texts = ["All [X4X] are born free [X17X].", REAL_LINES[1]]
    found = texts_of(translate_or_fail(models, task(texts, placeholders=True)))
    assert "[X4X]" in found[0] and "[X17X]" in found[0]
    assert found[1:] == generated(path, TextOptions(), REAL_LINES[1:2])
    assert texts_of(translate_or_fail(models, task(texts, html=True, placeholders=True)))[0].count("X]") == 2


def test_every_option_of_text_is_a_flag_of_serve_but_those_of_requests_and_pairs():
    flags = {flag.name for flag in command.params}
    options = {field.name for field in dataclasses.fields(TextOptions)}
    assert options - flags == {"markup"} and set(OWN_TEXT_FIELDS) <= options


@pytest.mark.slow
def test_each_pair_splits_by_its_source_language(path):
    pytest.importorskip("sentencex")
    models = load_models(job((PAIR, path), (("fr", "de"), path), split_sentences=True))
    assert [model.text.split_sentences for model in models.values()] == ["en", "fr"]
    line = " ".join(REAL_LINES[:3])
    found = texts_of(translate_or_fail(models, task([line])))
    assert found == generated(path, TextOptions(split_sentences="en"), [line])
    with pytest.raises(ValueError, match="'x1' is not"):
        load_models(job((("x1", "de"), path), split_sentences=True))


def test_what_a_model_cannot_do_is_refused_when_it_is_loaded(path, tmp_path):
    with pytest.raises(ValueError, match="not a regular expression"):
        load_models(job((PAIR, path), text=TextOptions(protect=("(",))))
    tokenizer = tiny_tokenizer()
    model = ServedModel(
        Translator([tiny_model("bytenet_small", vocabulary_of(tokenizer))], tokenizer), SearchOptions(), TEXT
    )
    with pytest.raises(ValueError, match="--protect-spans, --truecase-caps: "):
        model.check()


@pytest.mark.parametrize(
    "changes", [{}, {"min_len": 3}, {"no_repeat_ngram": 2}, {"unkpen": 1.0}, {"diverse_groups": 2}]
)
def test_what_an_engine_without_another_search_does_not_support_is_refused_at_the_start(path, changes):
    """CTranslate2 has another length penalty, so the default of --lenpen is refused, too."""
    pytest.importorskip("ctranslate2")
    supported = SearchOptions(**SHORT, lenpen=0.0)
    models = load_models(job((PAIR, path), search=supported, engine="ctranslate2"))
    assert texts_of(translate_or_fail(models, task(LINES[:2])))
    named = "|".join(f"--{name.replace('_', '-')}" for name in changes or ["lenpen"])
    with pytest.raises(ValueError, match=rf"--engine ctranslate2.*{named}"):
        load_models(
            job(
                (PAIR, path),
                search=SearchOptions(**{"lenpen": 0.6 if not changes else 0.0} | changes),
                engine="ctranslate2",
            )
        )


def test_a_minimum_length_above_the_positions_is_refused_at_the_start(tmp_path):
    path = save_transformer(tmp_path / "learned.pt", positions="learned", max_positions=20)
    load_models(job((PAIR, path), search=SearchOptions(min_len=19)))
    with pytest.raises(ValueError, match=r"--min-len 20.* 20 positions"):
        load_models(job((PAIR, path), search=SearchOptions(min_len=20)))


def test_a_model_without_attention_translates_without_alignment():
    tokenizer = tiny_tokenizer()
    translator = Translator([tiny_model("bytenet_small", vocabulary_of(tokenizer))], tokenizer)
    model = ServedModel(translator, SearchOptions(**SHORT), TextOptions())
    answer = translate_or_fail({PAIR: model}, task(["a dog"], alignment=True))
    assert [list(found) for line in answer for found in line] == [["text"]]


def test_a_model_without_attention_says_that_it_cannot_translate_markup(path, caplog):
    tokenizer = tiny_tokenizer()
    translator = Translator([tiny_model("bytenet_small", vocabulary_of(tokenizer))], tokenizer)
    plain = ServedModel(translator, SearchOptions(**SHORT), TextOptions())
    aligned = load_models(job((PAIR, path)))[PAIR]
    for model in (plain, dataclasses.replace(plain, first=aligned), dataclasses.replace(aligned, first=plain)):
        answer = translate_or_fail({PAIR: model}, task(["<b>a</b> dog"], html=True))
        assert isinstance(answer, Refusal) and "cross-attention" in str(answer)
        assert pickle.loads(pickle.dumps(answer)).status == 400
    assert not caplog.records


def test_a_glossary_that_was_deleted_while_its_request_waited_is_404(path, tmp_path, caplog):
    models = load_models(job((PAIR, path)))
    answer = translate_or_fail(models, task(LINES[:1], glossary=tmp_path / "deleted.tsv"))
    assert isinstance(answer, Refusal) and answer.status == 404 and "glossary" in str(answer)
    assert not caplog.records


@pytest.mark.slow
def test_a_model_of_several_languages_is_loaded_once_and_told_each_pair(tmp_path):
    pytest.importorskip("safetensors")
    for name, pairs in (
        ("m2m_100", [("en", "de"), ("de", "en")]),
        ("marian_languages", [("eng", "deu"), ("eng", "nld")]),
    ):
        file = tmp_path / f"{name}.pt"
        checkpoint_file.save(file, huggingface.load(IMPORTED / name))
        models = load_models(job(*((pair, file) for pair in pairs)))
        assert len({id(model.translator.models[0]) for model in models.values()}) == 1
        found = [texts_of(translate_or_fail(models, task(["right"], pair=pair)))[0] for pair in pairs]
        codes = [
            {"target_lang": b} if name.startswith("marian") else {"source_lang": a, "target_lang": b} for a, b in pairs
        ]
        assert found == [Translator.load(file).translate(["right"], **SHORT, **each)[0].text for each in codes]
        with pytest.raises(ValueError, match="no language 'xx'"):
            load_models(job((("en", "xx"), file)))


def test_a_pair_of_two_models_that_are_no_ensemble_is_named(path, tmp_path):
    many = save_transformer(tmp_path / "many.pt", languages=("en", "de", "it"))
    for models in (
        [(None, many), (PAIR, path)],
        [(PAIR, path), (PAIR, save_transformer(tmp_path / "x.pt", tags=["<a>"]))],
    ):
        with pytest.raises(ValueError, match=r"en-de.* 2 .*--path ") as error:
            load_models(job(*models))
        assert all(str(file) in str(error.value) for _, file in models)
    models = load_models(job((("de", "it"), many), (PAIR, path)))
    assert list(models) == [("de", "it"), PAIR]


def test_a_model_that_is_given_twice_for_a_pair_is_no_ensemble(tmp_path):
    many = save_transformer(tmp_path / "many.pt", languages=("en", "de", "it"))
    models = load_models(job((None, many), (PAIR, many)))
    assert len(models) == 6 and len({id(model.translator) for model in models.values()}) == 1
    assert len(models[PAIR].translator.models) == 1


def test_a_model_of_the_opposite_direction_is_refused(path, tmp_path):
    """The server translated the sources as if they were in the language of the translations."""
    contents = checkpoint.load(path)
    reversed_model = tmp_path / "en-de.pt"
    checkpoint_file.save(reversed_model, contents | {"run": {"languages": ["en", "de"]}})
    with pytest.raises(ValueError, match=r"--path de-en=.*en-de\.pt .* en into de"):
        load_models(job((("de", "en"), reversed_model)))
    assert list(load_models(job((("en_US", "de"), reversed_model)))) == [("en_US", "de")]
    many = save_transformer(tmp_path / "many.pt", languages=("de", "en"))
    checkpoint_file.save(many, checkpoint.load(many) | {"run": {"languages": ["de", "en"]}})
    assert list(load_models(job((PAIR, many)))) == [PAIR]


def test_words_are_linked_in_a_model_of_several_languages(tmp_path):
    pytest.importorskip("safetensors")
    checkpoint_file.save(tmp_path / "m2m.pt", huggingface.load(IMPORTED / "m2m_100"))
    line, languages = "right to life", {"source_lang": "en", "target_lang": "de"}
    translator = Translator.load(tmp_path / "m2m.pt")
    soft = translator.translate([line], alignment="soft", **SHORT, **languages)[0].hypotheses[0]
    # columns: the language, right, to, life in four pieces, eos; the translation is one word
    totals = [sum(row[index] for row in soft.alignment for index in columns) for columns in ([1], [2], [3, 4, 5, 6])]
    best = [(0, 5), (6, 8), (9, 13)][totals.index(max(totals))]
    models = load_models(job((("en", "de"), tmp_path / "m2m.pt")))
    (((found,),),) = [translate_or_fail(models, task([line], alignment=True))]
    assert words(found["text"]) == [(0, len(found["text"]))]
    assert found["alignment"] == [[*best, 0, len(found["text"])]]


# --- the worker of a GPU, with the same search on the CPU -------------------------------------------------------------


def unpacked(path, text):
    """Returns a model whose weights lie as a GPU has them."""
    model, tokenizer = from_checkpoint(path)
    return ServedModel(Translator([model], tokenizer), SearchOptions(**SHORT), text)


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory):
    """A checkpoint of en, it and de that was trained from and into en."""
    file = save_ending_transformer(tmp_path_factory.mktemp("many") / "many.pt", languages=("en", "it", "de"))
    run = {"directions": [["en", "it"], ["it", "en"], ["en", "de"], ["de", "en"], ["it", "it"]], "languages": None}
    checkpoint_file.save(file, checkpoint.load(file) | {"run": run})
    return file


@pytest.mark.slow
def test_all_pairs_of_a_multilingual_checkpoint_are_served(multilingual, caplog):
    models = load_models(job((None, multilingual)))
    trained = {("en", "it"), ("it", "en"), ("en", "de"), ("de", "en")}
    assert set(models) == trained | {("it", "de"), ("de", "it")} and set(list(models)[:4]) == trained
    assert len({id(model.translator) for model in models.values()}) == 1
    assert "2 of 6 pairs" in caplog.text
    translator = Translator.load(multilingual)
    for source, target in models:
        (found,) = texts_of(translate_or_fail(models, task([REAL_LINES[6]], pair=(source, target))))
        expected = translator.translate([REAL_LINES[6]], **SHORT, source_lang=source, target_lang=target)
        assert found == expected[0].text
    assert caplog.text.count("zero-shot") == 3  # one for the server, and one for each pair of `translator`


@pytest.mark.slow
def test_untrained_pairs_go_through_the_pivot_language(multilingual, caplog):
    models = load_models(job((None, multilingual), pivot="en"))
    assert "zero-shot" not in caplog.text
    assert {pair for pair, model in models.items() if model.first is not None} == {("it", "de"), ("de", "it")}
    translator = Translator.load(multilingual)
    english = [each.text for each in translator.translate(LINES, **SHORT, source_lang="it", target_lang="en")]
    german = [each.text for each in translator.translate(english, **SHORT, source_lang="en", target_lang="de")]
    assert len(set(german)) > 3
    assert texts_of(translate_or_fail(models, task(LINES, pair=("it", "de")))) == german
    answer = translate_or_fail(models, task(LINES[:4], pair=("it", "de"), alternatives=1, alignment=True, quality=True))
    assert [sorted({*line[0]} - {"decoded_again"}) for line in answer] == [["quality", "text"]] * 4
    assert all(len(line) == 2 for line in answer)
    assert [line[0]["text"] for line in answer] == german[:4]
    page = translate_or_fail(models, task(["<b>All</b> are equal"], pair=("it", "de"), html=True))
    assert isinstance(page, list)


@pytest.mark.slow
def test_a_loop_in_the_first_of_two_steps_is_counted(path, multilingual):
    search = SearchOptions(max_len_a=0.0, max_len_b=20)
    models = load_models(job((("it", "en"), path), (("en", "de"), multilingual), pivot="en", search=search))
    first, second = (models[pair].translator for pair in (("it", "en"), ("en", "de")))
    steps = PivotTranslator(first, second, "en", dataclasses.replace(search, target_lang="de"))
    looped = [each.decoded_again for each in steps.stream(LINES)]
    alone = second.stream([each.pivot for each in steps.stream(LINES)], steps.pipelines[1])
    assert looped != [each.decoded_again for each in alone]
    answer = translate_or_fail(models, task(LINES, pair=("it", "de")))
    assert ["decoded_again" in line[0] for line in answer] == looped


@pytest.mark.slow
def test_two_models_make_a_pair_through_the_pivot_language(path):
    models = load_models(job((("it", "en"), path), (("en", "de"), path), pivot="en"))
    assert list(models) == [("it", "en"), ("en", "de"), ("it", "de")]
    once = generated(path, TextOptions())
    assert texts_of(translate_or_fail(models, task(LINES, pair=("it", "de")))) == generated(path, TextOptions(), once)
    with pytest.raises(ValueError, match="--pivot fr"):
        load_models(job((("it", "en"), path), pivot="fr"))


def test_imported_models_serve_every_pair_of_their_languages(tmp_path):
    pytest.importorskip("safetensors")
    checkpoint_file.save(tmp_path / "mbart.pt", huggingface.load(IMPORTED / "mbart_50"))
    codes = Translator.load(tmp_path / "mbart.pt").tokenizer.languages
    models = load_models(job((None, tmp_path / "mbart.pt")))
    assert len(models) == len(codes) * (len(codes) - 1) and ("en_XX", "de_DE") in models
    checkpoint_file.save(tmp_path / "marian.pt", huggingface.load(IMPORTED / "marian_languages"))
    with pytest.raises(ValueError, match="--path en-de="):
        load_models(job((None, tmp_path / "marian.pt")))


def slot_answers(models, tasks, continuous):
    """Returns the answers of a SlotWorker to `tasks`, by number."""
    inbox, answers = queue.SimpleQueue(), {}
    worker = SlotWorker(models, inbox, answers.__setitem__)
    for item in [*enumerate(tasks), None]:
        inbox.put(item)
    translator = worker.translator
    if continuous:
        loaded = dataclasses.replace(translator.decoder.torch.loaded, max_tokens=4 * TOKENS_PER_SLOT)
        translator.decoder = Decoder(loaded, "slots")
    worker.run(translator.batch_decoder(worker.pipeline.search, polled=True))
    assert not worker.under_way
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(("text", "continuous"), [(TextOptions(), True), (TEXT, False)])
def test_slots_answer_every_task_as_the_other_workers_do(path, text, continuous):
    models = {PAIR: unpacked(path, text)}
    tasks = [task(LINES[start : start + 3]) for start in range(0, len(LINES), 3)]
    tasks += [
        task([]), task(["", " "]), task(["<b>All</b> are equal"], html=True), task(LINES[:2], alternatives=2),
        task(LINES[:2], alignment=True), task(LINES), task(LINES[:2], quality=True),
    ]  # fmt: skip
    answers = slot_answers(models, tasks, continuous)
    assert answers == {number: translate_or_fail(models, each) for number, each in enumerate(tasks)}


@pytest.mark.slow
@pytest.mark.parametrize("continuous", [True, False])
def test_all_pairs_of_a_model_share_the_slots(multilingual, continuous):
    loaded, tokenizer = from_checkpoint(multilingual)
    translator = Translator([loaded], tokenizer)
    models = {
        pair: ServedModel(translator, SearchOptions(**SHORT, source_lang=pair[0], target_lang=pair[1]), TextOptions())
        for pair in (("en", "it"), ("it", "en"), ("en", "de"))
    }
    models["it", "de"] = dataclasses.replace(models["en", "de"], first=models["it", "en"])
    tasks = [task(LINES[id % 5 : id % 5 + 2], pair=pair) for id, pair in enumerate([*models, *models])]
    answers = slot_answers(models, tasks, continuous)
    assert answers == {number: translate_or_fail(models, each) for number, each in enumerate(tasks)}


def test_a_task_that_fails_is_answered_and_the_slots_go_on(path, monkeypatch):
    model = unpacked(path, TextOptions())
    segments = Pipeline.segments

    def poisoned(self, requests, first_id=0):
        assert all(request.source != "poison" for request in requests)
        return segments(self, requests, first_id)

    monkeypatch.setattr(Pipeline, "segments", poisoned)
    answers = slot_answers({PAIR: model}, [task(["poison"]), task(LINES[:1])], True)
    assert isinstance(answers[0], Refusal)
    assert texts_of(answers[1]) == generated(path, TextOptions(), LINES[:1])
