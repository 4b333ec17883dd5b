# Generated from notebooks/25_watching.ipynb by `helios export`; edit the notebook.
"""API keys: who may ask, and which tenant of the prefix cache they are."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from helios.serve.errors import APIError, respond

__all__ = ["KeyGuard", "Keys", "read_keys", "unauthorized"]


class Keys:
    """The accepted keys, as SHA-256 digests; the keys themselves are not kept. Numbered from 1 in the order given."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in dict.fromkeys(keys)]

    def __len__(self) -> int:
        return len(self._digests)

    def match(self, authorization: str) -> int | None:
        """The number of the key in an `authorization` header, None if there is none that counts. Constant time."""
        scheme, _, key = authorization.partition(" ")
        given, found = hashlib.sha256(key.strip().encode("latin-1")).digest(), None
        for number, digest in enumerate(self._digests, start=1):
            if secrets.compare_digest(digest, given):
                found = number
        return found if scheme.lower() == "bearer" else None

    def tenant(self, number: int) -> bytes:
        """The salt of a key's share of the prefix cache: derived from its digest, and not the digest itself."""
        return hashlib.sha256(b"helios tenant\0" + self._digests[number - 1]).digest()


def read_keys(given: Iterable[str], file: Path | None = None) -> list[str]:
    """The keys given, and those of a file: one a line, `#` begins a comment. Raises ValueError with what to do."""
    keys = [key.strip() for key in given]
    if file is not None:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ValueError(
                f"the file with API keys cannot be read ({reason}): give a text file, one key a line"
            ) from None
        found = [line.partition("#")[0].strip() for line in lines]
        if not any(found):
            raise ValueError("the file with API keys holds none: write one a line, or leave --api-key-file away")
        keys += filter(None, found)
    if bad := [number for number, key in enumerate(keys, start=1) if not key or any(char.isspace() for char in key)]:
        raise ValueError(f"API key {bad[0]} is empty or has a space in it: a key is one word")
    return keys


class KeyGuard:
    """Lets through what has a key. Without one: only `public` paths, and OPTIONS, which asks for nothing.

    Sets `scope["helios.tenant"]` (32 bytes) and notes the key's number. With no keys at all everything passes.
    """

    def __init__(self, app: ASGIApp, keys: Keys, public: frozenset[str]) -> None:
        self.app, self._keys, self._public = app, keys, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http" or not self._keys or scope["method"] == "OPTIONS" or scope["path"] in self._public:
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("authorization", "")
        number = self._keys.match(given)
        if number is None:
            return await respond(unauthorized(given))(scope, receive, send)
        scope.get("helios.note", {})["key"] = number
        await self.app({**scope, "helios.tenant": self._keys.tenant(number)}, receive, send)


def unauthorized(given: str) -> APIError:
    """The 401: what to send, and never what was sent."""
    wrong = "This API key is not known here." if given else "This server wants an API key."
    message = f"{wrong} Send it as `authorization: Bearer KEY`."
    headers = {"www-authenticate": "Bearer"}
    return APIError(401, message, "authentication_error", "invalid_api_key", headers=headers)
