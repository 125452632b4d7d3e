"""What obstore does not say to Azure: blocks by name, and which of them are there.

Only as much of the protocol as uploads need, and only with an account's key or a SAS token. Azure checks no CRC-32C:
what comes there is vouched for by TLS, and looked at by whoever reads.
"""

from __future__ import annotations

import base64
import binascii
from email.utils import formatdate
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from zerostall.core import shared_key, signing
from zerostall.core.shared_key import Account
from zerostall.errors import StorageError
from zerostall.tiers import urls
from zerostall.tiers.connections import Answer, Connections, all_named, proxy_between, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerostall.tiers.store import Store


def why_not(store: Store) -> str:
    """In words, why uploads to this store are left to obstore; empty where they need not be."""
    said = urls.chosen(store.environment, urls.AZURE)
    if said.get("use_emulator", "").lower() not in ("", "0", "false"):
        return "an emulator that obstore finds"
    others = [name for name in ("token", "client_id", "federated_token_file") if said.get(name)]
    if said.get("token") or not (shared_key.usable(_account(store)) or (_sas(store) and not others)):
        return "the credentials are no account's key and no SAS token"
    return proxy_between(_endpoint(store))


class Azure:
    """One container. Any thread.

    Raises:
        StorageError: the store refused, or could not be reached; the message says what it said.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._endpoint = urlsplit(_endpoint(store))
        self._connections = Connections(self._endpoint, store.timeout)

    def blocks(self, key: str) -> dict[str, int]:
        """The bytes of each block of a blob that is not there yet, by name."""
        answer = self._ask("GET", key, {"comp": "blocklist", "blocklisttype": "uncommitted"}, missing_is_fine=True)
        if answer.status == 404:
            return {}
        lists = all_named(answer.tree(), "UncommittedBlocks")
        return {
            _named(text_of(one, "Name")): int(text_of(one, "Size"))
            for every in lists
            for one in all_named(every, "Block")
        }

    def put_block(self, key: str, name: str, data: memoryview) -> None:
        """Send a block. One of that name is replaced."""
        self._ask("PUT", key, {"comp": "block", "blockid": _encoded(name)}, body=data)

    def commit(self, key: str, names: Sequence[str]) -> None:
        """Make the blob of these blocks: it is there, or (StorageError) it is not."""
        listed = "".join(f"<Uncommitted>{_encoded(name)}</Uncommitted>" for name in names)
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode()
        self._ask("PUT", key, {"comp": "blocklist"}, body=memoryview(body))

    def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        *,
        body: memoryview | None = None,
        missing_is_fine: bool = False,
    ) -> Answer:
        path = signing.path_of(self._endpoint.path.strip("/"), self._store.bucket, key)
        headers = {"content-length": str(len(body) if body is not None else 0)}

        def signed() -> tuple[str, dict[str, str]]:
            account = _account(self._store)
            if not shared_key.usable(account):  # the token signs for whatever is asked
                words = signing.query_of({**query, **_sas(self._store)})
                return f"{path}?{words}", headers | {"x-ms-version": shared_key.VERSION}
            date = formatdate(usegmt=True)
            sent = shared_key.sign(method, path, query, headers, account=account, date=date)
            return f"{path}?{signing.query_of(query)}", sent

        what = f"cannot {method} {self._store.scheme}://{self._store.bucket}/{key}"
        return self._connections.ask(what, method, signed, body, missing_is_fine=missing_is_fine)

    def close(self) -> None:
        """Close the connections that no request uses."""
        self._connections.close()


def _account(store: Store) -> Account:
    said = urls.chosen(store.environment, urls.AZURE)
    return Account(said.get("account_name", ""), said.get("account_key", ""))


def _sas(store: Store) -> dict[str, str]:
    """What a SAS token says; empty where there is none, or it is no such thing."""
    said = dict(parse_qsl(urls.chosen(store.environment, urls.AZURE).get("sas_key", "").lstrip("?")))
    return said if said.get("sig") else {}


def _endpoint(store: Store) -> str:
    said = urls.chosen(store.environment, urls.AZURE)
    return said.get("endpoint", "").rstrip("/") or f"https://{said.get('account_name', '')}.blob.core.windows.net"


def _encoded(name: str) -> str:
    return base64.b64encode(name.encode()).decode()


def _named(block: str) -> str:
    """The name of a block, which may be another writer's."""
    try:
        return base64.b64decode(block, validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        raise StorageError("the store told of a block without a name") from None
