"""URLs of object stores, and what the environment says of them by its usual names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zerostall.errors import CapabilityError
from zerostall.tiers.credentials import profile_region

if TYPE_CHECKING:
    from collections.abc import Mapping

S3_SCHEMES = ("s3", "s3a")
AZURE_SCHEMES = ("az", "azure", "abfs", "abfss")
SCHEMES = (*S3_SCHEMES, "gs", *AZURE_SCHEMES)

S3 = {
    name: name.lower()
    for name in (
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_ROLE_ARN",
        "AWS_ROLE_SESSION_NAME",
        "AWS_IMDSV1_FALLBACK",
        "AWS_METADATA_ENDPOINT",
    )
} | {
    "AWS_S3_EXPRESS": "s3_express",
    "AWS_REQUEST_PAYER": "request_payer",
    "AWS_SKIP_SIGNATURE": "skip_signature",
    "AWS_UNSIGNED_PAYLOAD": "unsigned_payload",
    "AWS_SERVER_SIDE_ENCRYPTION": "server_side_encryption",
    "AWS_SSE_KMS_KEY_ID": "sse_kms_key_id",
    "AWS_SSE_BUCKET_KEY_ENABLED": "sse_bucket_key_enabled",
    "AWS_SSE_CUSTOMER_KEY_BASE64": "sse_customer_key_base64",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "virtual_hosted_style_request",
}
GOOGLE = {
    "GOOGLE_SERVICE_ACCOUNT": "service_account",
    "GOOGLE_SERVICE_ACCOUNT_PATH": "service_account",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "service_account_key",
    "GOOGLE_APPLICATION_CREDENTIALS": "application_credentials",
    "GOOGLE_SKIP_SIGNATURE": "skip_signature",
}
AZURE = {
    "AZURE_STORAGE_ACCOUNT_NAME": "account_name",
    "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
    "AZURE_STORAGE_ACCESS_KEY": "account_key",
    "AZURE_STORAGE_CLIENT_ID": "client_id",
    "AZURE_CLIENT_ID": "client_id",
    "AZURE_STORAGE_CLIENT_SECRET": "client_secret",
    "AZURE_CLIENT_SECRET": "client_secret",
    "AZURE_STORAGE_TENANT_ID": "tenant_id",
    "AZURE_TENANT_ID": "tenant_id",
    "AZURE_STORAGE_SAS_KEY": "sas_key",
    "AZURE_STORAGE_SAS_TOKEN": "sas_key",
    "AZURE_STORAGE_TOKEN": "token",
    "AZURE_STORAGE_USE_EMULATOR": "use_emulator",
    "AZURE_STORAGE_ENDPOINT": "endpoint",
    "AZURE_FEDERATED_TOKEN_FILE": "federated_token_file",
    "AZURE_USE_AZURE_CLI": "use_azure_cli",
}
EMULATOR = "STORAGE_EMULATOR_HOST"
"""Where Google's own clients find what stands in for its store; it asks for no credentials."""


def split(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and what stands before every object's name.

    Raises:
        CapabilityError: another scheme.
        ValueError: there is no bucket, or the rest could not be part of an object's name.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"{one}://" for one in ("s3", "gs", "az"))
        raise CapabilityError(f"{url.split('?')[0]}: no such kind of store is known; there are {known}")
    bucket, _, prefix = rest.strip("/").partition("/")
    if not bucket or "@" in bucket:
        raise ValueError(f"{scheme}://…: a URL names a bucket, and no credentials: they come from the environment")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise ValueError(f"{url}: every part of it needs a name of its own")
    return scheme, bucket, prefix


def is_url(where: str) -> bool:
    """Whether it names an object store, not a folder.

    Raises:
        ValueError: it looks like a store's URL and is none.
    """
    scheme, colon, rest = where.partition(":")
    if colon and scheme in SCHEMES and not rest.startswith("//"):
        raise ValueError(f"{where!r} is no URL: {scheme}://bucket/run; and a folder of that name is './{where}'")
    return re.match(r"[a-z][a-z0-9+.-]*://", where) is not None


def chosen(environment: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """What an environment says of these settings, as obstore calls them."""
    return {key: environment[name] for name, key in settings.items() if environment.get(name)}


def google(environment: Mapping[str, str]) -> dict[str, str]:
    """What an environment says of Google's store, as obstore calls it."""
    stand_in = environment.get(EMULATOR, "").rstrip("/")
    if not stand_in:
        return chosen(environment, GOOGLE)
    base_url = stand_in if "://" in stand_in else f"http://{stand_in}"
    return {"base_url": base_url, "bearer_token": "none"}  # without one, it asks the machine for one to write with


def endpoint(environment: Mapping[str, str]) -> str | None:
    """Where S3 is, if it is not Amazon's."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    found = next((environment[name] for name in names if environment.get(name)), None)
    return found.rstrip("/") if found else None


def region(environment: Mapping[str, str]) -> str:
    """In which region S3 requests are signed."""
    named = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return named or profile_region(environment) or "us-east-1"
