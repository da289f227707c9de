"""Every way a request can be refused or fail. The type says who is to blame.

    RequestFailed
    ├── BadRequest            the client's request cannot work (names the parameter)
    │   ├── PromptTooLong
    │   ├── BodyTooLarge
    │   ├── BodyTooSlow
    │   ├── HeadTooLarge
    │   └── MethodNotAllowed
    ├── NotFound              no such route or request
    │   └── ModelNotFound
    ├── Unauthenticated
    ├── Overloaded            try again after ``retry_after_s``
    │   └── RateLimited       this key has used up its share
    ├── Unavailable           no worker can take it now
    │   └── NoCapacity
    ├── Aborted               somebody asked for the end of this request
    └── Internal              our fault

Each class carries what an edge needs: HTTP status, OpenAI type and code, gRPC status name.
"""

from typing import ClassVar


class RequestFailed(Exception):
    """The message is shown to the client: no prompt text, no traceback."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    grpc: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(RequestFailed):
    """The request cannot work as it is, today or tomorrow."""

    status = 400
    type = "invalid_request_error"
    grpc = "INVALID_ARGUMENT"


class PromptTooLong(BadRequest):
    """It fits neither the context nor an empty pool."""

    code = "context_length_exceeded"


class BodyTooLarge(BadRequest):
    """More bytes than the server reads."""

    status = 413
    code = "request_too_large"
    grpc = "RESOURCE_EXHAUSTED"


class BodyTooSlow(BadRequest):
    """The client stopped sending half way."""

    status = 408
    code = "request_timeout"
    grpc = "DEADLINE_EXCEEDED"


class HeadTooLarge(BadRequest):
    """More headers than the server reads."""

    status = 431
    code = "headers_too_large"
    grpc = "RESOURCE_EXHAUSTED"


class MethodNotAllowed(BadRequest):
    """The route exists, the verb does not."""

    status = 405
    code = "method_not_allowed"
    grpc = "UNIMPLEMENTED"


class NotFound(RequestFailed):
    """No such route, request or model."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"
    grpc = "NOT_FOUND"


class ModelNotFound(NotFound):
    """Another model is served here."""

    code = "model_not_found"


class Unauthenticated(RequestFailed):
    """The key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    grpc = "UNAUTHENTICATED"


class Forbidden(RequestFailed):
    """The key is known and does not allow this."""

    status = 403
    type = "invalid_request_error"
    code = "not_allowed"
    grpc = "PERMISSION_DENIED"


class Overloaded(RequestFailed):
    """Refused before any work was done."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    grpc = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The key's own limit; others are served."""

    code = "rate_limit_exceeded"


class Unavailable(RequestFailed):
    """Nobody can take the request now; nothing is wrong with it."""

    status = 503
    code = "unavailable"
    grpc = "UNAVAILABLE"


class NoCapacity(Unavailable):
    """No attached worker can serve it in the mode it asked for."""


class Aborted(RequestFailed):
    """Ended by Abort, or by a client that left."""

    status = 499
    code = "aborted"
    grpc = "CANCELLED"


class Internal(RequestFailed):
    """Ours. The log has the cause, the client has the request id."""

    code = "internal_error"
