"""Where the keys of S3-compatible stores come from: the environment, botocore's chain, the shared file.

Read anew each time they are asked for, so that renewed ones are found. Never logged; `Keys` has a mute `repr`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.core.signing import Keys
from zerostall.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ELSEWHERE = (
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)


def keys_of(environment: Mapping[str, str]) -> Keys | None:
    """The keys that this environment means; None where they come from the machine itself (web identity, container,
    instance), which obstore asks.

    Raises:
        StorageError: a profile is named that is not there, or that cannot be read.
    """
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        return Keys(
            environment["AWS_ACCESS_KEY_ID"],
            environment["AWS_SECRET_ACCESS_KEY"],
            environment.get("AWS_SESSION_TOKEN") or environment.get("AWS_TOKEN") or None,
        )
    named = environment.get("AWS_PROFILE")
    if not named and any(environment.get(name) for name in _ELSEWHERE):
        return None
    section = _section(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials", named or "default")
    if section.get("aws_access_key_id") and section.get("aws_secret_access_key"):
        token = section.get("aws_session_token")
        return Keys(section["aws_access_key_id"], section["aws_secret_access_key"], token)
    if named:
        return _of_botocore(named)
    return None


def profile_region(environment: Mapping[str, str]) -> str | None:
    """The region that the profile names, if any."""
    profile = environment.get("AWS_PROFILE") or "default"
    section = "default" if profile == "default" else f"profile {profile}"
    return _section(environment, "AWS_CONFIG_FILE", "config", section).get("region")


def _section(environment: Mapping[str, str], variable: str, name: str, section: str) -> Mapping[str, str]:
    chosen = environment.get(variable)
    path = Path(chosen) if chosen else Path(environment.get("HOME") or Path.home()) / ".aws" / name
    import configparser  # few are asked for a profile

    parser = configparser.RawConfigParser(default_section="\0")
    try:
        parser.read_string(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error):
        # What a parser says of a broken line may hold a part of a key.
        raise StorageError(f"{path} cannot be read as a file of credentials or settings") from None
    return dict(parser[section]) if parser.has_section(section) else {}


def _of_botocore(profile: str) -> Keys:
    """Keys of a profile that signs on, assumes a role or runs a program: botocore knows how, if it is there."""
    if importlib.util.find_spec("botocore") is None:
        raise StorageError(
            f"the profile {profile} holds no keys", hint="profiles with roles or single sign-on need botocore"
        )
    import botocore.exceptions  # pyright: ignore[reportMissingImports]
    import botocore.session  # pyright: ignore[reportMissingImports]

    try:
        found = botocore.session.Session(profile=profile).get_credentials()
        frozen = found.get_frozen_credentials() if found is not None else None
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise StorageError(f"the profile {profile} gave no keys: {type(error).__name__}") from None
    if frozen is None or not frozen.access_key or not frozen.secret_key:
        raise StorageError(f"the profile {profile} gave no keys", hint="sign on again")
    return Keys(frozen.access_key, frozen.secret_key, frozen.token)
