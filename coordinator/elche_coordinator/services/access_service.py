"""The gRPC service of tokens."""

from elche.errors import InvalidJob
from elche.mapping import to_message
from elche.token import Role
from elche.v1 import access_pb2, access_pb2_grpc
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.access.tokens import IssuedTokens
from elche_coordinator.limits.releasing import Context
from elche_coordinator.roles import CALLER, TokenRecord

ROLES = {
    access_pb2.ROLE_VIEWER: Role.VIEWER,
    access_pb2.ROLE_USER: Role.USER,
    access_pb2.ROLE_OPERATOR: Role.OPERATOR,
    access_pb2.ROLE_AGENT: Role.AGENT,
}
MESSAGES = {role: message for message, role in ROLES.items()}


class AccessServicer(access_pb2_grpc.AccessServiceServicer):
    """Makes, lists and revokes tokens."""

    def __init__(self, credentials: Credentials, tokens: IssuedTokens) -> None:
        self._credentials = credentials
        self._tokens = tokens

    async def MakeToken(self, request: access_pb2.MakeTokenRequest, context: Context) -> access_pb2.MakeTokenResponse:
        if not self._credentials.are_needed:
            raise InvalidJob(
                "this coordinator asks nobody for a token: start it with one of its own (ELCHE_TOKEN or "
                "ELCHE_TOKEN_FILE), then make others"
            )
        if request.role not in ROLES:
            raise InvalidJob(f"a token needs one of the roles {', '.join(Role)}")
        if request.expires_s < 0:
            raise InvalidJob("a token cannot have expired before it is made")
        token, text = self._tokens.make(
            request.name, ROLES[request.role], expires_s=request.expires_s, made_by=CALLER.get().name
        )
        return access_pb2.MakeTokenResponse(token=_message(token), text=text)

    async def ListTokens(
        self, request: access_pb2.ListTokensRequest, context: Context
    ) -> access_pb2.ListTokensResponse:
        tokens = [_message(one) for one in self._tokens.all()]
        return access_pb2.ListTokensResponse(tokens=tokens)

    async def RevokeToken(
        self, request: access_pb2.RevokeTokenRequest, context: Context
    ) -> access_pb2.RevokeTokenResponse:
        token = self._tokens.revoke(request.id)
        return access_pb2.RevokeTokenResponse(token=_message(token))


def _message(token: TokenRecord) -> access_pb2.Token:
    return to_message(token, access_pb2.Token, role=MESSAGES[token.role])
