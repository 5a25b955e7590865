"""The report: its numbers by hand, its files, and what it does with little, odd or damaged input."""

import io
import json
import math
import os
import re
import shutil
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from fake_runs import INCREMENTAL, generation, handwriting, learning, line_arrays, put, word_arrays, words, written
from mslmn import objectives, report
from mslmn.experiments import paper, records
from mslmn.report import confusion, figures, findings, formats, lines, page, runs, strokes, tables
from mslmn.report.statistics import interval

FILES = ("report.json", "report.md", "report.html")


def write(folder, width=200):
    console = Console(file=io.StringIO(), width=width)
    report.write(folder, console)
    return console.file.getvalue()


def only(folder):
    (group,) = runs.group(records.find(folder))
    return group


def column(table, name):
    at = [formats.heading(column, ", ") for column in table.columns].index(name)
    return {row[0].text: row[at] for row in table.rows}


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """All experiments, several of everything, written once; its folder and what the console showed."""
    folder = tmp_path_factory.mktemp("full")
    generation(folder, budgets=(100, 1000), seeds=2)
    words(folder, splits=3, seeds=2)
    handwriting(folder, seeds=2)
    return folder, write(folder)


class Checker(HTMLParser):
    """Collects what makes a page invalid or not self-contained."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.ids, self.links, self.seen = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        self._look(tag, attributes)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        self._look(tag, attributes)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes another tag")

    def _look(self, tag, attributes):
        names = [name for name, _ in attributes]
        if len(names) != len(set(names)):
            self.wrong.append(f"<{tag}> has an attribute twice")
        for name, content in attributes:
            if name == "id":
                self.ids.append(content)
            if name in ("href", "src"):
                self.links.append(content)
            if name.startswith("on") or tag in ("script", "link", "iframe", "object"):
                self.wrong.append(f"<{tag} {name}> is active")


def checked(path):
    checker = Checker()
    checker.feed(path.read_text(encoding="utf-8"))
    checker.close()
    assert not checker.wrong and not checker.open
    assert len(checker.ids) == len(set(checker.ids))
    targets = [link for link in checker.links if not link.startswith("data:image/png;base64,")]
    assert all(link.startswith("#") and link[1:] in checker.ids for link in targets)
    return checker


# Numbers


def test_interval_is_students_t():
    values = [0.7, 0.8, 0.75, 0.9]
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert interval(values) == pytest.approx((np.mean(values), low, high))


def test_interval_with_shared_clips_is_that_of_nadeau_and_bengio():
    values = [1.0, 2.0, 4.0]  # variance 7/3
    half = stats.t.ppf(0.975, 2) * math.sqrt(7 / 3 * (1 / 3 + 50 / 125))
    assert interval(values, 50 / 125) == pytest.approx((7 / 3, 7 / 3 - half, 7 / 3 + half))


def test_error_is_the_median_of_seeds_with_their_range(tmp_path):
    for seed, value in enumerate((3e-3, 1e-3, 0.2e-3, 9e-3)):
        put(tmp_path, arrays=False, seed=seed, value=value, seconds=10.0 * seed, epochs=100 + seed)
    table = tables.generation_results(only(tmp_path))
    cell = column(table, "NMSE, 10^-3, ours")["MS-LMN"]
    assert cell.text == "2.00 (0.200 to 9.00)"
    assert cell.value == {"median": 2.0, "lowest": 0.2, "highest": 9.0, "seeds": 4}
    assert column(table, "NMSE, 10^-3, paper")["MS-LMN"] == ("0.116", 0.116, paper.GENERATION["MS-LMN"].nmse)
    assert (
        column(table, "seconds, ours")["MS-LMN"].value == 15
        and column(table, "parameters, ours")["MS-LMN"].value == 1003
    )
    assert only(tmp_path).typical("MS-LMN").value == 1e-3


def test_accuracy_is_mean_and_deviation_on_the_lowest_split(tmp_path):
    for split, seed, value in ((2, 0, 0.6), (2, 1, 0.7), (3, 0, 0.1)):
        put(tmp_path, arrays=False, experiment="words", case={"split": split}, seed=seed, value=value)
    table = tables.word_results(only(tmp_path))
    assert column(table, "accuracy %, ours")["MS-LMN"].text == "65.0 ± 7.1"
    assert column(table, "accuracy %, paper")["MS-LMN"].text == "78.0 ± 3.4"
    assert "split 2" in table.title and "was not run" in table.caption


@pytest.mark.parametrize("clips", [{}, {"train_clips": 125, "test_clips": 50}])
def test_splits_are_the_unit_and_seeds_are_averaged_first(tmp_path, clips):
    values = {"MS-LMN": ((0.5, 0.7), (0.8, 0.8), (0.9, 0.7)), "LSTM": ((0.5, 0.5), (0.6, 0.8), (0.4, 0.6))}
    for model, splits in values.items():
        for split, seeds in enumerate(splits):
            for seed, value in enumerate(seeds):
                case = {"split": split}
                put(tmp_path, False, experiment="words", model=model, case=case, seed=seed, value=value, settings=clips)
    ratio = 0.4 if clips else 0.0
    group = only(tmp_path)
    table = tables.word_splits(group)
    mean, low, high = interval([60, 80, 80], ratio)
    assert column(table, "accuracy %")["MS-LMN"].value == pytest.approx(mean)
    assert column(table, "95 % interval")["MS-LMN"].value == pytest.approx([low, min(high, 100)])
    assert ("corrected" in table.caption) == bool(clips)
    pairs = tables.word_pairs(group)
    mean, low, high = interval([10, 10, 30], ratio)
    assert [row[0].text for row in pairs.rows] == ["MS-LMN against LSTM"]
    assert pairs.rows[0][1].value == pytest.approx(mean) and pairs.rows[0][2].value == pytest.approx([low, high])
    assert pairs.rows[0][3].text == "3 of 3"


def test_errors_are_counted_within_and_across_suffixes(tmp_path):
    record = put(tmp_path, experiment="words")
    names, suffixes = np.array(["subway", "odd", "making", "leeway", "walking"]), np.array([1, -1, 0, 1, 0])
    expected, predicted = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 3, 2, 1, 4, 1])
    arrays = {"names": names, "suffixes": suffixes, "expected": expected, "predicted": predicted}
    records.write(record, arrays)
    found = confusion.confusion([record, record])
    assert found.names == ["making", "walking", "subway", "leeway", "odd"]
    assert (found.clips, found.correct, found.within, found.across) == (12, 4, 4, 4)
    assert found.groups() == [(0, 2, "king"), (2, 4, "way")]
    assert found.chance == pytest.approx((3 + 2) / 6 / 4)  # 5 of 6 clips have one other word of 4 that ends alike
    assert [cell.text for cell in tables.word_errors(only(tmp_path)).rows[0][1:]] == ["6", "4", "2", "2", "50 %"]


def test_best_of_a_column_is_marked_also_if_rounding_makes_it_two(tmp_path):
    for model, value in (("RNN", 2.0e-3), ("LSTM", 1.0e-3), ("LMN", 1.0004e-3)):
        put(tmp_path, arrays=False, model=model, value=value)
    table = tables.generation_results(only(tmp_path))
    assert [table.is_best(row, 1) for row in range(3)] == [False, True, True]
    assert "**1.00**" in formats.to_markdown(table)


# Handwriting


def put_lines(folder, value, validation, arrays=False, **changes):
    """A run on handwriting, with the accuracy by which seeds are chosen."""
    settings = {"validation_accuracy": validation, "validation_loss": 1.0, "test_lines": 200}
    return put(folder, arrays, experiment="handwriting", value=value, settings=settings, **changes)


def accuracy_rows(*accuracies):
    return [{"epoch": 5 * (i + 1), "character_accuracy": a} for i, a in enumerate(accuracies)]


def test_the_seed_is_chosen_by_validation_not_by_the_test(tmp_path):
    for seed, (value, accuracy) in enumerate(((0.9, 0.5), (0.6, 0.7), (0.75, 0.6))):
        put_lines(tmp_path, value, accuracy, seed=seed)
    put_lines(tmp_path, 0.99, 1.0, case={"lines": 10}, seed=7)  # fewer lines: not what the table is of
    group = only(tmp_path)
    assert group.main_case == 1000 and group.chosen("MS-LMN").seed == 1
    table = tables.handwriting_results(group)
    cell = column(table, "accuracy %, ours")["MS-LMN"]
    assert cell.text == "60.0" and cell.value == {"accuracy": 60.0, "seed": 1, "validation_accuracy": 70.0}
    assert column(table, "mean of seeds %, ours")["MS-LMN"].text == "75.0 ± 15.0"
    assert column(table, "accuracy %, paper")["MS-LMN"] == ("26.5", 26.5, 26.5)
    assert column(table, "units, paper")["MS-LMN"].text == "144 hidden, 9 x 16 memory"
    assert "on 200 test lines" in table.caption and "1,000 training lines" in table.title
    by_lines = tables.handwriting_lines(group)
    assert [cell.text for cell in by_lines.rows[0]] == ["MS-LMN", "99.0", "75.0 ± 15.0"]


def test_a_run_without_a_validation_accuracy_is_chosen_last(tmp_path):
    for seed, accuracy in enumerate((None, math.nan, 0.3)):
        put_lines(tmp_path, 0.5, accuracy, seed=seed)
    assert only(tmp_path).chosen("MS-LMN").seed == 2
    write(tmp_path)


def test_one_seed_needs_no_mean(tmp_path):
    put_lines(tmp_path, -0.03, 10.0)
    table = tables.handwriting_results(only(tmp_path))
    assert [c.name for c in table.columns].count("accuracy %") == 2 and table.rows[0][1].text == "-3.0"
    assert not any(c.name.startswith("mean") for c in table.columns)


def test_the_models_of_handwriting_stand_in_order_and_the_lmn_without_the_paper(tmp_path):
    for model in (INCREMENTAL, "MS-LMN", "LMN", "CW-RNN", "LSTM"):
        put_lines(tmp_path, 0.5, 1.0, model=model)
    table = tables.handwriting_results(only(tmp_path))
    assert [row[0].text for row in table.rows] == ["LSTM", "LMN", "CW-RNN", "MS-LMN", INCREMENTAL]
    published = column(table, "accuracy %, paper")
    assert [cell.text for cell in published.values()] == ["77.3", "-", "32.9", "26.5", "66.8"]
    assert column(table, "units, paper")["CW-RNN"].text == "9 x 33 hidden"


@pytest.mark.parametrize(("accuracies", "text"), [((0.1, 0.2, 0.3, 0.4), "4"), ((0.1, 0.2, 0.5, 0.4), "3 (grew to 4)")])
def test_modules_are_those_of_the_weights_that_were_chosen(tmp_path, accuracies, text):
    rows = [{"epoch": i, "modules": i, "character_accuracy": accuracy} for i, accuracy in enumerate(accuracies, 1)]
    put_lines(tmp_path, 0.5, max(accuracies), model=INCREMENTAL, history=rows)
    put_lines(tmp_path, 0.5, 1.0, model="LSTM", sizes={"hidden": 110}, history=rows)
    modules = column(tables.handwriting_results(only(tmp_path)), "modules, ours")
    assert modules[INCREMENTAL].text == text and modules["LSTM"].text == "-"


def test_the_plateau_is_left_at_half_of_the_characters(tmp_path):
    put_lines(tmp_path, 0.6, 1.0, seed=0, history=accuracy_rows(0.1, 0.49, 0.5, 0.4, 0.7))  # epoch 15
    put_lines(tmp_path, 0.6, 1.0, seed=1, history=accuracy_rows(0.1, math.nan, 0.2, 0.3, 0.8))  # epoch 25
    put_lines(tmp_path, 0.6, 1.0, seed=2, history=accuracy_rows(0.1, 0.2, 0.3))
    put_lines(tmp_path, 0.6, 1.0, seed=3, history=[])  # tells nothing
    put_lines(tmp_path, 0.1, 1.0, model="LMN", history=accuracy_rows(-0.1, 0.2))
    table = tables.handwriting_plateau(only(tmp_path))
    left, epoch = column(table, "seeds that left it"), column(table, "epoch")
    assert left["MS-LMN"].value == {"left": 2, "seeds": 3} and left["LMN"].text == "0 of 1"
    assert epoch["MS-LMN"].text == "20 (15 to 25)" and epoch["LMN"].text == "-"
    best = column(table, "best validation accuracy %")
    assert best["MS-LMN"].text == "70.0 (30.0 to 80.0)" and best["LMN"].text == "20.0"
    assert "LMN never reads 50 % of the characters of the validation lines." in findings.findings(only(tmp_path))


def test_no_history_no_plateau(tmp_path):
    put_lines(tmp_path, 0.6, 1.0, history=[{"epoch": 1, "validation_loss": 3.0}])
    assert tables.handwriting_plateau(only(tmp_path)) is None


def test_what_is_found_about_handwriting(tmp_path):
    for model, value, seconds in (("LSTM", 0.8, 600.0), ("MS-LMN", 0.75, 150.0), (INCREMENTAL, 0.9, 300.0)):
        put_lines(tmp_path, value, 1.0, model=model, seconds=seconds, history=[])
    assert findings.findings(only(tmp_path)) == [
        "Incremental MS-LMN reads best. Characters of the test lines read, with 1,000 training lines: "
        "incremental MS-LMN 90.0 %, LSTM 80.0 %, MS-LMN 75.0 %.",
        "Incremental MS-LMN is 15.0 points above MS-LMN; in the paper it is 40.3 points above.",
        "MS-LMN is 5.0 points below LSTM; in the paper it is 50.8 points below.",
        "A training run of MS-LMN took 2 min, one of LSTM 10 min: MS-LMN's is 4.0 times shorter.",
        "From best to worst: incremental MS-LMN, LSTM, MS-LMN; in the paper: LSTM, incremental MS-LMN, MS-LMN.",
    ]


TEXTS = st.text("abc ", max_size=8)


@given(TEXTS, TEXTS)
def test_an_alignment_keeps_the_order_and_costs_the_edit_distance(a, b):
    pairs = lines.align(a, b)
    assert [i for i, _ in pairs if i is not None] == list(range(len(a)))
    assert [j for _, j in pairs if j is not None] == list(range(len(b)))
    wrong = sum(i is None or j is None or a[i] != b[j] for i, j in pairs)
    assert wrong == objectives.edit_distance([*map(ord, a)], [*map(ord, b)])


def line(labels, expected, characters=("", "\N{REPLACEMENT CHARACTER}", "a", "b", " ")):
    """One stroke along a row."""
    steps = np.arange(float(len(labels)))
    xy = np.column_stack([steps, np.zeros(len(labels))])
    return lines.Line(xy, steps == len(labels) - 1, list(labels), list(characters), expected)


def test_a_best_path_becomes_emissions_that_are_right_or_wrong():
    found = line([0, 2, 2, 0, 2, 3, 0, 4], "ab ")
    assert found.read == "aab " and found.accuracy == pytest.approx(1 - 1 / 3)
    assert [(e.character, e.first, e.last) for e in found.emissions] == [
        ("a", 1, 2),
        ("a", 4, 4),
        ("b", 5, 5),
        (" ", 7, 7),
    ]
    assert sorted(e.right for e in found.emissions) == [False, True, True, True]
    assert [pair.right for pair in line([2, 1], "a!").pairs] == [True, True]  # read as unknown, which it is
    assert line([0, 0], "").accuracy == 1 and line([2], "").accuracy == 0 and line([0], "ab").accuracy == 0


def test_ink_belongs_to_the_character_that_is_emitted_nearest_in_time():
    emissions = line([2, 2, 0, 0, 0, 3, 4, 0, 0, 0, 0, 2], "ab a").emissions
    assert strokes.owners(12, emissions).tolist() == [0] * 4 + [1] * 5 + [3] * 3  # a space has no ink
    assert strokes.owners(2, []).tolist() == [-1, -1]
    shades = strokes.shades(emissions)
    assert shades[0] != shades[1] != shades[3] and set(shades) <= set(strokes.RIGHT)


def test_letters_that_are_emitted_are_moved_apart_and_stay_in_the_drawing():
    x = np.array([5.0, 5.0, 4.99, 9.5, 9.55, 0.2])
    found = strokes.spread(x)
    assert (np.diff(np.sort(found)) >= strokes.APART - 1e-9).all() and found.max() <= strokes.WIDTH
    assert (np.argsort(found, kind="stable") == np.argsort(x, kind="stable")).all() and found[-1] == 0.2


def test_lines_are_shown_as_the_best_model_and_the_lstm_read_them(tmp_path):
    for model, value in (("LSTM", 0.5), ("LMN", 0.3), ("MS-LMN", 0.9), (INCREMENTAL, 0.7)):
        put_lines(tmp_path, value, 1.0, arrays=True, model=model)
    found = figures.lines(only(tmp_path), "x")
    assert [panel.title for panel in found.panels] == ["MS-LMN", "LSTM"] * 3
    text = written()[1][0]
    assert all(f"Written: {text} Read: " in panel.svg for panel in found.panels[:2])
    read = lines.examples(only(tmp_path).chosen("LSTM"))[0]
    assert found.panels[1].note == f"line 1, {100 * read.accuracy:.1f} % of the characters"


def test_if_the_lstm_is_best_the_next_best_is_shown_beside_it(tmp_path):
    for model, value in (("LSTM", 0.9), ("LMN", 0.3), ("MS-LMN", 0.8)):
        put_lines(tmp_path, value, 1.0, arrays=True, model=model)
    assert [panel.title for panel in figures.lines(only(tmp_path), "x").panels] == ["LSTM", "MS-LMN"] * 3


def test_progress_shows_every_seed_and_where_a_model_grew(tmp_path):
    rows = learning(20, 0.9, 8, [1, 2, 3])
    put_lines(tmp_path, 0.9, 0.9, model=INCREMENTAL, history=rows)
    put_lines(tmp_path, 0.9, 0.8, model=INCREMENTAL, history=rows, seed=1)
    put_lines(tmp_path, 0.9, 0.7, model=INCREMENTAL, history=[], seed=2)
    found = figures.progress(only(tmp_path), "x")
    (panel,) = found.panels
    assert panel.svg.count("stroke: #7e3aa8") >= 2 + 2 and "a module is added" in found.caption
    assert ">2</text>" in panel.svg and ">3</text>" in panel.svg


def test_hostile_lines_are_shown_not_obeyed(tmp_path):
    texts = ["$x_1$ <b>&\"' \\alpha", "<script>alert(1)</script>", ""]
    points = [*written()[0][:2], np.array([[3.0, 4.0, 1.0]])]  # the last line is one step
    record = put_lines(tmp_path, 1.0, 1.0)
    arrays = line_arrays(record, (points, texts))
    arrays["characters"] = np.where(arrays["characters"] == "a", "<", arrays["characters"])
    arrays["characters"][3:6] = ["$", "&", "\u8a9e"]
    labels = np.split(arrays["labels"], arrays["starts"][1:-1])
    labels[0][:] = 0
    labels[0][[3, 9, 20]] = [3, 3, 4]
    labels[1][:] = 0  # nothing is read
    arrays["labels"] = np.concatenate(labels)
    arrays["recognised"] = np.array(["$$&", "", ""])
    records.write(record, arrays)
    write(tmp_path)
    checked(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in html and html.count(">$</text>") >= 4 and ">&amp;</text>" in html
    assert "Written: &lt;script&gt;" in html


@pytest.mark.parametrize(
    "wrong",
    [
        {"starts": np.array([0, 5])},
        {"starts": np.array([0.0, 1.0])},
        {"starts": np.zeros(0, int)},
        {"points": np.zeros((3, 3))},
        {"points": np.zeros((3, 2))},
        {"labels": np.full(1065, 58)},
        {"labels": np.full(1065, -1)},
        {"labels": np.zeros(1065)},
        {"labels": np.zeros(1065, int)},
        {"characters": np.array(["", "", "a"])},
        {"expected": np.array(["one"])},
        {"expected": np.arange(3)},
        {"recognised": np.array(["other", "than", "the path"])},
        {"accuracies": np.array([0.5, np.nan])},
        {"accuracies": np.zeros((2, 2))},
        {"memory": np.zeros(3)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arrays_of_lines_that_do_not_fit_are_named(tmp_path, wrong):
    record = put_lines(tmp_path, 0.8, 1.0, arrays=True)
    arrays = record.arrays()
    assert arrays["labels"].shape == (1065,)
    records.write(record, arrays | wrong)
    with pytest.raises(records.RecordError, match=r"arrays\.npz is damaged"):
        write(tmp_path)


@pytest.mark.parametrize("name", ["starts", "points", "labels", "characters", "expected", "recognised"])
def test_without_one_of_their_arrays_lines_are_left_out(tmp_path, name):
    record = put_lines(tmp_path, 0.8, 1.0, arrays=True)
    arrays = record.arrays()
    del arrays[name]
    records.write(record, arrays)
    assert {picture.key for picture in figures.figures(only(tmp_path), "x")} == {
        "line_accuracies",
        "memories",
        "curves",
    }


# The three files


def test_files_and_console_show_the_same_numbers(full):
    folder, shown = full
    markdown, html = ((folder / name).read_text(encoding="utf-8") for name in FILES[1:])
    text = re.sub(r"<[^>]*>", "", html).replace("&nbsp;", " ").replace("&times;", "x").replace("&minus;", "-")
    found = json.loads((folder / "report.json").read_text())["experiments"]
    groups = runs.group(records.find(folder))
    for group, stored in zip(groups, found, strict=True):
        for table, in_json in zip(tables.tables(group), stored["tables"], strict=True):
            assert [list(row.values()) for row in in_json["rows"]] == [
                [cell.value for cell in row] for row in table.rows
            ]
            for cell in (cell for row in table.rows for cell in row):
                plain = re.sub(r"(\d)e-0?(\d+)", r"\1 x 10-\2", cell.text)
                assert formats.escape(cell.text) in markdown and plain in text and cell.text in shown


def test_models_come_in_the_order_of_the_paper_then_the_others(tmp_path):
    for model in (INCREMENTAL, "MS-LMN", "RNN", "GRU"):
        put(tmp_path, arrays=False, model=model)
    assert only(tmp_path).models == ["RNN", "MS-LMN", "GRU", INCREMENTAL]
    write(tmp_path)


def test_page_is_well_formed_self_contained_and_fit_for_a_phone(full):
    path = full[0] / "report.html"
    checker = checked(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and '<html lang="en">' in text and "<title>" in text
    foreign = re.sub(r"data:image/png;base64,[^\"]*", "", text)
    assert not re.search(r"https?:|//|@import|url\((?!#)", foreign)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in checker.seen
    drawn = [attributes for tag, attributes in checker.seen if tag == "svg"]
    of_lines = 6 + 1 + 1 + 3 + 2  # lines, progress, accuracies, memories, curves
    others = 5 + 1 + 2 + 1 + 5 + 2 + 3  # signals, curves, memories; errors, confusions, curves, memories
    assert len(drawn) == others + of_lines
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawn)


def test_growth_is_marked_with_the_number_of_modules(full):
    group = runs.group(records.find(full[0]))[1]
    assert [modules for _, modules in figures._growth(group.typical(INCREMENTAL))] == [2, 3, 4, 5, 6, 7]
    assert not figures._growth(group.typical("MS-LMN"))


def test_the_same_results_give_the_same_bytes(tmp_path):
    for experiment in ("generation", "words", "handwriting"):
        put(tmp_path / "one", experiment=experiment)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    for name in ("one", "other"):
        write(tmp_path / name)
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes() for name in FILES)


def test_files_are_replaced_in_one_step(full, monkeypatch, tmp_path):
    put(tmp_path, arrays=False)
    for name in FILES:
        (tmp_path / name).write_text("old")
    renamed = []

    def replace(source, target):
        assert os.path.getsize(target) == 3  # still the old one
        renamed.append(os.path.basename(target))
        os.rename(source, target)

    monkeypatch.setattr("mslmn.checkpoint.os.replace", replace)
    write(tmp_path)
    assert renamed == list(FILES) and sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, "generation"])


def test_hostile_text_is_shown_not_obeyed(tmp_path):
    data = "<script>alert('x')</script> & \"a|b\" [red]no[/red] [/] `*_$ \x00\x1b[31m \udcff https"
    arrays = word_arrays(put(tmp_path, arrays=False, experiment="words", model="LSTM", data=data))
    arrays["names"] = np.array([f"<b>${i}_</b>" for i in range(25)])
    record = put(tmp_path, arrays=False, experiment="words", data=data)
    records.write(record, arrays)
    shown = write(tmp_path)
    checked(tmp_path / "report.html")
    html, markdown = ((tmp_path / name).read_text(encoding="utf-8") for name in FILES[:0:-1])
    assert "<script" not in html and "&lt;script&gt;alert(" in html and "&lt;b&gt;$3_&lt;/b&gt;" in html
    assert r"\<script\>" in markdown and r"a\|b" in markdown and "[red]no[/red]" in shown
    assert not any(letter in html + markdown + shown for letter in "\x00\x1b\udcff")


def test_letters_that_the_font_lacks_are_left_to_the_browser(tmp_path):
    record = put(tmp_path, experiment="words", data="\u8a9e")
    records.write(record, word_arrays(record) | {"names": np.array([f"\u8a9e{i}" for i in range(25)])})
    write(tmp_path)
    assert "\u8a9e24" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_without_matplotlib_there_are_tables_and_a_page_all_the_same(tmp_path, monkeypatch):
    put(tmp_path, model="RNN", case={"budget": 100}, sizes={"hidden": 9})
    whole = write(tmp_path)
    pictures = (tmp_path / "report.html").read_text().count("<svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = write(tmp_path)
    told = f"no pictures: this needs matplotlib: pip install 'mslmn[experiments]', and mslmn report {tmp_path} here"
    assert told in " ".join(shown.split()) and "no pictures" not in whole
    assert pictures and "<svg" not in (tmp_path / "report.html").read_text() and "100" in shown


def test_settings_of_matplotlib_neither_matter_nor_change(tmp_path):
    import matplotlib

    put(tmp_path, arrays=False)
    write(tmp_path)
    before = (tmp_path / "report.html").read_bytes()
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "text.usetex": True, "svg.fonttype": "path"}):
        settings = dict(matplotlib.rcParams)
        write(tmp_path)
        assert dict(matplotlib.rcParams) == settings
    assert (tmp_path / "report.html").read_bytes() == before


# Little, odd or damaged input


@pytest.mark.parametrize("arrays", [True, False])
@pytest.mark.parametrize("experiment", ["generation", "words", "handwriting"])
def test_one_run_is_enough(tmp_path, experiment, arrays):
    put(tmp_path, arrays, experiment=experiment, history=[] if arrays else [{"epoch": 1, "train_loss": 0.5}])
    write(tmp_path)
    checker = checked(tmp_path / "report.html")
    drawn = {"generation": 2, "words": 3, "handwriting": 5}[experiment] if arrays else 1
    assert sum(tag == "svg" for tag, _ in checker.seen) == drawn


def test_runs_of_some_models_and_cases_only(tmp_path):
    put(tmp_path, arrays=False, model="RNN", case={"budget": 100}, sizes={"hidden": 9})
    put(tmp_path, arrays=False, model="MS-LMN", case={"budget": 777}, settings={})
    put(tmp_path, arrays=False, experiment="words", model="LSTM", case={"split": 4})
    put(tmp_path, arrays=False, experiment="words", model="MS-LMN", case={"split": 1})
    shown = " ".join(write(tmp_path).split())
    assert "The paper gives errors only for 1,000 parameters" in shown and "Who is better" not in shown


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_run_is_called_so(tmp_path, value):
    history = [{"epoch": i, "modules": 9, "train_loss": loss} for i, loss in enumerate((1.0, 1e30, math.inf, math.nan))]
    record = put(tmp_path, arrays=False, value=value, history=history)
    wild = np.array([0.1, 1e30, np.inf, np.nan])
    arrays = {"target": np.arange(4.0), "generated": wild, "memory": np.tile(wild[:, None, None], (1, 9, 4))}
    records.write(record, arrays)
    put(tmp_path, arrays=False, model="LSTM", value=1e-3)
    assert "diverged" in write(tmp_path)
    assert "NaN" not in (tmp_path / "report.json").read_text() and "nan" not in (tmp_path / "report.html").read_text()


def test_a_network_that_diverged_before_it_learnt_anything_has_no_accuracy(tmp_path):
    options = {"experiment": "handwriting", "arrays": False, "case": {"lines": 40}, "metric": "accuracy"}
    put(tmp_path, model="LMN", value=-13.27, epochs=0, history=[], **options)
    put(tmp_path, model="LSTM", value=0.7, epochs=3, **options)
    shown = " ".join(write(tmp_path).split())
    assert "diverged" in shown and "-13" not in shown and "70.0" in shown


def test_growth_that_ends_at_different_sizes_is_shown_as_a_span(tmp_path):
    for seed, modules in enumerate((5, 7)):
        sizes = {"hidden": 25, "memory": 25, "modules": modules}
        put(tmp_path, False, experiment="words", seed=seed, sizes=sizes, parameters=1000 * modules, model=INCREMENTAL)
    table = tables.word_results(only(tmp_path))
    assert column(table, "parameters, ours")[INCREMENTAL].text == "5,000 to 7,000"
    assert column(table, "units, ours")[INCREMENTAL].text == "25 hidden, 5 x 25 memory or 25 hidden, 7 x 25 memory"


def test_presets_and_data_are_not_mixed(tmp_path):
    for preset, data in (("quick", "a"), ("paper", "a"), ("paper", "b")):
        put(tmp_path / data, arrays=False, preset=preset, data=data, history=[])
    write(tmp_path)
    checked(tmp_path / "report.html")
    assert len(json.loads((tmp_path / "report.json").read_text())["experiments"]) == 3


def test_the_same_run_twice_is_an_error_that_names_both(tmp_path):
    put(tmp_path / "one", arrays=False)
    put(tmp_path / "two", arrays=False)
    with pytest.raises(ValueError, match=r"one.* and .*two.*same run"):
        write(tmp_path)


def test_no_results_say_what_to_run(tmp_path):
    with pytest.raises(ValueError, match=r"result\.json.*mslmn reproduce all --out"):
        write(tmp_path)


def test_results_of_other_experiments_are_mentioned(tmp_path):
    put(tmp_path, arrays=False)
    put(tmp_path, arrays=False, experiment="weather")
    assert "Not shown: results of weather" in write(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "7", '{"experiment": "words"}', "\ud800"])
def test_a_damaged_result_is_named(tmp_path, text):
    record = put(tmp_path, arrays=False)
    (record.folder / records.RESULT).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(records.RecordError, match=r"result\.json is damaged"):
        write(tmp_path)


@pytest.mark.parametrize("name", ["value", "case", "history"])
def test_a_result_with_a_wrong_type_is_named(tmp_path, name):
    path = put(tmp_path, arrays=False).folder / records.RESULT
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: "x"}))
    with pytest.raises(records.RecordError, match=rf"result\.json is damaged \({name}"):
        write(tmp_path)


def test_a_result_without_its_case_is_named(tmp_path):
    put(tmp_path, arrays=False, case={"split": 0})
    with pytest.raises(records.RecordError, match=r"result\.json is damaged \(its case has no budget"):
        write(tmp_path)


def test_damaged_arrays_are_named_and_nothing_is_written(tmp_path):
    path = put(tmp_path).folder / records.ARRAYS
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3 : len(whole) // 3 + 40] = bytes(40)
    for content in (b"", b"PK\x03\x04", b"no zip", whole[:-30], whole[:100], bytes(flipped)):
        path.write_bytes(content)
        with pytest.raises(records.RecordError, match=r"arrays\.npz is damaged"):
            write(tmp_path)
    assert not any((tmp_path / name).exists() for name in FILES)


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": np.zeros(3)},
        {"expected": np.zeros((2, 2), int)},
        {"predicted": np.full(50, 25)},
        {"predicted": np.zeros(49, int)},
        {"predicted": np.full(50, -1)},
        {"suffixes": np.zeros(24, int)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arrays_that_do_not_fit_are_named(tmp_path, wrong):
    record = put(tmp_path, experiment="words")
    records.write(record, record.arrays() | wrong)
    with pytest.raises(records.RecordError, match=r"arrays\.npz is damaged"):
        write(tmp_path)


def test_arrays_of_other_words_are_not_added_up(tmp_path):
    put(tmp_path, experiment="words")
    record = put(tmp_path, experiment="words", seed=1)
    records.write(record, record.arrays() | {"names": np.array([f"word {i}" for i in range(25)])})
    with pytest.raises(records.RecordError, match="other words"):
        write(tmp_path)


def test_signs_of_a_printer():
    assert page.typeset("9 x 4, 5e-05, -1 to +2, 10^-3, it's 5 %") == (
        "9&nbsp;&times;&nbsp;4, 5&nbsp;&times;&nbsp;10<sup>&minus;5</sup>, &minus;1 to +2, 10<sup>&minus;3</sup>, "
        "it&rsquo;s 5&nbsp;%"
    )
