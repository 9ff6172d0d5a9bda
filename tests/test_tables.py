"""Tables as people have them: chosen columns, ids, categories, missing cells, compressed files, decimal commas."""

import csv
import gzip
import io
import json
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from iresnet.cli.train import describe_table
from iresnet.config import dump, parse
from iresnet.data import DataSettings, Schema, arrow, load, read
from iresnet.data.choice import ColumnChoice, TableOptions, choose_training_columns
from iresnet.data.columns import POSITIVE, REAL, ColumnKind
from iresnet.data.delimited import format_csv
from iresnet.evaluate import column_gains, robustness
from iresnet.presets import Experiment
from iresnet.run import Run, start
from tests.runs import tiny
from tests.test_data_sources import Frame, Series, all_rows

PEOPLE = "name,age,plan,income,note\n" + "".join(
    f"p{i},{20 + i},{('free', 'pro')[i % 2]},{1000 + 10.5 * i * i},x{i}\n" for i in range(12)
)


def write(folder, text, name="table.csv"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def settings(path, **others):
    return DataSettings(str(path), validation=1, test=1, **others)


def options(**others):
    return {"id": "name", "drop": ("note",), "kinds": ("plan=category",)} | others


class TestColumns:
    def test_ids_and_dropped_columns_are_no_data(self, tmp_path):
        splits = load(settings(write(tmp_path, PEOPLE), **options()))
        assert splits.schema.columns == ("age", "plan", "income")
        assert splits.schema.id == "name"
        assert splits.schema.kinds == (REAL, ColumnKind.category(("free", "pro")), REAL)
        names = [name for part in splits.parts.values() for name in part.names]
        assert sorted(names) == sorted(f"p{i}" for i in range(12))
        assert {name: x.tolist() for name, x in zip(splits.train.names, splits.train.x, strict=True)}["p2"] == [
            22, 0, 1042,
        ]  # fmt: skip

    def test_columns_in_the_order_that_is_asked_for(self, tmp_path):
        splits = load(settings(write(tmp_path, PEOPLE), columns=("income", "age")))
        assert splits.schema == Schema((2,), columns=("income", "age"))

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ({"drop": ("nota",)}, "has no column 'nota', which --drop names. Did you mean 'note'?"),
            ({"columns": ("agee",)}, "has no column 'agee', which --columns names. Did you mean 'age'?"),
            ({"id": "nme"}, "has no column 'nme', which --id names. Did you mean 'name'?"),
            ({"kinds": ("note=category",), "drop": ("note",)}, "has no column 'note', which --kind names."),
            ({"columns": ("age",), "drop": ("note",)}, "columns and drop exclude each other: give the columns to keep"),
            ({"drop": ("name", "age", "plan", "income", "note")}, "table.csv has no column left. Give at least one."),
            ({"kinds": ("age=intger",)}, "there is no kind 'intger'. Did you mean 'integer'?"),
            ({"columns": ("age",), "kinds": ("age=bounded:0:25",)},
             "column 'age' is declared as bounded:0:25; got 26 in line 8. Correct it, or declare another kind."),
            ({"kinds": ("note=category", "plan=category"), "id": "name"},
             "has 12 different values in 12 rows of column 'note'; a category has few. Leave the column out"),
            ({"context": ("agee",)}, "has no column 'agee', which --context names. Did you mean 'age'?"),
            ({"context": ("age", "note"), "drop": ("note",)},
             "the context must be some of the columns, and leave at least one other; got 'note'."),
            ({"columns": ("age",), "context": ("age",)}, "the context must be some of the columns, and leave at least"),
            ({"missing": "skip"}, "missing must be one of refuse, drop; got 'skip'"),
        ],
    )  # fmt: skip
    def test_refuses(self, tmp_path, given, sentence):
        path = write(tmp_path, PEOPLE)
        with pytest.raises(ValueError, match=sentence):
            load(settings(path, **given))

    def test_a_column_of_names_may_be_the_ids(self, tmp_path):
        text = "name,a\n" + "".join(f"p{i},{i}\n" for i in range(11))
        with pytest.raises(ValueError, match="If it names the rows: --id name; else leave it out: --drop name.$"):
            load(settings(write(tmp_path, text)))

    def test_they_are_for_tables(self):
        with pytest.raises(ValueError, match=r"context, id and kinds are for tables; got \('a',\) for digits."):
            load(DataSettings("digits", drop=("a",)))

    def test_categories_of_a_new_file(self, tmp_path):
        schema = load(settings(write(tmp_path, PEOPLE), **options())).schema
        data = read(write(tmp_path, "plan,age,income\npro,1,2\ngold,1,2\n"), schema)
        assert data.x[:, 1].tolist() == [1, -1]
        assert schema.inside(data.x).tolist() == [True, False]
        data = read(write(tmp_path, "30,free,7\n"), schema)  # no names: by position
        assert data.x.tolist() == [[30, 0, 7]]
        np.save(tmp_path / "a.npy", np.array([[1.0, 0, 3], [1, 2, 3]]))
        numbers = replace(schema, kinds=(REAL, ColumnKind.category(("0", "2")), REAL))
        assert read(tmp_path / "a.npy", numbers).x[:, 1].tolist() == [0, 1]

    def test_numbers_of_two_values_are_categories(self, tmp_path):
        rng = np.random.default_rng(0)
        lines = [f"{a},{b}\n" for a, b in zip(rng.choice([3, 7], 80), rng.lognormal(0, 1, 80), strict=True)]
        splits = load(settings(write(tmp_path, "kind,size\n" + "".join(lines))))
        assert splits.schema.kinds == (ColumnKind.category(("3", "7")), POSITIVE)
        assert splits.train.x[:, 0].unique().tolist() == [0, 1]
        declared = load(settings(tmp_path / "table.csv", kinds=("kind=integer:3:7", "size=real")))
        assert [str(kind) for kind in declared.schema.kinds] == ["integer:3:7", "real"]
        assert declared.train.x[:, 0].unique().tolist() == [3, 7]
        again = load(settings(tmp_path / "table.csv"), Schema((2,)))  # as an earlier version has trained it
        assert again.schema.kinds == ()
        assert again.train.x[:, 0].unique().tolist() == [3, 7]

    def test_ids_of_a_new_file(self, tmp_path):
        schema = Schema((1,), columns=("a",), id="name")
        path = write(tmp_path, "a,name,code\n1,'=x,c1\n2,y,c2\n")
        assert read(path, schema).names == ("=x", "y")
        assert read(path, schema, id="code").names == ("c1", "c2")
        assert read(write(tmp_path, "a\n1\n"), schema).names == ()
        with pytest.raises(ValueError, match="has no column 'cod', which --id names. Did you mean 'code'?"):
            read(write(tmp_path, "a,code\n1,2\n"), schema, id="cod")

    def test_settings_are_written_and_read(self):
        made = DataSettings("t.csv", drop=("a, b", "c]"), kinds=("the x=bounded:0:1",), id='"q"', missing="drop")
        assert parse(DataSettings, dump(made)) == made


class TestDetected:
    """Columns of words are categories, and constant columns are left out, in files of at least 50 rows."""

    @staticmethod
    def text(rows=60, state=lambda i: ("off", "on", "")[i % 2], fixed=3):
        return "t,state,fixed,mode\n" + "".join(f"{i + 0.5 / (i + 1)},{state(i)},{fixed},auto\n" for i in range(rows))

    def test_words(self, tmp_path):
        schema = load(settings(write(tmp_path, self.text()))).schema
        assert schema.columns == ("t", "state")
        assert schema.kinds[1] == ColumnKind.category(("off", "on"))
        assert schema.constants == ("fixed", "mode")
        assert Schema.from_dict(schema.to_dict()) == schema

    def test_a_new_file_may_have_the_columns_that_were_left_out(self, tmp_path):
        schema = load(settings(write(tmp_path, self.text()))).schema
        new = write(tmp_path, "mode,state,t\nmanual,on,2\n-,broken,1\n", "new.csv")
        assert read(new, schema).x.tolist() == [[2, 1], [1, -1]]

    def test_a_resumed_run_leaves_the_same_ones_out(self, tmp_path):
        path = write(tmp_path, self.text())
        first = load(settings(path))
        again = load(settings(path), schema=first.schema)
        assert again.schema == first.schema
        assert again.train.x.tolist() == first.train.x.tolist()

    @pytest.mark.parametrize(
        ("state", "sentence"),
        [
            (lambda i: ("on", "7")[i % 2], "'on' is not a number in line 2"),  # a word among numbers is a mistake
            (
                lambda i: ("5 %", "7 %")[i % 2],
                r"'5 %' is not a number in line 2, column 'state'\. .* the column\. Write numbers alone, such as 5, "
                r"without signs, units and separators\. Else leave the column out: --drop state\.$",
            ),
            (lambda i: ("$1.50", "$7")[i % 2], "Write numbers alone, such as 1.50, without"),
            (lambda i: ("-12 kg", "7 kg")[i % 2], "Write numbers alone, such as -12, without"),
            (lambda i: ('"1,234.5"', '"12,345.0"')[i % 2], "Write numbers alone, such as 1234.5, without"),
            (lambda i: ("12a", "7b")[i % 2], "If it is data, a category: --kind state=category"),  # no unit
            (
                lambda i: f"2024-01-{i % 28 + 1:02}",
                r"'2024-01-01' is not a number .* If these dates name the rows: --id state\. To learn from them, write "
                r"them as numbers, such as days or hours\. Else leave the column out: --drop state\.$",
            ),
            (lambda i: f"{i % 28 + 1}/1/2024 10:30", "If these dates name the rows: --id state"),
            (lambda i: f"2024-01-01T10:{i % 60:02}:00Z", "If these dates name the rows: --id state"),
            (lambda i: f"{i % 24:02}:30", "If these dates name the rows: --id state"),
            (lambda i: f"w{i}", "If it names the rows: --id state"),
            (lambda i: f"w{i % 9}", "If it is data, a category: --kind state=category"),  # seven rows each
            (lambda i: ("", "on")[i % 2], "a number is missing in line 2, column 'state'"),  # 30 words
        ],
    )
    def test_not_words(self, tmp_path, state, sentence):
        with pytest.raises(ValueError, match=sentence):
            load(settings(write(tmp_path, self.text(state=state))))

    def test_fewer_rows_tell_too_little(self, tmp_path):
        with pytest.raises(ValueError, match="'off' is not a number in line 2"):
            load(settings(write(tmp_path, self.text(rows=49))))

    def test_rows_without_a_word_may_be_left_out(self, tmp_path):
        path = write(tmp_path, self.text(120, lambda i: ("", "on", "off")[i % 3]))
        with pytest.raises(ValueError, match="a category is missing in line 2.* 40 cells in 40 rows are missing"):
            load(settings(path))
        splits = load(settings(path, missing="drop"))
        assert (splits.schema.constants, sum(map(len, splits.parts.values()))) == (("fixed", "mode"), 80)

    def test_a_declared_or_given_column_stays(self, tmp_path):
        path = write(tmp_path, self.text())
        assert load(settings(path, context=("fixed",))).schema.columns == ("t", "state", "fixed")
        with pytest.raises(ValueError, match="column 'fixed' is 3 in all .* training rows"):
            load(settings(path, kinds=("fixed=real",)))

    def test_something_must_vary(self, tmp_path):
        with pytest.raises(ValueError, match="column 'a' is 1 in all"):
            load(settings(write(tmp_path, "a,b\n" + 60 * "1,2\n")))

    def test_numbers_with_a_decimal_comma_are_no_words(self, tmp_path):
        text = "a;b\n" + "".join(f"{i},5;{(i * i) % 7},25\n" for i in range(60))
        assert load(settings(write(tmp_path, text))).train.x[:, 1].min() >= 0.25

    def test_in_arrays(self, tmp_path):
        x = np.stack([np.linspace(0, 1, 60) ** 3, np.full(60, 2.0), np.linspace(-3, 5, 60) ** 3], axis=1)
        np.save(tmp_path / "x.npy", x)
        schema = load(settings(tmp_path / "x.npy")).schema
        assert (schema.columns, schema.constants) == (("x0", "x2"), ("x1",))
        assert read(tmp_path / "x.npy", schema).x.shape == (60, 2)

    def test_in_parquet(self, tmp_path, monkeypatch):
        path = write(tmp_path, "", "table.parquet")
        words = Series(30 * ["off", "on"] + [None])
        frame = Frame(t=Series([float(i) for i in range(61)]), state=words, fixed=Series(61 * [1.0]))
        monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(read_parquet=lambda path: frame))
        schema = load(settings(path, missing="drop")).schema
        assert (schema.columns, schema.constants) == (("t", "state"), ("fixed",))
        assert schema.kinds[1].categories == ("off", "on")

    def test_a_given_word_may_be_the_only_one(self, tmp_path):
        path = write(tmp_path, self.text())
        schema = load(settings(path, context=("mode",))).schema
        assert schema.kinds[schema.columns.index("mode")].categories == ("auto",)
        assert schema.one_hot == ("mode",)
        assert read(path, schema).x[:, schema.columns.index("mode")].tolist() == [0] * 60
        assert Schema.from_dict(schema.to_dict()) == schema

    def test_booleans_are_zero_and_one_or_words(self, tmp_path):
        """Categories 0 and 1, as of an array of booleans, are found again where a file spells them out."""
        schema = load(settings(write(tmp_path, self.text(state=lambda i: i % 2)))).schema
        assert schema.kinds[1].categories == ("0", "1")
        new = write(tmp_path, "state,t\nTrue,2\nFalse,1\nmaybe,1\n", "new.csv")
        assert read(new, schema).x[:, 1].tolist() == [1, 0, -1]

    def test_a_missing_number_with_a_decimal_comma_is_no_word(self, tmp_path):
        text = "a;b\n" + "".join(f"{'' if i == 5 else f'{i},25'};{i}\n" for i in range(60))
        with pytest.raises(ValueError, match="a number is missing in line 7.* --missing drop leaves this row out"):
            load(settings(write(tmp_path, text)))

    def test_infinity_is_a_word_among_words(self, tmp_path):
        text = self.text(state=lambda i: ("x", "-inf", "Inf")[i % 3])
        with pytest.raises(ValueError, match="--kind state=category"):
            load(settings(write(tmp_path, text)))

    def test_it_is_shown(self, tmp_path, call):
        path = write(tmp_path, self.text())
        code, text = call("train", path, "--out", tmp_path / "run", "--set", "steps=1")
        assert code == 0, text
        assert "  state: category: off, on\n" in text
        assert "A category that is to be predicted is named by --label." in text
        assert "--set steps=1 --out" in text.replace("\n", "")  # the same command has the same settings
        assert "Left out, since every row has the same value there: fixed, mode.\n" in text


@pytest.mark.parametrize(
    ("column", "said"), [("i", True), ("i + 1", True), ("-i", True), ("2 * i", False), ("i // 2", False)]
)
def test_a_column_that_numbers_the_rows_is_named(tmp_path, column, said):
    """Trap: a model of it calls every new row an anomaly, whose number is beyond those of the training rows."""
    text = "Id,a\n" + "".join(f"{eval(column, {'i': i})},{(7 * i) % 11}.5\n" for i in range(60))
    splits = load(settings(write(tmp_path, text)))
    lines = describe_table(Experiment(), splits)
    assert ("Id numbers the rows, of which a model learns nothing: --id Id leaves it out." in lines) == said


def test_choosing_among_many_columns_takes_no_quadratic_time():
    names, begun = [f"x{i}" for i in range(50_000)], time.process_time()
    choose = choose_training_columns(TableOptions(columns=tuple(names[1:]), id="x0"))
    assert choose(Path("wide.csv"), names, True).columns == list(range(1, 50_000))
    assert time.process_time() - begun < 3  # it took half a minute


class TestMissing:
    TEXT = "a,b,kind\n1,2,x\n,4,y\n5,NA,x\n7,8,\n9,10,y\n11,12,x\n13,14,y\n"

    def test_cells_are_counted(self, tmp_path):
        path = write(tmp_path, self.TEXT)
        sentence = (
            "a number is missing in line 3, column 'a'. Correct it, or remove the row or the column. 2 cells in 2 rows "
            "are missing; --missing drop leaves these rows out."
        )
        with pytest.raises(ValueError, match="is missing") as error:
            load(settings(path, label="kind"))
        assert str(error.value) == f"{path}: {sentence}"
        with pytest.raises(
            ValueError, match=r"got nan in line 2, column 'a'. Fill it in, or remove the row. 3 cells in 2"
        ):
            load(settings(write(tmp_path, "a,b\nnan,nan\n1,nan\n2,3\n")))
        with pytest.raises(
            ValueError, match="a category is missing in line 5, column 'kind'. Fill it in, or remove the row. No other"
        ):
            load(settings(write(tmp_path, self.TEXT), columns=("kind",), kinds=("kind=category",)))

    def test_a_single_one_is_named(self, tmp_path):
        end = "or the column. No other cell is missing; --missing drop leaves this row out.$"
        with pytest.raises(ValueError, match=f"a number is missing in line 3, column 'a'. .* {end}"):
            load(settings(write(tmp_path, "a,b\n1,2\n,4\n5,6\n")))

    def test_rows_are_left_out_on_request(self, tmp_path):
        path = write(tmp_path, self.TEXT)
        splits = load(settings(path, label="kind", missing="drop"))
        assert sorted(all_rows(splits)[:, 0].tolist()) == [1, 7, 9, 11, 13]  # a missing label is no missing cell
        splits = load(settings(path, kinds=("kind=category",), missing="drop"))
        assert sorted(all_rows(splits)[:, 0].tolist()) == [1, 9, 11, 13]
        assert sorted(row for part in splits.parts.values() for row in part.rows) == [0, 4, 5, 6]

    @pytest.mark.parametrize("mark", ["?", " - ", "#N/A", "<NA>"])
    def test_marks_in_columns_of_numbers(self, tmp_path, mark):
        """Of a UCI table, a spreadsheet or pandas. Among categories, a mark is one of them."""
        text = f"a,b,kind\n1,2,x\n3,{mark},y\n5,6,{mark}\n7,8,y\n9,{mark},x\n11,12,y\n"
        path, kind = write(tmp_path, text), ("kind=category",)
        sentence = r"is not a number in line 3, column 'b'\..* 2 cells in 2 rows are missing; --missing drop"
        with pytest.raises(ValueError, match=sentence):
            load(settings(path, kinds=kind))
        splits = load(settings(path, kinds=kind, missing="drop"))
        assert sorted(all_rows(splits)[:, 0].tolist()) == [1, 5, 7, 11]
        assert splits.schema.kinds[2].categories == tuple(sorted([mark.strip(), "x", "y"]))

    def test_in_a_new_file(self, tmp_path):
        schema = Schema((2,), columns=("a", "b"), id="kind")
        data = read(write(tmp_path, self.TEXT), schema, skip_missing=True)
        assert (data.rows, data.names) == ((0, 3, 4, 5, 6), ("x", "", "y", "x", "y"))
        assert read(write(tmp_path, "a,b\n1,2\n"), schema, skip_missing=True).rows == ()
        with pytest.raises(
            ValueError, match="every row has a missing cell, so none is left. Drop the columns they are in."
        ):
            read(write(tmp_path, "a,b\n1,\n,2\n"), schema, skip_missing=True)

    def test_other_text_is_still_refused(self, tmp_path):
        with pytest.raises(ValueError, match="'x' is not a number in line 3, column 'a'"):
            load(settings(write(tmp_path, "a,b\n,2\nx,4\n5,6\n"), missing="drop"))
        with pytest.raises(ValueError, match="numbers must be finite and fit float32; got inf in line 2"):
            load(settings(write(tmp_path, "a,b\ninf,2\n3,4\n5,6\n"), missing="drop"))

    def test_in_arrays(self, tmp_path):
        np.save(tmp_path / "a.npy", np.array([[1, 2], [np.nan, 3], [4, 5], [6, 7], [8, 9]]))
        assert len(all_rows(load(settings(tmp_path / "a.npy", missing="drop")))) == 4


class TestText:
    @pytest.mark.parametrize("separator", [";", "\t"], ids=["semicolon", "tab"])
    def test_a_decimal_comma(self, tmp_path, separator):
        lines = ("a;b", "1,5;2", "-0,25;1e2", "3;1,5e-1", "4,125;0")
        data = read(write(tmp_path, "\n".join(lines).replace(";", separator)), Schema((2,), columns=("a", "b")))
        assert data.x.tolist() == [[1.5, 2], [-0.25, 100], [3, np.float32(0.15)], [4.125, 0]]

    @pytest.mark.parametrize("text", ["3,5;2,1\n-1,5;4\n", "3,5\t2,1\n-1,5\t4\n", 'a,b\n"3,5","2,1"\n"-1,5",4\n'])
    def test_commas_of_numbers_separate_no_columns(self, tmp_path, text):
        assert read(write(tmp_path, text), Schema((2,), columns=("a", "b"))).x.tolist() == [
            [3.5, np.float32(2.1)],
            [-1.5, 4],
        ]

    def test_a_bar_separates_where_nothing_else_does(self, tmp_path):
        schema = Schema((2,), columns=("a", "b"))
        assert read(write(tmp_path, "a|b\n1|2.5\n3|4\n"), schema).x.tolist() == [[1, 2.5], [3, 4]]
        schema = Schema((2,), columns=("p(a|b|c)", "b"))
        assert read(write(tmp_path, "p(a|b|c),b\n1,2\n3,4\n"), schema).x.tolist() == [[1, 2], [3, 4]]
        text = format_csv(["p(a|b)"], [[1.0], [2.0]])  # one column that is called so
        assert read(write(tmp_path, text), Schema((1,), columns=("p(a|b)",))).x.tolist() == [[1], [2]]

    def test_a_separator_at_the_end_of_every_line_makes_no_column(self, tmp_path):
        splits = load(settings(write(tmp_path, "a,b,\n" + "".join(f"{i},{i % 7}.5,\n" for i in range(20)))))
        assert splits.schema.columns == ("a", "b")
        numbered = "".join(f"{i},{i},{i % 7}.5,\n" for i in range(20))  # and a first one that numbers the rows
        assert load(settings(write(tmp_path, f",a,b,\n{numbered}"))).schema.columns == ("a", "b")

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("a;b\n1,5;2\n2.5;3\n", "'1,5' may have a decimal comma or separate thousands; '2.5' has a decimal point."),
            ("a;b\n2.5;2\n1,5;3\n", "'1,5' may have a decimal comma or separate thousands; '2.5' has a decimal point."),
            (
                "a;b\n1,234;2\n",
                "'1,234' may have a decimal comma or separate thousands; no other number shows which. Write",
            ),
            ("a;b\n1.234,5;2\n", "'1.234,5' is not a number in line 2"),
            ('a,b\n"1,5",2\n2.5,3\n', "'1,5' may have a decimal comma or separate thousands; '2.5' has a decimal"),
            (
                "a,b\n1,5,2,5\n",
                "line 2 has 4 cells; those above have 2. If its commas are decimal signs, separate the columns by "
                "semicolons or tabs, or quote such numbers.$",
            ),
            ("a,b\n1\n", "line 2 has 1 cells; those above have 2.$"),
        ],
    )
    def test_an_ambiguous_comma_is_refused(self, tmp_path, text, sentence):
        with pytest.raises(ValueError, match=sentence):
            read(write(tmp_path, text), Schema((2,), columns=("a", "b")))

    def test_compressed(self, tmp_path):
        path = tmp_path / "people.csv.gz"
        path.write_bytes(gzip.compress(PEOPLE.encode()))
        whole = load(settings(write(tmp_path, PEOPLE), **options()))
        assert torch.equal(load(settings(path, **options())).train.x, whole.train.x)
        path.write_bytes(gzip.compress(PEOPLE.encode())[:-12])
        with pytest.raises(ValueError, match=r"people.csv.gz is damaged \(.*\). Compress it again with gzip."):
            load(settings(path, **options()))
        path.write_bytes(b"no gzip")
        with pytest.raises(ValueError, match=r"people.csv.gz is damaged \(Not a gzipped file"):
            load(settings(path, **options()))

    def test_a_file_that_unpacks_to_far_more(self, tmp_path, monkeypatch):
        monkeypatch.setattr("iresnet.data.npy.FREE", 1000)
        path = tmp_path / "zeros.csv.gz"
        path.write_bytes(gzip.compress(b"a\n" + b"0\n" * 50_000))
        with pytest.raises(
            ValueError, match=r"zeros.csv.gz unpacks from .* to more than .* Save it without compression."
        ):
            load(settings(path))

    def test_from_the_standard_input(self, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffb,a\n2,1\n".encode())))
        assert read("-", Schema((2,), columns=("a", "b"))).x.tolist() == [[1, 2]]
        with pytest.raises(ValueError, match="a run reads its data more than once, so they cannot come from -."):
            load(DataSettings("-"))


class TestTestSplit:
    def test_nothing_is_held_out(self, tmp_path):
        splits = load(DataSettings(str(write(tmp_path, PEOPLE)), columns=("age",), test=0))
        assert list(splits.parts) == ["train", "validation"]
        assert len(splits.train) + len(splits.validation) == 12
        assert splits.to("cpu").held_out is None
        assert splits.held_out_data is splits.validation
        with pytest.raises(ValueError, match=r"no test data are held out \(data.test = 0\). Give a file of your own"):
            _ = splits.test


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny run on a table with a column of every kind, and its file."""
    folder, rng, n = tmp_path_factory.mktemp("tables"), np.random.default_rng(0), 300
    columns = {
        "name": [f"c{i}" for i in range(n)], "t": rng.normal(20, 3, n).round(4), "n": rng.poisson(2, n),
        "plan": rng.choice(["free", "pro", "team"], n), "r": rng.uniform(size=n).round(6),
        "p": rng.lognormal(3, 1, n).round(5), "rain": np.where(rng.random(n) < 0.4, 0, rng.exponential(5, n)).round(1),
    }  # fmt: skip
    path = folder / "mixed.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    preset = tiny("table-density")
    data = replace(preset.data, source=str(path), id="name", kinds=("plan=category",))
    start(replace(preset, data=data), folder / "run")
    return folder


class TestCommands:
    def test_kinds_are_shown_and_can_be_changed(self, trained, tmp_path, call):
        words = ("--id", "name", "--kind", "plan=category", "--kind", "rain=rounded:0.1:0:100", "--set", "steps=1")
        code, text = call("train", trained / "mixed.csv", *words, "--out", tmp_path / "run")
        assert code == 0, text
        expected = (
            "Columns that are not just real numbers (change one with --kind COLUMN=KIND):\n  n: integer, from 0 on\n"
            "  plan: category: free, pro, team\n  r: bounded, from 0 to 1\n  p: positive\n"
            "  rain: multiples of 0.1, from 0 to 100\n"
        )
        assert expected in text
        assert "--id name --kind plan=category --kind rain=rounded:0.1:0:100 --set steps=1 --out" in text
        assert Run.open(tmp_path / "run").schema.id == "name"

    def test_a_run_knows_its_kinds(self, trained):
        run = Run.open(trained / "run")
        kinds = [str(kind) for kind in run.schema.kinds]
        assert kinds == ["real", "integer:0", "category", "bounded:0:1", "positive", "rounded:0.1:0"]
        assert run.splits().schema == run.schema
        written = json.loads((trained / "run" / "schema.json").read_text())
        assert written["kinds"][2] == {
            "name": "category", "lower": 0, "upper": 2, "step": 1, "categories": ["free", "pro", "team"],
        }  # fmt: skip

    def test_samples_are_rows_of_the_table(self, trained, call):
        code, text = call("sample", trained / "run", "-n", 300, "--out", "-")
        assert code == 0
        rows = list(csv.DictReader(io.StringIO(text)))
        assert len(rows) == 300
        assert {row["plan"] for row in rows} == {"free", "pro", "team"}
        numbers = {name: np.array([float(row[name]) for row in rows]) for name in ("n", "r", "p", "rain")}
        assert (numbers["n"] == numbers["n"].round()).all()
        assert numbers["n"].min() >= 0
        assert 0 <= numbers["r"].min() <= numbers["r"].max() <= 1
        assert numbers["p"].min() > 0
        assert numbers["rain"].min() >= 0
        assert {len(row["rain"].partition(".")[2]) for row in rows} <= {0, 1}

    def test_scores_with_ids_and_explanations(self, trained, tmp_path, call):
        lines = ("ok,20,2,free", "hot,90,2,free", "new,20,2,gold", ",20,,free")
        path = write(tmp_path, "\n".join(["name,t,n,plan,r,p,rain", *(f"{line},0.5,20,0" for line in lines)]))
        assert "a number is missing in line 5, column 'n'" in call("score", trained / "run", path)[1]
        code, text = call("score", trained / "run", path, "--explain", 2, "--missing", "drop")
        assert code == 0, text
        ok, hot, new = csv.DictReader(io.StringIO(text))
        assert [row["name"] for row in (ok, hot, new)] == ["ok", "hot", "new"]
        assert float(ok["log_likelihood"]) > float(hot["log_likelihood"])
        assert float(ok["standard_error"]) > 0
        assert (hot["column_1"], float(hot["gain_1"]) > 20, 0.99 < float(hot["anomaly"]) < 1) == ("t", True, True)
        assert (new["log_likelihood"], new["anomaly"], new["column_1"], new["gain_1"]) == ("-inf", "1", "plan", "inf")
        assert (new["column_2"], new["gain_2"]) == ("", "")

    def test_impossible_values_are_counted(self, trained, tmp_path, call):
        rows = "name,t,n,plan,r,p,rain\na,20,2,pro,0.5,20,0\nb,20,2,gold,0.5,20,0\n"
        path, out = write(tmp_path, rows, "gold.csv"), tmp_path / "scores.csv"
        sentence = "1 of 2 samples hold a value that its column cannot have"
        assert sentence in call("score", trained / "run", path, "--out", out)[1]
        assert sentence not in call("score", trained / "run", path)[1]  # the table alone

    def test_a_number_for_which_float32_is_too_small(self, trained, tmp_path, call):
        """ln p overflows in float32; it is finite, falls with the distance, and the column at fault is named."""
        rows = "name,t,n,plan,r,p,rain\n" + "".join(f"a,{t},2,pro,0.5,20,0\n" for t in ("20", "1e21", "1e25", "1e38"))
        code, text = call("score", trained / "run", write(tmp_path, rows, "far.csv"), "--explain", "1")
        assert code == 0, text
        found = [line.split(",") for line in text.splitlines()[1:]]
        values = [float(cells[2]) for cells in found]
        assert values == sorted(values, reverse=True)
        assert np.isfinite(values).all()
        anomalies = [float(cells[5]) for cells in found]
        assert anomalies == sorted(set(anomalies))
        assert anomalies[-1] < 1
        assert [cells[7] for cells in found[1:]] == ["t"] * 3

    def test_an_id_called_like_a_score(self, trained, tmp_path, call):
        path = write(tmp_path, "row,t,n,plan,r,p,rain\nr7,20,2,free,0.5,20,0\n")
        assert call("score", trained / "run", path, "--id", "row")[1].startswith("row,id: row,log_likelihood,")

    def test_scores_through_pipes(self, trained, call, monkeypatch):
        rows = b"t;n;plan;r;p;rain\n20,5;2;pro;0,5;20;0\n"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(rows)))
        code, text = call("score", trained / "run", "-", "--out", "-")
        assert code == 0
        assert text.startswith("row,log_likelihood,")
        assert text.count("\n") == 2

    @pytest.mark.parametrize(
        "words", ["audit", "certify", "invert -n 5", "interpolate --pairs 2", "evaluate --rows 20"]
    )
    def test_the_other_commands(self, trained, tmp_path, call, words):
        command, *others = words.split()
        out = ["--out", tmp_path / "out"] if command in ("invert", "interpolate") else []
        assert call(command, trained / "run", *others, *out)[0] == 0

    def test_a_table_without_a_density_is_refused(self, tmp_path, call):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(80, 2))
        text = "a,b,c\n" + "".join(f"{a},{b},{a + b}\n" for a, b in x)
        code, text = call("train", write(tmp_path, text), "--out", tmp_path / "run")
        assert code == 2
        assert "column 'c' is a linear combination of 'a', 'b' in all 54 training rows" in text
        assert not (tmp_path / "run").exists()

    def test_wrong_options(self, trained, tmp_path, call):
        run = trained / "run"
        code, text = call("score", run, trained / "mixed.csv", "--missing", "skip")
        assert (code, text) == (2, "iresnet: --missing must be refuse or drop; got 'skip'.\n")
        code, text = call("train", "--resume", "--out", run, "--drop", "t")
        assert code == 2
        assert "a resumed run keeps its settings; got --drop." in text


@pytest.fixture(scope="module")
def run(trained):
    """The density of n and p, given plan and t."""
    preset = tiny("table-density")
    options = {"id": "name", "drop": ("rain", "r"), "context": ("plan", "t"), "kinds": ("plan=category",)}
    data = replace(preset.data, source=str(trained / "mixed.csv"), **options)
    return start(replace(preset, data=data), trained / "conditional").run


class TestContext:
    """The density of some columns, given the others."""

    def test_the_targets_are_the_other_columns(self, run, tmp_path):
        assert run.schema.columns == ("t", "n", "plan", "p")
        assert run.schema.targets == ("n", "p")
        assert run.splits().schema == run.schema
        path = write(tmp_path, PEOPLE)
        some = load(settings(path, columns=("income",), context=("age",)))
        assert (some.schema.columns, some.schema.targets) == (("income", "age"), ("income",))

    def test_scores_and_their_explanation(self, run, tmp_path, call):
        path = write(tmp_path, "name,t,n,plan,p\na,20,2,free,20\nb,20,2,free,1e9\n")
        code, text = call("score", run.folder, path, "--explain", 4)
        assert code == 0, text
        a, b = csv.DictReader(io.StringIO(text))
        assert float(a["log_likelihood"]) > float(b["log_likelihood"])
        assert (b["column_1"], b["column_3"], b["column_4"]) == ("p", "", "")  # given columns have no gain
        gains = column_gains(run.model(), read(path, run.schema))
        assert not gains[:, [0, 2]].any()

    @pytest.mark.slow
    def test_the_readme_of_an_export_says_how_rows_are_written(self, run, tmp_path, call):
        code, text = call("export", run.folder, "--out", tmp_path / "export")
        assert code == 0, text
        assert "log_prob is ln p(x) in nats" in text
        readme = (tmp_path / "export" / "README.txt").read_text(encoding="utf-8")
        assert (
            "The columns of x, in this order:\n    0  't' (given)\n    1  'n'\n"
            "    2  'plan': 0 = 'free', 1 = 'pro', 2 = 'team' (given)\n    3  'p'\n"
        ) in readme
        assert "'plan'" not in text

    def test_given_categories_are_indicators(self, run, trained, tmp_path, call):
        assert run.schema.one_hot == ("plan",)
        assert Schema.from_dict(run.schema.to_dict()) == run.schema
        given = run.model().transform
        assert given.categories == (0, 3)  # t is a number
        encoded = given.encode(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        assert encoded[:, 1:].tolist() == [[1, 0, 0], [0, 0, 1]]
        path = write(tmp_path, "name,t,n,plan,p\na,20,2,gold,20\nb,20,2,free,1\nc,20,2,lead,1\n")
        code, text = call("score", run.folder, path)
        assert code == 2
        assert "got 'gold' in line 2, of which the model knows nothing. Remove the row. There are 2 such rows." in text

    def test_a_run_without_indicators_is_still_read(self, run):
        """Earlier versions gave a model the number of the category."""
        old = replace(run.schema, one_hot=())
        assert "one_hot" not in old.to_dict()
        assert load(run.experiment.data, old).schema == old

    def test_samples_for_given_rows(self, run, tmp_path, call):
        path = write(tmp_path, "plan,t\npro,10\nteam,30.5\n")
        code, text = call("sample", run.folder, "-n", 5, "--given", path, "--out", "-")
        assert code == 0, text
        rows = list(csv.DictReader(io.StringIO(text)))
        assert [row["plan"] for row in rows] == ["pro", "team", "pro", "team", "pro"]
        assert [float(row["t"]) for row in rows] == [10, 30.5, 10, 30.5, 10]
        assert all(float(row["n"]) >= 0 and float(row["p"]) > 0 for row in rows)
        assert len({row["p"] for row in rows}) == 5

    def test_what_sample_needs(self, run, trained, tmp_path, call):
        path = write(tmp_path, "plan,t\ngold,10\n")
        for folder, words, sentence in (
            (run.folder, (), "this density is conditional: it needs a table of t, plan with --given FILE."),
            (
                run.folder,
                ("--given", path),
                "column 'plan' must hold one of free, pro, team; got 'gold' in line 2, of which the model "
                "knows nothing. Remove the row.",
            ),
            (trained / "run", ("--given", path), "this density is not conditional: it needs no --given"),
        ):
            code, text = call("sample", folder, *words)
            assert code == 2
            assert sentence in text

    @pytest.mark.parametrize("words", ["audit", "certify", "evaluate --rows 20", "report"])
    def test_the_other_commands(self, run, call, words):
        command, *others = words.split()
        assert call(command, run.folder, *others)[0] == 0

    def test_it_is_shown(self, trained, tmp_path, call):
        words = ("--columns", "t,p", "--context", "n", "--set", "steps=1", "--set", "epochs=0")
        code, text = call("train", trained / "mixed.csv", *words, "--out", tmp_path / "run")
        assert code == 0, text
        assert "The density of t, p, given n.\n" in text


class TestHybrid:
    def test_its_radius_is_limited_to_the_columns(self, tmp_path):
        """An attack stays where the model is defined; a logarithm has no Lipschitz constant."""
        rng, n = np.random.default_rng(0), 120
        rows = zip(
            rng.uniform(size=n), rng.integers(0, 3, n), rng.lognormal(size=n), rng.integers(0, 2, n), strict=True
        )
        path = write(tmp_path, "share,count,size,kind\n" + "".join(f"{a},{b},{c},{y}\n" for a, b, c, y in rows))
        for drop, sentence in (((), "A positive column has a logarithm"), (("size",), "")):
            preset = tiny("table-hybrid")
            data = replace(preset.data, source=str(path), label="kind", drop=drop)
            network = replace(preset.network, head=())
            run = start(replace(preset, data=data, network=network), tmp_path / f"run{len(drop)}").run
            found = robustness(run.model(), run.splits().test, 10.0, steps=3, restarts=2)
            assert sentence in found.remark
            assert found.value <= found.attacked


class TestArrow:
    """A file is read in the same way, with the same errors, whether pyarrow is installed or not."""

    SCHEMA = Schema((2,), columns=("a", "b"), label="kind", classes=("x", "y z"), id="id")
    REGULAR = "id,a,kind,b\n" + "".join(f"r{i},{i / 7!r},{('x', 'y z')[i % 2]},{-i}e-3\n" for i in range(50))
    FILES: ClassVar = {
        "regular": REGULAR,
        "semicolons": REGULAR.replace(",", ";"),
        "windows": REGULAR.replace("\n", "\r\n"),
        "blank lines": REGULAR.replace("r7", "\n\nr7"),
        "quoted": REGULAR.replace("y z", '"y z"').replace("r9,", '"r, 9",'),
        "spaces": REGULAR.replace(",", ", "),
        "mark": "\ufeff" + REGULAR,
        "no header": "1.5,2\n3,4\n",
        "late header": "\n" + REGULAR,
        "quote inside": REGULAR.replace("r9", 'r"9'),
        "two lines": REGULAR.replace("r9,", '"r\n9",'),
        "plus": REGULAR.replace("-1e-3", "+1e-3"),
        "missing": REGULAR.replace("-9e-3", ""),
        "unknown": REGULAR.replace("-9e-3", "NA"),
        "infinite": REGULAR.replace("-9e-3", "inf"),
        "huge": REGULAR.replace("-9e-3", "1e39"),
        "short": REGULAR.replace("r9,", ""),
        "long": REGULAR.replace("r9,", "r9,r9,"),
        "underscore": REGULAR.replace("-9e-3", "1_0"),
        "other digits": REGULAR.replace("-9e-3", "\u0663"),
        "other class": REGULAR.replace("r9,1.2857142857142858,y z", "r9,1.2857142857142858,z"),
        "decimal comma": REGULAR.replace(",", ";").replace(".", ","),
    }

    def result(self, path):
        try:
            data = read(path, self.SCHEMA)
        except ValueError as error:
            return str(error)
        return data.x.tolist(), None if data.y is None else data.y.tolist(), data.names

    @pytest.mark.parametrize("name", FILES)
    def test_it_makes_no_difference(self, tmp_path, monkeypatch, name):
        pytest.importorskip("pyarrow")
        path = tmp_path / "t.csv"
        path.write_bytes(self.FILES[name].encode())
        monkeypatch.setattr(arrow, "LARGE", 10**9)
        expected = self.result(path)
        monkeypatch.setattr(arrow, "LARGE", 0)
        assert self.result(path) == expected
        read_by_arrow = isinstance(expected, tuple) or name in ("huge", "other class")
        unusual = ("late header", "quote inside", "spaces", "plus", "no header", "decimal comma")
        if name not in unusual:
            choice = ColumnChoice([1, 3], 2, id=0)
            found = arrow.read_columns(path, ";" if name == "semicolons" else ",", ["id", "a", "kind", "b"], choice, 1)
            assert (found is not None) == read_by_arrow

    def test_without_pyarrow(self, tmp_path, monkeypatch):
        monkeypatch.setattr(arrow, "LARGE", 0)
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        assert self.result(write(tmp_path, self.REGULAR))[2][:2] == ("r0", "r1")

    def test_what_pyarrow_returns(self, tmp_path, monkeypatch):
        """With as much of pyarrow as is used, for where it is not installed."""
        given = {}

        class Column(list):
            def to_numpy(self):
                return np.array(self)

            def to_pylist(self):
                return list(self)

        class Found(dict):
            num_rows = 2

        def read_csv(file, **options):
            given.update(options, text=file.read())
            columns = {"id": ["r0", "r1"], "a": [1.0, 2.0], "kind": ["x", " y z"], "b": [3.0, 4.0]}
            return Found({name: Column(cells) for name, cells in columns.items()})

        whole, module = types.ModuleType("pyarrow"), types.ModuleType("pyarrow.csv")
        whole.float64, whole.string, module.read_csv = (lambda: float), (lambda: str), read_csv
        module.ReadOptions = module.ParseOptions = module.ConvertOptions = dict
        monkeypatch.setitem(sys.modules, "pyarrow", whole)
        monkeypatch.setitem(sys.modules, "pyarrow.csv", module)
        monkeypatch.setattr(arrow, "LARGE", 0)
        path = write(tmp_path, "id;a;kind;b\nr0;1;x;3\nr1;2;y z;4\n")
        assert self.result(path) == ([[1, 3], [2, 4]], [0, 1], ("r0", "r1"))
        assert given["text"].startswith(b"id;a")
        assert given["read_options"] == {"column_names": ["id", "a", "kind", "b"], "skip_rows": 1}
        assert given["parse_options"] == {"delimiter": ";"}
        assert given["convert_options"]["column_types"] == {"a": float, "b": float, "id": str, "kind": str}
