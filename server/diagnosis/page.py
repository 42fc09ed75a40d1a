"""docs/troubleshooting.md, made from the catalogue. `python -m server.diagnosis.page` writes it again."""

from collections.abc import Sequence
from pathlib import Path

from server.diagnosis.catalogue import DOCS, EXIT_CODES, Entry, load_catalogue

PAGE = Path(__file__).parents[2] / DOCS

_HEAD = """\
# Troubleshooting

When the engine ends, voltserve compares its last lines and the way it ended with a catalogue of known failures, and
says which it is: in the log, in `/health` under `diagnosis`, and in the exit code of `voltserve serve` if that ends
while the engine is down. `voltserve doctor` finds many of these causes before a start, `voltserve plan DIR` those that
are a matter of memory. The first entry below that matches is the diagnosis.

A start that fails is tried again after 1, 2, 4 … 60 s, five times at most. Where another start would end the same, it
is not: `voltserve serve` then ends at once with the exit code, or goes on while another engine of `--engines` may work.
An engine that has worked is always started again.

Compose's `restart: unless-stopped` starts the container again whatever the exit code, with up to a minute between two
starts. `docker compose ps` then shows `Restarting (65)`, the container's log the diagnosis; `docker compose stop` ends
it. In a systemd unit, `RestartPreventExitStatus=2 65 78` keeps such a failure from being repeated.

Once an engine serves, its log may repeat what clients wrote. So `/health` and the diagnosis of a later failure rest on
how its processes ended and on what they tell of themselves apart from the log. An exception's message stays in the log.

What is known to fail before anything starts ends `serve`, `explain`, `plan` and `verify` alike with one message and one
exit code. The code is 65 for a model directory that is damaged or cannot be served on these devices. It is 2 for a
flag, the cards, or the memory. Another start ends the same way until what the message names is changed.

This page is made from `configs/errors.yaml` by `python -m server.diagnosis.page`; change that file, not this one.

| exit code | kind |
|---|---|
"""
# Of commands, not of engines.
_OTHER_CODES = {
    2: "refused before the start: settings, cards, memory",
    69: "a hub, or the way to it ([models.md](models.md#when-a-fetch-fails))",
}


def render(entries: Sequence[Entry]) -> str:
    """The page's text."""
    codes = {**_OTHER_CODES, **{code: kind for kind, code in EXIT_CODES.items()}}
    rows = "".join(f"| {code} | {kind} |\n" for code, kind in sorted(codes.items()))
    return _HEAD + rows + "".join(_section(entry) for entry in entries)


def _section(entry: Entry) -> str:
    lines = [f'\n## <a id="{entry.id}"></a>{entry.id}: {entry.title}\n']
    seen = [f"- a line with `{pattern}`" for pattern in entry.lines]
    if entry.exit:
        seen.append(f"- an engine that ended so: `{entry.exit}`")
    if entry.also:
        seen.append(f"- and besides, a line with `{entry.also}`")
    lines.append(f"Kind: {entry.kind}; {'tried again' if entry.retried else 'not tried again'}.\n")
    lines += ["Seen as:\n", *seen, f"\nCause: {entry.cause}\n", "Remedy:\n", *(f"- {step}" for step in entry.remedy)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(load_catalogue()), encoding="utf-8")
