"""Where the token comes from, and what is said when there is none in it."""

from pathlib import Path

import pytest

from elche.errors import NotAllowed
from elche.network import split_host
from elche.token import MAX_CHARACTERS, bearer, is_bearer, read_token


def test_no_token_without_both_variables() -> None:
    assert read_token({}) == ""
    assert read_token({"ELCHE_TOKEN": " ", "ELCHE_TOKEN_FILE": ""}) == ""


def test_the_first_line_of_the_file_is_the_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("  a secret of some length \nanything\n")
    path.chmod(0o440)
    assert read_token({"ELCHE_TOKEN_FILE": str(path)}) == "a secret of some length"
    assert read_token({"ELCHE_TOKEN_FILE": str(path), "ELCHE_TOKEN": "another that is mine"}) == "another that is mine"


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o620, 0o604])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("a secret of some length\n")
    path.chmod(mode)
    with pytest.raises(NotAllowed, match=f"has mode {mode:04o}, so others can access it: chmod 600 "):
        read_token({"ELCHE_TOKEN_FILE": str(path)})


@pytest.mark.parametrize("content", [b"", b"\n\n", b"a" * 5000, "tökén\n".encode(), b"a\tb\n", b"\xff\xfe\n"])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(NotAllowed, match="ELCHE_TOKEN_FILE") as caught:
        read_token({"ELCHE_TOKEN_FILE": str(path)})
    assert str(path) in str(caught.value)


def test_a_token_that_no_call_could_present_is_refused() -> None:
    assert read_token({"ELCHE_TOKEN": "a" * MAX_CHARACTERS})
    with pytest.raises(NotAllowed, match="ELCHE_TOKEN: the token has 2049 characters; at most 2048 are taken"):
        read_token({"ELCHE_TOKEN": "a" * (MAX_CHARACTERS + 1)})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotAllowed, match=r"cannot be read: No such file"):
        read_token({"ELCHE_TOKEN_FILE": str(tmp_path / "none")})


def test_only_the_whole_token_is_it() -> None:
    assert is_bearer(bearer("abc"), "abc")
    for given in ("", "abc", "Bearer ab", "Bearer abcd", "bearer abc", "Bearer ä"):
        assert not is_bearer(given, "abc")


@pytest.mark.parametrize(
    ("header", "host"), [("a", "a"), ("a:1", "a"), ("[::1]:7", "::1"), ("127.0.0.1:80", "127.0.0.1"), ("", "")]
)
def test_the_host_of_a_header(header: str, host: str) -> None:
    assert split_host(header) == host
