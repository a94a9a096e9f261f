"""Tokens by themselves: which names they may have, and what who has none is told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from elche.errors import InvalidJob, NotAllowed
from elche.network import MAX_MESSAGE_BYTES
from elche.token import Role, bearer
from elche.v1 import access_pb2
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.access.tokens import MAX_NAME_BYTES, MAX_TOKENS, IssuedTokens
from elche_coordinator.services.access_service import AccessServicer
from elche_coordinator.storage.sql.store import SqlStore


def test_as_many_tokens_as_there_may_be_fit_the_message_that_lists_them(tmp_path: Path) -> None:
    """10,000 with names of 64 letters of four bytes did not: none could be listed any more, nor found to be revoked."""
    tokens, longest = IssuedTokens(SqlStore.in_file(tmp_path / "db.sqlite")), "\U00020000" * (MAX_NAME_BYTES // 4)
    with pytest.raises(InvalidJob, match="is too long for a token: it has 129 bytes, of at most 128"):
        tokens.make(longest + "x", Role.VIEWER, expires_s=1e9, made_by="")
    tokens.make(longest, Role.VIEWER, expires_s=1e9, made_by="x" + 1000 * longest)  # as of a certificate
    assert tokens.all()[0].made_by == "x" + longest[:-1]
    nothing: Any = None
    servicer = AccessServicer(Credentials("correct horse battery", tokens), tokens)
    listed = asyncio.run(servicer.ListTokens(access_pb2.ListTokensRequest(), nothing))
    assert listed.ByteSize() * MAX_TOKENS < MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("header", "reason"),
    [("", "no token was given: set ELCHE_TOKEN"), (bearer("another"), "the token is wrong, expired or revoked: set")],
)
def test_who_gave_no_token_is_not_told_that_it_is_wrong(tmp_path: Path, header: str, reason: str) -> None:
    tokens = IssuedTokens(SqlStore.in_file(tmp_path / "db.sqlite"))
    with pytest.raises(NotAllowed, match=f"^{reason}"):
        Credentials("correct horse battery", tokens).find(header)
