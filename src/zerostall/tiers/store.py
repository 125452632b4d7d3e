"""Objects below one URL, through obstore: small ones whole and on conditions, ranges of large ones, listings.

Everything here is synchronous and may be called from any thread. What the store refuses becomes `StorageError`; of its
answer only the code and the sentence are told, for some stores send back what a request was signed with.
"""

from __future__ import annotations

import contextlib
import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.errors import CapabilityError, StorageError
from zerostall.tiers import urls
from zerostall.tiers.credentials import keys_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import datetime

    from obstore.store import ObjectStore

    from zerostall.core.signing import Keys

_MOST_SMALL = 1 << 30
_MOST_RETRIES = 4

_HINTS = {
    "RequestTimeTooSkewed": "this machine's clock is wrong: stores refuse requests that seem 15 minutes old",
    "ExpiredToken": "the credentials have expired: renew them; the next try reads them again",
    "TokenRefreshRequired": "the credentials have expired: renew them; the next try reads them again",
    "InvalidAccessKeyId": "the store does not know these credentials; see AWS_ACCESS_KEY_ID and ~/.aws/credentials",
    "SignatureDoesNotMatch": "the secret key does not fit the access key",
    "AccessDenied": "the credentials lack the right to read, write, list or delete below this URL",
    "NoSuchBucket": "create the bucket first",
    "SlowDown": "the store asks for fewer requests; the next try comes later",
    "QuotaExceeded": "the store is full: keep fewer steps",
}


_NO_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile of ~/.aws/credentials in AWS_PROFILE",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to an account's file, or run `gcloud auth application-default login`",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_UNORDERED = "AWS_S3_EXPRESS"  # its listings are in no order, and cannot begin at a name
_OF_THE_MACHINE = re.compile(r"https?://(169\.254\.169\.254|169\.254\.170\.2|metadata\.google\.internal)\b")


@dataclass(frozen=True, slots=True)
class Version:
    """Which version of an object was read, for a change on the condition that it is still the one there."""

    e_tag: str | None
    version: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """A small object."""

    data: bytes
    version: Version


@dataclass(frozen=True, slots=True)
class Listed:
    """What a listing tells of an object."""

    nbytes: int
    modified: float


class Store:
    """The objects whose names begin with a URL.

    Args:
        url: such as `s3://bucket/runs/gpt`.
        environment: where credentials, region and endpoint are looked for, by their usual names (AWS_…, GOOGLE_…,
            AZURE_…); never told to anybody but the store.
        timeout: seconds that a connection may be silent.

    Raises:
        CapabilityError: obstore is not installed, or no such kind of URL is known.
        ValueError: the URL or a setting makes no sense.
    """

    def __init__(self, url: str, environment: Mapping[str, str], *, timeout: float = 30.0) -> None:
        self.scheme, self.bucket, self.prefix = urls.split(url)
        self.url = f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        self.environment = dict(environment)
        self.timeout = timeout
        self.endpoint = urls.endpoint(self.environment) if self.scheme in urls.S3_SCHEMES else None
        self.region = urls.region(self.environment) if self.scheme in urls.S3_SCHEMES else ""
        self._objects = self._opened()

    def keys(self) -> Keys | None:
        """What S3 requests are signed with, read anew; None where obstore finds that for itself."""
        return keys_of(self.environment) if self.scheme in urls.S3_SCHEMES else None

    def key(self, name: str) -> str:
        """An object's whole name in its bucket."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def address(self, name: str) -> str:
        """What messages call an object."""
        return f"{self.url}/{name}"

    # ------------------------------------------------------------------------------------------- small objects

    def read(self, name: str) -> Found:
        """A small object, whole.

        Raises:
            FileNotFoundError: there is none.
        """
        with self.errors("read", name):
            got = self._objects.get(name)
            if got.meta["size"] > _MOST_SMALL:
                raise StorageError(f"{self.address(name)} has {got.meta['size']} bytes: none of ours is that large")
            return Found(bytes(got.bytes()), Version(got.meta["e_tag"], got.meta["version"]))

    def create(self, name: str, data: bytes) -> bool:
        """Store an object if there is none of that name; False where there is one."""
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        with self.errors("write", name):
            try:
                self._objects.put(name, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            except NotSupportedError as error:
                raise self._unconditional(name) from error
        return True

    def replace(self, name: str, data: bytes, version: Version) -> bool:
        """Store an object in place of the very version that was read; False where that is no longer the one there."""
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        known = {k: v for k, v in (("e_tag", version.e_tag), ("version", version.version)) if v is not None}
        with self.errors("write", name):
            try:
                self._objects.put(name, data, mode=known, use_multipart=False)  # pyright: ignore[reportArgumentType]
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return False
            except NotSupportedError as error:
                raise self._unconditional(name) from error
        return True

    def put(self, name: str, data: bytes) -> None:
        """Store an object, whatever was there."""
        with self.errors("write", name):
            self._objects.put(name, data, use_multipart=False)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; those that are not there are no error."""
        listed = list(names)
        if listed:
            with self.errors("delete", listed[0]), contextlib.suppress(FileNotFoundError):
                self._objects.delete(listed)

    def size(self, name: str) -> int | None:
        """An object's bytes; None where there is no such object."""
        try:
            with self.errors("look at", name):
                return self._objects.head(name)["size"]
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------------------------------------- large objects

    def read_range(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` with an object's bytes from `offset` on.

        Raises:
            FileNotFoundError: there is no such object.
            StorageError: it ends before that.
        """
        with self.errors("read", name):
            data = memoryview(self._objects.get_range(name, start=offset, length=len(view)))
            if len(data) != len(view):
                raise StorageError(f"{self.address(name)} ends {len(view) - len(data)} bytes too early")
            view[:] = data

    def upload(self, name: str, pieces: Iterator[bytes], *, piece_bytes: int, at_once: int) -> None:
        """Store a large object from its pieces. It is there whole or not at all.

        Whatever goes wrong, `pieces` itself included, what was sent is thrown away before this returns.
        """
        with self.errors("write", name):
            self._objects.put(name, pieces, use_multipart=True, chunk_size=piece_bytes, max_concurrency=at_once)

    # ------------------------------------------------------------------------------------------------ listings

    def folders(self, below: str = "") -> list[str]:
        """The names right below `below` that have objects below themselves: a request for each thousand."""
        with self.errors("list", below):
            prefixes = self._objects.list_with_delimiter(below or None)["common_prefixes"]
        return [prefix.rsplit("/", 1)[-1] for prefix in prefixes]

    def beginning(self, text: str) -> list[str]:
        """The names of all objects that begin with `text`: a request for each thousand of what follows it.

        Unlike `folders` it does not tell of folders without objects, which some stores keep.
        """
        if _UNORDERED in self.environment:
            folders = [folder for folder in self.folders() if folder.startswith(text)]
            return [f"{folder}/{name}" for folder in folders for name in self.objects(folder)]
        with self.errors("list", text):
            found = [one["path"] for batch in self._objects.list(offset=text) for one in batch]
        return [name for name in found if name.startswith(text)]

    def objects(self, below: str) -> dict[str, Listed]:
        """Every object below `below`, by its name after that."""
        found: dict[str, Listed] = {}
        with self.errors("list", below):
            for batch in self._objects.list(below):
                for one in batch:
                    found[one["path"].removeprefix(f"{below}/")] = Listed(one["size"], _seconds(one["last_modified"]))
        return found

    # ------------------------------------------------------------------------------------------------ internals

    @contextlib.contextmanager
    def errors(self, doing: str, name: str) -> Iterator[None]:
        """Turn what obstore raises into `StorageError`, and into FileNotFoundError where an object is missing."""
        from obstore.exceptions import BaseError

        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError as error:
            code, sentence = told(str(error))
            if code == "NoSuchBucket":
                raise refusal(f"cannot {doing} {self.address(name)}", code, sentence, errno.ENOENT) from None
            raise FileNotFoundError(errno.ENOENT, "no such object", self.address(name)) from None
        except (BaseError, OSError) as error:
            code, sentence = told(str(error))
            what = f"cannot {doing} {self.address(name)}"
            if _OF_THE_MACHINE.search(str(error)):  # the last place where credentials are looked for
                raise StorageError(
                    f"{what}: no credentials were found, and this machine itself has none to give ({sentence or code})",
                    errno=errno.EACCES,
                    hint=_NO_CREDENTIALS.get(self.scheme, _NO_CREDENTIALS["s3"]),
                ) from None
            raise refusal(what, code, sentence, _errno(error)) from None

    def _unconditional(self, name: str) -> CapabilityError:
        return CapabilityError(
            f"{self.address(name)}: this store does not write on conditions (If-None-Match), so two writers could both "
            "believe that theirs is the step",
            hint="use a store that does: S3, MinIO, R2, Google Cloud Storage and Azure do",
        )

    def _opened(self) -> ObjectStore:
        try:
            from obstore import store as kinds
        except ImportError:
            raise CapabilityError(
                f"{self.url}: object stores need obstore, which is not there",
                hint="pip install 'zerostall[remote]'",
            ) from None
        from datetime import timedelta

        from obstore.exceptions import BaseError

        endpoint = self.endpoint or ""
        if self.scheme == "gs":
            endpoint = urls.google(self.environment).get("base_url", "")
        elif self.scheme not in urls.S3_SCHEMES:
            endpoint = self.environment.get("AZURE_STORAGE_ENDPOINT", "")
        client = {
            "timeout": f"{int(self.timeout * 4)}s",
            "read_timeout": f"{int(self.timeout * 1000)}ms",
            "connect_timeout": f"{int(min(self.timeout, 5.0) * 1000)}ms",
            "allow_http": endpoint.startswith("http://"),
        }
        retry = {"max_retries": _MOST_RETRIES, "retry_timeout": timedelta(seconds=self.timeout * 4)}
        common: dict[str, object] = {"client_options": client, "retry_config": retry}
        try:
            if self.scheme in urls.S3_SCHEMES:
                config = urls.chosen(self.environment, urls.S3) | {"region": self.region}
                if self.endpoint:
                    config["endpoint"] = self.endpoint
                if self.keys() is not None and "skip_signature" not in config:
                    common["credential_provider"] = _provider(self.keys)
                return kinds.S3Store(self.bucket, prefix=self.prefix or None, config=config, **common)  # pyright: ignore
            if self.scheme == "gs":
                config = urls.google(self.environment)
                return kinds.GCSStore(self.bucket, prefix=self.prefix or None, config=config, **common)  # pyright: ignore
            config = urls.chosen(self.environment, urls.AZURE)
            return kinds.from_url(self.url, config=config, **common)  # pyright: ignore
        except (BaseError, ValueError, TypeError) as error:
            code, sentence = told(str(error))
            raise ValueError(f"{self.url} cannot be opened: {sentence or code}") from None


def _provider(keys: Callable[[], Keys | None]) -> Callable[[], dict[str, object]]:
    """What obstore asks for credentials; a few minutes later it asks again, for they may have been renewed."""
    from datetime import UTC, datetime, timedelta

    def provide() -> dict[str, object]:
        found = keys()
        if found is None:
            raise StorageError("the credentials that were there are gone")
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=6),
        }

    return provide


# --------------------------------------------------------------------------------------------------------- errors


def told(text: str) -> tuple[str, str]:
    """The code and the sentence of a store's answer, and nothing else of it."""
    code = re.search(r"<Code>([A-Za-z0-9._-]{1,64})</Code>", text)
    sentence = re.search(r"<Message>([^<]{1,300})</Message>", text)
    if code or sentence:
        return (code[1] if code else ""), (sentence[1].strip() if sentence else "")
    first = text.split("\n", 1)[0].split("<", 1)[0]
    first = re.sub(r"https?://\S+", lambda match: match[0].split("?")[0], first)
    status = re.search(r"status code: (\d{3} [A-Za-z ]+)", first)
    return (status[1].strip() if status else ""), first.strip(" :")[:300]


def refusal(what: str, code: str, sentence: str, number: int | None) -> StorageError:
    """The error that says what a store refused, why, and what to do."""
    why = ": ".join(part for part in (code, sentence) if part) or "no reason was given"
    if code in ("QuotaExceeded", "InsufficientStorage"):
        number = errno.EDQUOT
    elif code in ("AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
        number = errno.EACCES
    return StorageError(f"{what}: {why}", errno=number, hint=_HINTS.get(code, ""))


def _errno(error: Exception) -> int | None:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return errno.EACCES
    if isinstance(error, OSError):
        return error.errno
    return errno.EIO


def _seconds(moment: datetime) -> float:
    return moment.timestamp()
