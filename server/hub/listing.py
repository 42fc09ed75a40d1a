"""What a hub says of a model's files, before any of them is fetched."""

from dataclasses import dataclass

from server.hub.source import Source


@dataclass(frozen=True)
class RemoteFile:
    """A file: its name as the hub gives it (not to be trusted), its size, where its bytes are, and known digests.

    `git_sha1`: Git's id of the content. `etag`: the server's own mark of a version, where no digest is known.
    """

    name: str
    size: int
    url: str
    sha256: str = ""
    git_sha1: str = ""
    etag: str = ""

    @property
    def version(self) -> str:
        """What identifies its content; "" where the source does not say."""
        return self.sha256 or self.git_sha1 or self.etag


@dataclass(frozen=True)
class Listing:
    """All files of a model. `revision`: the commit, which does not move; "" where the source has none."""

    source: Source
    revision: str
    files: tuple[RemoteFile, ...]

    def __str__(self) -> str:
        return str(self.source.at(self.revision) if self.revision else self.source)


def list_files(source: Source) -> Listing:
    """Asks the hub for the model's files. Raises HubError."""
    if source.kind == "hf":
        from server.hub import huggingface

        return huggingface.list_files(source)
    if source.kind == "modelscope":
        from server.hub import modelscope

        return modelscope.list_files(source)
    from server.hub import index_page

    return index_page.list_files(source)
