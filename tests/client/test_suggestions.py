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


def test_what_has_several_meanings_gets_all() -> None:
    known = ["--checkpoint-dir", "--checkpoint-every-epochs", "--slow"]
    assert similar("--checkpoint", known) == known[:2]
