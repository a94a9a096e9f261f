"""Settings have one name, one range and one default in the job file, on the command line and at the client."""

import inspect
import math
import re
from dataclasses import MISSING, Field, fields, replace
from typing import Any, get_args

import click
import pytest
import torch
from torch import nn

from elche import settings
from elche.errors import InvalidJob
from elche.policies import POLICIES
from elche.settings import COMPRESSIONS, KINDS, SETTINGS, Kind
from elche_client.cli.main import cli, main
from elche_client.options import JobOptions
from elche_coordinator.simulator.planned import SENT_FRACTIONS
from elche_worker import TrainingJob
from elche_worker.collectives.codecs import BLOCK, CODECS
from elche_worker.user.job import OUTER_OPTIMIZERS, STRATEGIES

FIELDS: dict[str, Field[Any]] = {one.name: one for one in fields(TrainingJob)}
NO_DEFAULT = {"epochs", "batch_size"}
JOB = TrainingJob(
    model=lambda: nn.Linear(1, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    dataset=lambda: [0],
    train_step=lambda model, batch: model(batch).mean(),
    batch_size=8,
    epochs=1,
)


def default_of(name: str) -> Any:
    one = FIELDS[name]
    return one.default_factory() if one.default_factory is not MISSING else one.default


# One table


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_setting_is_a_field_of_the_job_whose_default_it_allows(name: str) -> None:
    assert SETTINGS[name].name == name
    assert FIELDS[name].kw_only
    default = default_of(name)
    if name in NO_DEFAULT:
        assert default is MISSING
    else:
        SETTINGS[name].check(default)
        assert SETTINGS[name].may_be_none or default is not None
        made = OUTER_OPTIMIZERS["average"]() if name == "outer_optimizer" else default
        assert getattr(JOB, name) == made


def test_what_the_job_adds_is_no_plain_value() -> None:
    """A field of another type may be a setting as well, as far as plain values can say it: a batch size, say."""
    added = {name: one.type for name, one in FIELDS.items() if name not in SETTINGS}
    plain = {name for name, type_ in added.items() if any(one in list(KINDS) for one in (type_, *get_args(type_)))}
    assert plain == {"manual_optimization"}  # it says what kind of function train_step is


def test_every_setting_is_documented_where_it_is_declared() -> None:
    source = inspect.getsource(settings)
    for name in SETTINGS:
        assert re.search(rf'\n    {name}: Annotated\[(?:[^\n]|\n +)+\n?[^\n]*\n    """\S', source), name


@pytest.mark.parametrize(
    ("name", "objects"),
    [("outer_optimizer", OUTER_OPTIMIZERS), ("shard", STRATEGIES)],
    ids=["outer_optimizer", "shard"],
)
def test_a_setting_that_names_an_object_knows_the_names_of_all(name: str, objects: dict[str, Any]) -> None:
    assert set(SETTINGS[name].choices) == set(objects)


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_the_name_of_an_outer_optimizer_is_one(name: str) -> None:
    assert type(replace(JOB, outer_optimizer=name).outer_optimizer) is OUTER_OPTIMIZERS[name]


def test_settings_have_a_help_that_fits_beside_them() -> None:
    for setting in SETTINGS.values():
        assert setting.help.endswith("."), setting.name
        assert len(setting.help) < 120, setting.name
        assert setting.kind in get_args(Kind)


# Values


GOOD = [
    ("epochs", "3", 3),
    ("batch_size", "32", 32),
    ("batch_size", "auto", "auto"),
    ("max_steps", "none", None),
    ("max_steps", "1000", 1000),
    ("drop_last", "true", True),
    ("drop_last", "false", False),
    ("max_grad_norm", "0.5", 0.5),
    ("max_grad_norm", "1", 1),
    ("max_grad_norm", "1e-3", 1e-3),
    ("overhead_target", "-1", -1),
    ("policy", "sync", "sync"),
    ("compress", "none", None),
    ("compress", "int8", "int8"),
    ("compress", "auto", "auto"),
    ("monitor", "val/accuracy", "val/accuracy"),
    ("monitor", "none", None),
    ("checkpoint_dir", "s3://bucket/none", "s3://bucket/none"),
    ("speed_hint", "1=2.3", [1, 2.3]),
    ("speed_hint", "none", None),
    ("seed", str(2**63 - 1), 2**63 - 1),
]


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_a_text_of_the_command_line_becomes_a_value(name: str, text: str, value: Any) -> None:
    parsed = SETTINGS[name].parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


BAD = [
    ("epochs", "0", "epochs must be at least 1, not 0"),
    ("epochs", "-3", "epochs must be at least 1, not -3"),
    ("epochs", "2.5", "epochs must be a whole number, not float (2.5)"),
    ("epochs", "1e3", "epochs must be a whole number, not float (1000.0)"),
    ("epochs", "true", "epochs must be a whole number, not bool (True)"),
    ("epochs", "many", "epochs must be a whole number, not 'many'"),
    ("epochs", "none", "epochs must be a whole number, not 'none'"),
    ("epochs", "", "epochs must be a whole number, not ''"),
    ("epochs", str(2**32), "epochs must be below 100001, not 4294967296"),
    ("epochs", "[3]", "epochs must be a whole number, not list"),
    ("batch_size", "all", "batch_size must be a whole number or auto, not 'all'"),
    ("max_steps", "0", "max_steps must be at least 1, not 0"),
    ("max_steps", "few", "max_steps must be a whole number or None, not 'few'"),
    ("max_grad_norm", "-1", "max_grad_norm must be at least 0, not -1"),
    ("max_grad_norm", "NaN", "max_grad_norm must be a number or None, not float (nan)"),
    ("lr_scale_ratio", "Infinity", "lr_scale_ratio must be a number, not float (inf)"),
    ("policy", "weekly", f"policy must be one of {', '.join(POLICIES)}, not 'weekly'"),
    ("compress", "fp8", "compress must be one of auto, bf16, int8, int4, int2, topk or None, not 'fp8'"),
    ("speed_hint", "1", "speed_hint must be (slowest rank, ratio), such as (1, 2.3) or None, not list"),
    ("speed_hint", "1=fast", "speed_hint must be (slowest rank, ratio), such as (1, 2.3) or None, not '1=fast'"),
    ("speed_hint", "-1=2", "speed_hint must be (slowest rank, ratio)"),
    ("seed", "-1", "seed must be at least 0, not -1"),
]


@pytest.mark.parametrize(("name", "text", "says"), BAD)
def test_a_text_that_means_no_value_is_refused_with_what_is_allowed(name: str, text: str, says: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        SETTINGS[name].parse(text)
    assert says in str(refused.value)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_least_value_is_allowed_and_what_is_below_or_above_is_not(name: str) -> None:
    setting = SETTINGS[name]
    if setting.kind not in ("whole", "number"):
        return
    if math.isfinite(setting.least):
        setting.check(setting.least)
        with pytest.raises(InvalidJob, match=f"^{name} must be at least {setting.least:g}, not"):
            setting.check(setting.least - 1)
    if math.isfinite(setting.below):
        setting.check(setting.below - 1)
        with pytest.raises(InvalidJob, match=f"^{name} must be below {setting.below}, not"):
            setting.check(setting.below)
    if not setting.may_be_none:
        with pytest.raises(InvalidJob, match=f"^{name} must be a .*, not NoneType"):
            setting.check(None)


def test_what_the_metavar_shows_can_be_typed() -> None:
    for setting in SETTINGS.values():
        for word in setting.metavar.split("|"):
            if word not in ("N", "X", "TEXT", "RANK=RATIO"):
                setting.parse(word)


@pytest.mark.parametrize("text", ["True", "False"])
def test_a_flag_takes_the_words_that_its_error_names(text: str) -> None:
    assert SETTINGS["drop_last"].parse(text) is (text == "True")


def test_compressions_are_those_that_ranks_know_and_plans_count_what_they_send() -> None:
    assert tuple(CODECS) == COMPRESSIONS
    sizes = {name: sum(codec().sizes) for name, codec in CODECS.items()}
    for codec in CODECS.values():
        assert tuple(part.shape[2] for part in codec().encode(torch.zeros(1, 1, BLOCK))) == codec().sizes
    assert {None: 1.0} | {name: size / (4 * BLOCK) for name, size in sizes.items()} == SENT_FRACTIONS


@pytest.mark.parametrize("name", ["max_steps", "max_grad_norm", "compress"])
def test_nothing_is_also_none_as_the_error_writes_it(name: str) -> None:
    assert SETTINGS[name].parse("None") is None


@pytest.mark.parametrize("value", [(0, 0.0), (0, -2.0), (True, 2.0)])
def test_a_speed_hint_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(InvalidJob, match="speed_hint"):
        SETTINGS["speed_hint"].check(value)


# In the file, at the client and on the command line


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_what_is_parsed_is_taken_by_job_and_client(name: str, text: str, value: Any) -> None:
    parsed = SETTINGS[name].parse(text)
    assert dict(JobOptions(settings={name: parsed}).settings) == {name: value}
    job = replace(JOB, evaluate=lambda model: {}, **{name: parsed})
    assert getattr(job, name) == value


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("epochs", 0, "epochs must be at least 1, not 0"),
        ("precision", "fp8", "precision must be one of fp32, bf16, fp16, not 'fp8'"),
        ("anchor", 2.0, "anchor must be a whole number or None, not float (2.0)"),
    ],
)
def test_job_and_client_refuse_in_the_same_words(name: str, value: Any, says: str) -> None:
    for refuse in (lambda: replace(JOB, **{name: value}), lambda: JobOptions(settings={name: value})):
        with pytest.raises(InvalidJob) as refused:
            refuse()
        assert says in str(refused.value)


def test_a_setting_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidJob, match="there is no setting 'batchsize'; known are epochs, max_steps, batch_size"):
        JobOptions(settings={"batchsize": 3})


@pytest.mark.parametrize("command", ["run", "submit", "resume", "replay"])
def test_every_setting_has_an_option_with_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for setting in SETTINGS.values():
        assert re.search(rf"(?<!\S)--{setting.name.replace('_', '-')} \S", text), setting.name
        assert " ".join(setting.help.split()) in text, setting.name


def test_an_option_and_the_setting_that_it_replaces_have_the_same_name() -> None:
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    flags = [flag for option in command.params if isinstance(option, click.Option) for flag in option.opts]
    assert len(flags) == len(set(flags))
    assert {f"--{name.replace('_', '-')}" for name in SETTINGS} <= set(flags)


def test_a_wrong_value_on_the_command_line_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "train.py", "--patience", "never"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "elche: patience must be a whole number or None, not 'never'\n"
