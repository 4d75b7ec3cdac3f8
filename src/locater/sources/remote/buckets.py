"""Objects in buckets (S3, Google Cloud Storage, Azure), by obstore. Credentials are those of the environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from locater.errors import LocaterError, first_line
from locater.sources.remote.address import Address
from locater.sources.remote.http_client import TRIES, Stopped

T = TypeVar("T")
READ_SECONDS, WHOLE_SECONDS = 30.0, 600.0  # without a single byte; for all of an answer
RETRY_SECONDS = 120.0  # for all tries of a request
KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_REGION; AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS; GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and its AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY; "
    "AZURE_SKIP_SIGNATURE=true for a public container",
}


@dataclass(frozen=True)
class ListedObject:
    """An object of a bucket as it is listed."""

    size: int
    digest: str  # its ETag


@dataclass(frozen=True)
class BucketListing:
    """What is directly under a prefix, by the last part of its name."""

    objects: dict[str, ListedObject]
    folders: list[str]


def listing(address: Address) -> BucketListing:
    """Objects and prefixes under an address."""
    import_obstore(address)
    import obstore

    prefix = f"{address.path}/" if address.path else None
    result = ask_bucket(address, lambda: obstore.list_with_delimiter(store_of(address), prefix))
    objects = {
        meta["path"].rpartition("/")[2]: ListedObject(int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))
        for meta in result["objects"]
    }
    return BucketListing(objects, [prefix.rstrip("/").rpartition("/")[2] for prefix in result["common_prefixes"]])


def store_of(address: Address) -> Any:
    """The bucket, with a client that gives up in time."""
    return _store(address.scheme, address.root)


@lru_cache(maxsize=16)  # a store keeps its connections
def _store(scheme: str, root: str) -> Any:
    from datetime import timedelta

    from obstore.store import from_url

    return from_url(
        f"{scheme}://{root}",
        client_options={
            "allow_http": True,  # where the user's own AWS_ENDPOINT says so
            "connect_timeout": timedelta(seconds=10),
            "read_timeout": timedelta(seconds=READ_SECONDS),
            "timeout": timedelta(seconds=WHOLE_SECONDS),
        },
        retry_config={"max_retries": TRIES - 1, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
    )


def import_obstore(address: Address) -> None:
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise LocaterError(
            f"{address}: reading from a bucket needs the obstore package: pip install 'locater[remote]'"
        ) from None


def ask_bucket(address: Address, question: Callable[[], T]) -> T:
    """The answer of a bucket. obstore has retried what may be retried; every failure is one line."""
    try:
        return question()
    except FileNotFoundError:
        raise LocaterError(f"{address}: no such object or bucket") from None
    except (LocaterError, Stopped):
        raise
    except Exception as error:  # obstore has a class for each kind of failure, and more with each version
        raise LocaterError(f"{address}: {_reason(address, error)}") from None


def _reason(address: Address, error: Exception) -> str:
    kind, text = type(error).__name__, _plain(str(error))
    if kind == "PreconditionError":
        return "changed while it was read: start again"
    if "416 Range Not Satisfiable" in text:
        return "has no bytes there: it is empty, or shorter than it was"
    if "NoSuchBucket" in text:
        return f"there is no bucket {address.root}"
    if "169.254.169.254" in text or "Account must be specified" in text:  # the last place that is asked for credentials
        return f"no credentials for the bucket were found: set {KEYS[address.scheme]}"
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or "credential" in text.lower():
        return f"the bucket refuses access: set {KEYS[address.scheme]} ({text[:120]})"
    return f"cannot be read ({text[:200] or first_line(error)})"


def _plain(text: str) -> str:
    """What an exception of obstore says before its debug output, in one line."""
    return " ".join(text.partition("Debug source:")[0].split())
