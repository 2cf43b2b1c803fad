"""Files in S3, and in stores with its interface, by boto3. It finds credentials, region and endpoint."""

from __future__ import annotations

import threading
from typing import Any

from horovod_volo.core.errors import UserError
from horovod_volo.remote.ranges import FilePart, MissingError, RefusedError, TemporaryError

_TEMPORARY = ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "500", "502", "503", "504")
_CONNECTIONS = 64


class S3Source:
    """Objects `s3://BUCKET/KEY`."""

    def __init__(self) -> None:
        try:
            import boto3
            import botocore.config
            import botocore.exceptions
        except ModuleNotFoundError:
            raise UserError("s3:// needs boto3: pip install 'horovod_volo[s3]' on every host.") from None
        self._errors: Any = botocore.exceptions
        self._settings = botocore.config.Config(max_pool_connections=_CONNECTIONS)
        self._session, self._lock = boto3.session.Session(), threading.Lock()
        self._client: Any = None

    def read(self, url: str, start: int, length: int) -> FilePart:
        """Return up to `length` bytes from `start`; fewer only at the end of the file. Thread-safe."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        try:
            with self._lock:  # clients may be shared by threads, but not made by several at a time
                self._client = self._client or self._session.client("s3", config=self._settings)
            found = self._client.get_object(
                Bucket=bucket, Key=key, Range=f"bytes={start}-{start + length - 1}"
            )
            size = int(found["ContentRange"].rpartition("/")[2])
            return FilePart(found["Body"].read(), size, found.get("ETag", ""))
        except self._errors.ClientError as error:
            if error.response["Error"].get("Code") == "InvalidRange":  # nothing is at `start`
                return FilePart(b"", start, "")
            raise _as_error(url, error.response) from error
        except self._errors.NoCredentialsError as error:
            raise UserError(
                f"there are no credentials for {url}. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, on every host."
            ) from error
        except (self._errors.HTTPClientError, self._errors.ConnectionError, OSError) as error:
            raise TemporaryError(f"{type(error).__name__} {error}") from error
        except (self._errors.BotoCoreError, KeyError) as error:
            raise UserError(f"{url} cannot be read: {error}. Check the store and its settings.") from error

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None


def _as_error(url: str, response: Any) -> Exception:
    code, text = response["Error"].get("Code", ""), response["Error"].get("Message", "")
    if code in _TEMPORARY:
        return TemporaryError(f"{code} {text}")
    if code in ("NoSuchKey", "404", "NoSuchBucket"):
        return MissingError(f"the store has no {url} ({code}). Correct the address.")
    if code in ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"):
        kind = RefusedError if code in ("AccessDenied", "403") else UserError
        return kind(f"the store refuses {url}: {code} {text}. Check the credentials.")
    return UserError(f"{url} cannot be read: {code} {text}. Check the store and its settings.")
