"""What `zerostall doctor` says of object stores."""

from __future__ import annotations

import importlib.metadata

import pytest

from zerostall.cli import doctor


def test_it_says_which_uploads_go_on_and_which_begin_anew() -> None:
    found = doctor.object_stores()
    assert found.verdict == "yes" and importlib.metadata.version("obstore") in found.detail
    assert "goes on to s3://" in found.detail and "gs:// it begins anew" in found.detail


def test_without_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    found = doctor.object_stores()
    assert found.verdict == "limited" and "zerostall[remote]" in found.detail
