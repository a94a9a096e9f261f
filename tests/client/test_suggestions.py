"""What is offered in place of a name that there is not: what was meant, or nothing."""

import pytest

from elche_client.cli.main import main
from elche_client.display.suggestions import similar


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--batchsize", "--batch-size"),
        ("--batch_size", "--batch-size"),
        ("--epoch", "--epochs"),
        ("--rank", "--ranks"),
        ("--devices", "--device"),
        ("--output", "--out"),
        ("--polcy", "--policy"),
        ("--ancor", "--anchor"),
    ],
)
def test_a_typo_gets_the_one_option_that_was_meant(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "train.py", typed, "3"]) == 2
    assert capsys.readouterr().err == f"elche: there is no option {typed}: did you mean {meant}?\n"


@pytest.mark.parametrize("typed", ["--lr", "--bs", "--gpus", "--learning-rate"])
def test_what_is_like_nothing_gets_no_guess(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "train.py", typed, "3"]) == 2
    error = capsys.readouterr().err
    assert "did you mean" not in error
    assert "arguments for the file come after --" in error


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["rnu", "train.py"], "there is no command 'rnu': did you mean run?"),
        (["Jobs"], "there is no command 'Jobs': did you mean jobs?"),
        (["token", "mak"], "there is no command 'mak': did you mean make?"),
        (["train", "train.py"], "there is no command 'train'; see `elche --help`"),  # and not drain
        (["show", "train"], "there is no command 'show'; see `elche --help`"),
    ],
)
def test_an_unknown_command_has_a_way_out(typed: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed) == 2
    assert capsys.readouterr().err == f"elche: {hint}\n"


@pytest.mark.parametrize(
    ("typed", "way_out"),
    [
        (["run", "train.py", "more"], "(more); see `elche run --help`; arguments for the file come after --"),
        (["jobs", "more"], "(more); see `elche jobs --help`"),
        (["scale", "JOB", "--ranks", "1..3"], "see `elche scale --help`"),
    ],
)
def test_a_wrong_usage_says_where_the_right_one_stands(
    typed: list[str], way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    assert capsys.readouterr().err.endswith(f"{way_out}\n")


def test_what_has_several_meanings_gets_all() -> None:
    known = ["--checkpoint-dir", "--checkpoint-every-epochs", "--slow"]
    assert similar("--checkpoint", known) == known[:2]
