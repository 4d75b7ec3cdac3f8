"""Names of checkpoints that are elsewhere: `hf://org/model@revision/folder`, buckets, and plain URLs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

from locater.errors import LocaterError

Scheme = Literal["hf", "s3", "gs", "az", "http"]
BUCKETS = ("s3", "gs", "az")
# a Path of such a name has one slash where the name had two
NAMED = re.compile(r"(?P<scheme>hf|s3|gs|az|https?):/{1,2}(?P<rest>.*)", re.DOTALL)
HUB_REST = re.compile(
    r"(?P<repo>[^/@]+(?:/[^/@]+)?)(?:@(?P<revision>refs/(?:pr|convert)/[^/@]+|[^/@]*))?(?:/(?P<path>.*))?"
)
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".index.json")
WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Address:
    """Where a checkpoint is. `path` is a folder or a weights file, without slashes around it."""

    scheme: Scheme
    root: str  # org/model on the hub, the bucket (az: the container), or https://host
    path: str = ""
    revision: str | None = None  # on the hub: a branch, a tag or a commit; None is its default branch
    query: str = ""  # of a URL: kept for requests (it may be a signature), never shown
    plain: bool = False  # on the hub: written as org/model, as a folder could be

    def __str__(self) -> str:
        """The name as users write it; what a URL has after `?` or before `@` is left out, because it may be secret."""
        if self.scheme == "http":
            root = re.sub(r"//[^/]*@", "//", self.root)
            return f"{root}/{self.path}" if self.path else root
        if self.scheme in BUCKETS:
            root = self.root.rpartition("@")[2]
            return f"{self.scheme}://{root}" + (f"/{self.path}" if self.path else "")
        if self.plain:
            return f"{self.root}/{self.path}" if self.path else self.root
        revision = "" if self.revision is None else f"@{_quoted(self.revision)}"
        return f"{self.scheme}://{self.root}{revision}" + (f"/{self.path}" if self.path else "")

    @property
    def names_a_file(self) -> bool:
        return self.path.endswith(WEIGHTS)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> Address:
        """The folder that a file is in."""
        return replace(self, path=self.path.rpartition("/")[0])

    def inside(self, name: str) -> Address:
        """The address of a file in this folder."""
        return replace(self, path=f"{self.path}/{name}" if self.path else name)

    @property
    def url(self) -> str:
        """For requests over http."""
        return f"{self.root}/{quote(self.path, safe='/%')}" + (f"?{self.query}" if self.query else "")


def remote_address(source: str) -> Address | None:
    """The address that `source` is, or None for other names: those of this machine, and plain hub ids.

    >>> remote_address("hf://org/model@step1000")
    Address(scheme='hf', root='org/model', path='', revision='step1000', query='', plain=False)
    >>> str(remote_address("s3://bucket/run/step-10/")), remote_address("org/model")
    ('s3://bucket/run/step-10', None)
    """
    match = NAMED.fullmatch(source)
    if match is None:
        return None
    scheme, rest = match["scheme"], match["rest"]
    if scheme == "hf":
        return _on_the_hub(source, rest)
    if scheme in ("http", "https"):
        try:
            parts = urlsplit(f"{scheme}://{rest}")
            host, _ = parts.hostname, parts.port
        except ValueError:  # half of the brackets of an IPv6 address; a password with a slash, which looks like a port
            raise LocaterError(f"{scheme}://...: not a URL: write https://host/path") from None
        if not host:
            raise LocaterError(f"{scheme}://...: no host in it: write https://host/path")
        return Address("http", f"{scheme}://{parts.netloc}", parts.path.strip("/"), query=parts.query)
    bucket, _, path = rest.strip("/").partition("/")
    if not bucket or "//" in f"/{path}":
        form = f"{scheme}://{'container' if scheme == 'az' else 'bucket'}/path"
        raise LocaterError(f"{source}: not the name of an object: write {form}")
    return Address(scheme, bucket, path)  # type: ignore[arg-type]


def hub_address(name: str) -> Address:
    """The address of a plain hub id. A name that cannot be one is refused at once: it is of a file that is missing."""
    parts = name.split("/")
    if "://" in name:
        raise LocaterError(f"{name}: addresses begin with hf://, s3://, gs://, az:// or https://")
    if len(parts) > 2 or not all(parts) or name.startswith((".", "~")) or name.endswith(WEIGHTS[:5]):
        raise LocaterError(f"{name}: no such file or folder")
    return Address("hf", name, plain=True)


def _on_the_hub(source: str, rest: str) -> Address:
    match = HUB_REST.fullmatch(rest.strip("/"))
    if match is None or match["revision"] == "" or "@" in (match["path"] or ""):
        raise LocaterError(f"{source}: not the name of a model on the hub: write hf://org/model@revision")
    revision = None if match["revision"] is None else unquote(match["revision"])
    return Address("hf", match["repo"], (match["path"] or "").strip("/"), revision)


def _quoted(revision: str) -> str:
    """A revision without slashes, but for those of refs/pr/1, which the hub's own names have too."""
    return revision if re.fullmatch("refs/(pr|convert)/[^/]+", revision) else revision.replace("/", "%2F")
