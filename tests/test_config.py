"""Settings: they are read as they were written, and every error names where it is."""

import sys
import time
from dataclasses import dataclass, field, fields, replace

import pytest

from iresnet import config
from iresnet.presets import PRESETS, Experiment, with_overrides
from iresnet.train import Training

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Inner:
    count: int = 1
    rate: float = 0.5
    word: str = "a"
    on: bool = False

    def __post_init__(self):
        if self.count < 0:
            raise ValueError(f"count must not be negative; got {self.count}.")


@dataclass(frozen=True)
class Middle:
    inner: Inner = field(default_factory=Inner)
    pair: tuple[float, float] = (0.0, 1.0)
    sizes: tuple[int, ...] = ()
    limit: int | None = None


@dataclass(frozen=True)
class Settings:
    rate: float = 2.0
    middle: Middle = field(default_factory=Middle)
    other: Inner = field(default_factory=Inner)


class TestRoundTrip:
    @pytest.mark.parametrize("name", PRESETS)
    def test_every_preset_survives_a_round_trip(self, name):
        experiment = PRESETS[name]
        assert config.parse(Experiment, config.dump(experiment)) == experiment

    @pytest.mark.parametrize("name", PRESETS)
    def test_a_dump_has_every_setting(self, name):
        """A file read back years later does not depend on defaults that have changed."""

        def leaves(content, prefix=""):
            for key, value in content.items():
                yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]

        written = set(leaves(tomllib.loads(config.dump(PRESETS[name]))))
        assert written == set(config._setting_types(Experiment))

    def test_awkward_values_survive_a_round_trip(self):
        word = "ü \"quoted\" \\ # not a comment\nnext line [table]\t= '''"
        there = Settings(middle=Middle(inner=Inner(word=word, rate=1e-300), sizes=(3,), limit=0, pair=(1, 2)))
        back = config.parse(Settings, config.dump(there))
        assert back == there
        assert type(back.middle.pair[0]) is float

    def test_a_list_takes_one_line(self):
        assert "blocks = [16]\n" in config.dump(PRESETS["points-density"])
        assert "pair = [0.0, 1.0]\nsizes = [3, 4]\n" in config.dump(Settings(middle=Middle(sizes=(3, 4))))

    def test_none_is_omitted_and_read_as_the_default(self):
        assert "limit" not in config.dump(Settings())
        assert config.parse(Settings, config.dump(Settings())).middle.limit is None
        assert config.parse(Settings, "[middle]\nlimit = 3").middle.limit == 3

    def test_omitted_settings_keep_their_defaults(self):
        got = config.parse(Settings, "[middle.inner]\nrate = 0.25")
        assert got == Settings(middle=Middle(inner=Inner(rate=0.25)))
        assert config.parse(Settings, "") == Settings()

    def test_an_integer_is_accepted_as_a_number(self):
        got = config.parse(Settings, "rate = 3\n[middle]\npair = [1, 2.5]")
        assert (got.rate, got.middle.pair) == (3.0, (1.0, 2.5))
        assert type(got.rate) is type(got.middle.pair[0]) is float


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("rats = 1", "unknown setting 'rats'. Did you mean 'rate'?"),
            ("[midle]\n", "unknown setting 'midle'. Did you mean 'middle'?"),
            ("[middle]\nsize = []", "unknown setting 'middle.size'. Did you mean 'sizes'?"),
            ("[middle.inner]\ncuont = 1", "unknown setting 'middle.inner.cuont'. Did you mean 'count'?"),
            ("zzzz = 1", "unknown setting 'zzzz'. Use one of middle, other, rate."),
            ("[other]\nqqq = 1", "unknown setting 'other.qqq'. Use one of count, on, rate, word."),
        ],
    )
    def test_an_unknown_key_at_any_depth_is_refused(self, text, sentence):
        with pytest.raises(ValueError, match="settings.toml: ") as caught:
            config.parse(Settings, text, "settings.toml")
        assert str(caught.value) == f"settings.toml: {sentence}"

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("rate = 'fast'", "rate must be a number; got 'fast'."),
            ("rate = true", "rate must be a number; got True."),
            ("rate = [1]", "rate must be a number; got [1]."),
            ("[other]\ncount = true", "other.count must be an integer; got True."),
            ("[other]\ncount = 1.0", "other.count must be an integer; got 1.0."),
            ("[other]\ncount = '3'", "other.count must be an integer; got '3'."),
            ("[other]\nword = 3", "other.word must be a string; got 3."),
            ("[other]\non = 1", "other.on must be true or false; got 1."),
            ("[other]\non = 'true'", "other.on must be true or false; got 'true'."),
            ("[middle]\npair = [1.0]", "middle.pair must be a list of 2 entries, each a number; got [1.0]."),
            ("[middle]\npair = [1, 2, 3]", "middle.pair must be a list of 2 entries, each a number; got [1, 2, 3]."),
            ("[middle]\npair = 0.9", "middle.pair must be a list of 2 entries, each a number; got 0.9."),
            ("[middle]\npair = [1, '2']", "middle.pair must be a list of 2 entries, each a number; got [1, '2']."),
            (
                "[middle]\nsizes = 3",
                "middle.sizes must be a list of entries, each an integer; got 3. Example: middle.sizes=[3]",
            ),
            ("[middle]\nsizes = [1.5]", "middle.sizes must be a list of entries, each an integer; got [1.5]."),
            (
                "[middle]\nsizes = '1,2'",
                "middle.sizes must be a list of entries, each an integer; got '1,2'. Example: middle.sizes=[1,2]",
            ),
            ("[middle]\nsizes = 'a,b'", "middle.sizes must be a list of entries, each an integer; got 'a,b'."),
            ("[middle]\nsizes = [true]", "middle.sizes must be a list of entries, each an integer; got [True]."),
            ("[middle]\nlimit = 'x'", "middle.limit must be an integer or nothing; got 'x'."),
            ("middle = 3", "middle must be a table of settings; got 3. Write [middle], then its keys."),
            (
                "[middle]\ninner = [1]",
                "middle.inner must be a table of settings; got [1]. Write [middle.inner], then its keys.",
            ),
            ("[rate]\nx = 1", "rate must be a number; got {'x': 1}."),
        ],
    )
    def test_a_value_of_another_type_is_refused(self, text, sentence):
        with pytest.raises(ValueError, match="settings.toml: ") as caught:
            config.parse(Settings, text, "settings.toml")
        assert str(caught.value) == f"settings.toml: {sentence}"

    def test_a_value_that_is_not_allowed_is_refused(self):
        """The sentence of the settings, once, after the file's name, however deep."""
        with pytest.raises(ValueError, match="count") as caught:
            config.parse(Settings, "[middle.inner]\ncount = -1", "settings.toml")
        assert str(caught.value) == "settings.toml: count must not be negative; got -1."

    @pytest.mark.parametrize(
        ("text", "line"), [("rate = 1\nother =\n", 2), ("rate = 1\n\n[other\n", 3), ("rate = 1\nrate = 2\n", 2)]
    )
    def test_bad_toml_names_the_line(self, text, line):
        with pytest.raises(
            ValueError, match=rf"settings.toml is not valid TOML: .*at line {line}, .*\. Fix that line."
        ):
            config.parse(Settings, text, "settings.toml")

    def test_a_list_of_names_is_in_order(self):
        """Not in that of a set, which differs from one process to the next."""
        names = ", ".join(sorted(f.name for f in fields(Training))).removesuffix("weight_decay")  # a long list is cut
        with pytest.raises(ValueError, match=rf"unknown setting 'zzzzzz'. Use one of {names}…"):
            config.parse(Training, "zzzzzz = 1")


class TestHostile:
    """Text that would take long to read, or more than Python's stack, and numbers that nothing can hold."""

    def refused(self, text):
        begin = time.process_time()
        with pytest.raises(ValueError, match="settings.toml") as caught:
            config.parse(Settings, text, "settings.toml")
        assert time.process_time() - begin < 5
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize(
        "text",
        [
            f"{'.'.join(30_000 * 'a')} = 1",
            f"[{' . '.join(20_000 * 'a')}]",
            f"[[{'.'.join(20_000 * ['a'])}]]",
            ".".join(10_000 * ['"a b"', "'c'"]) + " = 1",
            f"rate = {{ {'.'.join(20_000 * 'a')} = 1 }}",
            f"[middle]\ninner.{'.'.join(20_000 * 'a')} = 1",
        ],
        ids=["key", "table", "tables", "quotes", "inline", "known"],
    )
    def test_keys_with_very_many_parts_are_refused(self, text):
        assert "a key must have at most 32 parts separated by dots; got " in self.refused(text)

    @pytest.mark.parametrize("text", [100_000 * "[", 50_000 * "[{a=", 900 * "[" + 900 * "]"], ids="abc")
    def test_deep_nesting_is_refused(self, text):
        for line in (f"rate = {text}", f"[middle]\nsizes = {text}", f"unknown = {text}"):
            self.refused(line)

    def test_nesting_that_can_be_read_but_not_printed(self):
        deep: dict = {}
        for _ in range(5000):
            deep = {"a": deep}
        for content in ({"rate": deep}, {"middle": {"sizes": [deep]}}, {"middle": {"inner": [deep]}}):
            with pytest.raises(ValueError, match="settings.toml: ") as caught:
                config.from_mapping(Settings, content, "settings.toml")
            assert len(str(caught.value)) < 400

    def test_very_long_text_is_refused(self):
        assert "it must have at most 1,048,576 characters" in self.refused("#" + 2**20 * "x")
        assert config.parse(Settings, "#" + 100_000 * "x") == Settings()
        assert config.parse(Settings, f"[other]\nword = '{100_000 * 'x.'}'").other.word == 100_000 * "x."

    def test_long_names_and_values_are_shortened(self):
        self.refused(f"{10_000 * 'a'} = 1")
        self.refused(f"rate = '{10_000 * 'a'}'")
        self.refused(f"rate = [{10_000 * '1,'}]")
        self.refused(f"[middle]\nsizes = '{10_000 * '1,'}'")

    @pytest.mark.parametrize("digits", [20, 400, 5000])
    @pytest.mark.parametrize("line", ["[other]\ncount = {}", "[middle]\nsizes = [1, {}]", "[middle]\nlimit = -{}"])
    def test_an_integer_must_fit_64_bits(self, line, digits):
        text = self.refused(line.format(digits * "9"))
        assert "must fit 64 bits; got " in text or "a number has too many digits" in text

    @pytest.mark.parametrize("number", [400 * "9", 5000 * "9", f"0x{20_000 * 'f'}"], ids=["400", "5000", "0x"])
    def test_a_number_must_fit_64_bits(self, number):
        text = self.refused(f"rate = {number}")
        assert "rate must fit 64 bits; got " in text or "a number has too many digits" in text
        assert config.parse(Settings, "rate = 100000000000000000000").rate == 1e20

    @pytest.mark.parametrize("name", [name for name, kind in config._setting_types(Experiment).items() if kind is int])
    def test_every_integer_of_an_experiment_must_fit_64_bits(self, name):
        table, _, key = name.rpartition(".")
        for number in (2**63, 10**400, -(10**30)):
            with pytest.raises(ValueError, match=rf"mine.toml: {name} must fit 64 bits; got -?\d+"):
                config.parse(Experiment, f"[{table}]\n{key} = {number}" if table else f"{key} = {number}", "mine.toml")

    def test_a_setting_cannot_be_nan(self):
        assert self.refused("rate = nan") == "settings.toml: rate must be a number; got nan."
        assert self.refused("[middle]\npair = [1.0, -nan]").endswith("each a number; got [1.0, nan].")
        assert config.parse(Settings, "rate = inf").rate == float("inf")

    def test_what_follows_a_line_break_is_not_lost(self):
        with pytest.raises(ValueError, match=r"rate must be a number; got '5\\nother.count=3'"):
            config.override(Settings(), "rate=5\nother.count=3")

    @pytest.mark.parametrize("value", [5000 * "[", 5000 * "9", f"{{{'.'.join(20_000 * 'a')}=1}}"], ids="abc")
    def test_the_value_of_an_option(self, value):
        begin = time.process_time()
        for key in ("rate", "sizes", 10_000 * "a"):
            with pytest.raises(ValueError, match="must|unknown setting") as caught:
                config.override(Settings(), f"{key}={value}")
            assert len(str(caught.value)) < 500
        assert config.override(Settings(), f"other.word={value}").other.word == value
        assert time.process_time() - begin < 5


class TestOverride:
    def test_by_the_full_name(self):
        got = config.override(Settings(), "middle.inner.count=5")
        assert got == Settings(middle=Middle(inner=Inner(count=5)))

    def test_by_the_last_part_if_it_is_unique(self):
        assert config.override(Settings(), "sizes=[1, 2]") == Settings(middle=Middle(sizes=(1, 2)))

    def test_a_full_name_wins_over_the_last_part_of_others(self):
        """`rate` names the setting at the top; `middle.inner.rate` and `other.rate` need their tables."""
        assert config.override(Settings(), "rate=9") == Settings(rate=9.0)
        assert config.override(Experiment(), "seed=3") == Experiment(seed=3)

    def test_a_last_part_that_two_tables_have_is_refused_with_both(self):
        with pytest.raises(ValueError, match="count") as caught:
            config.override(Settings(), "count=5")
        assert (
            str(caught.value)
            == "'count' is ambiguous: it could be middle.inner.count, other.count. Give the full name."
        )
        with pytest.raises(
            ValueError, match="'shifted' is ambiguous: it could be data.shifted, objective.shifted. Give the full"
        ):
            config.override(Experiment(), "shifted=0.5")

    @pytest.mark.parametrize(
        ("assignment", "value"),
        [
            ("other.word=moons", "moons"),
            ("other.word='moons'", "moons"),
            ('other.word="two words"', "two words"),
            ("other.word=two words", "two words"),
            ("other.word=data/a=b.csv", "data/a=b.csv"),
            ("other.word=", ""),
            (" other.word = moons ", "moons"),
            ("other.word=C:\\data", "C:\\data"),
            ("other.word=[", "["),
            ("other.word=2020", "2020"),
            ("other.word=true", "true"),
            ("other.word=2024-05-01", "2024-05-01"),
            ("other.word=[1, 2]", "[1, 2]"),
        ],
    )
    def test_a_string_needs_no_quotes(self, assignment, value):
        assert config.override(Settings(), assignment).other.word == value

    @pytest.mark.parametrize(
        ("assignment", "name", "value"),
        [
            ("training.steps=500", "steps", 500),
            ("learning_rate=1e-3", "learning_rate", 1e-3),
            ("clip=2", "clip", 2.0),
            ("betas=[0.8, 0.9]", "betas", (0.8, 0.9)),
            ("steps=1_000", "steps", 1000),
        ],
    )
    def test_numbers_and_lists(self, assignment, name, value):
        assert config.override(Experiment(), assignment) == Experiment(training=replace(Training(), **{name: value}))

    @pytest.mark.parametrize("turn", [1, -1])
    def test_settings_that_allow_each_other_are_taken_together_in_any_order(self, turn):
        words = ["objective.kind=hybrid", "objective.radius=0"][::turn]
        made = with_overrides(PRESETS["digits-certified"], words)
        assert (made.objective.kind, made.objective.radius) == ("hybrid", 0)

    def test_a_rule_that_several_break_names_them_all_and_a_type_names_its_own(self):
        with pytest.raises(ValueError, match=r"^--set steps=5 --set batch=0: batch must be at least 1; got 0.$"):
            config.override(Experiment(), "steps=5", "batch=0")
        with pytest.raises(ValueError, match=r"^--set batch=few: training.batch must be an integer; got 'few'.$"):
            config.override(Experiment(), "steps=5", "batch=few")

    def test_of_two_values_the_last_counts_and_without_any_all_stay(self):
        assert config.override(Experiment(), "steps=5", "steps=7").training.steps == 7
        assert config.override(Experiment()) == Experiment()

    def test_the_full_name_of_a_setting(self):
        assert (
            config.setting_path(Experiment, "steps=5")
            == config.setting_path(Experiment, "training.steps = 5")
            == "training.steps"
        )

    def test_true_and_false(self):
        there = config.override(Settings(), "other.on=true")
        assert there == Settings(other=Inner(on=True))
        assert config.override(there, "other.on=false") == Settings()

    def test_other_settings_are_unchanged(self):
        there = Settings(rate=7.0, middle=Middle(limit=4, sizes=(1,)), other=Inner(word="b"))
        assert config.override(there, "other.count=2") == replace(there, other=Inner(word="b", count=2))

    @pytest.mark.parametrize(
        ("assignment", "sentence"),
        [
            ("steps", "a setting must be given as key=value; got 'steps'. Example: training.steps=500."),
            ("=3", "a setting must be given as key=value; got '=3'. Example: training.steps=500."),
            ("", "a setting must be given as key=value; got ''. Example: training.steps=500."),
            ("stpes=3", "unknown setting 'stpes'. Did you mean 'steps'?"),
            ("training.stpes=3", "unknown setting 'training.stpes'. Did you mean 'training.steps'?"),
            ("optimizer=sgd", "unknown setting 'optimizer'. Did you mean 'optimiser'?"),
            ("steps=many", "--set steps=many: training.steps must be an integer; got 'many'."),
            ("steps=1.5", "--set steps=1.5: training.steps must be an integer; got 1.5."),
            ("steps=0", "--set steps=0: steps must be at least 1; got 0."),
            ("betas=[0.9]", "--set betas=[0.9]: training.betas must be a list of 2 entries, each a number; got [0.9]."),
        ],
    )
    def test_an_invalid_assignment_raises_a_clear_error(self, assignment, sentence):
        with pytest.raises(ValueError, match="setting|--set") as caught:
            config.override(Experiment(), assignment)
        assert str(caught.value) == sentence

    def test_a_table_is_not_a_setting(self):
        with pytest.raises(ValueError, match="unknown setting 'training'. "):
            config.override(Experiment(), "training=3")

    def test_a_name_like_no_other_lists_them_all(self):
        with pytest.raises(ValueError, match="unknown setting 'qqqqqqq'. Use one of count, limit, on, pair, rate, s"):
            config.override(Settings(), "qqqqqqq=1")
        with pytest.raises(ValueError, match="unknown setting 'q.z'. Use one of rate, middle.inner.count, middle.inn"):
            config.override(Settings(), "q.z=1")
