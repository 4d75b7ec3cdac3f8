"""Models on the Hugging Face hub: their files and revisions, by huggingface_hub, which also finds the user's token.

The library is asked for names and for one HEAD per file; ranges are read from the address that it returns. What can go
wrong there is said in one line, with the hub's own reason where it gives one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from locater.errors import LocaterError, first_line
from locater.sources.remote.address import Address
from locater.sources.remote.http_client import TEMPORARY, Temporary, retry, retry_after
from locater.sources.remote.http_file import may_lead

T = TypeVar("T")
_NO_FILE = "no such file or folder, and "  # of a name that may be of a folder or of a model on the hub
ANSWER_SECONDS = 30.0  # that the hub has for an answer
LOG_IN = "log in (hf auth login, or HF_TOKEN)"


class UnreachableError(LocaterError):
    """The hub cannot be asked."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository as the hub lists it."""

    size: int
    digest: str  # sha256 of a large file, the blob of a small one


@dataclass(frozen=True)
class HubModel:
    """The files of a model at one commit."""

    commit: str
    files: dict[str, HubFile]


def hub_model(address: Address) -> HubModel:
    """The commit of a revision, and all files there: one request."""
    settings: dict[str, Any] = {"revision": address.revision, "files_metadata": True, "timeout": ANSWER_SECONDS}

    def model() -> HubModel:
        info = _api(address).model_info(address.root, **settings)
        files = {}
        for sibling in info.siblings or ():
            lfs = sibling.lfs
            digest = lfs.sha256 if lfs is not None else sibling.blob_id
            files[str(sibling.rfilename)] = HubFile(int(sibling.size or 0), str(digest))
        return HubModel(str(info.sha), files)

    return ask_hub(address, model)


def hub_revisions(address: Address) -> list[str]:
    """Names of all branches and tags."""
    endpoint = _api(address).endpoint

    def refs() -> list[str]:  # list_repo_refs waits for ever where the hub does not answer
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = f"{endpoint}/api/models/{address.root}/refs"
        response = get_session().get(url, headers=build_hf_headers(), timeout=ANSWER_SECONDS)
        hf_raise_for_status(response)
        document = response.json()
        return list(dict.fromkeys(str(ref["name"]) for kind in ("branches", "tags") for ref in document.get(kind, ())))

    return ask_hub(address, refs)


def hub_location(address: Address, commit: str) -> Any:
    """What one HEAD says of a file: `location`, `size`, `etag`."""
    from huggingface_hub import hf_hub_url

    def head() -> Any:
        api = _api(address)
        url = hf_hub_url(address.root, address.path, revision=commit, endpoint=api.endpoint)
        found = api.get_hf_file_metadata(url=url)
        if not may_lead(url, found.location):
            raise LocaterError(f"{address}: the hub redirects to no https address, which is not followed")
        return found

    return ask_hub(address, head, met=True)


def hub_headers(url: str) -> dict[str, str]:
    """The user's token, for addresses of the hub itself and for no other host."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    return dict(build_hf_headers()) if url.startswith(f"{constants.ENDPOINT}/") else {}


def ask_hub(address: Address, question: Callable[[], T], met: bool = False) -> T:
    """The hub's answer. It is asked again where it is busy, and after a lost connection if it was `met` before; every
    other failure is one line.
    """
    return retry(str(address), partial(_once, address, question, met))


def _once(address: Address, question: Callable[[], T], met: bool) -> T:
    try:
        return question()
    except LocaterError:
        raise
    except Exception as error:  # the hub's client raises a dozen types: missing, gated, offline, ...
        response: Any = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if status in TEMPORARY:
            raise Temporary(f"the hub answers {status}", retry_after(response.headers.get("Retry-After"))) from None
        if met and is_network(error):
            raise Temporary("the hub cannot be reached") from None
        _refuse(address, error, status)


def _refuse(address: Address, error: Exception, status: int | None) -> NoReturn:
    """One line for an exception of huggingface_hub."""
    kind = type(error).__name__
    if kind == "OfflineModeIsEnabled":
        reason = "the hub did not return it: HF_HUB_OFFLINE is set, so only models in its cache are read"
    elif is_network(error):
        reason = "the hub cannot be reached (is there a network?): give a folder or a file of this machine"
    elif kind == "GatedRepoError" or status == 403:
        reason = f"the hub refuses access: {_hub_words(error)} Accept the terms on its page, and {LOG_IN}"
    elif kind == "RevisionNotFoundError":
        reason = f"there is no revision {address.revision or 'main'!r} (a branch, a tag or a commit) of {address.root}"
    elif kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        reason = "no such file there"
    elif kind == "RepositoryNotFoundError" or status == 401:
        reason = f"no such model on the hub, or it is private: correct the name, or {LOG_IN}"
    elif status is not None:
        reason = f"the hub answered {status}: {_hub_words(error)}"
    else:
        reason = f"the hub did not return it: {first_line(error)}"
    unasked = kind == "OfflineModeIsEnabled" or is_network(error)
    raise (UnreachableError if unasked else LocaterError)(
        f"{address}: {_NO_FILE if address.plain else ''}{reason}"
    ) from None


def _hub_words(error: Exception) -> str:
    """What the hub itself says of an error, in one line."""
    said = getattr(error, "server_message", None)
    response = getattr(error, "response", None)
    said = said or (response.headers.get("X-Error-Message") if response is not None else None) or first_line(error)
    text = " ".join(str(said).split())
    return text if text.endswith(".") else f"{text}."


def is_network(error: BaseException | None) -> bool:
    """Whether an exception was caused by a failed connection."""
    while error is not None and type(error).__name__ != "OfflineModeIsEnabled":  # that one explains itself
        if isinstance(error, socket.gaierror | ConnectionError | TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _api(address: Address) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise LocaterError(
            f"{address}: {_NO_FILE if address.plain else ''}reading from the hub needs the huggingface_hub package: "
            "pip install 'locater[remote]'"
        ) from None
    return HfApi()
