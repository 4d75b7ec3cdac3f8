"""Folders on the hub, in buckets and behind plain URLs."""

from __future__ import annotations

from functools import cached_property

from locater.sources.remote.address import Address
from locater.sources.remote.http_client import HttpClient
from locater.sources.remote.http_file import HttpFile, Location
from locater.sources.remote.hub import HubModel, hub_headers, hub_location, hub_model
from locater.sources.remote.object_file import ObjectFile
from locater.sources.remote.objects import Listing, listing
from locater.sources.remote.ranged import RemoteFolder
from locater.sources.remote.traffic import Traffic


class HubFolder:
    """A folder of a model on the hub, at the commit that its revision was at when it was asked for first."""

    def __init__(self, address: Address, traffic: Traffic) -> None:
        self.address = address
        self._client = HttpClient(traffic)

    @cached_property
    def model(self) -> HubModel:
        return hub_model(self.address)

    def names(self) -> list[str]:
        start = f"{self.address.path}/" if self.address.path else ""
        inside = (name.removeprefix(start) for name in self.model.files if name.startswith(start))
        return [name for name in inside if "/" not in name]

    def digests(self) -> dict[str, str]:
        files = {name: self.model.files[self.address.inside(name).path] for name in self.names()}
        return {name: f"{file.digest} {file.size}" for name, file in files.items()}

    def file(self, name: str) -> HttpFile:
        address = self.address.inside(name)

        def resolve() -> Location:
            found = hub_location(address, self.model.commit)
            return Location(found.location, found.etag, found.size)

        # what a commit holds does not change, and not every host behind the hub knows If-Match
        return HttpFile(self._client, str(address), resolve, hub_headers, conditional=False)


class BucketFolder:
    """A prefix of a bucket."""

    def __init__(self, address: Address, traffic: Traffic) -> None:
        self.address = address
        self._traffic = traffic

    @cached_property
    def _listing(self) -> Listing:
        return listing(self.address)

    def names(self) -> list[str]:
        return list(self._listing.objects)

    def folders(self) -> list[str]:
        return self._listing.folders

    def digests(self) -> dict[str, str]:
        return {name: f"{found.digest} {found.size}" for name, found in self._listing.objects.items()}

    def file(self, name: str) -> ObjectFile:
        return ObjectFile(self.address.inside(name), self._traffic)


class HttpFolder:
    """A folder of a plain server, which does not list what is in it."""

    def __init__(self, address: Address, traffic: Traffic) -> None:
        self.address = address
        self._client = HttpClient(traffic)

    def names(self) -> None:
        return None

    def digests(self) -> dict[str, str]:
        return {}

    def file(self, name: str) -> HttpFile:
        address = self.address.inside(name)
        return HttpFile(self._client, str(address), lambda: Location(address.url))


def folder_of(address: Address, traffic: Traffic | None = None) -> RemoteFolder:
    """The folder at an address; for a weights file, the folder that it is in."""
    folder, traffic = address.folder if address.names_a_file else address, traffic or Traffic()
    if folder.scheme == "hf":
        return HubFolder(folder, traffic)
    return HttpFolder(folder, traffic) if folder.scheme == "http" else BucketFolder(folder, traffic)
